//! [`CudaBackend`] and what its operations are put together from.

use std::sync::Arc;

use baton_types::{BlockId, PoolGeometry};
use half::{bf16, f16};

use super::attention;
use super::batch;
use super::device::{Access, Address, Device, Fp8, Piece};
use super::memory::Memory;
use super::params::{Element, Embed, RmsNorm};
use super::pool::{self, Pool};
use super::queue::{Queue, bytes_of_mut};
use super::sampling::Draws;
use super::shared_pool::SharedPool;
use super::sharing::SharingDevice;
use super::step::Steps;
use crate::backend::{AttentionShape, Norm, Room};
use crate::{HostPool, KernelError};

/// How to run on a GPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CudaOptions {
    /// Whether a row has the same bits in any step: as a decode row and within a chunk, and whatever else is in the batch (I1). Decode
    /// rows then take the kernel of chunks, which walks their KV alone and leaves most of the device idle, and products of any number of
    /// rows are done as those of few. Without it rows agree to rounding; steps of as many rows, up to bounds of 16, 64 and 256, still agree
    /// bit by bit.
    pub invariant: bool,
    /// Whether decode steps are captured and launched as a whole, which takes most of the host's part out of them. They are padded then,
    /// with and without a graph; not a bit depends on it.
    pub graphs: bool,
    /// Whether chunks take the kernel for Hopper where the device and the pool are such that they can. It sums in another order.
    pub hopper: bool,
    /// Whether matrices that only products read are E4M3, with a scale for each row, and so are the rows that they are multiplied with. A
    /// row's scale is its own, so that nothing beside it changes a bit (I1).
    pub fp8: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        CudaOptions { invariant: false, graphs: true, hopper: true, fp8: false }
    }
}

/// What a norm of rows becomes.
pub(super) enum Normed<'a> {
    /// The rows themselves, where they lie.
    InPlace,
    /// One behind the other.
    Dense(Piece<'a>, Element),
    /// Codes, and a scale for each row.
    E4m3(Piece<'a>, Piece<'a>),
}

/// Decoder operations on a device, over a KV pool in its memory.
pub struct CudaBackend<D: Device> {
    pub(super) queue: Queue<D>,
    pub(super) options: CudaOptions,
    pub(super) pool: Pool<D>,
    /// A product's input, as its weight wants it.
    pub(super) operand: Option<Memory<D>>,
    /// Numbers of rows, or of two blocks.
    pub(super) indices: Option<Memory<D>>,
    /// Stored rows of a weight while it is loaded.
    pub(super) staging: Option<Memory<D>>,
    /// Of splits of decode rows.
    pub(super) sums: Option<Memory<D>>,
    pub(super) sampling: Draws<D>,
    pub(super) steps: Steps<D>,
    /// The first thing that went wrong since [`Backend::finish`]; what follows it is not tried.
    pub(super) failed: Option<KernelError>,
}

impl<D: Device> CudaBackend<D> {
    /// A backend with a pool of its own.
    ///
    /// # Errors
    /// When the pool is of a kind that no kernel serves (f32, int4, attention sinks, heads wider than 256), or the device has no
    /// room for it, or no products of E4M3 where they are asked for.
    pub fn new(device: Arc<D>, geometry: PoolGeometry, options: CudaOptions) -> Result<Self, KernelError> {
        let queue = Queue::new(device)?;
        let pool = Pool::new(&queue, geometry)?;
        CudaBackend::with(queue, pool, options)
    }

    /// A backend over a pool in host memory that others read and write too. The device reaches it over its bus, so attention is as fast as
    /// that.
    ///
    /// # Errors
    /// As for [`CudaBackend::new`].
    pub fn over(device: Arc<D>, pool: Arc<HostPool>, options: CudaOptions) -> Result<Self, KernelError> {
        let queue = Queue::new(device)?;
        let pool = Pool::of_host(&queue, pool)?;
        CudaBackend::with(queue, pool, options)
    }

