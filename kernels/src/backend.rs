//! The trait [`Backend`]: the operations a decoder step is made of, over preallocated device buffers.
//!
//! Nothing allocates inside a step. Activations are f32, row-major `[tokens, width]`. K and V are read only from the
//! pool, so that everyone sees the same rounded values (I1). Widths are multiples of 8.

use baton_types::{BlockId, TokenOut};

use crate::{Draw, KernelError, WeightSource};

/// Tokens of one sequence in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First row of the batch's buffers.
    pub row: usize,
    /// Rows, at least 1.
    pub len: usize,
    /// Position of the first row in its sequence.
    pub start: usize,
    /// First entry of its block table in [`Ragged::blocks`].
    pub table: usize,
    /// Tokens between its sinks and its window whose blocks are not in the table.
    pub hidden: usize,
}

/// Most query heads that may share one KV head.
pub const MAX_HEADS_PER_KV_HEAD: usize = 64;

/// Rows of a span that one attention task takes.
pub const TILE_ROWS: usize = 16;

/// The ragged batch of one layer group: which rows belong to which sequence, and where its KV lies. Reused every step.
#[derive(Default, Debug)]
pub struct Ragged {
    spans: Vec<Span>,
    blocks: Vec<BlockId>,
    /// (span, first row inside it) of every tile.
    tiles: Vec<(usize, usize)>,
    rows: usize,
}

impl Ragged {
    /// With room for a batch of that many rows and table entries.
    pub fn with_capacity(rows: usize, blocks: usize) -> Self {
        Ragged {
            spans: Vec::with_capacity(rows),
            blocks: Vec::with_capacity(blocks),
            tiles: Vec::with_capacity(rows),
            rows: 0,
        }
    }

    /// Empties it, keeping its memory.
    pub fn clear(&mut self) {
        self.spans.clear();
        self.blocks.clear();
        self.tiles.clear();
        self.rows = 0;
    }

    /// (spans, table entries) it has room for, so that what follows from it can have as much.
    pub fn capacity(&self) -> (usize, usize) {
        (self.spans.capacity(), self.blocks.capacity())
    }

    /// Adds the next `len` rows: positions `start..start + len` of a sequence with this block table.
    pub fn push(&mut self, start: usize, len: usize, table: &[BlockId]) {
        self.push_around(start, len, (&[], table), 0);
    }

    /// The same with a table in two parts: the group's sinks, and what lies behind `hidden` tokens, whole blocks of them, that
    /// the window of `start` has passed.
    pub fn push_around(&mut self, start: usize, len: usize, table: (&[BlockId], &[BlockId]), hidden: usize) {
        let span = self.spans.len();
        self.tiles.extend((0..len).step_by(TILE_ROWS).map(|first| (span, first)));
        self.spans.push(Span { row: self.rows, len, start, table: self.blocks.len(), hidden });
        self.blocks.extend_from_slice(table.0);
        self.blocks.extend_from_slice(table.1);
        self.rows += len;
    }

    /// Sequences of the batch.
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Block tables, one after the other.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Attention tiles.
    pub fn tiles(&self) -> &[(usize, usize)] {
        &self.tiles
    }

    /// Rows that belong to no sequence are added, up to `rows` in all: operations may compute them, and nobody looks at what comes of
    /// it; the pool is not touched for them.
    pub fn pad_to(&mut self, rows: usize) {
        self.rows = self.rows.max(rows);
    }

    /// Rows that belong to no sequence.
    pub fn padding(&self) -> usize {
        self.rows - self.spans.last().map_or(0, |last| last.row + last.len)
    }

    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        self.rows
    }
}

/// What a layer's attention looks like.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionShape {
    /// Layer group in the pool's layout.
    pub group: usize,
    /// Layer inside the group.
    pub layer: usize,
    /// Query heads; a multiple of the group's KV heads.
    pub heads: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
}

