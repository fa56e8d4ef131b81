//! The decode end's reservations, and what their steps cause: events for the owner, fences for sessions, counts.
//!
//! Pure: no clock, no I/O, no threads. Every step of a reservation goes through here, so that everybody sees its actions, its events and
//! the fences to its session in the same order. The hub keeps it under a lock; a simulation calls it directly.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use baton_types::{BlockId, Epoch, PoolGeometry};

use super::table::{Blocks, Holder, SessionId, Table, Transition};
use super::{FenceState, ReceiverEvent, ReceiverStats};
use crate::error::TransferError;
use crate::limits::{TransferLimits, TransportKind};
use crate::state::{Action, Input, State};

/// Reservations, with the events and fences not delivered yet.
pub struct Ledger {
    table: Table,
    silence: Duration,
    events: VecDeque<ReceiverEvent>,
    fences: Vec<(SessionId, Epoch)>,
    /// Without `reservations` and `sessions`, which are counted elsewhere.
    stats: ReceiverStats,
}

impl Ledger {
    /// No reservations, for a pool of this shape.
    pub fn new(geometry: &PoolGeometry, limits: TransferLimits) -> Ledger {
        Ledger {
            silence: limits.silence,
            table: Table::new(geometry, limits),
            events: VecDeque::new(),
            fences: Vec::new(),
            stats: ReceiverStats::default(),
        }
    }

    /// Lends blocks to whoever knows `key`, until `deadline` or until the peer that was granted access falls silent. Refuses blocks of an
    /// epoch that is not over (I3).
    pub fn reserve(
        &mut self,
        epoch: Epoch,
        key: u64,
        blocks: &[Vec<BlockId>],
        deadline: Instant,
    ) -> Result<(), TransferError> {
        self.table.reserve(epoch, key, blocks, deadline)
    }

    /// Takes a reservation back for its owner.
    pub fn fence(&mut self, epoch: Epoch) -> FenceState {
        match self.step(epoch, Input::Abort, || TransferError::Closed) {
            Some(stepped) if stepped.after != State::Released => FenceState::Pending,
            _ => FenceState::Clear,
        }
    }

    /// Ends a verified reservation's lease.
    pub fn release(&mut self, epoch: Epoch) {
        if let Some(stepped) = self.step(epoch, Input::Release, || TransferError::Closed)
            && stepped.action == Action::Refuse
        {
            tracing::error!(%epoch, state = ?stepped.before, "released before it was verified; the lease goes on");
        }
    }

    /// Fails every reservation whose lease has run out.
    pub fn expire(&mut self, now: Instant) {
        let waited = self.silence;
        for (epoch, silent) in self.table.expired(now) {
            let error = || match silent {
                Some(peer) => TransferError::Stalled { epoch, peer, doing: "being written", waited },
                None => TransferError::Expired { epoch },
            };
            self.step(epoch, Input::Expire, error);
        }
    }

