//! Which waiting request is next, so that tenants share what the workers do by their weights.
//!
//! Each tenant has a counter of the tokens it was served, divided by its weight; the tenant with the lowest counter is next. A tenant that
//! had nothing to do comes back with the lowest counter of those that wait, so that idling saves nothing up. (Virtual token counters: Sheng
//! et al., "Fairness in Serving Large Language Models", OSDI 2024.) Within a tenant the lowest priority value is first, then who came first.

use std::collections::BTreeMap;

/// Counter units of a token at weight 1. A multiple of many weights, so that little is lost in the division.
const TOKEN: u64 = 1 << 20;

/// Names a waiting request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(u64);

/// The waiting requests of all tenants. `K` names a tenant.
#[derive(Clone, Debug)]
pub struct FairQueue<K, T> {
    tenants: BTreeMap<K, Line<T>>,
    next: u64,
    /// The counter of the tenant that was served last: where others start while nobody waits.
    last: u64,
}

#[derive(Clone, Debug)]
struct Line<T> {
    weight: u32,
    /// Units of tokens served, divided by the weight.
    counter: u64,
    waiting: BTreeMap<(i32, Ticket), T>,
}

impl<K: Ord + Clone, T> Default for FairQueue<K, T> {
    fn default() -> Self {
        FairQueue { tenants: BTreeMap::new(), next: 0, last: 0 }
    }
}

