//! Where the next request goes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_cache::BlockName;
use baton_latency::StepWork;
use baton_types::{BatonError, Class, WorkerId};

use super::Fleet;
use super::roster::{Fit, Worker};
use crate::kv_index::Holder;
use crate::placement::{Chosen, Held, Placed, PlacementError, PlacementInput, Reserve, Slo};
use crate::request::Failure;
use crate::router::load::Adds;
use crate::router::outliers::Subject;

/// For so long after a prompt was sent to a worker, that worker counts as one that holds it, though it does not say so yet. Once it has answered, for a
/// shorter time.
const ON_ITS_WAY: Duration = Duration::from_secs(10);

/// The request to place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// False: the decode worker prefills, even if prefill workers are alive.
    pub split: bool,
    /// A prefill worker is to compute the prompt, where there is one, however short it is.
    pub handed_over: bool,
    /// Keep this decode worker; only a prefill worker is wanted.
    pub decode: Option<WorkerId>,
    /// Workers that failed this request.
    pub avoid: Vec<WorkerId>,
    /// Names of the prompt's blocks ([`crate::Prefixes::names`]).
    pub names: Arc<[BlockName]>,
    /// Tokens of the prompt, and of the answer so far.
    pub tokens: u32,
    /// Most tokens that the answer may still have.
    pub most: u32,
    /// When its tokens have to come.
    pub slo: Slo,
    /// Batch requests wait for all that a worker has to do, interactive ones for other interactive ones alone.
    pub class: Class,
    /// About so many tokens of prompts each worker computes before this one's, where this router is the only one; `None`: all that are there.
    pub before: Option<u64>,
}

/// Which workers say that they hold how much of the prompt, those with most first.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known<'a> {
    /// In their pools.
    pub pool: &'a [Holder],
    /// In their own stores below them.
    pub store: &'a [Holder],
}

impl<'a> From<&'a [Holder]> for Known<'a> {
    fn from(pool: &'a [Holder]) -> Self {
        Known { pool, store: &[] }
    }
}

impl<'a, const N: usize> From<&'a [Holder; N]> for Known<'a> {
    fn from(pool: &'a [Holder; N]) -> Self {
        Known { pool, store: &[] }
    }
}

