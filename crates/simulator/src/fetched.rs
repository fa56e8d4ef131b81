//! The checker's record of blocks that came with a fetched prefix: who gave them, and whether anything is computed on them.

use std::collections::BTreeMap;

use baton_engine::Batch;
use baton_roles::{RoleCore, WorkerCore};
use baton_types::{BlockId, Epoch};

use crate::ends::Receiver;
use crate::events::{Life, Process};
use crate::pool::each;
use crate::world::World;

/// Who gave a block: a process, in one of its lives.
pub(crate) type Giver = (Process, Life);
/// Blocks with their groups.
pub(crate) type Fetched = BTreeMap<(usize, BlockId), Giver>;

/// Blocks are written to by others.
pub(crate) fn forget(fetched: &mut Fetched, blocks: impl Iterator<Item = (usize, BlockId)>) {
    for block in blocks {
        fetched.remove(&block);
    }
}

impl World {
    /// Notes the blocks of a prefix that was verified, unless the epoch is a request's.
    pub(crate) fn prefix_is_here(&mut self, here: Process, epoch: Epoch) {
        let receiver = &self.receivers[here];
        let Some(lent) = receiver.books.get(&epoch).filter(|_| receiver.fetches.contains(&epoch)) else { return };
        let blocks: Vec<(usize, BlockId)> = each(&lent.blocks).collect();
        self.summary.fetched += 1;
        let moves = self.senders.iter().find_map(|(process, sender)| {
            let mut handoffs = sender.handoffs.iter();
            let (id, _) =
                handoffs.find(|(_, h)| h.prefix && (h.to, h.peer, h.epoch()) == (here, receiver.id, epoch))?;
            Some((process, *id, sender.life))
        });
        // The giver may be gone already.
        let Some((process, id, life)) = moves else { return };
        if matches!(process, Process::KvStore(_)) {
            self.summary.given += 1;
            self.milestone("given", here);
            if self.outlives(process, id) {
                self.summary.outlived += 1;
                self.milestone("outlived", here);
            }
        }
        self.receivers[here].fetched.extend(blocks.into_iter().map(|block| (block, (process, life))));
    }

    /// Whether a KV store gives by this handoff only what it took from processes that are gone.
    fn outlives(&self, store: Process, handoff: u64) -> bool {
        let memory = &self.senders[store].memory;
        let fetched = &self.receivers[store].fetched;
        let given = fetched.iter().filter(|((group, block), _)| memory.is_owner(*group, *block, handoff));
        let mut givers = given.map(|(_, giver)| *giver).peekable();
        let gone = |(process, life): Giver| !self.is_alive(process) || self.life_of(process) != life;
        givers.peek().is_some() && givers.all(gone)
    }

    /// Counts the rows of a step that read fetched KV, and forgets the blocks that the step writes to.
    pub(crate) fn count_fetched<R: RoleCore>(&mut self, here: Process, core: &mut WorkerCore<R>, step: u64) {
        let size = self.geometry.layout.block_size as usize;
        let Receiver { fetched, seen, .. } = &mut self.receivers[here];
        if fetched.is_empty() {
            return;
        }
        let counts = core.with_batch(step, |batch: &Batch<'_>| {
            forget(fetched, batch.copies.iter().map(|copy| (copy.group, copy.to)));
            let (mut rows, mut given) = (0, 0);
            for row in batch.rows {
                let (from, to) = (row.start as usize / size, (row.start as usize + row.tokens.len()).div_ceil(size));
                let before =
                    |group: usize| row.tables[group].blocks().iter().take(from).map(move |block| (group, *block));
                let reads = (0..row.tables.len()).flat_map(before).any(|block| fetched.contains_key(&block));
                rows += u64::from(reads);
                let stored = |block: &(usize, BlockId)| matches!(fetched.get(block), Some((Process::KvStore(_), _)));
                if reads && seen.insert(row.seq) {
                    given += (before(0).filter(stored).count() * size) as u64;
                }
                for (group, table) in row.tables.iter().enumerate() {
                    let written = table.blocks().get(from..to.min(table.blocks().len())).unwrap_or_default();
                    forget(fetched, written.iter().map(|block| (group, *block)));
                }
            }
            (rows, given)
        });
        let (rows, given) = counts.unwrap_or_default();
        if given > 0 {
            self.milestone("found", here);
        }
        self.summary.rows_fetched += rows;
        self.summary.given_tokens += given;
    }
}
