//! The forward pass: embeddings, layers, output head, over buffers allocated once.

use std::collections::VecDeque;
use std::sync::Arc;

use baton_engine::RunError;
use baton_grammar::{Grammars, Matchers};
use baton_kernels::{
    AttentionShape, Backend, Draw, First, Gate, Input, MAX_HEADS_PER_KV_HEAD, Product, Ragged, Room, Rope, StepInputs,
};
use baton_model_files::{Activation, Model, ModelConfig};
use baton_types::KvLayout;

use crate::choose::{Choices, PendingTokens};
use crate::parallel::{Rank, Sharding};
use crate::weights::{Layer, Weights, load};
use crate::{ModelError, Sampler, rope};

/// The sizes that buffers are allocated for.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLimits {
    /// Most tokens of a step.
    pub tokens: usize,
    /// Most rows whose logits are computed together. More rows are computed in several portions.
    pub samples: usize,
    /// Longest sequence.
    pub context: usize,
    /// Most block-table entries of a step, per layer group.
    pub table_entries: usize,
}

/// A model on a backend, or one rank's part of it, ready to run steps.
pub struct Decoder<B: Backend> {
    /// The model's configuration, with this rank's numbers of heads and feed-forward width.
    pub(crate) config: ModelConfig,
    pub(crate) limits: DecoderLimits,
    pub(crate) backend: B,
    pub(crate) sampler: Sampler,
    pub(crate) choices: Choices,
    /// Steps that are launched but not collected. `spare` holds unused ones for reuse.
    pub(crate) pending: VecDeque<PendingTokens>,
    pub(crate) spare: Vec<PendingTokens>,
    /// Set when the backend could not be waited for, so that its work may still be under way.
    pub(crate) lost: Option<RunError>,
    grammars: Arc<Grammars>,
    weights: Weights<B>,
    rope: Rope<B::Buffer>,
    local_rope: Option<Rope<B::Buffer>>,
    shapes: Vec<AttentionShape>,
    pub(crate) block_size: u32,
    pub(crate) buffers: Buffers<B>,
    pub(crate) inputs: Inputs,
    /// Set when this is one of several ranks.
    parallel: Option<Parallel<B>>,
}

/// What one of several ranks needs in addition to its part of the model.
struct Parallel<B: Backend> {
    rank: Rank<B>,
    /// Logits of the whole vocabulary, `[samples, vocab]`; used on rank 0 only.
    logits: B::Buffer,
}

/// Activations, `[rows, width]` unless noted.
pub(crate) struct Buffers<B: Backend> {
    /// The residual stream, `hidden`.
    x: B::Buffer,
    /// Output of a block, `hidden`.
    out: B::Buffer,
    q: B::Buffer,
    k: B::Buffer,
    v: B::Buffer,
    attended: B::Buffer,
    gate: B::Buffer,
    up: B::Buffer,
    /// The residual stream of sampling rows, `[samples, hidden]`, and this rank's logits, `[samples, vocab]`.
    last: B::Buffer,
    pub(crate) logits: B::Buffer,
}

/// A step's inputs, reused.
#[derive(Default)]
pub(crate) struct Inputs {
    pub ids: Vec<u32>,
    /// One per layer group.
    pub batches: Vec<Ragged>,
    /// Rows whose logits are wanted: those that score, and those that sample.
    pub sampled: Vec<u32>,
    /// The number of sampling rows before padding, if the step is padded.
    pub padded: Option<usize>,
    /// One row of logits on the host.
    pub logits: Vec<f32>,
}

impl<B: Backend> Decoder<B> {
    /// Loads a model. `layout` must be the layout of the backend's pool.
    pub fn load(model: &Model, layout: &KvLayout, backend: B, limits: DecoderLimits) -> Result<Self, ModelError> {
        Self::load_part(model, layout, backend, limits, None)
    }

    /// Loads one rank's part of a model. `layout` must be the layout of the backend's pool, which has that rank's KV heads.
    pub fn load_rank(
        model: &Model,
        layout: &KvLayout,
        backend: B,
        limits: DecoderLimits,
        rank: Rank<B>,
    ) -> Result<Self, ModelError> {
        Self::load_part(model, layout, backend, limits, Some(rank))
    }

