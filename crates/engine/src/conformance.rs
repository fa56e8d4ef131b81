//! A suite for what every [`ModelRunner`] must do: [`check`].
//!
//! The suite sends the same requests along several routes: alone, chunked, batched, staggered, in other blocks,
//! computed again, and in steps launched behind another. Every route must give the same tokens and log
//! probabilities, bit by bit (I1). Every call must report its layers and tokens as the trait says.

mod route;

use baton_types::{PoolGeometry, SamplingParams, TokenOut};

use crate::ModelRunner;
use route::{Restart, Route};

/// What the suite runs against.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The pool of each runner that the factory makes; at least [`Setup::blocks`] blocks per group.
    pub geometry: PoolGeometry,
    /// Token ids are below this; at least 2.
    pub vocab: u32,
    /// Tokens generated per request.
    pub answer_tokens: u32,
}

/// A rule that does not hold.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
#[error("{rule}: {detail}")]
pub struct Violation {
    /// The rule.
    pub rule: &'static str,
    /// What happened.
    pub detail: String,
}

type Answers = Vec<Vec<TokenOut>>;

impl Setup {
    /// Blocks that each group of the pool needs.
    pub fn blocks(&self) -> u32 {
        let (size, answer) = (self.geometry.layout.block_size, self.answer_tokens);
        // Twice the blocks of all requests, so that there is always another place for each.
        let of_all: u32 = requests(self).iter().map(|r| (r.prompt.len() as u32 + answer).div_ceil(size)).sum();
        2 * of_all
    }
}

/// Runs the suite. For each route, `make` gives a fresh runner with an untouched pool.
pub fn check<R: ModelRunner>(setup: &Setup, mut make: impl FnMut() -> R) -> Result<(), Violation> {
    let requests = requests(setup);
    let size = setup.geometry.layout.block_size;
    let mut alone = Answers::new();
    for request in &requests {
        let one = std::slice::from_ref(request);
        alone.extend(Route { rule: "runs alone", ..Route::plain() }.run(setup, &mut make(), one)?);
    }
    let plain = Route::plain();
    let routes = [
        Route { rule: "batch invariance", ..plain },
        Route { rule: "row order invariance", reversed: true, ..plain },
        Route { rule: "chunking invariance, 1 token", chunk: 1, ..plain },
        Route { rule: "chunking invariance, 3 tokens", chunk: 3, ..plain },
        Route { rule: "chunking invariance, one block", chunk: size, ..plain },
        Route { rule: "joining at any step", stagger: 1, chunk: 5, ..plain },
        Route { rule: "block tables are followed", scattered: true, ..plain },
        Route { rule: "computed again in other blocks", restart_after: Some(2), chunk: 7, ..plain },
        Route { rule: "computed again from its own prefix", restart_after: Some(2), restart: Restart::Cached, ..plain },
        Route {
            rule: "computed again from its own prefix, in chunks",
            restart_after: Some(3),
            restart: Restart::Cached,
            chunk: 3,
            ..plain
        },
        Route { rule: "launched behind another", ahead: true, ..plain },
        Route {
            rule: "launched behind another, in chunks",
            ahead: true,
            chunk: 3,
            stagger: 2,
            scattered: true,
            ..plain
        },
        Route {
            rule: "all of these",
            restart: Restart::Compute,
            chunk: 2,
            stagger: 2,
            reversed: true,
            scattered: true,
            restart_after: Some(1),
            ahead: false,
        },
    ];
    for route in routes {
        let answers = route.run(setup, &mut make(), &requests)?;
        for (at, (found, wanted)) in answers.iter().zip(&alone).enumerate() {
            if found != wanted {
                let detail = format!("request {at} says {found:?}; alone it says {wanted:?}");
                return Err(Violation { rule: route.rule, detail });
            }
        }
    }
    Ok(())
}

struct Request {
    prompt: Vec<u32>,
    params: SamplingParams,
}

/// Prompts with lengths around block boundaries, each with other sampling parameters.
fn requests(setup: &Setup) -> Vec<Request> {
    let size = setup.geometry.layout.block_size;
    let off = SamplingParams { max_tokens: setup.answer_tokens, temperature: 0.0, ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.9, top_k: 40, top_p: 0.95, seed: 7, ..off.clone() };
    let params = [
        off.clone(),
        SamplingParams { top_logprobs: Some(3), prompt_logprobs: Some(2), ..off.clone() },
        sampled.clone(),
        SamplingParams { seed: 8, min_p: 0.05, top_logprobs: Some(0), ..sampled.clone() },
        SamplingParams {
            presence_penalty: 0.5,
            frequency_penalty: 0.5,
            repetition_penalty: 1.2,
            prompt_logprobs: Some(0),
            ..off
        },
        SamplingParams { logit_bias: vec![(1, 2.0)], repetition_penalty: 1.1, prompt_logprobs: Some(1), ..sampled },
    ];
    let lengths = [1, 2, size - 1, size, size + 1, 3 * size + 5];
    let token = |request: usize, at: u32| (at * 7919 + request as u32 * 104_729 + at * at * 31) % setup.vocab;
    let prompt = |request, length: u32| (0..length.max(1)).map(|at| token(request, at)).collect();
    let pairs = lengths.into_iter().zip(params).enumerate();
    pairs.map(|(request, (length, params))| Request { prompt: prompt(request, length), params }).collect()
}

#[cfg(test)]
mod tests;
