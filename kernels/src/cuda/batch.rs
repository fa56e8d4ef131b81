//! Turns a ragged batch into what the kernels take: tiles of decode rows, then tiles of chunks, and block tables. Also decides how
//! attention of decode rows is split over their KV. Pure.

use super::graphs;
use super::params::Tile;
use crate::backend::{Ragged, Span};

/// Positions of one split of a decode row's KV. Splits are counted from position 0, so they depend on the row alone (I1). The number
/// is small enough that a single long sequence fills a device, and large enough that combining the splits costs little.
pub(super) const SPLIT: u32 = 256;
/// Most bytes of partial sums that the splits of decode rows leave in memory at once, unless a single row needs more.
const PARTIAL: usize = 64 << 20;
/// Words of a [`Tile`].
pub(super) const TILE_WORDS: usize = 4;

/// How a batch is cut into tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// Query heads for each KV head.
    pub group: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Whether spans of one row are decode rows. If not, all spans are chunks.
    pub decode: bool,
    /// (row, query head) pairs of one KV head that a thread block of the chunks' kernel takes.
    pub pairs: usize,
    /// Splits that all decode rows are launched with; None: as many as the rows need.
    pub splits: Option<u32>,
}

/// Tiles of decode rows, then those of chunks; and the block tables.
#[derive(Default, Debug)]
pub(super) struct Tiles {
    tiles: Vec<[u32; TILE_WORDS]>,
    tables: Vec<u32>,
    /// Rows of the batch, padding included.
    rows: usize,
    /// The spans that were cut last, and how (`cut`).
    spans: Vec<Span>,
    cut: Option<Cut>,
    decode: usize,
    /// Rows of the largest chunk tile.
    largest: u32,
    /// Positions of decode rows, in the order of their tiles. If [`Cut::splits`] is given: the last position of that many splits.
    positions: Vec<u32>,
}

/// Most bytes of partial sums that `rows` decode rows of up to `context` positions leave at once. A split of a row has `row` bytes.
pub(super) fn sums(rows: usize, context: usize, row: usize) -> usize {
    let longest = graphs::splits(context.div_ceil(SPLIT as usize) as u32) as usize * row;
    (rows * longest).min(PARTIAL.max(longest))
}

impl Tiles {
    /// Reserves room for batches of up to `rows` rows and `table_entries` table entries.
    pub fn reserve(&mut self, rows: usize, table_entries: usize) {
        self.tiles.reserve(rows);
        self.tables.reserve(table_entries);
        self.spans.reserve(rows);
        self.positions.reserve(rows);
    }

    /// Cuts a batch, unless the same batch was cut the same way last time. Returns whether it cut anew. Padding rows become tiles of
    /// zero rows.
    pub fn renew(&mut self, batch: &Ragged, cut: Cut) -> bool {
        let blocks = batch.blocks().iter().map(|block| block.0);
        let same = self.cut == Some(cut) && self.rows == batch.rows() && self.spans == batch.spans();
        if same && blocks.clone().eq(self.tables.iter().copied()) {
            return false;
        }
        self.clear();
        self.spans.extend_from_slice(batch.spans());
        (self.cut, self.rows) = (Some(cut), batch.rows());
        let is_decode = |len: usize| cut.decode && len == 1;
        for span in batch.spans().iter().filter(|span| is_decode(span.len)) {
            let (row, position) = (span.row as u32, span.start as u32);
            self.decode_row(position, [row, 1, position, table(span, cut)]);
        }
        let padding = batch.padding();
        (0..if cut.decode { padding } else { 0 }).for_each(|_| self.decode_row(0, [0; TILE_WORDS]));
        let most = (cut.pairs / cut.group).max(1);
        for span in batch.spans().iter().filter(|span| !is_decode(span.len)) {
            for first in (0..span.len).step_by(most) {
                let rows = most.min(span.len - first) as u32;
                let (row, position) = ((span.row + first) as u32, (span.start + first) as u32);
                self.tiles.push([row, rows, position, table(span, cut)]);
                self.largest = self.largest.max(rows);
            }
        }
        (0..if cut.decode { 0 } else { padding }).for_each(|_| self.tiles.push([0; TILE_WORDS]));
        self.tables.extend(blocks);
        true
    }

    fn decode_row(&mut self, position: u32, tile: [u32; TILE_WORDS]) {
        let splits = self.cut.and_then(|cut| cut.splits);
        self.positions.push(splits.map_or(position, |splits| splits * SPLIT - 1));
        self.tiles.push(tile);
        self.decode += 1;
    }

    /// Removes all tiles and tables but keeps their memory.
    fn clear(&mut self) {
        self.tiles.clear();
        self.tables.clear();
        self.spans.clear();
        self.positions.clear();
        (self.decode, self.largest) = (0, 0);
    }

    /// The tiles, as words of [`Tile`].
    pub fn tiles(&self) -> &[[u32; TILE_WORDS]] {
        &self.tiles
    }

    /// The block tables.
    pub fn tables(&self) -> &[u32] {
        &self.tables
    }

    /// Number of tiles of decode rows. They come first.
    pub fn decode(&self) -> usize {
        self.decode
    }

    /// Number of tiles of chunks, and rows of the largest of them.
    pub fn chunks(&self) -> (usize, u32) {
        (self.tiles.len() - self.decode, self.largest)
    }

