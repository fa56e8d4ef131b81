//! [`FakeModel`]: a cheap model that notices every mistake, for tests and the simulator.
//!
//! It stores the "KV" of a token as bytes in a real pool layout, through the block tables. Each slot is a function of
//! the token, its position, the layer and the stored slot before it. The next token is a hash of everything attention
//! would read back. So the answer changes with a wrong table, a stale, shared or half-transferred block, a lost token,
//! a wrong index or a different seed. It does not change with batching, chunking or the choice of blocks (I1). A breach
//! of the contract that the model can see directly is a [`RunError`].

mod memory;
mod validate;

use std::collections::VecDeque;

use baton_kv_cache::{BlockCopy, CacheConfig, KvPools, Tables};
use baton_types::{
    BlockId, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry, SamplingParams, SeqId, TokenOut, hash_bytes,
};

use crate::{Batch, ModelRunner, Row, RunError, Sample, Score};
pub use memory::{KvMemory, SharedMemory};

/// A small layout with every feature: two groups, one with a window, several layers, planes and heads.
pub fn tiny_layout(block_size: u32) -> KvLayout {
    let group = |layers: &[u32], kv_heads, window| KvGroup {
        layers: layers.to_vec(),
        planes: 2,
        kv_heads,
        head_dim: 4,
        window,
        sinks: 0,
    };
    KvLayout {
        version: PROTOCOL_VERSION,
        model: 0xfa4e,
        dtype: KvDtype::F16,
        block_size,
        groups: vec![group(&[0, 2], 1, None), group(&[1], 2, Some(5))],
    }
}

/// [`tiny_layout`] with attention sinks: every group has a window, and those of full attention keep a block of sinks.
pub fn sinks_layout(block_size: u32) -> KvLayout {
    tiny_layout(block_size).with_sinks(block_size, 7)
}

/// What [`FakeModel`] answers to a request that runs alone, without an engine: the reference every route must match (I1).
pub fn answer(
    layout: &KvLayout,
    vocab: u32,
    prompt: &[u32],
    params: &SamplingParams,
) -> Result<Vec<TokenOut>, RunError> {
    let most = prompt.len() as u32 + params.max_tokens;
    let (geometry, tables) = pool_for(layout, most)?;
    let mut model = FakeModel::new(geometry, vocab);
    let (mut tokens, mut answer, mut start) = (prompt.to_vec(), Vec::new(), 0);
    while answer.len() < params.max_tokens as usize {
        let (prompt, generated) = tokens.split_at(prompt.len());
        let sample = Some(Sample { params, index: answer.len() as u32, prompt, generated });
        let row = Row {
            seq: SeqId(0),
            tokens: &tokens[start..],
            follows: None,
            start: start as u32,
            tables: tables.as_slice(),
            score: None,
            sample,
        };
        model.run(&Batch { rows: &[row], copies: &[] }, &mut |_| {}, &mut answer)?;
        start = tokens.len();
        tokens.extend(answer.last().map(|token| token.id));
        if tokens.last().is_some_and(|id| params.stop_token_ids.contains(id)) {
            break;
        }
    }
    Ok(answer)
}

/// A pool for so many tokens, and tables that cover them.
fn pool_for(layout: &KvLayout, tokens: u32) -> Result<(PoolGeometry, Tables), RunError> {
    let geometry = PoolGeometry::uniform(layout.clone(), layout.blocks_for(tokens as usize) as u32);
    let tables = KvPools::new(&geometry, CacheConfig::default()).and_then(|mut pools| pools.allocate(tokens));
    Ok((geometry, tables.map_err(|error| RunError(error.to_string()))?))
}

