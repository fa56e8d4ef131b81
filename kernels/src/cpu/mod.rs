//! The CPU backend: splits each operation into tasks and runs them on its threads.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod ceilings;
mod codes;
mod columns;
mod dots;
mod element;
mod elementwise;
#[cfg(all(feature = "testing", target_arch = "x86_64", target_os = "linux"))]
mod emulated;
mod fold;
mod isa;
mod kv_convert;
mod kv_row;
mod kv_store;
mod matmul;
mod packed;
mod packing;
mod portable;
mod products;
mod quantise;
mod simd;
mod slots;
#[cfg(target_arch = "x86_64")]
mod strips;
mod threads;
mod tiles;
mod together;
mod unpack;
mod weight;

use std::sync::Arc;

use baton_types::BlockId;
pub use ceilings::Ceilings;
pub use isa::Isa;
pub use kv_convert::{KvSlice, convert_kv};
use kv_row::Planes;
pub use packed::{PackedError, PackedFile, PackedWriter};
use products::Scratch;
use simd::LANES;
use threads::Threads;
use together::{Labour, Plan, Sight, Tables};
pub use unpack::element;
pub use weight::CpuWeight;

use crate::WeightSource;
use crate::backend::{AttentionShape, Backend, Input, Norm, Product, Ragged, Room, Rope};
use crate::pages::{Arena, Pages};
use crate::{HostPool, KernelError};

/// Rows of element-wise work that make a task at most, however few elements they are.
const ROWS_PER_TASK: usize = 8;

/// Elements of element-wise work that make a task.
const PIECE: usize = 8192;

/// How to run on the CPU.
#[derive(Clone, Copy, Debug)]
pub struct CpuOptions {
    /// Threads, at least 1.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Whether threads keep a CPU each.
    pub pinned: bool,
}

impl Default for CpuOptions {
    /// All cores, the best instruction set, threads that move.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        CpuOptions { threads, isa: Isa::detect(), pinned: false }
    }
}

/// Decoder operations on the CPU, over a KV pool in host memory.
pub struct CpuBackend {
    isa: Isa,
    threads: Threads,
    pool: Arc<HostPool>,
    scratch: Scratch,
    weights: Arena,
    packed: Packed,
    /// Of the latest step's attention, one per layer group.
    plans: Vec<Plan>,
}

/// Where a backend has packed weights from.
pub enum Packed {
    /// It packs them, for itself.
    Anew,
    /// It packs them, and writes them to a file.
    Kept(PackedWriter),
    /// They are in a file.
    Found(Arc<PackedFile>),
}

/// A pointer that tasks share.
#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: tasks touch disjoint rows, see each use.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Going through a method makes closures capture the whole wrapper.
    unsafe fn add(self, count: usize) -> *mut T {
        // SAFETY: the caller stays inside the buffer.
        unsafe { self.0.add(count) }
    }
}

impl CpuBackend {
    /// A backend over a pool.
    pub fn new(options: CpuOptions, pool: Arc<HostPool>) -> Result<Self, KernelError> {
        let threads = Threads::new(options.threads.max(1), options.pinned)?;
        let plans = pool.geometry().layout.groups.iter().map(|_| Plan::default()).collect();
        Ok(CpuBackend {
            isa: options.isa,
            threads,
            pool,
            scratch: Scratch::with_capacity(0)?,
            weights: Arena::default(),
            packed: Packed::Anew,
            plans,
        })
    }

    /// The same backend, that takes packed weights from there.
    pub fn with_packed(self, packed: Packed) -> Self {
        CpuBackend { packed, ..self }
    }

    /// Where it has packed weights from.
    pub fn into_packed(self) -> Packed {
        self.packed
    }

    /// The pool it reads and writes.
    pub fn pool(&self) -> &Arc<HostPool> {
        &self.pool
    }

    /// Runs `task(first, count)` over `rows` rows of a width in pieces.
    fn over_rows(&mut self, rows: usize, width: usize, task: &(dyn Fn(usize, usize) + Sync)) {
        let piece = (PIECE / width.max(1)).clamp(1, ROWS_PER_TASK);
        self.threads.run(rows.div_ceil(piece), &|i| {
            let first = i * piece;
            task(first, piece.min(rows - first));
        });
    }

    fn planes(&self, shape: AttentionShape) -> Planes {
        let base = self.pool.plane(shape.group, shape.layer, BlockId(0), 0);
        Planes::new(&self.pool.stored().layout, shape.group, base)
    }

    fn kv_heads(&self, shape: AttentionShape) -> usize {
        self.pool.geometry().layout.groups[shape.group].kv_heads as usize
    }

