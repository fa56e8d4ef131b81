//! The splits of decode rows' KV: a list that thread blocks of their attention share, in passes that the scratch has room for. Pure.

use std::ops::Range;

use super::batch::TILE_WORDS;
use super::params::DecodeSplit;
use crate::backend::Room;

/// Positions of one split of a decode row's KV. Splits are counted from position 0, so they depend on the row alone (I1). The number
/// is small enough that a single long sequence fills a device, and large enough that combining the splits costs little.
pub(super) const SPLIT: u32 = 256;
/// Most bytes of partial sums that splits leave in memory at once, unless a single row needs more. For 32 heads of 128 these are the sums of a
/// million positions. Rows that need more together take several passes.
const PARTIAL: usize = 64 << 20;
/// Words of a [`DecodeSplit`].
pub(super) const SPLIT_WORDS: usize = 3;

const _: () = assert!(size_of::<DecodeSplit>() == SPLIT_WORDS * size_of::<u32>());

/// Slots that there are if a split leaves so many bytes.
pub(super) fn slots(bytes: usize) -> usize {
    (PARTIAL / bytes.max(1)).max(1)
}

/// Most splits of the decode rows of a step within these bounds. A table entry is a block; beside what its blocks fill, a row sees a part
/// of two splits at most.
pub(super) fn most_splits(room: &Room, block_size: usize) -> usize {
    let longest = room.context.div_ceil(SPLIT as usize);
    (room.rows * longest).min(2 * room.rows + room.table_entries * block_size / SPLIT as usize)
}

/// Most slots that such a step needs, if there are `slots` but for a single row that has more splits.
pub(super) fn most_slots(room: &Room, block_size: usize, slots: usize) -> usize {
    let longest = room.context.div_ceil(SPLIT as usize);
    most_splits(room, block_size).min(slots.max(longest))
}

/// What a row sees of its sequence.
#[derive(Clone, Copy)]
struct Seen {
    /// Its first position, and the one behind the last.
    from: u32,
    to: u32,
}

impl Seen {
    fn of(position: u32, window: u32) -> Self {
        let from = if window == 0 { 0 } else { (position + 1).saturating_sub(window) };
        Seen { from, to: position + 1 }
    }

    fn splits(self) -> Range<u32> {
        self.from / SPLIT..(self.to - 1) / SPLIT + 1
    }

    /// Slots that it needs: one for each split, none for a single split.
    fn slots(self) -> u32 {
        let splits = self.splits();
        if splits.len() == 1 { 0 } else { splits.end - splits.start }
    }

    /// Whether it sees all of a split.
    fn whole(self, split: u32) -> bool {
        self.from <= split * SPLIT && (split + 1) * SPLIT <= self.to
    }
}

/// All splits that decode rows see, by passes. Each pass is a launch, and its slots begin at 0.
#[derive(Default, Debug)]
pub(super) struct Splits {
    all: Vec<[u32; SPLIT_WORDS]>,
    /// Number of splits up to the end of each pass.
    passes: Vec<usize>,
    slots: usize,
}

impl Splits {
    /// Reserves room for so many rows and splits.
    pub fn reserve(&mut self, rows: usize, splits: usize) {
        self.all.reserve(splits);
        self.passes.reserve(rows);
    }

    pub fn clear(&mut self) {
        self.all.clear();
        self.passes.clear();
        self.slots = 0;
    }

    /// Lists the splits of decode rows' tiles. A pass takes as many rows as `slots` has room for, but at least one of several splits.
    pub fn list(&mut self, tiles: &[[u32; TILE_WORDS]], window: u32, slots: usize) {
        self.clear();
        let seen = |tile: &[u32; TILE_WORDS]| Seen::of(tile[2], window);
        let mut first = 0;
        while first < tiles.len() {
            let (mut end, mut needed) = (first, 0);
            while let Some(own) = tiles.get(end).map(|tile| seen(tile).slots() as usize) {
                if needed > 0 && own > 0 && needed + own > slots {
                    break;
                }
                (end, needed) = (end + 1, needed + own);
            }
            // Whole splits come before parts of one, so that thread blocks, which take theirs in this order, end at about the same time.
            for whole in [true, false] {
                let mut slot = 0;
                for tile in first..end {
                    let seen = seen(&tiles[tile]);
                    for (split, slot) in seen.splits().zip(slot..).filter(|&(split, _)| seen.whole(split) == whole) {
                        self.all.push([tile as u32, split, slot]);
                    }
                    slot += seen.slots();
                }
            }
            self.passes.push(self.all.len());
            (first, self.slots) = (end, self.slots.max(needed));
        }
    }

