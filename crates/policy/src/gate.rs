//! Which requests of several tenants may begin at the workers; the others wait here, so that no tenant fills the workers' queues.
//!
//! Requests begin in the order of a [`FairQueue`] while there is room: for their prompts at the workers that compute prompts, and for their
//! answers at decode workers. The last eighth of the room for answers is left to tenants that have less than half of their share, so that
//! one who comes later need not wait for somebody's answer to end.
//!
//! Who has no room is passed by others only while these were not served much more. Otherwise small requests would find room all the time. This
//! does not hold for batch requests, whose room depends on interactive ones.
//!
//! Batch requests begin only while no interactive request waits, and in what those at the workers leave, but for that last eighth. Batch requests
//! that have begun are in no interactive request's way: the workers have them give way. So the rules above hold among interactive requests as if
//! there were no others, and among batch requests.

use std::collections::BTreeMap;

use baton_membership::{Member, Role};
use baton_types::Class;

use crate::fair::{FairQueue, Head, Ticket};

/// Of the room for answers, the part that is left to tenants with little of it.
const LEFT: u64 = 8;

/// So many tokens, divided by its weight, a tenant may be served more than another and still pass it, because the other's request has no
/// room yet: a few short requests that come together. Where the request of the tenant that was served least is longer, as many tokens as that has:
/// a prompt counts as a whole when it begins.
const AHEAD: u64 = 1024;

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
    /// Tokens of these prompts.
    prompt_tokens: u64,
}

impl Held {
    /// Both together.
    fn plus(self, other: Held) -> Held {
        Held {
            weight: self.weight,
            answers: self.answers + other.answers,
            kv_tokens: self.kv_tokens + other.kv_tokens,
            prompts: self.prompts + other.prompts,
            prompt_tokens: self.prompt_tokens + other.prompt_tokens,
        }
    }
}

/// A request that comes to a gate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Asks {
    /// Whether somebody waits for the answer.
    pub class: Class,
    /// Its tenant's weight beside others.
    pub weight: u32,
    /// Of one tenant and class, lower priorities begin first.
    pub priority: i32,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// It may be turned away for another one ([`Gate::make_room`]).
    pub alone: bool,
}

/// A request that waits.
#[derive(Clone, Debug)]
struct Waiting<T> {
    prompt_tokens: u32,
    alone: bool,
    request: T,
}

/// A request that has begun. It must come back to [`Gate::ended`].
#[derive(PartialEq, Eq, Debug)]
pub struct Begun<K> {
    class: Class,
    tenant: K,
    /// Prompt tokens that are not known to be computed.
    prompt_tokens: u32,
    kv_tokens: u64,
    /// It never has more tokens than this in a pool.
    most: u64,
    before: Option<u64>,
}

impl<K> Begun<K> {
    /// About so many tokens of prompts of this class the workers compute before this request's, however many are there: those that its tenant has,
    /// and others' in the same time, as all share by their weights. `None`: all that are there; nobody else has or wants any.
    ///
    /// Not in it is what workers begin with in any case: a priority below 0, and prompts that were overtaken often. Nor prompts that are computed
    /// again.
    pub fn before(&self) -> Option<u64> {
        self.before
    }
}

/// The requests of all tenants. `K` names a tenant.
#[derive(Clone, Debug)]
pub struct Gate<K, T> {
    interactive: Side<K, T>,
    batch: Side<K, T>,
}

/// The requests of one class.
#[derive(Clone, Debug)]
struct Side<K, T> {
    queue: FairQueue<K, Waiting<T>>,
    tenants: BTreeMap<K, Held>,
    all: Held,
}

impl<K: Ord + Clone, T> Default for Side<K, T> {
    fn default() -> Self {
        Side { queue: FairQueue::default(), tenants: BTreeMap::new(), all: Held::default() }
    }
}

impl<K: Ord + Clone, T> Default for Gate<K, T> {
    fn default() -> Self {
        Gate { interactive: Side::default(), batch: Side::default() }
    }
}

