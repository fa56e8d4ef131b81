//! A decode worker: lends blocks, and takes them back as events allow. What a real one's engine thread does, with checkers
//! at every step.

use std::collections::{BTreeMap, BTreeSet};

use baton_handoff::{Descriptor, FenceState, Host, Ledger, Limits, Members, ReceiverEvent, TransferError};
use baton_kv_cache::{CacheConfig, Hit, KvPools, Lease, Quarantine, Tables};
use baton_types::{BlockId, Epoch, WorkerId};

use crate::decode_session::DecodeSession;
use crate::events::{Event, Life, Line, Place};
use crate::shapes::{Memory, geometry};
use crate::stream::{Micros, Timer};
use crate::world::{SLACK, World};
use crate::{Sabotage, Violation};

/// Blocks of a decode pool, in each group.
pub(crate) const BLOCKS: u32 = 24;
/// Tokens of a request at most; a block holds one.
const TOKENS: u64 = 6;

/// Who owns a reservation's blocks in the pool.
#[derive(Debug)]
enum Held {
    Lent(Lease),
    Quarantined(Quarantine),
    Used(Tables),
    Nothing,
}

/// What was reported of a reservation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fate {
    Open,
    Failed,
    /// Taken back; a peer may still write.
    Pending,
    Verified,
}

#[derive(Debug)]
struct Reserved {
    request: u64,
    blocks: Vec<Vec<BlockId>>,
    held: Held,
    fate: Fate,
    expires: Micros,
}

/// One incarnation.
pub(crate) struct Decode {
    pub life: Life,
    pub id: WorkerId,
    pub memory: Memory<Epoch>,
    pub ledger: Ledger,
    pools: KvPools,
    reserved: BTreeMap<Epoch, Reserved>,
    verified: BTreeSet<Epoch>,
    next_epoch: u64,
    pub sessions: BTreeMap<Line, DecodeSession>,
    pub members: Members<Line>,
    /// Whose the connections are that have joined a session.
    pub streams: BTreeMap<Line, Line>,
    pub frozen_until: Micros,
    desk: Timer,
}

impl Decode {
    pub(crate) fn new(life: Life, limits: Limits) -> Result<Decode, Violation> {
        let geometry = geometry(BLOCKS);
        Ok(Decode {
            life,
            id: WorkerId(life),
            pools: pools(&geometry)?,
            members: Members::new(limits.connections),
            ledger: Ledger::new(&geometry, limits),
            memory: Memory::new(geometry),
            reserved: BTreeMap::new(),
            verified: BTreeSet::new(),
            next_epoch: 1,
            sessions: BTreeMap::new(),
            streams: BTreeMap::new(),
            frozen_until: 0,
            desk: Timer::default(),
        })
    }

    /// Reservations whose end was not reported.
    pub(crate) fn open(&self) -> u64 {
        self.reserved.values().filter(|r| r.fate == Fate::Open).count() as u64
    }

    /// Epochs under which somebody may write, as far as the owner knows.
    pub(crate) fn lent(&self) -> Vec<Epoch> {
        self.reserved.iter().filter(|(_, r)| r.fate == Fate::Open).map(|(epoch, _)| *epoch).collect()
    }

    /// A session, or a connection that came to nothing, is over.
    pub(crate) fn forget(&mut self, line: Line) {
        self.members.dismiss(line);
        self.streams.retain(|_, owner| *owner != line);
    }

    /// Whether a reservation was announced as verified, however it went on.
    pub(crate) fn has_verified(&self, epoch: Epoch) -> bool {
        self.verified.contains(&epoch)
    }

    /// I6 in the end: nothing is held.
    pub(crate) fn check_free(&self) -> Result<(), String> {
        self.memory.check_resting()?;
        let (counts, left) = (self.pools.counts(), self.ledger.stats().reservations);
        match counts.free == counts.total && left == 0 {
            true => Ok(()),
            false => Err(format!("{}: {counts:?}, {left} reservations in the end: {:?}", self.id, self.reserved)),
        }
    }
}

/// Block pools of this shape, without a prefix cache.
pub(crate) fn pools(geometry: &baton_types::PoolGeometry) -> Result<KvPools, Violation> {
    let cache = CacheConfig { max_blocks: 0, ..CacheConfig::default() };
    let error = |e| Violation { invariant: "set-up", at_micros: 0, what: format!("{e}") };
    KvPools::new(geometry, cache).map_err(error)
}