    fn load_part(
        model: &Model,
        layout: &KvLayout,
        mut backend: B,
        limits: DecoderLimits,
        rank: Option<Rank<B>>,
    ) -> Result<Self, ModelError> {
        let whole = Sharding::whole(model.config());
        let sharding = rank.as_ref().map_or(&whole, |rank| &rank.sharding);
        let config = sharding.config(model.config());
        for (field, value) in [
            ("hidden_size", config.hidden_size),
            ("intermediate_size", config.intermediate_size),
            ("head_dim", config.head_dim),
        ] {
            if value % 8 != 0 {
                return Err(ModelError::Width { field, value });
            }
        }
        let group = config.heads / config.kv_heads.max(1);
        if group as usize > MAX_HEADS_PER_KV_HEAD {
            return Err(ModelError::Group(group));
        }
        let weights = load(model, sharding, &mut backend)?;
        let head_dim = config.head_dim as usize;
        let rope = rope::tables(&backend, &config.rope, limits.context, head_dim)?;
        let local_rope = match &config.local_rope {
            Some(local) => Some(rope::tables(&backend, local, limits.context, head_dim)?),
            None => None,
        };
        let shape = |layer: u32| {
            let (group, layer) = layout.locate(layer).unwrap_or_default();
            AttentionShape { group, layer, heads: config.heads as usize, scale: config.attention_scale }
        };
        let shapes = (0..config.layers).map(shape).collect();
        let buffers = Buffers::new(&backend, &config, sharding, layout, limits)?;
        let widest = config.hidden_size.max(config.intermediate_size).max(config.q_size()) as usize;
        backend.reserve(&Room {
            rows: limits.tokens,
            cols: widest,
            heads: config.heads as usize,
            context: limits.context,
            table_entries: limits.table_entries,
            samples: limits.samples,
            vocab: config.vocab_size as usize,
        })?;
        let inputs = Inputs {
            ids: Vec::with_capacity(limits.tokens),
            batches: layout.groups.iter().map(|_| Ragged::with_capacity(limits.tokens, limits.table_entries)).collect(),
            sampled: Vec::with_capacity(limits.tokens),
            padded: None,
            logits: vec![0.0; config.vocab_size as usize],
        };
        let grammars = Arc::new(Grammars::new(model.tokenizer(), config.vocab_size));
        let sampler = Sampler::new(config.vocab_size as usize).with_constraints(Matchers::new(Arc::clone(&grammars)));
        let block_size = layout.block_size;
        // A single rank exchanges with nobody.
        let parallel = match rank.filter(|rank| rank.sharding.ranks() > 1) {
            Some(rank) => Some(Parallel { rank, logits: backend.buffer(limits.samples * config.vocab_size as usize)? }),
            None => None,
        };
        Ok(Decoder {
            config,
            limits,
            backend,
            sampler,
            choices: Choices::default(),
            pending: VecDeque::with_capacity(2),
            spare: (0..2).map(|_| PendingTokens::with_capacity(limits.tokens)).collect(),
            lost: None,
            grammars,
            weights,
            rope,
            local_rope,
            shapes,
            block_size,
            buffers,
            inputs,
            parallel,
        })
    }

