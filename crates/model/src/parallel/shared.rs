//! [`ThreadRanks`]: ranks that are threads of one process.
//!
//! Each rank has two slots that the others read. In an exchange a rank writes its own slot, meets the others, and reads all slots. The next
//! exchange uses the other slots. Before a rank writes its first slot again, it has met all others once more, so nobody still reads it. One
//! meeting per exchange is therefore enough. The locks around the slots are never contended; they only avoid `unsafe`.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use baton_engine::RunError;
use baton_kernels::{Backend, CpuBackend, Meeting};

use super::Collective;

/// Activations in this process.
type Buffer = <CpuBackend as Backend>::Buffer;

/// Elements summed at a time, so that the sum stays in the cache while the ranks' parts are added.
const PIECE: usize = 4096;

/// One rank's side of an exchange.
pub struct ThreadRanks {
    exchange: Arc<SharedSlots>,
    rank: usize,
}

struct SharedSlots {
    meeting: Meeting<RunError>,
    /// Two slots per rank, used in turn.
    slots: Vec<[RwLock<Vec<f32>>; 2]>,
}

impl ThreadRanks {
    /// All sides of an exchange between `ranks` ranks, for up to `elements` elements at a time.
    pub fn ranks(ranks: usize, elements: usize) -> Vec<ThreadRanks> {
        let slots = (0..ranks).map(|_| [0; 2].map(|_| RwLock::new(vec![0.0; elements]))).collect();
        let exchange = Arc::new(SharedSlots { meeting: Meeting::new(ranks), slots });
        (0..ranks).map(|rank| ThreadRanks { exchange: Arc::clone(&exchange), rank }).collect()
    }

    /// Writes `x` to this rank's slot and waits until all ranks have written theirs. Returns which of the two slots to read.
    fn show(&self, x: &[f32]) -> Result<usize, RunError> {
        // The count is the same on every rank: it changes only when this rank arrives too.
        let side = (self.exchange.meeting.count() % 2) as usize;
        let mut slot = self.exchange.slots[self.rank][side].write().unwrap_or_else(PoisonError::into_inner);
        let room = slot.len();
        let Some(own) = slot.get_mut(..x.len()) else {
            return Err(RunError(format!("{} elements to exchange with other ranks, room for {room}", x.len())));
        };
        own.copy_from_slice(x);
        drop(slot);
        self.exchange.meeting.meet()?;
        Ok(side)
    }
}

impl SharedSlots {
    fn slot(&self, rank: usize, side: usize) -> RwLockReadGuard<'_, Vec<f32>> {
        self.slots[rank][side].read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective<CpuBackend> for ThreadRanks {
    fn all_reduce(&mut self, _: &mut CpuBackend, x: &mut Buffer, elements: usize) -> Result<(), RunError> {
        let side = self.show(&x[..elements])?;
        for first in (0..elements).step_by(PIECE) {
            let piece = first..(first + PIECE).min(elements);
            let sum = &mut x[piece.clone()];
            sum.copy_from_slice(&self.exchange.slot(0, side)[piece.clone()]);
            for rank in 1..self.exchange.slots.len() {
                let other = self.exchange.slot(rank, side);
                sum.iter_mut().zip(&other[piece.clone()]).for_each(|(sum, x)| *sum += x);
            }
        }
        Ok(())
    }

    fn gather(
        &mut self,
        _: &mut CpuBackend,
        part: &Buffer,
        rows: usize,
        splits: &[usize],
        whole: &mut Buffer,
    ) -> Result<(), RunError> {
        let range = |rank: usize| splits[rank]..splits[rank + 1];
        let side = self.show(&part[..rows * range(self.rank).len()])?;
        if self.rank > 0 {
            return Ok(());
        }
        let width = splits.last().copied().unwrap_or(0);
        for rank in 0..self.exchange.slots.len() {
            let (slot, columns) = (self.exchange.slot(rank, side), range(rank));
            for row in 0..rows {
                let from = &slot[row * columns.len()..][..columns.len()];
                whole[row * width..][columns.clone()].copy_from_slice(from);
            }
        }
        Ok(())
    }

    fn abort(&self, why: &RunError) {
        self.exchange.meeting.abort(why);
    }

    fn reset(&mut self) -> Result<(), RunError> {
        self.exchange.meeting.reset();
        Ok(())
    }
}
