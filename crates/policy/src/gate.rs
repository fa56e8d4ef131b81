//! Which requests of several tenants may begin at the workers; the others wait here, so that no tenant fills the workers' queues.
//!
//! Requests begin in the order of a [`FairQueue`] while there is room: for their prompts at the workers that compute prompts, and for their
//! answers at decode workers. The last eighth of the room for answers is left to tenants that have less than half of their share, so that
//! one who comes later need not wait for somebody's answer to end.

use std::collections::BTreeMap;

use baton_membership::{Member, Role};

use crate::fair::{FairQueue, Ticket};

/// Of the room for answers, the part that is left to tenants with little of it.
const LEFT: u64 = 8;

/// What the workers can do at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GateRoom {
    /// Workers that compute prompts. Each may have one prompt, however long.
    pub prefills: u32,
    /// Tokens of prompts that are computed, or wait for it at a worker.
    pub prompt_tokens: u64,
    /// Answers that run; `u64::MAX`: unknown.
    pub answers: u64,
    /// Tokens of prompts and answers in the KV pools of decode workers; `u64::MAX`: unknown.
    pub kv_tokens: u64,
    /// Most tokens that one answer has in a pool at once, however long it is.
    pub answer_tokens: u64,
}

impl GateRoom {
    /// Nothing is known, so nothing waits; placement decides.
    pub const UNKNOWN: GateRoom = GateRoom {
        prefills: u32::MAX,
        prompt_tokens: u64::MAX,
        answers: u64::MAX,
        kv_tokens: u64::MAX,
        answer_tokens: u64::MAX,
    };

    /// The room that the workers of one model have together. `window`: prompt tokens for each worker that computes prompts.
    pub fn together<'a>(members: impl Iterator<Item = &'a Member> + Clone, window: u32) -> GateRoom {
        let of = |role| members.clone().filter(move |m| m.role == role && !m.draining);
        let count = |role| u32::try_from(of(role).count()).unwrap_or(u32::MAX);
        // Without prefill workers, decode workers compute the prompts.
        let (prefills, decodes) = (count(Role::Prefill), count(Role::Decode));
        let prefills = if prefills > 0 { prefills } else { decodes };
        if decodes == 0 {
            return GateRoom::UNKNOWN;
        }
        let sum = |what: &dyn Fn(&Member) -> u64| {
            // One worker that does not say: unknown.
            let each = of(Role::Decode).map(what);
            each.fold(0u64, |sum, room| if room == 0 { u64::MAX } else { sum.saturating_add(room) })
        };
        let (answers, kv_tokens) =
            (sum(&|m| m.max_running.into()), sum(&|m| u64::from(m.blocks) * u64::from(m.block_size)));
        let windows = of(Role::Decode).map(|m| if m.window_tokens == 0 { u64::MAX } else { m.window_tokens.into() });
        let answer_tokens = windows.max().unwrap_or(u64::MAX);
        let prompt_tokens = u64::from(prefills) * u64::from(window);
        GateRoom { prefills, prompt_tokens, answers, kv_tokens, answer_tokens }
    }
}

/// What one tenant has at the workers, or all of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Held {
    weight: u32,
    answers: u64,
    kv_tokens: u64,
    /// Requests whose prompts are not known to be computed.
    prompts: u32,
}

/// A request that waits.
#[derive(Clone, Debug)]
struct Waiting<T> {
    prompt_tokens: u32,
    /// It may be turned away for another tenant's.
    alone: bool,
    request: T,
}

/// A request that has begun. It must come back to [`Gate::ended`].
#[derive(PartialEq, Eq, Debug)]
pub struct Begun<K> {
    tenant: K,
    /// Prompt tokens that are not known to be computed.
    prompt_tokens: u32,
    kv_tokens: u64,
    /// It never has more tokens than this in a pool.
    most: u64,
}

/// The requests of all tenants. `K` names a tenant.
#[derive(Clone, Debug)]
pub struct Gate<K, T> {
    queue: FairQueue<K, Waiting<T>>,
    tenants: BTreeMap<K, Held>,
    all: Held,
    /// Tokens of prompts that are not known to be computed.
    prompt_tokens: u64,
}

impl<K: Ord + Clone, T> Default for Gate<K, T> {
    fn default() -> Self {
        let (queue, tenants, all) = (FairQueue::default(), BTreeMap::new(), Held::default());
        Gate { queue, tenants, all, prompt_tokens: 0 }
    }
}

