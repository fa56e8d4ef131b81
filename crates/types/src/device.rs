//! A pool in a device's memory, as transfers reach it: the traits [`DeviceMemory`] and [`DeviceQueue`].
//!
//! What implements them knows devices and nothing of handoffs; what uses them knows handoffs and nothing of devices. They stand here since
//! neither depends on the other. A range of a pool is (offset, bytes).

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// What a device said when something went wrong.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

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
    fn read(&mut self, after: u64, ranges: &[(usize, usize)]) -> Result<(), DeviceError>;
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
    fn write(&mut self, ranges: &[(usize, usize)]) -> Result<(), DeviceError>;
    /// Waits for all that was written by this queue.
    fn settle(&mut self) -> Result<(), DeviceError>;
    /// The values of [`crate::digest_block`] of runs of `bytes` bytes each, as (offset, first lane), of what really is in the pool (I2). Waits for
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
