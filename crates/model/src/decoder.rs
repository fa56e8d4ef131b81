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

/// What buffers are sized for.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLimits {
    /// Most tokens of a step.
    pub tokens: usize,
    /// Most rows whose logits are computed together; more are done in turns.
    pub samples: usize,
    /// Longest sequence.
    pub context: usize,
    /// Most block-table entries of a step, per layer group.
    pub table_entries: usize,
}

/// A model on a backend, or one rank's part of it, ready to run steps.
pub struct Decoder<B: Backend> {
    /// With the numbers of heads and the feed-forward width that are here.
    pub(crate) config: ModelConfig,
    pub(crate) limits: DecoderLimits,
    pub(crate) backend: B,
    pub(crate) sampler: Sampler,
    pub(crate) choices: Choices,
    /// Steps that are launched and not collected, and room for more.
    pub(crate) pending: VecDeque<PendingTokens>,
    pub(crate) spare: Vec<PendingTokens>,
    /// Why nobody knows what the backend still does.
    pub(crate) lost: Option<RunError>,
    grammars: Arc<Grammars>,
    weights: Weights<B>,
    rope: Rope<B::Buffer>,
    local_rope: Option<Rope<B::Buffer>>,
    shapes: Vec<AttentionShape>,
    pub(crate) block_size: u32,
    pub(crate) buffers: Buffers<B>,
    pub(crate) inputs: Inputs,
    /// When this is one of several ranks.
    parallel: Option<Parallel<B>>,
}

/// What one of several ranks has beside its part of the model.
struct Parallel<B: Backend> {
    rank: Rank<B>,
    /// `[samples, vocab]` of the whole vocabulary; used on rank 0.
    logits: B::Buffer,
}

/// Activations, `[rows, width]`.
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
    /// `[samples, hidden]` and `[samples, vocab]`.
    last: B::Buffer,
    pub(crate) logits: B::Buffer,
}

/// A step's inputs, reused.
#[derive(Default)]
pub(crate) struct Inputs {
    pub ids: Vec<u32>,
    /// One per layer group.
    pub batches: Vec<Ragged>,
    /// Rows whose logits are wanted.
    pub sampled: Vec<u32>,
    /// How many of them there were before rows were padded, if they were.
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
        // One rank has nothing to ask of others.
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

    /// What it runs on, for logs.
    pub fn backend_name(&self) -> String {
        self.backend.name()
    }

    /// Compiles constraints for its sampler, on any thread.
    pub fn grammars(&self) -> Arc<Grammars> {
        Arc::clone(&self.grammars)
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Which of the ranks this is, from 0.
    pub(crate) fn rank(&self) -> u32 {
        self.parallel.as_ref().map_or(0, |parallel| parallel.rank.sharding.rank())
    }

    /// How many there are.
    pub(crate) fn ranks(&self) -> u32 {
        self.parallel.as_ref().map_or(1, |parallel| parallel.rank.sharding.ranks())
    }

    /// Tells the other ranks that this one leaves the step.
    pub(crate) fn abort(&self, why: &RunError) {
        self.parallel.iter().for_each(|parallel| parallel.rank.collective.abort(why));
    }

    /// Gets the ranks ready for a step, while none is in one.
    pub(crate) fn reset(&mut self) -> Result<(), RunError> {
        self.parallel.as_mut().map_or(Ok(()), |parallel| parallel.rank.collective.reset())
    }

    /// Runs `inputs` through all layers; `on_layer` follows the store of each layer's K and V, on all ranks. A padded step goes on to the
    /// logits of its rows and to these draws, and nobody is told of its layers: the backend may do it as a whole.
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

    /// Logits of `count` of the sampled rows from `first` on, into the logits buffer.
    pub(crate) fn logits(&mut self, first: usize, count: usize) -> Result<(), RunError> {
        let Decoder { config, backend, weights, buffers, inputs, parallel, .. } = self;
        logits(config, backend, weights, buffers, &inputs.sampled[first..first + count]);
        let Some(Parallel { rank, logits }) = parallel else { return Ok(()) };
        rank.collective.gather(backend, &buffers.logits, count, rank.sharding.vocab_splits(), logits)
    }

    /// One row of the logits buffer, to the host.
    pub(crate) fn read_logits(&mut self, row: usize) {
        let vocab = self.inputs.logits.len();
        let logits = self.parallel.as_ref().map_or(&self.buffers.logits, |parallel| &parallel.logits);
        self.backend.read(logits, row * vocab, &mut self.inputs.logits);
    }

    /// The logits buffer, `[samples, vocab]`, and the backend it is on.
    pub(crate) fn logits_buffer(&mut self) -> (&mut B, &mut B::Buffer) {
        let own = &mut self.buffers.logits;
        (&mut self.backend, self.parallel.as_mut().map_or(own, |parallel| &mut parallel.logits))
    }
}

/// `x` becomes its sum over the ranks.
fn sum<B: Backend>(
    parallel: &mut Option<Parallel<B>>,
    backend: &mut B,
    x: &mut B::Buffer,
    elements: usize,
) -> Result<(), RunError> {
    let Some(Parallel { rank, .. }) = parallel else { return Ok(()) };
    rank.collective.all_reduce(backend, x, elements)
}

/// Logits of these rows of the residual stream.
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
    /// Whether no layer is before it, of which the residual stream lacks something.
    first: bool,
    /// Whether the store of its K and V is published and told of.
    told: bool,
}

impl<B: Backend> Pass<'_, B> {
    /// Leaves in `b.out` what the residual stream lacks.
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
            // Whoever adds to a sum has stored its heads before.
            stored();
        }
        if let Some(norm) = &layer.post_attn_norm {
            backend.rms_norm(norm, &mut b.out, rows);
        }
        Ok(())
    }

    /// Adds to the residual stream what it lacks, and leaves its own share in `b.out`.
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
        // In groups with sinks each query is there twice.
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