impl<K: Ord + Clone, T> Gate<K, T> {
    fn side(&mut self, class: Class) -> &mut Side<K, T> {
        match class {
            Class::Interactive => &mut self.interactive,
            Class::Batch => &mut self.batch,
        }
    }

    /// A request of a tenant comes.
    pub fn push(&mut self, tenant: K, asks: Asks, request: T) -> Ticket {
        let Asks { class, weight, priority, prompt_tokens, alone } = asks;
        let waiting = Waiting { prompt_tokens: prompt_tokens.max(1), alone, request };
        self.side(class).queue.push(tenant, weight, priority, waiting)
    }

    /// The next request that begins now; None: all others wait.
    pub fn begin(&mut self, room: &GateRoom) -> Option<(T, Begun<K>)> {
        if self.interactive.queue.len() > 0 {
            return self.interactive.begin(Class::Interactive, Held::default(), room);
        }
        self.batch.begin(Class::Batch, self.interactive.all, room)
    }

    /// A request that waits is given up.
    pub fn remove(&mut self, class: Class, tenant: &K, ticket: Ticket) -> Option<T> {
        self.side(class).queue.remove(tenant, ticket).map(|waiting| waiting.request)
    }

    /// Takes out `count` waiting requests, all or none, so that a tenant may have as many more of this class: for interactive requests batch ones of
    /// any tenant, else requests of the same class, of tenants that have more of them for their weight than this one would have then.
    pub fn make_room(&mut self, class: Class, tenant: &K, weight: u32, count: u32) -> Vec<T> {
        let may = |waiting: &Waiting<T>| waiting.alone;
        let mut out = Vec::new();
        if class == Class::Interactive {
            out = self.batch.queue.make_room(None, count, may);
        }
        if out.is_empty() {
            out = self.side(class).queue.make_room(Some((tenant, weight)), count, may);
        }
        out.into_iter().map(|waiting| waiting.request).collect()
    }

    /// The prompt of a request is computed. True the first time.
    pub fn computed(&mut self, begun: &mut Begun<K>) -> bool {
        let tokens = std::mem::take(&mut begun.prompt_tokens);
        if tokens > 0 {
            self.side(begun.class).change(&begun.tenant, |held| {
                held.prompt_tokens -= u64::from(tokens);
                held.prompts -= 1;
            });
        }
        tokens > 0
    }

    /// An answer has so many tokens more.
    pub fn answered(&mut self, begun: &mut Begun<K>, tokens: u32) {
        let more = u64::from(tokens).min(begun.most.saturating_sub(begun.kv_tokens));
        begun.kv_tokens += more;
        let side = self.side(begun.class);
        side.queue.charge(&begun.tenant, tokens.into());
        side.change(&begun.tenant, |held| held.kv_tokens += more);
    }

    /// A request has ended, whatever its end.
    pub fn ended(&mut self, mut begun: Begun<K>) {
        self.computed(&mut begun);
        let side = self.side(begun.class);
        side.change(&begun.tenant, |held| {
            held.answers -= 1;
            held.kv_tokens -= begun.kv_tokens;
        });
        if side.tenants.get(&begun.tenant).is_some_and(|held| held.answers == 0) {
            side.tenants.remove(&begun.tenant);
        }
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.interactive.queue.len() + self.batch.queue.len()
    }

    /// Whether a request of this class may find one that can be turned away for it.
    pub fn may_make_room(&self, class: Class) -> bool {
        self.batch.queue.len() > 0 || class == Class::Interactive && self.interactive.queue.len() > 0
    }
}

