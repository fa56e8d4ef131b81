//! The block pools of all layer groups of one worker, and the transitions of ownership tokens.
//!
//! The transition that ends an ownership token consumes it. So a block cannot be given back twice, nor used after it was
//! given back. The types cannot exclude a token of another pool: that is an error, and a failed assertion in debug builds.
//! The prefix cache's part is in [`crate::reuse`].

use baton_types::{BlockId, KvGroup, LiveBlocks, PoolGeometry};

use crate::prefix::{NodeId, PrefixIndex};
use crate::tokens::Chain;
use crate::{
    BlockCounts, BlockPool, BlockState, BlockTable, CacheConfig, HOLE, Hit, KvError, LentTables, Prefix, Quarantine,
    Tables,
};

/// Which blocks a sequence of `tokens` tokens takes when it starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    pub(crate) tokens: u32,
    pub(crate) chunk: u32,
    pub(crate) received: bool,
}

impl Need {
    /// The blocks of all its tokens.
    pub fn whole(tokens: u32) -> Need {
        Need { tokens, chunk: u32::MAX, received: false }
    }

    /// The sequence is computed in chunks of at most `chunk` tokens. So groups with a window need only the blocks of the
    /// window and one chunk: later blocks are taken ([`KvPools::grow`]) as earlier ones are given back ([`KvPools::trim`]).
    pub fn chunks(tokens: u32, chunk: u32) -> Need {
        Need { tokens, chunk, received: false }
    }

    /// A peer computes the KV. Only the blocks that the token after the last one sees are ever here.
    pub fn received(tokens: u32) -> Need {
        Need { tokens, chunk: u32::MAX, received: true }
    }
}

/// One [`BlockPool`] per layer group, and the prefixes in them.
#[derive(Debug)]
pub struct KvPools {
    pub(crate) pools: Vec<BlockPool>,
    pub(crate) block_size: u32,
    /// Shape of each layer group, with the window and sinks its queries see.
    pub(crate) shapes: Vec<KvGroup>,
    pub(crate) index: PrefixIndex,
    evictions: u64,
}

