//! The KV pool in host memory, as the kernels see it.

use std::any::Any;
use std::sync::Arc;

use baton_types::{BlockId, PoolGeometry};

use crate::KernelError;

/// A region of host memory with a pool's geometry. Transfer threads write blocks of the same region; block states keep
/// the two apart: a block is read here only after it was verified, and never written while it is lent (I2, I3).
pub struct HostPool {
    base: *mut u8,
    geometry: PoolGeometry,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the memory is owned by `_owner`, which is Send and Sync; accesses go through raw pointers only, and the block
// states described above keep concurrent accesses apart.
unsafe impl Send for HostPool {}
// SAFETY: as above.
unsafe impl Sync for HostPool {}

impl HostPool {
    /// A pool over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// `base` is valid for reads and writes of `bytes` bytes as long as `owner` lives. It needs no alignment.
    pub unsafe fn new(
        base: *mut u8,
        bytes: usize,
        geometry: PoolGeometry,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Self, KernelError> {
        if geometry.bytes() > bytes {
            return Err(KernelError::Pool(format!("a pool of {} bytes in a region of {bytes}", geometry.bytes())));
        }
        if !geometry.layout.block_size.is_multiple_of(16) || geometry.layout.block_size == 0 {
            return Err(KernelError::Pool(format!(
                "block size {}; it must be a multiple of 16",
                geometry.layout.block_size
            )));
        }
        for group in &geometry.layout.groups {
            if group.head_dim % 8 != 0 || group.head_dim > 512 || group.head_dim == 0 {
                return Err(KernelError::Pool(format!(
                    "head dimension {}; it must be a multiple of 8 up to 512",
                    group.head_dim
                )));
            }
        }
        Ok(HostPool { base, geometry, _owner: owner })
    }

    /// A pool in this process's own memory, zeroed; for one-process runs and tests.
    pub fn in_memory(geometry: PoolGeometry) -> Result<Self, KernelError> {
        // u64 elements give 8-byte alignment; the kernels use unaligned vector accesses.
        let words = geometry.bytes().div_ceil(8);
        let memory: Arc<Memory> = Arc::new(Memory((0..words).map(|_| std::cell::UnsafeCell::new(0u64)).collect()));
        let base = memory.0.as_ptr() as *mut u8;
        // SAFETY: the memory lives as long as its Arc and is reached only through this pointer.
        unsafe { HostPool::new(base, words * 8, geometry, memory) }
    }

    /// Its shape.
    pub fn geometry(&self) -> &PoolGeometry {
        &self.geometry
    }

    /// Start of a plane (0: K, 1: V) of one layer of a block: `[kv_head][slot][head_dim]`.
    pub(crate) fn plane(&self, group: usize, layer: usize, block: BlockId, plane: usize) -> *mut u8 {
        let range = self.geometry.block_range(group, layer, block);
        // SAFETY: `block_range` checks the indices, and the region holds the whole geometry.
        unsafe { self.base.add(range.start + plane * self.geometry.layout.plane_bytes(group)) }
    }

    /// Copies a block to another, in all layers of the group. The caller makes sure that nobody writes either meanwhile.
    ///
    /// # Panics
    /// When group or blocks lie outside the pool.
    pub fn copy_block(&self, group: usize, from: BlockId, to: BlockId) {
        for layer in 0..self.geometry.layout.groups[group].layers.len() {
            let [from, to] = [from, to].map(|block| self.geometry.block_range(group, layer, block));
            // SAFETY: `block_range` checks the indices, the region holds the whole geometry, and ranges of two blocks are
            // the same or apart, which `copy` allows.
            unsafe { std::ptr::copy(self.base.add(from.start), self.base.add(to.start), from.len()) };
        }
    }

    /// Bytes of one layer's part of a block. The caller makes sure that nobody writes it meanwhile.
    pub fn block_bytes(&self, group: usize, layer: usize, block: BlockId) -> Vec<u8> {
        let range = self.geometry.block_range(group, layer, block);
        let mut out = vec![0; range.len()];
        // SAFETY: inside the region, see `plane`.
        unsafe { std::ptr::copy_nonoverlapping(self.base.add(range.start), out.as_mut_ptr(), out.len()) };
        out
    }
}

struct Memory(Vec<std::cell::UnsafeCell<u64>>);
// SAFETY: only ever accessed through the pool's raw pointer.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup, KvLayout};

    use super::*;

    /// A copy takes a block's bytes in every layer of its group, and touches no other.
    #[test]
    fn a_block_is_copied_in_every_layer_of_its_group() {
        let group = |layers: Vec<u32>| KvGroup { layers, planes: 2, kv_heads: 1, head_dim: 8, window: None };
        let groups = vec![group(vec![0, 2]), group(vec![1])];
        let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups };
        let pool = HostPool::in_memory(PoolGeometry { layout, blocks: vec![3, 3] }).unwrap();
        let places = [(0, 0), (0, 1), (1, 0)].into_iter().flat_map(|(g, l)| (0..3).map(move |b| (g, l, BlockId(b))));
        for (number, (group, layer, block)) in places.clone().enumerate() {
            let bytes = pool.geometry.block_range(group, layer, block).len();
            // SAFETY: one layer's part of a block, of a pool nobody else has.
            unsafe { pool.plane(group, layer, block, 0).write_bytes(number as u8 + 1, bytes) };
        }
        let before: Vec<Vec<u8>> = places.clone().map(|(g, l, b)| pool.block_bytes(g, l, b)).collect();
        pool.copy_block(0, BlockId(2), BlockId(1));
        for (number, (group, layer, block)) in places.enumerate() {
            let from = if (group, block) == (0, BlockId(1)) { number + 1 } else { number };
            assert_eq!(pool.block_bytes(group, layer, block), before[from]);
        }
    }
}
