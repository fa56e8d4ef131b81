//! A prefill worker: computes requests' KV layer by layer, and hands it over. What a real one's engine thread does, with
//! checkers at every step.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use baton_handoff::{Core, Descriptor, Done, Quiet, TransferError, TransferStats, TransportKind, Writes};
use baton_kv_cache::{KvPools, Tables};
use baton_types::{BlockId, Epoch, WorkerId};

use crate::decode::pools;
use crate::events::{Event, Life, Line, Place};
use crate::prefill_session::PrefillSession;
use crate::shapes::{Memory, geometry};
use crate::stream::Micros;
use crate::world::{SLACK, World};
use crate::{Sabotage, Violation};

/// Blocks of a prefill pool, in each group.
const BLOCKS: u32 = 64;
/// From one of an owner's steps to the next, at most.
const PACE: Micros = 20_000;
/// From a completion to its outcome where nothing goes wrong, at most: more than twice what it takes.
const ANSWER: Micros = 600_000;
/// How long a session that ends goes on trying to say so.
pub(crate) const FAREWELL: Micros = 50_000;

/// What a handoff's owner was told.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Told {
    Done(Result<TransferStats, TransferError>),
    Quiet,
}

/// Where callbacks put what they are told.
type Reports = Arc<Mutex<Vec<(u64, Told)>>>;

/// One handoff and its owner.
pub(crate) struct Handoff {
    request: u64,
    target: Vec<u8>,
    writes: Writes,
    epoch: Epoch,
    pub peer: WorkerId,
    decode: Place,
    /// The session it was begun at.
    serial: Line,
    blocks: Vec<Vec<BlockId>>,
    tables: Option<Tables>,
    /// Layers yet to be written: group, layer, indexes.
    todo: Vec<(usize, usize, Vec<u32>)>,
    /// Its owner has asked for the end, and waits.
    asked: bool,
    /// When it was completed.
    completed: Option<Micros>,
    opened: Micros,
    deadline: Micros,
}

/// One incarnation.
pub(crate) struct Prefill {
    pub life: Life,
    pub id: WorkerId,
    pub memory: Memory<u64>,
    pools: KvPools,
    pub handoffs: BTreeMap<u64, Handoff>,
    pub sessions: BTreeMap<WorkerId, PrefillSession>,
    reports: Reports,
    next_handoff: u64,
    pub frozen_until: Micros,
}

impl Prefill {
    pub(crate) fn new(life: Life) -> Result<Prefill, Violation> {
        let geometry = geometry(BLOCKS);
        Ok(Prefill {
            life,
            id: WorkerId(life),
            pools: pools(&geometry)?,
            memory: Memory::new(geometry),
            handoffs: BTreeMap::new(),
            sessions: BTreeMap::new(),
            reports: Reports::default(),
            next_handoff: 0,
            frozen_until: 0,
        })
    }

    /// I6 in the end: nothing is held.
    pub(crate) fn check_free(&self) -> Result<(), String> {
        self.memory.check_resting()?;
        let counts = self.pools.counts();
        match counts.free == counts.total {
            true => Ok(()),
            false => Err(format!("{}: {counts:?} in the end", self.id)),
        }
    }

    fn report(&self, handoff: u64) -> impl FnOnce(Told) + Send + use<> {
        let reports = self.reports.clone();
        move |told| reports.lock().unwrap_or_else(PoisonError::into_inner).push((handoff, told))
    }
}

impl World {
    /// The router's call: a handoff to this target, computed here.
    pub(crate) fn open(
        &mut self,
        place: Place,
        request: u64,
        target: &[u8],
        deadline: Micros,
    ) -> Result<(), Violation> {
        let at = self.instant(deadline);
        let prefill = &mut self.prefills[place];
        let bytes = target.to_vec();
        let target = Descriptor::parse(target, &prefill.memory.geometry.layout, false);
        let target = target.map_err(|error| self.violation("I8", error.to_string()))?;
        let decode: Place = target.address.parse().unwrap_or_default();
        let prefill = &self.prefills[place];
        let writes = Writes::new(&target, prefill.id, &prefill.memory.geometry, &self.limits, at);
        let writes = writes.map_err(|error| self.violation("I8", error.to_string()))?;
        let prefill = &mut self.prefills[place];
        let Ok(tables) = prefill.pools.allocate(target.tokens) else { return Ok(()) };
        let blocks: Vec<Vec<BlockId>> = tables.as_slice().iter().map(|table| table.blocks().to_vec()).collect();
        prefill.next_handoff += 1;
        let handoff = prefill.next_handoff;
        let (life, worker) = (prefill.life, target.worker);
        let taken = prefill.memory.take(&blocks, handoff);
        prefill.memory.fill(request, &blocks);
        taken.map_err(|what| self.violation("I3", what))?;
        let serial = match self.begin(place, decode, worker, writes.core()) {
            Ok(serial) => serial,
            Err(error) => {
                // A second run of the same target: the first one goes on.
                let twice = matches!(error, TransferError::Argument { .. });
                let prefill = &mut self.prefills[place];
                prefill.memory.give_back(&blocks);
                let freed = prefill.pools.free(tables);
                debug_assert!(freed.is_ok());
                return if twice { Ok(()) } else { Err(self.violation("I8", error.to_string())) };
            }
        };
        let todo = self.layers_to_write(&blocks);
        let (epoch, peer) = (target.epoch, worker);
        let tables = Some(tables);
        let owned = Handoff {
            request,
            target: bytes,
            writes,
            epoch,
            peer,
            decode,
            serial,
            blocks,
            tables,
            todo,
            asked: false,
            completed: None,
            opened: self.now,
            deadline,
        };
        self.prefills[place].handoffs.insert(handoff, owned);
        self.events.plan(self.now, Event::Compute { prefill: place, life, handoff });
        self.events.plan(self.bound(deadline.max(self.now)), Event::MustHaveEnded { prefill: place, life, handoff });
        self.wake_prefill(place, peer);
        Ok(())
    }