/// Log probabilities of a prompt that is computed alone, without an engine, as [`SamplingParams::prompt_logprobs`] asks for
/// them: the reference every route must match (I1).
pub fn scores(layout: &KvLayout, vocab: u32, prompt: &[u32], top: u32) -> Result<Vec<TokenOut>, RunError> {
    if prompt.len() < 2 {
        return Ok(Vec::new());
    }
    let (geometry, tables) = pool_for(layout, prompt.len() as u32)?;
    let row = Row {
        seq: SeqId(0),
        tokens: prompt,
        follows: None,
        start: 0,
        tables: tables.as_slice(),
        score: Some(Score { after: 0, tokens: &prompt[1..], top }),
        sample: None,
    };
    let mut out = Vec::new();
    let batch = Batch { rows: &[row], copies: &[] };
    FakeModel::new(geometry, vocab).run(&batch, &mut |_| {}, &mut out)?;
    Ok(out)
}

/// The fake model; see the module's documentation.
#[derive(Debug)]
pub struct FakeModel<M = Vec<u8>> {
    geometry: PoolGeometry,
    vocab: u32,
    memory: M,
    /// Group and index in the group of each layer.
    layers: Vec<(usize, usize)>,
    slot: Vec<u8>,
    /// Whether steps are computed when they are collected, not when they are launched.
    late: bool,
    pending: VecDeque<PendingStep>,
    /// Tokens that the step computed last has sampled.
    latest: Vec<TokenOut>,
}

/// A step that is not collected yet.
#[derive(Debug)]
struct PendingStep {
    rows: Vec<RowPlace>,
    copies: Vec<BlockCopy>,
    /// The tokens it sampled; `None` before it is computed.
    tokens: Option<Vec<TokenOut>>,
}

/// A row with its sequence's blocks as they were at launch.
#[derive(Debug)]
struct RowPlace {
    seq: SeqId,
    start: u32,
    /// By group.
    blocks: Vec<Vec<BlockId>>,
}

impl RowPlace {
    fn of(row: &Row<'_>) -> RowPlace {
        let blocks = row.tables.iter().map(|table| table.blocks().to_vec()).collect();
        RowPlace { seq: row.seq, start: row.start, blocks }
    }
}

impl PendingStep {
    fn of(batch: &Batch<'_>) -> PendingStep {
        let rows = batch.rows.iter().map(RowPlace::of).collect();
        PendingStep { rows, copies: batch.copies.to_vec(), tokens: None }
    }
}

impl FakeModel {
    /// A model with a zeroed pool of its own and token ids below `vocab`.
    pub fn new(geometry: PoolGeometry, vocab: u32) -> Self {
        let memory = vec![0; geometry.bytes()];
        FakeModel::with_memory(geometry, vocab, memory)
    }
}

impl<M: KvMemory> FakeModel<M> {
    /// A model over `memory`, which has `geometry.bytes()` bytes or more.
    pub fn with_memory(geometry: PoolGeometry, vocab: u32, memory: M) -> Self {
        let layout = &geometry.layout;
        let layers = (0..layout.layers() as u32).filter_map(|layer| layout.locate(layer)).collect();
        let (pending, slot, latest) = (VecDeque::new(), Vec::new(), Vec::new());
        FakeModel { geometry, vocab: vocab.max(1), memory, layers, slot, late: false, pending, latest }
    }

    /// The same model, as late as any device can be: a step is computed when it is collected, in the blocks its rows
    /// had when it was launched. Its layers are reported at launch.
    pub fn late(self) -> Self {
        FakeModel { late: true, ..self }
    }

    /// The pool's bytes.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// The pool's bytes, for a test that plays the transfer.
    pub fn memory_mut(&mut self) -> &mut M {
        &mut self.memory
    }

    /// Byte offsets of the pieces of one position's slot: one per plane and head, each of [`Self::piece_bytes`].
    fn pieces(
        &self,
        layer: usize,
        row: &RowPlace,
        position: u32,
    ) -> Result<impl Iterator<Item = usize> + use<M>, RunError> {
        let (group, inner) = self.layers[layer];
        let layout = &self.geometry.layout;
        let (at, slot) = (position / layout.block_size, position % layout.block_size);
        let block = row.blocks[group]
            .get(at as usize)
            .filter(|block| block.0 < self.geometry.blocks[group])
            .ok_or_else(|| RunError(format!("{}: position {position} has no block in group {group}", row.seq)))?;
        let base = self.geometry.block_range(group, inner, *block).start;
        let shape = &layout.groups[group];
        let (planes, heads, piece) = (shape.planes as usize, shape.kv_heads as usize, self.piece_bytes(layer));
        let (plane_bytes, slots) = (layout.plane_bytes(group), layout.block_size as usize);
        Ok((0..planes * heads)
            .map(move |at| base + at / heads * plane_bytes + (at % heads * slots + slot as usize) * piece))
    }

