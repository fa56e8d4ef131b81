//! Prefixes that are fetched from the worker that holds most of the prompt, where that is sooner than computing them.

use baton_latency::Backlog;

use super::{Candidate, Fetch, PlacementInput};
use crate::kv_index::Holder;

/// Fewest tokens that are fetched: for less, two workers need not be asked.
const LEAST: u32 = 128;
/// Seconds that asking both workers takes, and verifying what comes.
const ASKING: f64 = 5e-3;
/// Computing must take so many times longer than fetching: a fetch takes a link and blocks that others may need.
const GAIN: f64 = 2.0;

/// The worker that holds most of the prompt.
pub(super) struct Source<'a> {
    worker: &'a Candidate<'a>,
    /// Leading tokens that it holds, whole blocks, and not the last token of the prompt.
    tokens: u32,
    /// How long it takes to load what of these is only in its own store, in seconds.
    loads: f64,
}

impl<'a> Source<'a> {
    /// The first of those that hold most, as they say, that gives prefixes to others. One that has the prefix only in its own store loads it
    /// first; it is asked where that is worth a fetch. One that nothing is heard of any more may be gone, and is not asked.
    pub fn of(view: &'a [Candidate<'a>], request: &PlacementInput<'_>) -> Option<Source<'a>> {
        let size = request.block_size.max(1);
        let most = request.tokens.saturating_sub(1) / size * size;
        let gives = |worker: &&Candidate<'_>| {
            let there = worker.links.known() && !worker.draining && !request.avoid.contains(&worker.id);
            there && worker.exchanges != 0
        };
        let of = |holder: &Holder| {
            let worker = view.iter().filter(gives).find(|worker| worker.id == holder.worker)?;
            Some(Source { worker, tokens: holder.blocks.saturating_mul(size).min(most), loads: 0.0 })
        };
        let pool = request.held.by.iter().find_map(of);
        let stored = request.held.stored.iter().find_map(|holder| {
            let source = of(holder)?;
            let lacks = source.tokens.saturating_sub(request.cached(holder.worker));
            Some(Source { loads: source.worker.links.load()? * f64::from(lacks), ..source })
        });
        match (pool, stored) {
            (Some(pool), Some(stored)) if stored.tokens < pool.tokens.saturating_add(LEAST) => Some(pool),
            (pool, stored) => stored.or(pool),
        }
    }

    /// What a worker that holds `cached` tokens of the prompt fetches, if that is worth it.
    pub fn fetch(
        &self,
        to: &Candidate<'_>,
        load: &Backlog,
        cached: u32,
        request: &PlacementInput<'_>,
    ) -> Option<Fetch> {
        let lacks = self.tokens.saturating_sub(cached);
        if to.id == self.worker.id || to.exchanges != self.worker.exchanges || lacks < LEAST {
            return None;
        }
        let seconds = ASKING + self.loads + self.worker.links.travels(to.id)? * f64::from(lacks);
        let prompt = |from: u32| load.prompt(from.into(), request.tokens.into());
        let saves = prompt(cached) - prompt(self.tokens);
        let Source { worker: &Candidate { id: from, .. }, tokens, .. } = *self;
        (saves > GAIN * seconds).then_some(Fetch { to: to.id, from, tokens, seconds, step: load.step() })
    }
}

#[cfg(test)]
mod tests {
    use baton_latency::{StepCost, StepWork};
    use baton_membership::Role;
    use baton_types::WorkerId;

    use super::*;
    use crate::placement::{Chosen, Held, Links, Placement, Predicted, tests};

    /// What prompts of 4,000 tokens take: 0.8 seconds to compute.
    const COST: StepCost = StepCost { base: 8e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 2e-4, pair: 0.0 };

