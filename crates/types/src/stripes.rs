//! Maps the bytes of a pool to the pools of tensor-parallel ranks that share its heads.
//!
//! In a plane, heads come before slots. So a rank's part of a plane is one contiguous run, a stripe, and within each group a rank's pool
//! is every `ranks`-th stripe of the whole pool. Pure arithmetic: code that knows only the whole pool and code that has only one rank's
//! pool need not know each other.

use std::ops::Range;

use crate::layout::PoolGeometry;

/// The whole pool as stripes of the ranks' pools.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stripes {
    ranks: usize,
    groups: Vec<Group>,
}

/// A layer group's part of the pool.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Group {
    /// Byte range in the whole pool.
    whole: Range<usize>,
    /// Offset at which the group begins in each rank's pool.
    own: usize,
    /// Bytes of one stripe, a rank's part of a plane.
    stripe: usize,
}

/// A run of bytes of one rank's pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RankPiece {
    /// The rank.
    pub rank: usize,
    /// Offset in that rank's pool.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

impl Stripes {
    /// The stripes of a pool shared by `ranks` ranks, each with a pool of [`PoolGeometry::of_ranks`]. `None` when the ranks cannot share
    /// its heads evenly.
    pub fn new(whole: &PoolGeometry, ranks: u32) -> Option<Stripes> {
        let layout = &whole.layout;
        if ranks == 0 || layout.groups.iter().any(|group| !group.kv_heads.is_multiple_of(ranks)) {
            return None;
        }
        let own = whole.of_ranks(ranks);
        let group = |g: usize| {
            let start = whole.layer_offset(g, 0);
            let bytes = layout.block_bytes_all_layers(g) * whole.blocks[g] as usize;
            Group { whole: start..start + bytes, own: own.layer_offset(g, 0), stripe: own.layout.plane_bytes(g) }
        };
        Some(Stripes { ranks: ranks as usize, groups: (0..layout.groups.len()).map(group).collect() })
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Bytes of the whole pool.
    pub fn bytes(&self) -> usize {
        self.groups.last().map_or(0, |group| group.whole.end)
    }

    /// The pieces that make up a byte range of the whole pool, in order. Bytes outside the pool are left out.
    pub fn pieces(&self, range: Range<usize>) -> impl Iterator<Item = RankPiece> {
        let mut at = range.start;
        std::iter::from_fn(move || {
            if at >= range.end {
                return None;
            }
            let group = self.groups.iter().find(|group| group.whole.contains(&at))?;
            let (stripe, inside) = ((at - group.whole.start) / group.stripe, (at - group.whole.start) % group.stripe);
            let len = (group.stripe - inside).min(range.end - at);
            let offset = group.own + stripe / self.ranks * group.stripe + inside;
            at += len;
            Some(RankPiece { rank: stripe % self.ranks, offset, len })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BlockId, KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, heads_of_rank};

    fn pool(dtype: KvDtype) -> PoolGeometry {
        let group = |layers: Vec<u32>, kv_heads, head_dim| KvGroup {
            layers,
            planes: 2,
            kv_heads,
            head_dim,
            window: None,
            sinks: 0,
        };
        let groups = vec![group(vec![0, 2], 4, 8), group(vec![1], 2, 24)];
        let layout = KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size: 16, groups };
        PoolGeometry { layout, blocks: vec![3, 2] }
    }

    /// Every head of every plane is where its rank's own geometry says.
    #[test]
    fn each_head_is_where_its_rank_has_it() {
        for dtype in KvDtype::ALL {
            let (whole, own) = (pool(dtype), pool(dtype).of_ranks(2));
            let stripes = Stripes::new(&whole, 2).unwrap();
            assert_eq!((stripes.ranks(), stripes.bytes()), (2, whole.bytes()));
            for (g, group) in whole.layout.groups.iter().enumerate() {
                let head_bytes = whole.layout.head_bytes(g);
                let places = (0..group.layers.len()).flat_map(|l| (0..whole.blocks[g]).map(move |b| (l, BlockId(b))));
                for ((layer, block), plane) in places.flat_map(|place| [0, 1].map(|plane| (place, plane))) {
                    let start = |pool: &PoolGeometry| {
                        pool.block_range(g, layer, block).start + plane * pool.layout.plane_bytes(g)
                    };
                    for head in 0..group.kv_heads {
                        let at = start(&whole) + head as usize * head_bytes;
                        let holds = |rank: &u32| heads_of_rank(group.kv_heads, 2, *rank).contains(&head);
                        let rank = (0..2).find(holds).unwrap();
                        let before = (head - heads_of_rank(group.kv_heads, 2, rank).start) as usize * head_bytes;
                        let want = RankPiece { rank: rank as usize, offset: start(&own) + before, len: head_bytes };
                        assert_eq!(stripes.pieces(at..at + head_bytes).collect::<Vec<_>>(), [want]);
                    }
                }
            }
        }
    }

    #[test]
    fn the_pieces_of_any_range_are_its_bytes_and_no_byte_is_two_pieces() {
        let whole = pool(KvDtype::F16);
        let own = whole.of_ranks(2).bytes();
        let stripes = Stripes::new(&whole, 2).unwrap();
        for range in [0..whole.bytes(), 5..6, 100..4321, 7..7, whole.bytes() - 3..whole.bytes()] {
            let mut seen = vec![vec![false; own]; 2];
            let mut total = 0;
            for RankPiece { rank, offset, len } in stripes.pieces(range.clone()) {
                total += len;
                for byte in &mut seen[rank][offset..offset + len] {
                    assert!(!std::mem::replace(byte, true));
                }
            }
            assert_eq!(total, range.len());
        }
        let past = stripes.pieces(whole.bytes() - 8..whole.bytes() + 8).map(|piece| piece.len).sum::<usize>();
        assert_eq!(past, 8, "there is nothing past the end");
    }

    #[test]
    fn heads_that_cannot_be_shared_evenly_make_no_stripes() {
        assert_eq!([0, 3, 4].map(|ranks| Stripes::new(&pool(KvDtype::F16), ranks)), [None, None, None]);
    }
}