    fn piece_bytes(&self, layer: usize) -> usize {
        let layout = &self.geometry.layout;
        layout.dtype.row_bytes(layout.groups[self.layers[layer].0].head_dim as usize)
    }

    /// Hash of the bytes stored for one position of one layer.
    fn read(&mut self, layer: usize, row: &RowPlace, position: u32) -> Result<u64, RunError> {
        let mut slot = std::mem::take(&mut self.slot);
        slot.resize(self.piece_bytes(layer), 0);
        let mut state = layer as u64;
        for offset in self.pieces(layer, row, position)? {
            self.memory.load(offset, &mut slot);
            state = hash_bytes(state, &slot);
        }
        self.slot = slot;
        Ok(state)
    }

    fn write(&mut self, layer: usize, row: &RowPlace, position: u32, value: u64) -> Result<(), RunError> {
        let mut slot = std::mem::take(&mut self.slot);
        slot.resize(self.piece_bytes(layer), 0);
        for (at, offset) in self.pieces(layer, row, position)?.enumerate() {
            for (lane, bytes) in slot.chunks_mut(8).enumerate() {
                let word = fold(fold(value, at as u64), lane as u64).to_le_bytes();
                bytes.copy_from_slice(&word[..bytes.len()]);
            }
            self.memory.store(offset, &slot);
        }
        self.slot = slot;
        Ok(())
    }

    fn window(&self, layer: usize) -> u32 {
        self.geometry.layout.groups[self.layers[layer].0].window.unwrap_or(u32::MAX)
    }

    /// The positions that the last of `end` tokens sees, in ascending order.
    fn visible(&self, layer: usize, end: u32) -> impl Iterator<Item = u32> + use<M> {
        let first = end.saturating_sub(self.window(layer));
        let sinks = self.geometry.layout.groups[self.layers[layer].0].sinks;
        (0..sinks.min(first)).chain(first..end)
    }

    fn store_kv(&mut self, layer: usize, row: &RowPlace, tokens: &[u32]) -> Result<(), RunError> {
        for (position, token) in (row.start..).zip(tokens) {
            let mut value = fold(fold(u64::from(*token), u64::from(position)), layer as u64);
            if position > 0 && self.window(layer) > 1 {
                value = fold(value, self.read(layer, row, position - 1)?);
            }
            self.write(layer, row, position, value)?;
        }
        Ok(())
    }

    /// Hash of all that the last of `end` tokens sees.
    fn seen(&mut self, row: &RowPlace, end: u32, mut state: u64) -> Result<u64, RunError> {
        for layer in 0..self.layers.len() {
            for position in self.visible(layer, end) {
                state = fold(state, self.read(layer, row, position)?);
            }
        }
        Ok(state)
    }

    /// The most likely tokens in a state.
    fn ranked(&self, state: u64, count: u32) -> Vec<(u32, f32)> {
        let vocab = u64::from(self.vocab);
        (0..count).map(|i| fold(state, u64::from(i))).map(|s| ((s % vocab) as u32, logprob(s))).collect()
    }

    /// Scores the token in this position of a prompt.
    fn score(&mut self, row: &RowPlace, position: u32, id: u32, top: u32) -> Result<TokenOut, RunError> {
        let state = self.seen(row, position, 0)?;
        let top = self.ranked(state, top);
        let logprob = Some(logprob(fold(state, u64::from(id))));
        Ok(TokenOut { index: position, id, logprob, top, logits_digest: Some(state), failed: None })
    }

