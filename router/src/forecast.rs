//! One choice's placement: what its workers are to expect of it, and what was predicted and came of it.

use std::sync::Arc;

use baton_policy::Chosen;
use baton_types::{Class, WorkerId};
use tokio::time::Instant;

use crate::worker::{Placement, Workers};

/// Tokens below which the time between them says little.
const ENOUGH: u32 = 8;

/// The placement of one choice. Dropping it says that its workers have nothing to expect any more.
pub(crate) struct Forecast {
    workers: Arc<Workers>,
    now: Option<Placed>,
    /// Its times say nothing of predictions: it is batch work, which gives way to what comes later, or a worker failed.
    apart: bool,
}

struct Placed {
    chosen: Chosen,
    /// Number of its explanation.
    number: u64,
    at: Instant,
    /// When the first token came, and the last, and how many came since the first.
    tokens: Option<(Instant, Instant, u32)>,
}

impl Forecast {
    /// Of a choice of this class that is not placed yet.
    pub fn new(workers: &Arc<Workers>, class: Class) -> Forecast {
        Forecast { workers: Arc::clone(workers), now: None, apart: class.is_batch() }
    }

    /// The choice was placed, for the first time or again.
    pub fn placed(&mut self, placement: &Placement) {
        self.apart |= self.now.is_some();
        self.over();
        let placed =
            |chosen: &Chosen| Placed { chosen: *chosen, number: placement.number, at: Instant::now(), tokens: None };
        self.now = placement.chosen.as_ref().ok().map(placed);
    }

    /// The stream to this worker is opened.
    pub fn opens(&self, worker: WorkerId) {
        if let Some(now) = &self.now {
            self.workers.opened(worker, now.chosen.number);
        }
    }

    /// A token came now.
    pub fn token(&mut self, now: Instant) {
        let Some(placed) = &mut self.now else { return };
        match &mut placed.tokens {
            Some((_, last, tokens)) => (*last, *tokens) = (now, *tokens + 1),
            None => {
                placed.tokens = Some((now, now, 0));
                self.workers.begun(&placed.chosen);
                if let Some(why) = placed.chosen.why.filter(|_| !self.apart) {
                    let time = (now - placed.at).as_secs_f64();
                    self.workers.measured(placed.number, &why.terms, Some(time), None);
                }
            }
        }
    }

    /// The answer is complete; so many tokens of its prompt were not computed.
    pub fn ended(&self, cached_tokens: u32) {
        if let Some(placed) = &self.now {
            self.workers.cached(placed.number, cached_tokens);
        }
        let Some(Placed { chosen, number, tokens: Some((first, last, tokens @ ENOUGH..)), .. }) = &self.now else {
            return;
        };
        if let Some(why) = chosen.why.filter(|_| !self.apart) {
            let time = (*last - *first).as_secs_f64() / f64::from(*tokens);
            self.workers.measured(*number, &why.terms, None, Some(time));
        }
    }

    fn over(&mut self) {
        if let Some(placed) = self.now.take().filter(|placed| placed.tokens.is_none()) {
            self.workers.begun(&placed.chosen);
        }
    }
}

impl Drop for Forecast {
    fn drop(&mut self) {
        self.over();
    }
}