    /// The launches of attention over decode rows. Each split of a row needs `row` bytes of partial sums.
    pub fn launches(&self, row: usize) -> impl Iterator<Item = DecodeLaunch> + '_ {
        launches(&self.positions, row)
    }
}

/// Index in the block tables that position 0 of a span's sequence would have. Negative, as two's complement, if a window hides more
/// blocks than there are entries before the span's.
fn table(span: &Span, cut: Cut) -> u32 {
    ((span.table as i64 - (span.hidden / cut.block_size) as i64) as i32).cast_unsigned()
}

/// A launch of attention for some decode rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DecodeLaunch {
    /// Index of the first tile.
    pub first: usize,
    /// Number of tiles.
    pub count: usize,
    /// Splits of the longest row.
    pub splits: u32,
}

/// Groups decode rows into launches. A launch takes as many rows as there is room for their partial sums, but at least one.
fn launches(positions: &[u32], row: usize) -> impl Iterator<Item = DecodeLaunch> + '_ {
    let mut first = 0;
    std::iter::from_fn(move || {
        let mut launch = DecodeLaunch { first, count: 0, splits: 0 };
        for &position in &positions[first..] {
            let splits = launch.splits.max(position / SPLIT + 1);
            if launch.count > 0 && (launch.count + 1) * splits as usize * row > PARTIAL {
                break;
            }
            (launch.count, launch.splits) = (launch.count + 1, splits);
        }
        first += launch.count;
        (launch.count > 0).then_some(launch)
    })
}

const _: () = assert!(size_of::<Tile>() == TILE_WORDS * size_of::<u32>());

#[cfg(test)]
mod tests {
    use baton_types::BlockId;

    use super::*;

    const CUT: Cut = Cut { group: 4, block_size: 16, decode: true, pairs: 64, splits: None };

    fn batch() -> Ragged {
        let mut batch = Ragged::default();
        batch.push(0, 40, &[BlockId(7), BlockId(8), BlockId(9)]);
        batch.push(16, 1, &[BlockId(3), BlockId(4)]);
        // The table lacks the blocks that the window has passed.
        batch.push_around(100, 1, (&[], &[BlockId(5)]), 96);
        batch
    }

    #[test]
    fn decode_rows_come_first_and_chunks_in_tiles_that_keep_all_warps_busy() {
        let mut cut = Tiles::default();
        assert!(cut.renew(&batch(), CUT));
        let minus = (5i32 - 6).cast_unsigned();
        let want = [[40, 1, 16, 3], [41, 1, 100, minus], [0, 16, 0, 0], [16, 16, 16, 0], [32, 8, 32, 0]];
        assert_eq!(cut.tiles(), want);
        assert_eq!((cut.decode(), cut.chunks()), (2, (3, 16)));
        assert_eq!(cut.tables(), [7, 8, 9, 3, 4, 5]);
        cut.renew(&batch(), Cut { decode: false, ..CUT });
        assert_eq!((cut.decode(), cut.chunks()), (0, (5, 16)));
    }

    #[test]
    fn a_batch_is_cut_once() {
        let (mut cut, batch) = (Tiles::default(), batch());
        assert!(cut.renew(&batch, CUT));
        assert!(!cut.renew(&batch, CUT));
        let mut other = Ragged::default();
        other.push(0, 1, &[BlockId(0)]);
        assert!(cut.renew(&other, CUT));
        other.clear();
        assert!(cut.renew(&other, CUT));
        assert_eq!((cut.tiles(), cut.tables()), (&[][..], &[][..]));
    }

    #[test]
    fn a_padded_batch_has_places_without_rows_and_the_launches_it_is_given() {
        let mut batch = Ragged::default();
        batch.push(700, 1, &[BlockId(1); 44]);
        batch.pad_to(3);
        let mut cut = Tiles::default();
        let splits = |cut: &Tiles| cut.launches(1).map(|l| (l.count, l.splits)).collect::<Vec<_>>();
        assert!(cut.renew(&batch, CUT));
        assert_eq!((cut.tiles(), splits(&cut)), (&[[0, 1, 700, 0], [0; 4], [0; 4]][..], vec![(3, 3)]));
        assert!(cut.renew(&batch, Cut { splits: Some(4), ..CUT }));
        assert_eq!((cut.decode(), splits(&cut)), (3, vec![(3, 4)]));
        assert!(cut.renew(&batch, Cut { decode: false, ..CUT }));
        assert_eq!((cut.decode(), cut.chunks()), (0, (3, 1)));
        batch.pad_to(4);
        assert!(cut.renew(&batch, Cut { decode: false, ..CUT }), "more rows");
    }

    #[test]
    fn sums_of_splits_have_bounded_room() {
        let row = PARTIAL / 8;
        let all =
            |positions: &[u32]| launches(positions, row).map(|l| (l.first, l.count, l.splits)).collect::<Vec<_>>();
        assert_eq!(all(&[]), []);
        assert_eq!(all(&[0; 9]), [(0, 8, 1), (8, 1, 1)]);
        assert_eq!(all(&[SPLIT - 1, SPLIT, 3, 4, 5]), [(0, 4, 2), (4, 1, 1)]);
        assert_eq!(all(&[0, 100 * SPLIT, 0]), [(0, 1, 1), (1, 1, 101), (2, 1, 1)], "one row always goes");
    }
}
