//! Which waiting request is next, so that tenants share what the workers do by their weights.
//!
//! Each tenant has a counter of the tokens it was served, divided by its weight; the tenant with the lowest counter is next. A tenant that
//! had nothing to do comes back with the lowest counter of those that wait, so that idling saves nothing up. (Virtual token counters: Sheng
//! et al., "Fairness in Serving Large Language Models", OSDI 2024.) Within a tenant the lowest priority value is first, then who came first.

use std::collections::BTreeMap;

/// Counter units of a token at weight 1. A multiple of many weights, so that little is lost in the division.
const TOKEN: u64 = 1 << 20;

/// Tenants that are remembered at least. More are forgotten while nothing of them waits and they are owed nothing (I5).
const REMEMBERED: usize = 1024;

/// Names a waiting request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ticket(u64);

/// A request's place in its tenant's line.
type Place = (i32, Ticket);

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
    waiting: BTreeMap<Place, T>,
}

/// A tenant's next request.
#[derive(Clone, Copy, Debug)]
pub struct Head<'a, K, T> {
    pub tenant: &'a K,
    pub weight: u32,
    pub request: &'a T,
    /// Tokens that it was served more, divided by the weight, than the tenant that waits and was served least.
    pub ahead: u64,
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
        if self.tenants.len() >= 2 * REMEMBERED {
            self.forget();
        }
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

    /// Drops idle tenants, those with the lowest counters first: they lose least by it.
    fn forget(&mut self) {
        let idle = self.tenants.iter().filter(|(_, line)| line.waiting.is_empty());
        let mut idle: Vec<(u64, K)> = idle.map(|(tenant, line)| (line.counter, tenant.clone())).collect();
        idle.sort_unstable();
        let surplus = self.tenants.len().saturating_sub(REMEMBERED);
        for (_, tenant) in idle.into_iter().take(surplus) {
            self.tenants.remove(&tenant);
        }
    }

    /// The next request of each tenant that has one, in the order in which they are to be served.
    pub fn heads(&self) -> Vec<Head<'_, K, T>> {
        let heads =
            self.tenants.iter().filter_map(|(tenant, line)| Some((tenant, line, line.waiting.values().next()?)));
        let mut heads: Vec<_> = heads.collect();
        heads.sort_by_key(|(_, line, _)| line.counter);
        let least = heads.first().map_or(0, |(_, line, _)| line.counter);
        let head = |(tenant, line, request): (_, &Line<T>, _)| {
            let Line { weight, counter, .. } = *line;
            Head { tenant, weight, request, ahead: (counter - least) / TOKEN }
        };
        heads.into_iter().map(head).collect()
    }

    /// Takes the next request of a tenant.
    pub fn pop(&mut self, tenant: &K) -> Option<T> {
        let line = self.tenants.get_mut(tenant)?;
        let (_, request) = line.waiting.pop_first()?;
        self.last = line.counter;
        Some(request)
    }

    /// Takes back a request that waits no longer.
    pub fn remove(&mut self, tenant: &K, ticket: Ticket) -> Option<T> {
        let line = self.tenants.get_mut(tenant)?;
        let key = line.waiting.keys().find(|(_, waiting)| *waiting == ticket).copied()?;
        line.waiting.remove(&key)
    }

    /// Takes out `count` requests for which `may` is true, so that a full queue has room for as many of tenant `by` with this weight: each is the
    /// last one of the tenant that has the most waiting for its weight, and more than `by` would have by then. Without `by`, whoever has most
    /// gives one up. Takes all of them, or none.
    pub fn make_room(&mut self, by: Option<(&K, u32)>, count: u32, may: impl Fn(&T) -> bool) -> Vec<T> {
        let weight = by.map_or(1, |(_, weight)| u64::from(weight.max(1)));
        let tenant = by.map(|(tenant, _)| tenant);
        let own = tenant.and_then(|tenant| self.tenants.get(tenant)).map_or(0, |line| line.waiting.len() as u64);
        let others = self.tenants.iter().filter(|(other, line)| Some(*other) != tenant && !line.waiting.is_empty());
        let may = |line: &Line<T>| line.waiting.iter().filter(|(_, t)| may(t)).map(|(key, _)| *key).collect::<Vec<_>>();
        // For each other tenant: its weight, how much of it would still wait, and what may be taken out, the last one at the end.
        let others = others.map(|(k, line)| (k.clone(), u64::from(line.weight), line.waiting.len() as u64, may(line)));
        let mut others: Vec<(K, u64, u64, Vec<Place>)> = others.collect();
        let mut out = Vec::new();
        for more in 1..=u64::from(count) {
            // Requests divided by weights, compared without dividing.
            let has_more = others
                .iter_mut()
                .filter(|(_, w, len, keys)| !keys.is_empty() && (by.is_none() || *len * weight > (own + more) * *w));
            let Some((k, _, len, keys)) = has_more.max_by_key(|(_, w, len, _)| *len * TOKEN / *w) else {
                return Vec::new();
            };
            *len -= 1;
            out.extend(keys.pop().map(|key| (k.clone(), key)));
        }
        out.into_iter().filter_map(|(k, key)| self.tenants.get_mut(&k)?.waiting.remove(&key)).collect()
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
}

