//! Which prefixes KV stores take from the workers that computed them.
//!
//! When a request has ended, its worker holds the KV of prompt and answer. A store takes what no store has of it, piece by piece, as long as
//! that was asked for often enough (TinyLFU's admission by a [`Sketch`]: Einziger, Friedman and Manes, ACM Transactions on Storage 13(4), 2017).
//! Other workers then fetch it from the store ([`crate::placement`]), also when the worker that computed it is gone.

use std::time::Instant;

use baton_kv_cache::{BlockName, Sketch};
use baton_membership::Role;
use baton_types::{WorkerId, mix};

use super::Fleet;
use super::placing::Known;
use super::roster::Worker;
use crate::kv_index::Holder;

/// Uses of blocks after which their counts are halved. This takes four megabytes at most.
pub(super) const SAMPLE: u64 = 1 << 20;

/// How many tokens a KV store, or a worker ahead of need, takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct KeepSizes {
    /// Fewest tokens that it takes: less is not fetched from it either.
    pub least: u32,
    /// Tokens that move at a time, whole blocks: a worker writes one prefix after the other, and requests may wait for the next.
    pub piece: u32,
}

impl Default for KeepSizes {
    fn default() -> KeepSizes {
        KeepSizes { least: 128, piece: 2048 }
    }
}

/// What a store, or a worker ahead of need, takes from a worker, in pieces, each as a whole or not at all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// Who takes it.
    pub to: WorkerId,
    /// The worker that holds most.
    pub from: WorkerId,
    /// Leading tokens that it has.
    pub has: u32,
    /// Leading tokens that it will have, whole blocks.
    pub tokens: u32,
    /// Tokens that move at a time.
    pub piece: u32,
}

impl Keep {
    /// Most uses that are counted of a block.
    pub const MOST_USES: u8 = Sketch::MOST;

    /// After how many leading tokens each piece that moves ends, in order.
    pub fn pieces(&self) -> impl Iterator<Item = u32> + use<> {
        let Keep { has, tokens, piece, .. } = *self;
        let ends = (1..).map(move |count: u32| has.saturating_add(count.saturating_mul(piece.max(1))));
        ends.take_while(move |end| *end < tokens).chain([tokens])
    }
}

/// What is counted to know what is worth keeping.
#[derive(Clone, Debug)]
pub(super) struct Keeping {
    /// How often a block must have been asked for.
    min_uses: u8,
    /// Counts blocks, where one use is not enough.
    sketch: Option<Sketch>,
    pub sizes: KeepSizes,
}

impl Keeping {
    /// Blocks are kept from this use on, at most [`Keep::MOST_USES`].
    pub fn new(min_uses: u8) -> Keeping {
        Keeping { min_uses, sketch: (min_uses > 1).then(|| Sketch::new(SAMPLE)), sizes: KeepSizes::default() }
    }

    /// Counts a use of these blocks.
    fn used(&mut self, names: &[BlockName]) {
        self.sketch.iter_mut().for_each(|sketch| names.iter().for_each(|name| sketch.add(*name)));
    }

    /// Leading blocks that were asked for often enough.
    fn worth(&self, names: &[BlockName]) -> u32 {
        let often = |name: &&BlockName| self.sketch.as_ref().is_none_or(|sketch| sketch.count(**name) >= self.min_uses);
        names.iter().take_while(often).count() as u32
    }
}

/// How many leading blocks this worker holds.
pub(super) fn holds(by: &[Holder], worker: WorkerId) -> u32 {
    by.iter().find(|holder| holder.worker == worker).map_or(0, |holder| holder.blocks)
}

impl Fleet {
    /// KV stores keep blocks from this use on, at most [`Keep::MOST_USES`]; 1: all.
    pub fn keep_from(&mut self, min_uses: u8) {
        self.keeping = Keeping { sizes: self.keeping.sizes, ..Keeping::new(min_uses) };
    }

    /// KV stores take so many tokens.
    pub fn keep_sizes(&mut self, sizes: KeepSizes) {
        self.keeping.sizes = sizes;
    }

    /// Whether there are KV stores.
    pub fn has_stores(&self) -> bool {
        self.roster.serving().any(|worker| worker.role == Role::KvStore)
    }

    /// Counts a use of the blocks of a prompt and its answer.
    pub fn used(&mut self, names: &[BlockName]) {
        self.keeping.used(names);
    }

