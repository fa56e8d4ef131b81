//! Tensor parallelism: several ranks each hold a part of every layer and compute every step together.
//!
//! The split is that of Megatron-LM (Shoeybi et al. 2019). A rank holds some attention heads and part of the feed-forward width.
//! Projections into them are split by outputs, projections out of them by inputs. The results of the latter are summed over the ranks:
//! two sums per layer. The output head is split by vocabulary; rank 0 gathers the logits and samples. Every rank holds the norms and the
//! embedding whole: a lookup costs nothing, and splitting the table would save one percent of a large model but cost one exchange per
//! step.
//!
//! - [`Sharding`] says which rank holds what.
//! - [`Collective`] is how ranks exchange: [`ThreadRanks`] for threads, [`GpuRanks`] for GPUs.
//! - [`TensorParallel`] runs the ranks in lockstep.
//!
//! Each rank has a KV pool with its own heads; all pools use the same block tables. At a fixed degree sums have one order, so nothing
//! depends on the route (I1). Between degrees, logits differ by rounding.

mod collective;
mod crew;
mod gpus;
mod runner;
mod sharding;
mod shared;

pub use collective::{Collective, Rank};
pub use gpus::GpuRanks;
pub use runner::TensorParallel;
pub use sharding::{Part, Sharding, Stored};
pub use shared::ThreadRanks;