#[cfg(test)]
mod tests {
    use super::*;

    type Queue = FairQueue<&'static str, u64>;

    fn pop(queue: &mut Queue) -> Option<(&'static str, u64)> {
        let tenant = *queue.heads().first()?.tenant;
        Some((tenant, queue.pop(&tenant)?))
    }

    /// Serves so many requests, each with so many tokens of its own; counts the tokens of each tenant.
    fn serve(queue: &mut Queue, count: usize) -> BTreeMap<&'static str, u64> {
        let mut served = BTreeMap::new();
        for _ in 0..count {
            let Some((tenant, tokens)) = pop(queue) else { break };
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
            let first_two: Vec<_> = (0..2).filter_map(|_| pop(&mut queue)).collect();
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
        assert_eq!(pop(&mut queue).map(|(tenant, _)| tenant), Some("b"));
    }

    #[test]
    fn within_a_tenant_priority_is_first_and_then_who_came_first() {
        let mut queue = Queue::default();
        for (priority, request) in [(0, 1), (5, 2), (-1, 3), (0, 4)] {
            queue.push("a", 1, priority, request);
        }
        let order: Vec<u64> = std::iter::from_fn(|| pop(&mut queue)).map(|(_, request)| request).collect();
        assert_eq!(order, [3, 1, 4, 2]);
    }

    #[test]
    fn a_full_queue_makes_room_at_the_cost_of_who_has_most() {
        let mut queue = Queue::default();
        let tickets: Vec<Ticket> = (0..10).map(|request| queue.push("flood", 1, 0, request)).collect();
        queue.push("some", 1, 0, 100);
        let room = |queue: &mut Queue, tenant, weight, count| queue.make_room(Some((&tenant, weight)), count, |_| true);
        assert_eq!(room(&mut queue, "calm", 1, 1), [9], "the last one");
        assert_eq!(queue.remove(&"flood", tickets[8]), Some(8));
        assert_eq!(queue.remove(&"flood", tickets[8]), None);
        assert_eq!(room(&mut queue, "flood", 1, 1), [], "nobody has more");
        assert_eq!(room(&mut queue, "flood", 100, 1), [100], "for its weight, others have");
        assert_eq!(queue.len(), 8);
        assert_eq!(room(&mut queue, "calm", 1, 5), [], "then it would have more than what is left");
        assert_eq!(queue.len(), 8, "all or none");
        assert_eq!(room(&mut queue, "calm", 1, 4), [7, 6, 5, 4]);
        assert_eq!(queue.make_room(Some((&"calm", 1)), 1, |request| *request == 1), [1], "only what may be taken out");
        assert_eq!(queue.make_room(None, 1, |request| *request < 3), [2], "whoever comes");
        for request in 0..3 {
            queue.push("heavy", 4, 0, request);
        }
        assert_eq!(room(&mut queue, "new", 1, 1), [3], "three of weight 4 are fewer");
    }

    #[test]
    fn tenants_that_are_owed_nothing_are_forgotten() {
        let mut queue: FairQueue<u64, u64> = FairQueue::default();
        queue.push(0, 1, 0, 7);
        for tenant in 1..20_000 {
            queue.push(tenant, 1, 0, 1);
            queue.pop(&tenant);
            queue.charge(&tenant, 100);
        }
        assert!(queue.tenants.len() <= 2 * REMEMBERED, "{}", queue.tenants.len());
        assert_eq!(queue.pop(&0), Some(7), "what waits is kept");
    }
}
