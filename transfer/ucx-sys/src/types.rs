//! Types, constants and structures of `ucp/api/ucp.h` as they are since [`crate::LEAST`]. The test `layout` compares
//! sizes and offsets with the headers.
//!
//! Later versions only append fields, and read no field whose bit is not in `field_mask`.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};
use std::ptr::NonNull;

/// Declares types that exist only behind pointers.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])* #[repr(C)] #[derive(Debug)] pub struct $name { _opaque: [u8; 0] })*
    };
}

opaque! {
    /// `ucp_config_t`: settings before a context is made of them.
    Config,
    /// `struct ucp_context`: devices and registered memory.
    Context,
    /// `struct ucp_worker`: progress and connections of one thread.
    Worker,
    /// `struct ucp_ep`: a connection to another worker.
    Endpoint,
    /// `struct ucp_mem`: registered memory of this process.
    Memory,
    /// `struct ucp_rkey`: the right to write to registered memory of another process.
    RemoteKey,
    /// `ucp_address_t`: where a worker can be reached.
    Address,
}

/// `ucs_status_t`: 0 is success, 1 in progress, negative an error.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status(pub i8);

impl Status {
    /// Done.
    pub const OK: Status = Status(0);
    /// Not yet done.
    pub const IN_PROGRESS: Status = Status(1);
    /// Something happened since the last progress, so there is nothing to wait for.
    pub const BUSY: Status = Status(-15);
    /// Ended by a forced close.
    pub const CANCELED: Status = Status(-16);

    /// Ok unless it is an error.
    pub fn ok(self) -> Result<(), Status> {
        if self.0 < 0 { Err(self) } else { Ok(()) }
    }
}

/// `ucs_status_ptr_t`: null, an error, or a request that is under way.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub struct StatusPtr(pub *mut c_void);

/// Lowest error that is encoded in a pointer (`UCS_ERR_LAST`).
const LAST_ERROR: isize = -100;

impl StatusPtr {
    /// None when it is done already, else the request, to be given to `request_free` once.
    pub fn request(self) -> Result<Option<NonNull<c_void>>, Status> {
        // As the macro UCS_PTR_IS_ERR does: the topmost addresses are errors.
        match self.0 as isize {
            error @ LAST_ERROR..=-1 => Err(Status(error as i8)),
            _ => Ok(NonNull::new(self.0)),
        }
    }
}

/// Adds `new()`: every field zero, so that only those named in a mask count.
macro_rules! zeroed {
    ($($name:ident),*) => {
        $(impl $name {
            /// Every field zero.
            pub fn new() -> Self {
                // SAFETY: integers, raw pointers and optional functions, all of which may be zero.
                unsafe { std::mem::zeroed() }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::new()
            }
        })*
    };
}

zeroed!(Params, WorkerParams, EndpointParams, MemMapParams, RequestParam, EndpointAttr, ContextAttr);

/// `ucp_params_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Params {
    pub field_mask: u64,
    pub features: u64,
    pub request_size: usize,
    pub request_init: *const c_void,
    pub request_cleanup: *const c_void,
    pub tag_sender_mask: u64,
    pub mt_workers_shared: c_int,
    pub estimated_num_eps: usize,
    pub estimated_num_ppn: usize,
    pub name: *const c_char,
    pub node_local_id: usize,
}

/// `UCP_PARAM_FIELD_FEATURES`.
pub const PARAM_FIELD_FEATURES: u64 = 1 << 0;
/// `UCP_PARAM_FIELD_MT_WORKERS_SHARED`.
pub const PARAM_FIELD_MT_WORKERS_SHARED: u64 = 1 << 5;
/// `UCP_FEATURE_RMA`: remote reads and writes.
pub const FEATURE_RMA: u64 = 1 << 1;
/// `UCP_FEATURE_WAKEUP`: a descriptor to wait on.
pub const FEATURE_WAKEUP: u64 = 1 << 4;

/// `ucp_worker_params_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct WorkerParams {
    pub field_mask: u64,
    pub thread_mode: c_uint,
    pub cpu_mask: [c_ulong; 1024 / c_ulong::BITS as usize],
    pub events: c_uint,
    pub user_data: *mut c_void,
    pub event_fd: c_int,
    pub flags: u64,
    pub name: *const c_char,
    pub am_alignment: usize,
    pub client_id: u64,
}

/// `UCP_WORKER_PARAM_FIELD_THREAD_MODE`.
pub const WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1 << 0;
/// `UCS_THREAD_MODE_SERIALIZED`: any thread, but one at a time.
pub const THREAD_MODE_SERIALIZED: c_uint = 1;

/// `ucp_err_handler_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ErrorHandler {
    pub cb: Option<unsafe extern "C" fn(arg: *mut c_void, ep: *mut Endpoint, status: Status)>,
    pub arg: *mut c_void,
}

