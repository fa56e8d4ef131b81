//! Attention of a batch: the choice of kernels, and their launches.

use baton_types::{KvDtype, KvLayout};

use super::batch::Tiles;
use super::device::{Access, Address, Device, Piece, Rows};
use super::inputs::Inputs;
use super::memory::Memory;
use super::params::{Attention, AttentionDecode, AttentionHopper, Element, RopeStoreKv};
use super::pool::Pool;
use super::queue::Queue;
use super::splits::SPLIT;
use crate::KernelError;
use crate::backend::AttentionShape;

/// A layer's batch on the device, with all that attention needs.
pub(super) struct Placed<'a, D: Device> {
    pub queue: &'a Queue<D>,
    pub pool: &'a Pool<D>,
    pub chunks: Chunks,
    pub shape: AttentionShape,
    pub inputs: &'a Inputs,
    /// Device memory of all of `inputs`.
    pub words: Piece<'a>,
    pub scratch: &'a Scratch<D>,
}

/// What the splits of decode rows leave for the last of their row. It stays at the same addresses as long as it is large enough.
pub(super) struct Scratch<D: Device> {
    /// Partial results.
    sums: Option<Memory<D>>,
    /// For each row and part of its heads, how many of its splits are done: zero before and after a launch.
    done: Option<Memory<D>>,
}

impl<D: Device> Default for Scratch<D> {
    fn default() -> Self {
        Scratch { sums: None, done: None }
    }
}

impl<D: Device> Scratch<D> {
    /// Makes it large enough for so many bytes of partial results, and counts.
    pub fn fit(&mut self, queue: &Queue<D>, sums: usize, counts: usize) -> Result<(), KernelError> {
        queue.at_least(&mut self.sums, sums.max(1))?;
        let (bytes, before) = ((counts * size_of::<u32>()).max(1), self.done.as_ref().map(Memory::bytes));
        queue.at_least(&mut self.done, bytes)?;
        match &self.done {
            Some(done) if before != Some(done.bytes()) => queue.fill(done.piece(0, done.bytes()), 0),
            _ => Ok(()),
        }
    }
}

/// Hopper's compute capability. Only devices of exactly this one have its units.
pub(super) const HOPPER: (u32, u32) = (9, 0);

/// The attention kernel for chunks. It depends on device and pool only, so a row takes the same kernel in any batch (I1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Chunks {
    /// `attention_prefill.cu`, which multiplies by warp-level matrix instructions.
    Warps,
    /// `attention_hopper.cu`, with the kernel's name.
    Hopper(&'static str),
}

impl Chunks {
    /// The kernel for a layer group, on a device with or without Hopper's units.
    pub fn of(layout: &KvLayout, group: usize, hopper: bool) -> Self {
        match (hopper, layout.dtype, layout.groups[group].head_dim) {
            (true, KvDtype::F16, 64) => Chunks::Hopper("baton_attention_hopper_f16_64"),
            (true, KvDtype::F16, 128) => Chunks::Hopper("baton_attention_hopper_f16_128"),
            (true, KvDtype::Bf16, 64) => Chunks::Hopper("baton_attention_hopper_bf16_64"),
            (true, KvDtype::Bf16, 128) => Chunks::Hopper("baton_attention_hopper_bf16_128"),
            _ => Chunks::Warps,
        }
    }

    /// (row, query head) pairs of one KV head that a thread block processes.
    pub fn pairs(self) -> usize {
        match self {
            Chunks::Warps => Attention::PAIRS as usize,
            Chunks::Hopper(_) => AttentionHopper::PAIRS as usize,
        }
    }
}

/// Rows, and the number of elements from the start of one to the next.
pub(super) type Strided<'a> = (Piece<'a>, usize);

/// Activations and rotation tables for storing K and V.
pub(super) struct Rotated<'a> {
    pub q: Strided<'a>,
    pub k: Strided<'a>,
    pub v: Strided<'a>,
    pub cos: Piece<'a>,
    pub sin: Piece<'a>,
}

/// Names of the (decode, prefill) kernels for a pool type and the smallest of 64, 128 and 256 that holds a head.
fn kernels(dtype: KvDtype, head_dim: u32) -> Result<(&'static str, &'static str), KernelError> {
    macro_rules! of {
        ($name:literal) => {
            match head_dim {
                ..=64 => (
                    concat!("baton_attention_decode_", $name, "_64"),
                    concat!("baton_attention_prefill_", $name, "_64"),
                ),
                ..=128 => (
                    concat!("baton_attention_decode_", $name, "_128"),
                    concat!("baton_attention_prefill_", $name, "_128"),
                ),
                _ => (
                    concat!("baton_attention_decode_", $name, "_256"),
                    concat!("baton_attention_prefill_", $name, "_256"),
                ),
            }
        };
    }
    match dtype {
        KvDtype::F16 => Ok(of!("f16")),
        KvDtype::Bf16 => Ok(of!("bf16")),
        KvDtype::Q8 => Ok(of!("q8")),
        KvDtype::Fp8 => Ok(of!("fp8")),
        KvDtype::F32 | KvDtype::Int4 => Err(KernelError::Pool(format!("no attention over {dtype:?} on a GPU"))),
    }
}

/// Bytes of partial results of one split of a row, over all heads. Each head has head_dim sums, a maximum and a sum of weights, in f32.
pub(super) fn split_bytes(heads: usize, head_dim: u32) -> usize {
    heads * (head_dim as usize + 2) * size_of::<f32>()
}

