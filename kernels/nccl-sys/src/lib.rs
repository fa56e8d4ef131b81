//! NVIDIA's library of exchanges between GPUs (libnccl), opened at run time, so that nothing of it is needed to build.
//!
//! Declarations of the part of the C API that tensor-parallel ranks use, and the loader. Everything is as in C: raw pointers, no
//! ownership; `baton-kernels` gives it safety. Names are C's without the `nccl` prefix. Knows nothing of ranks or of CUDA.

mod api;
mod load;

pub use api::{Api, Communicator, DataType, Status, Stream};
pub use load::{LoadError, NAMES, load};
