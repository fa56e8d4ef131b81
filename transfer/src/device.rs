//! A pool that is not host memory, as transfers see it: the traits [`DeviceMemory`] and [`DeviceQueue`].
//!
//! What implements them knows devices and nothing of handoffs; this crate knows handoffs and nothing of devices. A pool is one of the two
//! kinds of [`Pool`]; a session reaches it by a [`Reach`] of its own. KV leaves a device's pool through host memory, see `staging`, or
//! straight into another process's, see `cuda_ipc`, or straight to a network's card, see `ucx`.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use baton_handoff::{PoolMemory, Range, TransferError};
use baton_types::digest_run;

use crate::segment::Segment;

/// What a device said when something went wrong.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DeviceError(pub String);

impl DeviceError {
    pub(crate) fn while_doing(self, what: &'static str) -> TransferError {
        TransferError::Device { what, cause: self.0 }
    }
}

/// A run of bytes on its way to a peer's pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moving {
    /// Offset in this pool.
    pub source: usize,
    /// Offset in the peer's pool.
    pub target: usize,
    /// Number of its first digest lane in its block.
    pub lane: u64,
}

/// What a pool's addresses mean to a network library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryKind {
    /// This process's memory.
    Host,
    /// Of a GPU, as CUDA's unified addressing numbers it.
    Cuda,
}

/// A pool as a network library registers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registrable {
    /// Of its first byte.
    pub address: u64,
    /// What that is an address of.
    pub kind: MemoryKind,
}

/// A pool in a device's memory.
pub trait DeviceMemory: Send + Sync {
    /// How many bytes.
    fn bytes(&self) -> usize;
    /// Whether it is one device's, so that another process can open it; else KV enters and leaves it through host memory alone.
    fn is_one(&self) -> bool {
        true
    }
    /// What was stored last by whoever computes: work after this mark sees it. Later marks are larger; 0 is there from the start.
    fn mark(&self) -> u64;
    /// Bytes by which another process of this host opens the pool, opaque to everybody but its device.
    fn export(&self) -> Result<Vec<u8>, DeviceError>;
    /// Where the pool lies for a network library, which the calling thread may use for it from now on.
    fn registrable(&self) -> Result<Registrable, DeviceError>;
    /// A way to the pool for one thread.
    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError>;
}

/// One thread's way to a pool. Reads, copies and digests are jobs, done later and in their order; at most [`DEVICE_JOBS`] are under way. Dropping
/// it waits for them, and closes the peer's pool.
pub trait DeviceQueue: Send {
    /// Opens the pool that a peer has exported, of at least `bytes` bytes, for [`DeviceQueue::copy`].
    fn open(&mut self, handle: &[u8], bytes: usize) -> Result<(), DeviceError>;
    /// Starts reading ranges of the pool, one behind another, once all that was stored before the mark is there.
    fn read(&mut self, after: u64, ranges: &[Range]) -> Result<(), DeviceError>;
    /// Starts copying runs of `bytes` bytes each to the peer's pool, once all that was stored before the mark is there.
    fn copy(&mut self, after: u64, runs: &[Moving], bytes: usize) -> Result<(), DeviceError>;
    /// Starts digesting runs of `bytes` bytes each, as (offset, first lane), once all that was stored before the mark is there: when it is
    /// done, so is what they digest.
    fn digest(&mut self, after: u64, runs: &[(usize, u64)], bytes: usize) -> Result<(), DeviceError>;
    /// The oldest job's result, once it is done: applied, not only begun. Never waits.
    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError>;
    /// Readable when a job may be done and nobody has polled since.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// Host memory of at least so many bytes, to be filled for the next [`DeviceQueue::write`].
    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError>;
    /// Starts to put what was staged into ranges of the pool, one behind another. It is there for the next [`DeviceQueue::digests`], and for
    /// everybody after [`DeviceQueue::settle`].
    fn write(&mut self, ranges: &[Range]) -> Result<(), DeviceError>;
    /// Waits for all that was written by this queue.
    fn settle(&mut self) -> Result<(), DeviceError>;
    /// The values of [`baton_types::digest_block`] of runs of `bytes` bytes each, as (offset, first lane), of what really is in the pool (I2). Waits for
    /// them, and first for what others have written there, a network's card among them; no job is under way.
    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError>;
}

/// Jobs that a [`DeviceQueue`] takes at once.
pub const DEVICE_JOBS: usize = 4;

/// A result of a [`DeviceQueue`]'s job.
pub enum JobDone {
    /// What was read.
    Read(Staged),
    /// Of each run that was copied, or only read, the digest.
    Digests(Vec<u64>),
}

/// Host memory that stands for some of a pool's.
#[derive(Clone)]
pub struct Staged(Arc<dyn AsRef<[u8]> + Send + Sync>);

impl Staged {
    /// These bytes, kept until they have left.
    pub fn new(bytes: impl AsRef<[u8]> + Send + Sync + 'static) -> Staged {
        Staged(Arc::new(bytes))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        (*self.0).as_ref()
    }
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Staged({} bytes)", self.bytes().len())
    }
}

