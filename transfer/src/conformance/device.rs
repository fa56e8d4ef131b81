//! A device whose memory is an anonymous file that its processes share, so that transports between devices are tested without one: its
//! jobs are begun when they are asked for and done only when they are asked after again. And which ends of a test have one.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fs::OpenOptions;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use baton_types::digest_block;
use rustix::event::EventfdFlags;

use super::*;
use crate::link::Range;
use crate::{DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, Registrable, Staged};

/// Whose pools are a device's.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Devices {
    pub prefill: bool,
    pub decode: bool,
}

thread_local! {
    static DEVICES: Cell<Devices> = const { Cell::new(Devices { prefill: false, decode: false }) };
}

/// The variable by which a child learns of them.
pub(super) const VARIABLE: &str = "BATON_TRANSFER_TEST_DEVICES";

pub(super) const BOTH: Devices = Devices { prefill: true, decode: true };

/// From now on on this thread, and in processes it starts.
pub(super) fn use_devices(devices: Devices) {
    DEVICES.set(devices);
}

pub(super) fn devices() -> Devices {
    DEVICES.get()
}

impl Devices {
    pub(super) fn encode(self) -> String {
        format!("{}{}", u8::from(self.prefill), u8::from(self.decode))
    }

    pub(super) fn parse(text: &str) -> Devices {
        Devices { prefill: text.starts_with('1'), decode: text.ends_with('1') }
    }
}

/// A pool over this memory, a device's or the host's.
pub(super) fn pool_over(segment: &Arc<Segment>, device: bool) -> Pool {
    match device {
        true => Pool::Device(memory_over(segment)),
        false => segment.clone().into(),
    }
}

/// This memory as a device's.
pub(super) fn memory_over(segment: &Arc<Segment>) -> Arc<dyn DeviceMemory> {
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

    fn export(&self) -> Result<Vec<u8>, DeviceError> {
        let (process, fd) = (std::process::id(), self.segment.fd().as_raw_fd());
        Ok(format!("/proc/{process}/fd/{fd}").into_bytes())
    }

    fn registrable(&self) -> Result<Registrable, DeviceError> {
        Ok(Registrable { address: self.segment.as_ptr().expose_provenance() as u64, kind: MemoryKind::Host })
    }

    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let (jobs, staged) = (VecDeque::new(), Vec::new());
        Ok(Box::new(FakeQueue { segment: self.segment.clone(), peer: None, jobs, asked: false, staged, wake }))
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
    /// Whether somebody has asked after the oldest one.
    asked: bool,
    staged: Vec<u8>,
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

    fn ring(&self) {
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).unwrap();
    }

    fn digests_of(&self, runs: &[(usize, u64)], len: usize) -> Vec<u64> {
        runs.iter().map(|(offset, lane)| digest_block(&self.bytes((*offset, len)), *lane)).collect()
    }

    fn bytes(&self, (offset, len): Range) -> Vec<u8> {
        // SAFETY: blocks that are sent, or that have arrived, do not change.
        unsafe { self.segment.read(offset, len) }
    }
}

impl DeviceQueue for FakeQueue {
    fn open(&mut self, handle: &[u8], bytes: usize) -> Result<(), DeviceError> {
        let path = std::str::from_utf8(handle).map_err(|e| DeviceError(e.to_string()))?;
        let file = OpenOptions::new().read(true).write(true).open(path).map_err(|e| DeviceError(e.to_string()))?;
        self.peer = Some(Segment::open_peer(file.into(), bytes).map_err(|e| DeviceError(e.to_string()))?);
        Ok(())
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
        let mut from = 0;
        for &(offset, len) in ranges {
            // SAFETY: the blocks are lent to the session whose queue this is.
            unsafe { self.segment.write(offset, &self.staged[from..from + len]) };
            from += len;
        }
        self.staged = Vec::new();
        Ok(())
    }

    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError> {
        assert!(self.jobs.is_empty());
        Ok(self.digests_of(runs, bytes))
    }
}
