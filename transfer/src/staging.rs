//! Blocks out of a device's memory, over an inner transport that knows nothing of the device's jobs.
//!
//! - An inner transport that sends host memory gets each batch in staging memory. The next batches are read while earlier ones are sent.
//! - An inner transport that reaches the device's memory by itself gets each batch once it is stored and digested there.
//!
//! KV that changes its type is converted in host memory, after it is read and before it is passed on.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;

use baton_handoff::{Range, TransferError, TransportKind, WriteBatch};
use baton_types::Epoch;

use crate::convert::Conversions;
use crate::device::{DEVICE_JOBS, JobDone, Pool};
use crate::in_order::InOrder;
use crate::links::Links;
use crate::load::Load;
use crate::transport::{Digests, Progress, Transport};

/// Prepares batches on the device and passes them to the inner transport.
pub(crate) struct Staging {
    /// Declared before `reads`, and so dropped before it: sending ends before reading does.
    inner: Box<dyn Transport>,
    pool: Pool,
    reads: InOrder,
    /// Whether the inner transport takes batches out of the device's memory.
    direct: bool,
    /// Batches ready for the inner transport, with their digests if the device made them.
    ready: VecDeque<(Load, Option<Digests>)>,
    /// Batches at the inner transport: the handoff's epoch, and the digests if the inner transport makes none.
    sent: VecDeque<(Epoch, Option<Digests>)>,
    convert: Option<Conversions>,
    digests: Digests,
}

impl Staging {
    /// Around an inner transport that sends host memory.
    pub(crate) fn new(pool: Pool, reads: InOrder, inner: Box<dyn Transport>, convert: Option<Conversions>) -> Staging {
        let (ready, sent) = (VecDeque::new(), VecDeque::new());
        Staging { pool, reads, direct: false, ready, sent, inner, convert, digests: Vec::new() }
    }

    /// Around an inner transport that sends the device's memory.
    pub(crate) fn direct(pool: Pool, reads: InOrder, inner: Box<dyn Transport>) -> Staging {
        Staging { direct: true, ..Staging::new(pool, reads, inner, None) }
    }

    /// Takes in the results of finished jobs.
    fn take_reads(&mut self) -> Result<(), TransferError> {
        while let Some((batch, done)) = self.reads.next()? {
            let staged = match done {
                JobDone::Read(staged) => staged,
                JobDone::Digests(digests) => {
                    let digests = batch.runs().map(|run| run.index).zip(digests).collect();
                    self.ready.push_back((Load::new(batch), Some(digests)));
                    continue;
                }
            };
            let (each, mut load) = (batch.source_len, Load::new(batch));
            load.stand_in(staged, each);
            if let Some(conversions) = &self.convert {
                let converted = conversions.stage(load, &self.pool);
                load = converted.ok_or_else(|| TransferError::argument("block", "less was read than asked for"))?;
            }
            self.ready.push_back((load, None));
        }
        Ok(())
    }

    fn pass_on(&mut self, links: &mut Links) -> Result<(), TransferError> {
        while self.sent.len() < self.inner.depth()
            && let Some((load, digests)) = self.ready.pop_front()
        {
            let own = load.batch.digest && !self.inner.digests();
            let digests = own.then(|| digests.unwrap_or_else(|| load.digests(&self.pool).collect()));
            self.sent.push_back((load.batch.epoch, digests));
            self.inner.submit(load, links)?;
        }
        Ok(())
    }
}

/// Ranges of the pool that a batch is read from.
fn ranges(batch: &WriteBatch) -> Vec<Range> {
    batch.writes.iter().map(|write| (write.source, batch.source_len)).collect()
}

impl Transport for Staging {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn depth(&self) -> usize {
        DEVICE_JOBS
    }

    fn submit(&mut self, load: Load, _: &mut Links) -> Result<(), TransferError> {
        self.reads.begin(load.batch, |queue, batch| match self.direct {
            true => {
                let runs: Vec<_> = batch.runs().map(|run| (run.source, run.lane)).collect();
                queue.digest(batch.after, &runs, batch.source_len)
            }
            false => queue.read(batch.after, &ranges(batch)),
        })
    }

    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        self.take_reads()?;
        self.pass_on(links)?;
        if self.sent.is_empty() {
            return Ok(Progress::Blocked);
        }
        let progress = self.inner.poll(links)?;
        if progress == Progress::Flushed
            && let Some((_, own)) = self.sent.pop_front()
        {
            self.digests = own.unwrap_or_else(|| self.inner.take_digests());
        }
        Ok(progress)
    }

    fn digests(&self) -> bool {
        true
    }

    fn take_digests(&mut self) -> Digests {
        std::mem::take(&mut self.digests)
    }

    /// While the inner transport has batches, or is about to get some, it or the links move them.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        match self.sent.is_empty() && self.ready.is_empty() {
            true => self.reads.fd(),
            false => self.inner.fd(),
        }
    }

    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError> {
        self.take_reads()?;
        self.ready.retain(|(load, _)| load.batch.epoch != epoch);
        let cancelled = self.reads.cancel(epoch);
        if self.sent.iter().any(|(of, _)| *of == epoch) {
            self.sent.retain(|(of, _)| *of != epoch);
            self.inner.cancel(epoch, links)?;
        }
        cancelled
    }
}
