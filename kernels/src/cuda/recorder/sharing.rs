//! [`SharingDevice`] for the recorder. Finds imports that are never closed, imports that are closed and exported memory that is freed
//! while in use, and pinned memory that is freed while a copy is under way. A copy to a peer's memory that does not wait for the work that
//! wrote its source is found like any other unordered work.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use baton_types::{OpenedBy, PoolHandle, Registrable};

use super::super::device::{Access, Address, Device, Event, HostCopies, Piece, Stream};
use super::super::sharing::SharingDevice;
use super::state::{State, join};
use super::{Recorded, Recorder};
use crate::KernelError;

fn address(at: NonNull<u8>) -> Address {
    Address(at.as_ptr().expose_provenance() as u64)
}

impl State {
    /// Records a problem if memory that is about to be given up is used by work that the host has not waited for.
    fn expect_done(&mut self, at: Address, ended: &str) {
        let Some(allocation) = self.allocations.get(&at) else { return };
        let known = |stream| self.host.get(stream).copied().unwrap_or(0);
        let open = allocation.touches.iter().find(|touch| known(&touch.stream) < touch.work);
        if let Some(why) = open.map(|touch| format!("{ended} while {} in {:?} is under way", touch.what, touch.stream))
        {
            self.problems.push(why);
        }
    }
}

impl<D: SharingDevice> Recorder<D> {
    /// Number of imports that were not closed.
    pub fn open_imports(&self) -> usize {
        self.state().imports.len()
    }
}

impl<D: Device> HostCopies for Recorder<D> {
    fn pin(&self, bytes: usize) -> Result<NonNull<u8>, KernelError> {
        let at = self.inner.pin(bytes)?;
        self.state().note(Recorded::Pin(bytes), address(at), bytes);
        Ok(at)
    }

    fn unpin(&self, at: NonNull<u8>) {
        let mut state = self.state();
        state.expect_done(address(at), "pinned memory is given back");
        if state.forget(Recorded::Unpin, address(at)) {
            self.inner.unpin(at);
        }
    }

    unsafe fn read_later(&self, stream: Stream, from: Piece<'_>, to: NonNull<u8>) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Read(from.bytes()));
        state.refuse("a copy to the host", Some(stream))?;
        let pinned = Piece::new(address(to), from.bytes());
        state.touch("read", stream, &[Access::Read(from), Access::Write(pinned)])?;
        // SAFETY: the caller vouches for it.
        unsafe { self.inner.read_later(stream, from, to) }
    }

    unsafe fn write_later(&self, stream: Stream, to: Piece<'_>, from: NonNull<u8>) -> Result<(), KernelError> {
        let mut state = self.state();
        state.log.push(Recorded::Write(to.bytes()));
        state.refuse("a copy from the host", Some(stream))?;
        let pinned = Piece::new(address(from), to.bytes());
        state.touch("write", stream, &[Access::Write(to), Access::Read(pinned)])?;
        // SAFETY: the caller vouches for it.
        unsafe { self.inner.write_later(stream, to, from) }
    }

    fn settle(&self, event: Event) -> Result<(), KernelError> {
        self.may_wait()?;
        let mut state = self.state();
        state.log.push(Recorded::Settle(event));
        match state.events.get(&event).cloned() {
            Some(known) => join(&mut state.host, &known),
            None => state.problems.push(format!("the host waits for {event:?}, which was never recorded")),
        }
        drop(state);
        self.inner.settle(event)
    }
}

impl<D: SharingDevice> SharingDevice for Recorder<D> {
    fn allocate_shared(&self, bytes: usize) -> Result<Address, KernelError> {
        let at = self.inner.allocate_shared(bytes)?;
        self.state().note(Recorded::Allocate(bytes), at, bytes);
        Ok(at)
    }

    fn export(&self, at: Address) -> Result<PoolHandle, KernelError> {
        let handle = self.inner.export(at)?;
        let mut state = self.state();
        state.log.push(Recorded::Export);
        state.exports.insert(handle.bytes.clone(), at);
        Ok(handle)
    }

    fn exported_as(&self, at: Address) -> String {
        self.inner.exported_as(at)
    }

    fn import(&self, handle: PoolHandle, bytes: usize) -> Result<(Address, OpenedBy), KernelError> {
        let said = handle.bytes.clone();
        let (at, by) = self.inner.import(handle, bytes)?;
        let mut state = self.state();
        let exported = state.exports.get(&said).copied();
        match exported {
            // A driver gives the exporting process the memory's own address.
            Some(own) if own == at => state.log.push(Recorded::Import(bytes)),
            _ => state.note(Recorded::Import(bytes), at, bytes),
        }
        state.imports.insert(at, exported);
        Ok((at, by))
    }

    fn registrable(&self, at: Address) -> Result<Registrable, KernelError> {
        self.inner.registrable(at)
    }

    fn see_foreign_writes(&self) -> Result<(), KernelError> {
        self.state().log.push(Recorded::SeeForeignWrites);
        self.inner.see_foreign_writes()
    }

