//! The KV layout: where a token's K and V lie in a pool.
//!
//! A pool is one region of memory: for each group, for each of its layers, for each block, the block's planes
//! `[K, V][kv_head][slot][head_dim]`. Heads come before slots, so that a worker with another tensor-parallel degree takes a
//! contiguous slice of each plane. A quantised type keeps its parameters in the same slice, behind the elements:
//! `[K, V][kv_head]{ [slot][head_dim] elements, [slot][parameters] f16 }`. So a block is always one run of bytes, which can be
//! copied, moved and digested without knowing its type. Only this crate and the kernels may assume the number of groups or
//! planes, or where parameters lie.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::hash_bytes;
use crate::error::{BatonError, ErrorKind};
use crate::ids::BlockId;

/// Version of everything that two workers exchange; part of the layout fingerprint.
pub const PROTOCOL_VERSION: u32 = 4;

/// Element type of a KV pool. A row is the K or the V of one token and head. Quantised types round each row by itself.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Integers in -127..=127. One parameter per row, its scale: x = q · scale.
    Q8,
    /// OCP 8-bit float E4M3. One parameter per row, its scale: x = q · scale, with the row's largest magnitude at 448.
    Fp8,
    /// Integers in 0..=15, eight to a little-endian u32, the first in the lowest bits. Two parameters for every
    /// [`KvDtype::INT4_GROUP`] elements of a row, scale and minimum: x = q · scale + minimum.
    Int4,
}

crate::words!(KvDtype { F32 = "f32", F16 = "f16", Bf16 = "bf16", Q8 = "q8", Fp8 = "fp8", Int4 = "int4" });

impl KvDtype {
    /// Elements that share a scale and a minimum in [`KvDtype::Int4`]; the last group of a row may have fewer.
    pub const INT4_GROUP: usize = 32;

    /// Bytes of the elements of one row.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        match self {
            KvDtype::F32 => head_dim * 4,
            KvDtype::F16 | KvDtype::Bf16 => head_dim * 2,
            KvDtype::Q8 | KvDtype::Fp8 => head_dim,
            KvDtype::Int4 => head_dim.div_ceil(8) * 4,
        }
    }

    /// Parameters of one row, f16 each.
    pub fn row_parameters(self, head_dim: usize) -> usize {
        match self {
            KvDtype::F32 | KvDtype::F16 | KvDtype::Bf16 => 0,
            KvDtype::Q8 | KvDtype::Fp8 => 1,
            KvDtype::Int4 => 2 * head_dim.div_ceil(Self::INT4_GROUP),
        }
    }
}

/// Layers that share a plane shape and a window, and therefore a block table.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct KvGroup {
    /// The model's layers in this group, ascending.
    pub layers: Vec<u32>,
    /// Planes of a block: 2 for K and V.
    pub planes: u32,
    /// KV heads of a plane.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// A query sees this many latest tokens, itself included; None: all tokens.
    pub window: Option<u32>,
    /// In addition, a query sees this many first tokens of its sequence (attention sinks), at positions within the cache: the sinks'
    /// distance from the query is as if they stood directly before its window. 0 without a window.
    pub sinks: u32,
}

/// The blocks of a sequence that a layer group needs to compute a position and all after it: the first `sinks`, and all from `first` on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LiveBlocks {
    /// Number of leading blocks that are never released.
    pub sinks: u32,
    /// Index of the first block in the window. At most the last full block, which keeps its sequence's place in a prefix index.
    pub first: u32,
}

impl LiveBlocks {
    /// Whether the block at index `at` of the sequence is needed.
    pub fn contains(self, at: u32) -> bool {
        at < self.sinks || at >= self.first
    }

    /// How many of the blocks `from..at` are not needed.
    pub fn missing(self, from: u32, at: u32) -> u32 {
        at.min(self.first).saturating_sub(from.max(self.sinks))
    }

    /// The place of block `at` in the list of needed blocks from `from` on; `None` when it is not in the list.
    pub fn place(self, from: u32, at: u32) -> Option<u32> {
        (at >= from && self.contains(at)).then(|| at - from - self.missing(from, at))
    }
}

impl KvGroup {
    /// The blocks of a sequence that are needed to compute `position` and all after it.
    pub fn live(&self, position: u32, block_size: u32) -> LiveBlocks {
        let sinks = self.sinks.div_ceil(block_size);
        let Some(window) = self.window else { return LiveBlocks { sinks, first: 0 } };
        let visible = (position + 1).saturating_sub(window) / block_size;
        LiveBlocks { sinks, first: visible.min((position / block_size).saturating_sub(1)) }
    }

