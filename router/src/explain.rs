//! Why requests were placed where they were, for people who ask: what was predicted, and what came of it.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_policy::{Chosen, Failure, Fetch, Load, Placed, Reserve, Terms, Why};
use baton_types::RequestId;
use serde_json::{Value, json};
use tokio::time::Instant;

/// Placements that are remembered (I5).
const MOST: usize = 4096;
/// Most that are told of one request: a header must not grow without bound.
const TOLD: usize = 8;

/// The latest placements.
#[derive(Debug, Default)]
pub(crate) struct Explanations(Mutex<Recent>);

#[derive(Debug, Default)]
struct Recent {
    /// Number of the first one.
    first: u64,
    placements: VecDeque<Placement>,
}

#[derive(Debug)]
struct Placement {
    request: RequestId,
    at: Instant,
    /// Where it runs and why there, or why it does not.
    outcome: Result<Chosen, String>,
    /// Seconds to the first token, and from one token to the next.
    measured: (Option<f64>, Option<f64>),
    /// Tokens of the prompt that were not computed, as the answer said at its end.
    cached: Option<u32>,
}

impl Recent {
    fn of_number(&mut self, number: u64) -> Option<&mut Placement> {
        let at = usize::try_from(number.checked_sub(self.first)?).ok()?;
        self.placements.get_mut(at)
    }
}

impl Explanations {
    fn recent(&self) -> MutexGuard<'_, Recent> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers a placement; returns its number. `failed`: the number of the placement just before, if no worker could take the request. One
    /// that waits for a worker tries again and again, and is told of once.
    pub fn placed(&self, request: &RequestId, outcome: &Result<Chosen, Failure>, failed: Option<u64>) -> u64 {
        let outcome = outcome.as_ref().copied().map_err(|failure| failure.message.clone());
        let mut recent = self.recent();
        if let (Err(_), Some(number)) = (&outcome, failed)
            && let Some(placement) = recent.of_number(number)
        {
            placement.outcome = outcome;
            return number;
        }
        if recent.placements.len() >= MOST {
            recent.placements.pop_front();
            recent.first += 1;
        }
        recent.placements.push_back(Placement {
            request: request.clone(),
            at: Instant::now(),
            outcome,
            measured: (None, None),
            cached: None,
        });
        recent.first + recent.placements.len() as u64 - 1
    }

    /// Adds what was measured of a placement.
    pub fn measured(&self, number: u64, first: Option<f64>, token: Option<f64>) {
        if let Some(placement) = self.recent().of_number(number) {
            let (known_first, known_token) = placement.measured;
            placement.measured = (first.or(known_first), token.or(known_token));
        }
    }

    /// Adds how many tokens of the prompt were not computed: they were cached, fetched or loaded.
    pub fn cached(&self, number: u64, tokens: u32) {
        if let Some(placement) = self.recent().of_number(number) {
            placement.cached = Some(tokens);
        }
    }

    /// The placements of a request since then, the latest [`TOLD`], the first one first; none when it is not known, or not any more.
    pub fn of(&self, request: &str, since: Option<Instant>) -> Vec<Value> {
        let recent = self.recent();
        let of =
            |placement: &&Placement| placement.request.0 == request && since.is_none_or(|since| placement.at >= since);
        let mut told: Vec<Value> = recent.placements.iter().rev().filter(of).take(TOLD).map(Placement::json).collect();
        told.reverse();
        told
    }
}

impl Placement {
    fn json(&self) -> Value {
        let chosen = match &self.outcome {
            Ok(chosen) => chosen,
            Err(message) => return json!({"rejected": message}),
        };
        let mut told = workers(chosen.placed);
        told["reserves"] = json!(match chosen.reserve {
            Reserve::First => "first",
            Reserve::Meanwhile => "meanwhile",
            Reserve::Late => "late",
        });
        if let Some(Fetch { from, tokens, seconds, .. }) = chosen.fetch {
            told["fetches"] = json!({"from": from.to_string(), "tokens": tokens, "seconds": round(seconds)});
        }
        if let Some(Load { tokens, seconds, .. }) = chosen.load {
            told["loads"] = json!({"tokens": tokens, "seconds": round(seconds)});
        }
        if let Some(Why { terms, next, considered }) = chosen.why {
            told["predicted"] = predicted(&terms);
            told["options"] = json!(considered);
            told["next_best"] = next.map_or(Value::Null, |(placed, terms)| {
                let mut next = workers(placed);
                next["predicted"] = predicted(&terms);
                next
            });
        }
        let (first, token) = self.measured;
        told["measured"] =
            json!({"first_token_s": first.map(round), "token_s": token.map(round), "cached_tokens": self.cached});
        told
    }
}

