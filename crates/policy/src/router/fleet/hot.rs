//! Prefixes that many prompts begin with, and the idle workers that take a copy before a prompt needs it.
//!
//! Uses are counted as for KV stores ([`super::keeping`]), and halved every minute, so that a count says how busy a prefix is now. When
//! a request with a hot prefix has ended, an idle worker that lacks it takes it from one that holds it: when load grows, prompts find it there.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use baton_kv_cache::{BlockName, Sketch};
use baton_latency::Backlog;
use baton_membership::Role;
use baton_types::{WorkerId, mix};

use super::Fleet;
use super::keeping::{Keep, KeepSizes, SAMPLE, holds};
use super::roster::Worker;
use crate::kv_index::Holder;

/// Counts are halved so often.
const HALVED_EVERY: Duration = Duration::from_secs(60);
/// A worker takes its share in so long at most.
const SPAN: Duration = Duration::from_secs(600);

/// What is counted to know which prefixes are hot, and what workers were given of them.
#[derive(Debug)]
pub(super) struct Hot {
    /// A prefix with so many uses is hot.
    from: u8,
    /// Share of a worker's pool that it is given in [`SPAN`] at most; 0: nothing is given or counted.
    share: f64,
    sketch: Option<Sketch>,
    halved: Option<Instant>,
    /// When each worker was given how many blocks.
    given: HashMap<WorkerId, VecDeque<(Instant, u32)>>,
}

impl Hot {
    /// A prefix is hot from this use on. Each worker is given at most this percentage of its pool.
    pub fn new(from: u8, percent: u32) -> Hot {
        let share = f64::from(percent.min(100)) / 100.0;
        Hot { from, share, sketch: None, halved: None, given: HashMap::new() }
    }

    fn used(&mut self, names: &[BlockName], now: Instant) {
        let sketch = self.sketch.get_or_insert_with(|| Sketch::new(SAMPLE));
        let since = *self.halved.get_or_insert(now);
        if now.saturating_duration_since(since) >= HALVED_EVERY {
            sketch.halve();
            self.halved = Some(now);
        }
        names.iter().for_each(|name| sketch.add(*name));
    }

    /// Leading blocks that are hot.
    fn leading(&self, names: &[BlockName]) -> u32 {
        let Some(sketch) = &self.sketch else { return 0 };
        names.iter().take_while(|name| sketch.count(**name) >= self.from).count() as u32
    }

    /// Blocks that a worker with so many was given lately, and may still be given.
    fn room(&self, worker: WorkerId, blocks: u32, now: Instant) -> (u32, u32) {
        let lately = |(at, _): &&(Instant, u32)| now.saturating_duration_since(*at) < SPAN;
        let given = self.given.get(&worker).into_iter().flatten().filter(lately).map(|(_, blocks)| blocks).sum();
        (given, ((self.share * f64::from(blocks)) as u32).saturating_sub(given))
    }

    fn give(&mut self, worker: WorkerId, blocks: u32, now: Instant) {
        let given = self.given.entry(worker).or_default();
        given.retain(|(at, _)| now.saturating_duration_since(*at) < SPAN);
        given.push_back((now, blocks));
    }

    /// Forgets a worker that has left.
    pub fn leave(&mut self, worker: WorkerId) {
        self.given.remove(&worker);
    }
}

impl Fleet {
    /// Idle workers take copies of prefixes that were used `from` times in a minute, each at most this percentage of its pool in ten minutes; 0: none
    /// does.
    pub fn copy_hot(&mut self, from: u8, percent: u32) {
        self.hot = Hot::new(from, percent);
    }

    /// Whether hot prefixes are copied: there are two workers at least that compute prompts and exchange prefixes.
    pub fn copies_hot(&self) -> bool {
        let role = self.computing();
        let two = self.roster.serving().filter(|worker| worker.role == role && worker.exchanges != 0).take(2).count();
        self.hot.share > 0.0 && two == 2
    }

    /// The role of the workers that compute most prompts.
    pub(super) fn computing(&self) -> Role {
        let prefill = self.roster.serving().any(|worker| worker.role == Role::Prefill);
        if prefill { Role::Prefill } else { Role::Decode }
    }

    /// Counts a use of the blocks of a prompt, to learn what is hot.
    pub fn used_hot(&mut self, names: &[BlockName], now: Instant) {
        self.hot.used(names, now);
    }