    /// The most blocks a sequence needs at once when it is computed in chunks of `chunk` tokens and releases blocks that its window has
    /// passed; `None` without a window.
    pub fn most_live(&self, chunk: u32, block_size: u32) -> Option<u32> {
        let span = self.window?.saturating_add(chunk).div_ceil(block_size);
        Some(span.saturating_add(self.sinks.div_ceil(block_size)).saturating_add(2))
    }
}

/// The heads, out of `heads`, that rank `rank` of `ranks` holds when several ranks share a model (tensor parallelism). Each rank holds a
/// run of the same length. With more ranks than heads, each holds one head, and several hold the same one. One of the two numbers must
/// divide the other.
pub fn heads_of_rank(heads: u32, ranks: u32, rank: u32) -> Range<u32> {
    match ranks <= heads {
        true => rank * (heads / ranks)..(rank + 1) * (heads / ranks),
        false => rank / (ranks / heads)..rank / (ranks / heads) + 1,
    }
}

/// Everything two workers must agree on before KV moves between them.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub struct KvLayout {
    /// [`PROTOCOL_VERSION`] of the worker that made it.
    pub version: u32,
    /// Fingerprint of the model's weights and configuration.
    pub model: u64,
    /// Element type.
    pub dtype: KvDtype,
    /// Tokens per block.
    pub block_size: u32,
    /// Layer groups.
    pub groups: Vec<KvGroup>,
}

/// Two layouts differ; names the first field that does.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "KV layouts differ in {field}: {ours} here, {theirs} at the peer; start both workers with the same model and KV settings"
)]
pub struct LayoutMismatch {
    /// Which field.
    pub field: &'static str,
    /// This side's value.
    pub ours: String,
    /// The peer's value.
    pub theirs: String,
}

impl BatonError for LayoutMismatch {
    fn kind(&self) -> ErrorKind {
        ErrorKind::FailedPrecondition
    }
}

impl KvLayout {
    /// Number of layers over all groups.
    pub fn layers(&self) -> usize {
        self.groups.iter().map(|g| g.layers.len()).sum()
    }

    /// The group of a layer and its index inside the group.
    pub fn locate(&self, layer: u32) -> Option<(usize, usize)> {
        self.groups.iter().enumerate().find_map(|(g, group)| group.layers.binary_search(&layer).ok().map(|i| (g, i)))
    }

    /// Offset of a quantised type's parameters inside a KV head's slice of a plane: behind the elements of all slots.
    pub fn parameters_offset(&self, group: usize) -> usize {
        self.block_size as usize * self.dtype.row_bytes(self.groups[group].head_dim as usize)
    }

    /// Bytes of one KV head's slice of one plane: the elements of all slots, then their parameters.
    pub fn head_bytes(&self, group: usize) -> usize {
        let parameters = self.dtype.row_parameters(self.groups[group].head_dim as usize);
        self.parameters_offset(group) + self.block_size as usize * parameters * 2
    }

    /// Bytes of one plane of one block of one layer.
    pub fn plane_bytes(&self, group: usize) -> usize {
        self.groups[group].kv_heads as usize * self.head_bytes(group)
    }

    /// Bytes of one block of one layer.
    pub fn block_bytes(&self, group: usize) -> usize {
        self.plane_bytes(group) * self.groups[group].planes as usize
    }

    /// Bytes of one block over all layers of its group.
    pub fn block_bytes_all_layers(&self, group: usize) -> usize {
        self.block_bytes(group) * self.groups[group].layers.len()
    }

    /// Bytes of one block of each layer group together.
    pub fn block_bytes_all_groups(&self) -> u64 {
        (0..self.groups.len()).map(|group| self.block_bytes_all_layers(group) as u64).sum()
    }

