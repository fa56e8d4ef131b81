//! The KV pool in device memory, in the same layout as on the host.

use std::ops::Deref;
use std::sync::Arc;

use baton_types::{BlockId, KvDtype, PoolGeometry};

use super::device::{Access, Device, Piece};
use super::memory::Memory;
use super::params::{CopyBlocks, KvPlanes, kv_type};
use super::queue::Queue;
use super::shared_pool::MarkedMemory;
use crate::{HostPool, KernelError};

/// Widest heads that the attention kernels take.
const MAX_HEAD_DIM: u32 = 256;

/// Alignment in bytes of host pools: kernels load that many bytes at once.
const ALIGN: usize = 16;

/// Blocks on the device.
pub(super) struct Pool<D: Device> {
    memory: Store<D>,
    geometry: PoolGeometry,
}

/// Where the blocks are.
enum Store<D: Device> {
    Own(Memory<D>),
    /// Transfers use this memory too.
    Shared(Arc<MarkedMemory<D>>),
}

impl<D: Device> Deref for Store<D> {
    type Target = Memory<D>;

    fn deref(&self) -> &Memory<D> {
        match self {
            Store::Own(memory) => memory,
            Store::Shared(shared) => shared.memory(),
        }
    }
}

/// Refuses pools that no kernel serves. The error names the setting that asks for them.
pub(super) fn check(geometry: &PoolGeometry) -> Result<(), KernelError> {
    let layout = &geometry.layout;
    let refused = |why: String| Err(KernelError::Pool(why));
    if matches!(layout.dtype, KvDtype::F32 | KvDtype::Int4) {
        return refused(format!(
            "the GPU's attention takes f16, bf16, q8 and fp8, not {:?}; set kv_type",
            layout.dtype
        ));
    }
    if layout.block_size == 0 || !layout.block_size.is_multiple_of(16) {
        return refused(format!("block size {}; it must be a multiple of 16", layout.block_size));
    }
    for group in &layout.groups {
        if group.sinks > 0 {
            return refused("attention sinks are not served on a GPU; leave out attention_window".to_owned());
        }
        if group.head_dim == 0 || group.head_dim % 8 != 0 || group.head_dim > MAX_HEAD_DIM {
            let dim = group.head_dim;
            return refused(format!("head dimension {dim}; on a GPU it must be a multiple of 8 up to {MAX_HEAD_DIM}"));
        }
    }
    Ok(())
}

impl<D: Device> Pool<D> {
    /// A pool in memory of its own. It is filled with NaNs, so that reading a slot before it was stored shows.
    pub fn new(queue: &Queue<D>, geometry: PoolGeometry) -> Result<Self, KernelError> {
        check(&geometry)?;
        let memory = Store::Own(queue.memory(geometry.bytes())?);
        let pool = Pool::with(memory, geometry);
        pool.fill(queue, 0xff)?;
        Ok(pool)
    }

    /// A pool in memory that transfers use too, also filled with NaNs.
    pub fn shared(queue: &Queue<D>, geometry: PoolGeometry, memory: Arc<MarkedMemory<D>>) -> Result<Self, KernelError> {
        check(&geometry)?;
        let (bytes, wanted) = (memory.memory().bytes(), geometry.bytes());
        if bytes < wanted {
            return Err(KernelError::Region(format!("a pool of {wanted} bytes in a region of {bytes}")));
        }
        let pool = Pool::with(Store::Shared(memory), geometry);
        pool.fill(queue, 0xff)?;
        // The fill must be done before anybody else writes there.
        queue.synchronise()?;
        Ok(pool)
    }

    fn with(memory: Store<D>, geometry: PoolGeometry) -> Self {
        Pool { memory, geometry }
    }

    /// Sets every byte of the pool.
    pub fn fill(&self, queue: &Queue<D>, byte: u8) -> Result<(), KernelError> {
        queue.fill(self.memory.piece(0, self.memory.bytes()), byte)
    }

