//! Traits of a pool in a device's memory, as transfers reach it: [`DeviceMemory`] and [`DeviceQueue`].
//!
//! Implementations know devices but no handoffs; users know handoffs but no devices. The traits are in this crate because neither depends
//! on the other. A range of a pool is (offset, bytes).

use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

/// A device's error message.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct DeviceError(pub String);

/// A run of bytes to copy to a peer's pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moving {
    /// Offset in this pool.
    pub source: usize,
    /// Offset in the peer's pool.
    pub target: usize,
    /// Number of its first digest lane within its block.
    pub lane: u64,
}

/// What a pool's addresses mean to a network library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryKind {
    /// This process's memory.
    Host,
    /// A GPU's memory, addressed by CUDA's unified addressing.
    Cuda,
}

/// A pool as a network library registers it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Registrable {
    /// Address of its first byte.
    pub address: u64,
    /// What kind of memory that address is in.
    pub kind: MemoryKind,
}

/// A pool's handle, with which another process on this host opens the pool. Only the device's implementation understands the bytes.
#[derive(Debug)]
pub struct PoolHandle {
    /// What the handle says.
    pub bytes: Vec<u8>,
    /// The file descriptor that the bytes speak of. It travels beside them over a unix socket. None: there is none, or it got lost.
    pub descriptor: Option<OwnedFd>,
}

/// What a peer's pool was opened by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpenedBy {
    /// A file descriptor.
    Descriptor,
    /// A fabric handle of the GPU, where its descriptor could not be used.
    Fabric,
    /// CUDA's legacy inter-process handle. It only works between processes that share IPC and process namespaces.
    Legacy,
}

crate::words!(OpenedBy { Descriptor = "descriptor", Fabric = "fabric handle", Legacy = "legacy CUDA IPC handle" });

/// A pool in a device's memory.
pub trait DeviceMemory: Send + Sync {
    /// Size of the pool in bytes.
    fn bytes(&self) -> usize;
    /// Whether the pool is on one device, so that another process can open it. Otherwise KV enters and leaves it only through host memory.
    fn is_one(&self) -> bool {
        true
    }
    /// A mark for everything that the compute side has stored so far: work queued after this mark sees it. Later marks are larger; the
    /// mark 0 is always reached.
    fn mark(&self) -> u64;
    /// A handle with which another process on this host opens the pool.
    fn export(&self) -> Result<PoolHandle, DeviceError>;
    /// What [`DeviceMemory::export`] hands out, and why nothing better; for people.
    fn exported_as(&self) -> String {
        String::new()
    }
    /// The pool's address for a network library. The calling thread may pass it to the library from now on.
    fn registrable(&self) -> Result<Registrable, DeviceError>;
    /// A queue to the pool for one thread.
    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError>;
}

/// One thread's queue to a pool. Reads, copies and digests are jobs, done later and in order; at most [`DEVICE_JOBS`] are under way.
/// Dropping the queue waits for its jobs and closes the peer's pool.
pub trait DeviceQueue: Send {
    /// Opens a pool of at least `bytes` bytes that a peer has exported, for [`DeviceQueue::copy`]. Returns by what.
    fn open(&mut self, handle: PoolHandle, bytes: usize) -> Result<OpenedBy, DeviceError>;
    /// Starts to read ranges of the pool into one contiguous buffer, once everything stored before the mark `after` is there.
    fn read(&mut self, after: u64, ranges: &[(usize, usize)]) -> Result<(), DeviceError>;
    /// Starts to copy runs of `bytes` bytes each to the peer's pool, once everything stored before the mark `after` is there.
    fn copy(&mut self, after: u64, runs: &[Moving], bytes: usize) -> Result<(), DeviceError>;
    /// Starts to digest runs of `bytes` bytes each, given as (offset, first lane), once everything stored before the mark `after` is
    /// there. When the job is done, the digested bytes are there too.
    fn digest(&mut self, after: u64, runs: &[(usize, u64)], bytes: usize) -> Result<(), DeviceError>;
    /// Returns the oldest job's result if it is done, which means completed and not only started. Never waits.
    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError>;
    /// A file descriptor that is readable when a job may be done and has not been polled since.
    fn fd(&self) -> Option<BorrowedFd<'_>>;
    /// Returns at least `bytes` bytes of host memory, to be filled for the next [`DeviceQueue::write`].
    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError>;
    /// Starts to write the staged bytes to ranges of the pool, one after another. The next [`DeviceQueue::digests`] sees them; everybody
    /// else sees them after [`DeviceQueue::settle`].
    fn write(&mut self, ranges: &[(usize, usize)]) -> Result<(), DeviceError>;
    /// Waits for all writes of this queue.
    fn settle(&mut self) -> Result<(), DeviceError>;
    /// The [`crate::digest_block`] of runs of `bytes` bytes each, given as (offset, first lane), computed from what is really in the pool
    /// (I2). First waits for what others, such as a network card, have written there; then waits for the digests. Called while no job is
    /// under way.
    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError>;
}

/// Most jobs that a [`DeviceQueue`] has under way.
pub const DEVICE_JOBS: usize = 4;

/// The result of a [`DeviceQueue`]'s job.
pub enum JobDone {
    /// The bytes that were read.
    Read(Staged),
    /// The digest of each run that was copied or digested.
    Digests(Vec<u64>),
}

/// Host memory with a copy of some of a pool's bytes.
#[derive(Clone)]
pub struct Staged(Arc<dyn AsRef<[u8]> + Send + Sync>);

impl Staged {
    /// Holds these bytes until the last clone is dropped.
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