impl World {
    /// Lends blocks for a request and lets the router bring the target to a prefill worker. False when there is no room.
    pub(crate) fn reserve(&mut self, place: Place, request: u64) -> Result<bool, Violation> {
        let tokens = self.random.within(1, TOKENS) as u32;
        let (key, lease) = (self.random.next(), self.random.within(100_000, 1_500_000));
        let expires = self.now + lease;
        let at = self.instant(expires);
        let decode = &mut self.decodes[place];
        let Ok(lent) = decode.pools.lend(&Hit::default(), None, tokens) else { return Ok(false) };
        let blocks: Vec<Vec<BlockId>> = lent.as_slice().iter().map(|table| table.blocks().to_vec()).collect();
        let epoch = Epoch(decode.next_epoch);
        decode.next_epoch += 1;
        let taken = decode.memory.take(&blocks, epoch);
        let made = decode.ledger.reserve(epoch, key, &blocks, at);
        let target = Descriptor {
            worker: decode.id,
            epoch,
            key,
            tokens,
            first: vec![0; blocks.len()],
            counts: blocks.iter().map(|list| list.len() as u32).collect(),
            layout: decode.memory.geometry.layout.clone(),
            device: false,
            host: Host { boot: [1; 16], netns: 1 },
            unix: b"simulated".to_vec(),
            address: place.to_string(),
            port: 1,
        };
        let target = target.encode();
        let (held, fate, life) = (Held::Lent(lent), Fate::Open, decode.life);
        decode.reserved.insert(epoch, Reserved { request, blocks, held, fate, expires });
        taken.map_err(|what| self.violation("I3", what))?;
        // Blocks that the pool hands out are nobody's, so the ledger must take them.
        made.map_err(|error| self.violation("I3", error.to_string()))?;
        self.summary.handoffs += 1;
        self.plan_reservation(place, life, epoch, expires);
        self.plan_runs(request, &target, expires);
        self.after(place)?;
        Ok(true)
    }

    fn plan_reservation(&mut self, decode: Place, life: Life, epoch: Epoch, expires: Micros) {
        self.events.plan(expires + SLACK, Event::MustHaveFailed { decode, life, epoch: epoch.0 });
        if self.random.chance(100) {
            let at = self.now + self.random.below(400_000);
            self.events.plan(at, Event::Cancel { decode, life, epoch: epoch.0 });
        }
    }

    /// The router: mostly one prefill worker is told, sometimes none, sometimes two.
    fn plan_runs(&mut self, request: u64, target: &[u8], expires: Micros) {
        let times = [0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2][self.random.below(16) as usize];
        for _ in 0..times {
            let prefill = self.random.below(self.prefills.len() as u64) as Place;
            let at = self.now + self.random.below(20_000);
            // Clocks of different workers differ, and so do deadlines.
            let deadline = (expires + self.random.below(400_000)).saturating_sub(200_000).max(at);
            self.events.plan(at, Event::Run { prefill, request, target: target.to_vec(), deadline });
        }
    }

    /// Passes on what the ledger has to say.
    pub(crate) fn after(&mut self, place: Place) -> Result<(), Violation> {
        while let Some(event) = self.decodes[place].ledger.next_event() {
            if self.broken(Sabotage::AnnounceTwice) && matches!(event, ReceiverEvent::Verified { .. }) {
                self.received(place, event.clone())?;
            }
            self.received(place, event)?;
        }
        for (line, epoch) in self.decodes[place].ledger.take_fences() {
            if self.broken(Sabotage::LoseFences) {
                continue;
            }
            if let Some(session) = self.decodes[place].sessions.get_mut(&line) {
                session.fences.push(epoch);
                self.wake_decode(line);
            }
        }
        if let Some(at) = self.decodes[place].ledger.next_expiry() {
            let at = self.micros(at).max(self.now) + self.random.below(crate::world::LAZINESS);
            self.plan_desk(place, at);
        }
        let checked = self.decodes[place].pools.check();
        checked.map_err(|error| self.violation("I6", error.to_string()))
    }