    /// All of them, as words of [`DecodeSplit`].
    pub fn all(&self) -> &[[u32; SPLIT_WORDS]] {
        &self.all
    }

    /// Number of passes.
    pub fn passes(&self) -> usize {
        self.passes.len()
    }

    /// The part of [`Splits::all`] that a pass does; none for a pass that there is no need of.
    pub fn pass(&self, pass: usize) -> Range<usize> {
        let end = |passes: usize| self.passes[..passes.min(self.passes.len())].last().copied().unwrap_or(0);
        end(pass)..end(pass + 1)
    }

    /// Slots that the largest pass needs.
    pub fn slots(&self) -> usize {
        self.slots
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(positions: &[u32], window: u32, slots: usize) -> Splits {
        let tiles: Vec<_> = positions.iter().zip(0..).map(|(&position, row)| [row, 1, position, 0]).collect();
        let mut splits = Splits::default();
        splits.list(&tiles, window, slots);
        splits
    }

    /// Bounds that these rows just keep to: tables have no block more than is seen.
    fn room(positions: &[u32], window: u32) -> Room {
        let blocks = |&position: &u32| position / 16 - Seen::of(position, window).from / 16 + 1;
        let table_entries = positions.iter().map(blocks).sum::<u32>() as usize;
        let context = positions.iter().max().map_or(0, |&last| last as usize + 1);
        Room { rows: positions.len(), context, table_entries, ..Room::default() }
    }

    #[test]
    fn whole_splits_come_first_and_rows_of_one_split_need_no_slot() {
        let splits = listed(&[SPLIT - 1, 2 * SPLIT + 3, 5, SPLIT], 0, 9);
        let whole = [[0, 0, 0], [1, 0, 0], [1, 1, 1], [3, 0, 3]];
        let parts = [[1, 2, 2], [2, 0, 3], [3, 1, 4]];
        assert_eq!((splits.all(), splits.pass(0)), ([&whole[..], &parts].concat().as_slice(), 0..7));
        assert_eq!((splits.passes(), splits.slots(), splits.pass(1)), (1, 5, 7..7));
        // A window that begins within a split: the first and the last are seen in part.
        let splits = listed(&[3 * SPLIT + 7], 2 * SPLIT, 9);
        assert_eq!((splits.all(), splits.slots()), (&[[0, 2, 1], [0, 1, 0], [0, 3, 2]][..], 3));
    }

    #[test]
    fn sums_of_splits_have_bounded_room() {
        let all = |positions: &[u32]| {
            let splits = listed(positions, 0, 8);
            let several = splits.all().iter().filter(|&&[tile, ..]| positions[tile as usize] >= SPLIT);
            assert_eq!(several.map(|&[_, _, slot]| slot as usize + 1).max().unwrap_or(0), splits.slots());
            assert!(splits.slots() <= most_slots(&room(positions, 0), 16, 8));
            ((0..splits.passes()).map(|pass| splits.pass(pass).end).collect::<Vec<_>>(), splits.slots())
        };
        assert_eq!(all(&[]), (vec![], 0));
        assert_eq!(all(&[0; 90]), (vec![90], 0), "one split each");
        assert_eq!(all(&[SPLIT; 5]), (vec![8, 10], 8));
        assert_eq!(all(&[0, 100 * SPLIT, 0]), (vec![103], 101), "one row always goes");
        assert_eq!((slots(PARTIAL / 8), slots(PARTIAL * 8)), (8, 1));
    }

    #[test]
    fn a_step_has_no_more_splits_than_its_bounds_say() {
        let positions: Vec<u32> = (0..6 * SPLIT).step_by(23).collect();
        for window in [0, 1, 17, SPLIT, SPLIT + 1, 3 * SPLIT] {
            for positions in [&positions[..], &positions[..1], &positions[40..41]] {
                let splits = listed(positions, window, 9);
                assert!(splits.all().len() <= most_splits(&room(positions, window), 16), "window {window}");
            }
        }
    }
}
