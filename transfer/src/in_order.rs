//! Batches that a device works on, in their order, with what came of those that are done.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use baton_types::Epoch;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::device::{DeviceError, DeviceQueue, JobDone};
use crate::error::TransferError;
use crate::transport::Batch;

/// How long what was given up may take to be done. It waits for the layer it was queued behind; what takes longer is a device that hangs,
/// and waiting longer would look like silence to the peer.
const GRACE: Duration = Duration::from_secs(1);

/// A queue with the batches that its jobs are of.
pub(crate) struct InOrder {
    queue: Box<dyn DeviceQueue>,
    under_way: VecDeque<Batch>,
    done: VecDeque<(Batch, JobDone)>,
}

impl InOrder {
    pub(crate) fn new(queue: Box<dyn DeviceQueue>) -> InOrder {
        InOrder { queue, under_way: VecDeque::new(), done: VecDeque::new() }
    }

    /// Begins a batch.
    pub(crate) fn begin(
        &mut self,
        batch: Batch,
        start: impl FnOnce(&mut dyn DeviceQueue, &Batch) -> Result<(), DeviceError>,
    ) -> Result<(), TransferError> {
        start(&mut *self.queue, &batch).map_err(|e| e.while_doing("copy blocks"))?;
        self.under_way.push_back(batch);
        Ok(())
    }

    /// The oldest batch, once it is done.
    pub(crate) fn next(&mut self) -> Result<Option<(Batch, JobDone)>, TransferError> {
        self.collect()?;
        Ok(self.done.pop_front())
    }

    fn collect(&mut self) -> Result<(), TransferError> {
        while let Some(result) = self.queue.poll().map_err(|e| e.while_doing("copy blocks"))? {
            self.done.extend(self.under_way.pop_front().map(|batch| (batch, result)));
        }
        Ok(())
    }

    /// What to wait for, while nothing is done and something under way.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.fd().filter(|_| self.done.is_empty() && !self.under_way.is_empty())
    }

    /// Forgets the batches of a handoff, after those under way are done (I3).
    pub(crate) fn cancel(&mut self, epoch: Epoch) -> Result<(), TransferError> {
        let until = Instant::now() + GRACE;
        loop {
            self.collect()?;
            self.done.retain(|(batch, _)| batch.epoch != epoch);
            if self.under_way.iter().all(|batch| batch.epoch != epoch) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let cause = format!("what was given up was not done within {GRACE:?}");
                return Err(TransferError::Device { what: "stop copying", cause });
            }
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut fds: Vec<PollFd<'_>> =
                self.queue.fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).into_iter().collect();
            // Interrupted or not, the loop looks again.
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
        }
    }
}
