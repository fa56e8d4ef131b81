//! A worker's pool, and the checker's own record of who may touch which block. The record shares nothing with the code under test.

use baton_engine::fake::{FakeModel, KvMemory, SharedMemory};
use baton_engine::{Batch, CacheConfig, ModelRunner, Row};
use baton_handoff::{PoolMemory, TransferError};
use baton_kv_cache::KvPools;
use baton_types::{BlockId, KvLayout, PoolGeometry, SeqId, digest_block};

use crate::client::VOCAB;

/// Blocks by group.
pub(crate) type Blocks = Vec<Vec<BlockId>>;

/// A pool's bytes, which other workers may have mapped.
#[derive(Clone, Debug)]
pub(crate) struct Bytes(SharedMemory);

impl KvMemory for Bytes {
    fn load(&self, offset: usize, into: &mut [u8]) {
        self.0.load(offset, into);
    }
    fn store(&mut self, offset: usize, bytes: &[u8]) {
        self.0.store(offset, bytes);
    }
}

impl PoolMemory for Bytes {
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError> {
        let mut bytes = vec![0; len];
        let mut digest = |(offset, lane): &(usize, u64)| {
            self.load(*offset, &mut bytes);
            digest_block(&bytes, *lane)
        };
        Ok(parts.iter().map(&mut digest).collect())
    }
}

/// A pool's bytes, and the owners of each block.
#[derive(Debug)]
pub(crate) struct Memory<Owner> {
    pub geometry: PoolGeometry,
    pub bytes: Bytes,
    /// Owners of each block, by group and block.
    owners: Vec<Vec<Vec<Owner>>>,
}

impl<Owner: Copy + PartialEq + std::fmt::Debug> Memory<Owner> {
    pub(crate) fn new(geometry: PoolGeometry) -> Memory<Owner> {
        let owners = geometry.blocks.iter().map(|n| vec![Vec::new(); *n as usize]).collect();
        Memory { bytes: Bytes(SharedMemory::new(geometry.bytes())), geometry, owners }
    }

    /// The same pool, with owners of another kind.
    pub(crate) fn shared<Other: Copy + PartialEq + std::fmt::Debug>(&self) -> Memory<Other> {
        Memory { bytes: self.bytes.clone(), ..Memory::new(self.geometry.clone()) }
    }

