//! Names of blocks, and a number for each: open addressing with linear probing.
//!
//! A block takes 12 bytes (a name of 8 and a value of 4), and at most three quarters of the places are taken: 16 to 32 bytes a block, since
//! the table doubles when it is full. Entries are also numbered by place, which is what the clock of [`super::KvIndex`] walks over.

/// Places at first.
const FIRST: usize = 1 << 10;

/// A map from a block's name to a value. Names must be spread evenly, as hashes are.
#[derive(Clone, Debug)]
pub(super) struct Table {
    /// The name at each place; 0: none.
    names: Vec<u64>,
    values: Vec<u32>,
    len: usize,
}

/// The name as it is stored: 0 marks a vacant place.
fn stored(name: u64) -> u64 {
    name.max(1)
}

impl Table {
    pub(super) fn new() -> Table {
        Table { names: vec![0; FIRST], values: vec![0; FIRST], len: 0 }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Number of places, a power of two.
    pub(super) fn places(&self) -> usize {
        self.names.len()
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> usize {
        self.places() * (size_of::<u64>() + size_of::<u32>())
    }

    /// The place of a name.
    pub(super) fn find(&self, name: u64) -> Option<usize> {
        let name = stored(name);
        let mut place = self.home(name);
        while self.names[place] != name {
            if self.names[place] == 0 {
                return None;
            }
            place = self.after(place);
        }
        Some(place)
    }

    /// The entry at a place.
    pub(super) fn at(&self, place: usize) -> Option<(u64, u32)> {
        let name = self.names[place];
        (name != 0).then(|| (name, self.values[place]))
    }

    /// Changes the value at a place.
    pub(super) fn set(&mut self, place: usize, value: u32) {
        self.values[place] = value;
    }

    /// Adds a name that is not in the table. Places of other entries may change.
    pub(super) fn insert(&mut self, name: u64, value: u32) {
        if (self.len + 1) * 4 > self.places() * 3 {
            self.grow();
        }
        self.put(stored(name), value);
        self.len += 1;
    }

    /// Removes the entry at a place. Entries after it move up, one of them perhaps to this very place.
    pub(super) fn remove(&mut self, place: usize) {
        let (mut hole, mut next) = (place, self.after(place));
        while self.names[next] != 0 {
            // An entry may move to the hole unless its home lies behind it.
            let mask = self.places() - 1;
            let from_home = next.wrapping_sub(self.home(self.names[next])) & mask;
            if from_home >= next.wrapping_sub(hole) & mask {
                (self.names[hole], self.values[hole]) = (self.names[next], self.values[next]);
                hole = next;
            }
            next = self.after(next);
        }
        self.names[hole] = 0;
        self.len -= 1;
    }

    fn put(&mut self, name: u64, value: u32) {
        let mut place = self.home(name);
        while self.names[place] != 0 {
            place = self.after(place);
        }
        (self.names[place], self.values[place]) = (name, value);
    }

    fn grow(&mut self) {
        let places = self.places() * 2;
        let names = std::mem::replace(&mut self.names, vec![0; places]);
        let values = std::mem::replace(&mut self.values, vec![0; places]);
        names.into_iter().zip(values).filter(|(name, _)| *name != 0).for_each(|(name, value)| self.put(name, value));
    }

    fn home(&self, name: u64) -> usize {
        name as usize & (self.places() - 1)
    }

    fn after(&self, place: usize) -> usize {
        (place + 1) & (self.places() - 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Names that share few homes, so that entries are moved all the time, also around the end.
        #[test]
        fn it_is_a_map(changes in prop::collection::vec((any::<bool>(), 0u64..60, any::<u32>()), 1..400)) {
            let name = |at: u64| (FIRST as u64 - 3 + at % 6) % FIRST as u64 + (at / 6) * FIRST as u64;
            let (mut table, mut truth) = (Table::new(), HashMap::new());
            for (add, at, value) in changes {
                let name = name(at);
                match (add, table.find(name)) {
                    (true, Some(place)) => table.set(place, value),
                    (true, None) => table.insert(name, value),
                    (false, Some(place)) => table.remove(place),
                    (false, None) => {}
                }
                if add { truth.insert(name.max(1), value); } else { truth.remove(&name.max(1)); }
                let found: HashMap<u64, u32> = (0..table.places()).filter_map(|place| table.at(place)).collect();
                prop_assert_eq!(&found, &truth);
                for (name, value) in &truth {
                    prop_assert_eq!(table.find(*name).and_then(|place| table.at(place)), Some((*name, *value)));
                }
            }
        }
    }

    #[test]
    fn it_grows_and_keeps_what_it_has() {
        let (mut table, name) = (Table::new(), |at: u64| at.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        (0..10_000).for_each(|at| table.insert(name(at), at as u32));
        assert_eq!((table.len(), table.places()), (10_000, 16_384));
        assert!((0..10_000).all(|at| table.find(name(at)).and_then(|place| table.at(place)).unwrap().1 == at as u32));
        assert_eq!(table.find(name(10_000)), None);
        assert!((12..=32).contains(&(table.bytes() / table.len())));
    }
}