fn workers(placed: Placed) -> Value {
    json!({"decode": placed.decode.to_string(), "prefill": placed.prefill.map(|prefill| prefill.to_string())})
}

/// All in seconds; `sum_s` is what the chosen workers have least of.
fn predicted(terms: &Terms) -> Value {
    json!({
        "first_token_s": round(terms.first_token),
        "token_s": round(terms.expected),
        "token_at_most_s": round(terms.token),
        "room_s": round(terms.room),
        "queue_s": round(terms.queue),
        "compute_s": round(terms.compute),
        "handoff_s": round(terms.handoff),
        "answer_s": round(terms.answer),
        "others_s": round(terms.others),
        "sum_s": round(terms.sum()),
    })
}

/// To the microsecond.
fn round(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use baton_types::{ErrorKind, WorkerId};

    use super::*;

    fn chosen(worker: u64) -> Chosen {
        let terms = Terms { queue: 0.5, first_token: 0.5, ..Terms::default() };
        let placed = Placed { decode: WorkerId(worker), prefill: None };
        Chosen {
            placed,
            why: Some(Why { terms, next: Some((placed, terms)), considered: 3 }),
            number: 1,
            reserve: Reserve::First,
            fetch: None,
            load: None,
        }
    }

    #[test]
    fn what_was_predicted_is_told_beside_what_came_of_it() {
        let explanations = Explanations::default();
        let request = RequestId("r".to_owned());
        let load = Some(Load { at: WorkerId(7), tokens: 320, seconds: 0.0123456789 });
        let number = explanations.placed(&request, &Ok(Chosen { load, ..chosen(7) }), None);
        explanations.measured(number, Some(0.25), None);
        explanations.measured(number, None, Some(0.0123456789));
        explanations.cached(number, 304);
        explanations.placed(&request, &Err(Failure::new(ErrorKind::ResourceExhausted, "too late")), None);
        let told = explanations.of("r", None);
        assert_eq!((told.len(), &told[1]), (2, &json!({"rejected": "too late"})));
        assert_eq!(told[0]["decode"], WorkerId(7).to_string());
        assert_eq!((&told[0]["predicted"]["queue_s"], &told[0]["options"]), (&json!(0.5), &json!(3)));
        assert_eq!(told[0]["measured"], json!({"first_token_s": 0.25, "token_s": 0.012346, "cached_tokens": 304}));
        assert_eq!(told[0]["loads"], json!({"tokens": 320, "seconds": 0.012346}));
        assert!(explanations.of("s", None).is_empty());
        assert!(explanations.of("r", Some(Instant::now())).is_empty(), "of an earlier request with this id");
        for _ in 0..2 * TOLD {
            explanations.placed(&request, &Ok(chosen(7)), None);
        }
        assert_eq!(explanations.of("r", None).len(), TOLD);
    }

    #[test]
    fn one_that_waits_for_a_worker_is_told_of_once() {
        let (explanations, request) = (Explanations::default(), RequestId("r".to_owned()));
        let nobody = |why: &str| Err(Failure::new(ErrorKind::Unavailable, why));
        let first = explanations.placed(&request, &nobody("none"), None);
        let again = explanations.placed(&request, &nobody("none, 1 draining"), Some(first));
        assert_eq!((again, explanations.of("r", None)), (first, vec![json!({"rejected": "none, 1 draining"})]));
        assert_ne!(explanations.placed(&request, &Ok(chosen(7)), Some(first)), first);
        assert_eq!(explanations.of("r", None).len(), 2);
    }

    /// I5.
    #[test]
    fn the_oldest_are_forgotten() {
        let explanations = Explanations::default();
        let of = |at: usize| RequestId(at.to_string());
        let numbers: Vec<u64> = (0..MOST + 5).map(|at| explanations.placed(&of(at), &Ok(chosen(1)), None)).collect();
        assert!(explanations.of("4", None).is_empty() && !explanations.of("5", None).is_empty());
        explanations.measured(numbers[4], Some(1.0), None);
        explanations.measured(numbers[MOST + 4], Some(2.0), None);
        assert_eq!(explanations.of(&(MOST + 4).to_string(), None)[0]["measured"]["first_token_s"], 2.0);
        assert_eq!(explanations.recent().placements.len(), MOST);
    }
}
