//! Where prompts have run, so that prompts with the same prefix go to the workers that have its KV.
//!
//! The router records each placement and each finished answer here, and asks before it places the next request. The records
//! say which prefix was sent where, not what workers still hold. They are a hint for [`crate::Placement`]; nothing relies on
//! them.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use baton_kv_cache::{BlockName, NameChain};

use crate::Placed;

/// Where the beginning of a prompt was sent last.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sent {
    /// Where.
    pub to: Placed,
    /// Blocks of this beginning.
    pub blocks: u32,
    /// So lately that the worker may not say yet that it holds it.
    pub lately: bool,
}

/// Where a prefix was sent, and until when that was lately.
type Names = HashMap<BlockName, (Placed, Instant), BuildHasherDefault<NameHasher>>;

/// Takes a name for its own hash, since it is one.
#[derive(Clone, Copy, Debug, Default)]
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.0 = self.0.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u128(&mut self, name: u128) {
        self.0 = name as u64 ^ (name >> 64) as u64;
    }
}

/// Names of prefixes, and where each was sent last. Bounded (I5): prefixes that were not sent again are forgotten first.
#[derive(Clone, Debug)]
pub struct Prefixes {
    /// Names sent since the last turnover. A turnover moves them to `old`.
    young: Names,
    /// Names sent between the last two turnovers.
    old: Names,
    /// Most names in `young`.
    most: usize,
}

impl Prefixes {
    /// Remembers at least the `most` latest names, and at most twice as many.
    pub fn new(most: usize) -> Prefixes {
        Prefixes { young: Names::default(), old: Names::default(), most: most.max(1) }
    }

    /// The names of all full blocks of these tokens, where `known` are the names of the first ones. `root` is what comes before: the names of
    /// different tenants have different ones ([`NameSecret::root`](baton_kv_cache::NameSecret::root)).
    pub fn names(root: NameChain, block_size: u32, known: &[BlockName], tokens: &[u32]) -> Vec<BlockName> {
        let last = known.last().map_or(root, |name| root.after(*name));
        let rest = tokens.get(known.len() * block_size as usize..).unwrap_or_default();
        known.iter().copied().chain(last.chain(rest, block_size)).collect()
    }

    /// Where the longest known prefix was sent, and its blocks. A prefix of half the tokens or less is not worth deviating from placement in
    /// turn.
    pub fn find(&self, names: &[BlockName], now: Instant) -> Option<Sent> {
        let known = |name: &BlockName| self.young.get(name).or_else(|| self.old.get(name));
        let half = names.len() / 2;
        let mut from_the_end = marks(names.len()).rev().take_while(|at| *at >= half);
        let (at, (to, until)) = from_the_end.find_map(|at| Some((at, *known(&names[at])?)))?;
        Some(Sent { to, blocks: at as u32 + 1, lately: now <= until })
    }

    /// Records that the prefixes with these names were sent to `placed`, lately until then.
    pub fn note(&mut self, names: &[BlockName], placed: Placed, until: Instant) {
        for name in marks(names.len()).map(|at| &names[at]) {
            if self.young.len() >= self.most && !self.young.contains_key(name) {
                std::mem::swap(&mut self.young, &mut self.old);
                // It keeps its memory, so that it need not grow again.
                self.young.clear();
            }
            self.young.insert(*name, (placed, until));
        }
    }
}

