//! A batch with the memory it is sent from: the pool, or staging memory of its own.

use baton_handoff::{BlockRun, WriteBatch};
use baton_types::digest_run;

use crate::device::{Pool, Staged};

/// A batch on its way through transports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Load {
    pub batch: WriteBatch,
    /// Staging memory that it is sent from instead of the pool, in the order of its runs and without gaps.
    staged: Option<Staged>,
}

impl Load {
    /// A batch that is sent from the pool.
    pub(crate) fn new(batch: WriteBatch) -> Load {
        Load { batch, staged: None }
    }

    /// Sends it from `staged` from now on, which has `each` bytes of every block, block by block and without gaps.
    pub(crate) fn stand_in(&mut self, staged: Staged, each: usize) {
        for (i, write) in self.batch.writes.iter_mut().enumerate() {
            write.source = i * each;
        }
        self.batch.source_len = each;
        self.staged = Some(staged);
    }

    /// Whether it is sent from staging memory.
    pub(crate) fn is_staged(&self) -> bool {
        self.staged.is_some()
    }

    /// Takes the staging memory.
    pub(crate) fn take_staged(&mut self) -> Option<Staged> {
        self.staged.take()
    }

    /// First byte of a run, or None when it lies outside the memory it is sent from.
    pub(crate) fn source(&self, pool: &Pool, run: &BlockRun) -> Option<*const u8> {
        self.at(pool, run.source, run.len)
    }

    /// Address of `len` bytes at `start` of the memory it is sent from, or None when they lie outside.
    pub(crate) fn at(&self, pool: &Pool, start: usize, len: usize) -> Option<*const u8> {
        match &self.staged {
            None => pool.at(start, len).map(|start| start.cast_const()),
            Some(staged) => staged.bytes().get(start..)?.get(..len).map(<[u8]>::as_ptr),
        }
    }

    /// Its runs in order. Each comes with a prefetch hint: the address of the next run's first byte, or of the byte behind the last run.
    pub(crate) fn runs_and_next(&self, pool: &Pool) -> impl Iterator<Item = (BlockRun, *const u8)> {
        let nexts = self.batch.runs().skip(1).map(|next| (next.source, next.len));
        let last = self.batch.runs().last().map(|last| (last.source.saturating_add(last.len), 0));
        let nexts = nexts.chain(last).map(|(start, len)| self.at(pool, start, len).unwrap_or(std::ptr::null()));
        self.batch.runs().zip(nexts)
    }

    /// For each run: its block's index in the reservation, and its digest.
    pub(crate) fn digests(&self, pool: &Pool) -> impl Iterator<Item = (u32, u64)> {
        self.runs_and_next(pool).filter_map(|(run, next)| {
            let start = self.source(pool, &run)?;
            // SAFETY: inside the memory it is sent from; a local block stays unchanged until its handoff's end is reported.
            let bytes = unsafe { std::slice::from_raw_parts(start, run.len) };
            Some((run.index, digest_run(bytes, run.lane, next)))
        })
    }
}
