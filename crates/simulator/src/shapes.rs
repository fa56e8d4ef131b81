//! Pools, and what lies in them: two layer groups of different shapes, and for every request a content of its own.

use std::cell::RefCell;
use std::rc::Rc;

use baton_types::{BlockId, KvDtype, KvGroup, KvLayout, PoolGeometry, digest_block};

use crate::random::mix;

/// Blocks of 60 and of 20 bytes a layer, one token each; neither is a whole number of digest lanes.
pub(crate) fn geometry(blocks: u32) -> PoolGeometry {
    let group =
        |layers: Vec<u32>, kv_heads, window| KvGroup { layers, planes: 2, kv_heads, head_dim: 5, window, sinks: 0 };
    let groups = vec![group(vec![0, 3], 3, None), group(vec![1, 2, 4], 1, Some(8))];
    let layout = KvLayout { version: 1, model: 42, dtype: KvDtype::F16, block_size: 1, groups };
    PoolGeometry { layout, blocks: vec![blocks, blocks] }
}

/// A pool's bytes, which other workers may have mapped.
pub(crate) type Bytes = Rc<RefCell<Vec<u8>>>;

/// A pool's bytes, and who may touch which block: the checker's own view.
#[derive(Debug)]
pub(crate) struct Memory<Owner> {
    pub geometry: PoolGeometry,
    pub shared: Bytes,
    /// Per group and block: on whose behalf it is kept.
    owners: Vec<Vec<Option<Owner>>>,
    /// Per group and block: digest of what lay in it when it was given back.
    resting: Vec<Vec<u64>>,
}

impl<Owner: Copy + PartialEq + std::fmt::Debug> Memory<Owner> {
    pub(crate) fn new(geometry: PoolGeometry) -> Memory<Owner> {
        let shared = Rc::new(RefCell::new(vec![0; geometry.bytes()]));
        let owners = geometry.blocks.iter().map(|n| vec![None; *n as usize]).collect();
        let resting = geometry.blocks.iter().map(|n| vec![0; *n as usize]).collect();
        let mut memory = Memory { geometry, shared, owners, resting };
        for (group, blocks) in memory.geometry.blocks.clone().into_iter().enumerate() {
            for block in (0..blocks).map(BlockId) {
                memory.resting[group][block.0 as usize] = memory.digest(group, block);
            }
        }
        memory
    }

    fn layers(&self, group: usize) -> usize {
        self.geometry.layout.groups[group].layers.len()
    }

    /// One layer of a block.
    pub(crate) fn layer(&self, group: usize, layer: usize, block: BlockId) -> Vec<u8> {
        let range = self.geometry.block_range(group, layer, block);
        self.bytes((range.start, range.len()))
    }

    /// Some bytes.
    pub(crate) fn bytes(&self, (offset, len): (usize, usize)) -> Vec<u8> {
        self.shared.borrow()[offset..][..len].to_vec()
    }

    fn digest(&self, group: usize, block: BlockId) -> u64 {
        let layers = (0..self.layers(group)).map(|layer| digest_block(&self.layer(group, layer, block), layer as u64));
        layers.fold(0, |sum, digest| mix(sum ^ digest))
    }

    /// Keeps blocks for `owner`, or says which of them is another's or has changed while nobody had it (I3).
    pub(crate) fn take(&mut self, blocks: &[Vec<BlockId>], owner: Owner) -> Result<(), String> {
        for (group, block) in each(blocks) {
            let at = block.0 as usize;
            if let Some(other) = self.owners[group][at] {
                return Err(format!("{block} of group {group} is taken for {owner:?} and still kept for {other:?}"));
            }
            if self.digest(group, block) != self.resting[group][at] {
                return Err(format!("{block} of group {group} has changed since it was given back"));
            }
            self.owners[group][at] = Some(owner);
        }
        Ok(())
    }

    /// Nobody may touch them from now on.
    pub(crate) fn give_back(&mut self, blocks: &[Vec<BlockId>]) {
        for (group, block) in each(blocks) {
            self.owners[group][block.0 as usize] = None;
            self.resting[group][block.0 as usize] = self.digest(group, block);
        }
    }

    /// Whether no free block has changed.
    pub(crate) fn check_resting(&self) -> Result<(), String> {
        for (group, owners) in self.owners.iter().enumerate() {
            for at in (0..owners.len()).filter(|at| owners[*at].is_none()) {
                let block = BlockId(at as u32);
                if self.digest(group, block) != self.resting[group][at] {
                    return Err(format!("{block} of group {group} has changed since it was given back"));
                }
            }
        }
        Ok(())
    }

    /// Whose block a byte of the pool is in.
    pub(crate) fn owner_at(&self, offset: usize) -> Option<Owner> {
        for (group, owners) in self.owners.iter().enumerate() {
            for layer in 0..self.layers(group) {
                let first = self.geometry.block_range(group, layer, BlockId(0));
                let end = first.start + first.len() * owners.len();
                if (first.start..end).contains(&offset) {
                    return owners[(offset - first.start) / first.len()];
                }
            }
        }
        None
    }

    /// Writes without asking.
    pub(crate) fn write(&self, offset: usize, bytes: &[u8]) {
        self.shared.borrow_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Writes a request's content: to index i of each group's list, in every layer.
    pub(crate) fn fill(&self, request: u64, blocks: &[Vec<BlockId>]) {
        self.for_each_layer(blocks, |offset, wanted| self.write(offset, &wanted(request)));
    }

    /// Whether a request's content is there; if not, where it differs.
    pub(crate) fn compare(&self, request: u64, blocks: &[Vec<BlockId>]) -> Result<(), String> {
        let mut wrong = None;
        self.for_each_layer(blocks, |offset, wanted| {
            let wanted = wanted(request);
            if wrong.is_none() && self.bytes((offset, wanted.len())) != wanted {
                wrong = Some(format!("other bytes at offset {offset}"));
            }
        });
        wrong.map_or(Ok(()), Err)
    }

    fn for_each_layer(&self, blocks: &[Vec<BlockId>], mut act: impl FnMut(usize, &dyn Fn(u64) -> Vec<u8>)) {
        for (group, list) in blocks.iter().enumerate() {
            for (index, block) in list.iter().enumerate() {
                for layer in 0..self.layers(group) {
                    let range = self.geometry.block_range(group, layer, *block);
                    act(range.start, &|request| content(request, group, index, layer, range.len()));
                }
            }
        }
    }
}

fn each(blocks: &[Vec<BlockId>]) -> impl Iterator<Item = (usize, BlockId)> {
    blocks.iter().enumerate().flat_map(|(group, list)| list.iter().map(move |block| (group, *block)))
}

/// What a request's KV is.
fn content(request: u64, group: usize, index: usize, layer: usize, len: usize) -> Vec<u8> {
    let start = mix(request ^ mix((group as u64) << 40 | (index as u64) << 20 | layer as u64));
    (0..len.div_ceil(8) as u64).flat_map(|at| mix(start ^ mix(at + 1)).to_le_bytes()).take(len).collect()
}
