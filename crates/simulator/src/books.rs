//! What a worker's shell knows of its blocks, for [`crate::accounting`]: its ends, its store's threads, its streams and what waits in its inbox.

use std::collections::{BTreeMap, VecDeque};

use baton_engine::{Hold, Holding};
use baton_handoff::ReceiverEvent;
use baton_kv_cache::BlockState;
use baton_roles::{Input, decode, exchange, prefill, tiers};
use baton_types::{BlockId, Epoch, PoolGeometry, SeqId};

use crate::accounting::{Checked, present};
use crate::decode::Decode;
use crate::ends::{Receiver, Sender};
use crate::events::Process;
use crate::kept::Kept;
use crate::kv_store::KvStore;
use crate::prefill::Prefill;
use crate::world::World;

/// What a worker's shell knows of its blocks.
pub(crate) struct Books<'a> {
    /// The pool that the worker was started with.
    pub geometry: &'a PoolGeometry,
    receiver: &'a Receiver,
    sender: &'a Sender,
    kept: Option<&'a Kept>,
    /// What waits in its inbox.
    said: Vec<Said>,
    /// Whether a sequence has a stream.
    asked: Box<dyn Fn(SeqId) -> bool + 'a>,
}

/// What an input says of a sequence or an epoch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Said {
    /// Its stream was dropped.
    Cancelled(SeqId),
    /// Its handoff has ended.
    Ended(SeqId),
    /// The store's threads are done with it.
    Stored(SeqId),
    /// Nobody writes under this epoch any more.
    Over(Epoch),
}

/// What waits in an inbox.
fn waiting<C>(inbox: &VecDeque<Input<C>>, of_role: impl Fn(&C) -> Option<Said>) -> Vec<Said> {
    let said = |input: &Input<C>| match input {
        Input::Command(command) => of_role(command),
        Input::Exchange(exchange::Command::Cancel(seq)) => Some(Said::Cancelled(*seq)),
        Input::Exchange(exchange::Command::Ended { seq, .. }) => Some(Said::Ended(*seq)),
        Input::Exchange(exchange::Command::Received(event)) => over(event),
        Input::Tiers(tiers::Command::Loaded(seq, _) | tiers::Command::Saved(seq, _)) => Some(Said::Stored(*seq)),
        _ => None,
    };
    inbox.iter().filter_map(said).collect()
}

fn over(event: &ReceiverEvent) -> Option<Said> {
    match event {
        ReceiverEvent::Verified { epoch, .. } | ReceiverEvent::Fenced { epoch } => Some(Said::Over(*epoch)),
        ReceiverEvent::Failed { .. } => None,
    }
}

impl Decode {
    fn books<'a>(&'a self, receiver: &'a Receiver, sender: &'a Sender) -> Books<'a> {
        let of_role = |command: &decode::Command| match command {
            decode::Command::Cancel(seq) => Some(Said::Cancelled(*seq)),
            decode::Command::Received(event) => over(event),
            _ => None,
        };
        Books {
            geometry: &receiver.memory.geometry,
            receiver,
            sender,
            kept: self.kept.as_ref(),
            said: waiting(&self.inbox, of_role),
            asked: Box::new(|seq| self.callers.contains_key(&seq) || self.exchanging.callers.contains_key(&seq)),
        }
    }
}

impl Prefill {
    fn books<'a>(&'a self, receiver: &'a Receiver, sender: &'a Sender) -> Books<'a> {
        let of_role = |command: &prefill::Command| match command {
            prefill::Command::Cancel(seq) => Some(Said::Cancelled(*seq)),
            prefill::Command::Ended { seq, .. } | prefill::Command::Quiet(seq) => Some(Said::Ended(*seq)),
            _ => None,
        };
        Books {
            geometry: &sender.memory.geometry,
            receiver,
            sender,
            kept: self.kept.as_ref(),
            said: waiting(&self.inbox, of_role),
            asked: Box::new(|seq| self.callers.contains_key(&seq) || self.exchanging.callers.contains_key(&seq)),
        }
    }
}

impl KvStore {
    fn books<'a>(&'a self, receiver: &'a Receiver, sender: &'a Sender) -> Books<'a> {
        Books {
            geometry: &receiver.memory.geometry,
            receiver,
            sender,
            kept: self.kept.as_ref(),
            said: waiting(&self.inbox, |never| match *never {}),
            asked: Box::new(|seq| self.exchanging.callers.contains_key(&seq)),
        }
    }
}