    fn attend(&mut self, shape: AttentionShape, batch: &Ragged, q: &[f32], out: &mut [f32]) {
        let planes = self.planes(shape);
        let run = attention::kernel(self.pool.geometry().layout.dtype);
        let (isa, kv_heads) = (self.isa, self.kv_heads(shape));
        let group = shape.heads / kv_heads;
        assert!(
            group * kv_heads == shape.heads && group <= crate::MAX_HEADS_PER_KV_HEAD,
            "{group} query heads per KV head"
        );
        let layout = &self.pool.geometry().layout;
        let seen = &layout.groups[shape.group];
        let (window, sinks) = (seen.window.map(|w| w as usize), seen.sinks as usize);
        let sight = Sight { window, sinks, block_size: layout.block_size as usize };
        let needed = batch.rows() * shape.heads * seen.head_dim as usize;
        assert!(q.len() >= needed * (1 + usize::from(sinks > 0)), "attention queries too few");
        assert!(out.len() >= needed, "attention output too small");
        let sink_q = if sinks > 0 { q[needed..].as_ptr() } else { q.as_ptr() };
        let sink_q = Shared(sink_q.cast_mut());
        let out = Shared(out.as_mut_ptr());
        let plan = &mut self.plans[shape.group];
        plan.renew(batch, sight, Labour { threads: self.threads.count(), kv_heads, group });
        let plan = &*plan;
        let (threads, count) = (self.threads.count(), plan.tasks().len() * kv_heads);
        self.threads.run(count, &|i| {
            let together = &plan.tasks()[i / kv_heads];
            let tile = |i: usize| plan.tiles()[plan.tasks()[i / kv_heads].tiles.start];
            let task = attention::Task {
                planes,
                tiles: &plan.tiles()[together.tiles.clone()],
                shared: together.shared,
                tables: Tables { blocks: batch.blocks(), sight },
                kv_head: i % kv_heads,
                then: (i + threads < count).then(|| (tile(i + threads), (i + threads) % kv_heads)),
                heads: shape.heads,
                group,
                scale: shape.scale,
                // SAFETY: offset 0.
                sink_q: unsafe { sink_q.add(0) },
                q: q.as_ptr(),
                // SAFETY: offset 0.
                out: unsafe { out.add(0) },
            };
            // SAFETY: sizes are checked above; a tile's rows of a KV head's queries belong to one task; the engine gives
            // tables of blocks that this worker owns.
            unsafe { run(isa, &task) }
        });
    }

    fn store(
        &mut self,
        shape: AttentionShape,
        batch: &Ragged,
        rope: &Rope<Pages<f32>>,
        q: &mut [f32],
        k: &[f32],
        v: &[f32],
    ) {
        let planes = self.planes(shape);
        let run = kv_store::kernel(self.pool.geometry().layout.dtype);
        let (isa, kv_heads) = (self.isa, self.kv_heads(shape));
        let seen = &self.pool.geometry().layout.groups[shape.group];
        let dim = seen.head_dim as usize;
        // The last position within the cache, for groups with sinks.
        let last = seen.window.filter(|_| seen.sinks > 0).map(|window| (seen.sinks + window) as usize - 1);
        let (q_width, kv_width) = (shape.heads * dim, kv_heads * dim);
        let rows = batch.rows();
        let q_rows = rows * (1 + usize::from(last.is_some()));
        assert!(
            q.len() >= q_rows * q_width && k.len() >= rows * kv_width && v.len() >= rows * kv_width,
            "q, k or v too small"
        );
        let q = Shared(q.as_mut_ptr());
        self.threads.run(batch.tiles().len(), &|i| {
            let (span, first) = batch.tiles()[i];
            let span = batch.spans()[span];
            for j in first..span.len.min(first + crate::TILE_ROWS) {
                let (row, position) = (span.row + j, span.start + j);
                let rotation = |position: usize| {
                    let half = position * dim / 2..(position + 1) * dim / 2;
                    (rope.cos[half.clone()].as_ptr(), rope.sin[half].as_ptr())
                };
                let (cos, sin) = rotation(position);
                let sinks = last.map(|last| {
                    let (cos, sin) = rotation(position.min(last));
                    // SAFETY: the second half of q has this row, by the check above.
                    kv_store::SinkQueries { q: unsafe { q.add((rows + row) * q_width) }, cos, sin }
                });
                // What is stored now lies behind what is hidden.
                let place = position - span.hidden;
                // SAFETY: sizes are checked above; rows and slots of a token belong to one task.
                unsafe {
                    let task = kv_store::StoreTask {
                        planes,
                        table: &batch.blocks()[span.table..],
                        place,
                        heads: shape.heads,
                        kv_heads,
                        q: q.add(row * q_width),
                        k: k.as_ptr().add(row * kv_width),
                        v: v.as_ptr().add(row * kv_width),
                        cos,
                        sin,
                        sinks,
                    };
                    run(isa, &task);
                }
            }
        });
    }
}