    /// Reads `len` bytes at `offset`.
    pub(crate) fn read(&self, (offset, len): (usize, usize)) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.bytes.load(offset, &mut bytes);
        bytes
    }

    /// Writes without checking owners.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.bytes.clone().store(offset, bytes);
    }

    /// Makes `owner` the only owner of some blocks. The error names a block that already has another (I3).
    pub(crate) fn take_alone(&mut self, blocks: &Blocks, owner: Owner) -> Result<(), String> {
        for (group, block) in each(blocks) {
            if let Some(other) = self.owner(group, block) {
                return Err(format!("{block} of group {group} is taken for {owner:?} and still kept for {other:?}"));
            }
        }
        each(blocks).for_each(|(group, block)| self.keep(group, block, owner));
        Ok(())
    }

    /// Adds `owner` to a block's owners.
    pub(crate) fn keep(&mut self, group: usize, block: BlockId, owner: Owner) {
        if let Some(owners) = self.owners[group].get_mut(block.0 as usize) {
            owners.push(owner);
        }
    }

    /// Removes `owner` from all blocks.
    pub(crate) fn give_back(&mut self, owner: Owner) {
        self.owners.iter_mut().flatten().for_each(|owners| owners.retain(|other| *other != owner));
    }

    pub(crate) fn is_owner(&self, group: usize, block: BlockId, owner: Owner) -> bool {
        self.owners[group].get(block.0 as usize).is_some_and(|owners| owners.contains(&owner))
    }

    /// A block's first owner.
    pub(crate) fn owner(&self, group: usize, block: BlockId) -> Option<Owner> {
        self.owners[group].get(block.0 as usize)?.first().copied()
    }

    /// First owner of the block that has the byte at `offset`.
    pub(crate) fn owner_at(&self, offset: usize) -> Option<Owner> {
        for (group, owners) in self.owners.iter().enumerate() {
            for layer in 0..self.geometry.layout.groups[group].layers.len() {
                let first = self.geometry.block_range(group, layer, BlockId(0));
                let end = first.start + first.len() * owners.len();
                if (first.start..end).contains(&offset) {
                    return owners[(offset - first.start) / first.len()].first().copied();
                }
            }
        }
        None
    }

    /// Checks that blocks hold the KV of these tokens (I2). Per group, `blocks` are the live ones from block `first` of the sequence on.
    pub(crate) fn compare(&self, tokens: &[u32], first: &[u32], blocks: &Blocks) -> Result<(), String> {
        let layout = &self.geometry.layout;
        let (reference, tables) = reference(layout, tokens)?;
        for (group, shape) in layout.groups.iter().enumerate() {
            let live = shape.live(tokens.len() as u32, layout.block_size);
            for at in first[group]..(tokens.len() as u32).div_ceil(layout.block_size) {
                let Some(place) = live.place(first[group], at) else { continue };
                let Some(block) = blocks[group].get(place as usize) else {
                    return Err(format!("block {at} of group {group} was not lent"));
                };
                let filled = (tokens.len() as u32 - at * layout.block_size).min(layout.block_size);
                for layer in 0..shape.layers.len() {
                    let here = self.read(range(&self.geometry, group, layer, *block));
                    let there = reference.read(range(&reference.geometry, group, layer, tables[group][at as usize]));
                    if slots(layout, group, &here, filled) != slots(layout, group, &there, filled) {
                        return Err(format!(
                            "block {at} of group {group} has other KV in layer {layer} than its tokens"
                        ));
                    }
                }
            }
        }
        Ok(())
    }
}

fn range(geometry: &PoolGeometry, group: usize, layer: usize, block: BlockId) -> (usize, usize) {
    let range = geometry.block_range(group, layer, block);
    (range.start, range.len())
}

/// The first `filled` slots of each plane and head, in one layer of a block.
fn slots(layout: &KvLayout, group: usize, bytes: &[u8], filled: u32) -> Vec<Vec<u8>> {
    let shape = &layout.groups[group];
    let heads = (shape.planes * shape.kv_heads) as usize;
    let each = layout.plane_bytes(group) / shape.kv_heads as usize;
    let used = layout.dtype.row_bytes(shape.head_dim as usize) * filled as usize;
    (0..heads).map(|head| bytes[head * each..][..used].to_vec()).collect()
}

/// Computes the KV of these tokens alone, in a pool of their own.
fn reference(layout: &KvLayout, tokens: &[u32]) -> Result<(Memory<()>, Blocks), String> {
    let blocks = layout.blocks_for(tokens.len()) as u32;
    let memory = Memory::new(PoolGeometry::uniform(layout.clone(), blocks));
    let mut pools = KvPools::new(&memory.geometry, CacheConfig::default()).map_err(|e| e.to_string())?;
    let tables = pools.allocate(tokens.len() as u32).map_err(|e| e.to_string())?;
    let mut model = FakeModel::with_memory(memory.geometry.clone(), VOCAB, memory.bytes.clone());
    let row =
        Row { seq: SeqId(0), tokens, follows: None, start: 0, tables: tables.as_slice(), score: None, sample: None };
    let batch = Batch { rows: &[row], copies: &[] };
    model.run(&batch, &mut |_| {}, &mut Vec::new()).map_err(|e| e.to_string())?;
    let blocks = tables.as_slice().iter().map(|table| table.blocks().to_vec()).collect();
    Ok((memory, blocks))
}

/// Each block with its group.
pub(crate) fn each(blocks: &Blocks) -> impl Iterator<Item = (usize, BlockId)> {
    blocks.iter().enumerate().flat_map(|(group, list)| list.iter().map(move |block| (group, *block)))
}
