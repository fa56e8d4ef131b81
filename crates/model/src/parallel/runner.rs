//! [`TensorParallel`]: a [`ModelRunner`] with one decoder per rank.
//!
//! The caller's thread is rank 0, often the only rank, and samples. The other ranks run on threads of their own. Every rank gets the same
//! batch and does the same operations on its part, so ranks only have to be told when to begin.

use std::sync::Arc;

use baton_engine::{Batch, ModelRunner, RunError};
use baton_grammar::Grammars;
use baton_kernels::cuda::{CudaBackend, Device, Exchange};
use baton_kernels::{Backend, CpuBackend};
use baton_model_files::{Model, ModelConfig};
use baton_types::{KvLayout, TokenOut};

use super::crew::{Crew, guarded};
use super::{Collective, GpuRanks, Rank, Sharding, ThreadRanks};
use crate::{Decoder, DecoderLimits, ModelError, Sampler};

/// A model on several ranks, ready to run steps.
pub struct TensorParallel<B: Backend> {
    first: Decoder<B>,
    others: Crew,
}

impl<B: Backend + 'static> TensorParallel<B> {
    /// Loads a model's parts onto the backends, one per rank, in order. `layout` is that of the whole model's KV. The backend of each
    /// rank has a pool with the layout `layout.of_ranks(ranks)`, and reaches the others by its collective.
    ///
    /// # Errors
    /// When the model cannot be split over this many ranks, cannot be loaded, or no thread can be started.
    pub fn load(
        model: &Model,
        layout: &KvLayout,
        limits: DecoderLimits,
        backends: Vec<(B, Box<dyn Collective<B>>)>,
    ) -> Result<Self, ModelError> {
        let ranks = backends.len() as u32;
        Sharding::of(model, ranks, 0)?;
        let layout = layout.clone().of_ranks(ranks);
        let load = |(rank, (backend, collective))| {
            let sharding = Sharding::of(model, ranks, rank)?;
            Decoder::load_rank(model, &layout, backend, limits, Rank { sharding, collective })
        };
        let mut backends = (0..).zip(backends);
        let Some(first) = backends.next() else {
            return Err(ModelError::Ranks { field: "ranks", value: 0, ranks, degrees: Vec::new() });
        };
        let first = load(first)?;
        let others = Crew::start(backends.map(load).collect::<Result<_, _>>()?)?;
        Ok(TensorParallel { first, others })
    }

    /// Loads a whole model onto one backend, as a single rank. `layout` is that of its pool.
    ///
    /// # Errors
    /// When the model cannot be loaded.
    pub fn alone(model: &Model, layout: &KvLayout, limits: DecoderLimits, backend: B) -> Result<Self, ModelError> {
        Ok(TensorParallel { first: Decoder::load(model, layout, backend, limits)?, others: Crew::default() })
    }
}

impl<B: Backend> TensorParallel<B> {
    /// Name of the backend, for logs.
    pub fn backend_name(&self) -> String {
        match (self.first.ranks(), self.first.backend_name()) {
            (1, name) => name,
            (ranks, name) => format!("{ranks} ranks of {name}"),
        }
    }

    /// The constraints of its sampler. They can be compiled on any thread.
    pub fn grammars(&self) -> Arc<Grammars> {
        self.first.grammars()
    }

    /// The same as [`Decoder::run_logits`]. When a rank fails or panics, all ranks leave the step and its error is the step's. The next
    /// step may succeed.
    pub fn run_logits(
        &mut self,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
        each: &mut dyn FnMut(&mut Sampler, usize, &mut [f32]),
    ) -> Result<(), RunError> {
        self.together(batch, |first| first.run_logits(batch, on_layer, each))
    }

    /// Runs a batch on all ranks; on rank 0 by `step`. A single rank just runs `step`.
    fn together(
        &mut self,
        batch: &Batch<'_>,
        step: impl FnOnce(&mut Decoder<B>) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        if self.others.is_empty() {
            return step(&mut self.first);
        }
        self.first.reset()?;
        let others = self.others.begin(batch);
        let outcome = guarded(&mut self.first, step);
        others.finish().and(outcome)
    }
}

impl TensorParallel<CpuBackend> {
    /// The same as [`TensorParallel::load`] on the CPU, where ranks exchange through shared memory.
    pub fn on_cpu(
        model: &Model,
        layout: &KvLayout,
        limits: DecoderLimits,
        backends: Vec<CpuBackend>,
    ) -> Result<Self, ModelError> {
        let backends = match <[CpuBackend; 1]>::try_from(backends) {
            Ok([backend]) => return TensorParallel::alone(model, layout, limits, backend),
            Err(backends) => backends,
        };
        let exchange = ThreadRanks::ranks(backends.len(), exchanged(model.config(), limits, backends.len()));
        let exchange = exchange.into_iter().map(|rank| Box::new(rank) as Box<dyn Collective<CpuBackend>>);
        TensorParallel::load(model, layout, limits, backends.into_iter().zip(exchange).collect())
    }
}

impl<D: Device + 'static> TensorParallel<CudaBackend<D>> {
    /// The same as [`TensorParallel::load`] with one device per rank. `exchange` connects the devices in the same order.
    pub fn on_devices(
        model: &Model,
        layout: &KvLayout,
        limits: DecoderLimits,
        backends: Vec<CudaBackend<D>>,
        exchange: Arc<dyn Exchange<D>>,
    ) -> Result<Self, ModelError> {
        let ranks = GpuRanks::new(exchange, &backends, summed(model.config(), limits))?;
        let ranks = ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Collective<CudaBackend<D>>>);
        TensorParallel::load(model, layout, limits, backends.into_iter().zip(ranks).collect())
    }
}

/// Most elements of one sum: the residual stream of a step.
fn summed(config: &ModelConfig, limits: DecoderLimits) -> usize {
    limits.tokens * config.hidden_size as usize
}

/// Most elements that a rank exchanges at once: the residual stream of a step, or its part of the logits.
fn exchanged(config: &ModelConfig, limits: DecoderLimits, ranks: usize) -> usize {
    let logits = (config.vocab_size as usize).div_ceil(ranks.max(1)).next_multiple_of(8) + 8;
    summed(config, limits).max(limits.samples * logits)
}

impl<B: Backend> ModelRunner for TensorParallel<B> {
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        let launched = self.together(batch, |first| first.launch(batch, on_layer));
        if launched.is_err() && !self.others.is_empty() {
            // Another rank's part of the step is missing.
            self.first.abandon();
        }
        launched
    }

    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        self.first.collect(batch, out)
    }

    fn overlaps(&self) -> bool {
        self.first.overlaps()
    }

    fn reads_by_layer(&self) -> bool {
        self.first.reads_by_layer()
    }

    fn device(&self) -> Option<String> {
        self.first.device()
    }

    /// Rank 0's reason why it is lost, or the exchange's reason why the ranks cannot go on.
    fn lost(&mut self) -> Option<RunError> {
        ModelRunner::lost(&mut self.first).or_else(|| self.first.reset().err())
    }
}