    /// A hot prefix of a prompt with these blocks that an idle worker should take, if there is one; it counts as given. `pool`: who says that it
    /// holds how much of it, most first.
    pub fn hot_copy(&mut self, names: &[BlockName], pool: &[Holder], now: Instant) -> Option<Keep> {
        let (size, role) = (self.block_size.max(1), self.computing());
        let hot = self.hot.leading(names);
        let KeepSizes { least, piece } = self.keeping.sizes;
        let least = least.div_ceil(size);
        let last = names.get((hot as usize).checked_sub(1)?)?.short();
        let (from, blocks) = pool.iter().find_map(|holder| {
            let worker = self.roster.get(holder.worker).filter(|worker| worker.moves(now))?;
            Some((worker, holder.blocks.min(hot)))
        })?;
        let pools: HashMap<WorkerId, u32> = self.view.members.iter().map(|m| (m.id, m.blocks)).collect();
        let lacks = |worker: &Worker| blocks.saturating_sub(holds(pool, worker.id));
        let takes = |worker: &&Worker| {
            let fits = worker.id != from.id && worker.role == role && worker.exchanges == from.exchanges;
            let lacks = lacks(worker);
            let (_, room) = self.hot.room(worker.id, pools.get(&worker.id).copied().unwrap_or(0), now);
            fits && lacks >= least && lacks <= room && worker.moves(now) && is_idle(worker, lacks, now)
        };
        // Who was given least, so that copies spread.
        let given = |worker: &&Worker| (self.hot.room(worker.id, 0, now).0, mix(worker.id.0 ^ last));
        let to = self.roster.serving().filter(takes).min_by_key(given)?;
        let (to, has) = (to.id, holds(pool, to.id));
        let from = from.id;
        self.hot.give(to, blocks - has, now);
        Some(Keep { to, from, has: has * size, tokens: blocks * size, piece })
    }
}