impl<K: Ord + Clone, T> Gate<K, T> {
    /// A request comes. Of one tenant, lower priorities begin first. `alone`: it may be turned away ([`Gate::make_room`]).
    pub fn push(
        &mut self,
        tenant: K,
        weight: u32,
        priority: i32,
        prompt_tokens: u32,
        alone: bool,
        request: T,
    ) -> Ticket {
        let waiting = Waiting { prompt_tokens: prompt_tokens.max(1), alone, request };
        self.queue.push(tenant, weight, priority, waiting)
    }

    /// The next request that begins now; None: all others wait.
    pub fn begin(&mut self, room: &GateRoom) -> Option<(T, Begun<K>)> {
        let (tenant, weight, tokens) = self.next(room)?;
        let request = self.queue.pop(&tenant)?.request;
        self.queue.charge(&tenant, tokens.into());
        let kv_tokens = u64::from(tokens).min(room.answer_tokens);
        let held = self.tenants.entry(tenant.clone()).or_default();
        held.weight = weight;
        for held in [held, &mut self.all] {
            held.answers += 1;
            held.prompts += 1;
            held.kv_tokens += kv_tokens;
        }
        self.prompt_tokens += u64::from(tokens);
        Some((request, Begun { tenant, prompt_tokens: tokens, kv_tokens, most: room.answer_tokens }))
    }

    /// Whose request begins next, that tenant's weight, and the request's prompt tokens.
    fn next(&self, room: &GateRoom) -> Option<(K, u32, u32)> {
        let heads = self.queue.heads();
        let mut weights: BTreeMap<&K, u32> = self.tenants.iter().map(|(k, held)| (k, held.weight)).collect();
        weights.extend(heads.iter().map(|(tenant, weight, _)| (*tenant, *weight)));
        let all: u128 = weights.values().map(|weight| u128::from(*weight)).sum();
        for (tenant, weight, waiting) in heads {
            let tokens = waiting.prompt_tokens;
            let held = self.tenants.get(tenant).copied().unwrap_or_default();
            let has_little = has_little(&held, weight.into(), all, room);
            if self.has_room(tokens, has_little, room) {
                let fits = self.prompt_tokens.saturating_add(tokens.into()) <= room.prompt_tokens;
                // Prompts of others do not hold up a tenant that has none at the workers. So a long prompt waits for its tenant's own only.
                if fits || self.all.prompts < room.prefills.max(1) || held.prompts == 0 {
                    return Some((tenant.clone(), weight, tokens));
                }
            } else if has_little {
                // It has less than its share and does not fit: nobody takes the room that comes free before it does.
                return None;
            }
        }
        None
    }

    /// Whether an answer has room at the decode workers.
    fn has_room(&self, tokens: u32, has_little: bool, room: &GateRoom) -> bool {
        let Held { answers, kv_tokens, .. } = self.all;
        let tokens = u64::from(tokens).min(room.answer_tokens);
        let fits = |left: u64| {
            let most = |of: u64| (of - of / left).max(1);
            answers < most(room.answers) && kv_tokens.saturating_add(tokens) <= most(room.kv_tokens)
        };
        // `fits(LEFT)`: all but the last eighth. `fits(u64::MAX)`: all.
        answers == 0 || fits(LEFT) || has_little && fits(u64::MAX)
    }

    /// A request that waits is given up.
    pub fn remove(&mut self, tenant: &K, ticket: Ticket) -> Option<T> {
        self.queue.remove(tenant, ticket).map(|waiting| waiting.request)
    }

    /// Takes out `count` waiting requests of tenants that have more of them for their weight than `tenant` would have with as many more; all
    /// or none.
    pub fn make_room(&mut self, tenant: &K, weight: u32, count: u32) -> Vec<T> {
        let out = self.queue.make_room(tenant, weight, count, |waiting| waiting.alone);
        out.into_iter().map(|waiting| waiting.request).collect()
    }

    /// The prompt of a request is computed. True the first time.
    pub fn computed(&mut self, begun: &mut Begun<K>) -> bool {
        let tokens = std::mem::take(&mut begun.prompt_tokens);
        if tokens > 0 {
            self.prompt_tokens -= u64::from(tokens);
            self.all.prompts -= 1;
            if let Some(held) = self.tenants.get_mut(&begun.tenant) {
                held.prompts -= 1;
            }
        }
        tokens > 0
    }