    /// Name of the backend, for logs.
    pub fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// The constraints of its sampler. They can be compiled on any thread.
    pub fn grammars(&self) -> Arc<Grammars> {
        Arc::clone(&self.grammars)
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// This rank's number, from 0.
    pub(crate) fn rank(&self) -> u32 {
        self.parallel.as_ref().map_or(0, |parallel| parallel.rank.sharding.rank())
    }

    /// Number of ranks.
    pub(crate) fn ranks(&self) -> u32 {
        self.parallel.as_ref().map_or(1, |parallel| parallel.rank.sharding.ranks())
    }

    /// Tells the other ranks that this one leaves the step.
    pub(crate) fn abort(&self, why: &RunError) {
        self.parallel.iter().for_each(|parallel| parallel.rank.collective.abort(why));
    }

    /// Prepares the ranks for a step. Called while no rank is in a step.
    pub(crate) fn reset(&mut self) -> Result<(), RunError> {
        self.parallel.as_mut().map_or(Ok(()), |parallel| parallel.rank.collective.reset())
    }

    /// Runs `inputs` through all layers. `on_layer` is called after a layer's K and V are stored on all ranks. A padded step also
    /// computes the logits of its rows and does these draws; it does not call `on_layer`, because the backend may run it as a whole.
    pub(crate) fn forward(&mut self, on_layer: &mut dyn FnMut(u32), draws: &[Draw<'_>]) -> Result<(), RunError> {
        let Decoder { config, backend, weights, buffers, inputs, shapes, rope, local_rope, parallel, .. } = self;
        let (padded, heads) = (inputs.padded.is_some(), config.heads as usize);
        let (ids, sampled, batches) = (&inputs.ids, &inputs.sampled, &inputs.batches);
        let step = StepInputs { ids, sampled, batches, heads, padded, draws };
        let mut run = |backend: &mut B| -> Result<(), RunError> {
            backend.embed(&weights.embedding, &inputs.ids, config.embedding_scale, &mut buffers.x);
            for (l, layer) in weights.layers.iter().enumerate() {
                let local = config.layer_windows[l].and(local_rope.as_ref());
                let (shape, batch) = (shapes[l], &inputs.batches[shapes[l].group]);
                let (rope, first, told) = (local.unwrap_or(rope), l == 0, !padded);
                let pass = Pass { config, shape, batch, rope, first, told };
                pass.attention(backend, layer, buffers, parallel, &mut || on_layer(l as u32))?;
                pass.feed_forward(backend, layer, buffers, parallel)?;
            }
            backend.add(&mut buffers.x, &buffers.out, ids.len() * config.hidden_size as usize);
            if padded {
                logits(config, backend, weights, buffers, &inputs.sampled);
            }
            if !draws.is_empty() {
                backend.draw(&mut buffers.logits, config.vocab_size as usize, draws);
            }
            Ok(())
        };
        let mut outcome = Ok(());
        backend.step(&step, |backend| outcome = run(backend));
        outcome
    }

    /// Computes the logits of `count` sampling rows, beginning with `first`, into the logits buffer.
    pub(crate) fn logits(&mut self, first: usize, count: usize) -> Result<(), RunError> {
        let Decoder { config, backend, weights, buffers, inputs, parallel, .. } = self;
        logits(config, backend, weights, buffers, &inputs.sampled[first..first + count]);
        let Some(Parallel { rank, logits }) = parallel else { return Ok(()) };
        rank.collective.gather(backend, &buffers.logits, count, rank.sharding.vocab_splits(), logits)
    }

    /// Copies one row of the logits buffer to the host.
    pub(crate) fn read_logits(&mut self, row: usize) {
        let vocab = self.inputs.logits.len();
        let logits = self.parallel.as_ref().map_or(&self.buffers.logits, |parallel| &parallel.logits);
        self.backend.read(logits, row * vocab, &mut self.inputs.logits);
    }

    /// The logits buffer, `[samples, vocab]`, and its backend.
    pub(crate) fn logits_buffer(&mut self) -> (&mut B, &mut B::Buffer) {
        let own = &mut self.buffers.logits;
        (&mut self.backend, self.parallel.as_mut().map_or(own, |parallel| &mut parallel.logits))
    }
}

/// Replaces `x` by its sum over the ranks.
fn sum<B: Backend>(
    parallel: &mut Option<Parallel<B>>,
    backend: &mut B,
    x: &mut B::Buffer,
    elements: usize,
) -> Result<(), RunError> {
    let Some(Parallel { rank, .. }) = parallel else { return Ok(()) };
    rank.collective.all_reduce(backend, x, elements)
}

/// Computes the logits of these rows of the residual stream into `b.logits`.
fn logits<B: Backend>(config: &ModelConfig, backend: &mut B, weights: &Weights<B>, b: &mut Buffers<B>, rows: &[u32]) {
    backend.gather_rows(&b.x, config.hidden_size as usize, rows, &mut b.last);
    let head = weights.output.as_ref().unwrap_or(&weights.embedding);
    let input = Input { x: &mut b.last, rows: rows.len(), first: First::Norm(&weights.output_norm) };
    backend.matmul(input, [Product { weight: head, bias: None, out: &mut b.logits }]);
}

/// One layer's part of a step.
struct Pass<'a, B: Backend> {
    config: &'a ModelConfig,
    shape: AttentionShape,
    batch: &'a Ragged,
    rope: &'a Rope<B::Buffer>,
    /// Whether this is the first layer, so that no earlier layer's output in `Buffers::out` is still to be added to the residual stream.
    first: bool,
    /// Whether the stored K and V are published and reported to the caller.
    told: bool,
}

impl<B: Backend> Pass<'_, B> {
    /// Computes attention. Leaves its output in `b.out`, not yet added to the residual stream.
    fn attention(
        &self,
        backend: &mut B,
        layer: &Layer<B>,
        b: &mut Buffers<B>,
        parallel: &mut Option<Parallel<B>>,
        stored: &mut dyn FnMut(),
    ) -> Result<(), RunError> {
        let (rows, c) = (self.batch.rows(), self.config);
        let width = c.hidden_size as usize;
        let norm = &layer.attn_norm;
        let first = if self.first { First::Norm(norm) } else { First::AddNorm(&b.out, norm) };
        let input = Input { x: &mut b.x, rows, first };
        backend.matmul(input, [layer.q.product(&mut b.q), layer.k.product(&mut b.k), layer.v.product(&mut b.v)]);
        if let (Some(q_norm), Some(k_norm)) = (&layer.q_norm, &layer.k_norm) {
            backend.rms_norm(q_norm, &mut b.q, rows * c.heads as usize);
            backend.rms_norm(k_norm, &mut b.k, rows * c.kv_heads as usize);
        }
        backend.rope_and_store_kv(self.shape, self.batch, self.rope, &mut b.q, &b.k, &b.v);
        if self.told {
            backend.publish();
        }
        if self.told && parallel.is_none() {
            stored();
        }
        backend.attention(self.shape, self.batch, &b.q, &mut b.attended);
        let input = Input { x: &mut b.attended, rows, first: First::Nothing };
        backend.matmul(input, [layer.attn_output.product(&mut b.out)]);
        sum(parallel, backend, &mut b.out, rows * width)?;
        if self.told && parallel.is_some() {
            // A rank stores its heads before it takes part in the sum, so now all ranks have stored theirs.
            stored();
        }
        if let Some(norm) = &layer.post_attn_norm {
            backend.rms_norm(norm, &mut b.out, rows);
        }
        Ok(())
    }

