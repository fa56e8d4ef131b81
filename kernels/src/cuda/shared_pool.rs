//! [`SharedPool`]: a KV pool in device memory that a backend computes on and transfers copy from and to, each session by a [`CopyQueue`].
//!
//! Copies run in streams of their own and read KV that the backend's stream wrote. So each copy waits for a mark: the number of an
//! event that [`crate::Backend::publish`] records after a layer's KV is queued to be stored. The number is passed along with the layer.
//! Events are reused after [`MARKS`] marks; a copy that waits for an old mark then waits for a later one, which is also correct.
//!
//! This module knows nothing of layouts, handoffs and peers.

mod copies;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_types::{DeviceError, DeviceMemory, DeviceQueue, PoolHandle, Registrable};

use super::device::{Device, Event};
use super::memory::Memory;
use super::queue::Queue;
use super::sharing::SharingDevice;
use crate::KernelError;
use copies::{CopyQueue, Kit};

/// Number of events for marks. Older marks share the events of later ones.
const MARKS: u64 = 256;

/// A pool's memory and the marks set in the stream that writes to it.
pub(super) struct MarkedMemory<D: Device> {
    memory: Memory<D>,
    marks: Mutex<Marks>,
}

struct Marks {
    events: Vec<Event>,
    /// Number of marks set so far.
    set: u64,
}

impl<D: Device> MarkedMemory<D> {
    pub fn memory(&self) -> &Memory<D> {
        &self.memory
    }

    fn marks(&self) -> MutexGuard<'_, Marks> {
        self.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets a mark after all that was put into the queue so far. It is the latest mark from now on.
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

    /// Makes the queue wait for a mark: work put into it from now on runs after what was published by then. Mark 0 is always past.
    fn wait(&self, queue: &Queue<D>, mark: u64) -> Result<(), KernelError> {
        let marks = self.marks();
        let Some(place) = mark.min(marks.set).checked_sub(1) else { return Ok(()) };
        queue.device.wait(queue.stream(), marks.events[(place % MARKS) as usize])
    }
}

/// A pool that a backend and any number of copy queues share. Clones are the same pool.
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
    /// A pool of `bytes` bytes with undefined contents.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError> {
        let memory = Memory::of_shared(device, bytes)?;
        let marks = Mutex::new(Marks { events: Vec::new(), set: 0 });
        let memory = Arc::new(MarkedMemory { memory, marks });
        Ok(SharedPool { device: Arc::clone(device), memory, idle: Arc::default() })
    }

    pub(super) fn memory(&self) -> &Arc<MarkedMemory<D>> {
        &self.memory
    }

    /// The device that the pool is on.
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

    fn export(&self) -> Result<PoolHandle, DeviceError> {
        Ok(self.device.export(self.memory.memory.piece(0, 0).at())?)
    }

    fn exported_as(&self) -> String {
        self.device.exported_as(self.memory.memory.piece(0, 0).at())
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
