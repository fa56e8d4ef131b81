//! The prefix cache over the pools: which blocks a new sequence can reuse, and which blocks a running one leaves for others.

use baton_types::{BlockId, Time};

use crate::prefix::{Block, NodeId, Parent};
use crate::tokens::Chain;
use crate::{BlockName, BlockState, BlockTable, Cached, HOLE, KvError, KvPools, LentTables, Need, Prefix, Tables};

/// The result of a lookup. Valid until the pools change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hit {
    /// Nodes of the leading full blocks, in token order.
    pub(crate) path: Vec<NodeId>,
    /// A block to copy, and how many of its first tokens match the tokens after `path`.
    pub(crate) copy: Option<(NodeId, u32)>,
    pub(crate) tokens: u32,
}

impl Hit {
    /// Leading tokens that need not be computed.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Number of leading full blocks that are shared.
    pub fn blocks(&self) -> u32 {
        self.path.len() as u32
    }

    /// The same hit without its block to copy. Copying holds one block more than the sequence itself needs, and a peer writes
    /// whole blocks only, so it cannot complete a copied one.
    pub fn without_copy(mut self) -> Hit {
        if let Some((_, tokens)) = self.copy.take() {
            self.tokens -= tokens;
        }
        self
    }
}

/// Who may be reading a sequence's blocks through its current block tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Readers {
    /// Nobody.
    Nobody,
    /// A step in flight, which ends soon.
    Step,
    /// A transfer to a peer.
    Transfer,
}

impl KvPools {
    /// The longest cached prefix of `tokens`. It never includes the last token, which must be computed for its logits.
    pub fn lookup(&self, prefix: &Prefix, tokens: &[u32]) -> Hit {
        let size = self.block_size as usize;
        let most = &tokens[..tokens.len().saturating_sub(1)];
        let (mut path, mut tip) = (Vec::new(), Parent::Root(prefix.seed));
        for block in most.chunks_exact(size) {
            let Some(id) = self.index.child(tip, block).filter(|id| !self.index.is_spoilt(*id)) else { break };
            path.push(id);
            tip = Parent::Node(id);
        }
        path.truncate(self.usable(&path));
        let tip = path.last().map_or(Parent::Root(prefix.seed), |id| Parent::Node(*id));
        let done = path.len() * size;
        let next = &most[done..most.len().min(done + size)];
        let copy = self.index.nearest(tip, next);
        let whole = |id: NodeId| (0..self.groups()).all(|group| self.index.block(id, group).is_some());
        let copy = copy.filter(|(id, common)| *common > 0 && whole(*id) && !self.index.is_spoilt(*id));
        Hit { path, copy, tokens: done as u32 + copy.map_or(0, |(_, common)| common) }
    }

    /// The blocks of a group that hold a hit's leading full blocks of tokens, up to the first that its window has passed.
    pub fn blocks_of(&self, hit: &Hit, group: usize) -> Vec<BlockId> {
        hit.path.iter().map_while(|id| self.index.block(*id, group)).collect()
    }

    /// How many leading blocks of a path a sequence can continue from: the most for which every group has the blocks that its
    /// queries see.
    fn usable(&self, path: &[NodeId]) -> usize {
        // Per group: the leading sink blocks present, and the first block of the gap-free run that ends at this block.
        let mut runs = vec![(0, 0); self.groups()];
        let mut usable = 0;
        for (at, id) in (0..).zip(path) {
            let mut enough = true;
            for (group, (sinks, run)) in runs.iter_mut().enumerate() {
                match self.index.block(*id, group) {
                    Some(_) => *sinks += u32::from(*sinks == at),
                    None => *run = at + 1,
                }
                let live = self.live(group, (at + 1) * self.block_size);
                enough &= *run <= live.first && *sinks >= live.sinks.min(at + 1);
            }
            if enough {
                usable = at as usize + 1;
            }
        }
        usable
    }