    fn plan_desk(&mut self, decode: Place, at: Micros) {
        let life = self.decodes[decode].life;
        if self.decodes[decode].desk.set(at.max(self.now + 1), self.now) {
            self.events.plan(at.max(self.now + 1), Event::Desk { decode, life });
        }
    }

    /// The front desk's turn: leases.
    pub(crate) fn desk(&mut self, place: Place, life: Life) -> Result<(), Violation> {
        if self.decodes[place].life != life || self.broken(Sabotage::IgnoreLeases) {
            return Ok(());
        }
        let now = self.instant(self.now);
        self.decodes[place].ledger.expire(now);
        self.after(place)
    }

    fn received(&mut self, place: Place, event: ReceiverEvent) -> Result<(), Violation> {
        match event {
            ReceiverEvent::Verified { epoch, tail, bytes, .. } => self.verified(place, epoch, &tail, bytes),
            ReceiverEvent::Failed { epoch, error, .. } => self.failed(place, epoch, &error),
            ReceiverEvent::Fenced { epoch } => self.fenced(place, epoch),
        }
    }

    fn verified(&mut self, place: Place, epoch: Epoch, tail: &[u8], bytes: u64) -> Result<(), Violation> {
        let decode = &mut self.decodes[place];
        let Some(reserved) = decode.reserved.get_mut(&epoch).filter(|r| r.fate == Fate::Open) else {
            return Err(self.violation("reported once", format!("{epoch} is verified after its end")));
        };
        reserved.fate = Fate::Verified;
        decode.verified.insert(epoch);
        // I2: the checker knows what was computed; the code under test knows digests.
        let mut wrong = decode.memory.compare(reserved.request, &reserved.blocks).err();
        if tail != reserved.request.to_le_bytes() {
            wrong = Some(format!("the tail is {tail:?}, for request {}", reserved.request));
        }
        let layout = &decode.memory.geometry.layout;
        let want: usize = (0..2).map(|g| layout.block_bytes_all_layers(g) * reserved.blocks[g].len()).sum();
        if bytes != want as u64 {
            wrong = Some(format!("{bytes} bytes are said to have come, it is {want}"));
        }
        if let Held::Lent(lease) = std::mem::replace(&mut reserved.held, Held::Nothing)
            && let Ok(tables) = decode.pools.accept(lease)
        {
            reserved.held = Held::Used(tables);
        }
        decode.memory.give_back(&reserved.blocks);
        decode.ledger.release(epoch);
        let life = decode.life;
        if let Some(what) = wrong {
            return Err(self.violation("I2", format!("{epoch}: {what}")));
        }
        self.summary.verified += 1;
        let at = self.now + self.random.within(1_000, 100_000);
        self.events.plan(at, Event::Finish { decode: place, life, epoch: epoch.0 });
        Ok(())
    }

    /// A sequence is over; what it read to the last must be what was verified.
    pub(crate) fn finish(&mut self, place: Place, life: Life, epoch: u64) -> Result<(), Violation> {
        let decode = &mut self.decodes[place];
        if decode.life != life {
            return Ok(());
        }
        let Some(reserved) = decode.reserved.remove(&Epoch(epoch)) else { return Ok(()) };
        let still = decode.memory.compare(reserved.request, &reserved.blocks);
        if let Held::Used(tables) = reserved.held {
            let freed = decode.pools.free(tables);
            freed.map_err(|error| self.violation("I6", error.to_string()))?;
        }
        still.map_err(|what| self.violation("I3", format!("e{epoch:x} changed after it was verified: {what}")))?;
        self.after(place)
    }

    fn failed(&mut self, place: Place, epoch: Epoch, error: &TransferError) -> Result<(), Violation> {
        let (free, calm) = (self.broken(Sabotage::FreeOnFailed), self.options.calm);
        let decode = &mut self.decodes[place];
        let Some(reserved) = decode.reserved.get_mut(&epoch).filter(|r| r.fate == Fate::Open) else {
            return Err(self.violation("reported once", format!("{epoch} fails after its end: {error}")));
        };
        reserved.fate = Fate::Failed;
        let changed = matches!(name(error), "verify" | "corrupt" | "incomplete" | "protocol" | "refused" | "peer lost");
        if calm && changed {
            return Err(self.violation("delivery", format!("{epoch} fails though nothing goes wrong: {error}")));
        }
        *self.summary.failed.entry(name(error)).or_default() += 1;
        decode.quarantine(epoch);
        if free {
            decode.clear(epoch);
        }
        Ok(())
    }

