//! The checker's record of blocks that came with a fetched prefix: whether anything is computed on them.

use std::collections::BTreeSet;

use baton_engine::Batch;
use baton_roles::{Decode as Role, WorkerCore};
use baton_types::{BlockId, Epoch};

use crate::events::Process;
use crate::pool::each;
use crate::world::World;

/// A block is written to by others.
pub(crate) fn forget(fetched: &mut BTreeSet<(usize, BlockId)>, block: (usize, BlockId)) {
    fetched.remove(&block);
}

impl World {
    /// Notes the blocks of a prefix that was verified, unless the epoch is a request's.
    pub(crate) fn prefix_is_here(&mut self, here: Process, epoch: Epoch) {
        let receiver = &mut self.receivers[here];
        if let Some(lent) = receiver.books.get(&epoch).filter(|_| receiver.fetches.contains(&epoch)) {
            receiver.fetched.extend(each(&lent.blocks));
            self.summary.fetched += 1;
        }
    }

    /// Counts the rows of a step that read fetched KV, and forgets the blocks that the step writes to.
    pub(crate) fn count_fetched(&mut self, here: Process, core: &mut WorkerCore<Role>, step: u64) {
        let (size, fetched) = (self.geometry.layout.block_size as usize, &mut self.receivers[here].fetched);
        if fetched.is_empty() {
            return;
        }
        let count = core.with_batch(step, |batch: &Batch<'_>| {
            let copied = batch.copies.iter().map(|copy| (copy.group, copy.to));
            let written = copied.chain(batch.swap_in.iter().map(|swap| (swap.group, swap.block)));
            written.for_each(|block| forget(fetched, block));
            let rows = batch.rows.iter().filter(|row| {
                let (from, to) = (row.start as usize / size, (row.start as usize + row.tokens.len()).div_ceil(size));
                let reads = row.tables.iter().enumerate().any(|(group, table)| {
                    let before = table.blocks().iter().take(row.start as usize / size);
                    { before }.any(|block| fetched.contains(&(group, *block)))
                });
                for (group, table) in row.tables.iter().enumerate() {
                    let written = table.blocks().get(from..to.min(table.blocks().len())).unwrap_or_default();
                    written.iter().for_each(|block| forget(fetched, (group, *block)));
                }
                reads
            });
            rows.count() as u64
        });
        self.summary.rows_fetched += count.unwrap_or(0);
    }
}
