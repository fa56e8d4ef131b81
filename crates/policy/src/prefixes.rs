//! Where prompts have run, so that those that begin like them go to the workers that have their KV.
//!
//! Filled by the router as it places requests and as their answers end; asked before the next is placed. It knows what was
//! sent where, not what workers still hold: a hint for [`crate::Placement`], on which nothing relies.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

use baton_kv_cache::chain_hashes;

use crate::Placed;

/// Tokens by which prefixes are named; need not be what workers have in a block.
const NAMED: u32 = 16;

/// Names of prefixes, and where each was sent last. Bounded (I5): those that were not sent again are forgotten first.
#[derive(Clone, Debug)]
pub struct Prefixes {
    /// Sent since the last turnover, and between that and the one before.
    young: HashMap<u64, Placed>,
    old: HashMap<u64, Placed>,
    most: usize,
}

impl Prefixes {
    /// Knows at least the `most` last names, and at most twice as many.
    pub fn new(most: usize) -> Prefixes {
        Prefixes { young: HashMap::new(), old: HashMap::new(), most: most.max(1) }
    }

    /// The names of what these tokens begin with, the shortest first; no two tenants (`salt`) have one in common.
    pub fn names(salt: &str, tokens: &[u32]) -> Vec<u64> {
        let mut seed = DefaultHasher::new();
        seed.write(salt.as_bytes());
        chain_hashes(seed.finish(), tokens, NAMED).collect()
    }

    /// Where the longest known beginning was sent. What is half of it or less is not worth leaving the turn for.
    pub fn find(&self, names: &[u64]) -> Option<Placed> {
        let known = |name: &u64| self.young.get(name).or_else(|| self.old.get(name));
        names[names.len() / 2..].iter().rev().find_map(known).copied()
    }

    /// What has these names was sent there.
    pub fn note(&mut self, names: &[u64], placed: Placed) {
        for name in names {
            if self.young.len() >= self.most && !self.young.contains_key(name) {
                self.old = std::mem::take(&mut self.young);
            }
            self.young.insert(*name, placed);
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::WorkerId;

    use super::*;

    fn at(worker: u64) -> Placed {
        Placed { decode: WorkerId(worker), prefill: None }
    }

    fn tokens(len: u32) -> Vec<u32> {
        (0..len).collect()
    }

    #[test]
    fn what_begins_alike_is_found_and_what_hardly_does_is_not() {
        let mut prefixes = Prefixes::new(100);
        prefixes.note(&Prefixes::names("", &tokens(70)), at(1));
        let find = |salt: &str, tokens: &[u32]| prefixes.find(&Prefixes::names(salt, tokens));
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
    fn the_longest_and_the_latest_count() {
        let mut prefixes = Prefixes::new(100);
        prefixes.note(&Prefixes::names("", &tokens(64)), at(1));
        prefixes.note(&Prefixes::names("", &tokens(48)), at(2));
        assert_eq!(prefixes.find(&Prefixes::names("", &tokens(48))), Some(at(2)));
        assert_eq!(prefixes.find(&Prefixes::names("", &tokens(64))), Some(at(1)));
    }

    /// I5: what is sent again stays, the rest goes, and there is never more than twice the bound.
    #[test]
    fn it_forgets_what_is_not_sent_again() {
        let mut prefixes = Prefixes::new(10);
        for name in 0..1000 {
            prefixes.note(&[name], at(name));
            prefixes.note(&[5000], at(5));
            assert!(prefixes.young.len() <= 10 && prefixes.old.len() <= 10);
            assert_eq!(prefixes.find(&[5000]), Some(at(5)));
            assert_eq!(prefixes.find(&[name.saturating_sub(8)]), Some(at(name.saturating_sub(8))));
        }
        assert_eq!(prefixes.find(&[0]), None);
    }
}
