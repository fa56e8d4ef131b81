//! What a worker's steps achieve, for metrics: operations and bytes of the model's own arithmetic, and what the processor could do at most.

use baton_kernels::{Ceilings, CpuOptions};
use baton_model_files::{Arithmetic, Model, TensorName};

use baton_roles::StepDone;
use baton_runtime::metrics as names;
use metrics::{Counter, counter, gauge};

use crate::{Quantization, WorkerConfig, WorkerError};

/// What steps cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Costs {
    pub arithmetic: Arithmetic,
    /// Bytes of the weights that each step reads.
    pub weights: u64,
    /// Bytes of a token's KV.
    pub token: u64,
}

impl Costs {
    /// Of a loaded model. `on_device`: its matrices were converted.
    pub fn of(model: &Model, config: &WorkerConfig, token: u64, on_device: bool) -> Costs {
        let tied = model.find(TensorName::Output).is_none();
        // Of the embedding a step reads a few rows, unless it is the output head, too.
        let tensors = model.tensors().into_iter().filter(|tensor| tied || tensor.name != TensorName::Embedding);
        let bytes = |elements: u64| match config.kv.quantization {
            Quantization::Fp8 => elements,
            Quantization::None => elements * 2,
        };
        let weights = tensors.map(|tensor| if on_device { bytes(tensor.elements()) } else { tensor.bytes() }).sum();
        Costs { arithmetic: Arithmetic::of(model.config()), weights, token }
    }
}

/// Counts what steps achieve. The counters are looked up once.
pub(crate) struct Achieved {
    costs: Costs,
    flops: Counter,
    read: Counter,
}

impl Achieved {
    pub fn new(costs: Costs) -> Achieved {
        Achieved { costs, flops: counter!(names::FLOPS), read: counter!(names::READ_BYTES) }
    }

    /// A step is over.
    pub fn step(&self, done: &StepDone) {
        let (flops, bytes) = self.of(done);
        self.flops.increment(flops);
        self.read.increment(bytes);
    }

    /// Operations, and bytes read: all weights once, and the KV of each decode row's tokens. Prompts read theirs out of caches.
    fn of(&self, done: &StepDone) -> (u64, u64) {
        let StepDone { work, sampled, .. } = done;
        let tokens = work.tokens + work.rows;
        if tokens == 0 {
            return (0, 0);
        }
        let flops = self.costs.arithmetic.flops(tokens, work.pairs + work.context, *sampled);
        (flops as u64, self.costs.weights + work.context * self.costs.token)
    }
}

/// Measures what this processor can do at most, if the settings ask for it.
pub(crate) fn measure_ceilings(config: &WorkerConfig) -> Result<(), WorkerError> {
    if !config.measure_ceilings {
        return Ok(());
    }
    let usual = CpuOptions::default();
    let options = CpuOptions { threads: config.threads.unwrap_or(usual.threads), pinned: config.pin_threads, ..usual };
    let Ceilings { read, f32, int8 } = Ceilings::measure(options).map_err(baton_model::ModelError::from)?;
    for (of, ceiling) in [("read_bytes", read), ("f32_flops", f32), ("int8_ops", int8)] {
        gauge!(names::CEILING, "of" => of).set(ceiling);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use baton_latency::StepWork;

    use super::*;

    #[test]
    fn a_step_is_counted_by_its_tokens_their_context_and_the_weights_once() {
        let arithmetic = Arithmetic { token: 1000.0, pair: 10.0, logits: 100.0 };
        let achieved = Achieved::new(Costs { arithmetic, weights: 7000, token: 4 });
        let work = StepWork { tokens: 3, pairs: 6, rows: 2, context: 50 };
        let done = StepDone { work, sampled: 2, ..StepDone::default() };
        assert_eq!(achieved.of(&done), (5 * 1000 + 56 * 10 + 2 * 100, 7000 + 200));
        assert_eq!(achieved.of(&StepDone::default()), (0, 0), "a step that failed");
    }
}