/// The gate's non-linearity.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Gate {
    /// x · sigmoid(x)
    Silu,
    /// GELU, tanh approximation.
    GeluTanh,
}

/// Rotary embedding table: cos and sin of `[position, head_dim / 2]`.
pub struct Rope<B> {
    /// Cosines.
    pub cos: B,
    /// Sines.
    pub sin: B,
}

/// RMS norm over rows of a width: `x / sqrt(mean(x²) + eps) · weight`.
pub struct Norm<B> {
    /// `[width]`
    pub weight: B,
    /// Added to the mean square.
    pub eps: f32,
}

/// Rows that products are made of.
pub struct Input<'a, T> {
    /// `[rows, width]`
    pub x: &'a mut T,
    /// How many rows.
    pub rows: usize,
    /// What is done to each row first.
    pub first: First<'a, T>,
}

/// What rows `x[t]` become on their way into products.
pub enum First<'a, T> {
    /// Themselves.
    Nothing,
    /// `norm(x[t])`; `x` stays as it is.
    Norm(&'a Norm<T>),
    /// `x[t] += y[t]`, which stays, and of that the norm.
    AddNorm(&'a T, &'a Norm<T>),
    /// `act(x[t]) · up[t]`; what `x` holds afterwards is worth nothing.
    Gate(Gate, &'a T),
}

impl<'a, T> First<'a, T> {
    /// The norm, if there is one.
    pub fn norm(&self) -> Option<&'a Norm<T>> {
        match *self {
            First::Norm(norm) | First::AddNorm(_, norm) => Some(norm),
            First::Nothing | First::Gate(..) => None,
        }
    }

    /// What a row is brought together with.
    pub fn beside(&self) -> Option<&'a T> {
        match *self {
            First::AddNorm(other, _) | First::Gate(_, other) => Some(other),
            First::Nothing | First::Norm(_) => None,
        }
    }
}

impl<T> Clone for First<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for First<'_, T> {}

/// One of the products of an input.
pub struct Product<'a, W, T> {
    /// Outputs times inputs.
    pub weight: &'a W,
    /// Added to every row.
    pub bias: Option<&'a T>,
    /// `[rows, outputs]`
    pub out: &'a mut T,
}

/// Most products of one input.
pub const MAX_PRODUCTS: usize = 3;

/// The most that steps may need, for which room is made once.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Room {
    /// Rows of a step.
    pub rows: usize,
    /// Inputs of its widest product.
    pub cols: usize,
    /// Query heads of a layer.
    pub heads: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Block-table entries of a step, in each layer group.
    pub table_entries: usize,
    /// Rows of logits that tokens are chosen from together.
    pub samples: usize,
    /// Logits of a row.
    pub vocab: usize,
}

/// In place of a token's id, for `embed`: what the step submitted before this one drew as number `id & !FOLLOWS`.
pub const FOLLOWS: u32 = 1 << 31;

/// What the operations of a step are given from the host.
#[derive(Clone, Copy, Debug)]
pub struct StepInputs<'a> {
    /// Token ids, for `embed`.
    pub ids: &'a [u32],
    /// Rows whose logits are computed, for `gather_rows`.
    pub sampled: &'a [u32],
    /// By layer group.
    pub batches: &'a [Ragged],
    /// Query heads of a layer.
    pub heads: usize,
    /// Rows, all of one token each and sampled, were padded to as many as [`Backend::padded`] says.
    pub padded: bool,
    /// Of a padded step whose tokens are all drawn in it: a draw for each row, in their order, without mask or changes.
    pub draws: &'a [Draw<'a>],
}

/// What all of them are, or the first error.
pub(crate) fn all<T, E, const N: usize>(results: [Result<T, E>; N]) -> Result<[T; N], E> {
    let mut found = Vec::with_capacity(N);
    for result in results {
        found.push(result?);
    }
    Ok(found.try_into().unwrap_or_else(|_| unreachable!("as many as there were")))
}