/// Whether a worker has nothing to compute, as far as is known, and so many blocks that no sequence owns.
pub(super) fn is_idle(worker: &Worker, blocks: u32, now: Instant) -> bool {
    let load = worker.load.now(worker.in_flight(), now);
    let free = |load: Backlog| load.queue() == 0.0 && load.room >= i64::from(blocks);
    worker.in_flight() == 0 && load.is_some_and(free)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_membership::{Member, View};

    use super::*;
    use crate::placement::RoundRobin;

    const POOL: u32 = 1000;
    const HOT: u8 = 8;

    fn member(id: u64, role: Role) -> Member {
        let mut member = baton_membership::testing::member(id);
        (member.role, member.model, member.block_size, member.blocks, member.exchanges) =
            (role, "m".to_owned(), 16, POOL, 9);
        member
    }

    /// Two prefill workers and a decode worker; a tenth of a pool may be given.
    fn fleet(change: impl FnOnce(&mut Vec<Member>), now: Instant) -> Fleet {
        let mut fleet = Fleet::new("m", Box::<RoundRobin>::default(), 0);
        let mut members = vec![member(1, Role::Prefill), member(2, Role::Prefill), member(3, Role::Decode)];
        change(&mut members);
        fleet.update(Arc::new(View { members, ..View::default() }));
        (1..10).for_each(|id| told(&mut fleet, id, 500, now));
        fleet.copy_hot(HOT, 10);
        fleet
    }

    fn told(fleet: &mut Fleet, id: u64, room: i64, now: Instant) {
        fleet.told(WorkerId(id), Backlog { room, ..Backlog::default() }, 1, now);
    }

    fn names(count: u64) -> Vec<BlockName> {
        (0..count).map(|name| BlockName(u128::from(mix(name)) << 64 | u128::from(mix(!name)))).collect()
    }

    fn held(worker: u64, blocks: u32) -> Holder {
        Holder { worker: WorkerId(worker), blocks }
    }

    /// What is copied after the first 40 blocks of a prompt were used so often.
    fn after(fleet: &mut Fleet, uses: u8, pool: &[Holder], now: Instant) -> Option<Keep> {
        let names = names(60);
        (0..uses).for_each(|_| fleet.used_hot(&names[..40], now));
        fleet.hot_copy(&names, pool, now)
    }

    const COPY: Keep = Keep { to: WorkerId(2), from: WorkerId(1), has: 0, tokens: 640, piece: 2048 };

    #[test]
    fn an_idle_worker_takes_what_is_hot_and_no_more() {
        let now = Instant::now();
        let mut all = fleet(|_| (), now);
        assert!(all.copies_hot());
        assert_eq!(after(&mut all, HOT - 1, &[held(1, 60)], now), None, "not hot yet");
        assert_eq!(after(&mut all, 1, &[held(1, 60)], now), Some(COPY), "40 blocks are hot, the rest is not");
        let part = [held(1, 60), held(2, 8)];
        let rest = Some(Keep { has: 128, ..COPY });
        assert_eq!(after(&mut fleet(|_| (), now), HOT, &part, now), rest, "it has the beginning");
        let most = [held(1, 60), held(2, 33)];
        assert_eq!(after(&mut fleet(|_| (), now), HOT, &most, now), None, "112 tokens are not worth it");
        assert_eq!(after(&mut fleet(|_| (), now), HOT, &[held(3, 60)], now).map(|keep| keep.from), Some(WorkerId(3)));
        assert_eq!(after(&mut fleet(|_| (), now), HOT, &[], now), None, "nobody has it");
    }

    #[test]
    fn what_was_hot_a_while_ago_is_not() {
        let now = Instant::now();
        let mut fleet = fleet(|_| (), now);
        let pool = [held(1, 60)];
        after(&mut fleet, HOT - 1, &pool, now);
        let later = now + HALVED_EVERY;
        assert_eq!(after(&mut fleet, HOT / 2, &pool, later), None, "7 are 3 by now, and 4 came");
        assert_eq!(after(&mut fleet, 1, &pool, later), Some(COPY));
    }

    #[test]
    fn a_worker_is_given_a_share_of_its_pool_in_a_while() {
        let now = Instant::now();
        let mut fleet = fleet(|_| (), now);
        let given = |fleet: &mut Fleet, at| (0..5).filter(|_| after(fleet, HOT, &[held(1, 60)], at).is_some()).count();
        assert_eq!(given(&mut fleet, now), 2, "100 blocks of 1,000 are two times 40");
        let later = now + SPAN;
        told(&mut fleet, 2, 500, later);
        assert_eq!(given(&mut fleet, later), 2);
    }

    #[test]
    fn only_idle_workers_with_room_that_compute_the_same_kv_take_copies() {
        let now = Instant::now();
        let copied = |fleet: &mut Fleet| after(fleet, HOT, &[held(1, 60)], now).map(|keep| keep.to.0);
        let changed = |change: fn(&mut Vec<Member>)| copied(&mut fleet(change, now));
        assert_eq!(changed(|_| ()), Some(2));
        assert_eq!(changed(|all| all[1].draining = true), None);
        assert_eq!(changed(|all| all[1].exchanges = 8), None, "I1: of another KV type");
        assert_eq!(changed(|all| all[0].exchanges = 0), None);
        assert_eq!(changed(|all| all[1].role = Role::Decode), None, "decode workers compute few prompts");
        let decode: fn(&mut Vec<Member>) = |all| all.iter_mut().for_each(|worker| worker.role = Role::Decode);
        assert!(changed(decode).is_some(), "unless there are no others");
        let with = |change: fn(&mut Fleet, Instant)| {
            let mut fleet = fleet(|_| (), now);
            change(&mut fleet, now);
            copied(&mut fleet)
        };
        assert_eq!(with(|fleet, now| told(fleet, 2, 39, now)), None, "its sequences own the rest");
        assert_eq!(with(|fleet, _| fleet.untold(WorkerId(2))), None, "it says nothing");
        assert_eq!(with(|fleet, _| std::mem::forget(fleet.lease(WorkerId(2)).unwrap())), None, "it is not idle");
        assert_eq!(with(|fleet, now| fleet.not_fetched(WorkerId(2), now)), None);
        assert_eq!(with(|fleet, _| fleet.copy_hot(HOT, 0)), None, "switched off");
    }

    #[test]
    fn copies_spread() {
        let now = Instant::now();
        let mut fleet = fleet(|all| all.push(member(4, Role::Prefill)), now);
        let first = after(&mut fleet, HOT, &[held(1, 60)], now).unwrap().to;
        let second = after(&mut fleet, 0, &[held(1, 60)], now).unwrap().to;
        assert_ne!(first, second);
    }
}
