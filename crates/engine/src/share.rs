//! Tags that share the computing of prompts between tenants by their weights, under [`crate::Order::Priority`].
//!
//! A sequence gets a start tag and a finish tag when it is submitted, in virtual tokens. It starts where its tenant's last one finished, or
//! where the least served tenant that has work stands, whichever is later: idling saves nothing up. It finishes its own tokens, divided by
//! the tenant's weight, later. Sequences of equal priority are served by finish tags. So a tenant that asks little is not held up by one that
//! asks much, and a single tenant is served first come, first served. (Start-time fair queueing: Goyal, Vin, Cheng, IEEE/ACM ToN 1997.)

use std::collections::BTreeMap;

/// Units of a token at weight 1. Weights up to this lose little in the division.
const TOKEN: u64 = 1 << 10;
/// Tenants that are remembered at least. More are forgotten once they are owed nothing (I5).
const REMEMBERED: usize = 64;

/// Whose sequence it is, and how much of the computing that tenant gets beside others.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Share {
    /// The tenant; equal for all its sequences.
    pub tenant: u64,
    /// Its weight; 0 counts as 1.
    pub weight: u32,
}

impl Default for Share {
    /// The one tenant of those who know none.
    fn default() -> Share {
        Share { tenant: 0, weight: 1 }
    }
}

/// When a sequence's prompt would start and finish if every tenant had its share all the time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Tags {
    pub start: u64,
    pub finish: u64,
}

/// Where each tenant stands.
#[derive(Clone, Debug, Default)]
pub(crate) struct Shares {
    /// No tenant with work is served less than this.
    now: u64,
    /// The finish tag of each tenant's last sequence, where that is after `now`.
    last: BTreeMap<u64, u64>,
}

impl Shares {
    /// More than one tenant has come.
    pub fn are_several(&self) -> bool {
        self.last.len() > 1
    }

    /// The tags of a new sequence with this many tokens. `earliest`: the earliest start tag of the sequences whose prompts are not computed;
    /// `None` when there are none.
    pub fn tags(&mut self, share: Share, tokens: u32, earliest: Option<u64>) -> Tags {
        let stand = earliest.or_else(|| self.last.values().max().copied());
        self.now = self.now.max(stand.unwrap_or(0));
        if self.last.len() >= REMEMBERED {
            self.last.retain(|_, finish| *finish > self.now);
        }
        let start = self.last.get(&share.tenant).map_or(self.now, |finish| self.now.max(*finish));
        let cost = (u64::from(tokens) * TOKEN / u64::from(share.weight.max(1))).max(1);
        let finish = start.saturating_add(cost);
        self.last.insert(share.tenant, finish);
        Tags { start, finish }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(tenant: u64, weight: u32) -> Share {
        Share { tenant, weight }
    }

    #[test]
    fn a_single_tenant_is_served_first_come_first_served() {
        let mut shares = Shares::default();
        let mut last = 0;
        for (tokens, earliest) in [(900, None), (5, Some(0)), (1, Some(7)), (700, None), (0, None)] {
            let tags = shares.tags(Share::default(), tokens, earliest);
            assert!(tags.finish > last, "{tags:?} after {last}");
            last = tags.finish;
        }
    }

    #[test]
    fn tokens_follow_the_weights() {
        let mut shares = Shares::default();
        let mut all = Vec::new();
        for _ in 0..400 {
            all.push((shares.tags(share(1, 1), 500, Some(0)).finish, 1));
            all.push((shares.tags(share(3, 3), 100, Some(0)).finish, 3));
            all.push((shares.tags(share(3, 3), 140, Some(0)).finish, 3));
        }
        all.sort_unstable();
        let served = |tenant, tokens| all[..400].iter().filter(|(_, t)| *t == tenant).count() as f64 * tokens;
        let ratio = served(3, 120.0) / served(1, 500.0);
        assert!((2.8..3.2).contains(&ratio), "{ratio}");
    }

    #[test]
    fn who_asks_little_goes_before_what_a_flood_still_has_to_compute() {
        let mut shares = Shares::default();
        let flood: Vec<Tags> = (0..8).map(|_| shares.tags(share(1, 1), 4000, Some(0))).collect();
        let calm = shares.tags(share(2, 1), 100, Some(flood[0].start));
        assert!(calm.finish < flood[0].finish);
        // Not without end: what it asks counts.
        let later: Vec<Tags> = (0..60).map(|_| shares.tags(share(2, 1), 100, Some(flood[0].start))).collect();
        assert!(later[50].finish > flood[0].finish);
    }

    #[test]
    fn idling_saves_nothing_up_and_clears_nothing() {
        let mut shares = Shares::default();
        let busy = shares.tags(share(1, 1), 10_000, Some(0));
        let newcomer = shares.tags(share(2, 1), 10, Some(busy.start + 5000));
        assert_eq!(newcomer.start, busy.start + 5000, "not at 0");
        assert_eq!(shares.tags(share(1, 1), 10, Some(busy.start + 5000)).start, busy.finish, "it has had its share");
        // All equal once nobody has work.
        let first = shares.tags(share(3, 1), 1, None);
        assert_eq!(shares.tags(share(1, 1), 1, Some(first.start)).start, first.start);
    }

    #[test]
    fn tenants_that_are_owed_nothing_are_forgotten() {
        let mut shares = Shares::default();
        for tenant in 0..100_000 {
            let earliest = shares.now + TOKEN;
            shares.tags(share(tenant, 1), 1, Some(earliest));
        }
        assert!(shares.last.len() <= REMEMBERED);
    }
}
