//! The slots of host memory: which are free, and which somebody uses.

use crate::{Slot, StoreError};

/// A slot is free when nobody uses it: no block of the index is in it, and nobody reads, fills or writes it.
#[derive(Debug)]
pub(crate) struct Slots {
    uses: Vec<u32>,
    free: Vec<Slot>,
}

impl Slots {
    pub fn new(count: u32) -> Slots {
        Slots { uses: vec![0; count as usize], free: (0..count).rev().map(Slot).collect() }
    }

    /// Number of free slots.
    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// Takes a free slot, with one use.
    pub fn take(&mut self) -> Option<Slot> {
        let slot = self.free.pop()?;
        self.uses[slot.0 as usize] = 1;
        Some(slot)
    }

    /// Adds a use to a slot that is used.
    pub fn hold(&mut self, slot: Slot) {
        debug_assert!(self.uses[slot.0 as usize] > 0, "{slot:?} is free");
        self.uses[slot.0 as usize] += 1;
    }

    /// Ends a use. Returns how many are left.
    pub fn release(&mut self, slot: Slot) -> u32 {
        let uses = &mut self.uses[slot.0 as usize];
        debug_assert!(*uses > 0, "{slot:?} is free");
        *uses -= 1;
        if *uses == 0 {
            self.free.push(slot);
        }
        *uses
    }

    /// How many use a slot.
    pub fn uses(&self, slot: Slot) -> u32 {
        self.uses[slot.0 as usize]
    }

    /// Checks that each slot is used as often as `found` says (I6).
    pub fn check(&self, found: impl Iterator<Item = Slot>) -> Result<(), StoreError> {
        let mut uses = vec![0; self.uses.len()];
        found.for_each(|slot| uses[slot.0 as usize] += 1);
        let free = self.uses.iter().filter(|uses| **uses == 0).count();
        if uses != self.uses || free != self.free.len() {
            return Err(StoreError::Broken(format!("slots are used {uses:?}, counted {:?}, {free} free", self.uses)));
        }
        Ok(())
    }
}
