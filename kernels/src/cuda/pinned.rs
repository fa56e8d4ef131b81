//! Pinned host memory for copies that the host does not wait for. Steps send their inputs by [`Uploads`] and get their results by
//! [`Landings`].

use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{Device, Event, Piece};
use super::queue::Queue;
use crate::KernelError;

/// Pinned host memory, freed when dropped. Its owner drops it only after all copies that use it are done.
pub(super) struct Pinned<D: Device> {
    device: Arc<D>,
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: this value alone owns the memory. `&` and `&mut` of its owner, and the promises of `get` and `get_mut`, rule who touches it
// while copies are under way.
unsafe impl<D: Device> Send for Pinned<D> {}
// SAFETY: as above.
unsafe impl<D: Device> Sync for Pinned<D> {}

impl<D: Device> Pinned<D> {
    /// Allocates zeroed pinned memory of at least 1 byte.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, KernelError> {
        let bytes = bytes.max(1);
        let at = device.pin(bytes)?;
        // SAFETY: the memory has as many bytes, and nobody else uses it.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Pinned { device: Arc::clone(device), at, bytes })
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Pointer to `bytes` bytes from byte `from` on, to copy into or out of.
    ///
    /// # Panics
    /// When they reach beyond the end.
    pub fn at(&self, from: usize, bytes: usize) -> NonNull<u8> {
        let inside = from.checked_add(bytes).is_some_and(|end| end <= self.bytes);
        assert!(inside, "{bytes} bytes from {from} on, of pinned memory of {}", self.bytes);
        // SAFETY: the check above shows that it is inside.
        unsafe { self.at.add(from) }
    }

    /// The contents.
    ///
    /// # Safety
    /// No copy into it is under way.
    pub unsafe fn get(&self) -> &[u8] {
        // SAFETY: `new` initialised it, and the caller vouches that no copy into it is under way.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }

    /// The contents, mutable.
    ///
    /// # Safety
    /// No copy into it or out of it is under way.
    pub unsafe fn get_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `get`, and `&mut self` excludes other users.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

impl<D: Device> Drop for Pinned<D> {
    fn drop(&mut self) {
        self.device.unpin(self.at);
    }
}

/// Pinned memory with a copy from or to it that may be under way.
struct Slot<D: Device> {
    memory: Option<Pinned<D>>,
    /// Recorded after the copy.
    copied: Option<Event>,
}

impl<D: Device> Slot<D> {
    const EMPTY: Slot<D> = Slot { memory: None, copied: None };

    /// Makes the memory at least `bytes` bytes large. If it must be replaced, waits first for the copy that may use it.
    fn at_least(&mut self, queue: &Queue<D>, bytes: usize) -> Result<&mut Pinned<D>, KernelError> {
        if self.memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            self.settle(queue)?;
            self.memory = None;
            self.memory = Some(Pinned::new(&queue.device, bytes)?);
        }
        self.memory.as_mut().ok_or(KernelError::Memory { bytes })
    }

    /// Records the event after a copy that was just queued.
    fn record(&mut self, queue: &Queue<D>) -> Result<(), KernelError> {
        let event = match self.copied {
            Some(event) => event,
            None => queue.device.event()?,
        };
        self.copied = Some(event);
        queue.device.record(event, queue.stream())
    }

    fn settle(&self, queue: &Queue<D>) -> Result<(), KernelError> {
        self.copied.map_or(Ok(()), |event| queue.device.settle(event))
    }
}

/// Copies to the device while it computes earlier work. Two buffers take turns, so that the host writes one while the other is copied.
pub(super) struct Uploads<D: Device>([Slot<D>; 2]);

impl<D: Device> Default for Uploads<D> {
    fn default() -> Self {
        Uploads([Slot::EMPTY; 2])
    }
}

impl<D: Device> Uploads<D> {
    /// Reserves room for copies of up to `bytes` bytes.
    pub fn reserve(&mut self, queue: &Queue<D>, bytes: usize) -> Result<(), KernelError> {
        self.0.iter_mut().try_for_each(|slot| slot.at_least(queue, bytes).map(drop))
    }

