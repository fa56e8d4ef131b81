//! Tensor parallelism: several ranks hold a part of every layer each and compute every step together.
//!
//! As in Megatron-LM (Shoeybi et al. 2019): a rank has some heads of attention and some of the feed-forward block's width, so the
//! projections into them are split by outputs and those out of them by inputs, and what the latter give is summed over the ranks: two
//! sums a layer. The output head is split by vocabulary, and rank 0 gathers the logits and samples. Norms and the embedding every rank
//! has whole: looking rows up costs nothing, splitting the table would save a percent of a large model and cost an exchange a step.
//!
//! [`Sharding`] says which rank has what, [`Collective`] is what ranks exchange by ([`ThreadRanks`] for
//! threads, [`GpuRanks`] for GPUs), and
//! [`TensorParallel`] runs the ranks in lockstep. Each has a KV pool with its own heads, and all pools the same block tables. At a fixed
//! degree sums have one order, so nothing depends on the route (I1); between degrees logits differ by rounding.

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
