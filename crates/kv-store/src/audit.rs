//! Which records of a folder a store would use, told from what was found at each place. Nothing is written.

use std::collections::HashMap;

use baton_kv_cache::BlockName;

use crate::{Head, Identity, Mismatch, Place, StoreLimits};

/// What is at a record's place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Condition {
    /// Nothing was ever written there.
    Blank,
    /// A block that a store would find.
    Live,
    /// A whole block that no store would find: of an earlier life of its segment, or there is a later copy of it.
    Dead,
    /// A write that a crash cut off: one of the last of its segment's life, as many as a store has in flight.
    Torn,
    /// A record that was whole once and is not any more.
    Damaged,
    /// Of another identity, or of a version of the format that this process does not read.
    Foreign,
}

baton_types::words!(Condition {
    Blank = "blank",
    Live = "live",
    Dead = "dead",
    Torn = "torn",
    Damaged = "damaged",
    Foreign = "foreign"
});

/// The condition of each record of each segment. `found[segment][index]` is the record's head, or why there is none; the caller may put
/// [`Mismatch::Digest`] where the head is whole and the data are not.
pub fn audit(identity: Identity, found: &[Vec<Result<Head, Mismatch>>]) -> Vec<Vec<Condition>> {
    let mut all: Vec<Vec<Condition>> = (0..).zip(found).map(|(at, records)| segment(identity, at, records)).collect();
    // Of two records of a block the later one counts, as when a store opens.
    let mut latest: HashMap<BlockName, Place> = HashMap::new();
    let heads = || found.iter().flatten().flatten();
    let live = |all: &[Vec<Condition>], place: Place| {
        all[place.segment as usize].get(place.index as usize) == Some(&Condition::Live)
    };
    let known = |head: &&Head| (head.place.segment as usize) < found.len() && head.identity == identity;
    for head in heads().filter(known).filter(|head| live(&all, head.place)) {
        let place = latest.entry(head.block.key.name).or_insert(head.place);
        *place = head.place.max(*place);
    }
    for (segment, records) in all.iter_mut().enumerate() {
        for (index, condition) in records.iter_mut().enumerate().filter(|(_, is)| **is == Condition::Live) {
            let head = found[segment][index].as_ref().ok();
            if head.is_some_and(|head| latest.get(&head.block.key.name) != Some(&head.place)) {
                *condition = Condition::Dead;
            }
        }
    }
    all
}

fn segment(identity: Identity, segment: u32, records: &[Result<Head, Mismatch>]) -> Vec<Condition> {
    let here = |at: usize, head: &Head| (head.place.segment, head.place.index as usize) == (segment, at);
    let life = |at: usize| match &records[at] {
        Ok(head) if head.identity == identity && here(at, head) => Some(head.place.generation),
        _ => None,
    };
    let lives: Vec<Option<u64>> = (0..records.len()).map(life).collect();
    let latest = lives.iter().flatten().max().copied();
    let condition = |at: usize| match &records[at] {
        Ok(head) if head.identity != identity => Condition::Foreign,
        Ok(head) if here(at, head) && Some(head.place.generation) == latest => Condition::Live,
        Ok(head) if here(at, head) => Condition::Dead,
        Err(Mismatch::Blank) => Condition::Blank,
        Err(Mismatch::Identity | Mismatch::Version(_)) => Condition::Foreign,
        _ if cut_off(&lives, at, latest) => Condition::Torn,
        _ => Condition::Damaged,
    };
    (0..records.len()).map(condition).collect()
}

/// Whether the write of a record that is not whole may have been in flight when its segment's life ended. Of a life that wrote its last record
/// no write was, once the store had synced it.
fn cut_off(lives: &[Option<u64>], at: usize, latest: Option<u64>) -> bool {
    let of = lives[..at].iter().rev().find_map(|life| *life).or(latest);
    let ended = of.is_some() && lives.last().copied().flatten() == of;
    let later = lives[at + 1..].iter().filter(|life| of.is_some() && **life == of).count();
    !ended && later < StoreLimits::default().writes as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{block, shape};

    const OURS: Identity = Identity { layout: 1, numerics: 2 };

    fn head(number: u32, generation: u64, segment: u32, index: u32) -> Result<Head, Mismatch> {
        Ok(Head { identity: OURS, place: Place { generation, segment, index }, block: block(&shape(), number) })
    }

    fn run(numbers: std::ops::Range<u32>, generation: u64, segment: u32) -> Vec<Result<Head, Mismatch>> {
        numbers.zip(0..).map(|(number, index)| head(number, generation, segment, index)).collect()
    }

    #[test]
    fn only_the_latest_life_of_a_segment_and_the_latest_copy_of_a_block_are_alive() {
        let mut first = run(0..4, 1, 0);
        (first[0], first[1]) = (head(10, 5, 0, 0), Err(Mismatch::Blank));
        // Block 10 was moved later, and block 11 is there once.
        let found = vec![first, vec![head(10, 6, 1, 0), head(11, 6, 1, 1), head(12, 6, 0, 2)]];
        let [one, two] = audit(OURS, &found).try_into().unwrap();
        assert_eq!(one, [Condition::Dead, Condition::Blank, Condition::Dead, Condition::Dead]);
        assert_eq!(two, [Condition::Live, Condition::Live, Condition::Torn], "a record that belongs elsewhere");
    }

    #[test]
    fn what_a_crash_cuts_off_is_torn_and_what_changes_later_is_damaged() {
        let of = |bad: usize, blank_from: usize| {
            let mut records = run(0..20, 3, 0);
            records[bad] = Err(Mismatch::Digest { group: 0, layer: 0 });
            records[blank_from..].iter_mut().for_each(|record| *record = Err(Mismatch::Blank));
            audit(OURS, &[records])[0][bad]
        };
        assert_eq!(of(9, 10), Condition::Torn, "the last");
        assert_eq!(of(4, 12), Condition::Torn, "as many as are in flight");
        assert_eq!(of(3, 12), Condition::Damaged, "one more");
        assert_eq!(of(18, 20), Condition::Damaged, "a segment that is complete");
    }

    #[test]
    fn kv_of_others_is_foreign() {
        let other = Identity { layout: 1, numerics: 3 };
        let found = vec![vec![head(1, 1, 0, 0), Err(Mismatch::Version(9)), Err(Mismatch::Identity)]];
        assert_eq!(audit(other, &found)[0], [Condition::Foreign; 3]);
    }
}
