//! The buffers of host memory: which are free, and which somebody uses.

use crate::{Buffer, StoreError};

/// A buffer is free when nobody uses it: no block of the index is in it, and nobody reads, fills or writes it.
#[derive(Debug)]
pub(crate) struct Buffers {
    uses: Vec<u32>,
    free: Vec<Buffer>,
}

impl Buffers {
    pub fn new(count: u32) -> Buffers {
        Buffers { uses: vec![0; count as usize], free: (0..count).rev().map(Buffer).collect() }
    }

    /// Number of free buffers.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes a free buffer, with one use.
    pub fn take(&mut self) -> Option<Buffer> {
        let buffer = self.free.pop()?;
        self.uses[buffer.0 as usize] = 1;
        Some(buffer)
    }

    /// Adds a use to a buffer that is used.
    pub fn hold(&mut self, buffer: Buffer) {
        debug_assert!(self.uses[buffer.0 as usize] > 0, "{buffer:?} is free");
        self.uses[buffer.0 as usize] += 1;
    }

    /// Ends a use. Returns how many are left.
    pub fn release(&mut self, buffer: Buffer) -> u32 {
        let uses = &mut self.uses[buffer.0 as usize];
        debug_assert!(*uses > 0, "{buffer:?} is free");
        *uses -= 1;
        if *uses == 0 {
            self.free.push(buffer);
        }
        *uses
    }

    /// How many use a buffer.
    pub fn uses(&self, buffer: Buffer) -> u32 {
        self.uses[buffer.0 as usize]
    }

    /// Checks that each buffer is used as often as `found` says (I6).
    pub fn check(&self, found: impl Iterator<Item = Buffer>) -> Result<(), StoreError> {
        let mut uses = vec![0; self.uses.len()];
        found.for_each(|buffer| uses[buffer.0 as usize] += 1);
        let free = self.uses.iter().filter(|uses| **uses == 0).count();
        if uses != self.uses || free != self.free.len() {
            return Err(StoreError::Broken(format!("buffers are used {uses:?}, counted {:?}, {free} free", self.uses)));
        }
        Ok(())
    }
}
