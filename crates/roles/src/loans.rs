//! Blocks that are lent to a peer, by epoch: until their KV is verified, or until a fence confirms that nobody can write to them (I3).

use std::collections::BTreeMap;
use std::time::Duration;

use baton_engine::{BlockTable, Engine, HOLE};
use baton_handoff::FenceState;
use baton_types::{BlockId, Epoch, SeqId};

use crate::submit::clear;

/// What is lent to a peer under one epoch.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loan {
    /// The sequence whose blocks these are.
    pub seq: SeqId,
    /// A new epoch, never used before.
    pub epoch: Epoch,
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Per group: index in the sequence of the first block that travels.
    pub first: Vec<u32>,
    /// Per group: the blocks, in token order.
    pub blocks: Vec<Vec<BlockId>>,
    /// How long they are lent at most.
    pub lease: Duration,
}

/// The loans of one part of a worker. All parts share the worker's receiver, so each has epochs of its own.
#[derive(Debug)]
pub(crate) struct Loans {
    next: u64,
    /// Neither verified nor given up.
    open: BTreeMap<Epoch, SeqId>,
    /// Given up and not fenced yet.
    fencing: BTreeMap<Epoch, SeqId>,
}

/// Epochs of a worker are shared out among so many parts.
const PARTS: u64 = 2;

impl Loans {
    /// Loans for the answers of requests: odd epochs.
    pub fn of_answers() -> Loans {
        Loans { next: 1, open: BTreeMap::new(), fencing: BTreeMap::new() }
    }

    /// Loans for prefixes that are fetched: even epochs.
    pub fn of_fetches() -> Loans {
        Loans { next: 2, ..Loans::of_answers() }
    }

    /// Lends the blocks that the engine has set aside for a sequence, under a new epoch.
    pub fn lend(&mut self, engine: &Engine, seq: SeqId, lease: Duration) -> Loan {
        // I3: the blocks before these are shared with others, and nobody is told to write to them.
        let from = engine.lent_from(seq).unwrap_or(0);
        let blocks = lent_blocks(engine, seq);
        let tokens = engine.tables(seq).and_then(<[BlockTable]>::first).map_or(0, BlockTable::tokens);
        let epoch = Epoch(self.next);
        self.next += PARTS;
        self.open.insert(epoch, seq);
        Loan { seq, epoch, tokens, first: vec![from; blocks.len()], blocks, lease }
    }

    /// The sequence of a loan that is neither verified nor given up.
    pub fn get(&self, epoch: Epoch) -> Option<SeqId> {
        self.open.get(&epoch).copied()
    }

    /// Ends such a loan. `None`: it was given up before.
    pub fn end(&mut self, epoch: Epoch) -> Option<SeqId> {
        self.open.remove(&epoch)
    }

    /// A loan's blocks are quarantined, and a fence is asked for.
    pub fn give_up(&mut self, epoch: Epoch, seq: SeqId) {
        self.open.remove(&epoch);
        self.fencing.insert(epoch, seq);
    }

    /// The fence has begun. If nobody could write any more, it is over.
    pub fn fence_begun(&mut self, engine: &mut Engine, epoch: Epoch, state: FenceState) {
        if state == FenceState::Clear {
            self.fenced(engine, epoch);
        }
    }

    /// Nobody can write to a loan's blocks any more.
    pub fn fenced(&mut self, engine: &mut Engine, epoch: Epoch) {
        if let Some(seq) = self.fencing.remove(&epoch) {
            clear(engine, seq);
        }
    }

    /// Whether this is one of these loans, and not over.
    pub fn has(&self, epoch: Epoch) -> bool {
        self.open.contains_key(&epoch) || self.fencing.contains_key(&epoch)
    }

    /// How many a peer may write under, and how many are being fenced.
    pub fn counts(&self) -> (usize, usize) {
        (self.open.len(), self.fencing.len())
    }
}

/// Per group: the blocks that are lent for a sequence, in token order.
pub(crate) fn lent_blocks(engine: &Engine, seq: SeqId) -> Vec<Vec<BlockId>> {
    let from = engine.lent_from(seq).unwrap_or(0) as usize;
    // Blocks that the next token does not see do not travel.
    let here = |blocks: &[BlockId]| blocks.iter().copied().filter(|block| *block != HOLE).collect();
    let lent = |table: &BlockTable| here(table.blocks().get(from..).unwrap_or_default());
    engine.tables(seq).unwrap_or_default().iter().map(lent).collect()
}