/// The blocks of a prompt whose names are noted and looked up: all of a short prompt, fewer of a long one.
fn marks(blocks: usize) -> impl DoubleEndedIterator<Item = usize> {
    let (all, some) = (blocks.min(64), blocks.min(512));
    (0..all).chain((64..some).step_by(8)).chain((512..blocks).step_by(64))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_types::WorkerId;

    use super::*;

    fn now() -> Instant {
        Instant::now()
    }

    fn at(worker: u64) -> Placed {
        Placed { decode: WorkerId(worker), prefill: None }
    }

    fn tokens(len: u32) -> Vec<u32> {
        (0..len).collect()
    }

    fn found(prefixes: &Prefixes, names: &[BlockName]) -> Option<Placed> {
        prefixes.find(names, now()).map(|sent| sent.to)
    }

    fn names(salt: &str, tokens: &[u32]) -> Vec<BlockName> {
        Prefixes::names(BlockName::root(salt, 16), 16, &[], tokens)
    }

    #[test]
    fn what_begins_alike_is_found_and_what_hardly_does_is_not() {
        let mut prefixes = Prefixes::new(100);
        prefixes.note(&names("", &tokens(70)), at(1), now());
        let find = |salt: &str, tokens: &[u32]| prefixes.find(&names(salt, tokens), now()).map(|sent| sent.to);
        assert_eq!(find("", &tokens(70)), Some(at(1)));
        assert_eq!(find("", &tokens(127)), Some(at(1)), "four of seven");
        assert_eq!(find("", &tokens(128)), None, "half of it");
        assert_eq!(find("", &tokens(15)), None, "too short for a name");
        assert_eq!(find("tenant", &tokens(70)), None);
        let mut fork = tokens(70);
        fork[5] = 7;
        assert_eq!(find("", &fork), None);
    }

    #[test]
    fn names_of_a_beginning_need_not_be_worked_out_again() {
        for salt in ["", "tenant"] {
            for beginning in [0, 5, 16, 40, 64] {
                let known = names(salt, &tokens(beginning));
                let root = BlockName::root(salt, 16);
                assert_eq!(Prefixes::names(root, 16, &known, &tokens(70)), names(salt, &tokens(70)));
            }
        }
    }

    #[test]
    fn of_a_long_prompt_few_names_are_noted_and_most_of_it_is_found() {
        let mut prefixes = Prefixes::new(1000);
        let long = names("", &tokens(100_000));
        prefixes.note(&long, at(1), now());
        assert!(prefixes.young.len() < 220, "{}", prefixes.young.len());
        let mut more = long[..6000].to_vec();
        more.extend(names("other", &tokens(16_000)));
        let sent = prefixes.find(&more, now()).unwrap();
        assert!((5936..=6000).contains(&sent.blocks), "{sent:?}");
    }

    #[test]
    fn the_longest_and_the_latest_count() {
        let mut prefixes = Prefixes::new(100);
        prefixes.note(&names("", &tokens(64)), at(1), now());
        prefixes.note(&names("", &tokens(48)), at(2), now());
        assert_eq!(found(&prefixes, &names("", &tokens(48))), Some(at(2)));
        assert_eq!(found(&prefixes, &names("", &tokens(64))), Some(at(1)));
    }

    #[test]
    fn what_was_sent_lately_is_so_until_its_answer_was_given() {
        let (mut prefixes, begun, names) = (Prefixes::new(100), now(), names("", &tokens(64)));
        let after = |seconds| begun + Duration::from_secs(seconds);
        let lately = |prefixes: &Prefixes, seconds| prefixes.find(&names, after(seconds)).unwrap().lately;
        prefixes.note(&names, at(1), after(10));
        assert_eq!([5, 10, 11].map(|seconds| lately(&prefixes, seconds)), [true, true, false]);
        prefixes.note(&names, at(1), after(3));
        assert_eq!([2, 5].map(|seconds| lately(&prefixes, seconds)), [true, false]);
    }

    /// I5: names that are sent again stay, others are forgotten, and the maps never hold more than twice the bound.
    #[test]
    fn it_forgets_what_is_not_sent_again() {
        let mut prefixes = Prefixes::new(10);
        let name = |name: u64| [BlockName(name.into())];
        for at_ in 0..1000 {
            prefixes.note(&name(at_), at(at_), now());
            prefixes.note(&name(5000), at(5), now());
            assert!(prefixes.young.len() <= 10 && prefixes.old.len() <= 10);
            assert_eq!(found(&prefixes, &name(5000)), Some(at(5)));
            assert_eq!(found(&prefixes, &name(at_.saturating_sub(8))), Some(at(at_.saturating_sub(8))));
        }
        assert_eq!(found(&prefixes, &name(0)), None);
    }
}
