//! What a stored block is: whose KV it is, and by what its bytes are known.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use baton_kv_cache::BlockName;
use baton_types::{KvLayout, digest_block};

use crate::{Mismatch, StoreError};

/// Direct I/O reads and writes multiples of so many bytes, at multiples of as many.
pub const ALIGNMENT: usize = 4096;

/// Whose KV a store holds. KV of another identity is never read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Identity {
    /// [`KvLayout::fingerprint`].
    pub layout: u64,
    /// Whatever else changes a bit of K or V: backend, tensor-parallel degree, quantisation, revision of the kernels (I1).
    pub numerics: u64,
}

/// Which block: what a store is asked for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct BlockKey {
    /// Its name.
    pub name: BlockName,
    /// The name of the block before it in its prompt; of a prompt's first block the root.
    pub parent: BlockName,
    /// Its tokens. A name never decides alone: these are compared on every read.
    pub tokens: Arc<[u32]>,
    /// The layer groups whose KV is there, or is wanted: bit g for group g. A group's window may have passed the block.
    pub groups: u32,
}

impl BlockKey {
    /// Ok when a block with this key may be given to who asks for `wanted`.
    pub fn serves(&self, wanted: &BlockKey) -> Result<(), Mismatch> {
        if self.name != wanted.name {
            return Err(Mismatch::Name);
        }
        if self.parent != wanted.parent || self.tokens != wanted.tokens {
            return Err(Mismatch::Tokens);
        }
        if wanted.groups & !self.groups != 0 {
            return Err(Mismatch::Groups);
        }
        Ok(())
    }
}

/// A block that is stored.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// Which block.
    pub key: BlockKey,
    /// Digest of each part, in the order of [`Shape::parts`] (I2).
    pub digests: Arc<[u64]>,
}

/// One layer's part of a block's data.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Part {
    /// Layer group.
    pub group: usize,
    /// Layer's index inside its group.
    pub layer: usize,
    /// Its bytes inside the block's data.
    pub range: Range<usize>,
    /// For [`digest_block`], as at a handoff: the parts of a group add up to the digest of its block.
    pub first_lane: u64,
}

/// How the bytes of a block lie in a buffer of host memory and in a record on disk: a head, then the data,
/// `[group][layer][bytes of the layer's block]`. Each part has its place, whether or not the groups before it are there.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Layers, and bytes of one layer, of each group.
    groups: Vec<(usize, usize)>,
    block_size: u32,
    head: usize,
    data: usize,
}

impl Shape {
    /// The shape of the blocks of a layout.
    pub fn new(layout: &KvLayout) -> Result<Shape, StoreError> {
        let groups = layout.groups.iter().enumerate().map(|(g, of)| (of.layers.len(), layout.block_bytes(g)));
        let groups: Vec<(usize, usize)> = groups.collect();
        let setting = |field, value: usize, must| StoreError::Setting { field, value: value as u64, must };
        if !(1..=32).contains(&groups.len()) {
            return Err(setting("layer groups", groups.len(), "1 to 32"));
        }
        let (layers, data) =
            groups.iter().fold((0, 0), |(all, sum), (layers, bytes)| (all + layers, sum + layers * bytes));
        if data == 0 || layout.block_size == 0 || u32::try_from(data).is_err() {
            return Err(setting("bytes of a block", data, "1 to 4 Gi"));
        }
        let head = crate::record::head_bytes(layout.block_size as usize, layers).next_multiple_of(ALIGNMENT);
        Ok(Shape { groups, block_size: layout.block_size, head, data })
    }

    /// Tokens of a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Bytes of a head.
    pub fn head_bytes(&self) -> usize {
        self.head
    }

    /// Bytes of the data.
    pub fn data_bytes(&self) -> usize {
        self.data
    }

    /// Bytes of a buffer and of a record, a multiple of [`ALIGNMENT`].
    pub fn stride(&self) -> usize {
        self.head + self.data.next_multiple_of(ALIGNMENT)
    }

    /// All groups, as [`BlockKey::groups`] has them.
    pub fn all_groups(&self) -> u32 {
        u32::MAX >> (32 - self.groups.len())
    }

    /// What the digests of the parts of these groups add up to: the digest of the block in each group, as at a handoff.
    pub fn group_digests(&self, groups: u32, digests: &[u64]) -> BTreeMap<usize, u64> {
        let mut sums = BTreeMap::new();
        for (part, digest) in self.parts(groups).zip(digests) {
            let sum = sums.entry(part.group).or_insert(0u64);
            *sum = sum.wrapping_add(*digest);
        }
        sums
    }