    /// Blocks needed to hold `tokens` tokens.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size as usize)
    }

    /// The same layout, but layers of full attention see only the first `sinks` tokens, rounded up to whole blocks, and the last `window`.
    pub fn with_sinks(mut self, sinks: u32, window: u32) -> KvLayout {
        let sinks = sinks.next_multiple_of(self.block_size);
        for group in self.groups.iter_mut().filter(|group| group.window.is_none()) {
            (group.window, group.sinks) = (Some(window), sinks);
        }
        self
    }

    /// The layout of one rank's pool, with the heads of [`heads_of_rank`].
    pub fn of_ranks(mut self, ranks: u32) -> KvLayout {
        for group in &mut self.groups {
            group.kv_heads = heads_of_rank(group.kv_heads, ranks, 0).len() as u32;
        }
        self
    }

    /// The most tokens whose blocks a sequence holds at once, however long it gets, when it is computed in chunks of `chunk` tokens;
    /// `None` when some layers see all tokens.
    pub fn most_tokens(&self, chunk: u32) -> Option<u32> {
        let mut most = self.groups.iter().map(|group| group.most_live(chunk, self.block_size));
        most.try_fold(0, |most, blocks| Some(blocks?.saturating_mul(self.block_size).max(most)))
    }

    /// Number of the first 8-byte lane of a layer's part of a block, for [`crate::digest_block`].
    pub fn first_lane(&self, group: usize, layer_in_group: usize) -> u64 {
        (self.block_bytes(group).div_ceil(8) * layer_in_group) as u64
    }

    /// 64 bits that differ when any field except the element type differs. Between workers of equal families KV can move, converted if
    /// needed.
    pub fn family(&self) -> u64 {
        KvLayout { dtype: KvDtype::F32, ..self.clone() }.fingerprint()
    }

    /// 64 bits that differ when any field differs.
    pub fn fingerprint(&self) -> u64 {
        let mut text = format!("{}/{:x}/{:?}/{}", self.version, self.model, self.dtype, self.block_size);
        for g in &self.groups {
            text += &format!("/{:?}:{}:{}:{}:{:?}:{}", g.layers, g.planes, g.kv_heads, g.head_dim, g.window, g.sinks);
        }
        hash_bytes(0, text.as_bytes())
    }

    /// Ok when KV can move unconverted between the two; otherwise the first difference, with both values.
    pub fn compatible(&self, peer: &KvLayout) -> Result<(), LayoutMismatch> {
        let check = |same: bool, field, ours: String, theirs: String| {
            if same { Ok(()) } else { Err(LayoutMismatch { field, ours, theirs }) }
        };
        check(self.version == peer.version, "protocol version", self.version.to_string(), peer.version.to_string())?;
        check(
            self.model == peer.model,
            "model fingerprint",
            format!("{:016x}", self.model),
            format!("{:016x}", peer.model),
        )?;
        check(self.dtype == peer.dtype, "KV dtype", format!("{:?}", self.dtype), format!("{:?}", peer.dtype))?;
        check(
            self.block_size == peer.block_size,
            "block size",
            self.block_size.to_string(),
            peer.block_size.to_string(),
        )?;
        check(self.groups == peer.groups, "layer groups", format!("{:?}", self.groups), format!("{:?}", peer.groups))
    }
}

/// A layout with a number of blocks per group: the shape of one pool.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct PoolGeometry {
    /// The layout.
    pub layout: KvLayout,
    /// Blocks of each group.
    pub blocks: Vec<u32>,
}

impl PoolGeometry {
    /// A pool with the same number of blocks in every group.
    pub fn uniform(layout: KvLayout, blocks: u32) -> Self {
        let blocks = vec![blocks; layout.groups.len()];
        PoolGeometry { layout, blocks }
    }

    /// The pool of one of `ranks` ranks; see [`KvLayout::of_ranks`].
    pub fn of_ranks(&self, ranks: u32) -> PoolGeometry {
        PoolGeometry { layout: self.layout.clone().of_ranks(ranks), blocks: self.blocks.clone() }
    }

    /// Bytes of the whole pool.
    pub fn bytes(&self) -> usize {
        (0..self.blocks.len()).map(|g| self.group_bytes(g)).sum()
    }

    fn group_bytes(&self, group: usize) -> usize {
        self.layout.block_bytes_all_layers(group) * self.blocks[group] as usize
    }

    /// Byte offset of block 0 of a layer.
    pub fn layer_offset(&self, group: usize, layer_in_group: usize) -> usize {
        let before: usize = (0..group).map(|g| self.group_bytes(g)).sum();
        before + layer_in_group * self.blocks[group] as usize * self.layout.block_bytes(group)
    }