    /// Ok when there is room for a sequence that begins with `hit`, and for `spare` more blocks in each group.
    pub fn fits(&self, hit: &Hit, need: Need, spare: u32) -> Result<(), KvError> {
        self.fits_beside(hit, need, |_| spare)
    }

    /// Ok when there is room for a sequence that begins with `hit`, and for so many more blocks in each group.
    pub fn fits_beside(&self, hit: &Hit, need: Need, others: impl Fn(usize) -> u32) -> Result<(), KvError> {
        let position = if need.received { need.tokens } else { hit.tokens };
        for (group, pool) in self.pools.iter().enumerate() {
            let (live, end) = (self.live(group, position), self.blocks_for(self.covers(group, hit.tokens, need)));
            let missing = live.missing(hit.blocks(), end);
            let wanted = (end.saturating_sub(hit.blocks()) - missing) as usize + others(group) as usize;
            let needed = (0..).zip(&hit.path).filter(|(at, _)| live.contains(*at)).map(|(_, id)| id);
            let kept = needed.chain(hit.copy.iter().map(|(id, _)| id));
            let revived = kept.filter(|id| self.cached(group, **id)).count();
            let counts = pool.counts();
            let free = (counts.free + counts.cached) as usize - revived;
            if wanted > free {
                return Err(KvError::OutOfBlocks { group, wanted, free });
            }
        }
        Ok(())
    }

    /// Blocks of a group that a sequence takes, or finds, when it starts. `apart`: leading blocks that count elsewhere, where the group has no window.
    pub fn takes(&self, group: usize, need: Need, apart: u32) -> u32 {
        let live = self.live(group, if need.received { need.tokens } else { 0 });
        let end = self.blocks_for(self.covers(group, 0, need));
        let windowed = self.shapes[group].most_live(need.chunk, self.block_size).is_some();
        (end - live.missing(0, end)).saturating_sub(if windowed { 0 } else { apart })
    }

    /// Whether another sequence that shares the first `tokens` tokens will find all blocks it needs among these lent ones. In
    /// groups with a window, not all blocks are lent.
    pub fn will_hold(&self, lent: &LentTables, tokens: u32) -> bool {
        let blocks = self.blocks_for(tokens);
        lent.tables.iter().enumerate().all(|(group, table)| {
            let live = self.live(group, tokens - tokens % self.block_size);
            let here = |at: u32| table.blocks.get(at as usize).is_some_and(|block| *block != HOLE);
            (0..blocks).all(|at| !live.contains(at) || here(at))
        })
    }

    fn cached(&self, group: usize, id: NodeId) -> bool {
        let state = |block| self.pools[group].state(block);
        self.index.block(id, group).is_some_and(|block| matches!(state(block), Ok((BlockState::Cached, _))))
    }

    pub(crate) fn hold_sources(&mut self, hit: &Hit) -> Result<Vec<BlockId>, KvError> {
        let Some((id, _)) = hit.copy else { return Ok(Vec::new()) };
        let sources: Vec<BlockId> = (0..self.groups()).filter_map(|group| self.index.block(id, group)).collect();
        sources.iter().enumerate().try_for_each(|(group, block)| self.hold(group, *block))?;
        Ok(sources)
    }

    /// Releases the source blocks once the copies of [`Tables::copies`] are made.
    pub fn copied(&mut self, tables: &mut Tables) -> Result<(), KvError> {
        let sources = std::mem::take(&mut tables.sources);
        self.release_sources(&sources)
    }

