//! Placement by predicted time: where a request waits least, and makes others wait least.
//!
//! For each pair of a prefill and a decode worker, and for each decode worker alone, the sum of
//!
//! - the time to the first token: until the decode worker has blocks, what is queued before the prompt, and its tokens that are not cached
//!   there (Qin et al., "Mooncake", FAST 2025, algorithm 1);
//! - the handoff, and the expected tokens of the answer, at the pace of the decode worker's batch with it;
//! - what others wait for it: prompts behind it for what it computes, answers beside it for what it adds to their steps.
//!
//! The least sum wins. All is predicted from what workers say of their load ([`Backlog`]), and from what was sent to them since.
//! What a worker has not learned yet is taken from the others.

use baton_latency::{Backlog, StepCost, StepWork};
use baton_membership::Role;

use super::fetching::Source;
use super::links::Link;
use super::{
    Candidate, Chosen, Eligible, Fetch, Load, Placed, Placement, PlacementError, PlacementInput, Reserve, Terms, Why,
};

/// Decode workers that are tried with each prefill worker: those with the least time of their own; of those that are alike, first what the best
/// prefill workers have sessions with.
const DECODES: usize = 4;
/// Prefill workers that are tried with each of these: those with the least time of their own, with what others wait for it.
const PREFILLS: usize = 16;
/// Workers of a role that are looked at, beside those that hold the prompt. Of few random ones the best is nearly as good as the best of all
/// (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
const LOOKS_AT: usize = 32;
/// Sums that differ by so little, in seconds, count as equal.
const ALIKE: f64 = 1e-3;
/// Prompts that come while a prompt is computed, and wait for it: as many at least, and at most. In between, as many as wait now where fewest
/// do: while some worker is idle, it matters little who computes; when all have queues, whatever is computed keeps all that come waiting.
const BEHIND: f64 = 4.0;
const MOST_BEHIND: f64 = 16.0;
/// Workers whose times differ by less than this ratio are taken for equal.
const LIKE: f64 = 1.25;
/// What a handoff costs, as a share of computing what it hands over: the time on the way, the digests, and blocks of KV that are elsewhere
/// already.
const HANDOFF: f64 = 1.0;
/// The longest wait for blocks, in seconds: nothing says when any will be free.
pub(super) const FULL: f64 = 600.0;
/// What steps cost as long as no worker has learned it: only the relations matter.
const NOMINAL: StepCost = StepCost { base: 1e-2, row: 1e-4, context: 1e-8, chunk: 5e-3, token: 1e-4, pair: 1e-9 };

/// Placement by predicted time.
#[derive(Clone, Debug)]
pub struct Predicted {
    local: u32,
}

impl Predicted {
    /// `local`: most tokens that a decode worker is given to compute of a prompt while there are prefill workers; 0: none.
    pub fn new(local: u32) -> Predicted {
        Predicted { local }
    }
}