impl World {
    /// What is known of a worker's blocks.
    pub(crate) fn books(&self, process: Process) -> Option<Books<'_>> {
        Some(match process {
            Process::Prefill(place) => self.prefills[place].books(&self.receivers[process], &self.senders[process]),
            Process::Decode(place) => self.decodes[place].books(&self.receivers[process], &self.senders[process]),
            Process::KvStore(place) => self.kv_stores[place].books(&self.receivers[process], &self.senders[process]),
            _ => return None,
        })
    }
}

impl Books<'_> {
    fn said(&self, said: Said) -> bool {
        self.said.contains(&said)
    }

    /// A block that a peer or a transfer may reach must be in one of these states. `None` when nobody may reach it.
    pub(crate) fn reached(&self, group: usize, block: BlockId) -> Option<&[BlockState]> {
        let lent = self.receiver.memory.owner(group, block).is_some();
        let read = self.sender.memory.owner(group, block).is_some();
        match (lent, read) {
            // I3: nobody reads what a peer may write to.
            (true, true) => Some(&[]),
            (true, false) => Some(&[BlockState::Lent, BlockState::Quarantined]),
            (false, true) => Some(&[BlockState::Used, BlockState::Quarantined]),
            (false, false) => self.kept?.reached(group, block),
        }
    }

    /// Whether a store's threads, or what they have said, will end what this sequence holds. `None`: it is nothing of theirs.
    pub(crate) fn is_stored(&self, holding: &Holding<'_>, stores: bool) -> Option<Checked> {
        let kept = self.kept?;
        let lent = kept.written.get(&holding.seq).filter(|_| matches!(holding.hold, Hold::Lent(_)));
        if let (Some(written), Hold::Lent(from)) = (lent, holding.hold) {
            let mut lent = present(holding).filter(|(_, at, _)| *at >= Some(from));
            return Some(match lent.find(|(group, _, block)| !written.contains(&(*group, *block))) {
                Some((group, _, block)) => Err(format!("{block} of group {group} is lent, and no load writes to it")),
                None => Ok(()),
            });
        }
        match kept.moves(holding.seq) || self.said(Said::Stored(holding.seq)) {
            true => Some(Ok(())),
            false if stores && holding.hold == Hold::Waiting => Some(Ok(())),
            false => stores.then(|| Err("nobody copies its blocks".into())),
        }
    }

    /// Whether somebody will end what this sequence holds. If not, its blocks have leaked.
    pub(crate) fn will_end(&self, holding: &Holding<'_>) -> Checked {
        let seq = holding.seq;
        if !holding.ended && !(self.asked)(seq) && !self.said(Said::Cancelled(seq)) {
            return Err("it has no stream".into());
        }
        let lends = self.receiver.lends.get(&seq).copied();
        match (holding.hold, lends) {
            (Hold::Lent(from), Some(epoch)) => self.is_lent(epoch, holding, from),
            (Hold::Quarantined, Some(epoch)) => self.is_lent(epoch, holding, 0),
            (Hold::Lent(_), None) => Err("lent under no epoch".into()),
            (Hold::Quarantined | Hold::Held, _) => match self.sender.of(seq).is_some() || self.said(Said::Ended(seq)) {
                true => Ok(()),
                false => Err("its handoff is over".into()),
            },
            _ => Ok(()),
        }
    }

    /// Whether the end of this epoch is still to come, and the blocks from `from` on are lent under it.
    fn is_lent(&self, epoch: Epoch, holding: &Holding<'_>, from: u32) -> Checked {
        let receiver = self.receiver;
        let open = receiver.books.contains_key(&epoch);
        match receiver.ledger.holder(epoch) {
            Some(Some(session)) if open && !receiver.sessions.contains_key(&session) => {
                return Err(format!("the session that {epoch} was granted to is over"));
            }
            None if open => return Err(format!("{epoch} is over, and nobody was told")),
            _ if !open && !self.said(Said::Over(epoch)) => return Err(format!("{epoch} is over")),
            _ => {}
        }
        let owner = open.then_some(epoch);
        let lent = present(holding).filter(|(_, at, _)| *at >= Some(from));
        let owners = lent.map(|(group, _, block)| (block, receiver.memory.owner(group, block)));
        match { owners }.find(|(_, found)| *found != owner) {
            Some((block, found)) => Err(format!("{block} is lent under {found:?} instead of {owner:?}")),
            None => Ok(()),
        }
    }
}

impl Kept {
    /// Its threads write to a block, or read it.
    fn reached(&self, group: usize, block: BlockId) -> Option<&[BlockState]> {
        let among =
            |of: &BTreeMap<SeqId, Vec<(usize, BlockId)>>| of.values().any(|list| list.contains(&(group, block)));
        let written = among(&self.written).then_some(&[BlockState::Lent, BlockState::Quarantined][..]);
        written.or_else(|| among(&self.read).then_some(&[BlockState::Used, BlockState::Quarantined][..]))
    }
}
