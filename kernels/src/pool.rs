//! The KV pool in host memory, as the kernels see it.

use std::any::Any;
use std::sync::Arc;

use baton_types::{BlockId, PoolGeometry};

use crate::KernelError;
use crate::pages::Region;

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

    /// A pool in this process's own memory, zeroed, of which the system gives what is touched; for one-process runs, tests,
    /// and what is swapped out of another pool.
    pub fn in_memory(geometry: PoolGeometry) -> Result<Self, KernelError> {
        let bytes = geometry.bytes();
        let memory = Arc::new(Region::new(bytes)?);
        // SAFETY: the memory lives as long as its Arc and is reached only through this pointer.
        unsafe { HostPool::new(memory.base(), bytes, geometry, memory) }
    }

    /// Its shape.
    pub fn geometry(&self) -> &PoolGeometry {
        &self.geometry
    }

    /// Where it begins.
    #[cfg(feature = "cuda")]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
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

    /// Copies a block to a block of another pool of the same layout, in all layers of the group. The caller makes sure that
    /// nobody writes either meanwhile.
    ///
    /// # Panics
    /// When their blocks differ in size, or group or blocks lie outside the pools.
    pub fn copy_block_to(&self, group: usize, from: BlockId, to: BlockId, other: &HostPool) {
        let bytes = [self, other].map(|pool| pool.geometry.layout.block_bytes_all_layers(group));
        assert_eq!(bytes[0], bytes[1], "blocks of two layouts");
        for layer in 0..self.geometry.layout.groups[group].layers.len() {
            let source = self.geometry.block_range(group, layer, from);
            let target = other.geometry.block_range(group, layer, to);
            // SAFETY: `block_range` checks the indices, each region holds its whole geometry, blocks of one layout have one
            // size, and `copy` allows what two pools over one region would do.
            unsafe { std::ptr::copy(self.base.add(source.start), other.base.add(target.start), source.len()) };
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

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup, KvLayout};

    use super::*;

    fn pool(blocks: [u32; 2]) -> HostPool {
        let group = |layers: Vec<u32>| KvGroup { layers, planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let groups = vec![group(vec![0, 2]), group(vec![1])];
        let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups };
        HostPool::in_memory(PoolGeometry { layout, blocks: blocks.to_vec() }).unwrap()
    }

    /// (group, layer, block) of all blocks of a pool with three of each group.
    fn places() -> impl Iterator<Item = (usize, usize, BlockId)> + Clone {
        [(0, 0), (0, 1), (1, 0)].into_iter().flat_map(|(g, l)| (0..3).map(move |b| (g, l, BlockId(b))))
    }

    /// A pool in which each layer's part of each block has another byte.
    fn numbered() -> HostPool {
        let pool = pool([3, 3]);
        for (number, (group, layer, block)) in places().enumerate() {
            let bytes = pool.geometry.block_range(group, layer, block).len();
            // SAFETY: one layer's part of a block, of a pool nobody else has.
            unsafe { pool.plane(group, layer, block, 0).write_bytes(number as u8 + 1, bytes) };
        }
        pool
    }

    fn contents(pool: &HostPool) -> Vec<Vec<u8>> {
        places().map(|(g, l, b)| pool.block_bytes(g, l, b)).collect()
    }

    /// A block goes to another pool and comes back, elsewhere.
    #[test]
    fn a_block_is_copied_to_another_pool_in_every_layer_of_its_group() {
        let (pool, other) = (numbered(), pool([5, 2]));
        let before = contents(&pool);
        pool.copy_block_to(0, BlockId(2), BlockId(4), &other);
        pool.copy_block_to(1, BlockId(0), BlockId(1), &other);
        assert_eq!(contents(&pool), before);
        other.copy_block_to(0, BlockId(4), BlockId(0), &pool);
        other.copy_block_to(1, BlockId(1), BlockId(2), &pool);
        let from = [2, 1, 2, 5, 4, 5, 6, 7, 6];
        assert_eq!(contents(&pool), from.map(|at| before[at].clone()));
    }

    /// A copy takes a block's bytes in every layer of its group, and touches no other.
    #[test]
    fn a_block_is_copied_in_every_layer_of_its_group() {
        let pool = numbered();
        let before = contents(&pool);
        pool.copy_block(0, BlockId(2), BlockId(1));
        for (number, (group, layer, block)) in places().enumerate() {
            let from = if (group, block) == (0, BlockId(1)) { number + 1 } else { number };
            assert_eq!(pool.block_bytes(group, layer, block), before[from]);
        }
    }
}