    /// The parts of these groups, in the order of groups and layers.
    pub fn parts(&self, groups: u32) -> impl Iterator<Item = Part> {
        let begins =
            self.groups.iter().scan(0, |at, (layers, bytes)| Some(std::mem::replace(at, *at + layers * bytes)));
        let wanted = self.groups.iter().zip(begins).enumerate().filter(move |(group, _)| groups >> group & 1 == 1);
        wanted.flat_map(|(group, ((layers, bytes), begin))| {
            (0..*layers).map(move |layer| {
                let at = begin + layer * bytes;
                Part { group, layer, range: at..at + bytes, first_lane: (bytes.div_ceil(8) * layer) as u64 }
            })
        })
    }

    /// The digests of a block's data.
    ///
    /// # Panics
    /// When `data` is shorter than [`Shape::data_bytes`].
    pub fn digests(&self, groups: u32, data: &[u8]) -> Arc<[u64]> {
        self.parts(groups).map(|part| digest_block(&data[part.range], part.first_lane)).collect()
    }

    /// Ok when the data of a block are those it was stored with (I2).
    ///
    /// # Panics
    /// When `data` is shorter than [`Shape::data_bytes`].
    pub fn verify(&self, block: &Block, data: &[u8]) -> Result<(), Mismatch> {
        let mut digests = block.digests.iter();
        for part in self.parts(block.key.groups) {
            if digests.next() != Some(&digest_block(&data[part.range], part.first_lane)) {
                return Err(Mismatch::Digest { group: part.group, layer: part.layer });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup, PROTOCOL_VERSION};

    use super::*;

    fn layout() -> KvLayout {
        let group =
            |layers: Vec<u32>, kv_heads| KvGroup { layers, planes: 2, kv_heads, head_dim: 4, window: None, sinks: 0 };
        let groups = vec![group(vec![0, 2], 1), group(vec![1, 3, 4], 3)];
        KvLayout { version: PROTOCOL_VERSION, model: 1, dtype: KvDtype::F16, block_size: 4, groups }
    }

    #[test]
    fn parts_tile_the_data_and_add_up_to_the_digest_of_a_handoff() {
        let (layout, shape) = (layout(), Shape::new(&layout()).unwrap());
        let parts: Vec<Part> = shape.parts(shape.all_groups()).collect();
        let end = parts.iter().fold(0, |at, part| {
            assert_eq!(part.range.start, at);
            assert_eq!(part.first_lane, layout.first_lane(part.group, part.layer));
            part.range.end
        });
        assert_eq!((end, parts.len()), (shape.data_bytes(), 5));
        assert_eq!(shape.parts(0b10).next().unwrap(), parts[2], "a part has the same place without its neighbours");
        assert_eq!(shape.stride() % ALIGNMENT, 0);
    }

    #[test]
    fn each_flipped_byte_is_found_where_it_is() {
        let shape = Shape::new(&layout()).unwrap();
        let data: Vec<u8> = (0..shape.data_bytes()).map(|at| (at * 37 % 251) as u8).collect();
        let key = BlockKey { name: BlockName(1), parent: BlockName(0), tokens: [1, 2, 3, 4].into(), groups: 0b11 };
        let block = Block { digests: shape.digests(key.groups, &data), key };
        assert_eq!(shape.verify(&block, &data), Ok(()));
        for part in shape.parts(0b11) {
            for at in part.range {
                let mut flipped = data.clone();
                flipped[at] ^= 0x10;
                let found = Mismatch::Digest { group: part.group, layer: part.layer };
                assert_eq!(shape.verify(&block, &flipped), Err(found));
            }
        }
        let fewer = Block { digests: block.digests[..4].into(), ..block };
        assert!(shape.verify(&fewer, &data).is_err(), "a digest is missing");
    }

    #[test]
    fn a_key_serves_only_who_asks_for_the_same_tokens() {
        let key =
            |tokens: [u32; 2], parent, groups| BlockKey { name: BlockName(9), parent, tokens: tokens.into(), groups };
        let held = key([1, 2], BlockName(7), 0b01);
        assert_eq!(held.serves(&held), Ok(()));
        assert_eq!(held.serves(&key([1, 3], BlockName(7), 0b01)), Err(Mismatch::Tokens));
        assert_eq!(held.serves(&key([1, 2], BlockName(8), 0b01)), Err(Mismatch::Tokens));
        assert_eq!(held.serves(&key([1, 2], BlockName(7), 0b11)), Err(Mismatch::Groups));
        assert_eq!(held.serves(&BlockKey { name: BlockName(1), ..held.clone() }), Err(Mismatch::Name));
    }
}
