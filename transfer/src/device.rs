//! A pool in host memory or in a device's, as sessions reach it.
//!
//! [`Pool`] is one of the two. Each session reaches it by a [`Reach`] of its own. [`DeviceMemory`] says what a device's memory can do.
//! KV leaves a device's memory in one of three ways:
//! - through host memory, see `staging`
//! - straight into another process's device memory, see `cuda_ipc`
//! - straight to a network card, see `ucx`

use std::fmt;
use std::sync::Arc;

use baton_handoff::{PoolMemory, TransferError};
use baton_types::digest_run;
pub use baton_types::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, OpenedBy, PoolHandle,
    Registrable, Staged,
};

use crate::segment::Segment;

/// Turns a device's error into a transfer error.
pub(crate) fn while_doing(what: &'static str) -> impl Fn(DeviceError) -> TransferError {
    move |DeviceError(cause)| TransferError::Device { what, cause }
}

/// A worker's KV pool.
#[derive(Clone)]
pub enum Pool {
    /// Host memory that other processes can map.
    Host(Arc<Segment>),
    /// A device's memory.
    Device(Arc<dyn DeviceMemory>),
}

impl Pool {
    /// Size in bytes.
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

    /// How others on this host reach it without this worker's help, and why not better; for people.
    pub fn exported_as(&self) -> String {
        match self {
            Pool::Host(_) => OpenedBy::Descriptor.to_string(),
            Pool::Device(memory) => memory.exported_as(),
        }
    }

    /// Whether it is spread over several devices.
    pub(crate) fn is_spread(&self) -> bool {
        matches!(self, Pool::Device(memory) if !memory.is_one())
    }

    /// Mark of what was stored so far, for [`baton_handoff::Op::Write`]. Always 0 in host memory, where stored KV is there at once.
    pub(crate) fn mark(&self) -> u64 {
        match self {
            Pool::Host(_) => 0,
            Pool::Device(memory) => memory.mark(),
        }
    }

    /// The segment of a pool in host memory, else the device's memory.
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

    /// Address and kind of its memory, for a network library to register.
    pub(crate) fn registrable(&self) -> Result<Registrable, TransferError> {
        match self {
            Pool::Host(segment) => {
                Ok(Registrable { address: segment.as_ptr().expose_provenance() as u64, kind: MemoryKind::Host })
            }
            Pool::Device(memory) => memory.registrable().map_err(while_doing("let a network library in")),
        }
    }

    /// Opens a session's access to the pool.
    pub(crate) fn reach(&self) -> Result<Reach, TransferError> {
        Ok(match self {
            Pool::Host(segment) => Reach::Host(segment.clone()),
            Pool::Device(memory) => Reach::Device(memory.queue().map_err(while_doing("open a queue"))?),
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

/// A session's access to its pool.
pub(crate) enum Reach {
    /// By its address in host memory.
    Host(Arc<Segment>),
    /// By a queue of its device.
    Device(Box<dyn DeviceQueue>),
}

impl Reach {
    /// Waits until everything written through it is in the pool.
    pub(crate) fn settle(&mut self) -> Result<(), TransferError> {
        match self {
            Reach::Host(_) => Ok(()),
            Reach::Device(queue) => queue.settle().map_err(while_doing("wait for blocks")),
        }
    }

    /// The pool as the session's state machine reads it.
    ///
    /// # Safety
    /// Nobody may write to the ranges it is asked for, as long as it exists.
    pub(crate) unsafe fn still(&mut self) -> Still<'_> {
        match self {
            // SAFETY: passed on to the caller.
            Reach::Host(segment) => unsafe { segment.still() },
            Reach::Device(queue) => Still(Memory::Device(&mut **queue)),
        }
    }
}

/// A pool whose requested ranges nobody writes to. Whoever makes one vouches for that.
pub(crate) struct Still<'a>(Memory<'a>);

enum Memory<'a> {
    Host(&'a Segment),
    Device(&'a mut dyn DeviceQueue),
}

impl Segment {
    /// The segment as a session's state machine reads it.
    ///
    /// # Safety
    /// Nobody may write to the ranges it is asked for, as long as it exists.
    pub(crate) unsafe fn still(&self) -> Still<'_> {
        Still(Memory::Host(self))
    }
}

impl PoolMemory for Still<'_> {
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError> {
        let segment = match &mut self.0 {
            Memory::Host(segment) => segment,
            Memory::Device(queue) => return queue.digests(parts, len).map_err(while_doing("digest blocks")),
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
