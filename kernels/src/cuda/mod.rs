//! The GPU backend: [`CudaBackend`], the operations of [`crate::Backend`] as launches of the kernels in `kernels/cuda`.
//!
//! One stream takes a step's launches in order, and the host waits for it only when it reads tokens or logits. Decode steps are launched as a
//! graph (`step`, `graphs`), and their tokens are chosen where their logits lie (`sampling`). Activations are f32 in device
//! memory, weights and operands of products bf16, or E4M3 with a scale for each row, sums f32. What runs the launches is a [`Device`]. Knows nothing of models or requests.

mod attention;
mod backend;
mod batch;
mod device;
mod driver;
mod exchange;
mod graphs;
mod host;
mod inputs;
mod memory;
mod nccl;
mod nowhere;
mod operations;
mod params;
mod pinned;
mod pool;
mod products;
mod queue;
mod recorder;
mod sampling;
mod shared_pool;
mod sharing;
mod step;
mod weight;
mod work;

pub use backend::{CudaBackend, CudaOptions};
pub use device::{
    Access, Address, Alike, Call, Device, Event, Fp8, Gemm, Graph, Launch, Operands, Piece, Properties, RowScales,
    Rows, Stream, TensorMap,
};
pub use driver::{Driver, devices};
pub use exchange::{Columns, Exchange, ExchangingDevice};
pub use host::HostDevice;
pub use memory::Memory;
pub use nowhere::Nowhere;
pub use params::Moved;
pub use pinned::HostCopies;
pub use recorder::{Recorded, Recorder};
pub use shared_pool::{CopyQueue, Finished, SharedPool, Staging};
pub use sharing::{Registrable, SharingDevice};
pub use weight::{CudaWeight, product_weight_bytes};