    /// When the next lease runs out.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.table.next_expiry()
    }

    /// Grants a session access to a reservation, or says why not.
    pub(crate) fn grant(&mut self, epoch: Epoch, key: u64, holder: Holder, now: Instant) -> Result<Blocks, String> {
        self.table.grant(epoch, key, holder, now + self.silence)
    }

    /// Renews a session's leases because its peer was heard from.
    pub(crate) fn renew(&mut self, session: SessionId, now: Instant) {
        self.table.renew(session, now + self.silence);
    }

    /// Steps a reservation on behalf of a session. False when the session was not granted access to it, or its state refuses the input.
    pub(crate) fn step_as(
        &mut self,
        session: SessionId,
        epoch: Epoch,
        input: Input,
        error: impl FnOnce() -> TransferError,
    ) -> bool {
        let stepped = self.table.step_as(session, epoch, input);
        stepped.inspect(|stepped| self.book(epoch, *stepped, error)).is_some_and(|s| s.action != Action::Refuse)
    }

    /// Tells the owner that every digest of a handoff matches. False when it is not told, because it has taken the blocks back meanwhile.
    pub(crate) fn verified(&mut self, session: SessionId, event: ReceiverEvent) -> bool {
        let ReceiverEvent::Verified { epoch, bytes, transport, .. } = event else { return false };
        let stepped = self.table.step_as(session, epoch, Input::Verify);
        let announced = stepped.is_some_and(|s| s.action == Action::Announce);
        if announced {
            self.events.push_back(event);
            self.stats.verified += 1;
            *match transport {
                TransportKind::Shm => &mut self.stats.shm_bytes,
                TransportKind::Tcp => &mut self.stats.tcp_bytes,
                TransportKind::Ucx => &mut self.stats.ucx_bytes,
                TransportKind::CudaIpc => &mut self.stats.cuda_ipc_bytes,
            } += bytes;
        }
        announced
    }

    /// Counts a frame that changed on its way (I2): one failure, however many handoffs its session had.
    pub(crate) fn corrupted(&mut self) {
        self.stats.verify_failures += 1;
    }

    /// Epochs that a session was granted access to and that are not over.
    pub(crate) fn held_by(&self, session: SessionId) -> Vec<Epoch> {
        self.table.held_by(session)
    }

    /// For checkers: the session that was granted access under this epoch, if one was. `None` when the epoch is over or never was.
    #[cfg(feature = "testing")]
    pub fn holder(&self, epoch: Epoch) -> Option<Option<SessionId>> {
        self.table.holder(epoch)
    }

    /// Takes the oldest event that the owner was not told yet.
    pub fn next_event(&mut self) -> Option<ReceiverEvent> {
        self.events.pop_front()
    }

    /// Takes the fences that sessions were not told yet: (session, epoch), each once.
    pub fn take_fences(&mut self) -> Vec<(SessionId, Epoch)> {
        std::mem::take(&mut self.fences)
    }

    /// Counts, without `sessions`, which the hub fills in.
    pub fn stats(&self) -> ReceiverStats {
        ReceiverStats { reservations: self.table.len(), ..self.stats }
    }

    fn step(&mut self, epoch: Epoch, input: Input, error: impl FnOnce() -> TransferError) -> Option<Transition> {
        let stepped = self.table.step(epoch, input)?;
        self.book(epoch, stepped, error);
        Some(stepped)
    }

    /// Notes the counts, events and fences that a step causes.
    fn book(&mut self, epoch: Epoch, stepped: Transition, error: impl FnOnce() -> TransferError) {
        let Transition { before, action, holder, .. } = stepped;
        if matches!(action, Action::FailAndFree | Action::FailAndFence) {
            let error = error();
            self.stats.failed += 1;
            self.stats.verify_failures += u64::from(matches!(error, TransferError::Verify { .. }));
            match error.is_withdrawal() {
                true => tracing::debug!(%epoch, %error, "handoff withdrawn"),
                false => tracing::warn!(%epoch, %error, "handoff failed"),
            }
            let transport = holder.map(|holder| holder.transport);
            self.events.push_back(ReceiverEvent::Failed { epoch, error, transport });
        }
        // An owner that takes back blocks to which nobody can write learns so from the call itself.
        let was_pending = matches!(before, State::Aborted | State::Expired);
        if action == Action::FailAndFree || action == Action::Free && was_pending {
            self.events.push_back(ReceiverEvent::Fenced { epoch });
        }
        if matches!(action, Action::Fence | Action::FailAndFence) {
            self.fences.extend(holder.map(|holder| (holder.session, epoch)));
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup, KvLayout, WorkerId};

    use super::*;
    use crate::inbound::Inbound;
    use crate::wire::Frame;

    #[test]
    fn a_frame_that_changed_is_counted_once_for_all_its_handoffs() {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F32, block_size: 4, groups: vec![group] };
        let (geometry, now) = (PoolGeometry::uniform(layout, 4), Instant::now());
        let mut ledger = Ledger::new(&geometry, TransferLimits::default());
        let peer = WorkerId(7);
        let mut inbound = Inbound::new(1, peer, TransportKind::Tcp, geometry, &TransferLimits::default());
        for number in 1..=3 {
            let (epoch, blocks) = (Epoch(number), [vec![BlockId(number as u32)]]);
            ledger.reserve(epoch, 5, &blocks, now + Duration::from_secs(9)).unwrap();
            inbound.frame(0, Frame::Begin { epoch, key: 5 }, now, &mut ledger).unwrap();
        }
        let corrupt = TransferError::Corrupt { peer };
        inbound.lost(&mut ledger, &corrupt);
        inbound.severed(&mut ledger, &corrupt);
        let stats = ledger.stats();
        assert_eq!((stats.failed, stats.verify_failures, stats.reservations), (3, 1, 0));
        let failed = |number| ReceiverEvent::Failed {
            epoch: Epoch(number),
            error: corrupt.clone(),
            transport: Some(TransportKind::Tcp),
        };
        let events: Vec<_> = std::iter::from_fn(|| ledger.next_event()).collect();
        assert!((1..=3).all(|number| events.contains(&failed(number))), "{events:?}");
    }
}