    /// An answer has so many tokens more.
    pub fn answered(&mut self, begun: &mut Begun<K>, tokens: u32) {
        self.queue.charge(&begun.tenant, tokens.into());
        let more = u64::from(tokens).min(begun.most.saturating_sub(begun.kv_tokens));
        begun.kv_tokens += more;
        self.all.kv_tokens += more;
        if let Some(held) = self.tenants.get_mut(&begun.tenant) {
            held.kv_tokens += more;
        }
    }

    /// A request has ended, whatever its end.
    pub fn ended(&mut self, mut begun: Begun<K>) {
        self.computed(&mut begun);
        self.all.answers -= 1;
        self.all.kv_tokens -= begun.kv_tokens;
        if let Some(held) = self.tenants.get_mut(&begun.tenant) {
            held.answers -= 1;
            held.kv_tokens -= begun.kv_tokens;
            if held.answers == 0 {
                self.tenants.remove(&begun.tenant);
            }
        }
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }
}

/// Whether a tenant of this weight has less than half of its share of the room, of `all` the weights that have or want something.
fn has_little(held: &Held, weight: u128, all: u128, room: &GateRoom) -> bool {
    let little = |has: u64, of: u64| 2 * u128::from(has) * all < u128::from(of) * weight;
    little(held.answers, room.answers) && little(held.kv_tokens, room.kv_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    type Tenants = Gate<&'static str, u32>;

    const ROOM: GateRoom =
        GateRoom { prefills: 1, prompt_tokens: 1000, answers: 16, kv_tokens: 100_000, answer_tokens: u64::MAX };

    fn begin_all(gate: &mut Tenants, room: &GateRoom) -> Vec<(u32, Begun<&'static str>)> {
        std::iter::from_fn(|| gate.begin(room)).collect()
    }

    #[test]
    fn prompts_begin_while_they_fit_and_one_for_each_worker_always() {
        let mut gate = Tenants::default();
        for (request, tokens) in [(0, 5000), (1, 400), (2, 500), (3, 200), (4, 1)] {
            gate.push("a", 1, 0, tokens, true, request);
        }
        let mut begun = begin_all(&mut gate, &ROOM);
        assert_eq!(begun.len(), 1, "longer than the room, and it begins all the same");
        gate.computed(&mut begun[0].1);
        begun.extend(begin_all(&mut gate, &ROOM));
        assert_eq!(begun.len(), 3, "the fourth does not fit, and the fifth does not go around it");
        assert_eq!(gate.waiting(), 2);
        begun.into_iter().for_each(|(_, begun)| gate.ended(begun));
        begin_all(&mut gate, &ROOM).into_iter().for_each(|(_, begun)| gate.ended(begun));
        assert_eq!((gate.waiting(), gate.all, gate.prompt_tokens), (0, Held::default(), 0));
        assert!(gate.tenants.is_empty());
    }

    #[test]
    fn the_room_is_that_of_all_workers_that_stay() {
        let decode = Member { role: Role::Decode, blocks: 10, block_size: 16, ..baton_membership::testing::member(1) };
        let room = |members: &[Member]| GateRoom::together(members.iter(), 1000);
        let two = [decode.clone(), decode.clone()];
        let (answers, kv_tokens, answer_tokens) = (128, 320, u64::MAX);
        assert_eq!(room(&two), GateRoom { prefills: 2, prompt_tokens: 2000, answers, kv_tokens, answer_tokens });
        let prefill = Member { role: Role::Prefill, ..decode.clone() };
        let leaving = Member { draining: true, ..decode.clone() };
        let old = Member { max_running: 0, ..decode.clone() };
        let room = room(&[prefill.clone(), decode, leaving.clone(), old]);
        let (answers, kv_tokens, answer_tokens) = (u64::MAX, 320, u64::MAX);
        assert_eq!(room, GateRoom { prefills: 1, prompt_tokens: 1000, answers, kv_tokens, answer_tokens });
        assert_eq!(GateRoom::together([prefill, leaving].iter(), 1000), GateRoom::UNKNOWN);
    }

    #[test]
    fn a_flood_leaves_room_for_answers_of_others() {
        let mut gate = Tenants::default();
        for request in 0..40 {
            gate.push("flood", 1, 0, 10, true, request);
        }
        let flood = begin_all(&mut gate, &ROOM);
        assert_eq!(flood.len(), 14, "seven eighths of 16");
        for request in 0..4 {
            gate.push("calm", 1, 0, 10, true, 100 + request);
        }
        let calm = begin_all(&mut gate, &ROOM);
        assert_eq!(calm.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [100, 101]);
        // What comes free goes to who has less.
        flood.into_iter().take(2).for_each(|(_, begun)| gate.ended(begun));
        let next: Vec<u32> = begin_all(&mut gate, &ROOM).into_iter().map(|(request, _)| request).collect();
        assert_eq!(next, [102, 103]);
    }

    #[test]
    fn a_flood_of_long_prompts_holds_up_only_itself() {
        let mut gate = Tenants::default();
        for request in 0..4 {
            gate.push("flood", 1, 0, 900, true, request);
        }
        let mut flood = begin_all(&mut gate, &ROOM);
        assert_eq!(flood.len(), 1, "the window has room for one");
        for request in 100..102 {
            gate.push("calm", 1, 0, 600, true, request);
        }
        let calm = begin_all(&mut gate, &ROOM);
        assert_eq!(calm.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [100], "the next waits for its own");
        gate.computed(&mut flood[0].1);
        assert_eq!(begin_all(&mut gate, &ROOM).len(), 1);
    }

    #[test]
    fn who_has_little_and_needs_much_is_waited_for() {
        let room = GateRoom { prefills: 100, prompt_tokens: u64::MAX, answers: u64::MAX, kv_tokens: 1000, ..ROOM };
        let mut gate = Tenants::default();
        for request in 0..20 {
            gate.push("flood", 1, 0, 100, true, request);
        }
        let mut flood = begin_all(&mut gate, &room);
        assert_eq!(flood.len(), 8);
        gate.push("calm", 1, 0, 400, true, 100);
        gate.ended(flood.pop().unwrap().1);
        assert_eq!(gate.begin(&room), None, "nobody takes what comes free before it has enough");
        gate.ended(flood.pop().unwrap().1);
        assert_eq!(gate.begin(&room).map(|(request, _)| request), Some(100));
    }

    #[test]
    fn answers_that_keep_a_window_count_no_more_than_that() {
        let room = GateRoom { prefills: 100, prompt_tokens: u64::MAX, kv_tokens: 800, answer_tokens: 100, ..ROOM };
        let mut gate = Tenants::default();
        for request in 0..9 {
            gate.push("a", 1, 0, 5000, true, request);
        }
        let mut begun = begin_all(&mut gate, &room);
        assert_eq!(begun.len(), 7);
        gate.answered(&mut begun[0].1, 10_000);
        assert_eq!(gate.all.kv_tokens, 700);
    }

    #[test]
    fn who_alone_has_a_single_place_may_use_it() {
        let room = GateRoom { answers: 1, kv_tokens: 8, ..ROOM };
        let mut gate = Tenants::default();
        gate.push("a", 1, 0, 700, true, 1);
        gate.push("a", 1, 0, 1, true, 2);
        let mut begun = begin_all(&mut gate, &room);
        assert_eq!(begun.len(), 1, "the engine refuses what is too long, not the gate");
        gate.ended(begun.remove(0).1);
        assert_eq!(begin_all(&mut gate, &room).len(), 1);
    }

    #[test]
    fn answers_count_for_whose_turn_it_is_and_weights_share_them() {
        // One answer at a time, 40 tokens of prompt, an answer of 200 or 20 tokens.
        let room = GateRoom { answers: 2, prompt_tokens: 40, ..ROOM };
        let mut gate = Tenants::default();
        let mut served: BTreeMap<&str, u64> = BTreeMap::new();
        for request in 0..4000 {
            gate.push("one", 1, 0, 40, true, request);
            gate.push("three", 3, 0, 40, true, request);
        }
        for _ in 0..2000 {
            let Some((_, mut begun)) = gate.begin(&room) else { break };
            gate.computed(&mut begun);
            let tokens = if begun.tenant == "one" { 200 } else { 20 };
            gate.answered(&mut begun, tokens);
            *served.entry(begun.tenant).or_default() += 40 + u64::from(tokens);
            gate.ended(begun);
        }
        let ratio = served["three"] as f64 / served["one"] as f64;
        assert!((2.9..3.1).contains(&ratio), "{ratio}");
    }
}