    /// What a KV store should take of a prompt and its answer with these blocks. `known`: who says that it holds how much of it.
    pub fn keep(&self, names: &[BlockName], known: Known<'_>, now: Instant) -> Option<Keep> {
        let size = self.block_size.max(1);
        let there = |worker: &&Worker| worker.moves(now);
        let has = |store: &Worker| holds(known.pool, store.id).max(holds(known.store, store.id));
        let worth = self.keeping.worth(names);
        let last = names.get((worth as usize).checked_sub(1)?)?.short();
        // The store that has more than half; or one that depends on what comes last, so that stores share what comes.
        let store_for = |exchanges: u64| {
            let same = |worker: &&Worker| worker.role == Role::KvStore && worker.exchanges == exchanges;
            let stores = || self.roster.serving().filter(same).filter(there);
            let most = stores().filter(|store| has(store) > worth / 2).max_by_key(|store| (has(store), store.id));
            most.or_else(|| stores().max_by_key(|store| mix(store.id.0 ^ last)))
        };
        // They come with most first.
        let (from, blocks, store) = known.pool.iter().find_map(|holder| {
            let computes = |worker: &&Worker| worker.role != Role::KvStore;
            let worker = self.roster.get(holder.worker).filter(there).filter(computes)?;
            Some((worker.id, holder.blocks.min(worth), store_for(worker.exchanges)?))
        })?;
        let has = has(store);
        let lacks = blocks.saturating_sub(has).saturating_mul(size);
        let [has, tokens] = [has, blocks].map(|blocks| blocks.saturating_mul(size));
        let KeepSizes { least, piece } = self.keeping.sizes;
        (lacks >= least).then_some(Keep { to: store.id, from, has, tokens, piece })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use baton_membership::{Member, View};

    use super::*;
    use crate::placement::RoundRobin;

    const STORE: WorkerId = WorkerId(7);
    const WORKER: WorkerId = WorkerId(1);
    const PIECE: u32 = 2048;

    fn member(id: u64, role: Role) -> Member {
        let mut member = baton_membership::testing::member(id);
        (member.role, member.model, member.block_size, member.exchanges) = (role, "m".to_owned(), 16, 9);
        member
    }

    fn fleet(members: &[Member]) -> Fleet {
        let mut fleet = Fleet::new("m", Box::<RoundRobin>::default(), 0);
        fleet.update(Arc::new(View { members: members.to_vec(), ..View::default() }));
        fleet
    }

    fn two() -> [Member; 2] {
        [member(1, Role::Decode), member(7, Role::KvStore)]
    }

    fn names(from: u64, count: u64) -> Vec<BlockName> {
        (from..from + count).map(|name| BlockName(u128::from(mix(name)))).collect()
    }

    fn holder(worker: WorkerId, blocks: u32) -> Holder {
        Holder { worker, blocks }
    }

    fn keep(fleet: &Fleet, names: &[BlockName], pool: &[Holder], store: &[Holder]) -> Option<Keep> {
        fleet.keep(names, Known { pool, store }, Instant::now())
    }

    #[test]
    fn a_store_takes_what_it_lacks_from_the_worker_that_holds_most() {
        let (fleet, names) = (fleet(&two()), names(0, 100));
        assert!(fleet.has_stores());
        let whole = Keep { to: STORE, from: WORKER, has: 0, tokens: 1600, piece: PIECE };
        assert_eq!(keep(&fleet, &names, &[holder(WORKER, 100)], &[]), Some(whole));
        let pool = [holder(WORKER, 100), holder(STORE, 60)];
        assert_eq!(keep(&fleet, &names, &pool, &[]), Some(Keep { has: 960, ..whole }));
        let below = [holder(STORE, 80)];
        assert_eq!(keep(&fleet, &names, &pool, &below), Some(Keep { has: 1280, ..whole }), "in its tiers");
        assert_eq!(keep(&fleet, &names, &[holder(STORE, 100), holder(WORKER, 100)], &[]), None, "it has all");
        assert_eq!(
            keep(&fleet, &names, &[holder(WORKER, 100), holder(STORE, 93)], &[]),
            None,
            "112 tokens are not worth it"
        );
        assert_eq!(keep(&fleet, &names, &[], &[holder(WORKER, 100)]), None, "nobody has it in a pool");
        assert_eq!(keep(&fleet, &[], &[], &[]), None);
    }

    #[test]
    fn sizes_are_as_they_are_set_also_with_another_least_use() {
        let (mut fleet, names) = (fleet(&two()), names(0, 4));
        assert_eq!(keep(&fleet, &names, &[holder(WORKER, 4)], &[]), None);
        fleet.keep_sizes(KeepSizes { least: 64, piece: 32 });
        fleet.keep_from(1);
        let kept = keep(&fleet, &names, &[holder(WORKER, 4)], &[]).unwrap();
        assert_eq!(kept.pieces().collect::<Vec<_>>(), [32, 64]);
        assert_eq!(keep(&fleet, &names, &[holder(WORKER, 3)], &[]), None);
    }

    #[test]
    fn pieces_end_where_the_next_begins_and_the_last_at_the_end() {
        let of = |has, tokens, piece| Keep { to: STORE, from: WORKER, has, tokens, piece }.pieces().collect::<Vec<_>>();
        let pieces = |has, tokens| of(has, tokens, PIECE);
        assert_eq!(pieces(0, 1600), [1600]);
        assert_eq!(pieces(160, 2 * PIECE + 160), [PIECE + 160, 2 * PIECE + 160]);
        assert_eq!(pieces(0, PIECE + 16), [PIECE, PIECE + 16]);
        assert_eq!(pieces(0, u32::MAX).last(), Some(&u32::MAX));
        assert_eq!([of(0, 3, 2), of(0, 2, 0)], [[2, 3], [1, 2]]);
    }

    #[test]
    fn only_who_stays_exchanges_the_same_kv_and_serves_the_model_takes_part() {
        let kept = |change: fn(&mut [Member; 2])| {
            let mut members = two();
            change(&mut members);
            keep(&fleet(&members), &names(0, 100), &[holder(WORKER, 100)], &[]).is_some()
        };
        assert!(kept(|_| ()));
        for (worker, store) in [(true, false), (false, true)] {
            let which = move |change: fn(&mut Member)| {
                let mut members = two();
                members.iter_mut().zip([worker, store]).filter(|(_, is)| *is).for_each(|(member, _)| change(member));
                keep(&fleet(&members), &names(0, 100), &[holder(WORKER, 100)], &[])
            };
            assert_eq!(which(|member| member.draining = true), None);
            assert_eq!(which(|member| member.exchanges = 0), None);
            assert_eq!(which(|member| member.exchanges = 8), None, "I1: of another KV type");
            assert_eq!(which(|member| member.model = "other".to_owned()), None);
        }
        let stores = fleet(&[member(7, Role::KvStore), member(8, Role::KvStore)]);
        let given = (0..20).any(|at| keep(&stores, &names(1000 * at, 100), &[holder(STORE, 50)], &[]).is_some());
        assert!(!given, "stores give each other nothing");
        assert!(!fleet(&[member(1, Role::Decode)]).has_stores());
        let neither = [Role::Decode, Role::KvStore]
            .map(|role| Member { exchanges: 0, ..member(if role == Role::Decode { 1 } else { 7 }, role) });
        assert_eq!(keep(&fleet(&neither), &names(0, 100), &[holder(WORKER, 100)], &[]), None, "they exchange nothing");
        let other = |id, role| Member { exchanges: 8, ..member(id, role) };
        let two_kinds = fleet(&[member(1, Role::Decode), other(2, Role::Prefill), other(8, Role::KvStore)]);
        let pool = [holder(WORKER, 100), holder(WorkerId(2), 90)];
        let kept = keep(&two_kinds, &names(0, 100), &pool, &[]);
        assert_eq!(
            kept,
            Some(Keep { to: WorkerId(8), from: WorkerId(2), has: 0, tokens: 1440, piece: PIECE }),
            "of the kind that it keeps"
        );
    }

    #[test]
    fn a_store_that_is_apart_is_left_alone_for_a_while() {
        let (mut fleet, names, now) = (fleet(&two()), names(0, 100), Instant::now());
        fleet.not_fetched(STORE, now);
        let keep = |at| fleet.keep(&names, Known::from(&[holder(WORKER, 100)]), at).is_some();
        assert_eq!([keep(now), keep(now + Duration::from_secs(3))], [false, true]);
        let again = now + Duration::from_secs(60);
        for (fetched, kept) in [(false, false), (true, true)] {
            let mut fleet = super::tests::fleet(&two());
            fleet.not_fetched(STORE, now);
            if fetched {
                fleet.fetched(STORE);
            }
            fleet.not_fetched(STORE, again);
            let soon = again + Duration::from_secs(3);
            let keep = fleet.keep(&names, Known::from(&[holder(WORKER, 100)]), soon);
            assert_eq!(keep.is_some(), kept, "twice as long after the second, unless something came between");
        }
        let mut fleet = super::tests::fleet(&two());
        fleet.silent(WORKER, now);
        assert!(fleet.keep(&names, Known::from(&[holder(WORKER, 100)]), now).is_some(), "its requests will notice");
        fleet.silent(STORE, now);
        assert!(fleet.keep(&names, Known::from(&[holder(WORKER, 100)]), now).is_none());
    }

    #[test]
    fn what_begins_alike_stays_together_and_the_rest_is_shared_out() {
        let mut members = two().to_vec();
        members.push(member(8, Role::KvStore));
        let fleet = fleet(&members);
        let to = |names: &[BlockName], held: &[Holder]| {
            let pool = [&[holder(WORKER, 100)], held].concat();
            keep(&fleet, names, &pool, &[]).unwrap().to
        };
        let other = WorkerId(8);
        let first = (0..100).filter(|at| to(&names(1000 * at, 100), &[]) == STORE).count();
        assert!((30..70).contains(&first), "{first} of 100");
        for at in 0..20 {
            assert_eq!(to(&names(1000 * at, 100), &[holder(other, 51)]), other, "it has most");
        }
        let little = (0..100).filter(|at| to(&names(1000 * at, 100), &[holder(other, 50)]) == STORE).count();
        assert_eq!(little, first, "half of it draws nothing");
    }

    #[test]
    fn what_was_asked_for_once_is_not_kept_where_twice_is_wanted() {
        let (mut fleet, names) = (fleet(&two()), names(0, 100));
        fleet.keep_from(2);
        fleet.used(&names);
        let kept = |fleet: &Fleet| keep(fleet, &names, &[holder(WORKER, 100)], &[]).map(|keep| keep.tokens);
        assert_eq!(kept(&fleet), None);
        fleet.used(&names[..40]);
        assert_eq!(kept(&fleet), Some(640), "as far as it was asked for again");
    }
}
