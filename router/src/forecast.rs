//! Compares what was predicted of one choice with what came of it.

use baton_policy::Terms;
use tokio::time::Instant;

use crate::worker::{Placement, Workers};

/// Tokens below which the time between them says little.
const ENOUGH: u32 = 8;

/// What is known so far.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Forecast {
    /// Nothing was predicted, or a worker failed since: then times say nothing of predictions.
    Nothing,
    /// It waits for its first token.
    Placed(Predicted),
    /// It has had this many tokens since its first one.
    Answering { predicted: Predicted, first: Instant, last: Instant, tokens: u32 },
}

/// A prediction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predicted {
    at: Instant,
    terms: Terms,
    /// Number of the placement.
    number: u64,
}

impl Forecast {
    /// The choice was placed, or is placed again.
    pub fn placed(self, placement: &Placement) -> Forecast {
        let why = placement.chosen.as_ref().ok().and_then(|chosen| chosen.why);
        match (self, why, placement.again) {
            (Forecast::Nothing, Some(why), false) => {
                Forecast::Placed(Predicted { at: Instant::now(), terms: why.terms, number: placement.number })
            }
            _ => Forecast::Nothing,
        }
    }

    /// A token came.
    pub fn token(&mut self, workers: &Workers) {
        let now = Instant::now();
        match self {
            Forecast::Nothing => {}
            Forecast::Placed(predicted) => {
                let time = (now - predicted.at).as_secs_f64();
                workers.measured(predicted.number, &predicted.terms, Some(time), None);
                *self = Forecast::Answering { predicted: *predicted, first: now, last: now, tokens: 0 };
            }
            Forecast::Answering { last, tokens, .. } => (*last, *tokens) = (now, *tokens + 1),
        }
    }

    /// The answer has ended.
    pub fn ended(&self, workers: &Workers) {
        match self {
            Forecast::Answering { predicted, first, last, tokens } if *tokens >= ENOUGH => {
                let time = (*last - *first).as_secs_f64() / f64::from(*tokens);
                workers.measured(predicted.number, &predicted.terms, None, Some(time));
            }
            _ => {}
        }
    }
}
