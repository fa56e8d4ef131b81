//! When the next turn of a conversation is likely: learned, for each tenant, from the time between an answer and the next prompt that begins
//! with its prompt.
//!
//! A tenant's latest times are kept. A turn is expected after a time that one in five of them was below, if at least half of the tenant's
//! conversations went on lately: so KV that is brought up then is there for four turns of five, and seldom in vain.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use baton_kv_cache::BlockName;

/// Answers whose next turn is awaited, over all tenants, and tenants that are known (I5).
const MOST_TURNS: usize = 1 << 16;
const MOST_TENANTS: usize = 1024;
/// A conversation that does not go on for so long has ended.
const ENDS_AFTER: Duration = Duration::from_secs(3600);
/// A tenant's latest times that are kept, and how many are needed.
const KEPT: usize = 64;
const NEEDED: usize = 8;
/// One in so many turns comes sooner than expected.
const SOONER: usize = 5;
/// How fast the share of conversations that go on follows, and where it begins.
const FOLLOWS: f64 = 0.05;
const HALF: f64 = 0.5;

/// An answer whose next turn is awaited.
#[derive(Clone, Copy, Debug)]
struct Turn {
    tenant: u64,
    ended: Instant,
}

/// What is known of a tenant.
#[derive(Clone, Debug)]
struct Tenant {
    /// From answer to next prompt.
    times: VecDeque<Duration>,
    /// Share of conversations that went on lately.
    go_on: f64,
    /// When one of its answers ended last.
    last: Instant,
}

impl Tenant {
    fn went_on(&mut self, so: bool) {
        self.go_on += FOLLOWS * (f64::from(u8::from(so)) - self.go_on);
    }

    fn expects(&self) -> Option<Duration> {
        if self.times.len() < NEEDED || self.go_on < HALF {
            return None;
        }
        let mut times: Vec<Duration> = self.times.iter().copied().collect();
        let at = times.len() / SOONER;
        Some(*times.select_nth_unstable(at).1)
    }
}

/// The conversations of one router's clients.
#[derive(Clone, Debug, Default)]
pub struct Returns {
    /// By the last whole block of the prompt.
    turns: HashMap<BlockName, Turn>,
    /// The same turns, oldest first; some have gone on since.
    order: VecDeque<(Instant, BlockName)>,
    tenants: HashMap<u64, Tenant>,
}

impl Returns {
    /// An answer of this tenant has ended, whose prompt ends with this block. Returns how long after it the next turn is likely to come, if one is.
    pub fn ended(&mut self, tenant: u64, prompt: BlockName, now: Instant) -> Option<Duration> {
        self.forget(now);
        let known = self.tenants.len() < MOST_TENANTS || self.tenants.contains_key(&tenant);
        if !known {
            let longest = self.tenants.iter().min_by_key(|(_, known)| known.last).map(|(tenant, _)| *tenant);
            longest.iter().for_each(|tenant| drop(self.tenants.remove(tenant)));
        }
        let new = || Tenant { times: VecDeque::new(), go_on: HALF, last: now };
        let of = self.tenants.entry(tenant).or_insert_with(new);
        of.last = now;
        let expects = of.expects();
        self.turns.insert(prompt, Turn { tenant, ended: now });
        self.order.push_back((now, prompt));
        expects
    }

    /// A prompt with these blocks has come.
    pub fn came(&mut self, names: &[BlockName], now: Instant) {
        // The latest turn of its conversation is the longest. Its own last block may be that of a prompt that is asked again.
        let Some(turn) = names.iter().rev().find_map(|name| self.turns.remove(name)) else { return };
        let Some(tenant) = self.tenants.get_mut(&turn.tenant) else { return };
        tenant.went_on(true);
        tenant.times.push_back(now.saturating_duration_since(turn.ended));
        if tenant.times.len() > KEPT {
            tenant.times.pop_front();
        }
    }