impl<K: Ord + Clone, T> FairQueue<K, T> {
    /// Adds a request of a tenant, which has this weight from now on; 0 counts as 1.
    pub fn push(&mut self, tenant: K, weight: u32, priority: i32, request: T) -> Ticket {
        let lowest = self.tenants.values().filter(|line| !line.waiting.is_empty()).map(|line| line.counter).min();
        let floor = lowest.unwrap_or(self.last);
        let line = self.tenants.entry(tenant).or_insert_with(|| Line { weight, counter: 0, waiting: BTreeMap::new() });
        line.weight = weight.max(1);
        if line.waiting.is_empty() {
            line.counter = line.counter.max(floor);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        line.waiting.insert((priority, ticket), request);
        ticket
    }

    /// Takes the next request, and whose it is.
    pub fn pop(&mut self) -> Option<(K, T)> {
        let waiting = self.tenants.iter_mut().filter(|(_, line)| !line.waiting.is_empty());
        let (tenant, line) = waiting.min_by_key(|(_, line)| line.counter)?;
        self.last = line.counter;
        let (_, request) = line.waiting.pop_first()?;
        Some((tenant.clone(), request))
    }

    /// Takes back a request that waits no longer.
    pub fn remove(&mut self, tenant: &K, ticket: Ticket) -> Option<T> {
        let line = self.tenants.get_mut(tenant)?;
        let key = line.waiting.keys().find(|(_, waiting)| *waiting == ticket).copied()?;
        line.waiting.remove(&key)
    }

    /// Takes the request that would be served last, of the tenant that has the most waiting for its weight, if that is more than `tenant`
    /// would have with one more: room for a request of `tenant` when the queue is full.
    pub fn make_room(&mut self, tenant: &K, weight: u32) -> Option<(K, T)> {
        let own = self.tenants.get(tenant).map_or(0, |line| line.waiting.len() as u64);
        // Requests divided by weights, compared without dividing.
        let more =
            |line: &Line<T>| line.waiting.len() as u64 * u64::from(weight.max(1)) > (own + 1) * u64::from(line.weight);
        let others = self.tenants.iter_mut().filter(|(other, line)| *other != tenant && more(line));
        let share = |line: &Line<T>| line.waiting.len() as u64 * TOKEN / u64::from(line.weight);
        let (largest, line) = others.max_by_key(|(_, line)| share(line))?;
        let (_, request) = line.waiting.pop_last()?;
        Some((largest.clone(), request))
    }

    /// So many tokens were computed for a tenant, of its prompts or its answers.
    pub fn charge(&mut self, tenant: &K, tokens: u64) {
        if let Some(line) = self.tenants.get_mut(tenant) {
            line.counter += tokens.saturating_mul(TOKEN) / u64::from(line.weight);
        }
    }

    /// Number of requests that wait.
    pub fn len(&self) -> usize {
        self.tenants.values().map(|line| line.waiting.len()).sum()
    }

    /// True when nobody waits.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets tenants for which this is false and of which nothing waits.
    pub fn retain(&mut self, keep: impl Fn(&K) -> bool) {
        self.tenants.retain(|tenant, line| !line.waiting.is_empty() || keep(tenant));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = FairQueue<&'static str, u64>;

    /// Serves so many requests, each with so many tokens of its own; counts the tokens of each tenant.
    fn serve(queue: &mut Queue, count: usize) -> BTreeMap<&'static str, u64> {
        let mut served = BTreeMap::new();
        for _ in 0..count {
            let Some((tenant, tokens)) = queue.pop() else { break };
            queue.charge(&tenant, tokens);
            *served.entry(tenant).or_default() += tokens;
        }
        served
    }

    #[test]
    fn tokens_follow_the_weights_whatever_the_requests_are() {
        let mut queue = Queue::default();
        for request in 0..3000 {
            queue.push("one", 1, 0, 50 + request % 7);
            queue.push("three", 3, 0, 900 + request % 200);
        }
        let served = serve(&mut queue, 1500);
        let share = served["three"] as f64 / served["one"] as f64;
        assert!((2.9..3.1).contains(&share), "{share}");
    }

    #[test]
    fn who_floods_does_not_hold_up_others() {
        let mut queue = Queue::default();
        for _ in 0..1000 {
            queue.push("flood", 1, 0, 8000);
        }
        serve(&mut queue, 100);
        // At most one request of the flood before each of these, however much waits.
        for _ in 0..20 {
            queue.push("calm", 1, 0, 100);
            let first_two: Vec<_> = (0..2).filter_map(|_| queue.pop()).collect();
            first_two.iter().for_each(|(tenant, tokens)| queue.charge(tenant, *tokens));
            assert!(first_two.iter().any(|(tenant, _)| *tenant == "calm"), "{first_two:?}");
        }
    }

    #[test]
    fn idling_saves_nothing_up() {
        let mut queue = Queue::default();
        queue.push("late", 1, 0, 10);
        queue.push("busy", 1, 0, 10);
        serve(&mut queue, 2);
        for _ in 0..100 {
            queue.push("busy", 1, 0, 1000);
        }
        serve(&mut queue, 50);
        for _ in 0..100 {
            queue.push("late", 1, 0, 1000);
        }
        let served = serve(&mut queue, 20);
        assert_eq!((served["late"], served["busy"]), (10_000, 10_000));
        // Nor does it clear what was used: a tenant that has had more does not lose that by leaving.
        let mut queue = Queue::default();
        queue.push("a", 1, 0, 1);
        queue.push("b", 1, 0, 1);
        queue.charge(&"a", 1_000_000);
        serve(&mut queue, 2);
        queue.push("b", 1, 0, 1);
        queue.push("a", 1, 0, 1);
        assert_eq!(queue.pop().map(|(tenant, _)| tenant), Some("b"));
    }

    #[test]
    fn within_a_tenant_priority_is_first_and_then_who_came_first() {
        let mut queue = Queue::default();
        for (priority, request) in [(0, 1), (5, 2), (-1, 3), (0, 4)] {
            queue.push("a", 1, priority, request);
        }
        let order: Vec<u64> = std::iter::from_fn(|| queue.pop()).map(|(_, request)| request).collect();
        assert_eq!(order, [3, 1, 4, 2]);
    }

    #[test]
    fn a_full_queue_makes_room_at_the_cost_of_who_has_most() {
        let mut queue = Queue::default();
        let tickets: Vec<Ticket> = (0..10).map(|request| queue.push("flood", 1, 0, request)).collect();
        queue.push("some", 1, 0, 100);
        assert_eq!(queue.make_room(&"calm", 1), Some(("flood", 9)), "the last one");
        assert_eq!(queue.remove(&"flood", tickets[8]), Some(8));
        assert_eq!(queue.remove(&"flood", tickets[8]), None);
        assert_eq!(queue.make_room(&"flood", 1), None, "nobody has more");
        assert_eq!(queue.make_room(&"flood", 100), Some(("some", 100)), "for its weight, others have");
        assert_eq!(queue.len(), 8);
        for request in 0..3 {
            queue.push("heavy", 4, 0, request);
        }
        assert_eq!(queue.make_room(&"new", 1).map(|(tenant, _)| tenant), Some("flood"), "three of weight 4 are fewer");
        queue.retain(|_| false);
        assert_eq!(queue.len(), 10, "what waits is kept");
    }
}
