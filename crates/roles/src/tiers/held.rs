//! What a store holds of a prefix, and what of it is of use: layer groups with a window need only the blocks that their window sees.

use baton_engine::BlockName;
use baton_types::{BlockId, KvLayout};

use super::{Move, is_hole};

/// How many blocks a load may be shorter than what is held, where a layer group lacks some.
const MOST_SHORTER: usize = 64;

/// A block that is copied between the pool and the store.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Copied {
    /// Its name.
    pub name: BlockName,
    /// The name of the block before it.
    pub parent: BlockName,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Layer groups that are copied, one bit each; 0: none.
    pub groups: u32,
    /// Its block in the pool, for each group; [`baton_engine::HOLE`] for those that are not copied.
    pub blocks: Vec<BlockId>,
}

impl Move {
    /// The blocks that are copied, in the order of their prefix.
    pub fn copies(&self, block_size: u32) -> Vec<Copied> {
        let count = self.blocks.first().map_or(0, Vec::len);
        let (first, mut parent) = (self.first as usize, self.prefix.prefix.root);
        let mut copies = Vec::with_capacity(count);
        for (at, tokens) in self.prefix.tokens.chunks_exact(block_size as usize).enumerate().take(first + count) {
            let next = parent.then(tokens);
            if let Some(at) = at.checked_sub(first) {
                let blocks: Vec<BlockId> = self.blocks.iter().filter_map(|list| list.get(at).copied()).collect();
                let groups = (0u32..).zip(&blocks).filter(|(_, block)| !is_hole(**block));
                let groups = groups.fold(0, |all, (group, _)| all | 1 << group);
                let (name, parent) = (next.name(), parent.name());
                copies.push(Copied { name, parent, tokens: tokens.to_vec(), groups, blocks });
            }
            parent = next;
        }
        copies
    }
}

/// Of a block of a prefix of so many tokens: the layer groups that a later token sees, and that are not among these.
fn lacks(layout: &KvLayout, tokens: u32, at: usize, groups: u32) -> u32 {
    let seen = layout.groups.iter().map(|group| group.live(tokens, layout.block_size).contains(at as u32));
    let seen = (0u32..).zip(seen).fold(0, |all, (group, seen)| all | u32::from(seen) << group);
    seen & !groups
}

/// How many leading blocks a prompt can go on from, of those that are held. `held`: the layer groups of each, one bit each. Layer groups with a
/// window need those that their window sees from there.
pub fn usable(layout: &KvLayout, held: &[u32]) -> usize {
    let whole = |blocks: &usize| {
        let tokens = *blocks as u32 * layout.block_size;
        (0..*blocks).all(|at| lacks(layout, tokens, at, held[at]) == 0)
    };
    (1..=held.len()).rev().take(MOST_SHORTER).find(whole).unwrap_or(0)
}

/// The first block that the store lacks, of a prefix of so many blocks; `None`: it has all. `held`: the layer groups of each leading block that is
/// held.
pub fn first_lacking(layout: &KvLayout, blocks: usize, held: &[u32]) -> Option<u32> {
    let tokens = blocks as u32 * layout.block_size;
    let there = |at: &usize| held.get(*at).is_some_and(|groups| lacks(layout, tokens, *at, *groups) == 0);
    let first = (0..blocks).take_while(there).count();
    (first < blocks).then_some(first as u32)
}

#[cfg(test)]
mod tests {
    use baton_engine::fake::tiny_layout;
    use baton_engine::{Exchange as Prefix, HOLE};
    use baton_types::{RequestId, SeqId, Time};

    use super::*;

    #[test]
    fn a_prompt_goes_on_from_where_each_window_is_whole() {
        let layout = tiny_layout(4);
        let of = |groups: &[u32]| usable(&layout, groups);
        assert_eq!([of(&[1, 1, 3]), of(&[1, 3, 1]), of(&[1, 1, 1]), of(&[2, 3, 3]), of(&[])], [3, 2, 0, 0, 0]);
        assert_eq!([lacks(&layout, 12, 2, 1), lacks(&layout, 12, 1, 1), lacks(&layout, 12, 1, 0)], [2, 0, 1]);
        let lacking = |groups: &[u32]| first_lacking(&layout, 3, groups);
        assert_eq!([lacking(&[1, 1, 3]), lacking(&[1, 1, 1]), lacking(&[])], [None, Some(2), Some(0)]);
    }

    /// Of a move, the names follow from all blocks before it.
    #[test]
    fn copies_begin_where_the_move_does() {
        let (request_id, prefix, deadline) = (RequestId("r".into()), Default::default(), Time(0));
        let prefix = Prefix { request_id, tokens: (0..13).collect(), prefix, deadline };
        let blocks = vec![vec![BlockId(3), BlockId(0)], vec![HOLE, BlockId(5)]];
        let moved = Move { seq: SeqId(1), prefix, first: 1, blocks, known: vec![] };
        let names: Vec<BlockName> = baton_engine::NameChain::default().chain(&moved.prefix.tokens, 4).collect();
        let copies: Vec<_> = moved.copies(4).into_iter().map(|copy| (copy.parent, copy.name, copy.groups)).collect();
        assert_eq!(copies, [(names[0], names[1], 0b01), (names[1], names[2], 0b11)]);
    }
}
