//! UCX's communication library (libucp), opened at run time, so that nothing of it is needed to build.
//!
//! Declarations of the part of the public C API that moves KV, and the loader. Everything is as in C: raw pointers, no
//! ownership; `baton-transfer` gives it safety. Names are C's without the `ucp_` prefix.

mod api;
mod load;
mod types;

pub use api::Api;
pub use load::{LEAST, LoadError, Version, load};
pub use types::*;