    /// A backend over a pool in device memory that transfers reach too.
    ///
    /// # Errors
    /// As for [`CudaBackend::new`], and when the pool is too small for its shape.
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
        let (operand, indices, staging, sums) = (None, None, None, None);
        let sampling = Draws::default();
        Ok(CudaBackend { queue, options, pool, operand, indices, staging, sums, sampling, steps, failed: None })
    }

    /// Whether a pool of this shape can be served.
    pub fn check(geometry: &PoolGeometry) -> Result<(), KernelError> {
        pool::check(geometry)
    }

    /// What it runs on.
    pub fn device(&self) -> &Arc<D> {
        &self.queue.device
    }

    /// Bytes of one layer's part of a block.
    pub fn block_bytes(&self, group: usize, layer: usize, block: BlockId) -> Result<Vec<u8>, KernelError> {
        self.pool.block_bytes(&self.queue, group, layer, block)
    }

    /// Allocates all that steps within these bounds use.
    pub(super) fn make_room(&mut self, room: &Room) -> Result<(), KernelError> {
        // Weights are loaded by now.
        self.staging = None;
        self.queue.at_least(&mut self.indices, room.rows.max(2) * size_of::<u32>())?;
        self.queue.at_least(&mut self.operand, (room.rows * room.cols).max(1) * Element::Bf16.bytes())?;
        let layout = &self.pool.geometry().layout;
        let row = layout.groups.iter().map(|group| attention::split_bytes(room.heads, group.head_dim)).max();
        let sums = batch::sums(room.rows, room.context, row.unwrap_or(0));
        self.queue.at_least(&mut self.sums, sums.max(1))?;
        self.forget_graphs();
        self.steps.reserve(&self.queue, room)?;
        self.sampling.reserve(&self.queue, room)
    }

    pub(super) fn attempt(&mut self, run: impl FnOnce(&mut Self) -> Result<(), KernelError>) {
        if self.failed.is_none() {
            self.failed = run(self).err();
        }
    }

    /// `out[i] = table[rows[i]] · scale`, for tables and rows of any kind. Rows are brought to the device, unless they are there among the
    /// step's inputs, from this word on.
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
        // Where nothing was ever drawn, no row follows a draw.
        let touches =
            [Access::Read(table), Access::Read(indices), Access::Write(out), Access::Read(drawn.unwrap_or(indices))];
        let (count, width, out_type) = (rows.len() as u32, width as u32, Element::F32);
        let drawn = drawn.map_or(Address::default(), |drawn| drawn.at());
        let (table, rows, out) = (table.at(), indices.at(), out.at());
        let params = Embed { table, rows, out, table_type, out_type, count, width, scale, drawn };
        self.queue.launch("baton_embed", &params, &touches)
    }

    /// Elements of 16 bits, to the host.
    pub(super) fn read_halves(&self, from: Piece<'_>, element: Element, out: &mut [f32]) -> Result<(), KernelError> {
        let mut bits = vec![0u16; out.len()];
        self.queue.read(from, bytes_of_mut(&mut bits))?;
        let wide = |bits| {
            if element == Element::Bf16 { bf16::from_bits(bits).to_f32() } else { f16::from_bits(bits).to_f32() }
        };
        out.iter_mut().zip(bits).for_each(|(out, bits)| *out = wide(bits));
        Ok(())
    }

    /// RMS norm of rows of `x`, which lie as [`Memory::heads`] says, into `out`. Others are added to them first if there are any.
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

    /// Elements of a row of q and of k.
    pub(super) fn widths(&self, shape: AttentionShape) -> (usize, usize) {
        let group = &self.pool.geometry().layout.groups[shape.group];
        let dim = group.head_dim as usize;
        (shape.heads * dim, group.kv_heads as usize * dim)
    }
}

impl<D: Device> Drop for CudaBackend<D> {
    /// Nothing may be under way when memory goes that the device only sees.
    fn drop(&mut self) {
        let _ = self.queue.synchronise();
        self.forget_graphs();
    }
}
