//! I6 by the simulation's own count. It shares no code with the engine's check of itself.
//!
//! The engine only says who holds which blocks, and the pool what it thinks of each. The rest is counted here: that these agree, that every
//! block is in one state, and that blocks which others may reach are set aside. The simulated shell knows of each stream, handoff and
//! reservation, so this also finds what nobody will ever give back.

use std::collections::BTreeSet;

use baton_engine::{BlockAccount, BlockCounts, Engine, HOLE, Hold, Holding};
use baton_kv_cache::BlockState;
use baton_types::{BlockId, SeqId};

use crate::Violation;
use crate::books::Books;
use crate::events::Process;
use crate::world::World;

pub(crate) type Checked = Result<(), String>;

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
        let mut aside = BTreeSet::new();
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
        }
        self.aside = aside;
        self.compare(books, engine)
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
pub(crate) fn present<'a>(holding: &'a Holding<'_>) -> impl Iterator<Item = (usize, Option<u32>, BlockId)> + 'a {
    let tables = holding.tables.iter().enumerate();
    let all = tables.flat_map(|(group, table)| (0..).zip(table.blocks()).map(move |(at, block)| (group, at, *block)));
    all.filter(|(_, _, block)| *block != HOLE).map(|(group, at, block)| (group, Some(at), block))
}

impl World {
    /// I6: counts every block of a worker.
    pub(crate) fn count(&self, process: Process, accounts: &mut Accounts, held: &Held<'_>) -> Checked {
        self.books(process).map_or(Ok(()), |books| accounts.count(&books, held))
    }

    /// I6 at the end of a run, or of a worker's part in it: nobody holds a block, and all are free or cached. `lent`: some may still be lent.
    pub(crate) fn check_rest(&self, of: impl Fn(Process) -> bool, lent: bool) -> Result<(), Violation> {
        for process in self.workers().filter(|process| of(*process)) {
            let Some(engine) = self.engine_of(process) else { continue };
            let held = Held::new(engine, false, &|_| false);
            let counted = self.count(process, &mut Accounts::default(), &held);
            counted.map_err(|what| self.violation("I6", what))?;
            let stays = |seq| lent && self.receivers[process].lends.contains_key(&seq);
            if let Some(holding) = engine.holdings().find(|holding| !stays(holding.seq)) {
                return Err(self.violation("I6", format!("{} is left", holding.seq)));
            }
        }
        Ok(())
    }
}