    /// A prompt of 4,000 tokens, of which the first prefill worker says that it holds 3,200.
    const HOLDERS: [Holder; 1] = [Holder { worker: WorkerId(1), blocks: 200 }];
    const ASK: PlacementInput<'static> = PlacementInput {
        tokens: 4000,
        answer: 10,
        held: Held { blocks: 250, by: &HOLDERS, stored: &[] },
        ..tests::ASK
    };

    /// Two prefill workers and a decode worker that exchange prefixes; the first one has this much to compute.
    fn view(links: &Links, queued: u64) -> [Candidate<'_>; 3] {
        let load = |tokens| {
            let work = StepWork { tokens, ..StepWork::default() };
            Some(Backlog { work, room: 1000, step_tokens: 512, cost: COST, ..Backlog::default() })
        };
        let worker =
            |id, role, queued| Candidate { load: load(queued), links, exchanges: 9, ..tests::worker(id, role) };
        [worker(1, Role::Prefill, queued), worker(2, Role::Prefill, 0), worker(11, Role::Decode, 0)]
    }

    fn place(view: &[Candidate<'_>], ask: &PlacementInput<'_>) -> Chosen {
        Predicted::new(0).place(view, ask).unwrap()
    }

    /// KV of 16 KB a token, at 1 GB/s: 3,200 tokens travel in 52 ms.
    fn links() -> Links {
        Links::new(1 << 14, [(WorkerId(2), 1e9)].into_iter())
    }

    #[test]
    fn a_prefix_is_fetched_where_its_holder_is_busy() {
        let links = links();
        let idle = place(&view(&links, 0), &ASK);
        assert_eq!(
            (idle.placed.prefill, idle.fetch),
            (Some(WorkerId(1)), None),
            "where it is, nothing is to be fetched"
        );
        let busy = place(&view(&links, 4000), &ASK);
        let fetch = busy.fetch.unwrap();
        assert_eq!((fetch.to, fetch.from, fetch.tokens), (WorkerId(2), WorkerId(1), 3200));
        assert!((0.05..0.06).contains(&fetch.seconds), "{fetch:?}");
        assert_eq!(fetch.step, 0.0, "it computes nothing");
        let terms = busy.why.unwrap().terms;
        // 800 tokens in two chunks, and what the fetch takes.
        assert!((0.21..0.24).contains(&terms.compute), "{terms:?}");
    }

    #[test]
    fn what_is_sooner_computed_is_not_fetched() {
        let (fast, slow, silent) = (links(), Links::new(1 << 14, [(WorkerId(2), 1e8)].into_iter()), Links::NONE);
        let of = |links, ask: &PlacementInput<'_>| place(&view(links, 40_000), ask).fetch.is_some();
        assert!(of(&fast, &ASK));
        assert!(!of(&slow, &ASK), "half a second for what is computed in 0.65");
        assert!(!of(&silent, &ASK), "nobody knows how large it is");
        let few = [Holder { blocks: 7, ..HOLDERS[0] }];
        assert!(
            !of(&fast, &PlacementInput { held: Held { blocks: 250, by: &few, stored: &[] }, ..ASK }),
            "not worth the asking"
        );
    }

    #[test]
    fn only_workers_that_exchange_and_stay_give_prefixes() {
        let links = links();
        let fetch = |change: fn(&mut [Candidate<'_>; 3]), ask: &PlacementInput<'_>| {
            let mut view = view(&links, 40_000);
            change(&mut view);
            place(&view, ask).fetch
        };
        assert!(fetch(|_| (), &ASK).is_some());
        assert_eq!(fetch(|view| view[0].exchanges = 0, &ASK), None, "of the version before");
        assert_eq!(fetch(|view| view[0].draining = true, &ASK), None);
        assert_eq!(fetch(|view| view[1].exchanges = 8, &ASK), None, "I1: of another KV type");
        assert_eq!(fetch(|_| (), &PlacementInput { avoid: &[WorkerId(1)], ..ASK }), None, "it failed this request");
        let two = [HOLDERS[0], Holder { worker: WorkerId(11), blocks: 100 }];
        let ask = PlacementInput { held: Held { blocks: 250, by: &two, stored: &[] }, ..ASK };
        let old: fn(&mut [Candidate<'_>; 3]) = |view| view[0].exchanges = 0;
        static SILENT: Links = Links::NONE;
        for change in [old, |view| view[0].links = &SILENT] {
            let second = fetch(change, &ask).unwrap();
            assert_eq!((second.from, second.tokens), (WorkerId(11), 1600), "from the one that holds the next most");
        }
    }

    #[test]
    fn a_prefix_comes_from_another_workers_store_where_that_is_worth_it() {
        let fetch = |seconds, pool: &[Holder]| {
            let links = links().with_load(seconds);
            let ask = PlacementInput { held: Held { blocks: 250, by: pool, stored: &HOLDERS }, ..ASK };
            place(&view(&links, 40_000), &ask).fetch
        };
        let one = fetch(2e-5, &[]).unwrap();
        assert_eq!((one.to, one.from, one.tokens), (WorkerId(2), WorkerId(1), 3200));
        assert!((0.11..0.13).contains(&one.seconds), "64 ms to load, 52 to travel, and 5: {one:?}");
        assert_eq!(fetch(2e-4, &[]), None, "0.64 s for what is computed in as long");
        let half = fetch(2e-5, &[Holder { blocks: 100, ..HOLDERS[0] }]).unwrap();
        assert!((0.08..0.1).contains(&half.seconds), "half of it is in the pool: {half:?}");
        let elsewhere = Holder { worker: WorkerId(11), blocks: 195 };
        assert_eq!(fetch(2e-5, &[elsewhere]).unwrap().from, WorkerId(11), "nearly as much in a pool");
    }

    /// A worker that has half of the prompt in its own store takes all of it from the other one, or loads its half: whichever is sooner.
    #[test]
    fn a_worker_fetches_or_loads() {
        let own = [Holder { worker: WorkerId(2), blocks: 100 }];
        let chosen = |load: f64| {
            let (fast, links) = (links(), Links::new(1 << 14, [].into_iter()).with_load(load));
            let mut view = view(&fast, 40_000);
            view[1].links = &links;
            place(&view, &PlacementInput { held: Held { blocks: 250, by: &HOLDERS, stored: &own }, ..ASK })
        };
        let fetches = chosen(1e-4);
        let fetch = fetches.fetch.unwrap();
        assert_eq!((fetch.tokens, fetches.load), (3200, None));
        assert!((0.05..0.06).contains(&fetch.seconds), "the way of all 3,200 tokens: {fetch:?}");
        let few = [Holder { blocks: 105, ..HOLDERS[0] }];
        let (fast, none) = (links().with_load(1e-7), Links::NONE);
        let mut view = view(&fast, 40_000);
        let ask = PlacementInput { held: Held { blocks: 250, by: &few, stored: &own }, ..ASK };
        let loads = place(&view, &ask);
        assert_eq!(
            (loads.placed.prefill, loads.fetch.is_none(), loads.load.map(|load| load.tokens)),
            (Some(WorkerId(2)), true, Some(1600))
        );
        view[1].links = &none;
        assert!(place(&view, &ask).load.is_none());
    }

    /// The last token of a prompt is computed in any case.
    #[test]
    fn a_prompt_is_never_fetched_to_its_end() {
        let (links, whole) = (links(), [Holder { blocks: 250, ..HOLDERS[0] }]);
        let ask = PlacementInput { held: Held { blocks: 250, by: &whole, stored: &[] }, ..ASK };
        assert_eq!(place(&view(&links, 40_000), &ask).fetch.unwrap().tokens, 3984);
    }
}