impl Placement for Predicted {
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Chosen, PlacementError> {
        let (eligible, usual) = (Eligible { view, request }, usual(view));
        let source = Source::of(view, request);
        let outlook = |worker| Outlook::of(worker, usual, source.as_ref(), request);
        let mut prefills: Vec<_> = eligible.prefills().map(outlook).collect();
        let soon = Soon::of(&prefills);
        let turn = |of: &Outlook| mix(Placed { decode: of.worker.id, prefill: None }, request.turn);
        prefills.sort_by_cached_key(|prefill| ((prefill.costs(&soon) / ALIKE) as u64, turn(prefill)));
        let decodes = eligible.decode()?.into_iter().map(outlook);
        let mut decodes: Vec<_> = decodes.map(|decode| (decode.answer(&soon, request), decode)).collect();
        let near = &prefills[..prefills.len().min(DECODES)];
        let opens = |decode: &Outlook| !near.iter().any(|prefill| prefill.worker.links.is_open(decode.worker.id));
        decodes.sort_by_cached_key(|(answer, decode)| ((answer.sum() / ALIKE) as u64, opens(decode), turn(decode)));
        let mut options = Vec::with_capacity(prefills.len().min(PREFILLS) * DECODES + decodes.len());
        let mut paired = 0;
        for (answer, decode) in &decodes {
            let may_compute = request.decode.is_none() && !request.handed_over;
            let short = may_compute && decode.missing(request) <= self.local;
            let mut pairs = prefills.iter().filter(|prefill| eligible.pair(prefill.worker, decode.worker)).peekable();
            let alone = pairs.peek().is_none();
            if alone || short {
                let terms = decode.alone(answer, &soon, request);
                options.push(Weighed::of(terms, decode.missing(request), decode, None, request));
            }
            paired += usize::from(!alone);
            for prefill in pairs.take(PREFILLS).take_while(|_| paired <= DECODES) {
                let link = prefill.worker.links.to(decode.worker.id);
                let terms = prefill.split(decode, link, answer, &soon, request);
                let missing = decode.missing(request).saturating_add(prefill.missing(request));
                let option = Weighed::of(terms, missing, decode, Some(prefill), request);
                options.push(Weighed { opens: !link.open, ..option });
            }
        }
        least(&options, request)
    }

    fn looks_at(&self) -> usize {
        LOOKS_AT
    }
}

/// An option: where the request may run, and what is predicted there.
struct Weighed<'a> {
    placed: Placed,
    terms: Terms,
    sum: f64,
    /// Tokens of the prompt that the workers lack.
    missing: u32,
    /// They have to open a session first.
    opens: bool,
    /// The worker that computes.
    computes: &'a Outlook<'a>,
}

impl<'a> Weighed<'a> {
    fn of(
        terms: Terms,
        missing: u32,
        decode: &'a Outlook<'a>,
        prefill: Option<&'a Outlook<'a>>,
        request: &PlacementInput<'_>,
    ) -> Weighed<'a> {
        let placed = Placed { decode: decode.worker.id, prefill: prefill.map(|prefill| prefill.worker.id) };
        let computes = prefill.unwrap_or(decode);
        Weighed { placed, sum: terms.sum(), terms: terms.delayed(request.delays), missing, opens: false, computes }
    }

    /// Of options that are alike: tokens of the prompt that the workers lack, whether they have to open a session first, and requests of this
    /// router at the one that computes them.
    fn rank(&self) -> (u32, bool, u32) {
        (self.missing, self.opens, self.computes.worker.in_flight)
    }
}

