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
use crate::decode::{Decode, DecodeHost};
use crate::events::Place;
use crate::kept::Kept;
use crate::prefill::{Prefill, PrefillHost};
use crate::world::World;

type Checked = Result<(), String>;

/// What a worker's shell knows of its blocks.
trait Books {
    /// The pool that it was started with.
    fn geometry(&self) -> &PoolGeometry;
    /// A block that a peer or a transfer may reach must be in one of these states. `None` when nobody may reach it.
    fn reached(&self, group: usize, block: BlockId) -> Option<&[BlockState]>;
    /// Whether a store's threads, or what they have said, will end what this sequence holds. `None`: it is nothing of theirs.
    fn is_stored(&self, holding: &Holding<'_>, stores: bool) -> Option<Checked>;
    /// Whether somebody will end what this sequence holds. If not, its blocks have leaked.
    fn will_end(&self, holding: &Holding<'_>) -> Checked;
}

/// Access to the books of one kind of worker.
pub(crate) trait Counted {
    fn count(world: &World, place: Place, accounts: &mut Accounts, held: &Held<'_>) -> Checked;
}

impl Counted for DecodeHost {
    fn count(world: &World, place: Place, accounts: &mut Accounts, held: &Held<'_>) -> Checked {
        accounts.count(&world.decodes[place], held)
    }
}

impl Counted for PrefillHost {
    fn count(world: &World, place: Place, accounts: &mut Accounts, held: &Held<'_>) -> Checked {
        accounts.count(&world.prefills[place], held)
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
    fn count(&mut self, books: &impl Books, held: &Held<'_>) -> Checked {
        let Held { engine, busy, stores } = *held;
        let geometry = books.geometry();
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
            let ends = books.is_stored(&holding, stores(holding.seq)).unwrap_or_else(|| books.will_end(&holding));
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
    fn compare(&self, books: &impl Books, engine: &Engine) -> Checked {
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

/// The same for all workers: [`Books::is_stored`].
fn is_stored<C>(kept: &Kept, inbox: &VecDeque<Input<C>>, holding: &Holding<'_>, stores: bool) -> Option<Checked> {
    let said = |input: &Input<C>| match input {
        Input::Tiers(tiers::Command::Loaded(seq, _) | tiers::Command::Saved(seq)) => *seq == holding.seq,
        _ => false,
    };
    let lent = kept.written.get(&holding.seq).filter(|_| matches!(holding.hold, Hold::Lent(_)));
    if let (Some(written), Hold::Lent(from)) = (lent, holding.hold) {
        let mut lent = present(holding).filter(|(_, at, _)| *at >= Some(from));
        return Some(match lent.find(|(group, _, block)| !written.contains(&(*group, *block))) {
            Some((group, _, block)) => Err(format!("{block} of group {group} is lent, and no load writes to it")),
            None => Ok(()),
        });
    }
    match kept.moves(holding.seq) || inbox.iter().any(said) {
        true => Some(Ok(())),
        false if stores && holding.hold == Hold::Waiting => Some(Ok(())),
        false => stores.then(|| Err("nobody copies its blocks".into())),
    }
}

impl Decode {
    /// Whether the engine has yet to hear of the end of an epoch.
    fn will_hear(&self, ended: Epoch) -> bool {
        self.inbox.iter().any(|input| match input {
            Input::Command(decode::Command::Received(
                ReceiverEvent::Verified { epoch, .. } | ReceiverEvent::Fenced { epoch },
            )) => *epoch == ended,
            _ => false,
        })
    }
}

impl Books for Decode {
    fn geometry(&self) -> &PoolGeometry {
        &self.memory.geometry
    }

    /// A peer may write.
    fn reached(&self, group: usize, block: BlockId) -> Option<&[BlockState]> {
        let lent = self.memory.owner(group, block).map(|_| &[BlockState::Lent, BlockState::Quarantined][..]);
        lent.or_else(|| self.kept.as_ref()?.reached(group, block))
    }

    fn is_stored(&self, holding: &Holding<'_>, stores: bool) -> Option<Checked> {
        is_stored(self.kept.as_ref()?, &self.inbox, holding, stores)
    }

    fn will_end(&self, holding: &Holding<'_>) -> Checked {
        let cancel = |input: &Input<_>| match input {
            Input::Command(decode::Command::Cancel(seq)) | Input::Exchange(exchange::Command::Cancel(seq)) => {
                *seq == holding.seq
            }
            _ => false,
        };
        let asked = self.callers.contains_key(&holding.seq) || self.exchanging.callers.contains_key(&holding.seq);
        if !holding.ended && !asked && !self.inbox.iter().any(cancel) {
            return Err("it has no stream".into());
        }
        let from = match holding.hold {
            Hold::Lent(from) => from,
            Hold::Quarantined => 0,
            _ => return Ok(()),
        };
        let Some(epoch) = self.lends.get(&holding.seq).copied() else { return Err("lent under no epoch".into()) };
        let open = self.books.contains_key(&epoch);
        match self.ledger.holder(epoch) {
            Some(Some(session)) if open && !self.sessions.contains_key(&session) => {
                return Err(format!("the session that {epoch} was granted to is over"));
            }
            None if open => return Err(format!("{epoch} is over, and nobody was told")),
            _ if !open && !self.will_hear(epoch) => return Err(format!("{epoch} is over")),
            _ => {}
        }
        let owner = open.then_some(epoch);
        let lent = present(holding).filter(|(_, at, _)| *at >= Some(from));
        match lent.map(|(group, _, block)| (block, self.memory.owner(group, block))).find(|(_, found)| *found != owner)
        {
            Some((block, found)) => Err(format!("{block} is lent under {found:?} instead of {owner:?}")),
            None => Ok(()),
        }
    }
}

impl Books for Prefill {
    fn geometry(&self) -> &PoolGeometry {
        &self.memory.geometry
    }

    /// A handoff may read.
    fn reached(&self, group: usize, block: BlockId) -> Option<&[BlockState]> {
        let read = self.memory.owner(group, block).map(|_| &[BlockState::Used, BlockState::Quarantined][..]);
        read.or_else(|| self.kept.as_ref()?.reached(group, block))
    }

    fn is_stored(&self, holding: &Holding<'_>, stores: bool) -> Option<Checked> {
        is_stored(self.kept.as_ref()?, &self.inbox, holding, stores)
    }

    fn will_end(&self, holding: &Holding<'_>) -> Checked {
        let of = |input: &Input<_>| match input {
            Input::Command(prefill::Command::Cancel(seq)) | Input::Exchange(exchange::Command::Cancel(seq)) => {
                (*seq == holding.seq, false)
            }
            Input::Command(prefill::Command::Ended { seq, .. } | prefill::Command::Quiet(seq))
            | Input::Exchange(exchange::Command::Ended { seq, .. }) => (false, *seq == holding.seq),
            _ => (false, false),
        };
        let asked = self.callers.contains_key(&holding.seq) || self.exchanging.callers.contains_key(&holding.seq);
        if !holding.ended && !asked && !self.inbox.iter().any(|input| of(input).0) {
            return Err("it has no stream".into());
        }
        let read = matches!(holding.hold, Hold::Held | Hold::Quarantined);
        match read && self.of(holding.seq).is_none() && !self.inbox.iter().any(|input| of(input).1) {
            true => Err("its handoff is over".into()),
            false => Ok(()),
        }
    }
}

impl World {
    /// I6 at the end of a run, or of a worker's part in it: nobody holds a block, and all are free or cached.
    pub(crate) fn check_rest(&self, prefills: bool, decodes: bool) -> Result<(), Violation> {
        let rest = |books: &dyn Fn(&mut Accounts, &Held<'_>) -> Checked, engine: &Engine| {
            books(&mut Accounts::default(), &Held::new(engine, false, &|_| false))?;
            match engine.holdings().next() {
                Some(holding) => Err(format!("{} is left", holding.seq)),
                None => Ok(()),
            }
        };
        let prefills = self.prefills.iter().filter(|_| prefills).filter_map(|prefill| {
            let engine = prefill.thread.as_ref()?.core.engine();
            Some(rest(&|accounts, held| accounts.count(prefill, held), engine))
        });
        let decodes = self.decodes.iter().filter(|_| decodes).filter_map(|decode| {
            let engine = decode.thread.as_ref()?.core.engine();
            Some(rest(&|accounts, held| accounts.count(decode, held), engine))
        });
        prefills.chain(decodes).try_for_each(|checked| checked.map_err(|what| self.violation("I6", what)))
    }
}
