//! The engine's limits (I5) and its order of service.

use baton_kv_cache::CacheConfig;

use crate::{EngineError, SwapConfig};

/// In which order sequences are served: who starts, who computes, and, from the other end, whose blocks are taken when
/// there are none.
///
/// Each sequence has a *turn*, which the policy gives it, and turns are served in order, equal ones first come, first served.
/// They age: once [`EngineConfig::overtakes`] sequences that were submitted later have started before a sequence, or while it
/// computes its prompt, its turn is before all that have not aged so. So **at most that many sequences submitted later start
/// before a sequence**, besides those that start while it waits for another to compute the prefix both begin with (for one with
/// a later turn at most as many steps as it has tokens). A turn ages once, and one order for everything means that no two
/// sequences can take each other's blocks in turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The less is left to compute of the prompt, the earlier.
    ShortestFirst,
    /// The lower [`crate::NewSequence::priority`] the earlier.
    Priority,
}

baton_types::words!(Order { Fcfs = "fcfs", ShortestFirst = "shortest-first", Priority = "priority" });

/// The turn of those that were overtaken as often as may be.
pub(crate) const AGED: u64 = 0;

/// Limits of one engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineConfig {
    /// Most tokens computed in one step, over all rows. At least `max_running`, so that no running sequence starves.
    pub token_budget: u32,
    /// Most tokens of one sequence in one step.
    pub chunk: u32,
    /// So many prompt tokens fill a step. Where they saturate the hardware ([`crate::Saturation`]), more would only make
    /// prompts that end in it wait for each other: they are packed up to here, and one that is longer ends alone. `token_budget`
    /// or more: no such limit.
    pub pack_tokens: u32,
    /// Most sequences that run or wait for a peer's KV at once. Those that hold finished KV for a transfer are bounded by
    /// their blocks.
    pub max_running: u32,
    /// Most sequences that wait beyond those a free place in the batch is left for; more are refused.
    pub max_waiting: u32,
    /// Most tokens of one sequence, prompt and answer together.
    pub context_tokens: u32,
    /// A sequence that is to receive its KV, has at least half of it and lacks no more than so many tokens computes them here instead,
    /// as long as all prompts that are being computed here lack no more than that together; 0: never.
    pub local_prefill_tokens: u32,
    /// In which order sequences are served.
    pub order: Order,
    /// Most sequences that may start before one that was submitted earlier, under another order than [`Order::Fcfs`].
    pub overtakes: u32,
    /// How prefixes are kept.
    pub cache: CacheConfig,
    /// What becomes of the KV of preempted sequences.
    pub swap: SwapConfig,
}

impl EngineConfig {
    /// The turn of a new sequence.
    pub(crate) fn turn(&self, priority: i32, uncached: u32) -> u64 {
        let turn = match self.order {
            Order::Fcfs => AGED,
            Order::ShortestFirst => 1 + u64::from(uncached),
            Order::Priority => 1 + u64::from(priority.abs_diff(i32::MIN)),
        };
        if self.overtakes == 0 { AGED } else { turn }
    }

    pub(crate) fn validate(&self) -> Result<(), EngineError> {
        let check = |ok: bool, field: &'static str, value: u32, must: String| {
            if ok { Ok(()) } else { Err(EngineError::Config { field, value, must }) }
        };
        check(self.chunk >= 1, "chunk", self.chunk, "at least 1".into())?;
        check(self.pack_tokens >= 1, "pack_tokens", self.pack_tokens, "at least 1".into())?;
        check(self.max_running >= 1, "max_running", self.max_running, "at least 1".into())?;
        check(self.context_tokens >= 2, "context_tokens", self.context_tokens, "at least 2".into())?;
        let must = || format!("at least max_running, which is {}", self.max_running);
        check(self.token_budget >= self.max_running, "token_budget", self.token_budget, must())
    }
}