    fn fenced(&mut self, place: Place, epoch: Epoch) -> Result<(), Violation> {
        let decode = &mut self.decodes[place];
        let fate = decode.reserved.get(&epoch).map(|r| r.fate);
        decode.clear(epoch);
        decode.reserved.remove(&epoch);
        match fate {
            Some(Fate::Failed | Fate::Pending) => Ok(()),
            other => Err(self.violation("reported once", format!("{epoch} is fenced when it is {other:?}"))),
        }
    }

    /// The owner takes a reservation back: a client has gone, or the prefill worker is lost to the router.
    pub(crate) fn cancel(&mut self, place: Place, life: Life, epoch: u64) -> Result<(), Violation> {
        let epoch = Epoch(epoch);
        let early = self.broken(Sabotage::FreeBeforeFenced);
        let leaks = self.broken(Sabotage::LeakOnCancel);
        let decode = &mut self.decodes[place];
        let open = decode.reserved.get(&epoch).is_some_and(|r| r.fate == Fate::Open);
        if decode.life != life || !open {
            return Ok(());
        }
        decode.quarantine(epoch);
        self.summary.withdrawn += 1;
        match decode.ledger.fence(epoch) {
            FenceState::Clear => {
                if !leaks {
                    decode.clear(epoch);
                }
                decode.reserved.remove(&epoch);
            }
            FenceState::Pending => {
                if let Some(reserved) = decode.reserved.get_mut(&epoch) {
                    reserved.fate = Fate::Pending;
                }
                if early {
                    decode.clear(epoch);
                }
            }
        }
        self.after(place)
    }

    /// I5: by now its end was reported, unless the worker itself stood still.
    pub(crate) fn must_have_failed(&mut self, place: Place, life: Life, epoch: u64) -> Result<(), Violation> {
        let decode = &self.decodes[place];
        let Some(reserved) = decode.reserved.get(&Epoch(epoch)).filter(|_| decode.life == life) else { return Ok(()) };
        let bound = reserved.expires.max(decode.frozen_until) + SLACK;
        match reserved.fate {
            Fate::Open if self.now >= bound => {
                let next = decode.ledger.next_expiry().map(|at| self.micros(at));
                let what = format!("e{epoch:x} has not ended in time: {reserved:?}, the next lease ends at {next:?}");
                Err(self.violation("I5", what))
            }
            Fate::Open => {
                self.events.plan(bound, Event::MustHaveFailed { decode: place, life, epoch });
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

impl Decode {
    /// Puts lent blocks aside.
    fn quarantine(&mut self, epoch: Epoch) {
        if let Some(reserved) = self.reserved.get_mut(&epoch)
            && let Held::Lent(lease) = std::mem::replace(&mut reserved.held, Held::Nothing)
            && let Ok(quarantine) = self.pools.quarantine(lease)
        {
            reserved.held = Held::Quarantined(quarantine);
        }
    }

    /// Frees blocks that were put aside.
    fn clear(&mut self, epoch: Epoch) {
        if let Some(reserved) = self.reserved.get_mut(&epoch)
            && let Held::Quarantined(quarantine) = std::mem::replace(&mut reserved.held, Held::Nothing)
        {
            let cleared = self.pools.clear_quarantine(quarantine);
            debug_assert!(cleared.is_ok(), "{cleared:?}");
            self.memory.give_back(&reserved.blocks);
        }
    }
}

/// For the summary.
pub(crate) fn name(error: &TransferError) -> &'static str {
    match error {
        TransferError::Verify { .. } => "verify",
        TransferError::Corrupt { .. } => "corrupt",
        TransferError::Incomplete { .. } => "incomplete",
        TransferError::Protocol { .. } => "protocol",
        TransferError::Refused { .. } => "refused",
        TransferError::Fenced { .. } => "fenced",
        TransferError::Aborted { .. } => "aborted",
        TransferError::Expired { .. } => "expired",
        TransferError::Deadline { .. } => "deadline",
        TransferError::Stalled { .. } => "stalled",
        TransferError::PeerLost { .. } => "peer lost",
        TransferError::Connect { .. } => "connect",
        _ => "other",
    }
}
