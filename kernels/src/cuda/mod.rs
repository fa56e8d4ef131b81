//! The GPU backend: [`CudaBackend`], the operations of [`crate::Backend`] as launches of the kernels in `kernels/cuda`.
//!
//! A step's launches go into one stream and run in order. The host waits for the stream only when it reads tokens or logits. Decode
//! steps are launched as a graph (`run_step`, `graphs`). Tokens are sampled on the device (`sampling`).
//!
//! Types in device memory: activations and sums are f32; weights and operands of products are bf16, or E4M3 with a scale for each row.
//!
//! A [`Device`] runs the launches. This module knows nothing of models or requests.

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
mod splits;
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
pub use host::{Held, HostDevice};
pub use memory::Memory;
#[cfg(feature = "testing")]
pub use nowhere::Nowhere;
#[cfg(feature = "testing")]
pub use recorder::{Recorded, Recorder};
pub use shared_pool::SharedPool;
pub use sharing::SharingDevice;
#[cfg(feature = "testing")]
pub use sharing::{receive_handle, send_handle};
pub use weight::{CudaWeight, product_weight_bytes};
