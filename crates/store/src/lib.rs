//! The shell of the KV store: host memory, files on a local disk, and the threads that move blocks between them.
//!
//! What is kept, and where, is decided by `baton-kv-store`. [`KvStore`] gives it time, carries out its effects and tells it what came of them:
//!
//! - A put gives a [`Filling`], a buffer of host memory to copy the block's data into. It never waits for the disk.
//! - A get gives a [`Reading`] at once, if the block is in host memory; otherwise a [`Pending`], which can be polled, waited for and dropped.
//! - Files are read and written past the page cache where the file system allows it ([`Files`]), by a few threads. Reads go first.
//! - Whatever goes wrong with the disk is a miss, counted and logged. It is never an error of a request.

mod answers;
mod error;
mod files;
mod folder;
mod lock;
mod memory;
mod queue;
mod shared;
mod store;
mod threads;

pub use answers::{Filling, Pending, Reading};
pub use baton_kv_store::{Condition, Identity};
pub use error::OpenError;
pub use files::{Disk, Files};
pub use folder::{About, FileName, Folder, Kept, Looked, SegmentSum};
pub use store::{DiskTime, Event, Got, KvStore, Settings};
