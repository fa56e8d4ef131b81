//! [`SharedPool`]: a KV pool in device memory that a backend computes on and transfers reach beside it, each session by a [`CopyQueue`].
//!
//! Copies run in streams of their own. What they read was written by what computes, so each waits for a mark: an event that
//! [`crate::Backend::publish`] records after a layer's KV is stored, and that is passed along with the layer. A mark that is long past may
//! have been recorded anew; who waits for it waits for something later, which is as good. Knows nothing of layouts, handoffs and peers.

mod copies;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::device::{Device, Event};
use super::memory::Memory;
use super::queue::Queue;
use super::sharing::{Registrable, SharingDevice};
use crate::KernelError;
use copies::Kit;
pub use copies::{CopyQueue, Finished, Staging};

/// Marks that are told apart.
const MARKS: u64 = 256;

/// A pool's memory with the marks in it.
pub(super) struct PoolMemory<D: Device> {
    memory: Memory<D>,
    marks: Mutex<Marks>,
}

struct Marks {
    events: Vec<Event>,
    /// How many were set so far.
    set: u64,
}

impl<D: Device> PoolMemory<D> {
    pub fn memory(&self) -> &Memory<D> {
        &self.memory
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was put into the queue so far can be waited for by the mark that is the last from now on.
    pub fn publish(&self, queue: &Queue<D>) -> Result<(), KernelError> {
        let mut marks = self.marks();
        let place = (marks.set % MARKS) as usize;
        if place == marks.events.len() {
            marks.events.push(queue.device.event()?);
        }
        queue.device.record(marks.events[place], queue.stream())?;
        marks.set += 1;
        Ok(())
    }

    /// What is put into the queue from now on comes after what was there at a mark; the mark 0 is there from the start.
    fn wait(&self, queue: &Queue<D>, mark: u64) -> Result<(), KernelError> {
        let marks = self.marks();
        let Some(place) = mark.min(marks.set).checked_sub(1) else { return Ok(()) };
        queue.device.wait(queue.stream(), marks.events[(place % MARKS) as usize])
    }
}

/// A pool that a backend and any number of queues share.
pub struct SharedPool<D: SharingDevice> {
    device: Arc<D>,
    memory: Arc<PoolMemory<D>>,
    idle: Mutex<Vec<Kit<D>>>,
}

impl<D: SharingDevice> SharedPool<D> {
    /// Of so many bytes, with anything in them.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError> {
        let memory = Memory::of_shared(device, bytes)?;
        let marks = Mutex::new(Marks { events: Vec::new(), set: 0 });
        let memory = Arc::new(PoolMemory { memory, marks });
        Ok(SharedPool { device: Arc::clone(device), memory, idle: Mutex::default() })
    }

    pub(super) fn memory(&self) -> &Arc<PoolMemory<D>> {
        &self.memory
    }

    /// Its device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.memory.memory.bytes()
    }

    /// What was published last: work after this mark sees it.
    pub fn mark(&self) -> u64 {
        self.memory.marks().set
    }

    /// Bytes by which another process of this host opens the pool.
    pub fn export(&self) -> Result<Vec<u8>, KernelError> {
        self.device.export(self.memory.memory.piece(0, 0).at())
    }

    /// Where it lies for a network library, which the calling thread may use for it from now on.
    pub fn registrable(&self) -> Result<Registrable, KernelError> {
        self.device.registrable(self.memory.memory.piece(0, 0).at())
    }

    /// A way to the pool for one thread.
    pub fn queue(self: &Arc<Self>) -> Result<CopyQueue<D>, KernelError> {
        let idle = self.idle().pop();
        let kit = idle.map_or_else(|| Kit::new(&self.device), Ok)?;
        Ok(CopyQueue::over(Arc::clone(self), kit))
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Kit<D>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
