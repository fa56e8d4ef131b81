//! Who owns which block of the KV pool, and which prefixes it holds.
//!
//! Stands between the engine, which decides what runs, and the memory, which others map: this crate only counts. Every
//! block of every layer group is in exactly one [`BlockState`] at any time (I6), and what a sequence owns is a value that
//! cannot be copied: [`Tables`] for blocks in use, [`LentTables`] for blocks a peer may write to (I3), a [`Quarantine`] for
//! blocks whose fence is not confirmed yet. Each transition consumes one token and returns the next:
//!
//! ```text
//!            allocate            free
//!   Free ───────────────▶ Used ─────────▶ Free
//!     │ lend       accept ▲ ▲│ │ free, while indexed
//!     └──────▶ Lent ──────┘ ││ └────────▶ Cached ── evict ▶ Free
//!               │           ││ seat (a prefix hit) │
//!               │           └┼─────────────────────┘
//!               │ quarantine ▼ quarantine_used
//!               ├─────▶ Quarantined ── clear_quarantine ▶ Free
//!               └ reclaim ▶ Free
//! ```
//!
//! Full blocks whose KV is computed or verified enter the prefix index ([`KvPools::index`]) and are shared by reference
//! with later sequences that begin with the same tokens ([`KvPools::lookup`], [`KvPools::seat`]). A full block never
//! changes; of a block that is only partly the same, the newcomer gets a copy.
//!
//! Deliberately knows no bytes, no addresses, no requests, no clock.

#![forbid(unsafe_code)]

mod counts;
mod error;
mod pool;
mod pools;
mod prefix;
mod reuse;
mod table;
mod tokens;

pub use counts::BlockCounts;
pub use error::KvError;
pub use pool::{BlockPool, BlockState};
pub use pools::{KvPools, Need};
pub use prefix::{CacheConfig, Eviction, Prefix, chain_hash, chain_hashes};
pub use reuse::{Hit, Readers};
pub use table::{BlockTable, HOLE};
pub use tokens::{BlockCopy, LentTables, Quarantine, Tables};