    /// A pool in host memory, which the device reads and writes in place.
    pub fn of_host(queue: &Queue<D>, pool: Arc<HostPool>) -> Result<Self, KernelError> {
        let geometry = pool.geometry().clone();
        check(&geometry)?;
        if !pool.is_whole() {
            return Err(KernelError::Region("a GPU takes no part of a pool's heads".to_owned()));
        }
        if !pool.base().addr().is_multiple_of(ALIGN) {
            return Err(KernelError::Region(format!("its memory must begin at a multiple of {ALIGN} bytes")));
        }
        Ok(Pool::with(Store::Own(Memory::of_host(&queue.device, pool)?), geometry))
    }

    /// Makes what the queue has stored so far visible to others. A pool in host memory is waited for, so that others can read it. A shared
    /// pool in device memory gets a mark that copies out of it can wait for.
    pub fn publish(&self, queue: &Queue<D>) -> Result<(), KernelError> {
        match &self.memory {
            Store::Shared(shared) => shared.publish(queue),
            Store::Own(memory) if memory.is_host() => queue.synchronise(),
            Store::Own(_) => Ok(()),
        }
    }

    /// Whether the pool is in host memory.
    pub fn is_host(&self) -> bool {
        self.memory.is_host()
    }

    pub fn geometry(&self) -> &PoolGeometry {
        &self.geometry
    }

    /// All blocks of a layer.
    pub fn layer(&self, group: usize, layer: usize) -> Piece<'_> {
        let bytes = self.geometry.layout.block_bytes(group) * self.geometry.blocks[group] as usize;
        self.memory.piece(self.geometry.layer_offset(group, layer), bytes)
    }

    /// A layer's blocks as the kernels' parameters describe them.
    pub fn planes(&self, group: usize, layer: usize) -> KvPlanes {
        let layout = &self.geometry.layout;
        KvPlanes {
            base: self.layer(group, layer).at(),
            block: layout.block_bytes(group) as u64,
            value: layout.plane_bytes(group) as u64,
            head: layout.head_bytes(group) as u64,
            kv_type: kv_type(layout.dtype),
            block_size: layout.block_size,
            head_dim: layout.groups[group].head_dim,
        }
    }

    fn layers(&self, group: usize) -> usize {
        self.geometry.layout.groups[group].layers.len()
    }

    fn block(&self, group: usize, layer: usize, block: BlockId) -> Piece<'_> {
        let range = self.geometry.block_range(group, layer, block);
        self.memory.piece(range.start, range.len())
    }

    /// Reads the bytes of one layer's part of a block.
    pub fn block_bytes(
        &self,
        queue: &Queue<D>,
        group: usize,
        layer: usize,
        block: BlockId,
    ) -> Result<Vec<u8>, KernelError> {
        let piece = self.block(group, layer, block);
        let mut out = vec![0; piece.bytes()];
        queue.read(piece, &mut out)?;
        Ok(out)
    }

    /// Copies a block to another, in all layers of its group. `pair` is device memory for the two block numbers.
    pub fn copy_block(
        &self,
        queue: &Queue<D>,
        group: usize,
        pair: Piece<'_>,
        from: BlockId,
        to: BlockId,
    ) -> Result<(), KernelError> {
        queue.write(pair, &[from.0, to.0])?;
        let (layers, bytes) = (self.layers(group), self.geometry.layout.block_bytes(group) as u64);
        let first = self.layer(group, 0);
        let all = self.memory.piece(self.geometry.layer_offset(group, 0), first.bytes() * layers);
        let (base, layer_stride) = (first.at(), first.bytes() as u64);
        let (layers, pairs) = (layers as u32, pair.at());
        let params = CopyBlocks { base, layer_stride, pairs, bytes, count: 1, layers };
        queue.launch("baton_copy_blocks", &params, &[Access::Read(pair), Access::Write(all)])
    }
}
