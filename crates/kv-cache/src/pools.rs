//! All layer groups of one worker, and what happens to the tokens that own blocks in them.
//!
//! A token is consumed by the transition that ends it, so a block can neither be given back twice nor be used after it
//! was given back. What the types cannot exclude (a token of another pool) is an error, and a failed assertion in debug
//! builds. The prefix cache's part is in [`crate::reuse`].

use baton_types::{BlockId, PoolGeometry};

use crate::prefix::{NodeId, PrefixIndex};
use crate::tokens::Chain;
use crate::{
    BlockCounts, BlockPool, BlockState, BlockTable, CacheConfig, HOLE, Hit, KvError, Lease, Prefix, Quarantine, Tables,
};

/// One [`BlockPool`] per layer group, and the prefixes in them.
#[derive(Debug)]
pub struct KvPools {
    pub(crate) pools: Vec<BlockPool>,
    pub(crate) block_size: u32,
    /// Tokens a query sees, by group.
    pub(crate) windows: Vec<Option<u32>>,
    pub(crate) index: PrefixIndex,
    evictions: u64,
}

impl KvPools {
    /// All blocks of `geometry`, free.
    pub fn new(geometry: &PoolGeometry, cache: CacheConfig) -> Result<Self, KvError> {
        let error = |field, value, must| Err(KvError::Geometry { field, value, must });
        let (groups, blocks) = (&geometry.layout.groups, &geometry.blocks);
        if geometry.layout.block_size == 0 {
            return error("block_size", 0, "at least 1");
        }
        if groups.is_empty() {
            return error("groups", 0, "at least 1");
        }
        if blocks.len() != groups.len() {
            return error("blocks", blocks.len(), "one number per layer group");
        }
        if blocks.contains(&0) {
            return error("blocks", 0, "at least 1 in every layer group");
        }
        let pools = blocks.iter().enumerate().map(|(group, total)| BlockPool::new(group, *total)).collect();
        let windows: Vec<Option<u32>> = groups.iter().map(|group| group.window).collect();
        let index =
            PrefixIndex::new(cache, blocks.iter().zip(&windows).map(|(total, window)| (*total, window.is_some())));
        Ok(KvPools { pools, block_size: geometry.layout.block_size, windows, index, evictions: 0 })
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Layer groups.
    pub fn groups(&self) -> usize {
        self.pools.len()
    }

    /// Blocks each group needs for `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// The most tokens one sequence can ever have: those the smallest group holds.
    pub fn capacity_tokens(&self) -> u64 {
        let smallest = self.pools.iter().map(|pool| pool.counts().total).min().unwrap_or(0);
        u64::from(smallest) * u64::from(self.block_size)
    }

    /// Blocks by state, over all groups.
    pub fn counts(&self) -> BlockCounts {
        self.pools.iter().fold(BlockCounts::default(), |sum, pool| sum + pool.counts())
    }

    /// The pool of a layer group.
    pub fn group(&self, group: usize) -> Option<&BlockPool> {
        self.pools.get(group)
    }

    /// Blocks taken from the prefix cache so far, because they were needed or the index was full.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// I6 for every group and the index. Cheap enough for every step of a debug build, not for production steps.
    pub fn check(&self) -> Result<(), KvError> {
        self.pools.iter().try_for_each(BlockPool::check)?;
        self.check_index()
    }

    /// Tables that cover `tokens` tokens and are never shared, or nothing taken.
    pub fn allocate(&mut self, tokens: u32) -> Result<Tables, KvError> {
        self.seat(&Hit::default(), None, tokens)
    }

    /// Tables that cover `tokens` tokens and begin with what a lookup has just found, or nothing taken. With a prefix, what
    /// is computed later can be indexed under it.
    pub fn seat(&mut self, hit: &Hit, prefix: Option<Prefix>, tokens: u32) -> Result<Tables, KvError> {
        self.fits(hit, tokens, 0)?;
        let (mut tables, chain) = self.shared(hit, prefix)?;
        let sources = self.hold_sources(hit)?;
        self.extend(&mut tables, tokens, BlockPool::allocate)?;
        Ok(Tables { tables, chain, sources, copy_to: hit.blocks() })
    }

    /// Makes `tables` cover `tokens` tokens, in every group or in none, evicting what is needed. Never shrinks.
    pub fn grow(&mut self, tables: &mut Tables, tokens: u32) -> Result<(), KvError> {
        self.own(&tables.tables)?;
        let need = self.blocks_for(tokens) as usize;
        for (group, (pool, table)) in self.pools.iter().zip(&tables.tables).enumerate() {
            let wanted = need.saturating_sub(table.blocks.len());
            let (counts, available) = (pool.counts(), pool.counts().free + pool.counts().cached);
            if wanted > available as usize {
                return Err(KvError::OutOfBlocks { group, wanted, free: (counts.free + counts.cached) as usize });
            }
        }
        self.extend(&mut tables.tables, tokens, BlockPool::allocate)
    }

    /// Blocks for `tokens` tokens: those a lookup has just found, the rest for a peer to write to; or nothing taken.
    pub fn lend(&mut self, hit: &Hit, prefix: Option<Prefix>, tokens: u32) -> Result<Lease, KvError> {
        debug_assert!(hit.copy.is_none(), "a peer writes whole blocks");
        self.fits(hit, tokens, 0)?;
        let (mut tables, chain) = self.shared(hit, prefix)?;
        self.extend(&mut tables, tokens, BlockPool::lend)?;
        Ok(Lease { tables, chain, shared: hit.blocks() })
    }

    /// The peer's writes are complete and verified (I2), its access is over (I3): the blocks are ours.
    pub fn accept(&mut self, lease: Lease) -> Result<Tables, KvError> {
        let Lease { tables, chain, shared } = lease;
        self.each(&tables, |pools, group, at, block| match at < shared {
            true => Ok(()),
            false => pools.pools[group].accept(block),
        })?;
        Ok(Tables { tables, chain, sources: Vec::new(), copy_to: 0 })
    }

    /// Takes lent blocks back at once. Only when no peer can write to them (I3): none was told, or it acknowledged.
    pub fn reclaim(&mut self, lease: Lease) -> Result<(), KvError> {
        self.each(&lease.tables, |pools, group, at, block| match at < lease.shared {
            true => pools.release(group, block),
            false => pools.pools[group].reclaim(block),
        })
    }

    /// Takes lent blocks back that a peer may still write to; nobody gets them before [`Self::clear_quarantine`]. The shared
    /// ones it never could write to are given back at once.
    pub fn quarantine(&mut self, lease: Lease) -> Result<Quarantine, KvError> {
        let Lease { mut tables, shared, .. } = lease;
        self.each(&tables, |pools, group, at, block| match at < shared {
            true => pools.release(group, block),
            false => pools.pools[group].quarantine(block),
        })?;
        tables.iter_mut().for_each(|table| table.cut(shared));
        Ok(Quarantine(tables))
    }

    /// The same for blocks of our own that a transfer may still read. Those that are indexed or have other owners never
    /// change, so others may go on reading them: of these the quarantine keeps a reference, and the state stays Used.
    pub fn quarantine_used(&mut self, tables: Tables) -> Result<Quarantine, KvError> {
        self.release_sources(&tables.sources)?;
        self.each(&tables.tables, |pools, group, _, block| {
            let shared = pools.pools[group].state(block)? != (BlockState::Used, 1);
            match shared || pools.index.node_of(group, block).is_some() {
                true => Ok(()),
                false => pools.pools[group].quarantine(block),
            }
        })?;
        Ok(Quarantine(tables.tables))
    }

    /// The fence is confirmed: the blocks are free, or cached where they are indexed.
    pub fn clear_quarantine(&mut self, quarantine: Quarantine) -> Result<(), KvError> {
        self.each(&quarantine.0, |pools, group, _, block| match pools.pools[group].state(block)?.0 {
            BlockState::Used => pools.release(group, block),
            _ => pools.pools[group].clear_quarantine(block),
        })
    }

    /// Gives blocks back; what is indexed stays cached.
    pub fn free(&mut self, tables: Tables) -> Result<(), KvError> {
        self.release_sources(&tables.sources)?;
        self.each(&tables.tables, |pools, group, _, block| pools.release(group, block))
    }

    /// One owner less for a block in use.
    pub(crate) fn release(&mut self, group: usize, block: BlockId) -> Result<(), KvError> {
        if self.index.node_of(group, block).is_none() {
            return self.pools[group].free(block);
        }
        let last = self.pools[group].state(block)?.1 == 1;
        self.pools[group].cache(block)?;
        self.index.released(group, block, last);
        Ok(())
    }

    /// One owner more for an indexed block.
    pub(crate) fn hold(&mut self, group: usize, block: BlockId) -> Result<(), KvError> {
        let first = self.pools[group].state(block)?.0 == BlockState::Cached;
        self.pools[group].share(block)?;
        self.index.held(group, block, first);
        Ok(())
    }

    pub(crate) fn release_sources(&mut self, sources: &[BlockId]) -> Result<(), KvError> {
        sources.iter().enumerate().try_for_each(|(group, block)| self.release(group, *block))
    }

    /// Frees a cached block of the group, if there is one.
    fn evict(&mut self, group: usize) -> Result<bool, KvError> {
        if let Some((block, empty)) = self.index.evict_block(group) {
            self.evictions += 1;
            self.pools[group].evict(block)?;
            return empty.map_or(Ok(()), |id| self.drop_leaf(id)).map(|()| true);
        }
        match self.index.next_leaf() {
            Some(id) if self.windows[group].is_none() => self.drop_leaf(id).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Takes a leaf nobody holds out of the index, and what it leaves hollow above.
    pub(crate) fn drop_leaf(&mut self, id: NodeId) -> Result<(), KvError> {
        let mut next = Some(id);
        while let Some(id) = next {
            let parent = self.index.parent(id);
            self.index.evicted(id);
            for (group, block) in self.index.remove(id).iter().enumerate() {
                if let Some(block) = block {
                    self.evictions += 1;
                    self.pools[group].evict(*block)?;
                }
            }
            next = parent.and_then(|parent| self.index.hollow_parent(parent));
        }
        Ok(())
    }

    fn shared(&mut self, hit: &Hit, prefix: Option<Prefix>) -> Result<(Vec<BlockTable>, Option<Chain>), KvError> {
        let mut tables: Vec<BlockTable> = self.pools.iter().map(|_| BlockTable::default()).collect();
        for (group, table) in tables.iter_mut().enumerate() {
            table.holes = self.first_shared(group, hit);
            table.tokens = hit.blocks() * self.block_size;
            for (at, id) in hit.path.iter().enumerate() {
                let block = if at < table.holes as usize { None } else { self.index.block(*id, group) };
                if let Some(block) = block {
                    self.hold(group, block)?;
                }
                table.blocks.push(block.unwrap_or(HOLE));
            }
        }
        let chain = prefix.filter(|_| self.index.enabled()).map(|prefix| {
            hit.path.iter().chain(hit.copy.iter().map(|(id, _)| id)).for_each(|id| self.index.touch(*id, &prefix));
            let mut chain = Chain::new(prefix);
            if let Some(tip) = hit.path.last() {
                (chain.blocks, chain.tip) = (hit.blocks(), crate::prefix::Parent::Node(*tip));
            }
            chain
        });
        Ok((tables, chain))
    }

    fn extend(
        &mut self,
        tables: &mut [BlockTable],
        tokens: u32,
        take: fn(&mut BlockPool, usize, &mut Vec<BlockId>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        let need = self.blocks_for(tokens) as usize;
        for (group, table) in tables.iter_mut().enumerate() {
            let wanted = need.saturating_sub(table.blocks.len());
            while (self.pools[group].counts().free as usize) < wanted && self.evict(group)? {}
            take(&mut self.pools[group], wanted, &mut table.blocks)?;
            table.tokens = table.tokens.max(tokens);
        }
        Ok(())
    }

    /// Last block first, so that the next sequence gets the same run of blocks in ascending order, and the end of a chain
    /// is older than its beginning.
    fn each(
        &mut self,
        tables: &[BlockTable],
        change: impl Fn(&mut Self, usize, u32, BlockId) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.own(tables)?;
        for (group, table) in tables.iter().enumerate() {
            for (at, block) in table.blocks.iter().enumerate().skip(table.holes as usize).rev() {
                let done = change(self, group, at as u32, *block);
                debug_assert!(done.is_ok(), "a token of another pool: {done:?}");
                done?;
            }
        }
        Ok(())
    }

    fn own(&self, tables: &[BlockTable]) -> Result<(), KvError> {
        let (ours, theirs) = (self.pools.len(), tables.len());
        if ours == theirs { Ok(()) } else { Err(KvError::ForeignTables { ours, theirs }) }
    }
}
