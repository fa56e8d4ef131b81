//! A fake device, to test transports between devices without a real one. Its memory is an anonymous file that processes share. Its jobs
//! are done only when asked after a second time. Written bytes land as late as is allowed.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use baton_handoff::Range;
use baton_types::digest_block;
use rustix::event::EventfdFlags;

use super::*;
use crate::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, OpenedBy, PoolHandle,
    Registrable, Staged,
};

/// What the handle of every pool says: its descriptor says the rest.
const HANDLE: &[u8] = b"a fake device's";

/// This memory as a device's memory.
pub fn memory_over(segment: &Arc<Segment>) -> Arc<dyn DeviceMemory> {
    Arc::new(Fake { segment: segment.clone() })
}

struct Fake {
    segment: Arc<Segment>,
}

impl DeviceMemory for Fake {
    fn bytes(&self) -> usize {
        self.segment.len()
    }

    fn mark(&self) -> u64 {
        7
    }

    fn export(&self) -> Result<PoolHandle, DeviceError> {
        let descriptor = self.segment.fd().try_clone_to_owned().map_err(|e| DeviceError(e.to_string()))?;
        Ok(PoolHandle { bytes: HANDLE.to_vec(), descriptor: Some(descriptor) })
    }

    fn registrable(&self) -> Result<Registrable, DeviceError> {
        Ok(Registrable { address: self.segment.as_ptr().expose_provenance() as u64, kind: MemoryKind::Host })
    }

    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (jobs, staged, written) = (VecDeque::new(), Vec::new(), VecDeque::new());
        Ok(Box::new(FakeQueue { segment: self.segment.clone(), peer: None, jobs, asked: false, staged, written, wake }))
    }
}

enum Job {
    Read(Vec<Range>),
    Copy(Vec<Moving>, usize),
    Digest(Vec<(usize, u64)>, usize),
}

struct FakeQueue {
    segment: Arc<Segment>,
    peer: Option<Segment>,
    jobs: VecDeque<Job>,
    /// Whether somebody has asked after the oldest job.
    asked: bool,
    staged: Vec<u8>,
    /// Writes on their way into the pool, oldest first.
    written: VecDeque<(Vec<Range>, Vec<u8>)>,
    wake: OwnedFd,
}

impl FakeQueue {
    fn begin(&mut self, after: u64, job: Job) -> Result<(), DeviceError> {
        assert_eq!(after, 7, "the mark it was queued with");
        assert!(self.jobs.len() < DEVICE_JOBS);
        self.jobs.push_back(job);
        self.ring();
        Ok(())
    }

    /// Lands the oldest write in the pool.
    fn land(&mut self) {
        let Some((ranges, staged)) = self.written.pop_front() else { return };
        let mut from = 0;
        for (offset, len) in ranges {
            // SAFETY: the blocks are lent to the session whose queue this is.
            unsafe { self.segment.write(offset, &staged[from..from + len]) };
            from += len;
        }
    }

    fn ring(&self) {
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap();
    }

    fn digests_of(&self, runs: &[(usize, u64)], len: usize) -> Vec<u64> {
        runs.iter().map(|(offset, lane)| digest_block(&self.bytes((*offset, len)), *lane)).collect()
    }

    fn bytes(&self, (offset, len): Range) -> Vec<u8> {
        // SAFETY: blocks that are being sent, or that have arrived, do not change.
        unsafe { self.segment.read(offset, len) }
    }
}

impl DeviceQueue for FakeQueue {
    fn open(&mut self, handle: PoolHandle, bytes: usize) -> Result<OpenedBy, DeviceError> {
        let fd = handle.descriptor.filter(|_| handle.bytes == HANDLE);
        let fd = fd.ok_or_else(|| DeviceError("no handle, or no descriptor with it".to_owned()))?;
        self.peer = Some(Segment::open_peer(fd, bytes).map_err(|e| DeviceError(e.to_string()))?);
        Ok(OpenedBy::Descriptor)
    }