    /// Byte range of one layer's part of one block.
    ///
    /// # Panics
    /// When group, layer or block lie outside the pool.
    pub fn block_range(&self, group: usize, layer_in_group: usize, block: BlockId) -> Range<usize> {
        assert!(block.0 < self.blocks[group], "block {block} outside a pool of {}", self.blocks[group]);
        assert!(layer_in_group < self.layout.groups[group].layers.len(), "layer {layer_in_group} outside its group");
        let bytes = self.layout.block_bytes(group);
        let start = self.layer_offset(group, layer_in_group) + block.0 as usize * bytes;
        start..start + bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> KvLayout {
        let group =
            |layers: Vec<u32>, window| KvGroup { layers, planes: 2, kv_heads: 3, head_dim: 8, window, sinks: 0 };
        KvLayout {
            version: PROTOCOL_VERSION,
            model: 7,
            dtype: KvDtype::F16,
            block_size: 16,
            groups: vec![group(vec![2, 5], None), group(vec![0, 1, 3, 4], Some(32))],
        }
    }

    #[test]
    fn blocks_tile_the_pool_without_gap_or_overlap() {
        let pool = PoolGeometry { layout: layout(), blocks: vec![3, 5] };
        let mut next = 0;
        for (g, group) in pool.layout.groups.iter().enumerate() {
            for l in 0..group.layers.len() {
                for b in 0..pool.blocks[g] {
                    let range = pool.block_range(g, l, BlockId(b));
                    assert_eq!(range.start, next);
                    next = range.end;
                }
            }
        }
        assert_eq!(next, pool.bytes());
        assert_eq!(pool.layout.locate(3), Some((1, 2)));
        assert_eq!(pool.layout.locate(6), None);
    }

    #[test]
    fn head_slices_are_whole_lanes_and_hold_elements_and_parameters() {
        // (bits per row of 64 elements, bits per row of 24 elements)
        let bits = [(2048, 768), (1024, 384), (1024, 384), (528, 208), (528, 208), (320, 128)];
        for (dtype, (wide, narrow)) in KvDtype::ALL.into_iter().zip(bits) {
            for (head_dim, bits) in [(64, wide), (24, narrow)] {
                let mut layout = KvLayout { dtype, ..layout() };
                layout.groups[0].head_dim = head_dim;
                assert_eq!(layout.head_bytes(0), 16 * bits / 8, "{dtype:?} x {head_dim}");
                assert_eq!(layout.plane_bytes(0), 3 * layout.head_bytes(0));
                assert!(layout.head_bytes(0).is_multiple_of(8) && layout.parameters_offset(0).is_multiple_of(8));
            }
        }
    }

    #[test]
    fn every_field_is_in_the_fingerprint_and_named_in_a_mismatch() {
        let base = layout();
        let mut others = vec![base.clone(); 6];
        others[0].version += 1;
        others[1].model += 1;
        others[2].dtype = KvDtype::F32;
        others[3].block_size = 32;
        others[4].groups[0].window = Some(1);
        others[5].groups[1].sinks = 16;
        let fields =
            ["protocol version", "model fingerprint", "KV dtype", "block size", "layer groups", "layer groups"];
        for (other, field) in others.iter().zip(fields) {
            assert_ne!(other.fingerprint(), base.fingerprint());
            assert_eq!(other.family() == base.family(), field == "KV dtype");
            assert_eq!(base.compatible(other).map_err(|e| e.field), Err(field));
        }
        assert_eq!(base.compatible(&layout()), Ok(()));
    }

    /// A block that is needed stays needed until the window has passed it for good. Needed blocks have places without gaps, and there are
    /// never more than the bound says.
    #[test]
    fn live_blocks_only_move_on_and_are_bounded() {
        for (window, sinks, size) in [(5, 0, 4), (5, 4, 4), (1, 3, 1), (7, 8, 3), (40, 16, 16)] {
            let group = KvGroup { window: Some(window), sinks, ..layout().groups[0].clone() };
            for (position, chunk) in (0..200).flat_map(|p| [(p, 1), (p, 9)]) {
                let (live, next) = (group.live(position, size), group.live(position + chunk, size));
                assert!(live.first <= next.first && live.sinks == next.sinks);
                let visible = |at: u32| at < sinks || at + window > position;
                assert!((0..=position).all(|at| !visible(at) || live.contains(at / size)));
                let needed: Vec<u32> = (0..(position + chunk).div_ceil(size)).filter(|at| live.contains(*at)).collect();
                assert!(needed.len() as u32 <= group.most_live(chunk, size).unwrap(), "{window} {sinks} {size}");
                for from in 0..8 {
                    let listed = needed.iter().filter(|at| **at >= from);
                    assert!(listed.enumerate().all(|(place, at)| live.place(from, *at) == Some(place as u32)));
                }
            }
        }
        let full = KvGroup { window: None, ..layout().groups[0].clone() };
        assert_eq!((full.live(99, 4), full.most_live(1, 4)), (LiveBlocks { sinks: 0, first: 0 }, None));
    }

    #[test]
    fn sinks_are_for_full_attention_in_whole_blocks() {
        let layout = layout().with_sinks(4, 100);
        let seen: Vec<_> = layout.groups.iter().map(|group| (group.sinks, group.window)).collect();
        assert_eq!(seen, [(16, Some(100)), (0, Some(32))]);
    }
}
