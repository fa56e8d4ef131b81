//! How many prompt tokens fill a step, found by timing steps of the loaded model at the start of a worker.
//!
//! Which lengths are timed and what the times say is [`Saturation`]'s; here an engine of its own runs them over the worker's
//! pool, before anybody else has a block of it.

use std::time::{Duration, Instant};

use baton_engine::{
    CacheConfig, Engine, EngineConfig, EngineError, ModelRunner, NewSequence, RunError, Saturation, Start, Time,
};
use baton_types::{PoolGeometry, RequestId, SamplingParams};

use crate::WorkerError;

/// How many prompt tokens of a vocabulary of `vocab` saturate the hardware; all that `limits` allow when none do. Blocks for some tenths
/// of a second with a small model, and for seconds with one whose shortest step takes that long.
pub(crate) fn find_pack_tokens(
    runner: &mut dyn ModelRunner,
    vocab: u32,
    limits: &EngineConfig,
    geometry: &PoolGeometry,
) -> Result<u32, WorkerError> {
    let started = Instant::now();
    let mut steps = Steps::new(limits, geometry, vocab)?;
    let mut search = Saturation::new(steps.longest());
    while let Some(tokens) = search.next_length() {
        search.timed(steps.time(tokens, runner)?);
    }
    let found = search.found();
    let pack_tokens = found.unwrap_or(limits.token_budget);
    let (milliseconds, saturated) = (started.elapsed().as_millis() as u64, found.is_some());
    tracing::info!(pack_tokens, saturated, milliseconds, "found how many prompt tokens fill a step");
    Ok(pack_tokens)
}

/// Steps of one whole prompt each.
struct Steps {
    engine: Engine,
    longest: u32,
    vocab: u32,
}

impl Steps {
    /// Within the limits of a worker's engine.
    fn new(limits: &EngineConfig, geometry: &PoolGeometry, vocab: u32) -> Result<Steps, EngineError> {
        let blocks = geometry.blocks.iter().copied().min().unwrap_or(0);
        let pool = blocks.saturating_mul(geometry.layout.block_size);
        // One token of the context is for the answer.
        let longest = limits.token_budget.min(limits.context_tokens.saturating_sub(1)).min(pool);
        let cache = CacheConfig { max_blocks: 0, ..limits.cache };
        let alone = EngineConfig { chunk: limits.token_budget, max_running: 1, max_waiting: 0, cache, ..*limits };
        Ok(Steps { engine: Engine::new(alone, geometry)?, longest, vocab })
    }

    /// Tokens of the longest step there can be.
    fn longest(&self) -> u32 {
        self.longest
    }

    /// Computes a prompt of so many tokens; how long that took.
    fn time(&mut self, tokens: u32, runner: &mut dyn ModelRunner) -> Result<Duration, WorkerError> {
        self.engine.submit(NewSequence {
            request_id: RequestId(format!("{tokens} tokens to measure")),
            tokens: (0..tokens).map(|id| id % self.vocab).collect(),
            prompt_tokens: tokens,
            params: SamplingParams { max_tokens: 1, temperature: 0.0, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: None,
            priority: 0,
        })?;
        let (mut events, mut out) = (Vec::new(), Vec::new());
        let step = self.engine.plan(Time(0), &mut events);
        let step = step.ok_or_else(|| RunError("nothing was planned for a prompt to measure".to_owned()))?;
        let started = Instant::now();
        let ran = self.engine.with_batch(&step, |batch| runner.run(batch, &mut |_| (), &mut out));
        let took = started.elapsed();
        match ran {
            Ok(()) => self.engine.apply(step, &mut out, &mut events),
            Err(error) => {
                self.engine.fail(step, error.clone(), &mut events);
                return Err(error.into());
            }
        }
        Ok(took)
    }
}

#[cfg(test)]
mod tests {
    use baton_engine::fake::{FakeModel, tiny_layout};
    use baton_engine::{Batch, Order, SwapConfig};
    use baton_types::TokenOut;

    use super::*;

    /// Notes what it is asked to compute.
    struct Noting(FakeModel, Vec<usize>);

    impl ModelRunner for Noting {
        fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
            self.1.extend(batch.rows.iter().map(|row| row.tokens.len()));
            self.0.launch(batch, on_layer)
        }
        fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
            self.0.collect(batch, out)
        }
    }

    #[test]
    fn whole_prompts_are_computed_in_one_step_each_and_leave_nothing() {
        let geometry = PoolGeometry::uniform(tiny_layout(4), 30);
        let limits = EngineConfig {
            token_budget: 200,
            chunk: 8,
            pack_tokens: 8,
            max_running: 3,
            max_waiting: 3,
            context_tokens: 150,
            local_prefill_tokens: 0,
            order: Order::Priority,
            overtakes: 3,
            cache: CacheConfig::default(),
            swap: SwapConfig::default(),
        };
        let mut steps = Steps::new(&limits, &geometry, 50).unwrap();
        assert_eq!(steps.longest(), 120, "what the pool holds");
        assert_eq!(Steps::new(&limits, &PoolGeometry::uniform(tiny_layout(4), 99), 50).unwrap().longest(), 149);
        let mut model = Noting(FakeModel::new(geometry, 50), Vec::new());
        for tokens in [16, 120, 16, 64] {
            steps.time(tokens, &mut model).unwrap();
            // I6
            assert_eq!(steps.engine.counts().free, steps.engine.counts().total);
        }
        assert_eq!(model.1, [16, 120, 16, 64]);
    }
}