impl Fleet {
    /// Chooses workers for a request of the model. Lost workers, and those that do worse than others ([`Fleet::judge`]), are chosen only
    /// when placement fails without them; lost ones last. A decode worker that the request already has is kept in any case.
    ///
    /// # Errors
    /// Why no worker can take the request.
    pub fn place<'a>(&mut self, ask: &Ask, known: impl Into<Known<'a>>, now: Instant) -> Result<Chosen, Failure> {
        self.placements = self.placements.wrapping_add(1);
        let (block_size, turn) = (self.block_size(), self.seed.wrapping_add(self.placements));
        let delays = self.calibrations.delays();
        let Fleet { model, roster, placement, prefixes, outliers, .. } = self;
        let Known { pool, store } = known.into();
        let seen = pool.iter().chain(store).map(|holder| holder.worker).chain(ask.decode);
        let some = roster.some(placement.looks_at(), seen, turn);
        let (sent, apart) = (prefixes.find(&ask.names, now), &outliers.apart(now));
        let held = Held { blocks: ask.names.len(), by: pool, stored: store };
        let answer = (self.answer as u32).min(ask.most);
        let late = self.late.map_or(f64::INFINITY, |from| from.as_secs_f64());
        let Ask { ref avoid, split, handed_over, decode, tokens, mut slo, class, before, .. } = *ask;
        // As long as nobody knows how long a prompt takes, nobody misses a deadline for it.
        slo.deadline = slo.deadline.filter(|_| roster.knows_prompts());
        let input = PlacementInput {
            model,
            split,
            handed_over,
            decode,
            avoid,
            apart,
            tokens,
            answer,
            block_size,
            slo,
            late,
            delays,
            held,
            sent,
            turn,
        };
        let there = |worker: &Worker| !worker.lost || decode == Some(worker.id);
        let well = |worker: &Worker| {
            there(worker) && (outliers.allows(Subject::Worker(worker.id), now) || decode == Some(worker.id))
        };
        // Those that are looked at may all be unfit: then all are.
        let tries: [(Option<&[usize]>, Fit<'_>); 4] =
            [(some.as_deref(), &well), (None, &well), (None, &there), (None, &|_| true)];
        let mut chosen = Err(PlacementError::NoDecodeWorker { model: model.clone(), draining: 0 });
        for (places, fit) in tries {
            chosen = placement.place(&roster.candidates(places, (model, class, before), now, fit), &input);
            match chosen {
                Ok(_) => break,
                // Workers that are lost, or do worse than others, are no faster. But those that were looked at may not be the fastest.
                Err(PlacementError::Late(_)) if places.is_none() => break,
                Err(_) => {}
            }
        }
        let mut chosen = chosen.map_err(|error| Failure {
            late: matches!(error, PlacementError::Late(_)),
            retry_after: error.retry_after(),
            ..Failure::new(error.kind(), error.to_string())
        })?;
        chosen.number = self.placements;
        let Placed { decode, prefill } = chosen.placed;
        outliers.placed(Subject::Worker(decode), now);
        if let Some(prefill) = prefill {
            outliers.placed(Subject::Worker(prefill), now);
            outliers.placed(Subject::Pair { prefill, decode }, now);
        }
        // What it fetches or loads it need not compute.
        let fetched = |worker| chosen.fetch.filter(|fetch| fetch.to == worker).map_or(0, |fetch| fetch.tokens);
        let loaded = |worker| chosen.load.filter(|load| load.at == worker).map_or(0, |load| load.tokens);
        let has = |worker: WorkerId| input.cached(worker).max(fetched(worker)).max(loaded(worker));
        let has = [Some(decode), prefill].map(|worker| worker.map_or(0, has));
        let pooled = input.cached(decode);
        prefixes.note(&ask.names, chosen.placed, now + ON_ITS_WAY);
        chosen.reserve = self.reserves(ask, &chosen);
        self.count(ask, &chosen, (has, pooled), answer, now);
        Ok(chosen)
    }

    /// When decode blocks are to be reserved for a request that is placed so.
    fn reserves(&self, ask: &Ask, chosen: &Chosen) -> Reserve {
        let takes_late = |prefill| self.view.get(prefill).is_some_and(|member| member.late_targets);
        let waits = chosen.why.map_or(0.0, |why| why.terms.queue);
        match self.late {
            _ if !chosen.placed.prefill.is_some_and(takes_late) => Reserve::First,
            Some(from) if ask.decode.is_none() && waits >= from.as_secs_f64() => Reserve::Late,
            _ => Reserve::Meanwhile,
        }
    }

    /// Counts a request that was placed in the loads of its workers. `has`: tokens that its decode and its prefill worker need not
    /// compute; `pooled`: those that the decode worker has blocks for.
    fn count(&mut self, ask: &Ask, chosen: &Chosen, (has, pooled): ([u32; 2], u32), answer: u32, now: Instant) {
        let (size, Chosen { placed, number, reserve, .. }) = (self.block_size().max(1), *chosen);
        let prompt = |cached: u32| StepWork::default().with_prompt(cached.min(ask.tokens).into(), ask.tokens.into());
        let ([at_decode, at_prefill], class) = (has, ask.class);
        if let Some(worker) = placed.prefill.and_then(|id| self.roster.get_mut(id)) {
            worker.load.sent(number, Adds { work: prompt(at_prefill), class, ..Adds::default() }, now);
        }
        if let Some(worker) = self.roster.get_mut(placed.decode).filter(|_| ask.decode.is_none()) {
            let own = if placed.prefill.is_none() { prompt(at_decode) } else { StepWork::default() };
            let blocks = (ask.tokens - pooled.min(ask.tokens)).saturating_add(answer).div_ceil(size);
            worker.load.sent(
                number,
                Adds { work: own.with_row(ask.tokens.into()), blocks, class, late: reserve == Reserve::Late },
                now,
            );
        }
    }
}
