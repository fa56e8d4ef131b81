//! UCX's communication library (libucp), opened at run time, so that nothing of it is needed to build.
//!
//! Declares the part of the public C API that moves KV, and loads it. Everything is as in C: raw pointers and no ownership;
//! `baton-transfer` makes it safe. Names are C's without the `ucp_` prefix.

mod api;
mod load;
mod types;

pub use api::Api;
pub use load::{LEAST, LoadError, Version, load};
pub use types::*;
