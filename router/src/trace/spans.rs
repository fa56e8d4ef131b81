//! The spans of a choice for a collector, made from its trace when it has ended.
//!
//! | span | from | to |
//! | --- | --- | --- |
//! | `choice` | the request is received | its end |
//! | `queue` | the request is received | its turn comes |
//! | `prefill` | a prefill worker is asked | the prompt is computed, or the worker fails |
//! | `transfer` | the prompt is computed | the KV is verified, or a worker fails |
//! | `decode` | a decode worker is asked | its answer ends, or the worker fails |
//!
//! All but the first are below `choice`. After a recovery there are several of the last three. The spans of the workers are below `prefill` and
//! `decode`.

use std::time::{Duration, SystemTime};

use baton_policy::Leg;
use baton_runtime::traces::{self, About, Span, SpanKind, SpanPlace, Value};
use baton_types::WorkerId;
use tokio::time::Instant;

use super::{End, Mark, State, Subject, Trace};

/// Every so many tokens are an event of `choice`, the first one included.
const EVERY: usize = 16;

impl Trace {
    /// Hands the spans over, if a collector is to get them.
    pub(super) fn tell(&self) {
        let Some(place) = self.subject.span else { return };
        let (now, wall) = (Instant::now(), SystemTime::now());
        let received = wall.checked_sub(now.saturating_duration_since(self.subject.received)).unwrap_or(wall);
        spans(place, &self.subject, &self.state(), received).into_iter().for_each(traces::end);
    }
}

/// Something that begins with one mark and ends with a later one.
struct Open {
    place: SpanPlace,
    name: &'static str,
    kind: SpanKind,
    leg: Leg,
    from: u32,
    about: About,
}

impl Open {
    fn ends(self, received: SystemTime, to: u32, error: Option<String>) -> Span {
        let Open { place, name, kind, from, about, .. } = self;
        Span { place, name, kind, from: at(received, from), to: at(received, to), about, events: Vec::new(), error }
    }
}

fn id(worker: &WorkerId) -> Value {
    Value::from(worker.to_string())
}

fn at(received: SystemTime, micros: u32) -> SystemTime {
    received + Duration::from_micros(micros.into())
}

fn spans(place: SpanPlace, subject: &Subject, state: &State, received: SystemTime) -> Vec<Span> {
    let (mut done, mut open): (Vec<Span>, Vec<Open>) = (Vec::new(), Vec::new());
    let end = state.end.as_ref().map_or(0, |(at, _)| *at);
    let mut ends = |open: &mut Vec<Open>, which: &dyn Fn(&Open) -> bool, to: u32, error: Option<&str>| {
        let (over, rest) = std::mem::take(open).into_iter().partition(which);
        *open = rest;
        done.extend(over.into_iter().map(|open: Open| open.ends(received, to, error.map(str::to_owned))));
    };
    let queue = Open {
        place: place.child(),
        name: "queue",
        kind: SpanKind::Internal,
        leg: Leg::Decode,
        from: 0,
        about: Vec::new(),
    };
    open.push(queue);
    // Of the present attempt.
    let mut verified = false;
    for (when, mark) in &state.marks {
        match mark {
            Mark::Begins => ends(&mut open, &|open| open.name == "queue", *when, None),
            Mark::Decode { worker, local, span: Some(place) } => {
                verified = false;
                let about = vec![("baton.worker", id(worker)), ("baton.computes_prompt", Value::from(*local))];
                let (place, kind, leg) = (*place, SpanKind::Client, Leg::Decode);
                open.push(Open { place, name: "decode", kind, leg, from: *when, about });
            }
            Mark::Prefill { worker, span: Some(place) } => {
                let about = vec![("baton.worker", id(worker))];
                let (place, kind, leg) = (*place, SpanKind::Client, Leg::Prefill);
                open.push(Open { place, name: "prefill", kind, leg, from: *when, about });
            }
            Mark::FirstToken => {
                ends(&mut open, &|open| open.name == "prefill", *when, None);
                let (place, kind, leg) = (place.child(), SpanKind::Internal, Leg::Prefill);
                let about = if verified { handoff(state) } else { Vec::new() };
                open.push(Open { place, name: "transfer", kind, leg, from: *when, about });
                // The decode worker's word came first.
                if verified {
                    ends(&mut open, &|open| open.name == "transfer", *when, None);
                }
            }
            Mark::Transferred => {
                verified = true;
                let done = open.iter_mut().filter(|open| open.name == "transfer");
                done.for_each(|open| open.about = handoff(state));
                ends(&mut open, &|open| open.name == "transfer", *when, None);
            }
            // A handoff needs both workers.
            Mark::Lost { leg, why } => {
                let over = |open: &Open| open.name == "transfer" || open.name != "queue" && open.leg == *leg;
                ends(&mut open, &over, *when, Some(why));
            }
            // What both workers did so far is given up.
            Mark::Recovering { cause, .. } => ends(&mut open, &|open| open.name != "queue", *when, Some(cause)),
            // The decode worker has computed the prompt itself.
            Mark::Started => ends(&mut open, &|open| open.name == "prefill", *when, None),
            _ => {}
        }
    }
    ends(&mut open, &|_| true, end, None);
    done.push(whole(place, subject, state, received, end));
    done
}

/// What is known of the handoff that succeeded.
fn handoff(state: &State) -> About {
    let Some(handoff) = &state.handoff else { return Vec::new() };
    vec![
        ("baton.bytes", Value::from(handoff.bytes as i64)),
        ("baton.transport", Value::from(handoff.transport.clone())),
        ("baton.seconds", Value::from(handoff.seconds)),
    ]
}

