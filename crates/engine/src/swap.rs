//! KV of preempted sequences in host memory, outside the pool: when it goes there, where it is kept, when it comes
//! back.
//!
//! [`crate::plan`] preempts and asks here whether the blocks are worth keeping. [`crate::admit`] asks whether a
//! sequence comes back from here. The copies themselves are part of a step's batch:
//!
//! - Copies out of the pool are made first, so the same plan may give those blocks to others.
//! - A sequence that comes back has a row in the step that copies its KV in. So when that step ends, either the KV is
//!   back or the sequence has failed, and its host blocks are free.
//!
//! This module deliberately knows no bytes of KV and no memory. The runner keeps those, under the same block numbers.

use baton_kv_cache::{BlockCounts, BlockPool, HOLE, Hit, KvError, KvPools, Need, Tables};
use baton_types::{BlockId, KvLayout, PoolGeometry, SeqId};

use crate::sequence::{Phase, Sequence};
use crate::swapped::{HostBlock, Swapped};
use crate::{Engine, EngineError};

/// Whether and when preempted sequences are swapped to host memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapConfig {
    /// Most host memory for KV, in bytes (I5). 0: preempted sequences are always computed again.
    pub bytes: u64,
    /// What copying and computing cost.
    pub rates: SwapRates,
}

/// The cost model: a sequence is swapped when copying its blocks out and in takes less time than computing them again.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SwapRates {
    /// Bytes per second that are copied between pool and host memory. 0: not known, never swap.
    pub copy_bytes_per_second: u64,
    /// Tokens per second that a prefill computes. 0: not known, never swap.
    pub prefill_tokens_per_second: u64,
}

impl SwapConfig {
    /// Blocks of host memory for each layer group; the same number in every group.
    pub fn blocks(&self, layout: &KvLayout) -> u32 {
        u32::try_from(self.bytes / Self::block_bytes(layout).max(1)).unwrap_or(u32::MAX)
    }

    /// Bytes of one block of each layer group together.
    pub fn block_bytes(layout: &KvLayout) -> u64 {
        (0..layout.groups.len()).map(|group| layout.block_bytes_all_layers(group) as u64).sum()
    }
}

impl SwapRates {
    /// Whether copying `bytes` out and in again takes less time than computing `tokens`.
    fn swap_is_cheaper(&self, bytes: u64, tokens: u32) -> bool {
        let (copy, prefill) = (u128::from(self.copy_bytes_per_second), u128::from(self.prefill_tokens_per_second));
        prefill > 0 && 2 * u128::from(bytes) * prefill < u128::from(tokens) * copy
    }
}

/// A copy of one block's KV between the pool and host memory, in all layers of its group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockSwap {
    /// Layer group.
    pub group: usize,
    /// The block of the pool.
    pub block: BlockId,
    /// The block of host memory.
    pub host: BlockId,
}

/// The blocks of host memory.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// One per layer group.
    pools: Vec<BlockPool>,
    /// Bytes of a block, by group.
    block_bytes: Vec<u64>,
    rates: SwapRates,
    /// Copies out of the pool that the next step begins with. `leaving` has the sequences they belong to.
    pub out: Vec<BlockSwap>,
    leaving: Vec<SeqId>,
    /// Sequences swapped out so far. `moved` counts the blocks copied out and in.
    swaps: u64,
    moved: [u64; 2],
}

impl HostMemory {
    pub fn new(config: SwapConfig, geometry: &PoolGeometry) -> HostMemory {
        let blocks = config.blocks(&geometry.layout);
        let groups = 0..geometry.layout.groups.len();
        HostMemory {
            pools: groups.clone().map(|group| BlockPool::new(group, blocks)).collect(),
            block_bytes: groups.map(|group| geometry.layout.block_bytes_all_layers(group) as u64).collect(),
            rates: config.rates,
            out: Vec::new(),
            leaving: Vec::new(),
            swaps: 0,
            moved: [0; 2],
        }
    }

    pub fn counts(&self) -> BlockCounts {
        self.pools.iter().fold(BlockCounts::default(), |sum, pool| sum + pool.counts())
    }

