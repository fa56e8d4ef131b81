//! All layer groups of one worker, and the tokens that own blocks in them.
//!
//! A token is consumed by the transition that ends it, so a block can neither be given back twice nor be used after it
//! was given back. What the types cannot exclude (a token of another pool) is an error, and a failed assertion in debug
//! builds.

use baton_types::PoolGeometry;

use crate::{BlockCounts, BlockPool, BlockTable, KvError};

/// One block table per layer group, all Used: what a sequence that runs here owns.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "dropped tables leak their blocks; give them back with KvPools::free"]
pub struct Tables(Vec<BlockTable>);

/// One block table per layer group, all Lent: what a peer may write to.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a dropped lease leaks its blocks; accept, reclaim or quarantine it"]
pub struct Lease(Vec<BlockTable>);

/// One block table per layer group, all Quarantined.
#[derive(PartialEq, Eq, Debug)]
#[must_use = "a dropped quarantine leaks its blocks; clear it with KvPools::clear_quarantine"]
pub struct Quarantine(Vec<BlockTable>);

macro_rules! token {
    ($name:ident) => {
        impl $name {
            /// The block tables, one per layer group.
            pub fn as_slice(&self) -> &[BlockTable] {
                &self.0
            }

            /// Tokens covered, the same in every group.
            pub fn tokens(&self) -> u32 {
                self.0.first().map_or(0, |table| table.tokens)
            }

            /// Blocks owned, over all groups.
            pub fn blocks(&self) -> usize {
                self.0.iter().map(|table| table.blocks.len()).sum()
            }
        }
    };
}
token!(Tables);
token!(Lease);
token!(Quarantine);

/// One [`BlockPool`] per layer group.
#[derive(Debug)]
pub struct KvPools {
    pools: Vec<BlockPool>,
    block_size: u32,
}