impl PartialEq for Staged {
    fn eq(&self, other: &Staged) -> bool {
        self.bytes() == other.bytes()
    }
}

impl Eq for Staged {}

/// A worker's KV pool.
#[derive(Clone)]
pub enum Pool {
    /// Host memory that can be mapped by others.
    Host(Arc<Segment>),
    /// A device's memory.
    Device(Arc<dyn DeviceMemory>),
}

impl Pool {
    /// How many bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Pool::Host(segment) => segment.len(),
            Pool::Device(memory) => memory.bytes(),
        }
    }

    /// Whether it is a device's memory.
    pub fn is_device(&self) -> bool {
        matches!(self, Pool::Device(_))
    }

    /// Whether it lies in several devices' memories.
    pub(crate) fn is_spread(&self) -> bool {
        matches!(self, Pool::Device(memory) if !memory.is_one())
    }

    /// What was stored so far, for [`baton_handoff::Op::Write`]; in host memory it is there already.
    pub(crate) fn mark(&self) -> u64 {
        match self {
            Pool::Host(_) => 0,
            Pool::Device(memory) => memory.mark(),
        }
    }

    /// The pool if it is host memory.
    pub(crate) fn host(&self) -> Result<&Arc<Segment>, &Arc<dyn DeviceMemory>> {
        match self {
            Pool::Host(segment) => Ok(segment),
            Pool::Device(memory) => Err(memory),
        }
    }

    /// Address of `len` bytes at `offset`, or None when they lie outside, or are not host memory.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        self.host().ok().and_then(|segment| segment.at(offset, len))
    }

    /// Where it lies for a network library.
    pub(crate) fn registrable(&self) -> Result<Registrable, TransferError> {
        match self {
            Pool::Host(segment) => {
                Ok(Registrable { address: segment.as_ptr().expose_provenance() as u64, kind: MemoryKind::Host })
            }
            Pool::Device(memory) => memory.registrable().map_err(|e| e.while_doing("let a network library in")),
        }
    }

    /// A session's way to it.
    pub(crate) fn reach(&self) -> Result<Reach, TransferError> {
        Ok(match self {
            Pool::Host(segment) => Reach::Host(segment.clone()),
            Pool::Device(memory) => Reach::Device(memory.queue().map_err(|e| e.while_doing("open a queue"))?),
        })
    }
}

impl From<Arc<Segment>> for Pool {
    fn from(segment: Arc<Segment>) -> Pool {
        Pool::Host(segment)
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.is_device() { "device" } else { "host" };
        write!(f, "Pool({} bytes of {kind} memory)", self.bytes())
    }
}

/// A session's way to its pool.
pub(crate) enum Reach {
    /// By its address.
    Host(Arc<Segment>),
    /// By its device.
    Device(Box<dyn DeviceQueue>),
}

impl Reach {
    /// Waits for what was written through it.
    pub(crate) fn settle(&mut self) -> Result<(), TransferError> {
        match self {
            Reach::Host(_) => Ok(()),
            Reach::Device(queue) => queue.settle().map_err(|e| e.while_doing("wait for blocks")),
        }
    }

    /// The pool as the session's state machine reaches it.
    ///
    /// # Safety
    /// Nobody writes to what it is asked for meanwhile.
    pub(crate) unsafe fn still(&mut self) -> Still<'_> {
        match self {
            // SAFETY: passed on to the caller.
            Reach::Host(segment) => unsafe { segment.still() },
            Reach::Device(queue) => Still(Memory::Device(&mut **queue)),
        }
    }
}

/// A pool of which nobody writes to what is asked for: who makes one vouches for that.
pub(crate) struct Still<'a>(Memory<'a>);

enum Memory<'a> {
    Host(&'a Segment),
    Device(&'a mut dyn DeviceQueue),
}

impl Segment {
    /// The segment as a session's state machine reaches it.
    ///
    /// # Safety
    /// Nobody writes to what it is asked for meanwhile.
    pub(crate) unsafe fn still(&self) -> Still<'_> {
        Still(Memory::Host(self))
    }
}

impl PoolMemory for Still<'_> {
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError> {
        let segment = match &mut self.0 {
            Memory::Host(segment) => segment,
            Memory::Device(queue) => return queue.digests(parts, len).map_err(|e| e.while_doing("digest blocks")),
        };
        let digest = |(i, &(offset, lane)): (usize, &(usize, u64))| {
            let start = segment.at(offset, len)?.cast_const();
            let next = parts
                .get(i + 1)
                .and_then(|(next, _)| segment.at(*next, 0))
                .map_or(start.wrapping_add(len), |p| p.cast_const());
            // SAFETY: inside the mapping, and whoever made this vouches that nobody writes to it.
            Some(digest_run(unsafe { std::slice::from_raw_parts(start, len) }, lane, next))
        };
        let outside = || TransferError::argument("blocks", "they lie outside the pool");
        parts.iter().enumerate().map(digest).collect::<Option<_>>().ok_or_else(outside)
    }
}
