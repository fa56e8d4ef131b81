//! Prefixes that a worker has in its own store, below its pool, and loads where that is sooner than computing them.

use baton_latency::Backlog;
use baton_types::WorkerId;

use super::{Candidate, PlacementInput};

/// Fewest tokens that a worker loads.
const LEAST: u32 = 64;

/// What a worker takes from its own store before it computes the rest of a prompt.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Load {
    /// The worker.
    pub at: WorkerId,
    /// Leading tokens of the prompt that it has then.
    pub tokens: u32,
    /// How long that takes, as predicted, in seconds.
    pub seconds: f64,
}

impl Load {
    /// What a worker loads that has `cached` tokens of the prompt in its pool, if it loads any. It decides so itself, by what it measured of each
    /// tier; this is about the same.
    pub(super) fn of(
        worker: &Candidate<'_>,
        backlog: &Backlog,
        cached: u32,
        request: &PlacementInput<'_>,
    ) -> Option<Load> {
        if request.held.stored.is_empty() {
            return None;
        }
        let size = request.block_size.max(1);
        let most = request.tokens.saturating_sub(1) / size * size;
        let tokens = request.stored(worker.id).saturating_mul(size).min(most);
        let lacks = tokens.saturating_sub(cached);
        if lacks < LEAST {
            return None;
        }
        let seconds = worker.links.load()? * f64::from(lacks);
        let prompt = |from: u32| backlog.prompt(from.into(), request.tokens.into());
        (prompt(cached) - prompt(tokens) > seconds).then_some(Load { at: worker.id, tokens, seconds })
    }
}

#[cfg(test)]
mod tests {
    use baton_latency::{StepCost, StepWork};
    use baton_membership::Role;

    use super::*;
    use crate::kv_index::Holder;
    use crate::placement::{Chosen, Held, Links, Placement, Predicted, tests};

    /// What prompts of 4,000 tokens take: 0.8 seconds to compute.
    const COST: StepCost = StepCost { base: 8e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 2e-4, pair: 0.0 };
    /// A prompt of 4,000 tokens, of which the second prefill worker says that it has 3,200 in its store.
    const STORED: [Holder; 1] = [Holder { worker: WorkerId(2), blocks: 200 }];
    const ASK: PlacementInput<'static> =
        PlacementInput { tokens: 4000, answer: 10, held: Held { blocks: 250, by: &[], stored: &STORED }, ..tests::ASK };

    /// A worker with so many tokens to compute.
    fn worker(id: u64, role: Role, queued: u64, links: &Links) -> Candidate<'_> {
        let work = StepWork { tokens: queued, ..StepWork::default() };
        let load = Some(Backlog { work, room: 1000, step_tokens: 512, cost: COST, ..Backlog::default() });
        Candidate { load, links, ..tests::worker(id, role) }
    }

    /// Where a prompt goes that loads at so many seconds a token, of two prefill workers of which the second has so much to compute.
    fn place(seconds: f64, queued: u64, ask: &PlacementInput<'_>) -> Chosen {
        let (none, links) = (Links::NONE, Links::NONE.with_load(seconds));
        let view = [
            worker(1, Role::Prefill, 0, &none),
            worker(2, Role::Prefill, queued, &links),
            worker(11, Role::Decode, 0, &none),
        ];
        Predicted::new(0).place(&view, ask).unwrap()
    }

    #[test]
    fn a_prompt_goes_to_the_worker_that_has_it_in_its_store() {
        for turn in 0..8 {
            let chosen = place(2e-5, 0, &PlacementInput { turn, ..ASK });
            let load = chosen.load.unwrap();
            assert_eq!((chosen.placed.prefill, load.at, load.tokens), (Some(WorkerId(2)), WorkerId(2), 3200));
            assert!((0.06..0.07).contains(&load.seconds), "{load:?}");
            // 800 tokens in two chunks, and the load.
            let compute = chosen.why.unwrap().terms.compute;
            assert!((0.23..0.26).contains(&compute), "{compute}");
        }
        // It loads while the prompt waits.
        let (idle, busy) = [0, 500].map(|queued| place(2e-5, queued, &ASK).why.unwrap().terms).into();
        let waits = |terms: crate::Terms| terms.queue + terms.compute;
        assert!(waits(busy) < waits(idle) + busy.queue, "{idle:?} {busy:?}");
        assert_eq!(place(2e-5, 40_000, &ASK).placed.prefill, Some(WorkerId(1)), "computing is sooner than waiting");
    }

    /// A decode worker that has the prompt in its store loads it before it lends blocks, and is handed only the rest.
    #[test]
    fn what_a_decode_worker_loads_takes_its_time() {
        let (none, links) = (Links::NONE, Links::NONE.with_load(1e-4));
        let view = [worker(1, Role::Prefill, 0, &none), worker(2, Role::Decode, 0, &links)];
        let terms = |ask: &PlacementInput<'_>| Predicted::new(0).place(&view, ask).unwrap().why.unwrap().terms;
        let (with, without) = (terms(&ASK), terms(&PlacementInput { held: Held { stored: &[], ..ASK.held }, ..ASK }));
        assert!((0.31..0.33).contains(&with.room) && without.room == 0.0, "0.32 s for 3,200 tokens: {with:?}");
        assert!(with.handoff < 0.3 * without.handoff, "{with:?} {without:?}");
    }

    #[test]
    fn what_is_sooner_computed_is_not_loaded() {
        assert_eq!(place(3e-4, 0, &ASK).load, None, "a second for what is computed in 0.65");
        assert_eq!(place(0.0, 0, &ASK).load, None, "nobody knows how long it takes");
        let few = [Holder { blocks: 3, ..STORED[0] }];
        let ask = PlacementInput { held: Held { stored: &few, ..ASK.held }, ..ASK };
        assert_eq!(place(1e-9, 0, &ASK).load.map(|load| load.tokens), Some(3200));
        assert_eq!(place(1e-9, 0, &ask).load, None, "a worker does not load so little");
        let both = [Holder { blocks: 200, ..STORED[0] }];
        let ask = PlacementInput { held: Held { by: &both, ..ASK.held }, ..ASK };
        let chosen = place(1e-9, 0, &ask);
        assert_eq!((chosen.placed.prefill, chosen.load), (Some(WorkerId(2)), None), "its pool has it already");
    }

    /// The last token of a prompt is computed in any case.
    #[test]
    fn a_prompt_is_never_loaded_to_its_end() {
        let whole = [Holder { blocks: 250, ..STORED[0] }];
        let ask = PlacementInput { held: Held { stored: &whole, ..ASK.held }, ..ASK };
        assert_eq!(place(1e-9, 0, &ask).load.unwrap().tokens, 3984);
    }
}
