//! Types and functions of `nccl.h` as they are since 2.7; the functions as pointers that [`crate::load()`] has looked up.

use std::ffi::{c_char, c_int, c_void};

use libloading::Library;

/// `ncclComm_t` points to one: a rank's end of its connections to the others.
#[repr(C)]
#[derive(Debug)]
pub struct Communicator {
    _opaque: [u8; 0],
}

/// `cudaStream_t`, the driver's `CUstream`.
pub type Stream = *mut c_void;

/// `ncclResult_t`: 0 is success.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status(pub c_int);

impl Status {
    /// `ncclSuccess`.
    pub const OK: Status = Status(0);
}

/// `ncclDataType_t`.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DataType(pub c_int);

impl DataType {
    /// `ncclFloat32`.
    pub const FLOAT32: DataType = DataType(7);
}

/// Declares each function once: as a field of [`Api`], and as a symbol to look up.
macro_rules! api {
    ($($(#[$doc:meta])* $symbol:literal fn $name:ident($($arg:ident: $type:ty),* $(,)?) -> $ret:ty;)*) => {
        /// libnccl's functions. Each is unsafe as C is; NCCL's own documentation says what it wants.
        #[derive(Debug)]
        pub struct Api {
            $($(#[$doc])* pub $name: unsafe extern "C" fn($($arg: $type),*) -> $ret,)*
        }

        impl Api {
            /// Looks everything up; answers the symbol that is missing.
            ///
            /// # Safety
            /// The library is NCCL, of version 2, and stays open as long as the functions are used.
            pub(crate) unsafe fn resolve(library: &Library) -> Result<Api, &'static str> {
                Ok(Api {
                    $($name: {
                        // SAFETY: the caller vouches for the library, and the signature is that of NCCL's header.
                        let symbol = unsafe { library.get($symbol.as_bytes()) };
                        *symbol.map_err(|_| $symbol)?
                    },)*
                })
            }
        }
    };
}

api! {
    /// Connects this process's devices: one communicator for each, in the order of `devices`. Blocks for seconds.
    "ncclCommInitAll" fn comm_init_all(
        communicators: *mut *mut Communicator, count: c_int, devices: *const c_int,
    ) -> Status;
    /// Ends a communicator, and what is under way on it.
    "ncclCommAbort" fn comm_abort(communicator: *mut Communicator) -> Status;
    /// Copies `count` elements of the root's `from` into everybody's `to`.
    "ncclBroadcast" fn broadcast(
        from: *const c_void, to: *mut c_void, count: usize, of: DataType, root: c_int, communicator: *mut Communicator,
        stream: Stream,
    ) -> Status;
    /// Sends to a peer, which must receive as much.
    "ncclSend" fn send(
        from: *const c_void, count: usize, of: DataType, peer: c_int, communicator: *mut Communicator, stream: Stream,
    ) -> Status;
    /// Receives what a peer sends.
    "ncclRecv" fn recv(
        to: *mut c_void, count: usize, of: DataType, peer: c_int, communicator: *mut Communicator, stream: Stream,
    ) -> Status;
    /// Begins calls that become one exchange.
    "ncclGroupStart" fn group_start() -> Status;
    /// Ends them.
    "ncclGroupEnd" fn group_end() -> Status;
    /// A status in words, static text.
    "ncclGetErrorString" fn error_string(status: Status) -> *const c_char;
}