impl<K: Ord + Clone, T> Side<K, T> {
    /// The next request that begins now, beside what requests of the other class have at the workers.
    fn begin(&mut self, class: Class, beside: Held, room: &GateRoom) -> Option<(T, Begun<K>)> {
        let (tenant, weight, tokens) = self.next(class, beside, room)?;
        let request = self.queue.pop(&tenant)?.request;
        self.queue.charge(&tenant, tokens.into());
        let most = room.answer_tokens;
        let kv_tokens = u64::from(tokens).min(most);
        self.tenants.entry(tenant.clone()).or_default().weight = weight;
        self.change(&tenant, |held| {
            held.answers += 1;
            held.prompts += 1;
            held.prompt_tokens += u64::from(tokens);
            held.kv_tokens += kv_tokens;
        });
        let own = self.tenants.get(&tenant).map_or(0, |held| held.prompt_tokens);
        let (weight, weights) = (u128::from(weight.max(1)), self.weights());
        let shared = u64::try_from(u128::from(own) * weights / weight).unwrap_or(u64::MAX);
        let before = (weights > weight).then(|| shared.saturating_sub(tokens.into()));
        Some((request, Begun { class, tenant, prompt_tokens: tokens, kv_tokens, most, before }))
    }

    /// The weights of all that have something at the workers, or wait, together.
    fn weights(&self) -> u128 {
        let mut weights: BTreeMap<&K, u32> = self.tenants.iter().map(|(k, held)| (k, held.weight)).collect();
        weights.extend(self.queue.heads().iter().map(|head| (head.tenant, head.weight)));
        weights.values().map(|weight| u128::from(*weight)).sum()
    }

    /// Whose request begins next, that tenant's weight, and the request's prompt tokens.
    fn next(&self, class: Class, beside: Held, room: &GateRoom) -> Option<(K, u32, u32)> {
        let heads = self.queue.heads();
        let weights = self.weights();
        let all = self.all.plus(beside);
        // By so much the first one's standing changes when it begins.
        let first =
            heads.first().map_or(0, |head| u64::from(head.request.prompt_tokens) / u64::from(head.weight.max(1)));
        for Head { tenant, weight, request, ahead } in heads {
            // All that follow are further ahead. Otherwise who has short or small requests would always find room, and others never.
            if !class.is_batch() && ahead > AHEAD.max(first) {
                return None;
            }
            let tokens = request.prompt_tokens;
            let held = self.tenants.get(tenant).copied().unwrap_or_default();
            // The last eighth is for interactive requests.
            let has_little = !class.is_batch() && has_little(&held, weight.into(), weights, room);
            if has_room(&all, tokens, has_little, room) {
                let fits = all.prompt_tokens.saturating_add(tokens.into()) <= room.prompt_tokens;
                // Prompts of others do not hold up a tenant that has none at the workers. So a long prompt waits for its tenant's own only.
                let has_none = !class.is_batch() && held.prompts == 0;
                if fits || all.prompts < room.prefills.max(1) || has_none {
                    return Some((tenant.clone(), weight, tokens));
                }
            } else if has_little {
                // It has less than its share and does not fit: nobody takes the room that comes free before it does.
                return None;
            }
        }
        None
    }

    /// Changes what a tenant has at the workers, and what all have.
    fn change(&mut self, tenant: &K, change: impl Fn(&mut Held)) {
        change(&mut self.all);
        if let Some(held) = self.tenants.get_mut(tenant) {
            change(held);
        }
    }
}

/// Whether an answer has room at the decode workers, where all have so much there.
fn has_room(all: &Held, tokens: u32, has_little: bool, room: &GateRoom) -> bool {
    let Held { answers, kv_tokens, .. } = *all;
    let tokens = u64::from(tokens).min(room.answer_tokens);
    let fits = |left: u64| {
        let most = |of: u64| (of - of / left).max(1);
        answers < most(room.answers) && kv_tokens.saturating_add(tokens) <= most(room.kv_tokens)
    };
    // `fits(LEFT)`: all but the last eighth. `fits(u64::MAX)`: all.
    answers == 0 || fits(LEFT) || has_little && fits(u64::MAX)
}

/// Whether a tenant of this weight has less than half of its share of the room, of `all` the weights that have or want something.
fn has_little(held: &Held, weight: u128, all: u128, room: &GateRoom) -> bool {
    let little = |has: u64, of: u64| 2 * u128::from(has) * all < u128::from(of) * weight;
    little(held.answers, room.answers) && little(held.kv_tokens, room.kv_tokens)
}

#[cfg(test)]
mod tests;
