//! The GPU backend: [`CudaBackend`], the operations of [`crate::Backend`] as launches of the kernels in `kernels/cuda`.
//!
//! One stream takes a step's launches in order, and the host waits for it only when it reads tokens or logits. Decode steps are launched as a
//! graph (`run_step`, `graphs`), and their tokens are chosen where their logits lie (`sampling`). Activations are f32 in device
//! memory, weights and operands of products bf16, or E4M3 with a scale for each row, sums f32. What runs the launches is a [`Device`]. Knows nothing of models or requests.

mod attention;
mod backend;
mod batch;
mod device;
mod driver;
mod exchange;
mod gemm;
mod graphs;
mod handles;
#[cfg(feature = "testing")]
mod host;
mod inputs;
mod memory;
mod nccl;
#[cfg(feature = "testing")]
mod nowhere;
mod operations;
mod params;
mod pinned;
mod pool;
mod products;
mod queue;
#[cfg(feature = "testing")]
mod recorder;
mod run_step;
mod sampling;
mod shared_pool;
mod sharing;
mod step;
mod weight;
#[cfg(feature = "testing")]
mod work;

pub use backend::{CudaBackend, CudaOptions};
pub use device::{
    Access, Address, Alike, Call, Device, Event, Fp8, Gemm, Graph, HostCopies, Launch, Operands, Piece, Properties,
    RowScales, Rows, Stream, TensorMap,
};
pub use driver::{Driver, devices};
pub use exchange::{Columns, Exchange, ExchangingDevice};
#[cfg(feature = "testing")]
pub use host::HostDevice;
pub use memory::Memory;
#[cfg(feature = "testing")]
pub use nowhere::Nowhere;
#[cfg(feature = "testing")]
pub use recorder::{Recorded, Recorder};
pub use shared_pool::SharedPool;
pub use sharing::SharingDevice;
pub use weight::{CudaWeight, product_weight_bytes};
