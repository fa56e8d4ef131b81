//! The driving end's pool, and memory of the same kind to copy it to. All unsafe code of this program is here.

#![allow(unsafe_code)]

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use baton_transfer::{Pool, Segment, TransferError};

/// A pool of handoffs, and memory of the same size.
pub struct Memory {
    pool: Arc<Segment>,
    scratch: Segment,
}

impl Memory {
    /// A pool of `bytes` bytes, no two words of which are equal.
    pub(super) fn new(bytes: usize) -> Result<Memory, TransferError> {
        let (pool, scratch) = (Segment::create("bench-pool", bytes)?, Segment::create("bench-scratch", bytes)?);
        let words = bytes.div_ceil(8) as u64;
        let values: Vec<u8> = (0..words).flat_map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
        // SAFETY: nobody else knows the segment yet.
        unsafe { pool.write(0, &values[..bytes]) };
        Ok(Memory { pool: Arc::new(pool), scratch })
    }

    /// The pool, for a sender.
    pub(super) fn pool(&self) -> Pool {
        self.pool.clone().into()
    }

    /// What the pool holds.
    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: a mapping of this length, which lives as long as `self`. Nobody writes to it: only senders know it, and they read.
        unsafe { slice::from_raw_parts(self.pool.as_ptr(), self.pool.len()) }
    }

    /// Copies a part of the pool to the same place in the other memory.
    ///
    /// # Panics
    /// When it lies outside.
    pub(super) fn copy(&mut self, range: Range<usize>) {
        // SAFETY: another mapping of this length, which nobody else knows; `self` is borrowed exclusively.
        let scratch = unsafe { slice::from_raw_parts_mut(self.scratch.as_ptr(), self.scratch.len()) };
        scratch[range.clone()].copy_from_slice(&self.bytes()[range]);
    }
}