    /// Samples the token after the first `end`. `last` is the last of these where the sample lacks it.
    fn sample(
        &mut self,
        row: &RowPlace,
        end: u32,
        sample: &Sample<'_>,
        last: Option<u32>,
    ) -> Result<TokenOut, RunError> {
        let mut state = self.seen(row, end, sample.prompt.len() as u64)?;
        for id in sample.generated.iter().chain(&last) {
            state = fold(state, u64::from(*id));
        }
        if !sample.params.greedy() {
            state = fold(fold(state, sample.params.seed), u64::from(sample.index));
        }
        Ok(TokenOut {
            index: sample.index,
            id: (state % u64::from(self.vocab)) as u32,
            logprob: sample.params.top_logprobs.map(|_| logprob(state)),
            top: sample.params.top_logprobs.map_or(Vec::new(), |count| self.ranked(state, count)),
            logits_digest: sample.params.top_logprobs.map(|_| state),
            failed: None,
        })
    }

    fn copy(&mut self, copy: &BlockCopy) {
        for inner in 0..self.geometry.layout.groups[copy.group].layers.len() {
            let [from, to] = [copy.from, copy.to].map(|block| self.geometry.block_range(copy.group, inner, block));
            let mut bytes = vec![0; from.len()];
            self.memory.load(from.start, &mut bytes);
            self.memory.store(to.start, &bytes);
        }
    }

    /// Makes the copies of a step and computes its rows. Tokens and samples come from `batch`. A token that a row
    /// follows is taken from the previous step unless it is known by now.
    fn compute(
        &mut self,
        pending: &mut PendingStep,
        batch: &Batch<'_>,
        on_layer: &mut dyn FnMut(u32),
    ) -> Result<(), RunError> {
        pending.copies.iter().for_each(|copy| self.copy(copy));
        let follows = |row: &Row<'_>| row.follows.filter(|_| !self.late);
        let unknown = |row: &Row<'_>| Some(self.latest.get(follows(row)? as usize)?.id);
        let unknown: Vec<Option<u32>> = batch.rows.iter().map(unknown).collect();
        for layer in 0..self.layers.len() {
            for ((place, row), unknown) in pending.rows.iter().zip(batch.rows).zip(&unknown) {
                self.store_kv(layer, place, unknown.as_ref().map_or(row.tokens, std::slice::from_ref))?;
            }
            on_layer(layer as u32);
        }
        let mut tokens = Vec::new();
        for ((place, row), unknown) in pending.rows.iter().zip(batch.rows).zip(unknown) {
            for (token, &id) in row.score.iter().flat_map(|score| (score.after + 1..).zip(score.tokens)) {
                tokens.push(self.score(place, row.start + token, id, row.score.map_or(0, |score| score.top))?);
            }
            if let Some(sample) = &row.sample {
                tokens.push(self.sample(place, row.start + row.tokens.len() as u32, sample, unknown)?);
            }
        }
        self.latest.clone_from(&tokens);
        pending.tokens = Some(tokens);
        Ok(())
    }
}

impl<M: KvMemory> ModelRunner for FakeModel<M> {
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        self.validate(batch)?;
        let mut pending = PendingStep::of(batch);
        match self.late {
            true => (0..self.layers.len() as u32).for_each(on_layer),
            false => self.compute(&mut pending, batch, on_layer)?,
        }
        self.pending.push_back(pending);
        Ok(())
    }

    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        let mut pending = self.pending.pop_front().ok_or_else(|| RunError("no step is in flight".into()))?;
        if pending.tokens.is_none() {
            self.compute(&mut pending, batch, &mut |_| ())?;
        }
        out.append(pending.tokens.get_or_insert_default());
        Ok(())
    }

    fn overlaps(&self) -> bool {
        true
    }

    fn reads_by_layer(&self) -> bool {
        true
    }
}

/// A log probability made of a state.
fn logprob(state: u64) -> f32 {
    -((state >> 40) as f32) / (1 << 20) as f32
}

fn fold(state: u64, word: u64) -> u64 {
    hash_bytes(state, &word.to_le_bytes())
}

#[cfg(test)]
mod tests;