/// `ucs_sock_addr_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct SocketAddress {
    pub addr: *const c_void,
    pub addrlen: u32,
}

/// `ucp_ep_params_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct EndpointParams {
    pub field_mask: u64,
    pub address: *const Address,
    pub err_mode: c_uint,
    pub err_handler: ErrorHandler,
    pub user_data: *mut c_void,
    pub flags: c_uint,
    pub sockaddr: SocketAddress,
    pub conn_request: *mut c_void,
    pub name: *const c_char,
    pub local_sockaddr: SocketAddress,
}

/// `UCP_EP_PARAM_FIELD_REMOTE_ADDRESS`.
pub const EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1 << 0;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE`.
pub const EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
/// `UCP_EP_PARAM_FIELD_ERR_HANDLER`.
pub const EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
/// `UCP_ERR_HANDLING_MODE_PEER`: a peer's end fails the endpoint, not the process.
pub const ERR_HANDLING_MODE_PEER: c_uint = 1;

/// `ucp_mem_map_params_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct MemMapParams {
    pub field_mask: u64,
    pub address: *mut c_void,
    pub length: usize,
    pub flags: c_uint,
    pub prot: c_uint,
    pub memory_type: c_uint,
    pub exported_memh_buffer: *const c_void,
}

/// `UCP_MEM_MAP_PARAM_FIELD_ADDRESS`.
pub const MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1 << 0;
/// `UCP_MEM_MAP_PARAM_FIELD_LENGTH`.
pub const MEM_MAP_PARAM_FIELD_LENGTH: u64 = 1 << 1;

/// `UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE`.
pub const MEM_MAP_PARAM_FIELD_MEMORY_TYPE: u64 = 1 << 4;
/// `UCS_MEMORY_TYPE_HOST`.
pub const MEMORY_TYPE_HOST: c_uint = 0;
/// `UCS_MEMORY_TYPE_CUDA`; also the number of its bit in [`ContextAttr::memory_types`].
pub const MEMORY_TYPE_CUDA: c_uint = 1;

/// `ucp_context_attr_t`, without what versions after [`crate::LEAST`] have appended.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct ContextAttr {
    pub field_mask: u64,
    pub request_size: usize,
    pub thread_mode: c_uint,
    pub memory_types: u64,
    pub name: [c_char; 32],
}

/// `UCP_ATTR_FIELD_MEMORY_TYPES`.
pub const ATTR_FIELD_MEMORY_TYPES: u64 = 1 << 2;

/// `ucp_request_param_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct RequestParam {
    pub op_attr_mask: u32,
    pub flags: u32,
    pub request: *mut c_void,
    pub cb: *const c_void,
    pub datatype: u64,
    pub user_data: *mut c_void,
    pub reply_buffer: *mut c_void,
    pub memory_type: c_uint,
    pub recv_info: *mut c_void,
    pub memh: *mut Memory,
    pub remote_datatype: u64,
    pub remote: *const c_void,
    pub remote_count: usize,
}

/// `UCP_OP_ATTR_FIELD_FLAGS`.
pub const OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
/// `UCP_OP_ATTR_FIELD_MEMH`.
pub const OP_ATTR_FIELD_MEMH: u32 = 1 << 8;
/// `UCP_EP_CLOSE_FLAG_FORCE`: everything under way fails; nothing is flushed.
pub const EP_CLOSE_FLAG_FORCE: u32 = 1;

/// `ucp_transport_entry_t`: one transport of an endpoint, on one device.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct TransportEntry {
    pub transport_name: *const c_char,
    pub device_name: *const c_char,
}

/// `ucp_transports_t`: room for `num_entries` entries; UCX sets that to the number it wrote.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct Transports {
    pub entries: *mut TransportEntry,
    pub num_entries: c_uint,
    pub entry_size: usize,
}

/// `struct sockaddr_storage`.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct SocketStorage(pub [u8; 128]);

/// `ucp_ep_attr_t`.
#[repr(C)]
#[derive(Debug)]
#[allow(missing_docs)]
pub struct EndpointAttr {
    pub field_mask: u64,
    pub name: [c_char; 32],
    pub local_sockaddr: SocketStorage,
    pub remote_sockaddr: SocketStorage,
    pub transports: Transports,
    pub user_data: *mut c_void,
}

/// `UCP_EP_ATTR_FIELD_TRANSPORTS`.
pub const EP_ATTR_FIELD_TRANSPORTS: u64 = 1 << 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pointers_that_are_errors_are_told_from_requests() {
        let at = |address: isize| StatusPtr(address as *mut c_void).request();
        assert_eq!(at(0), Ok(None));
        assert_eq!(at(-1), Err(Status(-1)));
        assert_eq!(at(-100), Err(Status(-100)));
        assert_eq!(at(-101).unwrap().unwrap().as_ptr() as isize, -101);
        assert_eq!(at(64).unwrap().unwrap().as_ptr() as isize, 64);
    }
}
