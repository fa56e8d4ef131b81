//! The router: serves clients over OpenAI-compatible HTTP and gRPC, and coordinates every request.
//!
//! Data flow: `client → router → prefill-node → transfer → decode-node → router → client's stream`.
//!
//! Both front doors turn a request into one `GenerateInput` and read one stream of events back. In between, each choice
//! (one answer) has a driver, which carries out what the core in `baton-policy` (`Choice` and `Fleet`) decides. The router
//! handles token ids and text, never weights, KV or a GPU.
//!
//! - `http`, `openai`, `sse`: the HTTP front door. `grpc`, `conversation`: the gRPC front door.
//! - `listener`, `held`, `patient`: client connections, limited in number, idle time, and time in which they read nothing. `keyless`: calls
//!   that anybody can make.
//! - `body`: bodies of requests, limited in size, time and memory. `pieces`: answers that count against that memory until they are read.
//! - `front`: admission, planning, event streams. `input`, `model`: the checks on a request. `models`: which model, and whose workers.
//! - `keys`, `tenant`, `gate`: API keys; what each tenant may use; whose turn it is at the workers.
//! - `tools`: functions a model may call, described in its prompt and parsed out of its answers. `reasoning`: thoughts, split from them.
//! - `driver`, `worker`: run one choice on its workers. `waits`: waiting beside a busy stream. `sink`, `stop`: turn tokens into text.
//! - `trace`, `explain`: what happened to the latest requests, and why they were placed where they were.
//! - `page`: the live page of the admin endpoint.
//! - `server`: puts the router together and starts it. `serving`: its listeners, until the last request has ended.

#![forbid(unsafe_code)]

mod admission;
mod body;
mod config;
mod conversation;
mod driver;
mod error;
mod explain;
mod forecast;
mod front;
mod gate;
mod grpc;
mod heavy;
mod held;
mod http;
mod input;
mod keyless;
mod keys;
mod listener;
mod model;
mod models;
mod openai;
mod page;
mod patient;
mod pieces;
mod prompt;
mod reasoning;
mod record;
mod revocable;
mod rounds;
mod server;
mod serving;
mod sink;
mod sse;
mod standing;
mod stop;
mod tenant;
#[cfg(feature = "testing")]
pub mod testing;
mod tools;
mod trace;
mod view_file;
mod waits;
mod watcher;
mod worker;

pub use config::{DefaultsKind, PlacementKind, RouterConfig};
pub use error::{RequestError, RouterError};
pub use model::ServedModel;
pub use server::{RegistryChoice, RunningRouter, run, start};