    /// Indexes the full blocks of a sequence, and with `seal` also its partly full last block. `tokens` are the tokens whose KV
    /// is in the tables.
    ///
    /// When another sequence has indexed the same tokens, its block replaces ours, which is freed: both hold the same KV (I1).
    /// A block that may have other `readers` is not replaced (I3). Indexing then stops there:
    ///
    /// - [`Readers::Step`]: it continues at the next call.
    /// - [`Readers::Transfer`]: nothing more of this sequence is indexed.
    ///
    /// Nothing is indexed before the sequence's copies are made, because until then its last block lacks its KV.
    pub fn index(&mut self, tables: &mut Tables, tokens: &[u32], readers: Readers, seal: bool) -> Result<(), KvError> {
        let Tables { tables, chain: place, sources, .. } = tables;
        let Some(mut chain) = place.take_if(|_| sources.is_empty()) else { return Ok(()) };
        let size = self.block_size as usize;
        while let Some(block) = tokens.get(chain.blocks as usize * size..(chain.blocks as usize + 1) * size) {
            if !self.index_full(tables, &mut chain, block, readers != Readers::Nobody)? {
                *place = Some(chain).filter(|_| readers == Readers::Step);
                return Ok(());
            }
        }
        let rest = tokens.get(chain.blocks as usize * size..).unwrap_or_default();
        if seal && !rest.is_empty() {
            self.index_partial(tables, &mut chain, rest)?;
        }
        *place = Some(chain);
        Ok(())
    }

    /// Indexes the next full block. False when it cannot be indexed now. `exposed`: somebody may be reading the tables.
    fn index_full(
        &mut self,
        tables: &mut [BlockTable],
        chain: &mut Chain,
        tokens: &[u32],
        exposed: bool,
    ) -> Result<bool, KvError> {
        if let Some(partial) = chain.partial.take() {
            self.index.remove(partial);
        }
        if matches!(chain.tip, Parent::Node(tip) if self.index.is_spoilt(tip)) {
            return Ok(false);
        }
        let (at, name) = (chain.blocks as usize, chain.name.then(tokens));
        let id = match self.index.child(chain.tip, tokens) {
            Some(id) if exposed || self.index.is_spoilt(id) => return Ok(false),
            Some(id) => {
                self.merge(tables, at, id)?;
                id
            }
            None => match self.add(tables, chain.tip, at, Block { tokens, name: Some(name.name()) })? {
                Some(id) => id,
                None => return Ok(false),
            },
        };
        self.index.touch(id, &chain.prefix);
        (chain.blocks, chain.tip, chain.name) = (chain.blocks + 1, Parent::Node(id), name);
        Ok(true)
    }

    fn index_partial(&mut self, tables: &mut [BlockTable], chain: &mut Chain, tokens: &[u32]) -> Result<(), KvError> {
        let known = self.index.nearest(chain.tip, tokens);
        if known.is_some_and(|(_, common)| common as usize == tokens.len()) {
            return Ok(());
        }
        if let Some(partial) = chain.partial.take() {
            self.index.remove(partial);
        }
        chain.partial = self.add(tables, chain.tip, chain.blocks as usize, Block { tokens, name: None })?;
        if let Some(id) = chain.partial {
            self.index.touch(id, &chain.prefix);
        }
        Ok(())
    }

    /// Adds a node for the blocks at index `at` of the tables. When the index is full, evicts a leaf for it.
    fn add(
        &mut self,
        tables: &[BlockTable],
        parent: Parent,
        at: usize,
        block: Block<'_>,
    ) -> Result<Option<NodeId>, KvError> {
        let blocks: Box<[Option<BlockId>]> =
            tables.iter().map(|table| table.blocks.get(at).copied().filter(|block| *block != HOLE)).collect();
        let mut held = 0;
        for (pool, block) in self.pools.iter().zip(&blocks) {
            held += block.map_or(Ok(0), |block| pool.state(block).map(|(_, refs)| refs))?;
        }
        if let Some(id) = self.index.insert(parent, block, blocks.clone(), held) {
            return Ok(Some(id));
        }
        let Some(leaf) = self.index.next_leaf() else { return Ok(None) };
        self.drop_leaf(leaf)?;
        Ok(self.index.insert(parent, block, blocks, held))
    }

