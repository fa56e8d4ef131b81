//! Where the next request goes.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use baton_kv_cache::BlockName;
use baton_latency::StepWork;
use baton_membership::Member;
use baton_types::{BatonError, WorkerId};

use super::{Fleet, Worker, works};
use crate::kv_index::Holder;
use crate::placement::{Candidate, Chosen, Held, Placed, PlacementError, PlacementInput, Slo};
use crate::request::Failure;
use crate::router::outliers::Subject;

/// The request to place.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ask {
    /// False: the decode worker prefills, even if prefill workers are alive.
    pub split: bool,
    /// Keep this decode worker; only a prefill worker is wanted.
    pub decode: Option<WorkerId>,
    /// Workers that failed this request.
    pub avoid: Vec<WorkerId>,
    /// Names of the prompt's blocks ([`Prefixes::names`]).
    pub names: Arc<[BlockName]>,
    /// Tokens of the prompt, and of the answer so far.
    pub tokens: u32,
    /// Most tokens that the answer may still have.
    pub most: u32,
    /// When its tokens have to come.
    pub slo: Slo,
}

impl Fleet {
    /// Chooses workers for a request of the model. Lost workers, and those that do worse than others ([`Fleet::judge`]), are chosen only
    /// when placement fails without them; lost ones last. A decode worker that the request already has is kept in any case.
    ///
    /// # Errors
    /// Why no worker can take the request.
    pub fn place(&mut self, ask: &Ask, held: &[Holder], now: Instant) -> Result<Chosen, Failure> {
        self.placements = self.placements.wrapping_add(1);
        let block_size = self.block_size();
        let some = self.some(held, ask);
        let delays = (self.calibrations.0.delay(), self.calibrations.1.delay());
        let Fleet { model, view, workers, placement, prefixes, outliers, .. } = self;
        let (sent, apart) = (prefixes.find(&ask.names, now), &outliers.apart(now));
        let held = Held { blocks: ask.names.len(), by: held };
        let answer = (self.answer as u32).min(ask.most);
        let Ask { split, decode, tokens, slo, .. } = *ask;
        let avoid = &ask.avoid;
        let input =
            PlacementInput { model, split, decode, avoid, tokens, answer, block_size, slo, delays, sent, held, apart };
        let there = |id, worker: &Worker| !worker.lost || decode == Some(id);
        let well = |id, worker: &Worker| {
            there(id, worker) && (outliers.allows(Subject::Worker(id), now) || decode == Some(id))
        };
        let some: Option<Vec<&Member>> = some.map(|some| some.iter().filter_map(|id| view.get(*id)).collect());
        // Those that are looked at may all be unfit: then all are.
        let tries: [(Option<&[&Member]>, Which<'_>); 4] =
            [(some.as_deref(), &well), (None, &well), (None, &there), (None, &|_, _| true)];
        let mut chosen = Err(PlacementError::NoDecodeWorker { model: model.clone(), draining: 0 });
        for (members, which) in tries {
            let found = match members {
                Some(members) => candidates(members.iter().copied(), workers, now, which),
                None => candidates(view.members.iter(), workers, now, which),
            };
            chosen = placement.place(&found, &input);
            match chosen {
                Ok(_) => break,
                // Workers that are lost, or do worse than others, are no faster. But those that were looked at may not be the fastest.
                Err(PlacementError::Late(_)) if members.is_none() => break,
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
        let cached = [Some(decode), prefill].map(|worker| worker.map_or(0, |worker| input.cached(worker)));
        prefixes.note(&ask.names, chosen.placed, now);
        self.count(ask, chosen.placed, cached, answer, now);
        Ok(chosen)
    }

    /// Workers that are worth a look, where there are more than placement needs.
    fn some(&self, held: &[Holder], ask: &Ask) -> Option<BTreeSet<WorkerId>> {
        let most = self.placement.looks_at();
        if self.roles.iter().all(|role| role.len() <= most.saturating_mul(2)) {
            return None;
        }
        let mut some: BTreeSet<WorkerId> = held.iter().map(|holder| holder.worker).chain(ask.decode).collect();
        for role in self.roles.iter().filter(|role| !role.is_empty()) {
            let mut at = self.placements;
            for _ in 0..most {
                // SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
                at = at.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mixed = (at ^ at >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                some.insert(role[(mixed ^ mixed >> 27) as usize % role.len()]);
            }
        }
        Some(some)
    }

    /// Counts a request that was placed in the loads of its workers. `cached`: tokens that its decode and its prefill worker need not compute.
    fn count(&mut self, ask: &Ask, placed: Placed, cached: [u32; 2], answer: u32, now: Instant) {
        let (size, number) = (self.block_size().max(1), self.placements);
        let prompt = |cached: u32| StepWork::default().with_prompt(cached.min(ask.tokens).into(), ask.tokens.into());
        let [at_decode, at_prefill] = cached;
        if let Some(worker) = placed.prefill.and_then(|id| self.workers.get_mut(&id)) {
            worker.load.sent(number, prompt(at_prefill), 0, now);
        }
        if let Some(worker) = self.workers.get_mut(&placed.decode).filter(|_| ask.decode.is_none()) {
            let own = if placed.prefill.is_none() { prompt(at_decode) } else { StepWork::default() };
            let blocks = (ask.tokens - at_decode.min(ask.tokens)).saturating_add(answer).div_ceil(size);
            worker.load.sent(number, own.with_row(ask.tokens.into()), blocks, now);
        }
    }
}

/// Which workers are candidates.
type Which<'a> = &'a dyn Fn(WorkerId, &Worker) -> bool;

fn candidates<'a>(
    members: impl Iterator<Item = &'a Member>,
    workers: &BTreeMap<WorkerId, Worker>,
    now: Instant,
    which: impl Fn(WorkerId, &Worker) -> bool,
) -> Vec<Candidate<'a>> {
    let candidate = |m: &'a Member| {
        let worker = workers.get(&m.id).filter(|worker| which(m.id, worker))?;
        let (draining, in_flight, load) =
            (m.draining || worker.draining, worker.in_flight(), worker.load.now(worker.in_flight(), now));
        Some(Candidate { id: m.id, role: m.role, model: &m.model, layout: m.layout, draining, in_flight, load })
    };
    members.filter(|m| works(m)).filter_map(candidate).collect()
}