    /// Forgets the conversations that have ended, and the oldest where there are too many.
    fn forget(&mut self, now: Instant) {
        while let Some((at, name)) = self.order.front().copied() {
            let over = now.saturating_duration_since(at) >= ENDS_AFTER;
            if !over && self.order.len() < MOST_TURNS {
                return;
            }
            self.order.pop_front();
            // It may have gone on, and the name may stand for a later turn.
            if let Some(turn) = self.turns.get(&name).copied().filter(|turn| turn.ended == at) {
                self.turns.remove(&name);
                if let Some(tenant) = self.tenants.get_mut(&turn.tenant).filter(|_| over) {
                    tenant.went_on(false);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::mix;

    use super::*;

    const TENANT: u64 = 5;

    fn names(conversation: u64, blocks: u64) -> Vec<BlockName> {
        (0..blocks).map(|at| BlockName(u128::from(mix(conversation << 32 | at)))).collect()
    }

    /// A conversation's turn that ends, and the next that comes after so many seconds.
    fn turn(returns: &mut Returns, conversation: u64, seconds: u64, at: Instant) -> Option<Duration> {
        let expected = returns.ended(TENANT, names(conversation, 5)[4], at);
        returns.came(&names(conversation, 9), at + Duration::from_secs(seconds));
        expected
    }

    #[test]
    fn a_turn_is_expected_sooner_than_most_came() {
        let (mut returns, now) = (Returns::default(), Instant::now());
        for which in 0..NEEDED as u64 {
            assert_eq!(turn(&mut returns, which, 10 + which, now), None, "{which} times are too few");
        }
        assert_eq!(turn(&mut returns, 99, 10, now), Some(Duration::from_secs(11)), "of 10 to 17 s");
        // Later times count, and those of long ago do not.
        (0..KEPT as u64).for_each(|which| _ = turn(&mut returns, which, 40, now));
        assert_eq!(turn(&mut returns, 99, 10, now), Some(Duration::from_secs(40)));
        assert_eq!(returns.ended(TENANT + 1, names(7, 5)[4], now), None, "of another tenant nothing is known");
    }

    #[test]
    fn conversations_that_do_not_go_on_are_not_awaited() {
        let (mut returns, now) = (Returns::default(), Instant::now());
        (0..40).for_each(|which| _ = turn(&mut returns, which, 10, now));
        assert!(turn(&mut returns, 99, 10, now).is_some());
        (100..160).for_each(|which| _ = returns.ended(TENANT, names(which, 5)[4], now));
        let later = now + ENDS_AFTER;
        assert_eq!(turn(&mut returns, 99, 10, later), None, "60 ended with their first turn");
        (200..240).for_each(|which| _ = turn(&mut returns, which, 10, later));
        assert!(turn(&mut returns, 99, 10, later).is_some(), "they go on again");
    }

    #[test]
    fn the_latest_turn_of_a_conversation_counts() {
        let (mut returns, now) = (Returns::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        returns.ended(TENANT, names(1, 5)[4], at(0));
        returns.ended(TENANT, names(1, 7)[6], at(100));
        returns.came(&names(1, 9), at(103));
        assert_eq!(returns.tenants[&TENANT].times, [Duration::from_secs(3)]);
        returns.came(&names(2, 9), at(104));
        assert_eq!(returns.tenants[&TENANT].times.len(), 1, "another conversation");
    }

    /// I5.
    #[test]
    fn what_is_remembered_is_bounded() {
        let (mut returns, now) = (Returns::default(), Instant::now());
        for which in 0..2 * MOST_TURNS as u64 {
            returns.ended(which, names(which, 1)[0], now + Duration::from_nanos(which));
        }
        assert!(returns.turns.len() <= MOST_TURNS && returns.order.len() <= MOST_TURNS);
        assert_eq!(returns.tenants.len(), MOST_TENANTS);
        let last = 2 * MOST_TURNS as u64 - 1;
        assert!(returns.tenants.contains_key(&last) && !returns.tenants.contains_key(&0), "the latest are known");
    }
}
