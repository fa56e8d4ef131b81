//! Where a range of heads lies in one layer's part of a block.
//!
//! A plane is `[kv_head][slot][head_dim]`, so a range of heads is one run of bytes in each plane, and all heads of a block
//! that is not cut on either side are one run altogether. Pure arithmetic over the layout.

use baton_types::KvLayout;

use crate::heads::HeadSlice;

/// `count` runs of `len` bytes, the first `first` bytes into the block's part, the others `step` bytes apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Runs {
    pub first: usize,
    pub len: usize,
    pub step: usize,
    pub count: usize,
}

impl Runs {
    /// Of heads `first..first + count`. `cut`: plane by plane, even if they are all the heads.
    pub(crate) fn of(layout: &KvLayout, group: usize, first: u32, count: u32, cut: bool) -> Runs {
        if !cut {
            return Runs { first: 0, len: layout.block_bytes(group), step: 0, count: 1 };
        }
        let head = layout.head_bytes(group);
        Runs {
            first: first as usize * head,
            len: count as usize * head,
            step: layout.plane_bytes(group),
            count: layout.groups[group].planes as usize,
        }
    }

    /// Where they begin.
    pub(crate) fn starts(self) -> impl Iterator<Item = usize> + Clone {
        (0..self.count).map(move |i| self.first + i * self.step)
    }

    /// Bytes of all of them.
    pub(crate) fn bytes(&self) -> usize {
        self.len * self.count
    }
}

/// A slice of a group on both sides: as many runs there as here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Route {
    pub source: Runs,
    pub target: Runs,
}

impl Route {
    /// The slice's heads between two pools whose layouts differ in heads and type at most.
    pub(crate) fn new(source: &KvLayout, target: &KvLayout, group: usize, slice: HeadSlice) -> Route {
        let cut = is_cut(source, group, slice) || is_cut(target, group, slice);
        Route {
            source: Runs::of(source, group, slice.source, slice.count, cut),
            target: Runs::of(target, group, slice.target, slice.count, cut),
        }
    }
}

/// Of the decode side: the runs a slice has in its own blocks.
pub(crate) fn target_runs(layout: &KvLayout, group: usize, slice: HeadSlice) -> Runs {
    Runs::of(layout, group, slice.target, slice.count, is_cut(layout, group, slice))
}

fn is_cut(layout: &KvLayout, group: usize, slice: HeadSlice) -> bool {
    slice.count != layout.groups[group].kv_heads
}

/// Number of the digest lane at `offset` of one layer's part of a block, counted over the whole block. So the digests of
/// a block's slices add up to the block's.
pub(crate) fn lane(layout: &KvLayout, group: usize, layer: usize, offset: usize) -> u64 {
    layout.first_lane(group, layer) + (offset / 8) as u64
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup};

    use super::*;

    fn layout(dtype: KvDtype, kv_heads: u32) -> KvLayout {
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads, head_dim: 64, window: None, sinks: 0 };
        KvLayout { version: 1, model: 1, dtype, block_size: 16, groups: vec![group] }
    }

    #[test]
    fn whole_blocks_are_one_run_and_slices_one_for_each_plane() {
        let (four, two) = (layout(KvDtype::F16, 4), layout(KvDtype::F16, 2));
        let whole = Route::new(&four, &four, 0, HeadSlice::all(4));
        assert_eq!(whole.source, Runs { first: 0, len: 4 * 4096, step: 0, count: 1 });
        assert_eq!(whole.source, whole.target);
        // The upper half of four heads is all of a pool with two.
        let half = Route::new(&four, &two, 0, HeadSlice { source: 2, target: 0, count: 2 });
        assert_eq!(half.source, Runs { first: 4096, len: 4096, step: 8192, count: 2 });
        assert_eq!(half.target, Runs { first: 0, len: 4096, step: 4096, count: 2 });
        assert_eq!(half.source.starts().collect::<Vec<_>>(), [4096, 12288]);
        assert_eq!(half.source.bytes(), half.target.bytes());
        // In another type the same heads have other lengths.
        let quantised = Route::new(&four, &layout(KvDtype::Q8, 4), 0, HeadSlice::all(4));
        assert_eq!((quantised.source.count, quantised.target.count), (1, 1));
        assert!(quantised.target.len < quantised.source.len);
    }
}
