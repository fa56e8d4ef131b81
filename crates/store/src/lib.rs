//! The shell of the KV store: host memory, files on a local disk, objects of an object store, and the threads that move blocks between them.
//!
//! What is kept, and where, is decided by `baton-kv-store`. [`KvStore`] gives it time, carries out its effects and tells it what came of them:
//!
//! - A put gives a [`Filling`], a buffer of host memory to copy the block's data into. It never waits for the disk.
//! - A get gives a [`Reading`] at once, if the block is in host memory; otherwise a [`Pending`], which can be polled, waited for and dropped.
//! - Files are read and written past the page cache where the file system allows it ([`Files`]), by a few threads. Reads go first.
//! - Objects are got and put by a thread of their own ([`Objects`]), many at once, each within a time limit.
//! - Whatever goes wrong with the disk or the object store is a miss, counted and logged. It is never an error of a request. A disk that cannot be
//!   opened is logged, and the store goes on without it.

mod answers;
mod bucket;
mod error;
mod files;
mod folder;
mod lock;
mod memory;
mod objects;
mod queue;
mod s3;
mod shared;
mod store;
mod syncs;
mod threads;

pub use answers::{Filling, Pending, Reading};
pub use baton_kv_store::{Condition, Identity};
pub use bucket::{Bucket, KeptObjects, ObjectSum};
pub use error::OpenError;
pub use files::{Disk, Files};
pub use folder::{About, FileName, Folder, Kept, Looked, SegmentSum};
pub use objects::Objects;
pub use store::{DiskTime, Event, Got, KvStore, Settings};
