//! A step's inputs for the kernels, packed as one run of words that goes to the device in one copy. Pure.
//!
//! They are, in this order: token ids, rows to sample, the tiles of all layer groups, where each pass of their decode rows finds its work,
//! the block tables of all layer groups, the work of all layer groups. What grows with the sequences comes last, and what says where it
//! is comes before. So no other part's offset depends on it, and a captured launch finds the next step's inputs at the same offsets if that
//! step has as many rows and passes.

use super::batch::{Cut, TILE_WORDS, Tiles};
use super::params::{DecodeWork, Tile};
use super::splits::{SPLIT_WORDS, most_splits};
use crate::backend::{Ragged, Room};

/// Words of a [`DecodeWork`].
const WORK_WORDS: usize = size_of::<DecodeWork>() / size_of::<u32>();

/// The inputs of the latest step.
pub(super) struct Inputs {
    ids: Vec<u32>,
    sampled: Vec<u32>,
    groups: Vec<Tiles>,
    words: Vec<u32>,
}

impl Inputs {
    /// Empty inputs for `groups` layer groups.
    pub fn new(groups: usize) -> Self {
        let groups = (0..groups).map(|_| Tiles::default()).collect();
        Inputs { ids: Vec::new(), sampled: Vec::new(), groups, words: Vec::new() }
    }

    /// Reserves room for all steps within these bounds and returns the words of the largest.
    pub fn reserve(&mut self, room: &Room, block_size: usize) -> usize {
        let splits = most_splits(room, block_size);
        self.ids.reserve(room.rows);
        self.sampled.reserve(room.rows);
        self.groups.iter_mut().for_each(|group| group.reserve(room, splits));
        // There are no more passes than rows.
        let group = room.rows * (TILE_WORDS + WORK_WORDS) + room.table_entries + splits * SPLIT_WORDS;
        let words = 2 * room.rows + self.groups.len() * group;
        self.words.reserve(words);
        words
    }

    /// Sets the token ids and the rows to sample.
    pub fn set(&mut self, ids: &[u32], sampled: &[u32]) {
        self.ids.clear();
        self.ids.extend_from_slice(ids);
        self.sampled.clear();
        self.sampled.extend_from_slice(sampled);
    }

    /// Cuts a group's batch, unless the same batch was cut the same way last time. Returns whether it cut anew.
    pub fn renew(&mut self, group: usize, batch: &Ragged, cut: Cut) -> bool {
        self.groups[group].renew(batch, cut)
    }

    /// Packs all inputs and returns the words.
    pub fn pack(&mut self) -> &[u32] {
        self.words.clear();
        self.words.extend_from_slice(&self.ids);
        self.words.extend_from_slice(&self.sampled);
        let mut tables = 0;
        for group in &self.groups {
            for &[row, rows, position, table] in group.tiles() {
                // A group's tables follow those of the groups before it.
                self.words.extend([row, rows, position, table.wrapping_add(tables)]);
            }
            tables += group.tables().len() as u32;
        }
        let mut work = tables as usize;
        for group in &self.groups {
            for pass in (0..self.passes()).map(|pass| group.splits().pass(pass)) {
                self.words.extend([(work + pass.start * SPLIT_WORDS) as u32, pass.len() as u32]);
            }
            work += group.splits().all().len() * SPLIT_WORDS;
        }
        self.groups.iter().for_each(|group| self.words.extend_from_slice(group.tables()));
        self.groups.iter().for_each(|group| self.words.extend_from_slice(group.splits().all().as_flattened()));
        &self.words
    }

    /// Launches of attention of decode rows in each layer: as many as the group with most passes needs.
    pub fn passes(&self) -> usize {
        self.groups.iter().map(|group| group.splits().passes()).max().unwrap_or(0)
    }

    /// Number of packed words.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Index of the first word of the token ids, if they equal `ids`.
    pub fn ids(&self, ids: &[u32]) -> Option<usize> {
        (self.ids == ids).then_some(0)
    }

