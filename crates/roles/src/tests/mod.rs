//! What the two roles do, pinned as tables: every input in every stage of a request.
//!
//! After an intended change, rewrite the tables with `cargo test -p baton-roles rewrite -- --ignored` and read the
//! difference.

mod decode;
mod draining;
mod prefill;
mod rig;
