//! How long sampling takes: greedy, a draw without filters, and one with all of them.

use std::sync::Arc;

use baton_kernels::conformance::Random;
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device};
use baton_kernels::{Backend, Draw, KernelError, Room};
use baton_types::SamplingParams;

use crate::{Figure, ROUNDS, Sizes, geometry, timed};

/// By their names in `kernels/cuda/model.py`.
pub fn all<D: Device>(device: &Arc<D>, sizes: &Sizes) -> Result<(), KernelError> {
    let vocab = sizes.vocab;
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    let drawn = SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..greedy.clone() };
    let filtered = SamplingParams { top_k: 50, top_p: 0.9, min_p: 0.05, ..drawn.clone() };
    for &rows in sizes.samples {
        let mut backend = CudaBackend::new(Arc::clone(device), geometry(sizes, 1, 1), CudaOptions::default())?;
        // No step ends in between, so all tokens of a case are kept.
        let tokens = rows * (1 + ROUNDS * sizes.repeats as usize);
        let (heads, cols) = (sizes.heads, 8);
        backend.reserve(&Room { rows: tokens, cols, heads, context: 1, table_entries: 1, samples: rows, vocab })?;
        let mut logits = backend.upload(&Random(4).vector(rows * vocab))?;
        for (how, params) in [("greedy", &greedy), ("temperature", &drawn), ("all filters", &filtered)] {
            let draw = |row| Draw { row, params, index: 0, mask: None, changes: &[] };
            let draws: Vec<Draw<'_>> = (0..rows).map(draw).collect();
            let seconds = timed(&mut backend, sizes.repeats, |b| b.draw(&mut logits, vocab, &draws))?;
            backend.drain()?;
            let case = format!("{rows} x {vocab} logits, {how}");
            Figure { what: "sample", case, seconds, bytes: rows * vocab * 4, operations: 0 }.print(sizes);
        }
    }
    Ok(())
}
