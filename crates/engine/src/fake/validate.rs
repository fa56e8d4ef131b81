//! Checks a batch before the fake model computes anything.

use std::collections::BTreeSet;

use baton_kv_cache::{BlockCopy, HOLE};
use baton_types::BlockId;

use super::{FakeModel, KvMemory};
use crate::{Batch, Row, RunError, Sample};

impl<M: KvMemory> FakeModel<M> {
    /// Checks what can be seen without computing: shapes, tables, last tokens, and that no row writes a block that
    /// another reads or writes.
    pub(super) fn validate(&self, batch: &Batch<'_>) -> Result<(), RunError> {
        let mut written: BTreeSet<(usize, BlockId)> = BTreeSet::new();
        let mut read: BTreeSet<(usize, BlockId)> = BTreeSet::new();
        let sources: BTreeSet<(usize, BlockId)> = batch.copies.iter().map(|copy| (copy.group, copy.from)).collect();
        for BlockCopy { group, from, to } in batch.copies {
            let blocks = self.geometry.blocks.get(*group).copied().unwrap_or(0);
            if from.0 >= blocks || to.0 >= blocks || sources.contains(&(*group, *to)) {
                return Err(RunError(format!("copy of block {from} to {to} in group {group}")));
            }
        }
        let mut seqs = BTreeSet::new();
        let ensure = |ok: bool, row: &Row<'_>, what: &str| {
            if ok { Ok(()) } else { Err(RunError(format!("row of sequence {}: {what}", row.seq))) }
        };
        for row in batch.rows {
            let end = row.start + row.tokens.len() as u32;
            ensure(seqs.insert(row.seq), row, "its sequence is in the batch twice")?;
            ensure(!row.tokens.is_empty(), row, "no tokens")?;
            ensure(row.tables.len() == self.geometry.layout.groups.len(), row, "not one table per layer group")?;
            for (group, table) in row.tables.iter().enumerate() {
                ensure(table.tokens() >= end, row, "a table does not cover its tokens")?;
                let first = (row.start / self.geometry.layout.block_size) as usize;
                let last = self.geometry.layout.blocks_for(end as usize);
                let blocks = table.blocks().get(first..last).unwrap_or(&[]);
                ensure(blocks.len() == last - first, row, "a table lacks blocks")?;
                ensure(blocks.iter().all(|b| written.insert((group, *b))), row, "a block is written for two rows")?;
                read.extend(table.blocks()[..first].iter().filter(|block| **block != HOLE).map(|b| (group, *b)));
            }
            if let Some(score) = row.score {
                let last = score.after as usize + score.tokens.len();
                let samples_last = row.sample.is_some_and(|_| last == row.tokens.len());
                ensure(
                    !score.tokens.is_empty() && last <= row.tokens.len() && !samples_last,
                    row,
                    "scores outside it",
                )?;
                let own = &row.tokens[score.after as usize + 1..];
                let known = own.iter().zip(score.tokens).all(|(own, scored)| own == scored);
                ensure(known, row, "scores other tokens than its own")?;
            }
            let unknown = usize::from(row.follows.is_some());
            if let Some(place) = row.follows {
                ensure(self.pending.len() == 1, row, "it follows a step that is not in flight, or not the last")?;
                let known = self.late || (place as usize) < self.latest.len();
                ensure(known && row.tokens.len() == 1, row, "it follows a row that is not there")?;
            }
            if let Some(Sample { index, prompt, generated, params }) = row.sample {
                ensure(unknown == 0 || !params.looks_back(), row, "it looks at a token that is not known")?;
                let generated_len = generated.len() + unknown;
                ensure(index as usize == generated_len, row, "index is not the length of the answer")?;
                ensure(end as usize == prompt.len() + generated_len, row, "samples before its last token")?;
                let last = generated.last().or(prompt.last());
                ensure(unknown > 0 || last == row.tokens.last(), row, "its last token is not the sequence's")?;
            }
        }
        match written.intersection(&read).next() {
            Some((group, block)) => Err(RunError(format!("block {block} of group {group} is written and read"))),
            None => Ok(()),
        }
    }
}