    /// When a handoff with this deadline has ended, whatever its session was doing: connecting, or winding up and telling the
    /// peer so.
    fn bound(&self, deadline: Micros) -> Micros {
        deadline + self.handshake() + FAREWELL + SLACK
    }

    /// Queues the first op; a session that has ended is replaced.
    fn begin(&mut self, place: Place, decode: Place, peer: WorkerId, core: &Arc<Core>) -> Result<Line, TransferError> {
        let open = self.prefills[place].sessions.get(&peer).is_some_and(|s| s.line.closed().is_none());
        if !open {
            if let Some(mut before) = self.prefills[place].sessions.remove(&peer) {
                self.leave(&mut before);
            }
            let kind = if self.random.chance(500) { TransportKind::Shm } else { TransportKind::Tcp };
            let connection = self.connect(place, decode, peer, kind);
            let session = self.new_session(place, decode, peer, kind, connection);
            self.prefills[place].sessions.insert(peer, session);
        }
        match self.prefills[place].sessions.get_mut(&peer) {
            Some(session) => session.line.begin(core.clone()).map(|()| session.serial),
            None => Err(TransferError::Closed),
        }
    }

    /// Every layer of every block, a few blocks at a time, in any order.
    fn layers_to_write(&mut self, blocks: &[Vec<BlockId>]) -> Vec<(usize, usize, Vec<u32>)> {
        let mut todo = Vec::new();
        for (group, list) in blocks.iter().enumerate() {
            let layers = [2, 3][group];
            for layer in 0..layers {
                let mut indexes: Vec<u32> = (0..list.len() as u32).collect();
                while !indexes.is_empty() {
                    let take = self.random.within(1, indexes.len() as u64) as usize;
                    todo.push((group, layer, indexes.drain(..take).collect()));
                }
            }
        }
        for at in (1..todo.len()).rev() {
            let other = self.random.below(at as u64 + 1) as usize;
            todo.swap(at, other);
        }
        todo
    }

    /// A handoff's owner goes on: writes, completes, gives up.
    pub(crate) fn compute(&mut self, place: Place, life: Life, id: u64) -> Result<(), Violation> {
        if self.prefills[place].life != life {
            return Ok(());
        }
        let Some(handoff) = self.prefills[place].handoffs.get_mut(&id).filter(|h| !h.asked) else { return Ok(()) };
        let (epoch, peer, deadline) = (handoff.epoch, handoff.peer, handoff.deadline);
        let fickle = if handoff.request.is_multiple_of(7) { 60 } else { 4 };
        let failed = handoff.writes.core().failure().is_some() || deadline <= self.now || self.random.chance(fickle);
        // Some have computed all before, so that one write follows close upon the other.
        let pace = if handoff.request.is_multiple_of(2) { 200 } else { PACE };
        let dawdles = self.random.chance(3);
        let next = self.now + if dawdles { 500_000 } else { self.random.within(1, pace) };
        // Whatever it computes, its request's deadline ends that.
        let by_deadline = |at: Micros| at.min(deadline.max(self.now + 1));
        let mut next = by_deadline(next);
        let prefill = &mut self.prefills[place];
        let Some(handoff) = prefill.handoffs.get_mut(&id) else { return Ok(()) };
        let Some(session) = prefill.sessions.get_mut(&peer) else { return Ok(()) };
        if failed || !session.serves(handoff.serial, handoff.writes.core()) {
            return self.give_up(place, id);
        }
        if let Some((group, layer, indexes)) = handoff.todo.last() {
            match session.line.has_room(handoff.writes.core(), indexes.len()) {
                Ok(true) => {
                    let pair = |i: &u32| (handoff.blocks[*group][*i as usize], *i);
                    let pairs: Vec<_> = indexes.iter().map(pair).collect();
                    match handoff.writes.write(*group, *layer, &pairs, 0) {
                        Ok(ops) => ops.into_iter().for_each(|op| {
                            handoff.writes.queued(op.blocks());
                            session.line.write(op);
                        }),
                        Err(error) => return Err(self.violation("I8", error.to_string())),
                    }
                    handoff.todo.pop();
                }
                Ok(false) => next = by_deadline(next + PACE),
                Err(_) => return self.give_up(place, id),
            }
            self.events.plan(next, Event::Compute { prefill: place, life, handoff: id });
            self.wake_prefill(place, peer);
            return Ok(());
        }
        let tail = handoff.request.to_le_bytes().to_vec();
        if let Err(error) = handoff.writes.completable(&session.line, &tail) {
            return Err(self.violation("I8", error.to_string()));
        }
        handoff.asked = true;
        handoff.completed = Some(self.now);
        let report = prefill.reports.clone();
        let done = Done::new(Box::new(move |outcome| {
            report.lock().unwrap_or_else(PoisonError::into_inner).push((id, Told::Done(outcome)));
        }));
        if let Err((done, error)) = session.line.complete(epoch, tail, done) {
            done.report(Err(error));
        }
        if self.broken(Sabotage::FreeLocalEarly) {
            self.let_go(place, id);
        }
        self.wake_prefill(place, peer);
        self.reported(place)
    }

