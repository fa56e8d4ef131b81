//! The memory of the fake model's pool.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The bytes of a pool: private, or mapped by a peer as well.
pub trait KvMemory: Send {
    /// Copies the bytes at `offset`.
    fn load(&self, offset: usize, into: &mut [u8]);
    /// Overwrites the bytes at `offset`.
    fn store(&mut self, offset: usize, bytes: &[u8]);
}

impl KvMemory for Vec<u8> {
    fn load(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self[offset..offset + into.len()]);
    }
    fn store(&mut self, offset: usize, bytes: &[u8]) {
        self[offset..offset + bytes.len()].copy_from_slice(bytes);
    }
}

/// Pool memory that others read and write at the same time.
#[derive(Clone, Debug)]
pub struct SharedMemory(Arc<[AtomicU8]>);

impl SharedMemory {
    /// `bytes` zeros.
    pub fn new(bytes: usize) -> Self {
        SharedMemory((0..bytes).map(|_| AtomicU8::new(0)).collect())
    }
}

impl KvMemory for SharedMemory {
    fn load(&self, offset: usize, into: &mut [u8]) {
        for (byte, cell) in into.iter_mut().zip(&self.0[offset..]) {
            *byte = cell.load(Ordering::Relaxed);
        }
    }
    fn store(&mut self, offset: usize, bytes: &[u8]) {
        for (byte, cell) in bytes.iter().zip(&self.0[offset..]) {
            cell.store(*byte, Ordering::Relaxed);
        }
    }
}