    /// Index of the first word of the rows to sample, if they begin with `rows`.
    pub fn sampled(&self, rows: &[u32]) -> Option<usize> {
        self.sampled.starts_with(rows).then_some(self.ids.len())
    }

    /// A group's tiles and tables.
    pub fn group(&self, group: usize) -> &Tiles {
        &self.groups[group]
    }

    /// Byte offset of a group's tile.
    pub fn tile_at(&self, group: usize, tile: usize) -> usize {
        self.tiles_at() * size_of::<u32>() + (self.tiles_before(group) + tile) * size_of::<Tile>()
    }

    /// Byte offset of the [`DecodeWork`] of a pass of a group.
    pub fn work_at(&self, group: usize, pass: usize) -> usize {
        self.tile_at(self.groups.len(), 0) + (group * self.passes() + pass) * size_of::<DecodeWork>()
    }

    /// Byte offset of the first block table.
    pub fn tables_at(&self) -> usize {
        self.work_at(self.groups.len(), 0)
    }

    fn tiles_at(&self) -> usize {
        self.ids.len() + self.sampled.len()
    }

    fn tiles_before(&self, group: usize) -> usize {
        self.groups[..group].iter().map(|tiles| tiles.tiles().len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use baton_types::BlockId;

    use super::*;

    fn batch(positions: &[usize]) -> Ragged {
        let mut batch = Ragged::default();
        for &start in positions {
            let table: Vec<BlockId> = (0..start as u32 / 16 + 1).map(|block| BlockId(100 + block)).collect();
            batch.push(start, 1, &table);
        }
        batch.pad_to(4);
        batch
    }

    fn packed(positions: &[usize]) -> (Inputs, Vec<u32>) {
        let cut = Cut { group: 1, block_size: 16, decode: true, pairs: 64, window: 0, slots: 9 };
        let mut inputs = Inputs::new(2);
        inputs.set(&[7, 8, 0, 0], &[0, 1, 2, 3]);
        assert!(inputs.renew(0, &batch(positions), cut));
        assert!(inputs.renew(1, &batch(positions), cut));
        let words = inputs.pack().to_vec();
        assert_eq!((words.len(), inputs.renew(1, &batch(positions), cut)), (inputs.len(), false));
        (inputs, words)
    }

    #[test]
    fn every_part_of_a_padded_step_is_where_it_was_in_the_last() {
        let (one, words) = packed(&[3, 40]);
        let places =
            |inputs: &Inputs| [inputs.tile_at(0, 0), inputs.tile_at(1, 2), inputs.work_at(1, 0), inputs.tables_at()];
        assert_eq!(places(&one), [32, 128, 168, 176]);
        assert_eq!(words[..12], [7, 8, 0, 0, 0, 1, 2, 3, 0, 1, 3, 0]);
        assert_eq!(words[12..24], [1, 1, 40, 1, 0, 0, 0, 0, 0, 0, 0, 0], "two places without rows");
        // The second group's tables follow the first's.
        assert_eq!(words[24..32], [0, 1, 3, 4, 1, 1, 40, 5]);
        // Two splits of each group, behind its tables and those of the other.
        assert_eq!(words[40..44], [8, 2, 14, 2]);
        assert_eq!(words[44..52], [100, 100, 101, 102, 100, 100, 101, 102]);
        assert_eq!(words[52..], [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0]);
        let (longer, words) = packed(&[700, 90, 17]);
        assert_eq!(places(&longer), places(&one));
        // 700 has two whole splits; its part, and the other rows', come after them.
        let first = 44 + words[40] as usize;
        assert_eq!((words[41], &words[first..first + 9]), (5, &[0, 0, 0, 0, 1, 1, 0, 2, 2][..]));
        let passes = packed(&[700, 1700, 700, 17]).0;
        assert_eq!((passes.passes(), passes.work_at(1, 1) - passes.work_at(0, 0)), (3, 32));
        assert_eq!((one.ids(&[7, 8, 0, 0]), one.ids(&[7, 8])), (Some(0), None));
        assert_eq!((one.sampled(&[0, 1]), one.sampled(&[1, 2])), (Some(4), None));
    }
}
