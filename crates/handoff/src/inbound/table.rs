//! The decode end's reservations: which epoch holds which blocks, in which state, until when. Pure: no clock, no I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use baton_types::{BlockId, Epoch, PoolGeometry, WorkerId};

use crate::error::TransferError;
use crate::limits::{TransferLimits, TransportKind};
use crate::state::{self, Action, Input, State};

/// Number of a session at this receiver.
pub type SessionId = u64;
/// Reserved blocks per group, in token order.
pub(crate) type Blocks = Arc<Vec<Vec<BlockId>>>;

struct Reservation {
    state: State,
    key: u64,
    blocks: Blocks,
    /// When it ends, whatever the peer does.
    deadline: Instant,
    /// When its lease runs out: at the deadline, or earlier if the peer that was granted access falls silent.
    expires: Instant,
    /// The peer that was granted access.
    holder: Option<Holder>,
}

/// A peer that was granted access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Holder {
    pub session: SessionId,
    pub peer: WorkerId,
    pub transport: TransportKind,
}

/// The result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Transition {
    pub before: State,
    pub after: State,
    pub action: Action,
    pub holder: Option<Holder>,
}

/// All reservations that are not over.
pub(crate) struct Table {
    limits: TransferLimits,
    entries: BTreeMap<Epoch, Reservation>,
    /// Per group and block: the epoch it is lent under.
    loans: Vec<Vec<Option<Epoch>>>,
    /// Leases that still run, by the time they run out.
    leases: BTreeSet<(Instant, Epoch)>,
}

impl Table {
    pub(crate) fn new(geometry: &PoolGeometry, limits: TransferLimits) -> Table {
        let loans = geometry.blocks.iter().map(|blocks| vec![None; *blocks as usize]).collect();
        Table { limits, entries: BTreeMap::new(), loans, leases: BTreeSet::new() }
    }

    /// Sets blocks aside under an epoch.
    pub(crate) fn reserve(
        &mut self,
        epoch: Epoch,
        key: u64,
        blocks: &[Vec<BlockId>],
        deadline: Instant,
    ) -> Result<(), TransferError> {
        self.check(epoch, blocks)?;
        for (group, list) in blocks.iter().enumerate() {
            for block in list {
                if let Err(error) = self.lend(group, *block, epoch) {
                    self.take_back(blocks, epoch);
                    return Err(error);
                }
            }
        }
        let (state, _) = state::step(State::Offered, Input::Reserve);
        let blocks = Arc::new(blocks.to_vec());
        let expires = deadline;
        self.entries.insert(epoch, Reservation { state, key, blocks, deadline, expires, holder: None });
        self.leases.insert((expires, epoch));
        Ok(())
    }

    fn check(&self, epoch: Epoch, blocks: &[Vec<BlockId>]) -> Result<(), TransferError> {
        let total: usize = blocks.iter().map(Vec::len).sum();
        let bound = |what, limit: usize, asked: usize| match asked <= limit {
            true => Ok(()),
            false => Err(TransferError::Limit { what, limit: limit as u64, asked: asked as u64 }),
        };
        if blocks.len() != self.loans.len() {
            let problem = format!("lists for {} groups, the layout has {}", blocks.len(), self.loans.len());
            return Err(TransferError::argument("blocks", problem));
        }
        if total == 0 {
            return Err(TransferError::argument("blocks", "none; a reservation holds at least one"));
        }
        if self.entries.contains_key(&epoch) {
            return Err(TransferError::argument("epoch", format!("{epoch} is in use; epochs are never reused")));
        }
        bound("reservations", self.limits.handoffs, self.entries.len() + 1)?;
        bound("blocks of a reservation", self.limits.blocks_per_handoff, total)
    }

    fn lend(&mut self, group: usize, block: BlockId, epoch: Epoch) -> Result<(), TransferError> {
        let pool = self.loans[group].len();
        let Some(loan) = self.loans[group].get_mut(block.0 as usize) else {
            let problem = format!("{block} of group {group}, its pool has {pool} blocks");
            return Err(TransferError::argument("blocks", problem));
        };
        match *loan {
            // I3: a block that a peer may still write to is never lent again.
            Some(holder) => Err(TransferError::Lent { group: group as u32, block, epoch: holder }),
            None => {
                *loan = Some(epoch);
                Ok(())
            }
        }
    }

