//! The engine's limits (I5) and its order of service.

use baton_kv_cache::CacheConfig;
use baton_types::Class;

use crate::EngineError;

/// Order of service: who starts and computes first, and, from the other end, who is preempted when blocks run out.
///
/// Interactive sequences come before batch ones ([`Class`]) in every order, and what follows holds within a class: a batch sequence ages only
/// among batch sequences, and waits for interactive ones as long as there are any, until its deadline.
///
/// The policy gives each sequence a *turn*. Turns are served in ascending order; equal turns are served first come,
/// first served.
///
/// Turns age. A sequence ages once [`EngineConfig::overtakes`] sequences that were submitted later have started while
/// it waited or computed its prompt. From then on its turn is before all turns that have not aged. So **at most that
/// many sequences of its class that were submitted later start before a sequence**. More can start only while it is parked
/// ([`crate::NewSequence::parked`]), or waits for another sequence to compute a prefix they share; if that one has a
/// later turn, the wait takes at most as many steps as the sequence has tokens.
///
/// A turn ages only once, and one order decides everything, so two sequences can never keep taking each other's blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Order {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The fewer prompt tokens are left to compute, the earlier.
    ShortestFirst,
    /// The lower [`crate::NewSequence::priority`], the earlier. Those of equal priority share by tenant
    /// ([`crate::Share`]); of one tenant, first come, first served.
    Priority,
}

baton_types::words!(Order { Fcfs = "fcfs", ShortestFirst = "shortest-first", Priority = "priority" });

/// The turn of interactive sequences that were overtaken as often as allowed; under [`Order::Fcfs`], of all interactive ones.
pub(crate) const AGED: u64 = 0;
/// The same of batch sequences. All of their turns are from here on, and no others.
pub(crate) const BATCH_AGED: u64 = 1 << 40;

/// Limits of one engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineConfig {
    /// Most tokens computed in one step, over all rows. At least `max_running`, so that no running sequence starves.
    pub token_budget: u32,
    /// Most tokens of one sequence in one step.
    pub chunk: u32,
    /// Prompt tokens that fill a step: prompts are packed into a step up to this many tokens, and a longer prompt ends
    /// alone. Meant to be the length that saturates the hardware ([`crate::Saturation`]): above it, prompts that end in
    /// the same step only wait for each other. `token_budget` or more: no such limit.
    pub pack_tokens: u32,
    /// Most sequences that run or wait for a peer's KV at once. Sequences that hold finished KV for a transfer do not
    /// count; their blocks bound them.
    pub max_running: u32,
    /// Most waiting sequences, not counting those for which the batch has a free place; more are refused.
    pub max_waiting: u32,
    /// Most tokens of one sequence, prompt and answer together.
    pub context_tokens: u32,
    /// A sequence that is to receive its KV computes the missing tokens here instead, if it has at least half of its
    /// tokens and all prompts that are computed here, its own included, lack at most this many tokens together. A
    /// single missing token is computed here in any case. 0: nothing is computed here instead.
    pub local_prefill_tokens: u32,
    /// A parked sequence is due ([`crate::Event::Due`]) when at most this many tokens of prompts are to be computed before it.
    pub reserve_ahead: u32,
    /// Order of service.
    pub order: Order,
    /// Most sequences that may start before one that was submitted earlier, under an order other than [`Order::Fcfs`].
    /// 0 makes every order first come, first served.
    pub overtakes: u32,
    /// How prefixes are kept.
    pub cache: CacheConfig,
}

impl EngineConfig {
    /// The turn of a new sequence.
    pub(crate) fn turn(&self, priority: i32, uncached: u32) -> u64 {
        let turn = match self.order {
            Order::Fcfs => AGED,
            Order::ShortestFirst => 1 + u64::from(uncached),
            Order::Priority => 1 + u64::from(priority.abs_diff(i32::MIN)),
        };
        let turn = if self.overtakes == 0 { AGED } else { turn };
        match Class::of(priority) {
            Class::Interactive => turn,
            Class::Batch => BATCH_AGED + turn,
        }
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
