//! Code that prefill workers, decode workers and KV stores share: settings, the loaded model and its KV pool, the engine thread, the gRPC server,
//! registration and drain.
//!
//! This crate is the thin shell around a worker's pure core (`baton-roles`). `prefill-node`, `decode-node` and `kv-store-node` each add a [`Shell`].
//! It knows nothing of placement, HTTP or text.
//!
//! A module uses only modules to its right:
//!
//!
//! - `node` → `load`, `settings`, `service`, `sharing`, `wire`; `node` → `serving` → `engine_thread`
//! - `load` → `backend`, `settings`, `plan`, `ranks`, `packed`, `pack`; `measure` → `plan`, `pool`
//! - `no_model` → `load`, `plan`, `pool`, `achieved`
//! - `load`, `measure`, `plan` → `budget`; `ranks` → `pool`
//! - `stream` → `spans`; `stream` → `engine_thread` → `report`, `watchdog`, `wire`; `report` → `signals`
//! - `exchange_service` → `stream` → `exchange` → `ends` → `engine_thread`; `engine_thread` and `exchange` know each other, as `engine_thread` and `tiers` do
//!
//! - `service` → `columns` → `tiers`; `engine_thread` and `columns` know each other
//!
//! - `load` → `achieved` ← `engine_thread`
//!
//! All modules may use `config` (→ `choices`) and `error` (→ `watchdog`). `convert`, `gpus` and `telemetry` use no other module.

mod achieved;
mod backend;
mod behind;
mod budget;
mod choices;
mod columns;
mod config;
mod convert;
mod courtesy;
mod door;
mod ends;
mod engine_thread;
mod error;
mod exchange;
mod exchange_service;
mod feed;
mod gpus;
mod load;
mod measure;
mod news;
mod no_model;
mod node;
mod pack;
mod packed;
mod plan;
mod pool;
mod ranks;
mod report;
mod service;
mod serving;
mod settings;
mod sharing;
mod signals;
mod spans;
mod stored;
mod stream;
mod telemetry;
mod tiers;
mod watchdog;
mod wire;

pub use choices::{BackendKind, GpuPoolHandles, Quantization};
pub use config::{JoinConfig, KvConfig, PackTokens, TiersConfig, TransferConfig, WorkerConfig};
pub use convert::kv_converter;
pub use courtesy::courtesy;
pub use door::{Door, incoming};
pub use ends::KvEnds;
pub use engine_thread::{Commands, EngineHandle, Shell};
pub use error::WorkerError;
pub use load::{Ready, load_on_devices, open_model};
pub use measure::{Loaded, load_on, load_on_gpu};
pub use no_model::load_pool;
pub use node::{Node, NodeRole, random_worker_id};
pub use service::WorkerService;
pub use settings::check_settings;
pub use spans::{Moment, Traced};
pub use stream::{Accepted, Events, Streams, Wire};
pub use telemetry::count_failure;
pub use watchdog::Stalled;
pub use wire::{Clock, scored, stream_status, transferred};
