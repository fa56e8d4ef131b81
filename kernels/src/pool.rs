//! The KV pool in host memory, as the kernels see it.

use std::any::Any;
use std::sync::Arc;

use baton_types::{BlockId, PoolGeometry, heads_of_rank};

use crate::KernelError;
use crate::pages::Region;

/// A region of host memory with a pool's geometry. Transfer threads write blocks of the same region; block states keep
/// the two apart: a block is read here only after it was verified, and never written while it is lent (I2, I3).
///
/// Or one rank's heads of such a region ([`HostPool::of_rank`]), which others see as a pool with all heads.
pub struct HostPool {
    base: *mut u8,
    /// What is here.
    geometry: PoolGeometry,
    /// How the region lies: the same with all heads.
    stored: PoolGeometry,
    /// Bytes of each plane before the heads that are here, per layer group.
    before: Vec<usize>,
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
            return Err(KernelError::Region(format!("a pool of {} bytes in a region of {bytes}", geometry.bytes())));
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
        let before = vec![0; geometry.layout.groups.len()];
        Ok(HostPool { base, stored: geometry.clone(), geometry, before, _owner: owner })
    }

    /// The heads of one of `ranks` ranks in this region. Ranks' heads lie apart, so all may be written at once.
    ///
    /// # Errors
    /// When some layers have fewer KV heads than there are ranks, or a number that these do not divide.
    pub fn of_rank(&self, ranks: u32, rank: u32) -> Result<HostPool, KernelError> {
        let groups = &self.stored.layout.groups;
        if let Some(group) = groups.iter().find(|group| ranks == 0 || !group.kv_heads.is_multiple_of(ranks)) {
            let heads = group.kv_heads;
            return Err(KernelError::Pool(format!("its {heads} KV heads cannot be shared out to {ranks} ranks")));
        }
        let first = |g: usize| heads_of_rank(groups[g].kv_heads, ranks, rank).start as usize;
        let before = (0..groups.len()).map(|g| first(g) * self.stored.layout.head_bytes(g)).collect();
        let geometry = self.stored.of_ranks(ranks);
        let (stored, owner) = (self.stored.clone(), Arc::clone(&self._owner));
        Ok(HostPool { base: self.base, geometry, stored, before, _owner: owner })
    }

    /// A pool in this process's own memory, zeroed, of which the system gives what is touched; for one-process runs and tests.
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

    /// How the region it is in lies, which is how far its planes and blocks are apart.
    pub(crate) fn stored(&self) -> &PoolGeometry {
        &self.stored
    }

    /// Whether all heads of the region are its own.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_whole(&self) -> bool {
        self.geometry == self.stored
    }

    /// Where it begins.
    #[cfg(feature = "cuda")]
    pub(crate) fn base(&self) -> *mut u8 {
        self.base
    }

    /// Start of a plane (0: K, 1: V) of one layer of a block: `[kv_head][slot][head_dim]`.
    pub(crate) fn plane(&self, group: usize, layer: usize, block: BlockId, plane: usize) -> *mut u8 {
        let range = self.stored.block_range(group, layer, block);
        let offset = plane * self.stored.layout.plane_bytes(group) + self.before[group];
        // SAFETY: `block_range` checks the indices, and the region holds the whole geometry.
        unsafe { self.base.add(range.start + offset) }
    }

    /// (layer, plane) of all planes of a group's blocks.
    fn planes(&self, group: usize) -> impl Iterator<Item = (usize, usize)> {
        let group = &self.geometry.layout.groups[group];
        let planes = group.planes as usize;
        (0..group.layers.len()).flat_map(move |layer| (0..planes).map(move |plane| (layer, plane)))
    }

    /// Copies a block to another, in all layers of the group. The caller makes sure that nobody writes either meanwhile.
    ///
    /// # Panics
    /// When group or blocks lie outside the pool.
    pub fn copy_block(&self, group: usize, from: BlockId, to: BlockId) {
        let bytes = self.geometry.layout.plane_bytes(group);
        for (layer, plane) in self.planes(group) {
            let (source, target) = (self.plane(group, layer, from, plane), self.plane(group, layer, to, plane));
            // SAFETY: `plane` checks the indices, planes of one layout have one size, and `copy` allows a block onto itself.
            unsafe { std::ptr::copy(source, target, bytes) };
        }
    }

    /// Bytes of one layer's part of a block. The caller makes sure that nobody writes it meanwhile.
    pub fn block_bytes(&self, group: usize, layer: usize, block: BlockId) -> Vec<u8> {
        let bytes = self.geometry.layout.plane_bytes(group);
        let mut out = vec![0; self.geometry.layout.block_bytes(group)];
        for (plane, out) in out.chunks_exact_mut(bytes).enumerate() {
            // SAFETY: inside the region, see `plane`.
            unsafe { std::ptr::copy_nonoverlapping(self.plane(group, layer, block, plane), out.as_mut_ptr(), bytes) };
        }
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

    /// Two ranks of a pool with two heads: what each has of a block is its head of each plane, and copies touch no other.
    #[test]
    fn ranks_have_their_heads_of_every_plane() {
        let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 2, head_dim: 8, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::Q8, block_size: 16, groups: vec![group] };
        let pool = HostPool::in_memory(PoolGeometry::uniform(layout, 3)).unwrap();
        let head = pool.geometry.layout.head_bytes(0);
        let ranks = [0, 1].map(|rank| pool.of_rank(2, rank).unwrap());
        for (rank, (layer, block)) in (0..2).flat_map(|r| [(0, 0), (0, 1), (1, 0)].map(|at| (r, at))) {
            for plane in 0..2 {
                // SAFETY: this rank's head of one plane, of a pool nobody else has.
                unsafe { ranks[rank].plane(0, layer, BlockId(block), plane).write_bytes(1 + rank as u8, head) };
            }
        }
        let heads = |pool: &HostPool, layer, block| {
            pool.block_bytes(0, layer, BlockId(block)).chunks(head).map(|head| head[0]).collect::<Vec<_>>()
        };
        assert_eq!(heads(&pool, 0, 0), [1, 2, 1, 2]);
        assert_eq!((heads(&ranks[0], 1, 0), heads(&ranks[1], 0, 1)), (vec![1, 1], vec![2, 2]));
        ranks[1].copy_block(0, BlockId(0), BlockId(2));
        assert_eq!((heads(&pool, 0, 2), heads(&pool, 1, 2)), (vec![0, 2, 0, 2], vec![0, 2, 0, 2]));
        ranks[0].copy_block(0, BlockId(1), BlockId(2));
        assert_eq!(heads(&pool, 0, 2), [1, 2, 1, 2]);
        let error = pool.of_rank(4, 0).err().unwrap().to_string();
        assert_eq!(error, "KV pool: its 2 KV heads cannot be shared out to 4 ranks");
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
