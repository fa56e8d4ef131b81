//! What every process of the cluster needs besides its own work: configuration, logs, metrics, traces, the admin endpoint,
//! drain.
//!
//! Router, workers and the supervisor build on this crate; it knows none of them. Each component declares its settings with
//! [`config!`], reads them with [`load`], and passes the part that every process shares ([`ProcessConfig`]) to
//! [`Process::start`].

pub mod admin;
mod command;
pub mod config;
mod connect;
mod error;
mod files;
mod log_writer;
pub mod metrics;
mod parent;
pub mod places;
mod process;
mod secret;
pub mod shutdown;
mod tasks;
pub mod telemetry;
pub mod tls;
pub mod traces;

pub use admin::{AdminRoutes, AdminServer, Readiness, listen};
pub use command::{LoadedConfig, args, check_config, load, load_from};
pub use config::{Bytes, Config, Parsed};
pub use error::{Origin, RuntimeError};
pub use log_writer::flush as flush_logs;
pub use metrics::MetricsHandle;
pub use parent::die_with_parent;
pub use process::{FetchConfig, Process, ProcessConfig};
pub use secret::{LEAST_SECRET, make_secret, random_secret, secret_in};
pub use shutdown::{Outcome, Shutdown};
pub use tasks::Tasks;
pub use telemetry::{LogFilter, LogFormat};
pub use tls::{Tls, TlsClient, TlsConfig, TlsServer};
