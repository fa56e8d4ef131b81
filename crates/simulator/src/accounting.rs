//! I6 by the simulation's own count. It shares no code with the engine's check of itself.
//!
//! The engine only says who holds which blocks, and the pool what it thinks of each. The rest is counted here: that these agree, that every
//! block is in one state, and that blocks which others may reach are set aside. The simulated shell knows of each stream, handoff and
//! reservation, so this also finds what nobody will ever give back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use baton_engine::{BlockAccount, BlockCounts, Engine, HOLE, Hold, Holding};
use baton_handoff::ReceiverEvent;
use baton_kv_cache::BlockState;
use baton_roles::{Input, decode, exchange, prefill, tiers};
use baton_types::{BlockId, Epoch, PoolGeometry, SeqId};

use crate::Violation;
use crate::decode::Decode;
use crate::ends::{Receiver, Sender};
use crate::events::Process;
use crate::kept::Kept;
use crate::kv_store::KvStore;
use crate::prefill::Prefill;
use crate::world::World;

type Checked = Result<(), String>;

/// What a worker's shell knows of its blocks.
pub(crate) struct Books<'a> {
    /// The pool that the worker was started with.
    geometry: &'a PoolGeometry,
    receiver: Option<&'a Receiver>,
    sender: Option<&'a Sender>,
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
        Input::Tiers(tiers::Command::Loaded(seq, _) | tiers::Command::Saved(seq)) => Some(Said::Stored(*seq)),
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
            receiver: Some(receiver),
            sender: Some(sender),
            kept: self.kept.as_ref(),
            said: waiting(&self.inbox, of_role),
            asked: Box::new(|seq| self.callers.contains_key(&seq) || self.exchanging.callers.contains_key(&seq)),
        }
    }
}

impl Prefill {
    fn books<'a>(&'a self, sender: &'a Sender) -> Books<'a> {
        let of_role = |command: &prefill::Command| match command {
            prefill::Command::Cancel(seq) => Some(Said::Cancelled(*seq)),
            prefill::Command::Ended { seq, .. } | prefill::Command::Quiet(seq) => Some(Said::Ended(*seq)),
            _ => None,
        };
        Books {
            geometry: &sender.memory.geometry,
            receiver: None,
            sender: Some(sender),
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
            receiver: Some(receiver),
            sender: Some(sender),
            kept: self.kept.as_ref(),
            said: waiting(&self.inbox, |never| match *never {}),
            asked: Box::new(|seq| self.exchanging.callers.contains_key(&seq)),
        }
    }
}

impl World {
    fn books(&self, process: Process) -> Option<Books<'_>> {
        Some(match process {
            Process::Prefill(place) => self.prefills[place].books(&self.senders[process]),
            Process::Decode(place) => self.decodes[place].books(&self.receivers[process], &self.senders[process]),
            Process::KvStore(place) => self.kv_stores[place].books(&self.receivers[process], &self.senders[process]),
            _ => return None,
        })
    }

    /// I6: counts every block of a worker.
    pub(crate) fn count(&self, process: Process, accounts: &mut Accounts, held: &Held<'_>) -> Checked {
        self.books(process).map_or(Ok(()), |books| accounts.count(&books, held))
    }
}

/// What a worker's core says that it holds.
pub(crate) struct Held<'a> {
    engine: &'a Engine,
    /// Steps are in flight.
    busy: bool,
    /// Whether a sequence's blocks move between the pool and the store.
    stores: &'a dyn Fn(SeqId) -> bool,
}

impl<'a> Held<'a> {
    pub(crate) fn new(engine: &'a Engine, busy: bool, stores: &'a dyn Fn(SeqId) -> bool) -> Held<'a> {
        Held { engine, busy, stores }
    }
}

/// How many hold a block, by what they do with it.
#[derive(Clone, Copy, Default, Debug)]
struct Holders {
    used: u32,
    lent: u32,
    aside: u32,
    /// Its quarantine was not there at the last count.
    new: bool,
}

/// One worker's accounts.
#[derive(Default)]
pub(crate) struct Accounts {
    /// Holders of each block, by group; kept to reuse its memory.
    holders: Vec<Vec<Holders>>,
    /// Sequences that were in quarantine at the last count.
    aside: BTreeSet<SeqId>,
}

