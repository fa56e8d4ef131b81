//! A step of the backend, from its inputs to its sampled tokens. It runs launch by launch or, for padded decode steps, as a graph.

use baton_types::TokenOut;

use super::attention::{self, Chunks, Placed, split_bytes};
use super::backend::CudaBackend;
use super::batch::Cut;
use super::device::{Device, Graph};
use super::graphs::{Next, Size};
use super::sampling::token;
use super::splits;
use crate::backend::{AttentionShape, Ragged, StepInputs};
use crate::{Draw, KernelError};

impl<D: Device> CudaBackend<D> {
    pub(super) fn run_step(&mut self, inputs: &StepInputs<'_>, run: &mut dyn FnMut(&mut Self)) {
        self.attempt(|b| b.begin(inputs));
        if self.failed.is_some() {
            return;
        }
        if !inputs.padded {
            return run(self);
        }
        let passes = self.steps.inputs.passes();
        self.run_sized(Size { rows: inputs.ids.len(), passes, draws: !inputs.draws.is_empty() }, run);
        self.sampling.replayed(inputs.draws.len());
    }

    fn run_sized(&mut self, size: Size, run: &mut dyn FnMut(&mut Self)) {
        if self.steps.freed != self.queue.freed() {
            self.forget_graphs();
            self.steps.freed = self.queue.freed();
        }
        match self.steps.graphs.next(size) {
            Next::Replay(graph) => {
                let freed = self.steps.freed;
                self.attempt(|b| b.queue.replay(graph, freed));
            }
            Next::Capture if self.steps.refused.is_none() => match self.capture(run) {
                Ok(graph) => {
                    self.keep(size, Some(graph));
                    let freed = self.steps.freed;
                    self.attempt(|b| b.queue.replay(graph, freed));
                }
                // A failed capture has done nothing, so the step can still run launch by launch.
                Err(error) => {
                    tracing::warn!(%error, "decode steps are done one launch at a time: they cannot be captured as graphs");
                    self.steps.refused = Some(error);
                    self.sampling.again();
                    run(self);
                }
            },
            Next::Capture | Next::Run => {
                run(self);
                self.keep(size, None);
            }
        }
    }

    fn capture(&mut self, run: &mut dyn FnMut(&mut Self)) -> Result<Graph, KernelError> {
        self.queue.begin_capture()?;
        run(self);
        // The capture must end also after a failure, or the stream would stay in capture.
        let ended = self.queue.end_capture();
        match self.failed.take() {
            None => ended,
            Some(error) => {
                ended.into_iter().for_each(|graph| self.queue.device.forget(graph));
                Err(error)
            }
        }
    }

    fn keep(&mut self, size: Size, graph: Option<Graph>) {
        if let Some(gone) = self.steps.graphs.done(size, graph) {
            self.queue.device.forget(gone);
        }
    }

    pub(super) fn forget_graphs(&mut self) {
        self.steps.graphs.clear().for_each(|graph| self.queue.device.forget(graph));
    }

    /// The error of the failed capture, if decode steps are not launched as graphs because of one.
    pub fn graphs_refused(&self) -> Option<&KernelError> {
        self.steps.refused.as_ref()
    }

    fn begin(&mut self, inputs: &StepInputs<'_>) -> Result<(), KernelError> {
        self.steps.inputs.set(inputs.ids, inputs.sampled);
        for (group, batch) in inputs.batches.iter().enumerate() {
            let cut = self.cut(group, inputs.heads);
            self.steps.inputs.renew(group, batch, cut);
            self.fit(group, inputs.heads)?;
        }
        self.steps.sent = false;
        self.steps.send(&self.queue)?;
        self.sampling.begin();
        if inputs.draws.is_empty() {
            return Ok(());
        }
        assert!(inputs.draws.iter().all(Draw::plain), "a step's draws have neither masks nor changes");
        self.sampling.send(&self.queue, inputs.draws, inputs.ids.len())
    }

    fn cut(&self, shape_group: usize, heads: usize) -> Cut {
        let layout = &self.pool.geometry().layout;
        let of = &layout.groups[shape_group];
        let (group, block_size) = (heads / of.kv_heads as usize, layout.block_size as usize);
        assert_eq!(group * of.kv_heads as usize, heads, "query heads for each KV head");
        let (pairs, window) = (self.chunks(shape_group).pairs(), of.window.unwrap_or(0));
        let slots = splits::slots(split_bytes(heads, of.head_dim));
        Cut { group, block_size, decode: !self.options.invariant, pairs, window, slots }
    }

    /// Makes room for what the splits of a group's decode rows leave. In a step this comes before its graph: a captured launch may grow
    /// nothing, and one that is done again must find as much room as its rows need now.
    fn fit(&mut self, group: usize, heads: usize) -> Result<(), KernelError> {
        let head_dim = self.pool.geometry().layout.groups[group].head_dim;
        let slots = self.steps.inputs.group(group).splits().slots();
        self.scratch.fit(&self.queue, slots * split_bytes(heads, head_dim), slots * heads)
    }

    /// The attention kernel for a group's chunks.
    fn chunks(&self, group: usize) -> Chunks {
        // Not for pools in host memory: the copy units may not reach it on all hosts, and the bus is slower than either kernel.
        let hopper = self.options.hopper && !self.pool.is_host();
        let hopper = hopper && self.queue.device.properties().capability == attention::HOPPER;
        Chunks::of(&self.pool.geometry().layout, group, hopper)
    }

    /// Makes sure that a layer's batch is on the device. Within a step it is there already; otherwise it is cut and sent now, unless it is
    /// the batch that was sent last.
    pub(super) fn place(&mut self, shape: AttentionShape, batch: &Ragged) -> Result<(), KernelError> {
        let cut = self.cut(shape.group, shape.heads);
        self.steps.sent &= !self.steps.inputs.renew(shape.group, batch, cut);
        self.fit(shape.group, shape.heads)?;
        self.steps.send(&self.queue)
    }

    /// The layer's batch on the device; None if none was placed.
    pub(super) fn placed(&self, shape: AttentionShape) -> Option<Placed<'_, D>> {
        let inputs = &self.steps.inputs;
        let words = self.steps.words.as_ref()?.piece(0, inputs.len() * size_of::<u32>());
        let chunks = self.chunks(shape.group);
        Some(Placed { queue: &self.queue, pool: &self.pool, chunks, shape, inputs, words, scratch: &self.scratch })
    }

    pub(super) fn end_step(&mut self) -> Result<(), KernelError> {
        if let Some(error) = self.failed.take() {
            self.sampling.begin();
            return Err(error);
        }
        self.sampling.submit(&self.queue)
    }

    pub(super) fn collect_step(&mut self) -> Result<(), KernelError> {
        self.sampling.collect(&self.queue)
    }

    pub(super) fn token(&self, number: u32, index: u32, top: Option<u32>) -> TokenOut {
        let none = "no such draw: the step was not collected";
        match self.sampling.chosen.get(number as usize) {
            Some(chosen) => token(index, top, chosen),
            None => TokenOut { index, failed: Some(none.to_owned()), ..TokenOut::default() },
        }
    }
}
