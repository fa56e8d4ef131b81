//! [`CudaBackend`]: its state, its construction, and the helpers of its operations.

use std::sync::Arc;

use baton_types::{BlockId, PoolGeometry};
use half::{bf16, f16};

use super::attention::{self, Scratch};
use super::device::{Access, Address, Device, Fp8, Piece};
use super::memory::Memory;
use super::params::{Element, Embed, RmsNorm};
use super::pool::{self, Pool};
use super::queue::{Queue, bytes_of_mut};
use super::sampling::Draws;
use super::shared_pool::SharedPool;
use super::sharing::SharingDevice;
use super::splits;
use super::step::Steps;
use crate::backend::{AttentionShape, Norm, Room};
use crate::{HostPool, KernelError};

/// Options for running on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaOptions {
    /// Whether a row has the same bits in any step: as a decode row or within a chunk, and whatever else is in the batch (I1).
    ///
    /// Decode rows then take the chunks' kernel. It walks a row's KV without splitting it and leaves most of the device idle. Products of
    /// any number of rows use one algorithm, chosen for few rows.
    ///
    /// Without this option rows agree to rounding only. A product still gives a row the same bits in all steps whose number of rows is in
    /// the same range: up to 16, up to 64, up to 256, or more.
    pub invariant: bool,
    /// Whether decode steps are captured and launched as a graph, which saves most of the host's work. Such steps are padded, with and
    /// without a graph. No result depends on this option, to the bit.
    pub graphs: bool,
    /// Whether chunks take the attention kernel for Hopper if device and pool allow it. It adds up in another order than the general
    /// kernel.
    pub hopper: bool,
    /// Whether matrices that only products read, and the rows they are multiplied with, are E4M3 with a scale for each row. A row's scale
    /// depends on that row alone, so no other row changes its bits (I1).
    pub fp8: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions { invariant: false, graphs: true, hopper: true, fp8: false }
    }
}

/// Where a norm of rows is stored, and as what type.
pub(super) enum Normed<'a> {
    /// In place of the rows themselves, as f32.
    InPlace,
    /// Elsewhere, one row behind the other, as this element type.
    Dense(Piece<'a>, Element),
    /// Elsewhere as E4M3: the codes, and a scale for each row.
    E4m3(Piece<'a>, Piece<'a>),
}

/// Decoder operations on a device, over a KV pool in its memory.
pub struct CudaBackend<D: Device> {
    pub(super) queue: Queue<D>,
    pub(super) options: CudaOptions,
    pub(super) pool: Pool<D>,
    /// A product's input, converted to the type of its weight.
    pub(super) operand: Option<Memory<D>>,
    /// Row numbers of a gather, or the two block numbers of a copy.
    pub(super) indices: Option<Memory<D>>,
    /// Stored rows of a weight while it is loaded.
    pub(super) staging: Option<Memory<D>>,
    pub(super) scratch: Scratch<D>,
    pub(super) sampling: Draws<D>,
    pub(super) steps: Steps<D>,
    /// The first failure since the last [`Backend::finish`]. Operations after it are skipped.
    pub(super) failed: Option<KernelError>,
}

impl<D: Device> CudaBackend<D> {
    /// A backend with a pool of its own.
    ///
    /// # Errors
    /// When no kernel serves the pool (f32, int4, attention sinks, heads wider than 256), when the device has no room for it, or when
    /// the options ask for E4M3 and the device has no such products.
    pub fn new(device: Arc<D>, geometry: PoolGeometry, options: CudaOptions) -> Result<Self, KernelError> {
        let queue = Queue::new(device)?;
        let pool = Pool::new(&queue, geometry)?;
        CudaBackend::with(queue, pool, options)
    }

    /// A backend over a pool in host memory that others read and write too. The device reaches it over its bus, which limits the speed of
    /// attention.
    ///
    /// # Errors
    /// As for [`CudaBackend::new`].
    pub fn over(device: Arc<D>, pool: Arc<HostPool>, options: CudaOptions) -> Result<Self, KernelError> {
        let queue = Queue::new(device)?;
        let pool = Pool::of_host(&queue, pool)?;
        CudaBackend::with(queue, pool, options)
    }