    /// Replaces our blocks with the index's blocks. In a group where the index has none, ours becomes the index's.
    fn merge(&mut self, tables: &mut [BlockTable], at: usize, id: NodeId) -> Result<(), KvError> {
        for (group, table) in tables.iter_mut().enumerate() {
            let Some(ours) = table.blocks.get_mut(at).filter(|block| **block != HOLE) else { continue };
            match self.index.block(id, group) {
                Some(theirs) => {
                    self.hold(group, theirs)?;
                    self.release(group, std::mem::replace(ours, theirs))?;
                }
                None => {
                    let (_, refs) = self.pools[group].state(*ours)?;
                    self.index.donate(id, group, *ours, refs);
                }
            }
        }
        Ok(())
    }

    /// In groups with a window, gives back the blocks that no query from `position` on sees.
    pub fn trim(&mut self, tables: &mut Tables, position: u32) -> Result<(), KvError> {
        let Tables { tables, chain, .. } = tables;
        let indexed = chain.map_or(u32::MAX, |chain| chain.blocks.saturating_sub(1));
        for (group, table) in tables.iter_mut().enumerate() {
            let passed = table.passed(self.live(group, position).first.min(indexed));
            for at in passed.clone() {
                self.release(group, table.blocks[at as usize])?;
            }
            table.cut(passed);
        }
        Ok(())
    }

    /// Sets the current time. Prefixes whose [`Prefix::keep_until`] has come are kept no longer.
    pub fn advance(&mut self, now: Time) {
        self.index.advance(now);
    }

    /// Evicts every block that no sequence uses from the prefix cache.
    pub fn clear_cache(&mut self) -> Result<(), KvError> {
        while let Some(leaf) = self.index.next_leaf() {
            self.drop_leaf(leaf)?;
        }
        for group in 0..self.groups() {
            while let Some((block, _)) = self.index.evict_block(group) {
                self.pools[group].evict(block)?;
            }
        }
        Ok(())
    }

    /// Notes the digest that a block in the prefix cache was verified with, to be compared when it is read again (I2).
    pub fn vouch(&mut self, group: usize, block: BlockId, digest: u64) {
        self.index.vouch(group, block, digest);
    }

    /// The digest that was noted of a block that is in the prefix cache. `None`: it was computed here.
    pub fn digest(&self, group: usize, block: BlockId) -> Option<u64> {
        self.index.digest(group, block)
    }

    /// A block's bytes are not what they were when it was verified: nobody finds it from now on, nor what continues it. Blocks that nobody holds are
    /// free at once, others when nobody holds them any more.
    pub fn spoilt(&mut self, group: usize, block: BlockId) -> Result<(), KvError> {
        let Some(id) = self.index.node_of(group, block) else { return Ok(()) };
        self.index.spoil(id).into_iter().try_for_each(|leaf| self.drop_leaf(leaf))
    }

    /// From now on notes which blocks enter and leave the index, for [`KvPools::take_changes`].
    pub fn note_changes(&mut self) {
        self.index.note_changes();
    }

    /// Passes on, in order, the full blocks that entered and left the index since the last call.
    pub fn take_changes(&mut self) -> impl Iterator<Item = Cached> {
        self.index.take_changes()
    }

    /// Names of all full blocks in the index, in no order.
    pub fn block_names(&self) -> impl Iterator<Item = BlockName> {
        self.index.names()
    }

    /// Number of indexed blocks of tokens.
    pub fn indexed(&self) -> usize {
        self.index.len()
    }

    /// Whether the prefix index names this block.
    pub fn is_indexed(&self, group: usize, block: BlockId) -> bool {
        self.index.node_of(group, block).is_some()
    }

    /// Number of indexed blocks of tokens that are kept ([`Prefix::keep`]).
    pub fn kept(&self) -> u32 {
        self.index.kept()
    }

    pub(crate) fn check_index(&self) -> Result<(), KvError> {
        self.index.check(&self.pools)
    }
}