impl<D: Device> Placed<'_, D> {
    fn kv_heads(&self) -> u32 {
        self.pool.geometry().layout.groups[self.shape.group].kv_heads
    }

    fn tiles(&self) -> &Tiles {
        self.inputs.group(self.shape.group)
    }

    /// Device addresses of (the group's tiles from `first` on, the block tables).
    fn places(&self, first: usize) -> (Address, Address) {
        let at = self.words.at();
        (at.plus(self.inputs.tile_at(self.shape.group, first)), at.plus(self.inputs.tables_at()))
    }

    /// Rotates q in place, and stores rotated k, and v, in the pool.
    pub fn store(&self, with: &Rotated<'_>) -> Result<(), KernelError> {
        let (group, layer) = (self.shape.group, self.shape.layer);
        let touches = [
            Access::Write(with.q.0),
            Access::Read(with.k.0),
            Access::Read(with.v.0),
            Access::Read(with.cos),
            Access::Read(with.sin),
            Access::Read(self.words),
            Access::Write(self.pool.layer(group, layer)),
        ];
        let (decode, (chunks, largest)) = (self.tiles().decode(), self.tiles().chunks());
        for (first, tile_count, tile_rows) in [(0, decode, 1), (decode, chunks, largest)] {
            let (tiles, blocks) = self.places(first);
            let params = RopeStoreKv {
                planes: self.pool.planes(group, layer),
                q: with.q.0.at(),
                k: with.k.0.at(),
                v: with.v.0.at(),
                q_out: with.q.0.at(),
                cos: with.cos.at(),
                sin: with.sin.at(),
                tiles,
                blocks,
                in_type: Element::F32,
                q_type: Element::F32,
                tile_count: tile_count as u32,
                tile_rows,
                heads: self.shape.heads as u32,
                kv_heads: self.kv_heads(),
                q_stride: with.q.1 as u32,
                k_stride: with.k.1 as u32,
                v_stride: with.v.1 as u32,
                q_out_stride: with.q.1 as u32,
            };
            self.queue.launch("baton_rope_store_kv", &params, &touches)?;
        }
        Ok(())
    }

    /// Computes attention of all rows.
    pub fn attend(&self, (q, q_stride): Strided<'_>, (out, out_type): (Piece<'_>, Element)) -> Result<(), KernelError> {
        let layout = &self.pool.geometry().layout;
        let group = &layout.groups[self.shape.group];
        let (decode, prefill) = kernels(layout.dtype, group.head_dim)?;
        let pool = self.pool.layer(self.shape.group, self.shape.layer);
        let touches = [Access::Read(q), Access::Read(self.words), Access::Read(pool), Access::Write(out)];
        let attention = |first: usize, tile_count: usize, tile_rows: u32| Attention {
            planes: self.pool.planes(self.shape.group, self.shape.layer),
            q: q.at(),
            out: out.at(),
            tiles: self.places(first).0,
            blocks: self.places(first).1,
            q_type: Element::F32,
            out_type,
            tile_count: tile_count as u32,
            tile_rows,
            heads: self.shape.heads as u32,
            kv_heads: group.kv_heads,
            q_stride: q_stride as u32,
            window: group.window.unwrap_or(0),
            scale_log2: self.shape.scale * std::f32::consts::LOG2_E,
        };
        let (chunks, largest) = self.tiles().chunks();
        let attend_chunks = attention(self.tiles().decode(), chunks, largest);
        match self.chunks {
            Chunks::Warps => self.queue.launch(prefill, &attend_chunks, &touches)?,
            // A batch of decode rows only needs no tensor map.
            Chunks::Hopper(_) if chunks == 0 => {}
            Chunks::Hopper(kernel) => {
                let box_shape = [AttentionHopper::BOX_WIDTH, AttentionHopper::box_slots(layout.block_size)];
                let rows = Rows { memory: pool, width: group.head_dim, box_shape };
                let pool = self.queue.device.tensor_map(&rows)?;
                self.queue.launch(kernel, &AttentionHopper { a: attend_chunks, pool }, &touches)?;
            }
        }
        let (Some(sums), Some(done)) = (&self.scratch.sums, &self.scratch.done) else { return Ok(()) };
        // Sums come first, then maxima and sums of weights. Where these begin depends on the memory alone, as a captured launch must.
        let heads = self.shape.heads;
        let slots = sums.bytes() / split_bytes(heads, group.head_dim);
        let of_sums = slots * heads * group.head_dim as usize * size_of::<f32>();
        let (partial, done) = (sums.piece(0, of_sums), done.piece(0, done.bytes()));
        let stats = sums.piece(of_sums, slots * heads * 2 * size_of::<f32>());
        let multiprocessors = self.queue.device.properties().multiprocessors.max(1);
        for pass in 0..self.inputs.passes() {
            let params = AttentionDecode {
                a: attention(0, self.tiles().decode(), 1),
                work: self.words.at().plus(self.inputs.work_at(self.shape.group, pass)),
                partial: partial.at(),
                stats: stats.at(),
                done: done.at(),
                split: SPLIT,
                thread_blocks: multiprocessors * AttentionDecode::occupancy(group.head_dim),
            };
            let [q, words, pool, out] = touches;
            let scratch = [partial, stats, done].map(Access::Write);
            self.queue.launch(decode, &params, &[q, words, pool, out, scratch[0], scratch[1], scratch[2]])?;
        }
        Ok(())
    }
}
