//! [`SharedPool`]: a KV pool in device memory that a backend computes on and transfers reach beside it, each session by a [`CopyQueue`].
//!
//! Copies run in streams of their own. What they read was written by what computes, so each waits for a mark: an event that
//! [`crate::Backend::publish`] records after a layer's KV is stored, and that is passed along with the layer. A mark that is long past may
//! have been recorded anew; who waits for it waits for something later, which is as good. Knows nothing of layouts, handoffs and peers.

mod copies;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_types::{DeviceError, DeviceMemory, DeviceQueue, Registrable};

use super::device::{Device, Event};
use super::memory::Memory;
use super::queue::Queue;
use super::sharing::SharingDevice;
use crate::KernelError;
use copies::{CopyQueue, Kit};

/// Marks that are told apart.
const MARKS: u64 = 256;

/// A pool's memory with the marks in it.
pub(super) struct MarkedMemory<D: Device> {
    memory: Memory<D>,
    marks: Mutex<Marks>,
}

struct Marks {
    events: Vec<Event>,
    /// How many were set so far.
    set: u64,
}

impl<D: Device> MarkedMemory<D> {
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

/// A pool that a backend and any number of queues share. Clones are the same pool.
pub struct SharedPool<D: SharingDevice> {
    device: Arc<D>,
    memory: Arc<MarkedMemory<D>>,
    idle: Arc<Mutex<Vec<Kit<D>>>>,
}

impl<D: SharingDevice> Clone for SharedPool<D> {
    fn clone(&self) -> Self {
        let SharedPool { device, memory, idle } = self;
        SharedPool { device: Arc::clone(device), memory: Arc::clone(memory), idle: Arc::clone(idle) }
    }
}

impl<D: SharingDevice> SharedPool<D> {
    /// Of so many bytes, with anything in them.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError> {
        let memory = Memory::of_shared(device, bytes)?;
        let marks = Mutex::new(Marks { events: Vec::new(), set: 0 });
        let memory = Arc::new(MarkedMemory { memory, marks });
        Ok(SharedPool { device: Arc::clone(device), memory, idle: Arc::default() })
    }

    pub(super) fn memory(&self) -> &Arc<MarkedMemory<D>> {
        &self.memory
    }

    /// Its device.
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Kit<D>>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: SharingDevice> DeviceMemory for SharedPool<D> {
    fn bytes(&self) -> usize {
        self.memory.memory.bytes()
    }

    fn mark(&self) -> u64 {
        self.memory.marks().set
    }

    fn export(&self) -> Result<Vec<u8>, DeviceError> {
        Ok(self.device.export(self.memory.memory.piece(0, 0).at())?)
    }

    fn registrable(&self) -> Result<Registrable, DeviceError> {
        Ok(self.device.registrable(self.memory.memory.piece(0, 0).at())?)
    }

    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        let idle = self.idle().pop();
        let kit = idle.map_or_else(|| Kit::new(&self.device), Ok)?;
        Ok(Box::new(CopyQueue::over(self.clone(), kit)))
    }
}
