//! Ownership tokens of a pool without sharing: allocation is all or nothing, and every block is conserved and owned once.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::collections::BTreeMap;

use baton_kv_cache::{
    BlockState, BlockTable, CacheConfig, Hit, KvError, KvPools, LentTables, Need, Quarantine, Tables,
};
use baton_types::{BatonError, BlockId, ErrorKind, KvDtype, KvGroup, KvLayout, PoolGeometry};
use proptest::prelude::*;

fn geometry(block_size: u32, blocks: &[u32]) -> PoolGeometry {
    let group = |at| KvGroup { layers: vec![at], planes: 2, kv_heads: 1, head_dim: 4, window: None, sinks: 0 };
    let groups = (0..blocks.len() as u32).map(group).collect();
    let layout = KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size, groups };
    PoolGeometry { layout, blocks: blocks.to_vec() }
}

fn room(pools: &KvPools, tokens: u32, spare: u32) -> bool {
    pools.fits(&Hit::default(), Need::whole(tokens), spare).is_ok()
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
        let Err(error) = KvPools::new(&geometry, CacheConfig::default()) else { panic!("{name} was accepted") };
        assert!(matches!(error, KvError::Geometry { field, .. } if field == name), "{error}");
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    }
}

#[test]
fn grows_in_every_group_or_in_none() {
    let mut pools = KvPools::new(&geometry(4, &[8, 3]), CacheConfig::default()).unwrap();
    assert_eq!(pools.capacity_tokens(1), 12);
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
    assert!(room(&pools, 4, 0) && !room(&pools, 4, 1) && !room(&pools, 5, 0));
    pools.free(tables).unwrap();
    assert!(pools.counts().idle());
    let again = pools.allocate(8).unwrap();
    assert_eq!(again.as_slice()[0].blocks(), [0, 1].map(BlockId), "the same run, in order");
    pools.free(again).unwrap();
}

/// What a sequence takes is what an empty pool must have for it, also where a window passes blocks.
#[test]
fn a_sequence_takes_what_it_needs_room_for() {
    let takes = |tokens, need| {
        let of = |blocks: u32| {
            let mut geometry = geometry(4, &[blocks, blocks]);
            (geometry.layout.groups[1].window, geometry.layout.groups[1].sinks) = (Some(9), 2);
            KvPools::new(&geometry, CacheConfig::default()).unwrap()
        };
        let taken = [0, 1].map(|group| of(1).takes(group, need, 0));
        let least = taken[0].max(taken[1]);
        assert!(of(least).fits(&Hit::default(), need, 0).is_ok(), "{tokens} tokens");
        assert!(least == 1 || of(least - 1).fits(&Hit::default(), need, 0).is_err(), "{tokens} tokens");
        assert_eq!([0, 1].map(|group| of(1).takes(group, need, 1)), [taken[0] - 1, taken[1]], "only one has no window");
        taken
    };
    assert_eq!(takes(60, Need::whole(60)), [15, 15]);
    assert_eq!(takes(60, Need::chunks(60, 8)), [15, 8]);
    assert_eq!(takes(60, Need::received(60)), [15, 3]);
    assert_eq!(takes(3, Need::chunks(3, 8)), [1, 1]);
}

#[test]
fn a_position_has_the_slot_its_block_says() {
    let mut pools = KvPools::new(&geometry(4, &[4]), CacheConfig::default()).unwrap();
    let tables = pools.allocate(6).unwrap();
    let slots: Vec<_> = (0..8).map(|position| tables.as_slice()[0].slot(position, 4)).collect();
    assert_eq!(slots[3..5], [Some((BlockId(0), 3)), Some((BlockId(1), 0))]);
    assert_eq!(slots[6], None, "not covered, though the block has the slot");
    pools.free(tables).unwrap();
}

#[test]
fn tables_of_another_pool_are_refused() {
    let mut two = KvPools::new(&geometry(4, &[2, 2]), CacheConfig::default()).unwrap();
    let mut one = KvPools::new(&geometry(4, &[2]), CacheConfig::default()).unwrap();
    let foreign = two.allocate(4).unwrap();
    assert_eq!(one.free(foreign), Err(KvError::ForeignTables { ours: 1, theirs: 2 }));
}

#[derive(Debug)]
enum Token {
    Used(Tables),
    Lent(LentTables),
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

/// One random operation. Its effect on an ownership token depends on the token's state.
fn operate(pools: &mut KvPools, tokens: &mut Vec<Token>, pick: usize, size: u32, choice: u8) {
    if choice < 2 || tokens.is_empty() {
        let room = room(pools, size, 0);
        let made = match choice % 2 {
            0 => pools.allocate(size).map(Token::Used),
            _ => pools.lend(&Hit::default(), None, size).map(Token::Lent),
        };
        assert_eq!(made.is_ok(), room, "fits tells exactly whether there is room");
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

    /// I6 and I3 under any sequence of operations: no block is lost or owned twice.
    #[test]
    fn blocks_are_conserved_and_owned_once(
        blocks in prop::collection::vec(1u32..12, 1..4),
        block_size in 1u32..6,
        operations in prop::collection::vec((any::<usize>(), 0u32..30, 0u8..6), 0..60),
    ) {
        let mut pools = KvPools::new(&geometry(block_size, &blocks), CacheConfig::default()).unwrap();
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
