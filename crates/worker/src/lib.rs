//! What a prefill and a decode worker have in common: settings, the loaded model over a shareable pool, the engine thread,
//! the gRPC frame, registration and drain.
//!
//! The thin shell around a worker's pure core (`baton-roles`). `prefill-node` and `decode-node` add the one piece that differs, a
//! [`Shell`].
//! Knows nothing of placement, HTTP or text.

mod backend;
mod budget;
mod config;
mod convert;
mod engine_thread;
mod error;
mod load;
mod node;
mod pack;
mod plan;
mod pool;
mod ranks;
mod report;
mod service;
mod settings;
mod stream;
mod telemetry;
mod watchdog;
mod wire;

pub use backend::{BackendKind, Quantization};
pub use config::{EvictionKind, KvType, OrderKind, PackTokens, TransportKind, WorkerConfig};
pub use convert::kv_converter;
pub use engine_thread::{Commands, EngineHandle, Shell, start};
pub use error::WorkerError;
pub use load::{Loaded, Ready, load_on, load_on_device, load_on_devices, load_on_gpu, open_model};
pub use node::{Node, NodeRole, random_worker_id};
pub use pool::device_memory;
pub use service::WorkerService;
pub use settings::check_settings;
pub use stream::{Accepted, Events, Streams, Wire};
pub use telemetry::count_failure;
pub use watchdog::Stalled;
pub use wire::{Clock, stream_status};
