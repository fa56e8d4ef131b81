//! KV that is brought up before it is needed: when a conversation's next turn is likely ([`crate::Returns`]) and no worker's pool has its KV any
//! more, the worker that has it in its own store loads it; or an idle one takes it from a KV store.

use std::time::Instant;

use baton_kv_cache::BlockName;
use baton_membership::Role;
use baton_types::WorkerId;

use super::Fleet;
use super::hot::is_idle;
use super::keeping::{Keep, KeepSizes, holds};
use super::placing::Known;
use super::roster::Worker;

/// How KV is brought up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recall {
    /// This worker loads so many leading tokens from its own store.
    Load(WorkerId, u32),
    /// A worker takes it from a KV store.
    Take(Keep),
}

impl Fleet {
    /// How the KV of a conversation with these blocks is brought into a pool, if a store has more of it than all pools. `known`: who says that
    /// it holds how much of it.
    pub fn recall(&self, names: &[BlockName], known: Known<'_>, now: Instant) -> Option<Recall> {
        let (size, role, blocks) = (self.block_size.max(1), self.computing(), names.len() as u32);
        let here = || self.roster.serving().filter(|worker| worker.moves(now));
        let workers = || here().filter(|worker| worker.role != Role::KvStore);
        let in_pools = workers().map(|worker| holds(known.pool, worker.id)).max().unwrap_or(0);
        let KeepSizes { least, piece } = self.keeping.sizes;
        let worth = |has: &u32| *has >= in_pools.saturating_add(least.div_ceil(size));
        let own = workers().map(|worker| (holds(known.store, worker.id).min(blocks), worker.id));
        if let Some((has, worker)) = own.filter(|(has, _)| worth(has)).max() {
            return Some(Recall::Load(worker, has * size));
        }
        let has = |store: &Worker| holds(known.pool, store.id).max(holds(known.store, store.id)).min(blocks);
        let store = here().filter(|store| store.role == Role::KvStore).max_by_key(|store| (has(store), store.id))?;
        let takes = |worker: &&Worker| {
            let lacks = has(store).saturating_sub(holds(known.pool, worker.id));
            worker.role == role && worker.exchanges == store.exchanges && is_idle(worker, lacks, now)
        };
        // The one that has most of it.
        let to = workers().filter(takes).max_by_key(|worker| (holds(known.pool, worker.id), worker.id))?;
        let (from, has, tokens) = (store.id, holds(known.pool, to.id) * size, has(store) * size);
        worth(&(tokens / size)).then_some(Recall::Take(Keep { to: to.id, from, has, tokens, piece }))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_latency::Backlog;
    use baton_membership::{Member, View};

    use super::*;
    use crate::kv_index::Holder;
    use crate::placement::RoundRobin;

    fn member(id: u64, role: Role) -> Member {
        let mut member = baton_membership::testing::member(id);
        (member.role, member.model, member.block_size, member.exchanges) = (role, "m".to_owned(), 16, 9);
        member
    }

    /// Two prefill workers, a decode worker and a store, which says little of itself.
    fn fleet(change: impl FnOnce(&mut Vec<Member>)) -> (Fleet, Instant) {
        let (mut fleet, now) = (Fleet::new("m", Box::<RoundRobin>::default(), 0), Instant::now());
        let roles = [Role::Prefill, Role::Prefill, Role::Decode, Role::KvStore];
        let mut members: Vec<Member> = (1..).zip(roles).map(|(id, role)| member(id, role)).collect();
        change(&mut members);
        fleet.update(Arc::new(View { members, ..View::default() }));
        let load = Backlog { room: 500, ..Backlog::default() };
        (1..4).for_each(|id| fleet.told(WorkerId(id), load, 1, now));
        (fleet, now)
    }

    fn held(worker: u64, blocks: u32) -> Holder {
        Holder { worker: WorkerId(worker), blocks }
    }

    fn recalled((fleet, now): &(Fleet, Instant), pool: &[Holder], store: &[Holder]) -> Option<Recall> {
        let names: Vec<BlockName> = (0..60).map(BlockName).collect();
        fleet.recall(&names, Known { pool, store }, *now)
    }

    #[test]
    fn a_worker_loads_what_only_its_store_has() {
        let fleet = fleet(|_| ());
        let load = |worker, blocks: u32| Some(Recall::Load(WorkerId(worker), 16 * blocks));
        assert_eq!(recalled(&fleet, &[], &[held(2, 60)]), load(2, 60));
        assert_eq!(recalled(&fleet, &[], &[held(2, 50), held(3, 55)]), load(3, 55), "the most");
        assert_eq!(recalled(&fleet, &[held(1, 52)], &[held(2, 60)]), load(2, 60));
        assert_eq!(recalled(&fleet, &[held(1, 53)], &[held(2, 60)]), None, "112 tokens are not worth it");
        assert_eq!(recalled(&fleet, &[held(3, 60)], &[held(2, 60)]), None, "it is in a pool");
        assert_eq!(recalled(&fleet, &[], &[held(2, 7)]), None);
    }

    #[test]
    fn an_idle_worker_takes_what_only_a_store_of_its_own_has() {
        let fleet = fleet(|_| ());
        let keep = Keep { to: WorkerId(2), from: WorkerId(4), has: 0, tokens: 960, piece: 2048 };
        assert_eq!(recalled(&fleet, &[held(4, 60)], &[]), Some(Recall::Take(keep)));
        assert_eq!(recalled(&fleet, &[], &[held(4, 60)]), Some(Recall::Take(keep)), "in its tiers");
        let rest = Keep { to: WorkerId(1), has: 160, ..keep };
        assert_eq!(recalled(&fleet, &[held(4, 60), held(1, 10)], &[]), Some(Recall::Take(rest)));
        assert_eq!(recalled(&fleet, &[held(4, 60), held(3, 60)], &[]), None, "a decode worker has it");
        let _busy = [1, 2].map(|id| fleet.0.lease(WorkerId(id)).unwrap());
        assert_eq!(recalled(&fleet, &[held(4, 60)], &[]), None, "nobody is idle");
    }

    #[test]
    fn who_is_gone_or_has_other_kv_takes_no_part() {
        let none = |change: fn(&mut Vec<Member>)| {
            let fleet = fleet(change);
            let own = recalled(&fleet, &[], &[held(2, 60)]).is_none();
            (own, recalled(&fleet, &[held(4, 60)], &[]).is_none())
        };
        assert_eq!(none(|_| ()), (false, false));
        assert_eq!(none(|all| all[1].draining = true), (true, false));
        assert_eq!(none(|all| all[3].draining = true), (false, true));
        assert_eq!(none(|all| all[3].exchanges = 8), (false, true), "I1: of another KV type");
    }
}
