//! Batches that a device works on, in order, and the results of those that are done.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use baton_handoff::{TransferError, WriteBatch};
use baton_types::Epoch;
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::device::{DeviceError, DeviceQueue, JobDone, while_doing};

/// A device's queue, with the batch of each of its jobs.
pub(crate) struct InOrder {
    queue: Box<dyn DeviceQueue>,
    under_way: VecDeque<WriteBatch>,
    done: VecDeque<(WriteBatch, JobDone)>,
    /// How long cancelled batches may take to finish ([`crate::TransferLimits::grace`]).
    grace: Duration,
}

impl InOrder {
    pub(crate) fn new(queue: Box<dyn DeviceQueue>, grace: Duration) -> InOrder {
        InOrder { queue, under_way: VecDeque::new(), done: VecDeque::new(), grace }
    }

    /// Begins a batch.
    pub(crate) fn begin(
        &mut self,
        batch: WriteBatch,
        start: impl FnOnce(&mut dyn DeviceQueue, &WriteBatch) -> Result<(), DeviceError>,
    ) -> Result<(), TransferError> {
        start(&mut *self.queue, &batch).map_err(while_doing("copy blocks"))?;
        self.under_way.push_back(batch);
        Ok(())
    }

    /// The oldest batch, once it is done.
    pub(crate) fn next(&mut self) -> Result<Option<(WriteBatch, JobDone)>, TransferError> {
        self.collect()?;
        Ok(self.done.pop_front())
    }

    fn collect(&mut self) -> Result<(), TransferError> {
        while let Some(result) = self.queue.poll().map_err(while_doing("copy blocks"))? {
            self.done.extend(self.under_way.pop_front().map(|batch| (batch, result)));
        }
        Ok(())
    }

    /// Descriptor to wait for. None unless batches are under way and none is done.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.queue.fd().filter(|_| self.done.is_empty() && !self.under_way.is_empty())
    }

    /// Waits until the handoff's batches under way are done, and drops their results (I3).
    pub(crate) fn cancel(&mut self, epoch: Epoch) -> Result<(), TransferError> {
        let until = Instant::now() + self.grace;
        loop {
            self.collect()?;
            self.done.retain(|(batch, _)| batch.epoch != epoch);
            if self.under_way.iter().all(|batch| batch.epoch != epoch) {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let cause = format!("what was given up was not done within {:?}", self.grace);
                return Err(TransferError::Device { what: "stop copying", cause });
            }
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let mut fds: Vec<PollFd<'_>> =
                self.queue.fd().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).into_iter().collect();
            // Whether or not this was interrupted, the loop looks again.
            let _ = rustix::event::poll(&mut fds, Some(&timeout));
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_handoff::Range;

    use super::*;
    use crate::conformance::large;
    use crate::device::{Moving, OpenedBy, PoolHandle};

    /// A device whose job is done at the given poll, counted from 1.
    struct Slow(u32);

    impl DeviceQueue for Slow {
        fn open(&mut self, _: PoolHandle, _: usize) -> Result<OpenedBy, DeviceError> {
            Ok(OpenedBy::Descriptor)
        }
        fn read(&mut self, _: u64, _: &[Range]) -> Result<(), DeviceError> {
            Ok(())
        }
        fn copy(&mut self, _: u64, _: &[Moving], _: usize) -> Result<(), DeviceError> {
            Ok(())
        }
        fn digest(&mut self, _: u64, _: &[(usize, u64)], _: usize) -> Result<(), DeviceError> {
            Ok(())
        }
        fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
            let left = self.0.checked_sub(1);
            self.0 = left.unwrap_or(0);
            Ok((left == Some(0)).then(|| JobDone::Digests(Vec::new())))
        }
        fn fd(&self) -> Option<BorrowedFd<'_>> {
            None
        }
        fn stage(&mut self, _: usize) -> Result<&mut [u8], DeviceError> {
            Ok(&mut [])
        }
        fn write(&mut self, _: &[Range]) -> Result<(), DeviceError> {
            Ok(())
        }
        fn settle(&mut self) -> Result<(), DeviceError> {
            Ok(())
        }
        fn digests(&mut self, _: &[(usize, u64)], _: usize) -> Result<Vec<u64>, DeviceError> {
            Ok(Vec::new())
        }
    }

    /// Cancels a handoff's batch, on a device whose job is done at poll number `asked`.
    fn given_up(asked: u32) -> Result<(), TransferError> {
        let mut copies = InOrder::new(Box::new(Slow(asked)), Duration::from_millis(20));
        let len = large().layout.block_bytes(0);
        let batch = WriteBatch {
            epoch: Epoch(7),
            group: 0,
            layer: 0,
            source_len: len,
            len,
            lane: 0,
            writes: Vec::new(),
            after: 0,
            digest: false,
        };
        copies.begin(batch, |queue, batch| queue.copy(batch.after, &[], 0))?;
        copies.cancel(Epoch(8))?;
        copies.cancel(Epoch(7))
    }

    /// I3, I5: cancelled copies are waited for, but no longer than the peer tolerates silence.
    #[test]
    fn what_is_given_up_is_waited_for_as_long_as_it_may_take() {
        assert_eq!(given_up(3), Ok(()));
        let error = given_up(u32::MAX).unwrap_err().to_string();
        assert!(error.contains("what was given up was not done within 20ms"), "{error}");
    }
}