    fn read(&mut self, after: u64, ranges: &[Range]) -> Result<(), DeviceError> {
        self.begin(after, Job::Read(ranges.to_vec()))
    }

    fn copy(&mut self, after: u64, runs: &[Moving], bytes: usize) -> Result<(), DeviceError> {
        self.begin(after, Job::Copy(runs.to_vec(), bytes))
    }

    fn digest(&mut self, after: u64, runs: &[(usize, u64)], bytes: usize) -> Result<(), DeviceError> {
        self.begin(after, Job::Digest(runs.to_vec(), bytes))
    }

    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
        let _ = rustix::io::read(&self.wake, &mut [0; 8]);
        self.asked = !self.asked && !self.jobs.is_empty();
        if self.asked {
            self.ring();
        }
        if self.asked || self.jobs.is_empty() {
            return Ok(None);
        }
        Ok(self.jobs.pop_front().map(|job| match job {
            Job::Read(ranges) => {
                JobDone::Read(Staged::new(ranges.iter().flat_map(|r| self.bytes(*r)).collect::<Vec<u8>>()))
            }
            Job::Digest(runs, len) => JobDone::Digests(self.digests_of(&runs, len)),
            Job::Copy(runs, len) => JobDone::Digests(
                runs.iter()
                    .map(|run| {
                        let bytes = self.bytes((run.source, len));
                        // SAFETY: the remote block is lent to the handoff that this is a job of.
                        unsafe { self.peer.as_ref().unwrap().write(run.target, &bytes) };
                        digest_block(&bytes, run.lane)
                    })
                    .collect(),
            ),
        }))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        self.staged = vec![0xee; bytes];
        Ok(&mut self.staged)
    }

    fn write(&mut self, ranges: &[Range]) -> Result<(), DeviceError> {
        self.written.push_back((ranges.to_vec(), std::mem::take(&mut self.staged)));
        while self.written.len() > 2 {
            self.land();
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        while !self.written.is_empty() {
            self.land();
        }
        Ok(())
    }

    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError> {
        assert!(self.jobs.is_empty());
        self.settle()?;
        Ok(self.digests_of(runs, bytes))
    }
}

impl Drop for FakeQueue {
    fn drop(&mut self) {
        let _ = self.settle();
    }
}

/// A device of which every operation fails.
pub struct Broken {
    /// Size of its pool in bytes.
    pub bytes: usize,
}

fn broken<T>() -> Result<T, DeviceError> {
    Err(DeviceError("it is broken".into()))
}

impl DeviceQueue for Broken {
    fn open(&mut self, _: PoolHandle, _: usize) -> Result<OpenedBy, DeviceError> {
        broken()
    }
    fn read(&mut self, _: u64, _: &[Range]) -> Result<(), DeviceError> {
        broken()
    }
    fn copy(&mut self, _: u64, _: &[Moving], _: usize) -> Result<(), DeviceError> {
        broken()
    }
    fn digest(&mut self, _: u64, _: &[(usize, u64)], _: usize) -> Result<(), DeviceError> {
        broken()
    }
    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
        broken()
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
    fn stage(&mut self, _: usize) -> Result<&mut [u8], DeviceError> {
        broken()
    }
    fn write(&mut self, _: &[Range]) -> Result<(), DeviceError> {
        broken()
    }
    fn settle(&mut self) -> Result<(), DeviceError> {
        broken()
    }
    fn digests(&mut self, _: &[(usize, u64)], _: usize) -> Result<Vec<u64>, DeviceError> {
        broken()
    }
}

impl DeviceMemory for Broken {
    fn bytes(&self) -> usize {
        self.bytes
    }
    fn mark(&self) -> u64 {
        0
    }
    fn export(&self) -> Result<PoolHandle, DeviceError> {
        broken()
    }
    fn registrable(&self) -> Result<Registrable, DeviceError> {
        broken()
    }
    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        Ok(Box::new(Broken { bytes: self.bytes }))
    }
}