/// The option with the least sum, of those that meet the SLO. Of options that are alike, the one that has most of the prompt, then one that
/// needs no new session between its workers, then the one whose worker has fewer requests of this router, then each in turn. So idle workers
/// do not all come to have sessions with each other, each of which takes a thread at both ends.
fn least(options: &[Weighed<'_>], request: &PlacementInput<'_>) -> Result<Chosen, PlacementError> {
    let meets = |option: &&Weighed<'_>| request.slo.missed(&option.terms).is_none();
    let by_sum = |a: &&Weighed<'_>, b: &&Weighed<'_>| a.sum.total_cmp(&b.sum);
    let Some(best) = options.iter().filter(meets).min_by(by_sum) else {
        let missed = options.iter().filter_map(|option| request.slo.missed(&option.terms));
        let least = missed.min_by(|a, b| a.by().total_cmp(&b.by()));
        // Of the decode workers there is at least one, and so there is an option.
        let none = PlacementError::NoDecodeWorker { model: request.model.to_owned(), draining: 0 };
        return Err(least.map_or(none, |missed| PlacementError::Late(Box::new(missed))));
    };
    let alike = options.iter().filter(|option| option.sum <= best.sum + ALIKE).filter(meets);
    let Weighed { placed, terms, computes: Outlook { fetch, loads: load, .. }, .. } =
        *alike.min_by_key(|option| (option.rank(), mix(option.placed, request.turn))).unwrap_or(best);
    let next = options.iter().filter(|other| other.placed != placed).min_by(by_sum);
    let next = next.map(|next| (next.placed, next.terms));
    let why = Some(Why { terms, next, considered: options.len() as u32 });
    Ok(Chosen { placed, why, number: 0, reserve: Reserve::First, fetch: *fetch, load: *load })
}

/// A number that orders equals, another one in each turn.
fn mix(placed: Placed, turn: u64) -> u64 {
    let id = placed.decode.0 ^ placed.prefill.map_or(0, |prefill| prefill.0.rotate_left(32));
    let mixed = (id ^ turn.wrapping_mul(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed ^ mixed >> 31).wrapping_mul(0x94d0_49bb_1331_11eb)
}

/// What is known of a worker for a request.
struct Outlook<'a> {
    worker: &'a Candidate<'a>,
    load: Backlog,
    /// Leading tokens of the prompt that it has in its pool.
    cached: u32,
    /// The same after the load, if it loads any.
    loaded: u32,
    /// The same after the load or the fetch, whichever it does: what follows is computed.
    before: u32,
    /// How long it waits for what is queued, in seconds.
    waits: f64,
    /// How long it then takes, with what it fetches or loads.
    computes: f64,
    /// How long computing takes what is not there after the load.
    computes_all: f64,
    /// What it takes from another worker first, if that is sooner than loading.
    fetch: Option<Fetch>,
    /// What it takes from its own store first, as a worker that computes a prompt.
    loads: Option<Load>,
    /// How long loading takes, as a worker that a prompt is handed to, too. 0: it loads nothing.
    load_seconds: f64,
}

impl<'a> Outlook<'a> {
    fn of(
        worker: &'a Candidate<'a>,
        usual: StepCost,
        source: Option<&Source<'_>>,
        request: &PlacementInput<'_>,
    ) -> Outlook<'a> {
        let load = worker.load.unwrap_or_else(|| unknown(worker, request));
        let cached = request.cached(worker.id);
        let load = Backlog { cost: cost(&load, usual, request), ..load };
        let prompt = |from: u32| load.prompt(from.into(), request.tokens.into());
        // How long it waits, and then computes, where it has so many tokens after so many seconds: they come while the prompt waits.
        let after = |seconds: f64, tokens: u32, computes: f64| {
            let waits = load.wait((request.tokens - tokens).into());
            (waits, (seconds - waits).max(0.0) + computes)
        };
        let loads = Load::of(worker, &load, cached, request);
        let (loaded, load_seconds) = loads.map_or((cached, 0.0), |loads| (loads.tokens, loads.seconds));
        let computes_all = prompt(loaded);
        let with_load = after(load_seconds, loaded, computes_all);
        // A fetch brings all that is not in the pool, also what the store has.
        let fetch = source.and_then(|source| source.fetch(worker, &load, cached, request));
        let fetch = fetch.map(|fetch| (fetch, after(fetch.seconds, fetch.tokens, prompt(fetch.tokens))));
        let fetch = fetch.filter(|(_, with)| loads.is_none() || with.0 + with.1 < with_load.0 + with_load.1);
        let (waits, computes) = fetch.map_or(with_load, |(_, with)| with);
        let fetch = fetch.map(|(fetch, _)| fetch);
        let before = fetch.map_or(loaded, |fetch| fetch.tokens);
        let loads = loads.filter(|_| fetch.is_none());
        Outlook { worker, load, cached, loaded, before, waits, computes, computes_all, fetch, loads, load_seconds }
    }

    /// What a prompt costs at this prefill worker, whichever decode worker gets it.
    fn costs(&self, soon: &Soon) -> f64 {
        self.waits + self.computes + soon.behind * self.computes
    }

    /// Tokens of the prompt that it has to compute, or to be handed.
    fn missing(&self, request: &PlacementInput<'_>) -> u32 {
        request.tokens - self.loaded
    }

    /// The part of a decode worker that gives the answer.
    fn answer(&self, soon: &Soon, request: &PlacementInput<'_>) -> Terms {
        let cost = self.load.cost;
        let expected = f64::from(request.answer);
        let context = u64::from(request.tokens) + u64::from(request.answer / 2);
        // As long as the answers that are here now take.
        let now = StepWork { tokens: 0, pairs: 0, ..self.load.work };
        let lasts = cost.step(&now.with_row(context)) * expected;
        // Not when this answer begins: then the longer a prompt takes, the fewer answers would seem to be left beside it, since those that
        // come meanwhile are not known. One long prompt would be taken in place of many short ones.
        let beside = self.load.answers(soon.queue, lasts);
        let step = cost.step(&beside.with_row(context));
        let others = beside.rows as f64 * expected * (cost.row + cost.context * context as f64);
        let handoff = HANDOFF * self.computes_all;
        let room = self.waits_for_blocks(step, request);
        Terms { room, step, handoff, answer: step * expected, others, ..Terms::default() }
    }

    /// The most likely time from token to token, once the first is there after `wait` seconds.
    fn later(&self, wait: f64, request: &PlacementInput<'_>) -> f64 {
        let context = u64::from(request.tokens) + u64::from(request.answer / 2);
        let now = StepWork { tokens: 0, pairs: 0, ..self.load.work };
        let lasts = self.load.cost.step(&now.with_row(context)) * f64::from(request.answer);
        self.load.token(wait, lasts, context)
    }

    /// How long until there are blocks for the prompt and the answer: the answers that are here end one after the other.
    fn waits_for_blocks(&self, step: f64, request: &PlacementInput<'_>) -> f64 {
        let size = request.block_size.max(1);
        let needs = i64::from((request.tokens - self.cached + request.answer).div_ceil(size));
        let lacks = needs.saturating_sub(self.load.room);
        if lacks <= 0 {
            return 0.0;
        }
        let held = self.load.work.context.saturating_add(self.load.coming.context) as f64 / f64::from(size);
        let seconds = step * f64::from(request.answer.max(1));
        if held > 0.0 { (lacks as f64 * seconds / held).min(FULL) } else { FULL }
    }

    /// A prefill worker computes the prompt for this decode worker with its `answer`.
    fn split(
        &self,
        decode: &Outlook<'_>,
        link: Link,
        answer: &Terms,
        soon: &Soon,
        request: &PlacementInput<'_>,
    ) -> Terms {
        let (queue, compute) = (self.waits, self.computes);
        // The decode worker loads what it has in its store before it lends blocks.
        let lends = answer.room + decode.load_seconds;
        // Blocks that are reserved late come free while the prompt waits.
        let meanwhile = if queue >= request.late && answer.room < FULL { queue } else { 0.0 };
        let room = (lends - meanwhile).max(0.0);
        // Layers travel while others are computed.
        let travels = link.token * f64::from(decode.missing(request));
        let handoff = answer.handoff.max(travels - compute);
        let later = decode.later(room + queue + compute, request);
        Terms { room, queue, compute, handoff, later, others: answer.others + soon.behind * compute, ..*answer }
    }

    /// A decode worker computes the prompt itself: the answers beside it wait.
    fn alone(&self, answer: &Terms, soon: &Soon, request: &PlacementInput<'_>) -> Terms {
        let (queue, compute) = (self.waits, self.computes);
        let own = StepWork::default().with_prompt(self.before.into(), request.tokens.into());
        let slows = self.load.cost.prompts(&own, self.load.step_tokens.into());
        let others = answer.others + soon.behind * compute + self.load.work.rows as f64 * slows;
        let later = self.later(answer.room + queue + compute, request);
        Terms { queue, compute, others, handoff: 0.0, later, ..*answer }
    }
}

