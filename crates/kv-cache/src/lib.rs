//! Who owns which block of the KV pool, and which prefixes the pool holds.
//!
//! The engine decides what runs, and other crates map the memory. This crate only keeps the accounts. Every block of every
//! layer group is in exactly one [`BlockState`] at any time (I6). A sequence owns its blocks through an ownership token, a
//! value that cannot be copied:
//!
//! - [`Tables`]: blocks in use.
//! - [`LentTables`]: blocks that a peer may write to (I3).
//! - [`Quarantine`]: blocks whose fence is not confirmed yet.
//!
//! Each transition consumes one ownership token and returns the next:
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
//! Full blocks whose KV is computed or verified enter the prefix index ([`KvPools::index`]). Later sequences that begin with
//! the same tokens share them by reference ([`KvPools::lookup`], [`KvPools::seat`]). A full block never changes. If only the
//! beginning of a block matches, the new sequence gets a copy of the block.
//!
//! This crate deliberately knows no bytes, no addresses, no requests and no clock.

#![forbid(unsafe_code)]

mod counts;
mod error;
mod feed;
mod pool;
mod pools;
mod prefix;
mod reuse;
mod sketch;
mod table;
mod tokens;

pub use counts::BlockCounts;
pub use error::KvError;
pub use feed::{CacheChange, CacheFeed, Cached, Tally};
pub use pool::{BlockPool, BlockState};
pub use pools::{KvPools, Need};
pub use prefix::{BlockName, CacheConfig, Eviction, NameChain, NameSecret, Prefix};
pub use reuse::{Hit, Readers};
pub use sketch::Sketch;
pub use table::{BlockTable, HOLE};
pub use tokens::{BlockCopy, LentTables, Quarantine, Tables};
