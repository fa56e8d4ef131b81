//! One thread's progress in UCX. The owner of a worker must drive it: otherwise nothing moves on either side.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::time::Duration;

use baton_ucx_sys::{self as sys, Status, THREAD_MODE_SERIALIZED, WORKER_PARAM_FIELD_THREAD_MODE, WorkerParams};

use super::engine::{UcxEngine, made, words};
use crate::wake;
use baton_handoff::TransferError;

/// Progress of one thread and the connections made through it.
pub(crate) struct Worker {
    engine: Arc<UcxEngine>,
    handle: NonNull<sys::Worker>,
    /// Valid as long as the worker.
    fd: i32,
}

// SAFETY: made for use by any one thread at a time (THREAD_MODE_SERIALIZED), and not `Sync`.
unsafe impl Send for Worker {}

impl Worker {
    /// A worker without connections.
    pub(crate) fn new(engine: &Arc<UcxEngine>) -> Result<Worker, TransferError> {
        // This thread may not be the one that registered the pool, and must be let in to it, too.
        engine.pool().registrable()?;
        let api = engine.api();
        let mut params = WorkerParams::new();
        params.field_mask = WORKER_PARAM_FIELD_THREAD_MODE;
        params.thread_mode = THREAD_MODE_SERIALIZED;
        let mut handle = ptr::null_mut();
        // SAFETY: a live context, a structure as the header has it, a place for the answer.
        let status = unsafe { (api.worker_create)(engine.context(), &params, &mut handle) };
        let handle = made(api, "make a worker", status, handle)?;
        let mut worker = Worker { engine: engine.clone(), handle, fd: -1 };
        // SAFETY: a live worker, a place for the answer.
        let status = unsafe { (api.worker_get_efd)(handle.as_ptr(), &mut worker.fd) };
        status.ok().map_err(|status| TransferError::ucx("get a descriptor to wait on", words(api, status)))?;
        Ok(worker)
    }

    pub(super) fn engine(&self) -> &Arc<UcxEngine> {
        &self.engine
    }

    pub(super) fn handle(&self) -> *mut sys::Worker {
        self.handle.as_ptr()
    }

    /// The opaque address by which others reach it.
    pub(crate) fn address(&self) -> Result<Vec<u8>, TransferError> {
        let api = self.engine.api();
        let (mut address, mut size) = (ptr::null_mut(), 0);
        // SAFETY: a live worker and places for the answer.
        let status = unsafe { (api.worker_get_address)(self.handle(), &mut address, &mut size) };
        let address = made(api, "tell a worker's address", status, address)?;
        // SAFETY: UCX wrote `size` bytes there, which are copied before they are released.
        let bytes = unsafe { std::slice::from_raw_parts(address.as_ptr().cast::<u8>(), size) }.to_vec();
        // SAFETY: made by `worker_get_address` of this worker just above.
        unsafe { (api.worker_release_address)(self.handle(), address.as_ptr()) };
        Ok(bytes)
    }

    /// Makes a little progress. False when there was nothing to do.
    pub(crate) fn progress(&self) -> bool {
        // SAFETY: a live worker, on the one thread that has it.
        unsafe { (self.engine.api().worker_progress)(self.handle()) != 0 }
    }

    /// Readable when there is something to do, once [`Worker::arm`] has returned true.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: open until the worker is destroyed, which the borrow prevents.
        unsafe { BorrowedFd::borrow_raw(self.fd) }
    }

    /// Arms the descriptor. True: wait for the descriptor. False: there is something to do already.
    pub(crate) fn arm(&self) -> Result<bool, TransferError> {
        let api = self.engine.api();
        // SAFETY: a live worker, on the one thread that has it.
        match unsafe { (api.worker_arm)(self.handle()) } {
            Status::BUSY => Ok(false),
            status => {
                let armed = status.ok().map(|()| true);
                armed.map_err(|status| TransferError::ucx("wait for its descriptor", words(api, status)))
            }
        }
    }

    /// Waits until there is something to do, or `at_most` has passed.
    pub(super) fn wait(&self, at_most: Duration) -> Result<(), TransferError> {
        if self.arm()? { wake::readable(self.fd(), at_most) } else { Ok(()) }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: a live worker whose endpoints are closed or closed with it; its address was copied.
        unsafe { (self.engine.api().worker_destroy)(self.handle()) };
    }
}
