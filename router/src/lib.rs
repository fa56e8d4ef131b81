//! The front door: OpenAI-compatible HTTP and gRPC for clients, and the one coordinator of every request.
//!
//! `client → router → prefill-node → transfer → decode-node → router → client's stream`. Both front doors turn a request
//! into one `GenerateInput` and read one stream of events back; in between each choice has a driver, which does what the
//! core in `baton-policy` (`Choice` and `Fleet`) says. The router sees token ids and text; never weights, KV or a GPU.
//!
//! - `http`, `openai`, `sse`: the HTTP front door. `grpc`: the other one.
//! - `listener`, `held`: connections, bounded in number and time.
//! - `front`: admission, plan, events. `input`, `model`: what a request must be to work.
//! - `tools`: functions a model may call, told to it and read out of its answers.
//! - `driver`, `worker`: one choice on its workers. `sink`, `stop`: from tokens to text.
//! - `server`: puts it all together.

#![forbid(unsafe_code)]

mod config;
mod driver;
mod error;
mod front;
mod grpc;
mod held;
mod http;
mod input;
mod listener;
mod model;
mod openai;
mod prompt;
mod random;
mod record;
mod server;
mod sink;
mod sse;
mod stop;
#[cfg(feature = "testing")]
pub mod testing;
mod tools;
mod worker;

pub use config::{PlacementKind, RouterConfig};
pub use error::{RequestError, RouterError};
pub use model::ServedModel;
pub use server::{RegistryChoice, RunningRouter, run, start};
