//! Who holds which blocks, for checkers that keep accounts of their own.

use baton_kv_cache::BlockState;
use baton_types::{BlockId, SeqId};

use crate::sequence::Phase;
use crate::{BlockTable, Engine};

/// What a sequence does with its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Hold {
    /// It has none in the pool.
    Waiting,
    /// From this index of each table on they are lent to a peer. Those before it are shared.
    Lent(u32),
    /// It is in the batch.
    Running,
    /// Its prompt is computed, and a transfer may read them.
    Held,
    /// The sequence is gone, and a peer or a transfer may still reach them.
    Quarantined,
}

/// One sequence's blocks.
#[derive(Clone, Debug)]
pub struct Holding<'a> {
    /// The sequence.
    pub seq: SeqId,
    /// What it does with them.
    pub hold: Hold,
    /// Its block tables, one per layer group.
    pub tables: &'a [BlockTable],
    /// Blocks that it copies before its first step, one per layer group or none.
    pub sources: &'a [BlockId],
    /// It has ended, and keeps its blocks until the steps in flight are over.
    pub ended: bool,
}

/// What the pool says of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockAccount {
    /// Its state.
    pub state: BlockState,
    /// How many owners it has.
    pub owners: u32,
    /// The prefix index names it.
    pub indexed: bool,
}

impl Engine {
    /// Every sequence that is here, and every quarantine.
    pub fn holdings(&self) -> impl Iterator<Item = Holding<'_>> {
        let sequences = self.sequences.iter().map(|(seq, sequence)| {
            let (hold, sources) = match &sequence.phase {
                Phase::Waiting => (Hold::Waiting, &[][..]),
                Phase::Receiving(lent) => (Hold::Lent(lent.shared()), &[][..]),
                Phase::Running(tables) => (Hold::Running, tables.sources()),
                Phase::Held(tables) => (Hold::Held, tables.sources()),
            };
            let ended = sequence.doomed.is_some();
            Holding { seq: *seq, hold, tables: sequence.tables(), sources, ended }
        });
        let quarantines = self.quarantine.iter().map(|(seq, quarantine)| Holding {
            seq: *seq,
            hold: Hold::Quarantined,
            tables: quarantine.as_slice(),
            sources: &[],
            ended: true,
        });
        sequences.chain(quarantines)
    }

    /// What the pool says of a block; `None` when there is no such block.
    pub fn block(&self, group: usize, block: BlockId) -> Option<BlockAccount> {
        let (state, owners) = self.pools.group(group)?.state(block).ok()?;
        Some(BlockAccount { state, owners, indexed: self.pools.is_indexed(group, block) })
    }
}
