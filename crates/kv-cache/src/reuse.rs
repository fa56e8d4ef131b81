//! The prefix cache over the pools: what a new sequence can reuse, and what a running one leaves for others.

use baton_types::{BlockId, Time};

use crate::prefix::{NodeId, Parent};
use crate::tokens::Chain;
use crate::{BlockState, BlockTable, HOLE, KvError, KvPools, LentTables, Need, Prefix, Tables};

/// What a lookup found; good until the pools change.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Hit {
    pub(crate) path: Vec<NodeId>,
    /// A block whose first so many tokens are the next ones.
    pub(crate) copy: Option<(NodeId, u32)>,
    pub(crate) tokens: u32,
}

impl Hit {
    /// Leading tokens that need not be computed.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Leading full blocks that are shared.
    pub fn blocks(&self) -> u32 {
        self.path.len() as u32
    }

    /// The same without a block to copy, which needs one more block than the sequence itself, and is nothing a peer can write
    /// the rest of.
    pub fn without_copy(mut self) -> Hit {
        if let Some((_, tokens)) = self.copy.take() {
            self.tokens -= tokens;
        }
        self
    }
}

/// Who may be reading a sequence's blocks by its tables as they are.
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
    /// The longest beginning of `tokens` that is here, at most all but the last: that one is computed for its logits.
    pub fn lookup(&self, prefix: &Prefix, tokens: &[u32]) -> Hit {
        let size = self.block_size as usize;
        let most = &tokens[..tokens.len().saturating_sub(1)];
        let (mut path, mut tip) = (Vec::new(), Parent::Root(prefix.seed));
        for block in most.chunks_exact(size) {
            let Some(id) = self.index.child(tip, block) else { break };
            path.push(id);
            tip = Parent::Node(id);
        }
        path.truncate(self.usable(&path));
        let tip = path.last().map_or(Parent::Root(prefix.seed), |id| Parent::Node(*id));
        let done = path.len() * size;
        let next = &most[done..most.len().min(done + size)];
        let copy = self.index.nearest(tip, next);
        let whole = |id: NodeId| (0..self.groups()).all(|group| self.index.block(id, group).is_some());
        let copy = copy.filter(|(id, common)| *common > 0 && whole(*id));
        Hit { path, copy, tokens: done as u32 + copy.map_or(0, |(_, common)| common) }
    }

    /// How many blocks of a path a sequence can go on from: the most such that each group has those its queries see.
    fn usable(&self, path: &[NodeId]) -> usize {
        // By group, the sinks that are here, and the first block of the run without a gap that ends here.
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

    /// Whether a sequence that begins with `hit` finds room for what it needs, and `spare` blocks beyond in each group.
    pub fn fits(&self, hit: &Hit, need: Need, spare: u32) -> Result<(), KvError> {
        let position = if need.received { need.tokens } else { hit.tokens };
        for (group, pool) in self.pools.iter().enumerate() {
            let (live, end) = (self.live(group, position), self.blocks_for(self.covers(group, hit, need)));
            let missing = live.missing(hit.blocks(), end);
            let wanted = (end.saturating_sub(hit.blocks()) - missing) as usize + spare as usize;
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

    /// Leading blocks that have other owners too, in every group: what these tables keep from being cached is what follows.
    pub fn leading_shared(&self, tables: &Tables) -> u32 {
        let shared = |group: usize, block: &BlockId| {
            *block == HOLE || self.pools[group].state(*block).is_ok_and(|(_, owners)| owners > 1)
        };
        let leading = |(group, table): (usize, &BlockTable)| {
            table.blocks().iter().take_while(|block| shared(group, block)).count() as u32
        };
        tables.tables.iter().enumerate().map(leading).min().unwrap_or(0)
    }

    /// Whether one that begins with `tokens` leading tokens of the sequence these blocks are lent for will find in them what it
    /// needs: in groups with a window, not all are lent.
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

    /// The copies of [`Tables::copies`] are made.
    pub fn copied(&mut self, tables: &mut Tables) -> Result<(), KvError> {
        let sources = std::mem::take(&mut tables.sources);
        self.release_sources(&sources)
    }

    /// Indexes what is full: `tokens` are those whose KV is in the tables. With `seal` also the block that is partly full.
    ///
    /// When another sequence has indexed the same tokens, its block takes the place of ours, which is freed: both hold the
    /// same KV (I1). Not while ours has other `readers` (I3): behind a transfer nothing more of this sequence is indexed, behind
    /// a step it is next time. Nor is anything before its copies are made: until then its last block is not there.
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
        let at = chain.blocks as usize;
        let id = match self.index.child(chain.tip, tokens) {
            Some(_) if exposed => return Ok(false),
            Some(id) => {
                self.merge(tables, at, id)?;
                id
            }
            None => match self.add(tables, chain.tip, at, tokens)? {
                Some(id) => id,
                None => return Ok(false),
            },
        };
        self.index.touch(id, &chain.prefix);
        (chain.blocks, chain.tip) = (chain.blocks + 1, Parent::Node(id));
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
        chain.partial = self.add(tables, chain.tip, chain.blocks as usize, tokens)?;
        if let Some(id) = chain.partial {
            self.index.touch(id, &chain.prefix);
        }
        Ok(())
    }

    /// A new node for the block at an index of the tables, in place of the next leaf when the index is full.
    fn add(
        &mut self,
        tables: &[BlockTable],
        parent: Parent,
        at: usize,
        tokens: &[u32],
    ) -> Result<Option<NodeId>, KvError> {
        let blocks: Box<[Option<BlockId>]> =
            tables.iter().map(|table| table.blocks.get(at).copied().filter(|block| *block != HOLE)).collect();
        let mut held = 0;
        for (pool, block) in self.pools.iter().zip(&blocks) {
            held += block.map_or(Ok(0), |block| pool.state(block).map(|(_, refs)| refs))?;
        }
        if let Some(id) = self.index.insert(parent, tokens, blocks.clone(), held) {
            return Ok(Some(id));
        }
        let Some(leaf) = self.index.next_leaf() else { return Ok(None) };
        self.drop_leaf(leaf)?;
        Ok(self.index.insert(parent, tokens, blocks, held))
    }

    /// Our block gives way to the index's; where the index has none, ours becomes it.
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

    /// Gives back, in groups with a window, the blocks that no query from `position` on sees.
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

    /// Time passes for prefixes that are kept: those whose time is over count as any other.
    pub fn advance(&mut self, now: Time) {
        self.index.advance(now);
    }

    /// Empties the prefix cache of all that nobody uses.
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

    /// Indexed blocks of tokens.
    pub fn indexed(&self) -> usize {
        self.index.len()
    }

    /// Those of them that are kept ([`Prefix::keep`]).
    pub fn kept(&self) -> u32 {
        self.index.kept()
    }

    pub(crate) fn check_index(&self) -> Result<(), KvError> {
        self.index.check(&self.pools)
    }
}