impl KvPools {
    /// Pools with all blocks of `geometry` free.
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
        let windowed = blocks.iter().zip(groups).map(|(total, group)| (*total, group.window.is_some()));
        let index = PrefixIndex::new(cache, windowed);
        let (block_size, shapes) = (geometry.layout.block_size, groups.clone());
        Ok(KvPools { pools, block_size, shapes, index, evictions: 0 })
    }

    /// Tokens per block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Number of layer groups.
    pub fn groups(&self) -> usize {
        self.pools.len()
    }

    /// Blocks each group needs for `tokens` tokens.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Most tokens one sequence can ever have when it is computed in chunks of at most `chunk` tokens: as many as the smallest
    /// group holds. A group with a window sets no limit if it has room for the window and one chunk.
    pub fn capacity_tokens(&self, chunk: u32) -> u64 {
        let limit = |(pool, shape): (&BlockPool, &KvGroup)| {
            let total = pool.counts().total;
            let bounded = shape.most_live(chunk, self.block_size).is_some_and(|most| most <= total);
            if bounded { u64::MAX } else { u64::from(total) * u64::from(self.block_size) }
        };
        self.pools.iter().zip(&self.shapes).map(limit).min().unwrap_or(0)
    }

    /// The blocks of a group that are needed to compute `position` and later positions.
    pub(crate) fn live(&self, group: usize, position: u32) -> LiveBlocks {
        self.shapes[group].live(position, self.block_size)
    }

    /// Tokens that a group's table covers at the start of a sequence whose first `has` tokens are there.
    pub(crate) fn covers(&self, group: usize, has: u32, need: Need) -> u32 {
        match self.shapes[group].most_live(need.chunk, self.block_size) {
            Some(most) if !need.received => {
                let live = self.live(group, has);
                let end = live.first.max(live.sinks).saturating_add(most - live.sinks);
                need.tokens.min(end.saturating_mul(self.block_size))
            }
            _ => need.tokens,
        }
    }

    /// Blocks by state, over all groups.
    pub fn counts(&self) -> BlockCounts {
        self.pools.iter().fold(BlockCounts::default(), |sum, pool| sum + pool.counts())
    }

    /// The pool of a layer group.
    pub fn group(&self, group: usize) -> Option<&BlockPool> {
        self.pools.get(group)
    }

    /// Blocks evicted from the prefix cache so far, because they were needed or the index was full.
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Checks I6 for every group and the index. Cheap enough for every step of a debug build, but not for production steps.
    pub fn check(&self) -> Result<(), KvError> {
        self.pools.iter().try_for_each(BlockPool::check)?;
        self.check_index()
    }

    /// Takes tables that cover `tokens` tokens and never enter the prefix index. Takes nothing on error.
    pub fn allocate(&mut self, tokens: u32) -> Result<Tables, KvError> {
        self.seat(&Hit::default(), None, Need::whole(tokens))
    }

    /// Takes tables for `need` that begin with the blocks a lookup has just found. Takes nothing on error. With a `prefix`,
    /// blocks computed later can be indexed under it.
    pub fn seat(&mut self, hit: &Hit, prefix: Option<Prefix>, need: Need) -> Result<Tables, KvError> {
        self.fits(hit, need, 0)?;
        let (mut tables, chain) = self.shared(hit, prefix, hit.tokens)?;
        let sources = self.hold_sources(hit)?;
        for (group, table) in tables.iter_mut().enumerate() {
            self.extend(group, table, self.covers(group, hit.tokens, need), 0, BlockPool::allocate)?;
        }
        Ok(Tables { tables, chain, sources, copy_to: hit.blocks() })
    }

    /// Makes `tables` cover `tokens` tokens, in every group or in none. Evicts cached blocks as needed. Never shrinks.
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
        for (group, table) in tables.tables.iter_mut().enumerate() {
            self.extend(group, table, tokens, 0, BlockPool::allocate)?;
        }
        Ok(())
    }

    /// Reserves blocks for `tokens` tokens: it shares the blocks a lookup has just found, and lends the rest to a peer to write
    /// to. Blocks that the next token does not see are neither shared nor lent. Takes nothing on error.
    pub fn lend(&mut self, hit: &Hit, prefix: Option<Prefix>, tokens: u32) -> Result<LentTables, KvError> {
        debug_assert!(hit.copy.is_none(), "a peer writes whole blocks");
        self.fits(hit, Need::received(tokens), 0)?;
        let (mut tables, chain) = self.shared(hit, prefix, tokens)?;
        for (group, table) in tables.iter_mut().enumerate() {
            self.extend(group, table, tokens, tokens, BlockPool::lend)?;
        }
        // Received blocks are indexed below the hit. To stay there, every node from the hit's last block on needs an owned
        // block in some group: one group must have no hole there.
        let joined = |table: &BlockTable| table.holes == 0 || table.sinks + table.holes < hit.blocks();
        let chain = chain.filter(|_| tables.iter().any(joined));
        Ok(LentTables { tables, chain, shared: hit.blocks() })
    }

    /// Turns lent blocks into blocks in use. The peer's writes must be complete and verified (I2), and its access over (I3); see also
    /// [`Self::take_over`].
    pub fn accept(&mut self, lent: LentTables) -> Result<Tables, KvError> {
        let LentTables { tables, chain, shared } = lent;
        self.each(&tables, |pools, group, at, block| match at < shared {
            true => Ok(()),
            false => pools.pools[group].accept(block),
        })?;
        Ok(Tables { tables, chain, sources: Vec::new(), copy_to: 0 })
    }

    /// Whether there are blocks for a sequence of this need that begins with all of these lent blocks.
    pub fn fits_behind(&self, lent: &LentTables, need: Need) -> bool {
        self.pools.iter().zip(&lent.tables).enumerate().all(|(group, (pool, table))| {
            let end = self.blocks_for(self.covers(group, table.tokens, need));
            let (counts, wanted) = (pool.counts(), end.saturating_sub(table.blocks.len() as u32));
            wanted <= counts.free + counts.cached
        })
    }

    /// Turns lent blocks into the first ones of a sequence while they are still written to. Whoever computes with them waits in each layer until it
    /// is complete and verified (I2). They may be given back once nobody writes to them (I3). What is indexed of them later is under `prefix`.
    pub fn take_over(&mut self, lent: LentTables, prefix: Prefix, need: Need) -> Result<Tables, KvError> {
        let shared = lent.shared as usize;
        let mut taken = self.accept(lent)?;
        if let Some(chain) = &mut taken.chain {
            chain.prefix = prefix;
            for at in 0..shared {
                let ids = taken
                    .tables
                    .iter()
                    .enumerate()
                    .filter_map(|(group, table)| self.index.node_of(group, table.blocks[at]));
                if let Some(id) = { ids }.next() {
                    self.index.touch(id, &prefix);
                }
            }
        }
        for (group, table) in taken.tables.iter_mut().enumerate() {
            let tokens = self.covers(group, table.tokens, need);
            self.extend(group, table, tokens, 0, BlockPool::allocate)?;
        }
        Ok(taken)
    }

    /// Takes lent blocks back at once. Only allowed when no peer can write to them (I3): either no peer was told of them, or
    /// the peer has acknowledged that its access is over.
    pub fn reclaim(&mut self, lent: LentTables) -> Result<(), KvError> {
        self.each(&lent.tables, |pools, group, at, block| match at < lent.shared {
            true => pools.release(group, block),
            false => pools.pools[group].reclaim(block),
        })
    }

    /// Takes back lent blocks that a peer may still write to. Nobody gets them before [`Self::clear_quarantine`]. Shared
    /// blocks, which the peer could never write to, are given back at once.
    pub fn quarantine(&mut self, lent: LentTables) -> Result<Quarantine, KvError> {
        let LentTables { mut tables, shared, .. } = lent;
        self.each(&tables, |pools, group, at, block| match at < shared {
            true => pools.release(group, block),
            false => pools.pools[group].quarantine(block),
        })?;
        // The shared blocks were given back, so the quarantine must not hold them.
        tables.iter_mut().for_each(|table| table.blocks[..shared as usize].fill(HOLE));
        Ok(Quarantine(tables))
    }

    /// Quarantines blocks in use that a transfer may still read. Blocks that are indexed or have other owners never change, so
    /// others may go on reading them: they stay Used, and the quarantine keeps a reference to them.
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

    /// Ends a quarantine, once its fence is confirmed. Its blocks become free, or lose an owner where they stayed Used.
    pub fn clear_quarantine(&mut self, quarantine: Quarantine) -> Result<(), KvError> {
        self.each(&quarantine.0, |pools, group, _, block| match pools.pools[group].state(block)?.0 {
            BlockState::Used => pools.release(group, block),
            _ => pools.pools[group].clear_quarantine(block),
        })
    }

    /// Gives blocks back. Indexed blocks stay cached.
    pub fn free(&mut self, tables: Tables) -> Result<(), KvError> {
        self.release_sources(&tables.sources)?;
        self.each(&tables.tables, |pools, group, _, block| pools.release(group, block))
    }

    /// Removes one owner from a block in use.
    pub(crate) fn release(&mut self, group: usize, block: BlockId) -> Result<(), KvError> {
        if self.index.node_of(group, block).is_none() {
            return self.pools[group].free(block);
        }
        let last = self.pools[group].state(block)?.1 == 1;
        self.pools[group].cache(block)?;
        self.index.released(group, block, last);
        match self.index.node_of(group, block) {
            Some(id) if self.index.is_useless(id) => self.drop_leaf(id),
            _ => Ok(()),
        }
    }

    /// Adds one owner to an indexed block.
    pub(crate) fn hold(&mut self, group: usize, block: BlockId) -> Result<(), KvError> {
        let first = self.pools[group].state(block)?.0 == BlockState::Cached;
        self.pools[group].share(block)?;
        self.index.held(group, block, first);
        Ok(())
    }

    pub(crate) fn release_sources(&mut self, sources: &[BlockId]) -> Result<(), KvError> {
        sources.iter().enumerate().try_for_each(|(group, block)| self.release(group, *block))
    }

    /// Frees a cached block of the group. False when none can be evicted.
    fn evict(&mut self, group: usize) -> Result<bool, KvError> {
        if let Some((block, empty)) = self.index.evict_block(group) {
            self.evictions += 1;
            self.pools[group].evict(block)?;
            return empty.map_or(Ok(()), |id| self.drop_leaf(id)).map(|()| true);
        }
        match self.index.next_leaf() {
            Some(id) if self.shapes[group].window.is_none() => self.drop_leaf(id).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Evicts a leaf without owners from the index, then each ancestor that is of no use without it.
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
            next = parent.and_then(|parent| self.index.useless_parent(parent));
        }
        Ok(())
    }

    /// Tables that share those blocks of a hit that are needed to compute `position` and later positions.
    fn shared(
        &mut self,
        hit: &Hit,
        prefix: Option<Prefix>,
        position: u32,
    ) -> Result<(Vec<BlockTable>, Option<Chain>), KvError> {
        let mut tables: Vec<BlockTable> = self.pools.iter().map(|_| BlockTable::default()).collect();
        for (group, table) in tables.iter_mut().enumerate() {
            let live = self.live(group, position);
            (table.sinks, table.tokens) = (live.sinks, hit.blocks() * self.block_size);
            for (at, id) in (0..).zip(&hit.path) {
                match self.index.block(*id, group).filter(|_| live.contains(at)) {
                    Some(block) => {
                        self.hold(group, block)?;
                        table.blocks.push(block);
                    }
                    None => table.skip(1),
                }
            }
        }
        let chain = prefix.filter(|_| self.index.enabled()).map(|prefix| {
            hit.path.iter().chain(hit.copy.iter().map(|(id, _)| id)).for_each(|id| self.index.touch(*id, &prefix));
            let mut chain = Chain::new(prefix);
            if let Some(tip) = hit.path.last() {
                (chain.blocks, chain.tip) = (hit.blocks(), crate::prefix::Parent::Node(*tip));
                chain.name = chain.name.after(self.index.name(*tip).unwrap_or_default());
            }
            chain
        });
        Ok((tables, chain))
    }

    /// Makes a table cover `tokens` tokens. Blocks that are not needed to compute `position` become holes.
    fn extend(
        &mut self,
        group: usize,
        table: &mut BlockTable,
        tokens: u32,
        position: u32,
        take: fn(&mut BlockPool, usize, &mut Vec<BlockId>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        let (have, need) = (table.blocks.len() as u32, self.blocks_for(tokens));
        let live = self.live(group, position);
        let missing = live.missing(have, need);
        let wanted = need.saturating_sub(have) - missing;
        let before = if missing == 0 { wanted } else { live.sinks.saturating_sub(have) };
        while self.pools[group].counts().free < wanted && self.evict(group)? {}
        take(&mut self.pools[group], before as usize, &mut table.blocks)?;
        table.skip(missing);
        take(&mut self.pools[group], (wanted - before) as usize, &mut table.blocks)?;
        table.tokens = table.tokens.max(tokens);
        Ok(())
    }

    /// Applies `change` to every block but the holes, last block first. So the next sequence gets the same run of blocks in
    /// ascending order, and the end of a chain counts as less recently used than its beginning.
    fn each(
        &mut self,
        tables: &[BlockTable],
        change: impl Fn(&mut Self, usize, u32, BlockId) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.own(tables)?;
        for (group, table) in tables.iter().enumerate() {
            for (at, block) in table.blocks.iter().enumerate().filter(|(_, block)| **block != HOLE).rev() {
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
