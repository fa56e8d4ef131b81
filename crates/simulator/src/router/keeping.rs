//! How a simulated router has KV stores take what workers computed, and idle workers what many prompts begin with, as
//! `router/src/worker/keep.rs` does: a little after a request has ended it asks the fleet who should take what, and has it moved piece by piece,
//! as prefixes move for prompts ([`super::fetching`]).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use baton_membership::Role;
use baton_policy::{BlockName, Holder, Keep, KeepSizes, Known};
use baton_types::{WorkerId, mix};

use super::fetching::{Fetching, Outcome};
use crate::Violation;
use crate::events::{Event, Place, Process};
use crate::exchange::PrefixAsk;
use crate::stream::Micros;
use crate::world::World;

/// How long after its end a request's blocks are looked for, at most; and once more.
const LOOKS: [Micros; 2] = [250_000, 1_000_000];
/// Most requests that wait for it, and most that move at a time (I5).
const WAITING: usize = 16;
const MOVING: usize = 2;
/// How long a store may take to lend blocks for a piece, and the piece to move.
const TIME: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(10)];
/// How long nothing is asked of a store that was silent, by the checker's own account.
const PAUSE: Micros = 2_000_000;

/// What a request has left.
struct Keeping {
    request: u64,
    names: Arc<[BlockName]>,
    tokens: Vec<u32>,
    salt: u64,
    /// Looks so far.
    looks: usize,
    /// What moves now, and where its pieces end that are still to come.
    moves: Option<(Keep, VecDeque<u32>)>,
    /// It moves to an idle worker.
    hot: bool,
}

/// What KV stores are to take.
#[derive(Default)]
pub(crate) struct Keeps {
    next: u64,
    open: BTreeMap<u64, Keeping>,
    /// Those that wait until fewer move.
    waiting: VecDeque<u64>,
    moving: usize,
    /// When a store was silent last, for the checker.
    silent: BTreeMap<WorkerId, Micros>,
}

impl Keeps {
    /// A worker has left the router's view.
    pub(super) fn left(&mut self, worker: WorkerId) {
        self.silent.remove(&worker);
    }
}

impl World {
    /// From which use on stores keep blocks, and how many at a time: prompts are short here.
    pub(super) fn keep_settings(&self) -> (u8, KeepSizes) {
        let (size, bits) = (self.geometry.layout.block_size, mix(self.seed ^ 61));
        let few = |shift: u32, count: u64| 1 + (bits >> shift) % count;
        let sizes = KeepSizes { least: few(8, 3) as u32 * size, piece: few(16, 4) as u32 * size };
        let uses = if self.options.faults.is_none() && bits.is_multiple_of(4) { 2 } else { 1 };
        (uses, sizes)
    }

    /// From which use on a prefix is hot here, and how much of its pool a worker is given at most, in percent; in half of the runs nothing.
    pub(super) fn hot_settings(&self) -> (u8, u32) {
        let bits = mix(self.seed ^ 62);
        let none = self.options.faults.is_some() || bits.is_multiple_of(2);
        (2 + (bits >> 8) as u8 % 2, if none { 0 } else { 100 })
    }

    /// Has a store take these blocks of a request that has ended, if there is one and it lacks them, and an idle worker what is hot of
    /// them.
    pub(super) fn keep(&mut self, place: Place, request: u64, names: Vec<BlockName>, tokens: &[u32]) {
        let router = &mut self.routers[place];
        let keeps = &mut router.keeps;
        if !(router.fleet.has_stores() || router.fleet.copies_hot()) || names.is_empty() || keeps.open.len() >= WAITING
        {
            return;
        }
        keeps.next += 1;
        let (keep, salt) = (keeps.next, self.clients[request as usize].salt);
        let keeping =
            Keeping { request, names: names.into(), tokens: tokens.to_vec(), salt, looks: 0, moves: None, hot: false };
        keeps.open.insert(keep, keeping);
        self.plan_keep(place, keep, LOOKS[0]);
    }

    fn plan_keep(&mut self, place: Place, keep: u64, most: Micros) {
        let at = self.now + self.kv_store_plan.random.within(1, most);
        self.events.plan(at, Event::Keep { router: place, life: self.routers[place].life, keep });
    }

