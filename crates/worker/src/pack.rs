//! Finds how many prompt tokens fill a step, by timing steps of the loaded model when a worker starts.
//!
//! [`Saturation`] chooses the lengths to time and judges the times. This module runs them with an engine of its own over the worker's
//! pool, before anything else uses a block of the pool.

use std::time::{Duration, Instant};

use baton_engine::{
    CacheConfig, Engine, EngineConfig, EngineError, ModelRunner, NewSequence, RunError, Saturation, Share, Start, Time,
};
use baton_types::{PoolGeometry, RequestId, SamplingParams};

use crate::WorkerError;

/// The number of prompt tokens that saturates the hardware, or all that `limits` allow when none does. `vocab` is the size of the
/// vocabulary. Blocks for some tenths of a second with a small model, and for seconds when the model's shortest step takes that long.
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

/// Runs steps that compute one whole prompt each.
struct Steps {
    engine: Engine,
    longest: u32,
    vocab: u32,
}

impl Steps {
    /// Steps within the limits of a worker's engine.
    fn new(limits: &EngineConfig, geometry: &PoolGeometry, vocab: u32) -> Result<Steps, EngineError> {
        let blocks = geometry.blocks.iter().copied().min().unwrap_or(0);
        let pool = blocks.saturating_mul(geometry.layout.block_size);
        // The answer needs one token of the context.
        let longest = limits.token_budget.min(limits.context_tokens.saturating_sub(1)).min(pool);
        let cache = CacheConfig { max_blocks: 0, ..limits.cache };
        let alone = EngineConfig { chunk: limits.token_budget, max_running: 1, max_waiting: 0, cache, ..*limits };
        Ok(Steps { engine: Engine::new(alone, geometry)?, longest, vocab })
    }

    /// Tokens of the longest possible step.
    fn longest(&self) -> u32 {
        self.longest
    }

    /// Computes a prompt of `tokens` tokens and returns the time of its step.
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
            share: Share::default(),
            parked: false,
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
    use baton_engine::{Batch, Order};
    use baton_types::TokenOut;

    use super::*;

    /// Records the lengths of the rows it computes.
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
            reserve_ahead: 16,
            order: Order::Priority,
            overtakes: 3,
            cache: CacheConfig::default(),
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