    /// A backend over a pool in device memory that transfers use too.
    ///
    /// # Errors
    /// As for [`CudaBackend::new`], and when the pool's memory is too small for its geometry.
    pub fn sharing(pool: &SharedPool<D>, geometry: PoolGeometry, options: CudaOptions) -> Result<Self, KernelError>
    where
        D: SharingDevice,
    {
        let queue = Queue::new(Arc::clone(pool.device()))?;
        let pool = Pool::shared(&queue, geometry, Arc::clone(pool.memory()))?;
        CudaBackend::with(queue, pool, options)
    }

    fn with(queue: Queue<D>, pool: Pool<D>, options: CudaOptions) -> Result<Self, KernelError> {
        let properties = queue.device.properties();
        if options.fp8 && properties.fp8 == Fp8::None {
            let (name, (major, minor)) = (&properties.name, properties.capability);
            return Err(KernelError::Fp8(format!("{name} has compute capability {major}.{minor}")));
        }
        let steps = Steps::new(pool.geometry().layout.groups.len());
        let (operand, indices, staging, scratch) = (None, None, None, Scratch::default());
        let sampling = Draws::default();
        Ok(CudaBackend { queue, options, pool, operand, indices, staging, scratch, sampling, steps, failed: None })
    }

    /// Checks whether a pool of this geometry can be served.
    ///
    /// # Errors
    /// When no kernel serves it.
    pub fn check(geometry: &PoolGeometry) -> Result<(), KernelError> {
        pool::check(geometry)
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Arc<D> {
        &self.queue.device
    }

    /// Reads the bytes of one layer's part of a block.
    pub fn block_bytes(&self, group: usize, layer: usize, block: BlockId) -> Result<Vec<u8>, KernelError> {
        self.pool.block_bytes(&self.queue, group, layer, block)
    }

    /// Allocates all memory that steps within these bounds use.
    pub(super) fn make_room(&mut self, room: &Room) -> Result<(), KernelError> {
        // All weights are loaded by now.
        self.staging = None;
        self.queue.at_least(&mut self.indices, room.rows.max(2) * size_of::<u32>())?;
        self.queue.at_least(&mut self.operand, (room.rows * room.cols).max(1) * Element::Bf16.bytes())?;
        let layout = &self.pool.geometry().layout;
        let block_size = layout.block_size as usize;
        for group in &layout.groups {
            let bytes = attention::split_bytes(room.heads, group.head_dim);
            let slots = splits::most_slots(room, block_size, splits::slots(bytes));
            self.scratch.fit(&self.queue, slots * bytes, slots * room.heads)?;
        }
        self.forget_graphs();
        self.steps.reserve(&self.queue, room, block_size)?;
        self.sampling.reserve(&self.queue, room)
    }

    pub(super) fn attempt(&mut self, run: impl FnOnce(&mut Self) -> Result<(), KernelError>) {
        if self.failed.is_none() {
            self.failed = run(self).err();
        }
    }

    /// Computes `out[i] = table[rows[i]] · scale`. `rows` is the row numbers and, if they are among the step's inputs on the device, the
    /// index of their first word there. Otherwise they are copied to the device.
    pub(super) fn gather(
        &mut self,
        table: (Piece<'_>, Element),
        width: usize,
        rows: (&[u32], Option<usize>),
        scale: f32,
        out: &Memory<D>,
    ) -> Result<(), KernelError> {
        let ((rows, at), bytes) = (rows, size_of_val(rows.0));
        let out = out.floats(rows.len() * width);
        if at.is_none() {
            self.queue.at_least(&mut self.indices, bytes.max(1))?;
        }
        let indices = match (at.zip(self.steps.words.as_ref()), &self.indices) {
            (Some((at, words)), _) => words.piece(at * size_of::<u32>(), bytes),
            (None, Some(indices)) => {
                let indices = indices.piece(0, bytes);
                self.queue.write(indices, rows)?;
                indices
            }
            (None, None) => return Ok(()),
        };
        let (table, table_type) = table;
        let drawn = self.sampling.drawn();
        // If nothing was ever sampled, no row refers to a sampled token.
        let touches =
            [Access::Read(table), Access::Read(indices), Access::Write(out), Access::Read(drawn.unwrap_or(indices))];
        let (count, width, out_type) = (rows.len() as u32, width as u32, Element::F32);
        let drawn = drawn.map_or(Address::default(), |drawn| drawn.at());
        let (table, rows, out) = (table.at(), indices.at(), out.at());
        let params = Embed { table, rows, out, table_type, out_type, count, width, scale, drawn };
        self.queue.launch("baton_embed", &params, &touches)
    }

    /// Reads 16-bit elements and widens them to f32.
    pub(super) fn read_halves(&self, from: Piece<'_>, element: Element, out: &mut [f32]) -> Result<(), KernelError> {
        let mut bits = vec![0u16; out.len()];
        self.queue.read(from, bytes_of_mut(&mut bits))?;
        let wide = |bits| {
            if element == Element::Bf16 { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() }
        };
        out.iter_mut().zip(bits).for_each(|(out, bits)| *out = wide(bits));
        Ok(())
    }

    /// RMS norm of rows of `x` into `out`. `x` is what [`Memory::heads`] returns. If `add` is given, it is added to the rows first.
    pub(super) fn normed(
        &self,
        norm: &Norm<Memory<D>>,
        (x, add): ((Piece<'_>, usize, usize), Option<Piece<'_>>),
        out: Normed<'_>,
        rows: usize,
    ) -> Result<(), KernelError> {
        let (x, together, x_stride) = x;
        assert!(
            add.is_none() || (together, x_stride * size_of::<f32>()) == (1, norm.weight.bytes()),
            "a sum of rows that are apart"
        );
        let out_stride = match out {
            Normed::InPlace => x_stride,
            Normed::Dense(..) | Normed::E4m3(..) => together * norm.weight.bytes() / size_of::<f32>(),
        };
        let (out, y_type, scales) = match out {
            Normed::InPlace => (x, Element::F32, None),
            Normed::Dense(out, element) => (out, element, None),
            Normed::E4m3(out, scales) => (out, Element::F32, Some(scales)),
        };
        let weight = norm.weight.piece(0, norm.weight.bytes());
        let width = weight.bytes() / size_of::<f32>();
        let own = if add.is_some() { Access::Write(x) } else { Access::Read(x) };
        let (added, scaled) = (Access::Read(add.unwrap_or(x)), Access::Write(scales.unwrap_or(out)));
        let touches = [Access::Read(weight), own, added, Access::Write(out), scaled];
        let params = RmsNorm {
            x: x.at(),
            add: add.map_or(Address::default(), |add| add.at()),
            weight: weight.at(),
            out: out.at(),
            scales: scales.map_or(Address::default(), |scales| scales.at()),
            x_type: Element::F32,
            y_type,
            rows: rows as u32,
            width: width as u32,
            together: together as u32,
            x_stride: x_stride as u32,
            out_stride: out_stride as u32,
            eps: norm.eps,
        };
        self.queue.launch("baton_rms_norm", &params, &touches)
    }

    /// Elements in a row of q, and in a row of k or v.
    pub(super) fn widths(&self, shape: AttentionShape) -> (usize, usize) {
        let group = &self.pool.geometry().layout.groups[shape.group];
        let dim = group.head_dim as usize;
        (shape.heads * dim, group.kv_heads as usize * dim)
    }
}

impl<D: Device> Drop for CudaBackend<D> {
    /// Waits for all work: unmapping host memory, unlike freeing device memory, does not wait.
    fn drop(&mut self) {
        let _ = self.queue.synchronise();
        self.forget_graphs();
    }
}
