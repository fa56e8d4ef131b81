//! Where a step's time goes: [`Profiled`], a [`Backend`] around another one that times each operation and counts what it
//! moves and computes.
//!
//! For benchmarks. A decoder over a plain backend has none of this compiled in, so measuring costs nothing when it is off. Knows
//! nothing of models: matrix products are told apart by the type and shape of their weights.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_types::{BlockId, KvLayout, TokenOut, WeightDtype};

use crate::WeightSource;
use crate::backend::{AttentionShape, Backend, First, Input, MAX_PRODUCTS, Norm, Product, Ragged, Room, Rope};
use crate::{Draw, KernelError};

/// A kind of operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Products of one input, with what comes first: a residual sum and a norm, or the gated activation.
    Matmul {
        /// Element type in the file and outputs of each weight.
        parts: [Option<(WeightDtype, usize)>; MAX_PRODUCTS],
        /// Inputs.
        cols: usize,
    },
    /// Paged attention.
    Attention,
    /// RMS norms that no product starts with.
    Norm,
    /// Rotary embedding, and K and V into the pool.
    RopeAndStore,
    /// Embedding, the last residual sum, gathered rows, logits to the host, blocks of the pool.
    Copies,
    /// Choosing tokens; on the host the decoder's caller adds it.
    Sampling,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Operation::Matmul { parts, cols } => {
                f.write_str("matmul ")?;
                for (i, (dtype, rows)) in parts.iter().flatten().enumerate() {
                    write!(f, "{}{dtype} {rows}", if i > 0 { " + " } else { "" })?;
                }
                write!(f, " x {cols}")
            }
            Operation::Attention => f.write_str("attention"),
            Operation::Norm => f.write_str("norm"),
            Operation::RopeAndStore => f.write_str("rope + store"),
            Operation::Copies => f.write_str("copies"),
            Operation::Sampling => f.write_str("sampling"),
        }
    }
}

/// What the calls of one kind took and did.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct Tally {
    /// Calls.
    pub calls: u64,
    /// Time inside them.
    pub time: Duration,
    /// Bytes that had to move at least once a call: weights as packed, K and V that rows see (what sequences share, once), activations
    /// in and out.
    pub bytes: u64,
    /// Multiplications and additions, of products and attention only.
    pub arithmetic: u64,
}

impl Tally {
    fn add(&mut self, more: Tally) {
        self.calls += more.calls;
        self.time += more.time;
        self.bytes += more.bytes;
        self.arithmetic += more.arithmetic;
    }
}

/// Tallies of all kinds that occurred.
#[derive(Clone, Default, Debug)]
pub struct Profile(Vec<(Operation, Tally)>);

impl Profile {
    /// Kinds with their tallies, in the order in which they were first called.
    pub fn tallies(&self) -> impl Iterator<Item = (Operation, Tally)> + '_ {
        self.0.iter().copied().filter(|(_, tally)| tally.calls > 0)
    }

    fn place(&mut self, operation: Operation) -> usize {
        self.0.iter().position(|(known, _)| *known == operation).unwrap_or_else(|| {
            self.0.push((operation, Tally::default()));
            self.0.len() - 1
        })
    }
}

/// A [`Profile`] that the backend adds to and others read.
#[derive(Clone, Default, Debug)]
pub struct SharedProfile(Arc<Mutex<Profile>>);

impl SharedProfile {
    /// What was counted since the last time, which is forgotten.
    pub fn take(&self) -> Profile {
        let mut profile = self.lock();
        let taken = profile.clone();
        profile.0.iter_mut().for_each(|(_, tally)| *tally = Tally::default());
        taken
    }

    /// Adds what calls took and did.
    pub fn add(&self, operation: Operation, more: Tally) {
        let mut profile = self.lock();
        let place = profile.place(operation);
        profile.0[place].1.add(more);
    }

    fn lock(&self) -> MutexGuard<'_, Profile> {
        // Plain numbers: a panic elsewhere leaves them usable.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A weight with what a product with it costs.
pub struct ProfiledWeight<W> {
    weight: W,
    dtype: WeightDtype,
    rows: usize,
    cols: usize,
    bytes: u64,
}

/// Times and counts another backend's operations.
pub struct Profiled<B> {
    inner: B,
    layout: KvLayout,
    profile: SharedProfile,
    /// By block: the last call that counted tokens of it, and how many.
    counted: Vec<(u64, u64)>,
    calls: u64,
}

/// Bytes of so many f32.
fn floats(count: usize) -> u64 {
    count as u64 * 4
}

impl<B> Profiled<B> {
    /// Around `inner`, whose pool has this layout.
    pub fn new(inner: B, layout: KvLayout, profile: SharedProfile) -> Self {
        Profiled { inner, layout, profile, counted: Vec::new(), calls: 0 }
    }

    /// The backend inside.
    pub fn inner(&self) -> &B {
        &self.inner
    }

