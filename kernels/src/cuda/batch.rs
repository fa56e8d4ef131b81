//! Turns a ragged batch into what the kernels take: tiles of decode rows, then tiles of chunks, block tables, and the splits of the decode
//! rows. Pure.

use super::params::Tile;
use super::splits::Splits;
use crate::backend::{Ragged, Room, Span};

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
    /// Latest positions that a row sees; 0: all.
    pub window: u32,
    /// Splits that may leave sums at once, unless a single row has more.
    pub slots: usize,
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
    splits: Splits,
}

impl Tiles {
    /// Reserves room for batches within these bounds, of up to `splits` splits.
    pub fn reserve(&mut self, room: &Room, splits: usize) {
        self.tiles.reserve(room.rows);
        self.tables.reserve(room.table_entries);
        self.spans.reserve(room.rows);
        self.splits.reserve(room.rows, splits);
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
            self.tiles.push([span.row as u32, 1, span.start as u32, table(span, cut)]);
        }
        self.splits.list(&self.tiles, cut.window, cut.slots);
        let padding = batch.padding();
        (0..if cut.decode { padding } else { 0 }).for_each(|_| self.tiles.push([0; TILE_WORDS]));
        self.decode = self.tiles.len();
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

    /// Removes all tiles and tables but keeps their memory.
    fn clear(&mut self) {
        self.tiles.clear();
        self.tables.clear();
        self.spans.clear();
        self.splits.clear();
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

    /// The splits of decode rows.
    pub fn splits(&self) -> &Splits {
        &self.splits
    }
}

/// Index in the block tables that position 0 of a span's sequence would have. Negative, as two's complement, if a window hides more
/// blocks than there are entries before the span's.
fn table(span: &Span, cut: Cut) -> u32 {
    ((span.table as i64 - (span.hidden / cut.block_size) as i64) as i32).cast_unsigned()
}

const _: () = assert!(size_of::<Tile>() == TILE_WORDS * size_of::<u32>());

#[cfg(test)]
mod tests {
    use baton_types::BlockId;

    use super::*;

    const CUT: Cut = Cut { group: 4, block_size: 16, decode: true, pairs: 64, window: 0, slots: 100 };

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
    fn a_padded_batch_has_places_without_rows_and_no_work_for_them() {
        let mut batch = Ragged::default();
        batch.push(700, 1, &[BlockId(1); 44]);
        batch.pad_to(3);
        let mut cut = Tiles::default();
        assert!(cut.renew(&batch, CUT));
        assert_eq!((cut.tiles(), cut.decode()), (&[[0, 1, 700, 0], [0; 4], [0; 4]][..], 3));
        assert_eq!((cut.splits().all(), cut.splits().slots()), (&[[0, 0, 0], [0, 1, 1], [0, 2, 2]][..], 3));
        assert!(cut.renew(&batch, Cut { decode: false, ..CUT }));
        assert_eq!((cut.decode(), cut.chunks(), cut.splits().passes()), (0, (3, 1), 0));
        batch.pad_to(4);
        assert!(cut.renew(&batch, Cut { decode: false, ..CUT }), "more rows");
    }
}