impl Backend for CpuBackend {
    type Buffer = Pages<f32>;
    type Weight = CpuWeight;

    fn name(&self) -> String {
        format!("cpu ({}, {} threads)", self.isa.name(), self.threads.count())
    }

    fn buffer(&self, elements: usize) -> Result<Pages<f32>, KernelError> {
        Pages::zeroed(elements)
    }

    fn upload(&self, values: &[f32]) -> Result<Pages<f32>, KernelError> {
        let mut buffer = Pages::zeroed(values.len())?;
        buffer.copy_from_slice(values);
        Ok(buffer)
    }

    fn weight(&mut self, source: &WeightSource<'_>) -> Result<CpuWeight, KernelError> {
        if let Packed::Found(file) = &self.packed {
            return CpuWeight::packed(source, file);
        }
        let weight = CpuWeight::new(source, &mut self.weights)?;
        if let Packed::Kept(writer) = &mut self.packed {
            writer.add(weight.form, source, &weight.data).map_err(KernelError::Keep)?;
        }
        Ok(weight)
    }

    fn weight_bytes(&self, weight: &CpuWeight) -> usize {
        weight.data.len()
    }

    fn elements(&self, buffer: &Pages<f32>) -> usize {
        buffer.len()
    }

    fn reserve(&mut self, room: &Room) -> Result<(), KernelError> {
        if self.scratch.normed.len() < room.rows * room.cols {
            self.scratch = Scratch::with_capacity(room.rows * room.cols)?;
        }
        Ok(())
    }

    fn publish(&mut self) {}

    /// Every operation is done when it returns.
    fn finish(&mut self) -> Result<(), KernelError> {
        Ok(())
    }

    fn read(&mut self, buffer: &Pages<f32>, offset: usize, out: &mut [f32]) {
        out.copy_from_slice(&buffer[offset..offset + out.len()]);
    }

    fn copy_block(&mut self, group: usize, from: BlockId, to: BlockId) {
        self.pool.copy_block(group, from, to);
    }

    fn embed(&mut self, table: &CpuWeight, ids: &[u32], scale: f32, out: &mut Pages<f32>) {
        for (&id, row) in ids.iter().zip(out.chunks_exact_mut(table.cols)) {
            table.read_row(id as usize, row);
            if scale != 1.0 {
                row.iter_mut().for_each(|x| *x *= scale);
            }
        }
    }

    fn rms_norm(&mut self, norm: &Norm<Pages<f32>>, x: &mut Pages<f32>, rows: usize) {
        let (isa, width, eps) = (self.isa, norm.weight.len(), norm.eps);
        assert!(x.len() >= rows * width, "rms_norm buffer too small");
        let (x, weight) = (Shared(x.as_mut_ptr()), &norm.weight[..]);
        self.over_rows(rows, width, &|first, count| {
            for row in first..first + count {
                // SAFETY: the buffer holds `rows` rows; a row belongs to one task.
                unsafe {
                    let row = x.add(row * width);
                    elementwise::rms_norm(isa, row, weight.as_ptr(), eps, width, row)
                }
            }
        });
    }

    fn add(&mut self, x: &mut Pages<f32>, y: &Pages<f32>, elements: usize) {
        assert!(elements.is_multiple_of(LANES) && x.len() >= elements && y.len() >= elements, "add sizes");
        let (isa, x) = (self.isa, Shared(x.as_mut_ptr()));
        self.threads.run(elements.div_ceil(PIECE), &|i| {
            let first = i * PIECE;
            // SAFETY: checked above; pieces are disjoint multiples of 8.
            unsafe { elementwise::add(isa, x.add(first), y.as_ptr().add(first), PIECE.min(elements - first)) }
        });
    }

    fn matmul<const N: usize>(
        &mut self,
        input: Input<'_, Pages<f32>>,
        products: [Product<'_, CpuWeight, Pages<f32>>; N],
    ) {
        self.multiply(input, products);
    }

    fn rope_and_store_kv(
        &mut self,
        shape: AttentionShape,
        batch: &Ragged,
        rope: &Rope<Pages<f32>>,
        q: &mut Pages<f32>,
        k: &Pages<f32>,
        v: &Pages<f32>,
    ) {
        self.store(shape, batch, rope, q, k, v);
    }

    fn attention(&mut self, shape: AttentionShape, batch: &Ragged, q: &Pages<f32>, out: &mut Pages<f32>) {
        self.attend(shape, batch, q, out);
    }

    fn gather_rows(&mut self, x: &Pages<f32>, width: usize, rows: &[u32], out: &mut Pages<f32>) {
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(width)) {
            out.copy_from_slice(&x[row as usize * width..][..width]);
        }
    }
}