    /// Queues a copy of the present `bytes` to the device. Waits only for the copy before the last one.
    pub fn send(&mut self, queue: &Queue<D>, to: Piece<'_>, bytes: &[u8]) -> Result<(), KernelError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.0.swap(0, 1);
        let slot = &mut self.0[0];
        slot.settle(queue)?;
        let memory = slot.at_least(queue, bytes.len())?;
        // SAFETY: the last copy out of this buffer, if there was one, is done.
        let pinned = unsafe { memory.get_mut() };
        pinned[..bytes.len()].copy_from_slice(bytes);
        let (to, from) = (Piece::new(to.at(), bytes.len()), memory.at(0, bytes.len()));
        // SAFETY: the buffer is pinned and has as many bytes. It is written next only after the event recorded below.
        unsafe { queue.device.write_later(queue.stream(), to, from) }?;
        slot.record(queue)
    }
}

/// Copies from the device, one for each step. The host takes one while the next is under way.
pub(super) struct Landings<D: Device> {
    slots: [Slot<D>; 2],
    /// Bytes of the copies that are not taken yet, oldest first.
    open: [Option<usize>; 2],
    /// Slot of the oldest copy that is not taken, or of the next copy if there is none.
    first: usize,
}

impl<D: Device> Default for Landings<D> {
    fn default() -> Self {
        Landings { slots: [Slot::EMPTY; 2], open: [None; 2], first: 0 }
    }
}

impl<D: Device> Landings<D> {
    /// Reserves room for copies of up to `bytes` bytes. To be called only while no copy is under way.
    pub fn reserve(&mut self, queue: &Queue<D>, bytes: usize) -> Result<(), KernelError> {
        self.slots.iter_mut().try_for_each(|slot| slot.at_least(queue, bytes).map(drop))
    }

    /// Queues a copy of a piece. With None it only marks the end of a step without results.
    ///
    /// # Errors
    /// When two copies are not taken yet.
    pub fn fetch(&mut self, queue: &Queue<D>, from: Option<Piece<'_>>) -> Result<(), KernelError> {
        let Some(at) = self.open.iter().position(Option::is_none) else {
            let why = "two steps are not collected yet".to_owned();
            return Err(KernelError::Device { operation: "a third step".to_owned(), why });
        };
        let slot = &mut self.slots[(self.first + at) % 2];
        if let Some(from) = from {
            let to = slot.at_least(queue, from.bytes())?.at(0, from.bytes());
            // SAFETY: the buffer is pinned and has as many bytes. It is read only after the event recorded below.
            unsafe { queue.device.read_later(queue.stream(), from, to) }?;
        }
        slot.record(queue)?;
        self.open[at] = Some(from.map_or(0, |from| from.bytes()));
        Ok(())
    }

    /// Waits for the oldest copy that is not taken, and so for all work put into the stream before it, and returns its bytes.
    ///
    /// # Errors
    /// When that work failed; the copy counts as taken all the same. Also when there is no copy to take.
    pub fn take(&mut self, queue: &Queue<D>) -> Result<&[u8], KernelError> {
        let Some(bytes) = self.open[0].take() else {
            let why = "no step was submitted".to_owned();
            return Err(KernelError::Device { operation: "collecting a step".to_owned(), why });
        };
        self.open.swap(0, 1);
        let slot = &self.slots[self.first];
        self.first = 1 - self.first;
        slot.settle(queue)?;
        // SAFETY: the copy into the buffer is done.
        Ok(slot.memory.as_ref().map_or(&[], |memory| &unsafe { memory.get() }[..bytes]))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Memory, Nowhere, Recorded, Recorder};
    use super::*;

    fn queue() -> (Queue<Recorder<Nowhere>>, Memory<Recorder<Nowhere>>) {
        let queue = Queue::new(Arc::new(Recorder::new(Nowhere::default()))).unwrap();
        let memory = queue.memory(64).unwrap();
        queue.device.take_log();
        (queue, memory)
    }

    fn settled(queue: &Queue<Recorder<Nowhere>>) -> usize {
        queue.device.take_log().iter().filter(|call| matches!(call, Recorded::Settle(_))).count()
    }

    #[test]
    fn what_is_sent_waits_for_the_copy_before_the_last() {
        let (queue, memory) = queue();
        let mut uploads = Uploads::default();
        uploads.reserve(&queue, 8).unwrap();
        let mut waits = || {
            uploads.send(&queue, memory.piece(0, 64), &[7; 8]).unwrap();
            settled(&queue)
        };
        assert_eq!([(); 5].map(|()| waits()), [0, 0, 1, 1, 1]);
        drop(uploads);
        assert!(queue.device.problems()[0].contains("given back while"), "it was not waited for");
    }

    #[test]
    fn steps_land_in_their_order_and_two_at_most() {
        let (queue, memory) = queue();
        let mut landings = Landings::default();
        landings.reserve(&queue, 24).unwrap();
        assert!(landings.take(&queue).is_err());
        for _ in 0..3 {
            landings.fetch(&queue, Some(memory.piece(0, 24))).unwrap();
            landings.fetch(&queue, None).unwrap();
            let error = landings.fetch(&queue, None).unwrap_err().to_string();
            assert!(error.contains("not collected"), "{error}");
            assert_eq!(landings.take(&queue).unwrap().len(), 24);
            landings.fetch(&queue, Some(memory.piece(0, 8))).unwrap();
            assert_eq!(landings.take(&queue).unwrap().len(), 0);
            assert_eq!(landings.take(&queue).unwrap().len(), 8);
        }
        assert_eq!(settled(&queue), 9);
        assert_eq!(queue.device.problems(), [""; 0]);
    }
}
