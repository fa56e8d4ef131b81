//! The engine's limits (I5) and its notion of time.

use crate::EngineError;

/// Nanoseconds since an epoch the driver chooses: a process start, or the start of a simulation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct Time(pub u64);

impl Time {
    /// This many milliseconds later; saturates.
    pub fn after_ms(self, ms: u64) -> Time {
        Time(self.0.saturating_add(ms.saturating_mul(1_000_000)))
    }
}

/// Limits of one engine.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct EngineConfig {
    /// Most tokens computed in one step, over all rows. At least `max_running`, so that no running sequence starves.
    pub token_budget: u32,
    /// Most tokens of one sequence in one step.
    pub chunk: u32,
    /// Most sequences that run or wait for a peer's KV at once. Those that hold finished KV for a transfer are bounded by
    /// their blocks.
    pub max_running: u32,
    /// Most sequences that wait beyond those a free place in the batch is left for; more are refused.
    pub max_waiting: u32,
    /// Most tokens of one sequence, prompt and answer together.
    pub context_tokens: u32,
}

impl EngineConfig {
    pub(crate) fn validate(&self) -> Result<(), EngineError> {
        let check = |ok: bool, field: &'static str, value: u32, must: String| {
            if ok { Ok(()) } else { Err(EngineError::Config { field, value, must }) }
        };
        check(self.chunk >= 1, "chunk", self.chunk, "at least 1".into())?;
        check(self.max_running >= 1, "max_running", self.max_running, "at least 1".into())?;
        check(self.context_tokens >= 2, "context_tokens", self.context_tokens, "at least 2".into())?;
        let must = || format!("at least max_running, which is {}", self.max_running);
        check(self.token_budget >= self.max_running, "token_budget", self.token_budget, must())
    }
}
