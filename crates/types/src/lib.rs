//! Types that every crate shares: ids, the KV layout, digests, sampling parameters, error kinds, and a device's pool as transfers reach it.
//!
//! Depends on no other crate of the project. Knows no tokio, no candle, no I/O, no clock.

mod class;
mod constraint;
mod courtesy;
mod device;
mod digest;
mod error;
pub mod hex;
mod ids;
mod layout;
mod nearest;
mod random;
mod sampling;
mod seeded;
mod stripes;
#[cfg(feature = "testing")]
pub mod testing;
mod time;
mod weight;
mod words;

pub use class::Class;
pub use constraint::Constraint;
pub use courtesy::{Courtesy, Decoding, Processor};
pub use device::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, MemoryKind, Moving, OpenedBy, PoolHandle,
    Registrable, Staged,
};
pub use digest::{digest_block, digest_copy, digest_f32, digest_run, hash_bytes, mix, order_copies, stream_copy};
pub use error::{BatonError, ErrorKind, Fault};
pub use ids::{BlockId, Epoch, MAX_CACHE_KEEP_SECONDS, MAX_CACHE_SALT, RequestId, SeqId, WorkerId};
pub use layout::{
    KvDtype, KvGroup, KvLayout, LayoutMismatch, LiveBlocks, PROTOCOL_VERSION, PoolGeometry, heads_of_rank,
};
pub use nearest::{nearest, nearest_within};
pub use random::random_u64;
pub use sampling::{FinishReason, SamplingError, SamplingParams, TokenOut, Usage};
pub use seeded::{Seeded, SeededRows, split_mix};
pub use stripes::{RankPiece, Stripes};
pub use time::Time;
pub use weight::{WeightData, WeightDtype};
pub use words::Expects;
