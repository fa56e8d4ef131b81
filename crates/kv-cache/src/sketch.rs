//! How often blocks were asked for lately, in little memory.
//!
//! TinyLFU (Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on Storage 13(4), 2017): a
//! count-min sketch of small counters, of which only the smallest of a name's counters are raised. After a number of uses all counters are
//! halved, so that what was asked for long ago is forgotten.

use baton_types::mix;

use crate::BlockName;

/// Counters of a name, one in each row.
const ROWS: u64 = 4;
/// Most counters of a row (I5).
const MOST_COUNTERS: u64 = 1 << 26;
/// Highest count.
const MOST: u8 = 15;

/// Counts uses of names. A count is never too low, unless it was halved or is [`Sketch::MOST`]; it may be too high when names share counters.
#[derive(Clone, Debug)]
pub struct Sketch {
    /// One counter a byte, row by row.
    counters: Vec<u8>,
    /// Counters of a row, less one; a row's length is a power of two.
    mask: u64,
    /// Uses since the counters were halved.
    uses: u64,
    /// Uses after which they are halved.
    sample: u64,
}

impl Sketch {
    /// Highest count that is told apart.
    pub const MOST: u8 = MOST;

    /// A sketch whose counters are halved after `sample` uses. Two uses or fewer come to a counter of each row by then, so that names that were
    /// used once are told from those used twice. It takes two to four bytes for each use of the sample.
    pub fn new(sample: u64) -> Sketch {
        let row = (sample / 2).clamp(16, MOST_COUNTERS).next_power_of_two();
        Sketch { counters: vec![0; (ROWS * row) as usize], mask: row - 1, uses: 0, sample: sample.max(1) }
    }

    /// Counts a use.
    pub fn add(&mut self, name: BlockName) {
        let places = self.places(name);
        let least = places.map(|at| self.counters[at]).into_iter().min().unwrap_or(MOST);
        if least < MOST {
            for at in places {
                self.counters[at] += u8::from(self.counters[at] == least);
            }
        }
        self.uses += 1;
        if self.uses >= self.sample {
            self.halve();
        }
    }

    /// Halves all counts.
    pub fn halve(&mut self) {
        self.counters.iter_mut().for_each(|count| *count /= 2);
        self.uses /= 2;
    }

    /// How often a name was used.
    pub fn count(&self, name: BlockName) -> u8 {
        self.places(name).map(|at| self.counters[at]).into_iter().min().unwrap_or(0)
    }

    fn places(&self, name: BlockName) -> [usize; ROWS as usize] {
        let (low, high) = (name.0 as u64, (name.0 >> 64) as u64 | 1);
        std::array::from_fn(|row| {
            let row = row as u64;
            (row * (self.mask + 1) + (mix(low.wrapping_add(row.wrapping_mul(high))) & self.mask)) as usize
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(number: u64) -> BlockName {
        BlockName(u128::from(mix(number)) << 64 | u128::from(mix(!number)))
    }

    #[test]
    fn counts_are_never_too_low_and_seldom_too_high() {
        let mut sketch = Sketch::new(2000);
        for number in 0..1000 {
            (0..number % 4).for_each(|_| sketch.add(name(number)));
        }
        let over = |number: &u64| u64::from(sketch.count(name(*number))) > number % 4;
        assert!((0..1000).all(|number| u64::from(sketch.count(name(number))) >= number % 4));
        assert!((0..1000).filter(over).count() < 50, "of 1000 names {}", (0..1000).filter(over).count());
    }

    #[test]
    fn a_count_ends_at_the_most() {
        let mut sketch = Sketch::new(1000);
        (0..100).for_each(|_| sketch.add(name(1)));
        assert_eq!((sketch.count(name(1)), sketch.count(name(2))), (Sketch::MOST, 0));
    }

    #[test]
    fn what_was_used_long_ago_is_forgotten() {
        let mut sketch = Sketch::new(100);
        (0..10).for_each(|_| sketch.add(name(1)));
        (0..90).for_each(|number| sketch.add(name(100 + number % 3)));
        assert_eq!(sketch.count(name(1)), 5, "halved once");
        (0..200).for_each(|number| sketch.add(name(100 + number % 3)));
        assert!(sketch.count(name(1)) <= 1);
    }
}