/// What is so whichever prefill worker is taken.
struct Soon {
    /// Seconds until the prompts that are here are computed, where that is first.
    queue: f64,
    /// How many prompts wait for what this one computes.
    behind: f64,
}

impl Soon {
    fn of(prefills: &[Outlook<'_>]) -> Soon {
        let queue = prefills.iter().map(|prefill| prefill.load.queue()).fold(f64::INFINITY, f64::min);
        let compute = prefills.iter().map(|prefill| prefill.computes).fold(0.0, f64::max);
        if prefills.is_empty() {
            return Soon { queue: 0.0, behind: BEHIND };
        }
        let behind = BEHIND + queue / compute.max(1e-3);
        Soon { queue, behind: behind.min(MOST_BEHIND) }
    }
}

/// The load of a worker that says nothing of it: that its requests are like this one.
fn unknown(worker: &Candidate<'_>, request: &PlacementInput<'_>) -> Backlog {
    let (requests, tokens) = (u64::from(worker.in_flight), u64::from(request.tokens));
    let prompt = StepWork::default().with_prompt(0, tokens);
    let work = match worker.role {
        Role::Prefill => StepWork {
            tokens: requests * prompt.tokens,
            pairs: requests.saturating_mul(prompt.pairs),
            ..StepWork::default()
        },
        _ => StepWork { rows: requests, context: requests * tokens, ..StepWork::default() },
    };
    Backlog { work, room: i64::MAX, step_tokens: 512, ..Backlog::default() }
}

/// The mean of what the workers have learned; what none has is nominal. Of rows, what decode workers have: a prefill worker has hardly any.
fn usual(view: &[Candidate<'_>]) -> StepCost {
    let (mut sum, mut rows, mut prompts) = (StepCost::default(), 0.0, 0.0);
    for (role, cost) in view.iter().filter_map(|worker| Some((worker.role, worker.load?.cost))) {
        if role == Role::Decode && knows_rows(&cost) {
            rows += 1.0;
            (sum.base, sum.row, sum.context) = (sum.base + cost.base, sum.row + cost.row, sum.context + cost.context);
        }
        if knows_prompts(&cost) {
            prompts += 1.0;
            (sum.chunk, sum.token, sum.pair) = (sum.chunk + cost.chunk, sum.token + cost.token, sum.pair + cost.pair);
        }
    }
    let mean = |sum: f64, count: f64, nominal: f64| if count > 0.0 { sum / count } else { nominal };
    StepCost {
        base: mean(sum.base, rows, NOMINAL.base),
        row: mean(sum.row, rows, NOMINAL.row),
        context: mean(sum.context, rows, NOMINAL.context),
        chunk: mean(sum.chunk, prompts, NOMINAL.chunk),
        token: mean(sum.token, prompts, NOMINAL.token),
        pair: mean(sum.pair, prompts, NOMINAL.pair),
    }
}

fn knows_rows(cost: &StepCost) -> bool {
    cost.base + cost.row + cost.context > 0.0
}

fn knows_prompts(cost: &StepCost) -> bool {
    cost.chunk + cost.token + cost.pair > 0.0
}

/// What steps cost on a worker: its own where it has learned that, and where it is another kind of worker than is usual. Without the latter, the
/// one of many equal workers whose luck was best would get all prompts while it is idle, and evict what it holds.
fn cost(load: &Backlog, usual: StepCost, request: &PlacementInput<'_>) -> StepCost {
    let like = |own: f64, usual: f64| (1.0 / LIKE..=LIKE).contains(&(own / usual.max(1e-9)));
    let (own, tokens) = (load.cost, u64::from(request.tokens));
    let rows = load.work.with_row(tokens);
    let answers = StepWork { tokens: 0, pairs: 0, ..rows };
    let prompt = StepWork::default().with_prompt(0, tokens.max(1));
    let prompts = |cost: StepCost| cost.prompts(&prompt, load.step_tokens.into());
    let other_rows = knows_rows(&own) && !like(own.step(&answers), usual.step(&answers));
    let other_prompts = knows_prompts(&own) && !like(prompts(own), prompts(usual));
    let StepCost { base, row, context, .. } = if other_rows { own } else { usual };
    let StepCost { chunk, token, pair, .. } = if other_prompts { own } else { usual };
    StepCost { base, row, context, chunk, token, pair }
}