    /// It is time to look for a request's blocks. In the later stages of a run nothing more is moved.
    pub(crate) fn look_to_keep(&mut self, place: Place, keep: u64) -> Result<(), Violation> {
        let (ended, now) = (self.has_calmed(), self.clock_now(Process::Router(place)));
        let router = &mut self.routers[place];
        let Some(keeping) = router.keeps.open.get_mut(&keep).filter(|_| !ended) else {
            router.keeps.open.remove(&keep);
            return Ok(());
        };
        if keeping.looks == 0 {
            router.fleet.used(&keeping.names);
            router.fleet.used_hot(&keeping.names, now);
        }
        keeping.looks += 1;
        router.keeps.waiting.push_back(keep);
        self.keep_on(place)
    }

    /// Begins with what waits, as far as there is room.
    fn keep_on(&mut self, place: Place) -> Result<(), Violation> {
        while self.routers[place].keeps.moving < MOVING
            && let Some(keep) = self.routers[place].keeps.waiting.pop_front()
        {
            self.routers[place].keeps.moving += 1;
            match self.lacking(place, keep).filter(|_| !self.has_calmed()) {
                Some((what, hot)) => {
                    self.check_keep(place, keep, &what, hot)?;
                    if let Some(keeping) = self.routers[place].keeps.open.get_mut(&keep) {
                        (keeping.moves, keeping.hot) = (Some((what, what.pieces().collect())), hot);
                    }
                    self.next_piece(place, keep);
                }
                None => self.keep_over(place, keep),
            }
        }
        Ok(())
    }

    /// What a store should take of it, or an idle worker.
    fn lacking(&mut self, place: Place, keep: u64) -> Option<(Keep, bool)> {
        let now = self.clock_now(Process::Router(place));
        let names = Arc::clone(&self.routers[place].keeps.open.get(&keep)?.names);
        let (pool, store) = (self.routers[place].index.find(&names, 32, 0), self.in_tiers(place, &names));
        let fleet = &mut self.routers[place].fleet;
        let kept = fleet.keep(&names, Known { pool: &pool, store: &store }, now).map(|keep| (keep, false));
        kept.or_else(|| Some((fleet.hot_copy(&names, &pool, now)?, true)))
    }

    /// How much of it KV stores have below their pools, those with most first. No news of that is lost here.
    pub(super) fn in_tiers(&self, place: Place, names: &[BlockName]) -> Vec<Holder> {
        let of = |worker: &WorkerId| {
            let Some(Process::KvStore(at)) = self.routers[place].knew.get(worker).copied() else { return None };
            let store = self.kv_stores.get(at).filter(|store| store.alive && store.id == *worker)?;
            let blocks = store.kept.as_ref()?.held(names).len() as u32;
            (blocks > 0).then_some(Holder { worker: *worker, blocks })
        };
        let mut holders: Vec<Holder> = self.routers[place].connected.iter().filter_map(of).collect();
        holders.sort_by_key(|holder| (u32::MAX - holder.blocks, holder.worker));
        holders
    }

    /// What is to be moved is of use, and asked of those who can do it: a statement of its own of what the fleet decides.
    fn check_keep(&mut self, place: Place, keep: u64, what: &Keep, hot: bool) -> Result<(), Violation> {
        self.look_at("delivery");
        let router = &self.routers[place];
        let size = self.geometry.layout.block_size;
        let Keep { to, from, has, tokens, .. } = *what;
        let view = router.fleet.view();
        let [taker, giver] = [to, from].map(|worker| view.get(worker));
        let silent = router.keeps.silent.get(&to).is_some_and(|at| self.now < at + PAUSE / 2);
        let most = router.keeps.open.get(&keep).map_or(0, |keeping| keeping.names.len() as u32 * size);
        let prefill = view.members.iter().any(|member| member.role == Role::Prefill);
        let busy = router.fleet.members().any(|worker| worker.member.id == to && worker.in_flight > 0);
        let wrong = match (taker, giver) {
            (Some(taker), Some(_)) if !hot && taker.role != Role::KvStore => "to a worker that is no KV store",
            (Some(_), Some(giver)) if !hot && giver.role == Role::KvStore => "from another KV store",
            (Some(taker), Some(_)) if hot && taker.role == Role::KvStore => "that are hot, to a KV store",
            (Some(taker), Some(_)) if hot && prefill && taker.role != Role::Prefill => {
                "to a worker that computes few prompts"
            }
            (Some(_), Some(_)) if hot && busy => "to a worker that is not idle",
            (Some(taker), Some(giver)) if taker.exchanges != giver.exchanges => "that is other KV",
            (Some(taker), Some(giver)) if taker.draining || giver.draining => "of those that drain",
            // Requests notice a silent worker; a store has none.
            (Some(_), Some(_)) if !hot && silent => "to a KV store that was silent just now",
            (Some(_), Some(_)) if has >= tokens || tokens > most || tokens % size != 0 => "that are none",
            (Some(_), Some(_)) => return Ok(()),
            _ => "of those that are not there",
        };
        Err(self.violation("delivery", format!("router {place} keeps tokens {wrong}: {what:?}")))
    }