    /// Computes the feed-forward block. Adds attention's output to the residual stream first, and leaves its own output in `b.out`.
    fn feed_forward(
        &self,
        backend: &mut B,
        layer: &Layer<B>,
        b: &mut Buffers<B>,
        parallel: &mut Option<Parallel<B>>,
    ) -> Result<(), RunError> {
        let (rows, c) = (self.batch.rows(), self.config);
        let width = c.hidden_size as usize;
        let input = Input { x: &mut b.x, rows, first: First::AddNorm(&b.out, &layer.ffn_norm) };
        backend.matmul(input, [layer.gate.product(&mut b.gate), layer.up.product(&mut b.up)]);
        let act = match c.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        };
        let input = Input { x: &mut b.gate, rows, first: First::Gate(act, &b.up) };
        backend.matmul(input, [layer.down.product(&mut b.out)]);
        sum(parallel, backend, &mut b.out, rows * width)?;
        if let Some(norm) = &layer.post_ffn_norm {
            backend.rms_norm(norm, &mut b.out, rows);
        }
        Ok(())
    }
}

impl<B: Backend> Buffers<B> {
    fn new(
        backend: &B,
        config: &ModelConfig,
        sharding: &Sharding,
        layout: &KvLayout,
        limits: DecoderLimits,
    ) -> Result<Self, ModelError> {
        let rows = |width: u32| backend.buffer(limits.tokens * width as usize);
        let samples = |width: u32| backend.buffer(limits.samples * width as usize);
        let [kv, ffn] = [config.kv_size(), config.intermediate_size].map(|width| width as usize);
        // In groups with sinks each query is stored twice.
        let twice = layout.groups.iter().any(|group| group.sinks > 0);
        let queries = config.q_size() as usize * if twice { 2 } else { 1 };
        let [q, k, v] = backend.outputs(limits.tokens, [queries, kv, kv])?;
        let [gate, up] = backend.outputs(limits.tokens, [ffn, ffn])?;
        Ok(Buffers {
            x: rows(config.hidden_size)?,
            out: rows(config.hidden_size)?,
            q,
            k,
            v,
            attended: backend.operand(limits.tokens * config.q_size() as usize)?,
            gate,
            up,
            last: samples(config.hidden_size)?,
            logits: samples(sharding.vocab().len() as u32)?,
        })
    }
}