impl Accounts {
    /// Counts every block.
    fn count(&mut self, books: &Books<'_>, held: &Held<'_>) -> Checked {
        let Held { engine, busy, stores } = *held;
        let geometry = books.geometry;
        self.holders.resize_with(geometry.blocks.len(), Vec::new);
        for (holders, blocks) in self.holders.iter_mut().zip(&geometry.blocks) {
            holders.clear();
            holders.resize(*blocks as usize, Holders::default());
        }
        let (mut aside, mut host) = (BTreeSet::new(), Vec::new());
        for holding in engine.holdings() {
            if holding.hold == Hold::Quarantined {
                aside.insert(holding.seq);
            } else if holding.ended && !busy {
                return Err(format!("{} has ended and is still here, and no step is in flight", holding.seq));
            }
            let stored = books.is_stored(&holding, stores(holding.seq));
            let ends = stored.unwrap_or_else(|| books.will_end(&holding));
            ends.map_err(|what| format!("{} ({:?}): {what}", holding.seq, holding.hold))?;
            self.enter(&holding)?;
            host.extend(holding.host);
        }
        self.aside = aside;
        self.compare(books, engine)?;
        check_host(engine, host)
    }

    /// Enters a sequence as the holder of its blocks.
    fn enter(&mut self, holding: &Holding<'_>) -> Checked {
        let new = !self.aside.contains(&holding.seq);
        let sources = holding.sources.iter().enumerate().map(|(group, block)| (group, None, *block));
        for (group, at, block) in present(holding).chain(sources) {
            let holders = self.holders.get_mut(group).and_then(|holders| holders.get_mut(block.0 as usize));
            let Some(holders) = holders else {
                return Err(format!("{} holds {block} of group {group}, and there is none", holding.seq));
            };
            match (holding.hold, at) {
                (Hold::Quarantined, _) => (holders.aside, holders.new) = (holders.aside + 1, new),
                (Hold::Lent(from), Some(at)) if at >= from => holders.lent += 1,
                _ => holders.used += 1,
            }
        }
        Ok(())
    }

    /// Compares the holders with the pool's states, and counts these.
    fn compare(&self, books: &Books<'_>, engine: &Engine) -> Checked {
        let mut counts = BlockCounts::default();
        for (group, all) in self.holders.iter().enumerate() {
            for (block, holders) in (0..).map(BlockId).zip(all) {
                let Some(account) = engine.block(group, block) else {
                    return Err(format!("the pool has no {block} of group {group}"));
                };
                counts.total += 1;
                *match account.state {
                    BlockState::Free => &mut counts.free,
                    BlockState::Used => &mut counts.used,
                    BlockState::Cached => &mut counts.cached,
                    BlockState::Lent => &mut counts.lent,
                    BlockState::Quarantined => &mut counts.quarantined,
                } += 1;
                if !agrees(account, *holders) {
                    return Err(format!("{block} of group {group} is {account:?}, its holders are {holders:?}"));
                }
                if books.reached(group, block).is_some_and(|states| !states.contains(&account.state)) {
                    return Err(format!("{block} of group {group} is {account:?}, and others may reach it"));
                }
            }
        }
        match counts == engine.counts() {
            true => Ok(()),
            false => Err(format!("counted are {counts:?}, the worker reports {:?}", engine.counts())),
        }
    }
}

/// Whether a block's state is what its holders make it.
fn agrees(account: BlockAccount, holders: Holders) -> bool {
    let BlockAccount { state, owners, indexed } = account;
    let Holders { used, lent, aside, new } = holders;
    let counts = (used, lent, aside);
    match state {
        BlockState::Free => counts == (0, 0, 0) && owners == 0 && !indexed,
        BlockState::Cached => counts == (0, 0, 0) && owners == 0 && indexed,
        BlockState::Lent => counts == (0, 1, 0) && owners == 1 && !indexed,
        BlockState::Quarantined => counts == (0, 0, 1) && owners == 1 && !indexed,
        // In quarantine only those stay in use that others had too when it began.
        BlockState::Used => {
            let alone = aside == 1 && new && owners == 1 && !indexed;
            lent == 0 && owners > 0 && owners == used + aside && !alone
        }
    }
}