/// The span of the choice.
fn whole(place: SpanPlace, subject: &Subject, state: &State, received: SystemTime, end: u32) -> Span {
    let about = vec![
        ("baton.request_id", Value::from(subject.request.to_string())),
        ("baton.choice", Value::from(i64::from(subject.choice))),
        ("baton.prompt_tokens", Value::from(i64::from(subject.prompt_tokens))),
        ("baton.cached_tokens", Value::from(i64::from(state.cached))),
        ("baton.completion_tokens", Value::from(i64::from(state.count))),
        ("baton.outcome", Value::from(state.end.as_ref().map_or("running", |(_, end)| end.word()))),
    ];
    let placed = state.marks.iter().filter_map(|(when, mark)| match mark {
        Mark::Placed { decode, prefill } => {
            let mut about = vec![("baton.decode", id(decode))];
            about.extend(prefill.as_ref().map(|prefill| ("baton.prefill", id(prefill))));
            Some((at(received, *when), "placed", about))
        }
        Mark::NotPlaced => Some((at(received, *when), "not placed", Vec::new())),
        Mark::Recovering { leg, cause } => {
            let about = vec![("baton.leg", Value::from(leg.as_str())), ("baton.cause", Value::from(cause.clone()))];
            Some((at(received, *when), "recovering", about))
        }
        _ => None,
    });
    let tokens = state.tokens.iter().enumerate().step_by(EVERY);
    let tokens = tokens.map(|(n, when)| (at(received, *when), "token", vec![("baton.token", Value::from(n as i64))]));
    let mut events: Vec<_> = placed.chain(tokens).collect();
    events.sort_by_key(|(when, ..)| *when);
    let error = match &state.end {
        Some((_, End::Failed { why, by_client: false })) => Some(why.clone()),
        _ => None,
    };
    let (from, to) = (received, at(received, end));
    Span { place, name: "choice", kind: SpanKind::Internal, from, to, about, events, error }
}

#[cfg(test)]
mod tests {
    use baton_types::FinishReason;

    use super::super::tests::subject;
    use super::*;

    /// A prefill worker is lost before the first token: what the decode worker had reserved is given up, too.
    #[test]
    fn a_recovery_ends_what_both_workers_did() {
        let place = SpanPlace::first();
        let subject = Subject { span: Some(place), ..subject("r") };
        let (worker, span) = (WorkerId(1), Some(place.child()));
        let marks = vec![
            (20, Mark::Decode { worker, local: false, span }),
            (30, Mark::Prefill { worker, span }),
            (50, Mark::Lost { leg: Leg::Prefill, why: String::new() }),
            (51, Mark::Recovering { leg: Leg::Prefill, cause: String::new() }),
            (60, Mark::Decode { worker, local: true, span }),
            (61, Mark::Prefill { worker, span }),
            (70, Mark::Started),
        ];
        let state = State { marks, end: Some((90, End::Finished(FinishReason::Stop))), ..State::default() };
        let spans = spans(place, &subject, &state, SystemTime::UNIX_EPOCH);
        let micros = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros();
        let told = spans.iter().filter(|span| span.kind == SpanKind::Client);
        let told: Vec<_> = told.map(|span| (span.name, micros(span.to), span.error.is_some())).collect();
        let expected = [("prefill", 50, true), ("decode", 51, true), ("prefill", 70, false), ("decode", 90, false)];
        assert_eq!(told, expected);
    }

    /// The words of two workers may come in any order.
    #[test]
    fn a_handoff_that_is_verified_before_the_first_token_is_heard_has_an_end() {
        let place = SpanPlace::first();
        let subject = Subject { span: Some(place), ..subject("r") };
        let (worker, span) = (WorkerId(1), Some(place.child()));
        let marks = vec![
            (20, Mark::Decode { worker, local: false, span }),
            (30, Mark::Prefill { worker, span }),
            (40, Mark::Transferred),
            (45, Mark::FirstToken),
        ];
        let state = State { marks, end: Some((90, End::Finished(FinishReason::Stop))), ..State::default() };
        let spans = spans(place, &subject, &state, SystemTime::UNIX_EPOCH);
        let micros = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros();
        let transfers: Vec<_> = spans.iter().filter(|span| span.name == "transfer").collect();
        assert_eq!(transfers.iter().map(|span| (micros(span.from), micros(span.to))).collect::<Vec<_>>(), [(45, 45)]);
    }

    #[test]
    fn what_a_lost_worker_did_ends_with_its_loss() {
        let place = SpanPlace::first();
        let (decode, prefill) = (|| Some(place.child()), || Some(place.child()));
        let subject = Subject { span: Some(place), ..subject("r") };
        let worker = WorkerId(1);
        let why = || "it went away".to_owned();
        let marks = vec![
            (10, Mark::Begins),
            (20, Mark::Decode { worker, local: false, span: decode() }),
            (30, Mark::Prefill { worker, span: prefill() }),
            (40, Mark::FirstToken),
            (50, Mark::Lost { leg: Leg::Decode, why: why() }),
            (50, Mark::Recovering { leg: Leg::Decode, cause: why() }),
            (60, Mark::Decode { worker, local: true, span: decode() }),
        ];
        let state = State { marks, end: Some((90, End::Failed { why: why(), by_client: false })), ..State::default() };
        let start = SystemTime::UNIX_EPOCH;
        let spans = spans(place, &subject, &state, start);
        let micros = |at: SystemTime| at.duration_since(start).unwrap().as_micros();
        let told: Vec<_> =
            spans.iter().map(|span| (span.name, micros(span.from), micros(span.to), span.error.is_some())).collect();
        let expected = [
            ("queue", 0, 10, false),
            ("prefill", 30, 40, false),
            ("decode", 20, 50, true),
            ("transfer", 40, 50, true),
            ("decode", 60, 90, false),
            ("choice", 0, 90, true),
        ];
        assert_eq!(told, expected);
    }
}