impl KvPools {
    /// All blocks of `geometry`, free.
    pub fn new(geometry: &PoolGeometry) -> Result<Self, KvError> {
        let error = |field, value, must| Err(KvError::Geometry { field, value, must });
        let (groups, blocks) = (geometry.layout.groups.len(), &geometry.blocks);
        if geometry.layout.block_size == 0 {
            return error("block_size", 0, "at least 1");
        }
        if groups == 0 {
            return error("groups", 0, "at least 1");
        }
        if blocks.len() != groups {
            return error("blocks", blocks.len(), "one number per layer group");
        }
        if blocks.contains(&0) {
            return error("blocks", 0, "at least 1 in every layer group");
        }
        let pools = blocks.iter().enumerate().map(|(group, total)| BlockPool::new(group, *total)).collect();
        Ok(KvPools { pools, block_size: geometry.layout.block_size })
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

    /// Whether every group has room for `tokens` new tokens and `spare` blocks beyond.
    pub fn has_room(&self, tokens: u32, spare: u32) -> bool {
        let need = u64::from(self.blocks_for(tokens)) + u64::from(spare);
        self.pools.iter().all(|pool| u64::from(pool.counts().free) >= need)
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

    /// I6 for every group. Cheap enough for every step of a debug build, not for production steps.
    pub fn check(&self) -> Result<(), KvError> {
        self.pools.iter().try_for_each(BlockPool::check)
    }

    /// Tables that cover `tokens` tokens, or nothing taken.
    pub fn allocate(&mut self, tokens: u32) -> Result<Tables, KvError> {
        let mut tables = Tables(self.empty());
        self.grow(&mut tables, tokens)?;
        Ok(tables)
    }

    /// Makes `tables` cover `tokens` tokens, in every group or in none. Never shrinks.
    pub fn grow(&mut self, tables: &mut Tables, tokens: u32) -> Result<(), KvError> {
        self.extend(&mut tables.0, tokens, BlockPool::allocate)
    }

    /// Blocks for `tokens` tokens that a peer may write to, or nothing taken.
    pub fn lend(&mut self, tokens: u32) -> Result<Lease, KvError> {
        let mut tables = self.empty();
        self.extend(&mut tables, tokens, BlockPool::lend)?;
        Ok(Lease(tables))
    }

    /// The peer's writes are complete and verified (I2), its access is over (I3): the blocks are ours.
    pub fn accept(&mut self, lease: Lease) -> Result<Tables, KvError> {
        self.each(&lease.0, BlockPool::accept)?;
        Ok(Tables(lease.0))
    }

    /// Takes lent blocks back at once. Only when no peer can write to them (I3): none was told, or it acknowledged.
    pub fn reclaim(&mut self, lease: Lease) -> Result<(), KvError> {
        self.each(&lease.0, BlockPool::reclaim)
    }

    /// Takes lent blocks back that a peer may still write to; nobody gets them before [`Self::clear_quarantine`].
    pub fn quarantine(&mut self, lease: Lease) -> Result<Quarantine, KvError> {
        self.each(&lease.0, BlockPool::quarantine)?;
        Ok(Quarantine(lease.0))
    }

    /// The same for blocks of our own that a transfer may still read.
    pub fn quarantine_used(&mut self, tables: Tables) -> Result<Quarantine, KvError> {
        self.each(&tables.0, BlockPool::quarantine)?;
        Ok(Quarantine(tables.0))
    }

    /// The fence is confirmed: the blocks are free.
    pub fn clear_quarantine(&mut self, quarantine: Quarantine) -> Result<(), KvError> {
        self.each(&quarantine.0, BlockPool::clear_quarantine)
    }

    /// Gives blocks back.
    pub fn free(&mut self, tables: Tables) -> Result<(), KvError> {
        self.each(&tables.0, BlockPool::free)
    }

    fn empty(&self) -> Vec<BlockTable> {
        self.pools.iter().map(|_| BlockTable::default()).collect()
    }

    fn extend(
        &mut self,
        tables: &mut [BlockTable],
        tokens: u32,
        take: fn(&mut BlockPool, usize, &mut Vec<baton_types::BlockId>) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.own(tables)?;
        let need = self.blocks_for(tokens) as usize;
        for (group, (pool, table)) in self.pools.iter().zip(tables.iter()).enumerate() {
            let (wanted, free) = (need.saturating_sub(table.blocks.len()), pool.counts().free as usize);
            if wanted > free {
                return Err(KvError::OutOfBlocks { group, wanted, free });
            }
        }
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            take(pool, need.saturating_sub(table.blocks.len()), &mut table.blocks)?;
            table.tokens = table.tokens.max(tokens);
        }
        Ok(())
    }

    /// Last block first, so that the next sequence gets the same run of blocks in ascending order.
    fn each(
        &mut self,
        tables: &[BlockTable],
        change: fn(&mut BlockPool, baton_types::BlockId) -> Result<(), KvError>,
    ) -> Result<(), KvError> {
        self.own(tables)?;
        for (pool, table) in self.pools.iter_mut().zip(tables) {
            for block in table.blocks.iter().rev() {
                let done = change(pool, *block);
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use baton_types::{BatonError, BlockId, ErrorKind, KvDtype, KvGroup, KvLayout};
    use proptest::prelude::*;

    use super::*;
    use crate::BlockState;

    fn geometry(block_size: u32, blocks: &[u32]) -> PoolGeometry {
        let group = |at| KvGroup { layers: vec![at], planes: 2, kv_heads: 1, head_dim: 4, window: None };
        let groups = (0..blocks.len() as u32).map(group).collect();
        let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size, groups };
        PoolGeometry { layout, blocks: blocks.to_vec() }
    }

    #[test]
    fn bad_geometry_names_the_field() {
        let mut lopsided = geometry(16, &[1, 1]);
        lopsided.blocks.pop();
        let cases = [
            ("block_size", geometry(0, &[1])),
            ("groups", geometry(16, &[])),
            ("blocks", geometry(16, &[1, 0])),
            ("blocks", lopsided),
        ];
        for (name, geometry) in cases {
            let Err(error) = KvPools::new(&geometry) else { panic!("{name} was accepted") };
            assert!(matches!(error, KvError::Geometry { field, .. } if field == name), "{error}");
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn grows_in_every_group_or_in_none() {
        let mut pools = KvPools::new(&geometry(4, &[8, 3])).unwrap();
        assert_eq!(pools.capacity_tokens(), 12);
        let mut tables = pools.allocate(5).unwrap();
        assert_eq!((tables.tokens(), tables.blocks()), (5, 4));
        pools.grow(&mut tables, 8).unwrap();
        assert_eq!((tables.tokens(), tables.blocks()), (8, 4), "the last block had room");
        let before = pools.counts();
        let error = KvError::OutOfBlocks { group: 1, wanted: 2, free: 1 };
        assert_eq!(pools.grow(&mut tables, 13), Err(error.clone()));
        assert_eq!(error.kind(), ErrorKind::ResourceExhausted);
        assert_eq!((tables.tokens(), pools.counts()), (8, before), "nothing was taken from the group with room");
        pools.grow(&mut tables, 3).unwrap();
        assert_eq!(tables.tokens(), 8, "never shrinks");
        assert!(pools.has_room(4, 0) && !pools.has_room(4, 1) && !pools.has_room(5, 0));
        pools.free(tables).unwrap();
        assert!(pools.counts().idle());
        let again = pools.allocate(8).unwrap();
        assert_eq!(again.as_slice()[0].blocks(), [0, 1].map(BlockId), "the same run, in order");
        pools.free(again).unwrap();
    }

    #[test]
    fn a_position_has_the_slot_its_block_says() {
        let mut pools = KvPools::new(&geometry(4, &[4])).unwrap();
        let tables = pools.allocate(6).unwrap();
        let slots: Vec<_> = (0..8).map(|position| tables.as_slice()[0].slot(position, 4)).collect();
        assert_eq!(slots[3..5], [Some((BlockId(0), 3)), Some((BlockId(1), 0))]);
        assert_eq!(slots[6], None, "not covered, though the block has the slot");
        pools.free(tables).unwrap();
    }

    #[test]
    fn tables_of_another_pool_are_refused() {
        let mut two = KvPools::new(&geometry(4, &[2, 2])).unwrap();
        let mut one = KvPools::new(&geometry(4, &[2])).unwrap();
        let foreign = two.allocate(4).unwrap();
        assert_eq!(one.free(foreign), Err(KvError::ForeignTables { ours: 1, theirs: 2 }));
    }

    #[derive(Debug)]
    enum Token {
        Used(Tables),
        Lent(Lease),
        Fenced(Quarantine),
    }

    impl Token {
        fn tables(&self) -> (&[BlockTable], BlockState) {
            match self {
                Token::Used(t) => (t.as_slice(), BlockState::Used),
                Token::Lent(t) => (t.as_slice(), BlockState::Lent),
                Token::Fenced(t) => (t.as_slice(), BlockState::Quarantined),
            }
        }
    }

    /// One random operation; what it does to a token depends on the token's state.
    fn operate(pools: &mut KvPools, tokens: &mut Vec<Token>, pick: usize, size: u32, choice: u8) {
        if choice < 2 || tokens.is_empty() {
            let room = pools.has_room(size, 0);
            let made = match choice % 2 {
                0 => pools.allocate(size).map(Token::Used),
                _ => pools.lend(size).map(Token::Lent),
            };
            assert_eq!(made.is_ok(), room, "has_room tells exactly whether there is room");
            tokens.extend(made.ok());
            return;
        }
        let at = pick % tokens.len();
        let next = match (tokens.swap_remove(at), choice) {
            (Token::Used(mut t), 2) => {
                let before = t.tokens();
                let grown = pools.grow(&mut t, before + size).is_ok();
                assert_eq!(t.tokens(), if grown { before + size } else { before });
                Some(Token::Used(t))
            }
            (Token::Used(t), 3) => pools.quarantine_used(t).map(|q| Some(Token::Fenced(q))).unwrap(),
            (Token::Used(t), _) => pools.free(t).map(|()| None).unwrap(),
            (Token::Lent(t), 2) => pools.accept(t).map(|t| Some(Token::Used(t))).unwrap(),
            (Token::Lent(t), 3) => pools.quarantine(t).map(|q| Some(Token::Fenced(q))).unwrap(),
            (Token::Lent(t), _) => pools.reclaim(t).map(|()| None).unwrap(),
            (Token::Fenced(t), _) => pools.clear_quarantine(t).map(|()| None).unwrap(),
        };
        tokens.extend(next);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// I6 and I3 under any sequence of operations: nothing is lost, nothing owned twice.
        #[test]
        fn blocks_are_conserved_and_owned_once(
            blocks in prop::collection::vec(1u32..12, 1..4),
            block_size in 1u32..6,
            operations in prop::collection::vec((any::<usize>(), 0u32..30, 0u8..6), 0..60),
        ) {
            let mut pools = KvPools::new(&geometry(block_size, &blocks)).unwrap();
            let mut tokens = Vec::new();
            for (pick, size, choice) in operations {
                operate(&mut pools, &mut tokens, pick, size, choice);
                pools.check().unwrap();
                let mut owned = BTreeMap::new();
                for (tables, state) in tokens.iter().map(Token::tables) {
                    for (group, table) in tables.iter().enumerate() {
                        prop_assert_eq!(table.blocks().len() as u32, pools.blocks_for(table.tokens()));
                        for block in table.blocks() {
                            prop_assert_eq!(pools.group(group).unwrap().state(*block).unwrap(), (state, 1));
                            prop_assert!(owned.insert((group, *block), ()).is_none(), "owned twice");
                        }
                    }
                }
                let counts = pools.counts();
                prop_assert_eq!(owned.len() as u32, counts.total - counts.free, "leaked");
            }
        }
    }
}
