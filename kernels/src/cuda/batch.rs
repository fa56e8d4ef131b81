//! A ragged batch as the kernels take it: decode rows and chunks apart, as tiles, and how attention over them is split. Pure.

use super::params::Tile;
use crate::backend::{Ragged, Span};

/// Positions of a split of a decode row's KV, counted from position 0, so that it depends on the row alone (I1): few enough that
/// a long sequence alone fills a device, enough that bringing splits together costs little.
pub(super) const SPLIT: u32 = 256;
/// Bytes of sums that decode rows with several splits leave in memory at once, as far as one row needs no more.
const PARTIAL: usize = 64 << 20;
/// (row, head) pairs that a thread block of the prefill kernel takes.
const PAIRS: usize = 64;

/// Words that [`Tile`] has.
const TILE_WORDS: usize = 4;

/// How a batch becomes tiles.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    /// Query heads for each KV head.
    pub group: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Spans of one row are decode rows; otherwise there are chunks only.
    pub decode: bool,
}

/// Tiles of decode rows, then those of chunks, then the block tables.
#[derive(Default, Debug)]
pub(super) struct Tiles {
    words: Vec<u32>,
    /// What was cut last, and how.
    spans: Vec<Span>,
    cut: Option<Cut>,
    decode: usize,
    chunks: usize,
    /// Rows of the largest chunk tile.
    largest: u32,
    /// Positions of decode rows, in the order of their tiles.
    positions: Vec<u32>,
}

/// Bytes of the words of a batch of that many rows and table entries, at most.
pub(super) fn words_bytes(rows: usize, table_entries: usize) -> usize {
    (rows * TILE_WORDS + table_entries).max(1) * size_of::<u32>()
}

/// Bytes of sums that decode rows of up to `context` positions leave at once, at most, where a split of a row has `row` of them.
pub(super) fn sums(rows: usize, context: usize, row: usize) -> usize {
    let longest = context.div_ceil(SPLIT as usize) * row;
    (rows * longest).min(PARTIAL.max(longest))
}

impl Tiles {
    /// Makes room for batches of that many rows and table entries.
    pub fn reserve(&mut self, rows: usize, table_entries: usize) {
        self.words.reserve(rows * TILE_WORDS + table_entries);
        self.spans.reserve(rows);
        self.positions.reserve(rows);
    }

    /// Cuts a batch, unless it is the one that was cut last; whether it is another.
    pub fn renew(&mut self, batch: &Ragged, cut: Cut) -> bool {
        let blocks = batch.blocks().iter().map(|block| block.0);
        if self.cut == Some(cut) && self.spans == batch.spans() && blocks.clone().eq(self.tables().iter().copied()) {
            return false;
        }
        self.clear();
        self.spans.extend_from_slice(batch.spans());
        self.cut = Some(cut);
        let is_decode = |len: usize| cut.decode && len == 1;
        for span in batch.spans().iter().filter(|span| is_decode(span.len)) {
            self.positions.push(span.start as u32);
            self.push(Tile { row: span.row as u32, rows: 1, position: span.start as u32, table: table(span, cut) });
            self.decode += 1;
        }
        let most = (PAIRS / cut.group).max(1);
        for span in batch.spans().iter().filter(|span| !is_decode(span.len)) {
            for first in (0..span.len).step_by(most) {
                let rows = most.min(span.len - first) as u32;
                let (row, position) = ((span.row + first) as u32, (span.start + first) as u32);
                self.push(Tile { row, rows, position, table: table(span, cut) });
                self.chunks += 1;
                self.largest = self.largest.max(rows);
            }
        }
        self.words.extend(blocks);
        true
    }

    /// Empties it, keeping its memory.
    fn clear(&mut self) {
        self.words.clear();
        self.spans.clear();
        self.positions.clear();
        (self.decode, self.chunks, self.largest) = (0, 0, 0);
    }

    fn tables(&self) -> &[u32] {
        &self.words[(self.decode + self.chunks) * TILE_WORDS..]
    }

    fn push(&mut self, tile: Tile) {
        self.words.extend([tile.row, tile.rows, tile.position, tile.table.cast_unsigned()]);
    }

    /// What the device is given.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Byte offset of a tile in the words.
    pub fn tile_offset(&self, tile: usize) -> usize {
        tile * size_of::<Tile>()
    }

    /// Byte offset of the block tables.
    pub fn blocks_offset(&self) -> usize {
        self.tile_offset(self.decode + self.chunks)
    }

    /// Tiles of decode rows: the first ones.
    pub fn decode(&self) -> usize {
        self.decode
    }

    /// Tiles of chunks, and rows of the largest.
    pub fn chunks(&self) -> (usize, u32) {
        (self.chunks, self.largest)
    }

    /// How decode rows are launched, with sums of `row` bytes for each split of a row.
    pub fn launches(&self, row: usize) -> impl Iterator<Item = DecodeLaunch> + '_ {
        launches(&self.positions, row)
    }
}

/// The entry of a span's first position in the tables.
fn table(span: &Span, cut: Cut) -> i32 {
    (span.table as i64 - (span.hidden / cut.block_size) as i64) as i32
}

/// A launch of attention for some decode rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct DecodeLaunch {
    /// The first tile.
    pub first: usize,
    /// How many.
    pub count: usize,
    /// Splits of the longest.
    pub splits: u32,
}

/// As many rows together as there is room for the sums of, at least one.
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

    const CUT: Cut = Cut { group: 4, block_size: 16, decode: true };

    fn batch() -> Ragged {
        let mut batch = Ragged::default();
        batch.push(0, 40, &[BlockId(7), BlockId(8), BlockId(9)]);
        batch.push(16, 1, &[BlockId(3), BlockId(4)]);
        // What a window has passed is not in the table.
        batch.push_around(100, 1, (&[], &[BlockId(5)]), 96);
        batch
    }

    fn tiles(tiles: &Tiles) -> Vec<[u32; 4]> {
        let words = &tiles.words()[..tiles.blocks_offset() / 4];
        words.chunks_exact(TILE_WORDS).map(|tile| [tile[0], tile[1], tile[2], tile[3]]).collect()
    }

    #[test]
    fn decode_rows_come_first_and_chunks_in_tiles_that_keep_all_warps_busy() {
        let mut cut = Tiles::default();
        assert!(cut.renew(&batch(), CUT));
        let minus = (5i32 - 6).cast_unsigned();
        let want = [[40, 1, 16, 3], [41, 1, 100, minus], [0, 16, 0, 0], [16, 16, 16, 0], [32, 8, 32, 0]];
        assert_eq!(tiles(&cut), want);
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
        assert_eq!(cut.words(), []);
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