    /// Takes host blocks for the first `computed` of the `tokens` tokens of a sequence that is being preempted, and
    /// plans the copies. `None` when computing them again is cheaper, or there is no room.
    pub fn take(
        &mut self,
        kv: &KvPools,
        seq: SeqId,
        tables: &Tables,
        (computed, tokens): (u32, u32),
    ) -> Option<Swapped> {
        // A sequence that comes back takes blocks for all its tokens at once, including those that a window has passed.
        // And before its first step, what it was to copy is not in its blocks yet.
        let comes_back = kv.capacity_tokens(u32::MAX) >= u64::from(tokens);
        if !comes_back || !tables.sources().is_empty() || self.counts().free == 0 {
            return None;
        }
        let (from, end) = (kv.leading_shared(tables), kv.blocks_for(computed));
        let blocks = |group: usize| {
            let all = (0u32..).zip(tables.as_slice()[group].blocks());
            all.filter(move |(at, block)| (from..end).contains(at) && **block != HOLE)
        };
        let wanted: Vec<usize> = (0..self.pools.len()).map(|group| blocks(group).count()).collect();
        let bytes = wanted.iter().zip(&self.block_bytes).map(|(count, bytes)| *count as u64 * bytes).sum();
        let to_compute = computed.saturating_sub(from * kv.block_size());
        let room = self.pools.iter().zip(&wanted).all(|(pool, wanted)| *wanted <= pool.counts().free as usize);
        if !room || !self.rates.swap_is_cheaper(bytes, to_compute) {
            return None;
        }
        let (mut hosts, mut taken) = (Vec::new(), Vec::new());
        for (group, wanted) in wanted.into_iter().enumerate() {
            hosts.clear();
            self.pools[group].allocate(wanted, &mut hosts).ok()?;
            for ((at, block), host) in blocks(group).zip(&hosts) {
                self.out.push(BlockSwap { group, block: *block, host: *host });
                taken.push(HostBlock { group, at, host: *host });
            }
        }
        self.leaving.push(seq);
        Some(Swapped { computed, from, blocks: taken })
    }

    /// Frees a sequence's host blocks.
    fn free(&mut self, swapped: Swapped) -> Result<(), KvError> {
        swapped.blocks.iter().try_for_each(|block| self.pools[block.group].free(block.host))
    }

    /// I6: every host block is free or belongs to exactly one sequence.
    pub fn check<'a>(&self, owned: impl Iterator<Item = &'a Swapped>) -> Result<(), EngineError> {
        self.pools.iter().try_for_each(BlockPool::check)?;
        let mut owned: Vec<_> = owned.flat_map(|s| s.blocks.iter().map(|block| (block.group, block.host))).collect();
        let found = owned.len();
        owned.sort_unstable();
        owned.dedup();
        let used = self.counts().used as usize;
        if (owned.len(), found) != (used, used) {
            let what = format!("{used} host blocks are used, {found} are owned, {} of them once", owned.len());
            return Err(EngineError::Inconsistent(what));
        }
        Ok(())
    }
}

impl Engine {
    /// Sets what copying and computing cost from now on.
    pub fn set_swap_rates(&mut self, rates: SwapRates) {
        self.host.rates = rates;
    }

    /// Blocks of host memory, free or used by preempted sequences, over all layer groups.
    pub fn host_counts(&self) -> BlockCounts {
        self.host.counts()
    }

    /// Preemptions that swapped. The others of [`Engine::preemptions`] are computed again.
    pub fn swaps(&self) -> u64 {
        self.host.swaps
    }

    /// Blocks copied so far: to host memory, and back.
    pub fn swapped_blocks(&self) -> [u64; 2] {
        self.host.moved
    }

    /// Whether copies out of the pool are planned. Others may have been given those blocks already, so nobody outside
    /// may write to them now.
    pub(crate) fn swaps_out(&self) -> bool {
        !self.host.out.is_empty()
    }

    /// Gives a sequence that comes back its tables: the hit's blocks, and new blocks for the rest. `None` when hit and
    /// host memory together lack a block that it needs, so that it must be computed.
    pub(crate) fn seat_swapped(&mut self, seq: SeqId, hit: &Hit) -> Result<Option<Tables>, KvError> {
        let Some(sequence) = self.sequences.get_mut(&seq) else { return Ok(None) };
        let Some(swapped) = sequence.swapped.as_mut() else { return Ok(None) };
        let (from, end) = (hit.blocks(), self.pools.blocks_for(swapped.computed));
        swapped.from = from;
        let blocks = &swapped.blocks;
        let comes = |group: usize, at: u32| blocks.binary_search_by_key(&(group, at), |b| (b.group, b.at)).is_ok();
        let whole = (0..self.pools.groups()).all(|group| (from..end).all(|at| comes(group, at)));
        // Blocks that a window had passed do not come back, and tables with a gap cannot be indexed.
        let prefix = if whole { sequence.prefix } else { None };
        let mut tables = self.pools.seat(hit, prefix, Need::whole(sequence.tokens.len() as u32))?;
        self.pools.trim(&mut tables, swapped.computed)?;
        let missing = tables.as_slice().iter().enumerate().any(|(group, table)| {
            let new = (0u32..).zip(table.blocks()).take(end as usize).skip(from as usize);
            { new }.any(|(at, block)| *block != HOLE && !comes(group, at))
        });
        debug_assert!(!missing, "{seq}: a block that is needed was passed by its window");
        if missing {
            self.pools.free(tables)?;
            return Ok(None);
        }
        sequence.computed = swapped.computed;
        Ok(Some(tables))
    }