/// Group, index and id of each block in a sequence's tables.
fn present<'a>(holding: &'a Holding<'_>) -> impl Iterator<Item = (usize, Option<u32>, BlockId)> + 'a {
    let tables = holding.tables.iter().enumerate();
    let all = tables.flat_map(|(group, table)| (0..).zip(table.blocks()).map(move |(at, block)| (group, at, *block)));
    all.filter(|(_, _, block)| *block != HOLE).map(|(group, at, block)| (group, Some(at), block))
}

/// A block of host memory belongs to one sequence, or it is free.
fn check_host(engine: &Engine, mut host: Vec<(usize, BlockId)>) -> Checked {
    let (held, counts) = (host.len() as u32, engine.host_counts());
    host.sort_unstable();
    host.dedup();
    match (host.len() as u32, counts.used, counts.used + counts.free) == (held, held, counts.total) {
        true => Ok(()),
        false => Err(format!("host memory: {held} blocks are held, {} of them once; {counts:?}", host.len())),
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

impl Books<'_> {
    fn said(&self, said: Said) -> bool {
        self.said.contains(&said)
    }

    /// A block that a peer or a transfer may reach must be in one of these states. `None` when nobody may reach it.
    fn reached(&self, group: usize, block: BlockId) -> Option<&[BlockState]> {
        let lent = self.receiver.and_then(|receiver| receiver.memory.owner(group, block)).is_some();
        let read = self.sender.and_then(|sender| sender.memory.owner(group, block)).is_some();
        match (lent, read) {
            // I3: nobody reads what a peer may write to.
            (true, true) => Some(&[]),
            (true, false) => Some(&[BlockState::Lent, BlockState::Quarantined]),
            (false, true) => Some(&[BlockState::Used, BlockState::Quarantined]),
            (false, false) => self.kept?.reached(group, block),
        }
    }

    /// Whether a store's threads, or what they have said, will end what this sequence holds. `None`: it is nothing of theirs.
    fn is_stored(&self, holding: &Holding<'_>, stores: bool) -> Option<Checked> {
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
    fn will_end(&self, holding: &Holding<'_>) -> Checked {
        let seq = holding.seq;
        if !holding.ended && !(self.asked)(seq) && !self.said(Said::Cancelled(seq)) {
            return Err("it has no stream".into());
        }
        let lends = self.receiver.and_then(|receiver| Some((receiver, *receiver.lends.get(&seq)?)));
        match (holding.hold, lends) {
            (Hold::Lent(from), Some((receiver, epoch))) => self.is_lent(receiver, epoch, holding, from),
            (Hold::Quarantined, Some((receiver, epoch))) => self.is_lent(receiver, epoch, holding, 0),
            (Hold::Lent(_), None) => Err("lent under no epoch".into()),
            (Hold::Quarantined | Hold::Held, _) => {
                let moves = self.sender.is_some_and(|sender| sender.of(seq).is_some());
                match moves || self.said(Said::Ended(seq)) {
                    true => Ok(()),
                    false => Err("its handoff is over".into()),
                }
            }
            _ => Ok(()),
        }
    }

    /// Whether the end of this epoch is still to come, and the blocks from `from` on are lent under it.
    fn is_lent(&self, receiver: &Receiver, epoch: Epoch, holding: &Holding<'_>, from: u32) -> Checked {
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

impl World {
    /// I6 at the end of a run, or of a worker's part in it: nobody holds a block, and all are free or cached.
    pub(crate) fn check_rest(&self, of: impl Fn(Process) -> bool) -> Result<(), Violation> {
        for process in self.workers().filter(|process| of(*process)) {
            let Some(engine) = self.engine_of(process) else { continue };
            let held = Held::new(engine, false, &|_| false);
            let counted = self.count(process, &mut Accounts::default(), &held);
            counted.map_err(|what| self.violation("I6", what))?;
            if let Some(holding) = engine.holdings().next() {
                return Err(self.violation("I6", format!("{} is left", holding.seq)));
            }
        }
        Ok(())
    }
}