    fn give_up(&mut self, place: Place, id: u64) -> Result<(), Violation> {
        let prefill = &mut self.prefills[place];
        let report = prefill.report(id);
        let Some(handoff) = prefill.handoffs.get_mut(&id) else { return Ok(()) };
        handoff.asked = true;
        if self.random.chance(300) {
            // It is told of the same target once more, and may be so before the peer knows that it has given up.
            let (request, target, deadline) = (handoff.request, handoff.target.clone(), handoff.deadline);
            let at = self.now + self.random.within(1, 5_000);
            self.events.plan(at, Event::Run { prefill: place, request, target, deadline });
        }
        let quiet = Quiet(Some(Box::new(move || report(Told::Quiet))));
        let (epoch, peer) = (handoff.epoch, handoff.peer);
        match prefill.sessions.get_mut(&peer) {
            // The session that knew of it is over and another took its place: nothing reads for it any more.
            Some(session) if session.serial == handoff.serial => drop(session.line.abort(epoch, quiet)),
            _ => drop(quiet),
        }
        self.wake_prefill(place, peer);
        self.reported(place)
    }

    /// What callbacks were told since the last call: each handoff's end, once.
    pub(crate) fn reported(&mut self, place: Place) -> Result<(), Violation> {
        let told = std::mem::take(&mut *self.prefills[place].reports.lock().unwrap_or_else(PoisonError::into_inner));
        for (id, told) in told {
            if self.now > self.prefills[place].handoffs.get(&id).map_or(self.now, |h| self.bound_of(place, h)) {
                return Err(self.violation("I5", format!("handoff {id} ends too late: {told:?}")));
            }
            self.let_go(place, id);
            let Some(handoff) = self.prefills[place].handoffs.remove(&id) else {
                return Err(self.violation("reported once", format!("handoff {id} ends again: {told:?}")));
            };
            let waited = self.now - handoff.completed.unwrap_or(self.now);
            if self.options.calm && waited > ANSWER {
                let what = format!("{} waits {waited} µs for its outcome though nothing goes wrong", handoff.epoch);
                return Err(self.violation("delivery", what));
            }
            if let Told::Done(Ok(_)) = told
                && self.decodes[handoff.decode].id == handoff.peer
                && !self.decodes[handoff.decode].has_verified(handoff.epoch)
            {
                let what = format!("{} was told that {} is verified, and it is not", handoff.peer, handoff.epoch);
                return Err(self.violation("agreement", what));
            }
        }
        Ok(())
    }

    fn bound_of(&self, place: Place, handoff: &Handoff) -> Micros {
        self.bound(handoff.deadline.max(handoff.opened).max(self.prefills[place].frozen_until))
    }

    /// Its local blocks are free.
    fn let_go(&mut self, place: Place, id: u64) {
        let prefill = &mut self.prefills[place];
        if let Some(handoff) = prefill.handoffs.get_mut(&id)
            && let Some(tables) = handoff.tables.take()
        {
            prefill.memory.give_back(&handoff.blocks);
            let freed = prefill.pools.free(tables);
            debug_assert!(freed.is_ok(), "{freed:?}");
        }
    }

    /// I5: by now its end was reported, unless the worker itself stood still.
    pub(crate) fn must_have_ended(&mut self, place: Place, life: Life, id: u64) -> Result<(), Violation> {
        let prefill = &self.prefills[place];
        let Some(handoff) = prefill.handoffs.get(&id).filter(|_| prefill.life == life) else { return Ok(()) };
        let bound = self.bound_of(place, handoff);
        if self.now >= bound {
            let session = prefill.sessions.get(&handoff.peer).map(|session| session.describe(handoff.serial));
            let what = format!(
                "handoff {id} of {} to {} has not ended in time: asked for its end {}, failed {:?}, at {session:?}",
                handoff.epoch,
                handoff.peer,
                handoff.asked,
                handoff.writes.core().failure()
            );
            return Err(self.violation("I5", what));
        }
        self.events.plan(bound, Event::MustHaveEnded { prefill: place, life, handoff: id });
        Ok(())
    }
}
