//! The functions, as pointers that [`crate::load()`] has looked up.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;

use crate::types::*;

/// Declares each function once: as a field of [`Api`], and as a symbol to look up.
macro_rules! api {
    ($($(#[$doc:meta])* $library:ident $symbol:literal fn $name:ident($($arg:ident: $type:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// libucp's functions, and one of libucs. Each is unsafe as C is; UCX's own documentation says what it requires.
        #[derive(Debug)]
        pub struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) $(-> $ret)?,)*
        }

        impl Api {
            /// Looks up every function; the error is the symbol that is missing.
            ///
            /// # Safety
            /// The libraries are UCX's, of a version whose API has these signatures.
            pub(crate) unsafe fn resolve(ucp: &Library, ucs: &Library) -> Result<Api, &'static str> {
                Ok(Api {
                    $($name: {
                        // SAFETY: the caller vouches for the library, and the signature is that of UCX's header.
                        let symbol = unsafe { $library!(ucp, ucs).get($symbol) };
                        *symbol.map_err(|_| $symbol)?
                    },)*
                })
            }
        }
    };
}

macro_rules! ucp {
    ($ucp:ident, $ucs:ident) => {
        $ucp
    };
}

macro_rules! ucs {
    ($ucp:ident, $ucs:ident) => {
        $ucs
    };
}

api! {
    /// The library's version.
    ucp "ucp_get_version" fn get_version(major: *mut c_uint, minor: *mut c_uint, release: *mut c_uint);
    /// Settings from UCX's own files and variables.
    ucp "ucp_config_read" fn config_read(prefix: *const c_char, file: *const c_char, config: *mut *mut Config) -> Status;
    /// Overrides one setting.
    ucp "ucp_config_modify" fn config_modify(config: *mut Config, name: *const c_char, value: *const c_char) -> Status;
    /// Frees what [`Api::config_read`] made.
    ucp "ucp_config_release" fn config_release(config: *mut Config);
    /// Makes a context for a program written for API version major.minor.
    ucp "ucp_init_version" fn init_version(
        major: c_uint, minor: c_uint, params: *const Params, config: *const Config, context: *mut *mut Context,
    ) -> Status;
    /// Destroys a context that has no workers and no memory left.
    ucp "ucp_cleanup" fn cleanup(context: *mut Context);
    /// What a context can do.
    ucp "ucp_context_query" fn context_query(context: *mut Context, attr: *mut ContextAttr) -> Status;
    /// Registers memory.
    ucp "ucp_mem_map" fn mem_map(context: *mut Context, params: *const MemMapParams, memory: *mut *mut Memory) -> Status;
    /// Unregisters what [`Api::mem_map`] registered.
    ucp "ucp_mem_unmap" fn mem_unmap(context: *mut Context, memory: *mut Memory) -> Status;
    /// Makes the key that others need to reach registered memory.
    ucp "ucp_rkey_pack" fn rkey_pack(
        context: *mut Context, memory: *mut Memory, buffer: *mut *mut c_void, size: *mut usize,
    ) -> Status;
    /// Frees the buffer that [`Api::rkey_pack`] made.
    ucp "ucp_rkey_buffer_release" fn rkey_buffer_release(buffer: *mut c_void);
    /// Makes a worker.
    ucp "ucp_worker_create" fn worker_create(
        context: *mut Context, params: *const WorkerParams, worker: *mut *mut Worker,
    ) -> Status;
    /// Destroys a worker and all its connections.
    ucp "ucp_worker_destroy" fn worker_destroy(worker: *mut Worker);
    /// The address at which the worker can be reached.
    ucp "ucp_worker_get_address" fn worker_get_address(
        worker: *mut Worker, address: *mut *mut Address, size: *mut usize,
    ) -> Status;
    /// Frees the address that [`Api::worker_get_address`] made.
    ucp "ucp_worker_release_address" fn worker_release_address(worker: *mut Worker, address: *mut Address);
    /// Makes progress; 0 when there was nothing to do.
    ucp "ucp_worker_progress" fn worker_progress(worker: *mut Worker) -> c_uint;
    /// A descriptor that becomes readable when there is something to do, once armed.
    ucp "ucp_worker_get_efd" fn worker_get_efd(worker: *mut Worker, fd: *mut c_int) -> Status;
    /// Arms the descriptor, or says that there is something to do.
    ucp "ucp_worker_arm" fn worker_arm(worker: *mut Worker) -> Status;
    /// Connects to another worker.
    ucp "ucp_ep_create" fn ep_create(
        worker: *mut Worker, params: *const EndpointParams, ep: *mut *mut Endpoint,
    ) -> Status;
    /// Closes a connection.
    ucp "ucp_ep_close_nbx" fn ep_close_nbx(ep: *mut Endpoint, param: *const RequestParam) -> StatusPtr;
    /// Completes once everything before it is applied at the target.
    ucp "ucp_ep_flush_nbx" fn ep_flush_nbx(ep: *mut Endpoint, param: *const RequestParam) -> StatusPtr;
    /// Attributes of a connection, such as its transports.
    ucp "ucp_ep_query" fn ep_query(ep: *mut Endpoint, attr: *mut EndpointAttr) -> Status;
    /// Reads a key that [`Api::rkey_pack`] made.
    ucp "ucp_ep_rkey_unpack" fn ep_rkey_unpack(
        ep: *mut Endpoint, buffer: *const c_void, rkey: *mut *mut RemoteKey,
    ) -> Status;
    /// Destroys what [`Api::ep_rkey_unpack`] made.
    ucp "ucp_rkey_destroy" fn rkey_destroy(rkey: *mut RemoteKey);
    /// Writes to the peer's memory. Completes once the local memory may be changed.
    ucp "ucp_put_nbx" fn put_nbx(
        ep: *mut Endpoint, buffer: *const c_void, count: usize, remote: u64, rkey: *mut RemoteKey,
        param: *const RequestParam,
    ) -> StatusPtr;
    /// Status of a request.
    ucp "ucp_request_check_status" fn request_check_status(request: *mut c_void) -> Status;
    /// Releases a request; one that is under way goes on.
    ucp "ucp_request_free" fn request_free(request: *mut c_void);
    /// A status in words; static text.
    ucs "ucs_status_string" fn status_string(status: Status) -> *const c_char;
}
