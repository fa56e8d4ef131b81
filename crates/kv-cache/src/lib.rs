//! Who owns which block of the KV pool.
//!
//! Stands between the engine, which decides what runs, and the memory, which others map: this crate only counts. Every
//! block of every layer group is in exactly one [`BlockState`] at any time (I6), and what a sequence owns is a value that
//! cannot be copied: [`Tables`] for blocks in use, a [`Lease`] for blocks a peer may write to (I3), a [`Quarantine`] for
//! blocks whose fence is not confirmed yet. Each transition consumes one token and returns the next:
//!
//! ```text
//!            allocate            free
//!   Free ───────────────▶ Used ───────▶ Free
//!     │ lend       accept ▲  │ quarantine_used
//!     └──────▶ Lent ──────┘  ▼
//!               │ quarantine ▶ Quarantined ── clear_quarantine ▶ Free
//!               └ reclaim ▶ Free
//! ```
//!
//! Deliberately knows no bytes, no addresses, no requests, no clock.

mod counts;
mod error;
mod pool;
mod pools;
mod table;

pub use counts::BlockCounts;
pub use error::KvError;
pub use pool::{BlockPool, BlockState};
pub use pools::{KvPools, Lease, Quarantine, Tables};
pub use table::BlockTable;