    fn timed(&mut self, operation: Operation, bytes: u64, arithmetic: u64, run: impl FnOnce(&mut B)) {
        let started = Instant::now();
        run(&mut self.inner);
        let time = started.elapsed();
        self.profile.add(operation, Tally { calls: 1, time, bytes, arithmetic });
    }

    fn head_dim(&self, shape: AttentionShape) -> usize {
        self.layout.groups[shape.group].head_dim as usize
    }

    /// Bytes of K and V of one token in one layer.
    fn token_bytes(&self, shape: AttentionShape) -> u64 {
        (self.layout.block_bytes(shape.group) / self.layout.block_size as usize) as u64
    }

    /// (tokens whose K and V are read at least once, pairs of a row and a token it sees)
    fn seen(&mut self, shape: AttentionShape, batch: &Ragged) -> (u64, u64) {
        let seen = &self.layout.groups[shape.group];
        let (window, sinks) = (seen.window.map_or(usize::MAX, |w| w as usize), seen.sinks as usize);
        self.calls += 1;
        batch.spans().iter().fold((0, 0), |(tokens, pairs), span| {
            let end = span.start + span.len;
            let first = (span.start + 1).saturating_sub(window);
            let size = self.layout.block_size as usize;
            let table = span.table.wrapping_sub(span.hidden / size);
            let mut new = self.count(batch.blocks(), table, first.max(sinks).min(end)..end);
            new += self.count(batch.blocks(), span.table, 0..sinks.min(end));
            let more: usize = (span.start..end).map(|position| (position + 1).min(window.saturating_add(sinks))).sum();
            (tokens + new, pairs + more as u64)
        })
    }

    /// Of these tokens of a table, those that no other sequence of this call has counted.
    fn count(&mut self, blocks: &[BlockId], table: usize, tokens: Range<usize>) -> u64 {
        let size = self.layout.block_size as usize;
        let mut new = 0;
        for at in tokens.start / size..tokens.end.div_ceil(size) {
            let block = blocks[table.wrapping_add(at)].0 as usize;
            let here = (tokens.end.min((at + 1) * size) - tokens.start.max(at * size)) as u64;
            if self.counted.len() <= block {
                self.counted.resize(block + 1, (0, 0));
            }
            let (call, counted) = &mut self.counted[block];
            let before = if *call == self.calls { *counted } else { 0 };
            (*call, *counted) = (self.calls, before.max(here));
            new += here.saturating_sub(before);
        }
        new
    }
}

impl<B: Backend> Profiled<B> {
    fn profiled(&self, weight: B::Weight, source: &WeightSource<'_>) -> ProfiledWeight<B::Weight> {
        let bytes = self.inner.weight_bytes(&weight) as u64;
        ProfiledWeight { weight, dtype: source.dtype, rows: source.rows, cols: source.cols, bytes }
    }
}

impl<B: Backend> Backend for Profiled<B> {
    type Buffer = B::Buffer;
    type Weight = ProfiledWeight<B::Weight>;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn buffer(&self, elements: usize) -> Result<B::Buffer, KernelError> {
        self.inner.buffer(elements)
    }

    fn operand(&self, elements: usize) -> Result<B::Buffer, KernelError> {
        self.inner.operand(elements)
    }

    fn outputs<const N: usize>(&self, rows: usize, widths: [usize; N]) -> Result<[B::Buffer; N], KernelError> {
        self.inner.outputs(rows, widths)
    }

    fn upload(&self, values: &[f32]) -> Result<B::Buffer, KernelError> {
        self.inner.upload(values)
    }

    fn weight(&mut self, source: &WeightSource<'_>) -> Result<Self::Weight, KernelError> {
        let weight = self.inner.weight(source)?;
        Ok(self.profiled(weight, source))
    }

    fn linear(&mut self, source: &WeightSource<'_>) -> Result<Self::Weight, KernelError> {
        let weight = self.inner.linear(source)?;
        Ok(self.profiled(weight, source))
    }