/// A device that runs decoder steps.
pub trait Backend: Send + Sized {
    /// Activations in the device's memory: f32, but for [`Backend::operand`].
    type Buffer: Send;
    /// A weight matrix on the device.
    type Weight: Send;

    /// For logs.
    fn name(&self) -> String;
    /// Memory for `elements` f32, zeroed.
    fn buffer(&self, elements: usize) -> Result<Self::Buffer, KernelError>;
    /// A buffer holding `values`.
    fn upload(&self, values: &[f32]) -> Result<Self::Buffer, KernelError>;
    /// A weight matrix.
    fn weight(&mut self, source: &WeightSource<'_>) -> Result<Self::Weight, KernelError>;
    /// Memory for `elements` of what [`Backend::attention`] gives to products that nothing else comes first of; nothing else takes it. It
    /// may have fewer bits than f32 where products take no more.
    fn operand(&self, elements: usize) -> Result<Self::Buffer, KernelError> {
        self.buffer(elements)
    }
    /// Memory for `rows` rows of each of these widths, zeroed, of the products of one input: a backend may lay a row of each side by side.
    /// One that serves groups with sinks does not.
    fn outputs<const N: usize>(&self, rows: usize, widths: [usize; N]) -> Result<[Self::Buffer; N], KernelError> {
        all(widths.map(|width| self.buffer(rows * width)))
    }
    /// A weight matrix that only products read, so that a backend may keep it in fewer bits if it is told to.
    fn linear(&mut self, source: &WeightSource<'_>) -> Result<Self::Weight, KernelError> {
        self.weight(source)
    }
    /// Such matrices of the products of one input, which a backend may do as one.
    fn linears<const N: usize>(&mut self, sources: [&WeightSource<'_>; N]) -> Result<[Self::Weight; N], KernelError> {
        all(sources.map(|source| self.linear(source)))
    }
    /// Bytes a weight matrix takes on the device.
    fn weight_bytes(&self, weight: &Self::Weight) -> usize;
    /// Elements a buffer holds.
    fn elements(&self, buffer: &Self::Buffer) -> usize;
    /// Makes room for steps; those within it allocate nothing.
    fn reserve(&mut self, room: &Room) -> Result<(), KernelError>;
    /// How many rows, at most `most`, a step of `rows` single rows is to be padded to, so that [`Backend::step`] can do again what it did
    /// for another; None: such steps are nothing special.
    fn padded(&self, _rows: usize, _most: usize) -> Option<usize> {
        None
    }
    /// Does the operations of `run`, whose inputs are these. A padded step of a size that was there before may be done without `run`:
    /// it must be the same operations, on the same buffers and weights, for each step of a size. Neither publishes nor reads.
    fn step(&mut self, _inputs: &StepInputs<'_>, mut run: impl FnMut(&mut Self)) {
        run(self);
    }
    /// What was stored in the pool so far is there for those who read its memory from outside.
    fn publish(&mut self);
    /// Waits until all operations are done, those before a failure too; what went wrong with one of them since the last time. After a
    /// failure those that follow are not done, and what [`Backend::read`] gives is worth nothing.
    fn finish(&mut self) -> Result<(), KernelError>;
    /// Why it can compute nothing any more, asked after something has failed; None where the next step may go well.
    fn lost(&mut self) -> Option<KernelError> {
        None
    }
    /// Ends a step: all its operations were asked for. What went wrong with one of them, as far as that is known; then there is nothing
    /// to collect, but operations before that one may be under way: [`Backend::drain`]. At most two may be submitted and not collected.
    fn submit(&mut self) -> Result<(), KernelError> {
        self.finish()
    }
    /// Waits for the step that was submitted first of those not collected; what it drew is there until the next is collected. Even when
    /// something went wrong with it, it is collected; then what it does may be under way still, too.
    fn collect(&mut self) -> Result<(), KernelError> {
        Ok(())
    }
    /// After a failure: forgets what went wrong with the step that is not submitted, and waits until no operation is under way, so that
    /// nothing reads or writes the pool any more (I3).
    ///
    /// # Errors
    /// When that cannot be waited for. Then nobody knows what is under way, and nothing may be computed any more.
    fn drain(&mut self) -> Result<(), KernelError> {
        // Those of one that waits in `submit` are over when that returns.
        self.finish().or(Ok(()))
    }
    /// Whether [`Backend::submit`] waits for nothing, so that a step can be submitted behind another, with ids that [`FOLLOWS`] it.
    fn overlaps(&self) -> bool {
        false
    }
    /// The first `out.len()` elements from `offset` on, to the host.
    fn read(&mut self, buffer: &Self::Buffer, offset: usize, out: &mut [f32]);

    /// Copies a block of the pool to another, in all layers of the group.
    fn copy_block(&mut self, group: usize, from: BlockId, to: BlockId);
    /// `out[t] = table[ids[t]] · scale`
    fn embed(&mut self, table: &Self::Weight, ids: &[u32], scale: f32, out: &mut Self::Buffer);
    /// `x[r] = norm(x[r])` for `rows` rows; heads are rows when their dimensions are normed.
    fn rms_norm(&mut self, norm: &Norm<Self::Buffer>, x: &mut Self::Buffer, rows: usize);
    /// `x += y` over the first `elements`, where no product follows that would do it.
    fn add(&mut self, x: &mut Self::Buffer, y: &Self::Buffer, elements: usize);
    /// `out[t] = weight · x[t] (+ bias)` for each product, up to [`MAX_PRODUCTS`] of them, and each row of the input.
    fn matmul<const N: usize>(
        &mut self,
        input: Input<'_, Self::Buffer>,
        products: [Product<'_, Self::Weight, Self::Buffer>; N],
    );
    /// Rotates q `[rows, heads, head_dim]` in place and k on its way into the pool; stores k and v (`[rows, kv_heads,
    /// head_dim]`), rounded to the pool's type, at their positions' slots.
    ///
    /// In a group with sinks q has room for twice the rows. The second half gets the queries as the sinks see them: rotated to
    /// where they stand within the cache, `sinks + window - 1` at most. A rotated key meets a rotated query at the difference
    /// of their positions, so the window's keys need nothing of the kind.
    fn rope_and_store_kv(
        &mut self,
        shape: AttentionShape,
        batch: &Ragged,
        rope: &Rope<Self::Buffer>,
        q: &mut Self::Buffer,
        k: &Self::Buffer,
        v: &Self::Buffer,
    );
    /// Causal attention of every row over its sequence's KV in the pool: the group's sinks and its window.
    fn attention(&mut self, shape: AttentionShape, batch: &Ragged, q: &Self::Buffer, out: &mut Self::Buffer);
    /// `out[i] = x[rows[i]]`, rows of `width`.
    fn gather_rows(&mut self, x: &Self::Buffer, width: usize, rows: &[u32], out: &mut Self::Buffer);
    /// Whether it chooses tokens from rows of `vocab` logits ([`Backend::draw`]). One whose memory is the host's leaves that to its
    /// caller.
    fn samples(&self, _vocab: usize) -> bool {
        false
    }
    /// Chooses a token for each draw from rows of `logits` `[.., vocab]`, which it may overwrite. A step's draws are counted from 0. Only of
    /// one that [`Backend::samples`].
    fn draw(&mut self, _logits: &mut Self::Buffer, _vocab: usize, _draws: &[Draw<'_>]) {}
    /// What the step that was collected last drew, by its number: token `index` of its answer, with `top` log probabilities if any are
    /// wanted.
    fn drawn(&self, _number: u32, index: u32, _top: Option<u32>) -> TokenOut {
        TokenOut { index, ..TokenOut::default() }
    }
}
