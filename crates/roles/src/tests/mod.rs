//! What the two roles and a drain do, pinned as tables: every input in every stage.
//!
//! After an intended change, rewrite the tables with `cargo test -p baton-roles rewrite -- --ignored` and read the
//! difference.

mod decode;
mod drain;
mod draining;
mod exchange;
mod prefill;
mod rig;
mod steps;
mod tiers;