    fn take_back(&mut self, blocks: &[Vec<BlockId>], epoch: Epoch) {
        for (loans, list) in self.loans.iter_mut().zip(blocks) {
            for block in list {
                if let Some(loan) = loans.get_mut(block.0 as usize) {
                    loan.take_if(|holder| *holder == epoch);
                }
            }
        }
    }

    /// Grants a session access to a reservation whose key it knows, or says why not. The lease runs until `until` unless it is renewed.
    pub(crate) fn grant(&mut self, epoch: Epoch, key: u64, holder: Holder, until: Instant) -> Result<Blocks, String> {
        let entry = self.entries.get_mut(&epoch).ok_or("it ended or never was")?;
        if entry.key != key {
            return Err("the key is another's".into());
        }
        let (state, action) = state::step(entry.state, Input::Grant);
        if action != Action::Begin {
            return Err(format!("it is {:?} already", entry.state));
        }
        entry.state = state;
        entry.holder = Some(holder);
        let blocks = entry.blocks.clone();
        self.renew(holder.session, until);
        Ok(blocks)
    }

    /// Renews the leases of a session that was heard from: until `until`, but no later than their deadlines.
    pub(crate) fn renew(&mut self, session: SessionId, until: Instant) {
        for (epoch, entry) in &mut self.entries {
            if entry.state == State::Transferring && entry.holder.is_some_and(|h| h.session == session) {
                self.leases.remove(&(entry.expires, *epoch));
                entry.expires = until.min(entry.deadline);
                self.leases.insert((entry.expires, *epoch));
            }
        }
    }

    /// Steps a reservation for its owner. None when there is no such reservation.
    pub(crate) fn step(&mut self, epoch: Epoch, input: Input) -> Option<Transition> {
        let entry = self.entries.get_mut(&epoch)?;
        let before = entry.state;
        let (after, action) = state::step(before, input);
        entry.state = after;
        let stepped = Transition { before, after, action, holder: entry.holder };
        if after != before && !matches!(after, State::Reserved | State::Transferring) {
            self.leases.remove(&(entry.expires, epoch));
        }
        if after == State::Released
            && let Some(entry) = self.entries.remove(&epoch)
        {
            self.take_back(&entry.blocks, epoch);
        }
        Some(stepped)
    }

    /// Steps a reservation for a peer's session. None when that session was not granted access under this epoch.
    pub(crate) fn step_as(&mut self, session: SessionId, epoch: Epoch, input: Input) -> Option<Transition> {
        let holder = self.entries.get(&epoch)?.holder;
        if holder.is_some_and(|h| h.session == session) { self.step(epoch, input) } else { None }
    }

    /// Epochs that a session was granted access to and that are not over.
    pub(crate) fn held_by(&self, session: SessionId) -> Vec<Epoch> {
        self.entries
            .iter()
            .filter(|(_, r)| r.holder.is_some_and(|h| h.session == session))
            .map(|(epoch, _)| *epoch)
            .collect()
    }

