//! Blocks are copied between a pool and the store, and back into another pool.

use baton_engine::HOLE;
use baton_engine::fake::tiny_layout;
use baton_types::RequestId;
use baton_types::Time;

use super::*;

const BLOCKS: u32 = 8;

/// A pool whose bytes are all different from block to block, and a store for its blocks.
fn copier(first: u8, store: &Arc<KvStore>) -> Copier {
    let geometry = PoolGeometry::uniform(tiny_layout(4), BLOCKS);
    let segment = Arc::new(Segment::create("test", geometry.bytes()).unwrap());
    let bytes: Vec<u8> = (0..geometry.bytes()).map(|at| first.wrapping_add((at / 3) as u8)).collect();
    // SAFETY: nobody else has the segment.
    unsafe { segment.write(0, &bytes) };
    Copier { store: Arc::clone(store), segment, geometry, ahead: 2 }
}

fn store() -> Arc<KvStore> {
    let shape = Shape::new(&tiny_layout(4)).unwrap();
    Arc::new(KvStore::over(None, StoreConfig::new(shape, Identity::default(), 16, None), 0, None).unwrap())
}

/// Two blocks of a prefix, from block 1 of its prompt on; these blocks of the pool by group.
fn what(blocks: [[BlockId; 2]; 2]) -> Move {
    let (request_id, prefix, deadline) = (RequestId("r".into()), Default::default(), Time(0));
    let prefix = Prefix { request_id, tokens: (0..13).collect(), prefix, deadline };
    Move { seq: SeqId(1), prefix, first: 1, blocks: blocks.map(|list| list.to_vec()).to_vec() }
}

fn load(copier: &Copier, what: &Move) -> bool {
    let paces = [FIRST_PACE, FIRST_PACE].map(|pace| AtomicU64::new(pace.to_bits()));
    copier.load(what, &AtomicBool::new(false), &paces)
}

/// The bytes of a block in all layers of its group.
fn bytes(copier: &Copier, group: usize, block: BlockId) -> Vec<u8> {
    let layers = copier.geometry.layout.groups[group].layers.len();
    let ranges = (0..layers).map(|layer| copier.geometry.block_range(group, layer, block));
    // SAFETY: nobody writes to the segment now.
    ranges.flat_map(|range| unsafe { copier.segment.read(range.start, range.len()) }).collect()
}

#[test]
fn what_is_saved_from_one_pool_is_loaded_into_another() {
    let store = store();
    let (from, to) = (copier(1, &store), copier(99, &store));
    // The second group's window has passed the first block.
    let saved = what([[BlockId(3), BlockId(0)], [HOLE, BlockId(5)]]);
    from.save(&saved);
    let untouched = bytes(&to, 0, BlockId(7));
    assert!(load(&to, &what([[BlockId(6), BlockId(2)], [HOLE, BlockId(4)]])));
    for (group, source, target) in [(0, 3, 6), (0, 0, 2), (1, 5, 4)] {
        assert_eq!(bytes(&to, group, BlockId(target)), bytes(&from, group, BlockId(source)), "group {group}");
    }
    assert_eq!(bytes(&to, 0, BlockId(7)), untouched);
    assert!(!load(&to, &what([[BlockId(6), BlockId(2)], [BlockId(1), BlockId(4)]])), "a layer group is not there");
    let mut other = what([[BlockId(6), BlockId(2)], [HOLE, BlockId(4)]]);
    other.prefix.tokens[1] = 77;
    assert!(!load(&to, &other), "another prompt");
}

/// A block was saved when its window still saw it, and is loaded when it sees it no more.
#[test]
fn what_the_store_has_and_nobody_wants_stays_there() {
    let store = store();
    let (from, to) = (copier(1, &store), copier(99, &store));
    from.save(&what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]));
    assert!(load(&to, &what([[BlockId(6), BlockId(2)], [HOLE, BlockId(4)]])));
    for (group, source, target) in [(0, 3, 6), (0, 0, 2), (1, 5, 4)] {
        assert_eq!(bytes(&to, group, BlockId(target)), bytes(&from, group, BlockId(source)), "group {group}");
    }
    assert!(load(&to, &what([[HOLE, BlockId(2)], [HOLE, BlockId(4)]])), "nothing of the first block is wanted");
}

/// Layer group 1 of the tiny layout sees four tokens before the next one: a block.
#[test]
fn a_prompt_goes_on_from_where_each_window_is_whole() {
    let layout = tiny_layout(4);
    let of = |groups: &[u32]| usable(&layout, &groups.iter().map(|groups| (Tier::Host, *groups)).collect::<Vec<_>>());
    assert_eq!([of(&[1, 1, 3]), of(&[1, 3, 1]), of(&[1, 1, 1]), of(&[2, 3, 3]), of(&[])], [3, 2, 0, 0, 0]);
    assert_eq!([lacks(&layout, 12, 2, 1), lacks(&layout, 12, 1, 1), lacks(&layout, 12, 1, 0)], [2, 0, 1]);
}

/// Of a move, the names follow from all blocks before it.
#[test]
fn keys_begin_where_the_move_does() {
    let copier = copier(1, &store());
    let moved = what([[BlockId(3), BlockId(0)], [HOLE, BlockId(5)]]);
    let names: Vec<BlockName> = BlockName::default().chain(&moved.prefix.tokens, 4).collect();
    let keys: Vec<_> = copier.keys(&moved).into_iter().map(|(key, _)| (key.parent, key.name, key.groups)).collect();
    assert_eq!(keys, [(names[0], names[1], 0b01), (names[1], names[2], 0b11)]);
}

/// I2
#[test]
fn a_block_that_is_not_as_it_was_stored_is_not_loaded() {
    let store = store();
    let copier = copier(1, &store);
    let blocks = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    for (at, (key, _)) in copier.keys(&blocks).into_iter().enumerate() {
        let mut filling = store.put(key.clone()).unwrap();
        let digests = store.shape().digests(key.groups, filling.data());
        // Of the second block one byte is another one.
        filling.data()[17] ^= at as u8;
        filling.done(digests);
    }
    assert!(!load(&copier, &blocks));
    let first = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    let first = Move { blocks: first.blocks.iter().map(|list| list[..1].to_vec()).collect(), ..first };
    assert!(load(&copier, &first), "the first one is right");
}

#[test]
fn a_load_that_is_given_up_ends() {
    let store = store();
    let copier = copier(1, &store);
    let blocks = what([[BlockId(3), BlockId(0)], [BlockId(2), BlockId(5)]]);
    copier.save(&blocks);
    let paces = [FIRST_PACE, FIRST_PACE].map(|pace| AtomicU64::new(pace.to_bits()));
    assert!(!copier.load(&blocks, &AtomicBool::new(true), &paces));
    assert!(load(&copier, &blocks));
}

#[test]
fn a_measured_pace_is_followed() {
    let pace = AtomicU64::new(1f64.to_bits());
    (0..100).for_each(|_| follow(&pace, Duration::from_micros(3), 1000));
    assert!((2.9..=3.0).contains(&f64::from_bits(pace.load(Ordering::Relaxed))));
}
