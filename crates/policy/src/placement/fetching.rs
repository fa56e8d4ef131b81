//! Prefixes that are fetched from the worker that holds most of the prompt, where that is sooner than computing them.

use baton_latency::Backlog;

use super::{Candidate, Fetch, PlacementInput};

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
}

impl<'a> Source<'a> {
    /// The first of those that hold most, as they say, that gives prefixes to others.
    pub fn of(view: &'a [Candidate<'a>], request: &PlacementInput<'_>) -> Option<Source<'a>> {
        let size = request.block_size.max(1);
        let most = request.tokens.saturating_sub(1) / size * size;
        let gives =
            |worker: &&Candidate<'_>| worker.exchanges != 0 && !worker.draining && !request.avoid.contains(&worker.id);
        request.held.by.iter().find_map(|holder| {
            let worker = view.iter().filter(gives).find(|worker| worker.id == holder.worker)?;
            Some(Source { worker, tokens: holder.blocks.saturating_mul(size).min(most) })
        })
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
        let seconds = ASKING + self.worker.links.travels(to.id)? * f64::from(lacks);
        let prompt = |from: u32| load.prompt(from.into(), request.tokens.into());
        let saves = prompt(cached) - prompt(self.tokens);
        let Source { worker: &Candidate { id: from, .. }, tokens } = *self;
        (saves > GAIN * seconds).then_some(Fetch { to: to.id, from, tokens, seconds })
    }
}