    /// Moves the next piece, if one is left.
    fn next_piece(&mut self, place: Place, keep: u64) {
        let Some(keeping) = self.routers[place].keeps.open.get_mut(&keep) else { return };
        let next = keeping.moves.as_mut().and_then(|(what, pieces)| Some((*what, pieces.pop_front()?)));
        let Some((Keep { to, from, .. }, end)) = next else { return self.keep_over(place, keep) };
        // One token after the last block.
        let most = keeping.tokens.len().min(end as usize + 1);
        let (request, tokens, salt) = (keeping.request, keeping.tokens[..most].to_vec(), keeping.salt);
        let ask = PrefixAsk { request, tokens, salt, priority: 0, time_left: TIME[1] };
        let fetching = Fetching::new(ask, from, TIME).kept_as(keep);
        self.start_fetch(place, to, fetching);
    }

    /// A piece has moved, or not.
    pub(super) fn piece_over(&mut self, place: Place, keep: u64, outcome: Outcome) -> Result<(), Violation> {
        let keeping = self.routers[place].keeps.open.get(&keep);
        let moves = keeping.and_then(|keeping| Some((keeping.moves.as_ref()?.0, keeping.hot)));
        let Some((Keep { to, from, .. }, hot)) = moves else { return Ok(()) };
        self.moved_apart(place, to, from, outcome);
        match outcome {
            Outcome::Moved if hot => {
                self.summary.hot += 1;
                self.next_piece(place, keep);
            }
            Outcome::Moved => {
                self.summary.kept += 1;
                if let Some(giver) = self.routers[place].knew.get(&from).copied() {
                    self.milestone("kept", giver);
                }
                self.next_piece(place, keep);
            }
            _ => self.keep_over(place, keep),
        }
        self.keep_on(place)
    }

    /// Tells the fleet what came of a move, as the router does.
    pub(super) fn moved_apart(&mut self, place: Place, to: WorkerId, from: WorkerId, outcome: Outcome) {
        let (now, at) = (self.clock_now(Process::Router(place)), self.now);
        let router = &mut self.routers[place];
        match outcome {
            Outcome::Moved => router.fleet.fetched(to),
            Outcome::NotTaken => router.fleet.not_fetched(to, now),
            Outcome::NotGiven { gone: true } => router.fleet.silent(from, now),
            Outcome::Refused { gone: true } => {
                router.fleet.silent(to, now);
                let before = router.keeps.silent.get(&to);
                if before.is_none_or(|before| at >= before + PAUSE) {
                    router.keeps.silent.insert(to, at);
                }
            }
            _ => {}
        }
        if outcome == Outcome::Moved {
            router.keeps.silent.remove(&to);
        }
    }

    /// Nothing more of it moves now. After the first look it is looked for once more.
    fn keep_over(&mut self, place: Place, keep: u64) {
        let keeps = &mut self.routers[place].keeps;
        keeps.moving -= 1;
        let Some(keeping) = keeps.open.get_mut(&keep) else { return };
        keeping.moves = None;
        match LOOKS.get(keeping.looks) {
            Some(most) => self.plan_keep(place, keep, *most),
            None => drop(keeps.open.remove(&keep)),
        }
    }
}
