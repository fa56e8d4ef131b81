//! What the two roles do, pinned as tables: every stage of a request, every input.
//!
//! After an intended change, rewrite the tables with `cargo test -p baton-roles rewrite -- --ignored` and read the difference.

mod decode;
mod draining;
mod prefill;
mod rig;