    fn close(&self, at: Address) {
        let mut state = self.state();
        state.expect_done(at, "an import is closed");
        let closed = match state.imports.remove(&at) {
            Some(own) if own == Some(at) => true,
            Some(_) => state.forget(Recorded::Close, at),
            None => {
                state.problems.push("close: memory that is not imported".to_owned());
                false
            }
        };
        if closed {
            self.inner.close(at);
        }
    }

    fn is_done(&self, event: Event) -> Result<bool, KernelError> {
        let done = self.inner.is_done(event)?;
        let mut state = self.state();
        if done && let Some(known) = state.events.get(&event).cloned() {
            join(&mut state.host, &known);
        }
        Ok(done)
    }

    unsafe fn notify(&self, stream: Stream, fd: BorrowedFd<'_>) -> Result<(), KernelError> {
        // SAFETY: the caller vouches for it.
        unsafe { self.inner.notify(stream, fd) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::super::pinned::Pinned;
    use super::super::super::sharing::Imported;
    use super::super::super::{Device, Memory, Nowhere};
    use super::*;

    fn recorder() -> Arc<Recorder<Nowhere>> {
        Arc::new(Recorder::new(Nowhere::default()))
    }

    fn of_a_peer() -> PoolHandle {
        PoolHandle { bytes: b"a peer's".to_vec(), descriptor: None }
    }

    /// Imported memory of a peer, and a stream that copies into it.
    fn imported(device: &Arc<Recorder<Nowhere>>) -> (Imported<Recorder<Nowhere>>, Stream) {
        (Imported::open(device, of_a_peer(), 64).unwrap().0, device.stream().unwrap())
    }

    #[test]
    fn an_import_that_is_never_closed_is_found() {
        let device = recorder();
        let (peer, _) = imported(&device);
        assert_eq!(device.open_imports(), 1);
        drop(peer);
        assert_eq!((device.open_imports(), device.live_bytes(), device.problems().len()), (0, 0, 0));
        assert_eq!(device.take_log(), [Recorded::Import(64), Recorded::Close]);
    }

    #[test]
    fn a_peers_memory_used_after_it_was_closed_or_closed_under_its_users_is_found() {
        let device = recorder();
        let (peer, stream) = imported(&device);
        let at = peer.whole().at();
        drop(peer);
        let error = device.fill(stream, Piece::new(at, 8), 0).unwrap_err().to_string();
        assert!(error.contains("after it was freed"), "{error}");
        device.close(at);
        assert!(device.problems().iter().any(|problem| problem.contains("not imported")), "twice");

        let device = recorder();
        let (peer, stream) = imported(&device);
        device.fill(stream, peer.whole(), 0).unwrap();
        drop(peer);
        let problems = device.problems();
        assert!(problems[0].contains("an import is closed while fill"), "{problems:?}");
    }

    #[test]
    fn memory_freed_while_a_peer_has_it_is_found() {
        let device = recorder();
        let at = device.allocate_shared(64).unwrap();
        let handle = device.export(at).unwrap();
        let (peer, _) = Imported::open(&device, handle, 64).unwrap();
        device.free(at);
        assert!(device.problems()[0].contains("freed while it is imported"), "{:?}", device.problems());
        drop(peer);
    }

    /// One stream writes a block, and another copies it to a peer. Returns the problems found.
    fn copied(order: impl Fn(&Recorder<Nowhere>, Stream, Stream)) -> Vec<String> {
        let device = recorder();
        let (peer, copies) = imported(&device);
        let compute = device.stream().unwrap();
        let pool = Memory::new(&device, 64).unwrap();
        device.fill(compute, pool.piece(0, 32), 1).unwrap();
        order(&device, compute, copies);
        let touches = [Access::Read(pool.piece(0, 16)), Access::Write(peer.whole())];
        device.state().touch("copy", copies, &touches).unwrap();
        device.synchronise(copies).unwrap();
        device.problems()
    }

    #[test]
    fn a_copy_to_a_peer_that_does_not_wait_for_what_wrote_its_source_is_found() {
        let through_event = |device: &Recorder<Nowhere>, compute, copies| {
            let event = device.event().unwrap();
            device.record(event, compute).unwrap();
            device.wait(copies, event).unwrap();
        };
        assert_eq!(copied(through_event), [""; 0]);
        let problems = copied(|_, _, _| ());
        assert!(problems[0].contains("copy") && problems[0].contains("does not wait for fill"), "{problems:?}");
    }

    #[test]
    fn pinned_memory_given_back_under_a_copy_is_found() {
        let device = recorder();
        let (stream, event) = (device.stream().unwrap(), device.event().unwrap());
        let pool = Memory::new(&device, 64).unwrap();
        let copy = |waits: bool| {
            let pinned = Pinned::new(&device, 64).unwrap();
            // SAFETY: both are 64 bytes, and nobody reads them.
            unsafe { device.read_later(stream, pool.piece(0, 64), pinned.at(0, 64)) }.unwrap();
            device.record(event, stream).unwrap();
            assert!(!waits || device.is_done(event).unwrap());
        };
        copy(true);
        assert_eq!(device.problems(), [""; 0]);
        copy(false);
        assert!(device.problems()[0].contains("given back while read"), "{:?}", device.problems());
    }
}