    /// When the next lease runs out.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.leases.first().map(|(at, _)| *at)
    }

    /// Epochs whose lease has run out, each with its peer if the peer's silence is the reason.
    pub(crate) fn expired(&self, now: Instant) -> Vec<(Epoch, Option<WorkerId>)> {
        let over = self.leases.iter().take_while(|(at, _)| *at <= now).map(|(_, epoch)| *epoch);
        let silent = |epoch| self.entries.get(&epoch).filter(|r| r.deadline > now).and_then(|r| r.holder);
        over.map(|epoch| (epoch, silent(epoch).map(|holder| holder.peer))).collect()
    }

    #[cfg(feature = "testing")]
    pub(crate) fn holder(&self, epoch: Epoch) -> Option<Option<SessionId>> {
        self.entries.get(&epoch).map(|entry| entry.holder.map(|holder| holder.session))
    }

    /// Reservations that are not over.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::{KvDtype, KvGroup, KvLayout};

    use super::*;

    fn table() -> Table {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 4, head_dim: 8, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F32, block_size: 4, groups: vec![group] };
        let limits = TransferLimits { handoffs: 2, blocks_per_handoff: 4, ..TransferLimits::default() };
        Table::new(&PoolGeometry::uniform(layout, 8), limits)
    }

    fn holder(session: SessionId) -> Holder {
        Holder { session, peer: WorkerId(100 + session), transport: TransportKind::Tcp }
    }

    #[test]
    fn a_lease_lasts_while_its_peer_is_heard_of_and_no_longer_than_its_deadline() {
        let mut table = table();
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        table.reserve(Epoch(1), 0, &ids(0..1), at(10)).unwrap();
        table.reserve(Epoch(2), 0, &ids(1..2), at(10)).unwrap();
        table.grant(Epoch(1), 0, holder(1), at(2)).unwrap();
        table.grant(Epoch(2), 0, holder(2), at(3)).unwrap();
        table.renew(1, at(5));
        assert_eq!(table.expired(at(4)), [(Epoch(2), Some(WorkerId(102)))]);
        table.step(Epoch(2), Input::Expire).unwrap();
        // Epoch 2 has expired: its peer keeps the blocks, and hearing from that peer again changes nothing.
        table.renew(2, at(9));
        table.renew(1, at(20));
        assert_eq!(table.next_expiry(), Some(at(10)));
        assert_eq!(table.expired(at(10)), [(Epoch(1), None)]);
    }

    fn ids(range: std::ops::Range<u32>) -> Vec<Vec<BlockId>> {
        vec![range.map(BlockId).collect()]
    }

    #[test]
    fn a_lent_block_is_lent_once_until_its_epoch_is_over() {
        let mut table = table();
        let soon = Instant::now();
        table.reserve(Epoch(1), 0, &ids(0..3), soon).unwrap();
        // I3
        let error = table.reserve(Epoch(2), 0, &ids(2..4), soon).unwrap_err();
        assert_eq!(error, TransferError::Lent { group: 0, block: BlockId(2), epoch: Epoch(1) });
        // The refused reservation holds nothing.
        table.reserve(Epoch(3), 0, &ids(3..5), soon).unwrap();
        table.grant(Epoch(1), 0, holder(9), soon).unwrap();
        table.step(Epoch(1), Input::Abort).unwrap();
        table.step(Epoch(3), Input::Abort).unwrap();
        assert!(table.reserve(Epoch(4), 0, &ids(0..1), soon).is_err(), "the peer has not stopped yet");
        assert_eq!(table.step_as(8, Epoch(1), Input::Fenced), None, "another session's word is worth nothing");
        assert_eq!(table.step_as(9, Epoch(1), Input::Fenced).map(|s| s.action), Some(Action::Free));
        table.reserve(Epoch(4), 0, &ids(0..1), soon).unwrap();
    }

    #[test]
    fn bad_reservations_name_what_is_wrong() {
        let mut table = table();
        let now = Instant::now();
        let mut message = |epoch, blocks: &[Vec<BlockId>]| {
            table.reserve(Epoch(epoch), 0, blocks, now).map_err(|e| e.to_string()).err().unwrap_or_default()
        };
        assert!(message(1, &[]).contains("lists for 0 groups"));
        assert!(message(1, &[vec![]]).contains("none"));
        assert!(message(1, &ids(7..9)).contains("b8 of group 0"));
        assert!(message(1, &ids(0..5)).contains("5 asked, the limit is 4"));
        assert!(message(1, &[vec![BlockId(1), BlockId(1)]]).contains("still lent under e1"));
        assert_eq!(message(1, &ids(0..1)), "");
        assert!(message(1, &ids(1..2)).contains("never reused"));
        assert_eq!(message(2, &ids(1..2)), "");
        assert!(message(3, &ids(2..3)).contains("3 asked, the limit is 2"));
    }

    #[test]
    fn leases_run_out_in_order_and_end_with_verification() {
        let mut table = table();
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        table.reserve(Epoch(1), 5, &ids(0..1), at(2)).unwrap();
        table.reserve(Epoch(2), 6, &ids(1..2), at(1)).unwrap();
        assert_eq!(table.next_expiry(), Some(at(1)));
        assert_eq!(table.expired(at(0)), []);
        assert_eq!(table.expired(at(9)), [(Epoch(2), None), (Epoch(1), None)]);
        assert!(table.grant(Epoch(1), 6, holder(1), at(9)).unwrap_err().contains("key"));
        table.grant(Epoch(1), 5, holder(1), at(9)).unwrap();
        assert!(table.grant(Epoch(1), 5, holder(2), at(9)).unwrap_err().contains("Transferring already"));
        table.step_as(1, Epoch(1), Input::Verify).unwrap();
        assert_eq!(table.expired(at(9)), [(Epoch(2), None)]);
        table.step(Epoch(2), Input::Expire).unwrap();
        assert_eq!((table.next_expiry(), table.len()), (None, 1));
        assert_eq!(table.held_by(1), [Epoch(1)]);
    }
}
