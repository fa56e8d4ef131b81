//! A connection to a peer's pool: puts, flushes, and a close that leaves nothing under way on this side.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicI8, Ordering};
use std::time::{Duration, Instant};

use baton_ucx_sys::{
    self as sys, Api, EP_ATTR_FIELD_TRANSPORTS, EP_CLOSE_FLAG_FORCE, EP_PARAM_FIELD_ERR_HANDLER,
    EP_PARAM_FIELD_ERR_HANDLING_MODE, EP_PARAM_FIELD_REMOTE_ADDRESS, ERR_HANDLING_MODE_PEER, EndpointAttr,
    EndpointParams, ErrorHandler, OP_ATTR_FIELD_FLAGS, OP_ATTR_FIELD_MEMH, RequestParam, Status, StatusPtr,
    TransportEntry,
};

use super::engine::{made, words};
use super::worker::Worker;

/// How long a forced close may take before the worker is torn down under it.
const CLOSING: Duration = Duration::from_secs(1);
/// Most transports of one endpoint that are listed.
const MOST_TRANSPORTS: usize = 64;

/// One connection, with a worker of its own. Errors are UCX's words, for [`crate::TransferError::PeerLost`].
pub(crate) struct Endpoint {
    /// None once closed.
    handle: Option<NonNull<sys::Endpoint>>,
    /// Once `handle` is None: whether the close was seen to finish.
    closed: bool,
    key: NonNull<sys::RemoteKey>,
    /// Dropping it ends whatever could not be closed.
    worker: Worker,
    /// Written by the error handler, during progress. Last, so that it outlives the worker.
    failure: Box<AtomicI8>,
}

// SAFETY: the handles belong to the worker, which may be used by any one thread at a time.
unsafe impl Send for Endpoint {}

impl Endpoint {
    /// Connects `worker` to the one at `address`, with the right to write that `key` gives.
    pub(crate) fn connect(worker: Worker, address: &[u8], key: &[u8]) -> Result<Endpoint, String> {
        let api = worker.engine().api();
        let failure = Box::new(AtomicI8::new(0));
        let mut params = EndpointParams::new();
        params.field_mask =
            EP_PARAM_FIELD_REMOTE_ADDRESS | EP_PARAM_FIELD_ERR_HANDLING_MODE | EP_PARAM_FIELD_ERR_HANDLER;
        params.address = address.as_ptr().cast();
        params.err_mode = ERR_HANDLING_MODE_PEER;
        params.err_handler = ErrorHandler { cb: Some(failed), arg: ptr::from_ref(&*failure).cast_mut().cast() };
        let mut handle = ptr::null_mut();
        // SAFETY: a live worker and an address that one made; the handler's argument is on the heap and goes after the
        // endpoint is closed.
        let status = unsafe { (api.ep_create)(worker.handle(), &params, &mut handle) };
        let handle = made(api, "connect to the peer's worker", status, handle).map_err(|e| e.to_string())?;
        let mut rkey = ptr::null_mut();
        // SAFETY: a live endpoint and a key that `rkey_pack` made.
        let status = unsafe { (api.ep_rkey_unpack)(handle.as_ptr(), key.as_ptr().cast(), &mut rkey) };
        match made(api, "read the pool's key", status, rkey) {
            Ok(key) => Ok(Endpoint { handle: Some(handle), closed: false, key, worker, failure }),
            Err(error) => {
                let _ = close(&worker, handle);
                Err(error.to_string())
            }
        }
    }

    pub(crate) fn worker(&self) -> &Worker {
        &self.worker
    }

