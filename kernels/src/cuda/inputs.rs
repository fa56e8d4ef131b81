//! What a step's kernels look up: token ids, rows to sample, and each layer group's tiles and block tables, as one run of words that
//! goes to the device in one copy. Pure.
//!
//! In this order: ids, rows, the tiles of all groups, the tables of all groups. So a part begins where it does whatever the tables' lengths
//! are, and launches that were captured find the next step's in its place.

use super::batch::{Cut, TILE_WORDS, Tiles};
use super::params::Tile;
use crate::backend::{Ragged, Room};

/// Inputs as they were packed last.
pub(super) struct Inputs {
    ids: Vec<u32>,
    sampled: Vec<u32>,
    groups: Vec<Tiles>,
    words: Vec<u32>,
}

impl Inputs {
    /// For so many layer groups.
    pub fn new(groups: usize) -> Self {
        let groups = (0..groups).map(|_| Tiles::default()).collect();
        Inputs { ids: Vec::new(), sampled: Vec::new(), groups, words: Vec::new() }
    }

    /// Makes room for all steps within these bounds; words of the largest.
    pub fn reserve(&mut self, room: &Room) -> usize {
        self.ids.reserve(room.rows);
        self.sampled.reserve(room.rows);
        self.groups.iter_mut().for_each(|group| group.reserve(room.rows, room.table_entries));
        let words = 2 * room.rows + self.groups.len() * (room.rows * TILE_WORDS + room.table_entries);
        self.words.reserve(words);
        words
    }

    /// Takes ids and rows.
    pub fn set(&mut self, ids: &[u32], sampled: &[u32]) {
        self.ids.clear();
        self.ids.extend_from_slice(ids);
        self.sampled.clear();
        self.sampled.extend_from_slice(sampled);
    }

    /// Cuts a group's batch, unless it is the one that was cut last; whether it is another.
    pub fn renew(&mut self, group: usize, batch: &Ragged, cut: Cut) -> bool {
        self.groups[group].renew(batch, cut)
    }

    /// All words.
    pub fn pack(&mut self) -> &[u32] {
        self.words.clear();
        self.words.extend_from_slice(&self.ids);
        self.words.extend_from_slice(&self.sampled);
        let mut tables = 0;
        for group in &self.groups {
            for &[row, rows, position, table] in group.tiles() {
                // Tables of a group lie behind those of the groups before it.
                self.words.extend([row, rows, position, table.wrapping_add(tables)]);
            }
            tables += group.tables().len() as u32;
        }
        self.groups.iter().for_each(|group| self.words.extend_from_slice(group.tables()));
        &self.words
    }

    /// Words that were packed.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// The word at which ids begin, if they are these.
    pub fn ids(&self, ids: &[u32]) -> Option<usize> {
        (self.ids == ids).then_some(0)
    }

    /// The word at which rows to sample begin, if they begin with these.
    pub fn sampled(&self, rows: &[u32]) -> Option<usize> {
        self.sampled.starts_with(rows).then_some(self.ids.len())
    }

    /// A group's tiles.
    pub fn group(&self, group: usize) -> &Tiles {
        &self.groups[group]
    }

    /// Byte at which a tile of a group lies.
    pub fn tile_at(&self, group: usize, tile: usize) -> usize {
        self.tiles_at() * size_of::<u32>() + (self.tiles_before(group) + tile) * size_of::<Tile>()
    }

    /// Byte at which the tables begin.
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
        // The second group's tables lie behind the first's.
        assert_eq!(words[24..32], [0, 1, 3, 4, 1, 1, 40, 5]);
        assert_eq!(words[40..], [100, 100, 101, 102, 100, 100, 101, 102]);
        let (longer, _) = packed(&[200, 90, 17]);
        assert_eq!(places(&longer), places(&one));
        assert_eq!((one.ids(&[7, 8, 0, 0]), one.ids(&[7, 8])), (Some(0), None));
        assert_eq!((one.sampled(&[0, 1]), one.sampled(&[1, 2])), (Some(4), None));
    }
}
