//! Bench.

pub(crate) mod hex;
