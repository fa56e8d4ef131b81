//! A KV pool's memory: an anonymous file (memfd) mapped shared, so that its descriptor can be handed to another process.
//!
//! It has no name in any filesystem: the kernel frees it with the last descriptor and mapping, whichever process dies. It is sealed
//! against resizing, so that access to a mapping can never cause a bus error. Knows nothing of layers and blocks.
//!
//! # Aliasing
//! A segment is shared as `Arc<Segment>` between the thread that computes and the threads that move KV, and its pages
//! also with other processes. No reference into it is ever handed out: all access goes through [`Segment::as_ptr`].
//!
//! The state of each block keeps accesses apart:
//! - A free, used or cached block belongs to the compute thread.
//! - A sender may read a used or cached block until its handoff reports completion; nobody writes to the block meanwhile.
//! - Only the peer and the receiver touch a lent or quarantined block (I3), until `Verified` or `Fenced` gives it back.
//!
//! These events pass through a mutex or channel, which orders the accesses around them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use baton_handoff::TransferError;

const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

/// One region of shareable memory.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    len: usize,
    fd: OwnedFd,
}

// SAFETY: a segment is an address, a length and a descriptor; none is tied to a thread. Who may dereference the
// address when is the module's aliasing contract.
unsafe impl Send for Segment {}
// SAFETY: as above; no method of `&Segment` touches the memory except the unsafe ones.
unsafe impl Sync for Segment {}

impl Segment {
    /// A zeroed region of `bytes` bytes. Pages are made when first touched. `name` shows in /proc/PID/maps.
    pub fn create(name: &str, bytes: usize) -> Result<Segment, TransferError> {
        if bytes == 0 || isize::try_from(bytes).is_err() {
            return Err(TransferError::argument("bytes", format!("{bytes}; a segment holds 1 byte to isize::MAX")));
        }
        let label: String = name.chars().filter(|c| *c != '\0').take(200).collect();
        let fd = rustix::fs::memfd_create(label, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
            .map_err(|e| TransferError::os("create a memory segment", e))?;
        rustix::fs::ftruncate(&fd, bytes as u64).map_err(|e| TransferError::os("size a memory segment", e))?;
        rustix::fs::fcntl_add_seals(&fd, SEALS).map_err(|e| TransferError::os("seal a memory segment", e))?;
        Segment::map(fd, bytes)
    }

    /// Maps a peer's segment after checking that it is sealed and holds `bytes` bytes.
    pub(crate) fn open_peer(fd: OwnedFd, bytes: usize) -> Result<Segment, TransferError> {
        let seals =
            rustix::fs::fcntl_get_seals(&fd).map_err(|e| TransferError::os("read a peer segment's seals", e))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(TransferError::os("map a peer's segment", "it is not sealed against shrinking"));
        }
        let size = rustix::fs::fstat(&fd).map_err(|e| TransferError::os("size of a peer's segment", e))?.st_size;
        if bytes == 0 || (size as u64) < bytes as u64 {
            let cause = format!("it holds {size} bytes, its geometry says {bytes}");
            return Err(TransferError::os("map a peer's segment", cause));
        }
        Segment::map(fd, bytes)
    }

    fn map(fd: OwnedFd, len: usize) -> Result<Segment, TransferError> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no existing object.
        let address = unsafe {
            rustix::mm::mmap(ptr::null_mut(), len, prot, MapFlags::SHARED | MapFlags::NORESERVE, &fd, 0)
                .map_err(|e| TransferError::os("map a memory segment", e))?
        };
        let base = NonNull::new(address.cast::<u8>())
            .ok_or_else(|| TransferError::os("map a memory segment", "the kernel mapped address 0"))?;
        // A forked child must not keep writing to a pool after its parent was fenced.
        // SAFETY: the range was mapped above; the advice changes nothing for this process.
        let advised = unsafe { rustix::mm::madvise(address, len, Advice::LinuxDontFork) };
        if let Err(error) = advised {
            tracing::debug!(%error, "the segment stays mapped in forked children");
        }
        Ok(Segment { base, len, fd })
    }

    /// First byte. Valid for [`Segment::len`] bytes as long as the segment lives; see the module for who may use it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never true: a segment holds at least a byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The descriptor to hand to another process.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Address of `len` bytes at `offset`, or None when they lie outside.
    pub(crate) fn at(&self, offset: usize, len: usize) -> Option<*mut u8> {
        let end = offset.checked_add(len)?;
        // SAFETY: offset ≤ end ≤ self.len, so the result stays inside the mapping.
        (end <= self.len).then(|| unsafe { self.base.as_ptr().add(offset) })
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Panics
    /// When the range lies outside.
    ///
    /// # Safety
    /// Nobody else may access the range meanwhile; see the module's aliasing contract.
    pub unsafe fn write(&self, offset: usize, bytes: &[u8]) {
        let Some(target) = self.at(offset, bytes.len()) else {
            panic!("{} bytes at {offset} lie outside a segment of {}", bytes.len(), self.len)
        };
        // SAFETY: `at` checked the range, the caller vouches for exclusive access, and `bytes` is not in the segment,
        // since no reference into it exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), target, bytes.len()) }
    }

    /// A copy of `len` bytes at `offset`.
    ///
    /// # Panics
    /// When the range lies outside.
    ///
    /// # Safety
    /// Nobody may write to the range meanwhile; see the module's aliasing contract.
    pub unsafe fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        let Some(source) = self.at(offset, len) else {
            panic!("{len} bytes at {offset} lie outside a segment of {}", self.len)
        };
        let mut bytes = vec![0; len];
        // SAFETY: `at` checked the range, the caller vouches that nobody writes to it, `bytes` is fresh.
        unsafe { ptr::copy_nonoverlapping(source, bytes.as_mut_ptr(), len) };
        bytes
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `map` and is unmapped only here; pointers into it must not outlive `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            tracing::warn!(%error, "a memory segment could not be unmapped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_mappings_share_bytes_and_the_size_is_fixed() {
        let ours = Segment::create("test", 10_000).unwrap();
        let theirs = Segment::open_peer(ours.fd().try_clone_to_owned().unwrap(), 10_000).unwrap();
        // SAFETY: only this thread uses either mapping.
        unsafe {
            ours.write(9_990, b"0123456789");
            assert_eq!(theirs.read(9_990, 10), b"0123456789");
        }
        assert!(rustix::fs::ftruncate(ours.fd(), 1).is_err());
        assert!(rustix::fs::ftruncate(ours.fd(), 20_000).is_err());
        assert_eq!(ours.at(9_999, 2), None);
        assert_eq!(ours.at(usize::MAX, 2), None);
    }

    #[test]
    fn a_peer_segment_must_be_sealed_and_large_enough() {
        let bare = rustix::fs::memfd_create("bare", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&bare, 4096).unwrap();
        assert!(Segment::open_peer(bare, 4096).unwrap_err().to_string().contains("not sealed"));
        let small = Segment::create("small", 4096).unwrap();
        assert!(Segment::open_peer(small.fd().try_clone_to_owned().unwrap(), 8192).is_err());
        assert!(Segment::create("none", 0).is_err());
    }
}