    /// Frees a sequence's host blocks when they are not needed any more.
    pub(crate) fn forget_swapped(&mut self, seq: SeqId) {
        if let Some(swapped) = self.sequences.get_mut(&seq).and_then(|sequence| sequence.swapped.take()) {
            self.free_swapped(swapped);
        }
    }

    pub(crate) fn free_swapped(&mut self, swapped: Swapped) {
        if let Err(error) = self.host.free(swapped) {
            self.defect.get_or_insert(error);
        }
    }

    /// A step with a row of the sequence is over: counts the blocks it brought back and frees their host blocks.
    pub(crate) fn swapped_in(&mut self, seq: SeqId) {
        let Some(sequence) = self.sequences.get(&seq) else { return };
        self.host.moved[1] += swaps_in(sequence).count() as u64;
        self.forget_swapped(seq);
    }

    /// The step that was to make the planned copies is over. `copied` is false when it failed, or when no step was
    /// planned. What was copied is then unknown, and those sequences are computed again.
    pub(crate) fn swapped_out(&mut self, copied: bool) {
        let mut leaving = std::mem::take(&mut self.host.leaving);
        if copied {
            self.host.swaps += leaving.len() as u64;
            self.host.moved[0] += self.host.out.len() as u64;
        } else {
            leaving.iter().for_each(|seq| self.forget_swapped(*seq));
        }
        leaving.clear();
        self.host.leaving = leaving;
        self.host.out.clear();
    }
}

/// The copies that a step makes first to bring this sequence back.
pub(crate) fn swaps_in(sequence: &Sequence) -> impl Iterator<Item = BlockSwap> {
    let running = match (&sequence.phase, &sequence.swapped) {
        (Phase::Running(tables), Some(swapped)) => Some((tables.as_slice(), swapped)),
        _ => None,
    };
    running.into_iter().flat_map(|(tables, swapped)| {
        let missing = swapped.blocks.iter().filter(|b| b.at >= swapped.from);
        missing.filter_map(|&HostBlock { group, at, host }| {
            let block = *tables.get(group)?.blocks().get(at as usize)?;
            (block != HOLE).then_some(BlockSwap { group, block, host })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheaper_way_is_taken_and_an_unknown_rate_is_never_cheap() {
        let rates = |copy, prefill| SwapRates { copy_bytes_per_second: copy, prefill_tokens_per_second: prefill };
        // 100 tokens take 10 s to compute; 1,000 bytes out and in take 10 s at 200 bytes/s.
        assert!(rates(201, 10).swap_is_cheaper(1000, 100));
        assert!(!rates(200, 10).swap_is_cheaper(1000, 100), "no gain, no copy");
        assert!(!rates(0, 10).swap_is_cheaper(1000, 100) && !rates(201, 0).swap_is_cheaper(1000, 100));
        assert!(rates(u64::MAX, u64::MAX).swap_is_cheaper(1, u32::MAX), "no overflow");
        assert!(!rates(1, u64::MAX).swap_is_cheaper(u64::MAX / 2, u32::MAX), "no overflow");
    }

    /// I6: a host block without an owner, or with two, is detected.
    #[test]
    fn lost_and_doubled_host_blocks_are_seen() {
        let config = SwapConfig { bytes: 1 << 20, ..SwapConfig::default() };
        let mut host = HostMemory::new(config, &PoolGeometry::uniform(crate::fake::tiny_layout(4), 4));
        let mut taken = Vec::new();
        host.pools[1].allocate(1, &mut taken).unwrap();
        let owner = |host| Swapped { computed: 4, from: 0, blocks: vec![HostBlock { group: 1, at: 0, host }] };
        assert_eq!(host.check([owner(taken[0])].iter()), Ok(()));
        assert!(host.check([].iter()).is_err());
        assert!(host.check([owner(taken[0]), owner(taken[0])].iter()).is_err());
    }

    #[test]
    fn the_budget_is_in_bytes_over_all_groups() {
        let layout = crate::fake::tiny_layout(4);
        let block = (layout.block_bytes_all_layers(0) + layout.block_bytes_all_layers(1)) as u64;
        let blocks = |bytes| SwapConfig { bytes, ..SwapConfig::default() }.blocks(&layout);
        assert_eq!([0, block - 1, block, 10 * block].map(blocks), [0, 0, 1, 10]);
    }
}
