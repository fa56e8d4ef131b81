//! KV beyond a pool: a prefix computed once is found again in host memory, on disk, or in an object store.
//!
//! A [`Store`] decides which blocks are kept in which tier, where they lie, and when they move. It has no clock, threads or I/O, and never sees
//! a byte of KV: `baton-store` owns the memory and the files, and simulations and tests have their own. Each input goes through
//! [`Store::feed`]; the effects are then taken one by one with [`Store::next_effect`] and carried out, in any order and at any time.
//!
//! ```text
//!            Put, Filled                 few buffers are free
//!   pool ───────────────▶ host memory ─────────────────────▶ disk: segments of records
//!     ▲      Get, Done      │     ▲        Write               │  │ reclaimed: Moved
//!     └─────────────────────┘     └────────────────────────────┘◀─┘
//!                           │     ▲  Get: Read, checked
//!                           │     └──────────────────────── object store: an object for each block
//!                           │        Get: Fetch, checked       ▲  │ evicted: Remove
//!                           └──────────────────────────────────┘◀─┘
//!                             seen often enough: Upload
//! ```
//!
//! - A block is known by its name. Tokens and digests are compared on every read (I2): a name never decides alone.
//! - Nothing depends on what a disk or an object store promises. What is torn, lost, old or flipped is found when it is read or scanned, and is a
//!   miss.
//! - Buffers, records, objects, reads, writes and tickets are bounded (I5), and accounted for (I6).

#![forbid(unsafe_code)]

mod audit;
mod block;
mod buffers;
mod config;
mod counters;
mod effect;
mod error;
mod index;
mod object;
mod record;
mod segments;
mod store;
#[cfg(any(test, feature = "testing"))]
pub mod testing;

pub use audit::{Condition, audit};
pub use baton_kv_cache::{BlockName, Sketch};
pub use block::{ALIGNMENT, Block, BlockKey, Identity, Part, Shape};
pub use config::{DiskConfig, StoreConfig, StoreLimits};
pub use counters::Counters;
pub use effect::{Buffer, Decline, Effect, Input, Job, Miss, ReadError, Ticket};
pub use error::StoreError;
pub use index::{Policy, Tier};
pub use object::{ObjectConfig, ObjectName, object_bytes, object_folder, object_identity};
pub use record::{Expect, Head, Mismatch, check_record};
pub use segments::{MIN_SEGMENTS, Place, Reason};
pub use store::Store;