    fn linears<const N: usize>(&mut self, sources: [&WeightSource<'_>; N]) -> Result<[Self::Weight; N], KernelError> {
        let mut weights = self.inner.linears(sources)?.into_iter();
        Ok(sources.map(|source| {
            let weight = weights.next().unwrap_or_else(|| unreachable!("one for each"));
            self.profiled(weight, source)
        }))
    }

    fn weight_bytes(&self, weight: &Self::Weight) -> usize {
        self.inner.weight_bytes(&weight.weight)
    }

    fn elements(&self, buffer: &B::Buffer) -> usize {
        self.inner.elements(buffer)
    }

    fn reserve(&mut self, room: &Room) -> Result<(), KernelError> {
        self.inner.reserve(room)
    }

    fn publish(&mut self) {
        self.inner.publish();
    }

    fn finish(&mut self) -> Result<(), KernelError> {
        self.inner.finish()
    }

    fn lost(&mut self) -> Option<KernelError> {
        self.inner.lost()
    }

    fn drain(&mut self) -> Result<(), KernelError> {
        self.inner.drain()
    }

    fn read(&mut self, buffer: &B::Buffer, offset: usize, out: &mut [f32]) {
        self.timed(Operation::Copies, floats(2 * out.len()), 0, |b| b.read(buffer, offset, out));
    }

    fn copy_block(&mut self, group: usize, from: BlockId, to: BlockId) {
        let bytes = 2 * self.layout.block_bytes_all_layers(group) as u64;
        self.timed(Operation::Copies, bytes, 0, |b| b.copy_block(group, from, to));
    }

    fn embed(&mut self, table: &Self::Weight, ids: &[u32], scale: f32, out: &mut B::Buffer) {
        let bytes = floats(ids.len() * table.cols);
        self.timed(Operation::Copies, bytes, 0, |b| b.embed(&table.weight, ids, scale, out));
    }

    fn rms_norm(&mut self, norm: &Norm<B::Buffer>, x: &mut B::Buffer, rows: usize) {
        let bytes = 2 * floats(rows * self.inner.elements(&norm.weight));
        self.timed(Operation::Norm, bytes, 0, |b| b.rms_norm(norm, x, rows));
    }

    fn add(&mut self, x: &mut B::Buffer, y: &B::Buffer, elements: usize) {
        self.timed(Operation::Copies, floats(3 * elements), 0, |b| b.add(x, y, elements));
    }

    fn matmul<const N: usize>(
        &mut self,
        input: Input<'_, B::Buffer>,
        products: [Product<'_, Self::Weight, B::Buffer>; N],
    ) {
        let cols = products.first().map_or(0, |first| first.weight.cols);
        // What is added is read, and the sum is written; what gates is read.
        let passes = match input.first {
            First::Nothing | First::Norm(_) => 1,
            First::Gate(..) => 2,
            First::AddNorm(..) => 3,
        };
        let (mut parts, mut bytes, mut arithmetic) = ([None; MAX_PRODUCTS], floats(passes * input.rows * cols), 0);
        for (part, Product { weight: w, .. }) in parts.iter_mut().zip(&products) {
            *part = Some((w.dtype, w.rows));
            bytes += w.bytes + floats(input.rows * w.rows);
            arithmetic += 2 * (input.rows * w.rows * w.cols) as u64;
        }
        let products = products.map(|p| Product { weight: &p.weight.weight, bias: p.bias, out: p.out });
        self.timed(Operation::Matmul { parts, cols }, bytes, arithmetic, |b| b.matmul(input, products));
    }

    fn rope_and_store_kv(
        &mut self,
        shape: AttentionShape,
        batch: &Ragged,
        rope: &Rope<B::Buffer>,
        q: &mut B::Buffer,
        k: &B::Buffer,
        v: &B::Buffer,
    ) {
        let kv = 2 * self.layout.groups[shape.group].kv_heads as usize;
        let activations = floats(batch.rows() * self.head_dim(shape) * (2 * shape.heads + kv));
        let bytes = activations + batch.rows() as u64 * self.token_bytes(shape);
        self.timed(Operation::RopeAndStore, bytes, 0, |b| b.rope_and_store_kv(shape, batch, rope, q, k, v));
    }

    fn attention(&mut self, shape: AttentionShape, batch: &Ragged, q: &B::Buffer, out: &mut B::Buffer) {
        let (tokens, pairs) = self.seen(shape, batch);
        let width = shape.heads * self.head_dim(shape);
        let bytes = tokens * self.token_bytes(shape) + floats(2 * batch.rows() * width);
        // A score and a weighted sum: two products of a head's width for every pair and head.
        let arithmetic = 4 * width as u64 * pairs;
        self.timed(Operation::Attention, bytes, arithmetic, |b| b.attention(shape, batch, q, out));
    }

    fn gather_rows(&mut self, x: &B::Buffer, width: usize, rows: &[u32], out: &mut B::Buffer) {
        self.timed(Operation::Copies, floats(2 * rows.len() * width), 0, |b| b.gather_rows(x, width, rows, out));
    }

    fn samples(&self, vocab: usize) -> bool {
        self.inner.samples(vocab)
    }

    fn draw(&mut self, logits: &mut B::Buffer, vocab: usize, draws: &[Draw<'_>]) {
        let bytes = floats(draws.len() * vocab);
        self.timed(Operation::Sampling, bytes, 0, |b| b.draw(logits, vocab, draws));
    }

    fn drawn(&self, number: u32, index: u32, top: Option<u32>) -> TokenOut {
        self.inner.drawn(number, index, top)
    }

    fn submit(&mut self) -> Result<(), KernelError> {
        self.inner.submit()
    }

    fn collect(&mut self) -> Result<(), KernelError> {
        self.inner.collect()
    }

    fn overlaps(&self) -> bool {
        self.inner.overlaps()
    }
}
