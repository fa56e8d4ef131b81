//! A step's inputs for the kernels, packed as one run of words that goes to the device in one copy. Pure.
//!
//! They are, in this order: token ids, rows to sample, the tiles of all layer groups, the block tables of all layer groups. The tables
//! come last, so no part's offset depends on their lengths, and captured launches find the next step's inputs at the same offsets.

use super::batch::{Cut, TILE_WORDS, Tiles};
use super::params::Tile;
use crate::backend::{Ragged, Room};

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
    pub fn reserve(&mut self, room: &Room) -> usize {
        self.ids.reserve(room.rows);
        self.sampled.reserve(room.rows);
        self.groups.iter_mut().for_each(|group| group.reserve(room.rows, room.table_entries));
        let words = 2 * room.rows + self.groups.len() * (room.rows * TILE_WORDS + room.table_entries);
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
        self.groups.iter().for_each(|group| self.words.extend_from_slice(group.tables()));
        &self.words
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

    /// Byte offset of the first block table.
    pub fn tables_at(&self) -> usize {
        self.tile_at(self.groups.len(), 0)
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
        let cut = Cut { group: 1, block_size: 16, decode: true, pairs: 64, splits: Some(2) };
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
            |inputs: &Inputs| [inputs.tile_at(0, 0), inputs.tile_at(1, 0), inputs.tile_at(1, 2), inputs.tables_at()];
        assert_eq!(places(&one), [32, 96, 128, 160]);
        assert_eq!(words[..12], [7, 8, 0, 0, 0, 1, 2, 3, 0, 1, 3, 0]);
        assert_eq!(words[12..24], [1, 1, 40, 1, 0, 0, 0, 0, 0, 0, 0, 0], "two places without rows");
        // The second group's tables follow the first's.
        assert_eq!(words[24..32], [0, 1, 3, 4, 1, 1, 40, 5]);
        assert_eq!(words[40..], [100, 100, 101, 102, 100, 100, 101, 102]);
        let (longer, _) = packed(&[200, 90, 17]);
        assert_eq!(places(&longer), places(&one));
        assert_eq!((one.ids(&[7, 8, 0, 0]), one.ids(&[7, 8])), (Some(0), None));
        assert_eq!((one.sampled(&[0, 1]), one.sampled(&[1, 2])), (Some(4), None));
    }
}