    fn api(&self) -> &'static Api {
        self.worker.engine().api()
    }

    /// Why it can no longer be used; None while it can.
    pub(crate) fn failure(&self) -> Option<String> {
        match (self.failure.load(Ordering::Relaxed), self.handle) {
            (0, Some(_)) => None,
            (0, None) => Some("the UCX endpoint is closed".to_owned()),
            (status, _) => Some(format!("UCX: {}", words(self.api(), Status(status)))),
        }
    }

    /// Starts to write `len` bytes to the peer's address `to`. Returns None when the local memory may already be changed. `registered`: the
    /// bytes lie in the engine's pool.
    ///
    /// # Safety
    /// `from` must be readable for `len` bytes, and nothing may change them, until the request is done or the endpoint closed. Only the
    /// peer decides that `to` may be written to; it must have done so.
    pub(crate) unsafe fn put(
        &self,
        from: *const u8,
        len: usize,
        to: u64,
        registered: bool,
    ) -> Result<Option<Request>, String> {
        let mut params = RequestParam::new();
        if registered {
            params.op_attr_mask = OP_ATTR_FIELD_MEMH;
            params.memh = self.worker.engine().memory();
        }
        let handle = self.live()?;
        // SAFETY: live handles; the caller vouches for the memory.
        let answer = unsafe { (self.api().put_nbx)(handle, from.cast(), len, to, self.key.as_ptr(), &params) };
        self.request(answer)
    }

    /// Starts a flush, which is done once everything put so far is applied at the peer. None when that is so already.
    pub(crate) fn flush(&self) -> Result<Option<Request>, String> {
        let handle = self.live()?;
        // SAFETY: a live endpoint, a structure as the header has it.
        self.request(unsafe { (self.api().ep_flush_nbx)(handle, &RequestParam::new()) })
    }

    fn live(&self) -> Result<*mut sys::Endpoint, String> {
        match (self.failure(), self.handle) {
            (None, Some(handle)) => Ok(handle.as_ptr()),
            (cause, _) => Err(cause.unwrap_or_default()),
        }
    }

    fn request(&self, answer: StatusPtr) -> Result<Option<Request>, String> {
        let api = self.api();
        let request = answer.request().map_err(|status| format!("UCX: {}", words(api, status)))?;
        Ok(request.map(|handle| Request { api, handle }))
    }

    /// Names of the transports it uses, each once.
    pub(crate) fn transports(&self) -> Result<Vec<String>, String> {
        let mut entries =
            [const { TransportEntry { transport_name: ptr::null(), device_name: ptr::null() } }; MOST_TRANSPORTS];
        let mut attr = EndpointAttr::new();
        attr.field_mask = EP_ATTR_FIELD_TRANSPORTS;
        attr.transports.entries = entries.as_mut_ptr();
        attr.transports.num_entries = MOST_TRANSPORTS as u32;
        attr.transports.entry_size = size_of::<TransportEntry>();
        let handle = self.live()?;
        // SAFETY: a live endpoint and as much room as the structure says.
        let status = unsafe { (self.api().ep_query)(handle, &mut attr) };
        status.ok().map_err(|status| format!("UCX cannot say what it goes over: {}", words(self.api(), status)))?;
        let mut names: Vec<String> = Vec::new();
        for entry in entries.iter().take(attr.transports.num_entries as usize) {
            if entry.transport_name.is_null() {
                continue;
            }
            // SAFETY: a string that ends with a zero byte and lives as long as the endpoint.
            let name = unsafe { CStr::from_ptr(entry.transport_name) }.to_string_lossy().into_owned();
            if !names.contains(&name) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Closes it by force, unless it is closed. Everything under way fails. After true, nothing reads the local pool any more, but bytes
    /// that have left may still be applied at the peer. False when UCX did not finish in time: the memory of puts under way must then stay
    /// until the worker is gone.
    pub(crate) fn close(&mut self) -> bool {
        if let Some(handle) = self.handle.take() {
            self.closed = close(&self.worker, handle);
        }
        self.closed
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        if self.close() {
            // SAFETY: no put is under way any more that could use it.
            unsafe { (self.api().rkey_destroy)(self.key.as_ptr()) };
        }
    }
}

/// UCX's error handler: notes the status.
unsafe extern "C" fn failed(arg: *mut c_void, _: *mut sys::Endpoint, status: Status) {
    // SAFETY: `arg` is the atomic of the endpoint, which is closed before that is freed.
    unsafe { &*arg.cast::<AtomicI8>() }.store(status.0, Ordering::Relaxed);
}

/// Closes an endpoint by force. False when the close was not seen to finish.
fn close(worker: &Worker, handle: NonNull<sys::Endpoint>) -> bool {
    let api = worker.engine().api();
    let mut params = RequestParam::new();
    (params.op_attr_mask, params.flags) = (OP_ATTR_FIELD_FLAGS, EP_CLOSE_FLAG_FORCE);
    // SAFETY: a live endpoint, not used after this.
    let answer = unsafe { (api.ep_close_nbx)(handle.as_ptr(), &params) };
    let Ok(Some(handle)) = answer.request() else { return true };
    let request = Request { api, handle };
    let until = Instant::now() + CLOSING;
    while request.poll() == Ok(false) {
        if until <= Instant::now() {
            tracing::warn!("a UCX endpoint did not close within {CLOSING:?}; it ends with its worker");
            return false;
        }
        if !worker.progress() {
            std::thread::yield_now();
        }
    }
    true
}

/// An operation under way. If dropped, it continues unobserved until its worker ends it.
pub(crate) struct Request {
    api: &'static Api,
    handle: NonNull<c_void>,
}

// SAFETY: belongs to the worker it was made by, whose owner keeps it.
unsafe impl Send for Request {}

impl Request {
    /// Whether it is done.
    pub(crate) fn poll(&self) -> Result<bool, String> {
        // SAFETY: not yet freed.
        match unsafe { (self.api.request_check_status)(self.handle.as_ptr()) } {
            Status::IN_PROGRESS => Ok(false),
            status => status.ok().map(|()| true).map_err(|status| format!("UCX: {}", words(self.api, status))),
        }
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: freed once, here.
        unsafe { (self.api.request_free)(self.handle.as_ptr()) };
    }
}
