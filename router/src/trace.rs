//! What happened to the latest choices and when, for people who look: where each was placed, its tokens, its handoff, its recoveries.
//!
//! A driver writes the trace of its choice; the admin page reads. Traces, marks and tokens are bounded (I5). Prompts are in them only if
//! the router is told so.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use baton_policy::{ChoiceInput, DecodeWord, Leg, LegEnd, PrefillWord, Targets};
use baton_proto::v1;
use baton_runtime::traces::SpanPlace;
use baton_types::{Class, Fault, FinishReason, RequestId, WorkerId};
use tokio::time::Instant;

use crate::error::RequestError;

mod holders;
mod phases;
mod spans;
mod told;

pub(crate) use holders::{Kv, Shares};

/// Choices that are remembered.
pub(crate) const MOST: usize = 256;
/// Marks of a choice, and tokens whose time is remembered.
const MARKS: usize = 64;
const TOKENS: usize = 2048;
/// Most characters of an error.
const SAID: usize = 200;

/// The traces of the latest choices.
#[derive(Debug, Default)]
pub(crate) struct Traces {
    all: Mutex<VecDeque<Arc<Trace>>>,
    /// Prompts are in them.
    prompts: bool,
}

/// What is known of a choice when it begins.
#[derive(Debug)]
pub(crate) struct Subject {
    pub request: RequestId,
    pub choice: u32,
    pub class: Class,
    /// When its request was received.
    pub received: Instant,
    pub prompt_tokens: u32,
    /// The beginning of its prompt, if people may see it.
    pub prompt: Option<String>,
    /// By what its KV is found.
    pub kv: Option<Kv>,
    /// When its tokens are to come, in seconds: for metrics. None: nobody minds.
    pub targets: Option<Targets>,
    /// Its place in a trace that a collector gets, if that is kept.
    pub span: Option<SpanPlace>,
}

/// The trace of one choice.
#[derive(Debug)]
pub(crate) struct Trace {
    subject: Subject,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    marks: Vec<(u32, Mark)>,
    /// When tokens came.
    tokens: Vec<u32>,
    /// Tokens so far.
    count: u32,
    recoveries: u32,
    cached: u32,
    handoff: Option<Handoff>,
    /// The handoff of the present attempt has succeeded.
    verified: bool,
    end: Option<(u32, End)>,
}

/// A handoff that succeeded.
#[derive(Clone, Debug)]
pub(crate) struct Handoff {
    /// Microseconds since the request was received.
    at: u32,
    bytes: u64,
    seconds: f64,
    transport: String,
    from: Option<WorkerId>,
    to: Option<WorkerId>,
}

/// Something that happened to a choice.
#[derive(Debug)]
enum Mark {
    /// It begins, after it was read and, with others, waited for its turn.
    Begins,
    Placed {
        decode: WorkerId,
        prefill: Option<WorkerId>,
    },
    NotPlaced,
    /// A decode worker is asked; `local`: to compute the prompt, too.
    Decode {
        worker: WorkerId,
        local: bool,
        span: Option<SpanPlace>,
    },
    /// A prefill worker is asked.
    Prefill {
        worker: WorkerId,
        span: Option<SpanPlace>,
    },
    /// The decode worker holds blocks for it.
    Reserved,
    /// The prefill worker's queue has come to it.
    Due,
    /// The decode worker computes the prompt.
    Started,
    FirstToken,
    /// The KV was verified at the decode worker.
    Transferred,
    Recovering {
        leg: Leg,
        cause: String,
    },
    Lost {
        leg: Leg,
        why: String,
    },
}

#[derive(Debug)]
enum End {
    Finished(FinishReason),
    Failed {
        why: String,
        /// The client gave it up, or asked for what cannot be.
        by_client: bool,
    },
}

impl Traces {
    /// Without traces yet. `prompts`: people may see the beginning of prompts.
    pub fn new(prompts: bool) -> Traces {
        Traces { all: Mutex::default(), prompts }
    }

    /// Whether people may see the beginning of prompts.
    pub fn shows_prompts(&self) -> bool {
        self.prompts
    }

    fn all(&self) -> MutexGuard<'_, VecDeque<Arc<Trace>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the trace of a choice; the oldest one is forgotten.
    pub fn begin(&self, subject: Subject) -> Arc<Trace> {
        let trace = Arc::new(Trace { subject, state: Mutex::default() });
        let mut all = self.all();
        if all.len() >= MOST {
            all.pop_front();
        }
        all.push_back(Arc::clone(&trace));
        trace
    }

    /// The latest traces, the oldest first.
    pub fn latest(&self) -> Vec<Arc<Trace>> {
        self.all().iter().cloned().collect()
    }
}

impl Trace {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn since(&self, now: Instant) -> u32 {
        u32::try_from(now.saturating_duration_since(self.subject.received).as_micros()).unwrap_or(u32::MAX)
    }

    fn mark(&self, mark: Mark) {
        let at = self.since(Instant::now());
        let mut state = self.state();
        if state.marks.len() < MARKS {
            state.marks.push((at, mark));
        }
    }

    /// Its turn has come.
    pub fn begins(&self) {
        self.mark(Mark::Begins);
    }

    /// Workers were chosen for it, or none could be.
    pub fn placed(&self, placed: Option<baton_policy::Placed>) {
        self.mark(placed.map_or(Mark::NotPlaced, |p| Mark::Placed { decode: p.decode, prefill: p.prefill }));
    }

    /// A decode worker is asked. Returns what makes its spans children of this.
    pub fn opens_decode(&self, worker: WorkerId, local: bool) -> Option<SpanPlace> {
        let span = self.subject.span.map(|span| span.child());
        self.mark(Mark::Decode { worker, local, span });
        span
    }

    /// A prefill worker is asked. Returns the same.
    pub fn opens_prefill(&self, worker: WorkerId) -> Option<SpanPlace> {
        let span = self.subject.span.map(|span| span.child());
        self.mark(Mark::Prefill { worker, span });
        span
    }

    /// It goes on after a failure.
    pub fn recovering(&self, leg: Leg, cause: &str) {
        let mut state = self.state();
        state.recoveries += 1;
        // The next attempt may hand over again.
        state.verified = false;
        drop(state);
        self.mark(Mark::Recovering { leg, cause: beginning(cause) });
    }

    /// A worker said something, or its stream ended. `handoff`: what was said meanwhile of a handoff that has succeeded, and when.
    pub fn heard(&self, input: &ChoiceInput, handoff: Option<(Instant, v1::Transferred)>) {
        if let Some((at, told)) = handoff {
            self.transferred(at, &told);
        }
        let lost = |leg, end: &LegEnd| Some(Mark::Lost { leg, why: why(end) });
        let mark = match input {
            ChoiceInput::DecodeSaid(DecodeWord::Reserved { .. }) => Some(Mark::Reserved),
            ChoiceInput::DecodeSaid(DecodeWord::Started { cached_tokens }) => {
                self.state().cached = *cached_tokens;
                Some(Mark::Started)
            }
            ChoiceInput::PrefillSaid(PrefillWord::Due) => Some(Mark::Due),
            ChoiceInput::PrefillSaid(PrefillWord::FirstToken { cached_tokens, .. }) => {
                self.state().cached = *cached_tokens;
                Some(Mark::FirstToken)
            }
            ChoiceInput::DecodeEnded(end) => lost(Leg::Decode, end),
            ChoiceInput::PrefillEnded(end) => lost(Leg::Prefill, end),
            _ => None,
        };
        mark.into_iter().for_each(|mark| self.mark(mark));
    }

    /// KV was verified then. Both workers say so; the first word of each attempt counts.
    fn transferred(&self, at: Instant, told: &v1::Transferred) {
        let at = self.since(at);
        let mut state = self.state();
        if std::mem::replace(&mut state.verified, true) {
            return;
        }
        let mut ends = (None, None);
        for (_, mark) in &state.marks {
            match mark {
                Mark::Prefill { worker, .. } => ends.0 = Some(*worker),
                Mark::Decode { worker, .. } => ends.1 = Some(*worker),
                _ => {}
            }
        }
        let transport = told.transport.chars().take(32).collect();
        let (bytes, seconds) = (told.bytes, told.seconds);
        state.handoff = Some(Handoff { at, bytes, seconds, transport, from: ends.0, to: ends.1 });
        if state.marks.len() < MARKS {
            state.marks.push((at, Mark::Transferred));
        }
    }

    /// A token goes to the client.
    pub fn token(&self, now: Instant) {
        let at = self.since(now);
        let mut state = self.state();
        state.count += 1;
        if state.tokens.len() < TOKENS {
            state.tokens.push(at);
        }
    }

    /// It is complete.
    pub fn finished(&self, reason: FinishReason, cached_tokens: u32) {
        let at = self.since(Instant::now());
        let mut state = self.state();
        state.cached = cached_tokens;
        state.end = Some((at, End::Finished(reason)));
        drop(state);
        self.count();
        self.tell();
    }

    /// It failed.
    pub fn failed(&self, error: &RequestError) {
        let at = self.since(Instant::now());
        let by_client = matches!(error.kind.fault(), Fault::Client);
        self.state().end = Some((at, End::Failed { why: beginning(&error.to_string()), by_client }));
        self.count();
        self.tell();
    }

    /// When its request was received.
    pub fn received(&self) -> Instant {
        self.subject.received
    }

    /// Its times for statistics.
    pub fn times(&self) -> Times {
        let state = self.state();
        let seconds = |micros: u32| f64::from(micros) / 1e6;
        let first = state.tokens.first().copied();
        let mean = match (first, state.tokens.last(), state.tokens.len()) {
            (Some(first), Some(last), 2..) => Some(seconds(last - first) / (state.tokens.len() - 1) as f64),
            _ => None,
        };
        let prefilled = state.marks.iter().rev().find(|(_, mark)| matches!(mark, Mark::FirstToken)).map(|(at, _)| *at);
        let tail = state.handoff.as_ref().zip(prefilled).map(|(done, at)| seconds(done.at.saturating_sub(at)));
        let ended = state.end.as_ref().map(|(at, end)| (seconds(*at), end.how()));
        Times { tokens: state.tokens.clone(), mean, tail, ended }
    }
}

/// How a stream ended, in words.
fn why(end: &LegEnd) -> String {
    match end {
        LegEnd::Early => "it ended too early".to_owned(),
        LegEnd::Answered { message, .. } | LegEnd::Draining { message } | LegEnd::Unclear { message } => {
            beginning(message)
        }
        LegEnd::Lost { message, .. } => beginning(&format!("the connection is lost: {message}")),
        LegEnd::Left { .. } => "the worker has left".to_owned(),
    }
}

/// The beginning of what somebody said, which may be long.
fn beginning(text: &str) -> String {
    text.chars().take(SAID).collect()
}

/// What statistics need of a trace. Times in seconds since its request was received, those of tokens in microseconds.
pub(crate) struct Times {
    pub tokens: Vec<u32>,
    /// Mean time between two tokens.
    pub mean: Option<f64>,
    /// From the first token until the KV was handed over.
    pub tail: Option<f64>,
    /// When it ended, and how.
    pub ended: Option<(f64, How)>,
}

/// How an answer ended, for statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum How {
    Answered,
    /// The client wanted no more.
    Cancelled,
    Failed,
}

impl End {
    fn how(&self) -> How {
        match self {
            End::Finished(FinishReason::Cancelled) => How::Cancelled,
            End::Finished(_) => How::Answered,
            End::Failed { .. } => How::Failed,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_policy::Placed;
    use serde_json::json;

    use super::*;

    pub(super) fn subject(request: &str) -> Subject {
        let (request, received) = (RequestId(request.to_owned()), Instant::now());
        Subject {
            request,
            choice: 0,
            class: Class::default(),
            received,
            prompt_tokens: 9,
            prompt: None,
            kv: None,
            targets: None,
            span: None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_trace_tells_what_happened_when() {
        let traces = Traces::default();
        let trace = traces.begin(subject("r"));
        let (decode, prefill) = (WorkerId(1), WorkerId(2));
        trace.begins();
        trace.placed(Some(Placed { decode, prefill: Some(prefill) }));
        trace.opens_decode(decode, false);
        trace.opens_prefill(prefill);
        tokio::time::advance(Duration::from_millis(10)).await;
        trace.mark(Mark::FirstToken);
        trace.token(Instant::now());
        tokio::time::advance(Duration::from_millis(5)).await;
        let told = v1::Transferred { bytes: 77, seconds: 0.2, transport: "shm".into() };
        let verified = Instant::now() - Duration::from_millis(1);
        trace.heard(&ChoiceInput::PrefillSaid(PrefillWord::Transferred), Some((verified, told.clone())));
        let later = v1::Transferred { bytes: 78, ..told };
        trace.heard(&ChoiceInput::PrefillSaid(PrefillWord::Transferred), Some((Instant::now(), later)));
        trace.token(Instant::now());
        trace.recovering(Leg::Decode, "it went away");
        trace.finished(FinishReason::Stop, 4);
        let verified = trace.state().marks.iter().filter(|(_, mark)| matches!(mark, Mark::Transferred)).count();
        assert_eq!(verified, 1, "the decode worker's word, not the prefill worker's after it");
        let all = traces.choices("r");
        let [one] = &all[..] else { panic!("{all:?}") };
        let one = one.whole();
        assert_eq!((&one["outcome"], &one["tokens"], &one["cached_tokens"]), (&json!("ok"), &json!(2), &json!(4)));
        assert_eq!((&one["first_token_us"], &one["last_token_us"]), (&json!(10_000), &json!(15_000)));
        assert_eq!(one["handoff"]["bytes"], 77);
        assert_eq!(
            (&one["handoff"]["from"], &one["handoff"]["to"]),
            (&json!(prefill.to_string()), &json!(decode.to_string()))
        );
        assert_eq!(one["marks"].as_array().unwrap().last().unwrap()["why"], "it went away");
        assert!(one["prompt"].is_null(), "prompts are shown only if they were given");
        let times = trace.times();
        assert_eq!((times.mean, times.tail, times.ended), (Some(0.005), Some(0.004), Some((0.015, How::Answered))));
        assert!(traces.choices("s").is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn each_attempt_has_a_handoff_of_its_own() {
        let trace = Traces::default().begin(subject("r"));
        let told = |bytes| Some((Instant::now(), v1::Transferred { bytes, seconds: 0.2, transport: "shm".into() }));
        for (attempt, bytes) in [(1, 77), (2, 78)] {
            trace.opens_decode(WorkerId(10 * attempt), false);
            trace.opens_prefill(WorkerId(10 * attempt + 1));
            trace.heard(&ChoiceInput::Wake, told(bytes));
            assert_eq!(trace.whole()["handoff"]["bytes"], bytes);
            assert_eq!(trace.whole()["handoff"]["to"], WorkerId(10 * attempt).to_string());
            trace.recovering(Leg::Decode, "it went away");
        }
    }

    /// I5.
    #[test]
    fn traces_are_bounded() {
        let traces = Traces::default();
        let first = traces.begin(subject("0"));
        for _ in 0..2 * TOKENS {
            first.token(Instant::now());
            first.begins();
        }
        let whole = first.whole();
        assert_eq!(
            (whole["token_us"].as_array().unwrap().len(), whole["tokens"].as_u64()),
            (TOKENS, Some(2 * TOKENS as u64))
        );
        assert_eq!(whole["marks"].as_array().unwrap().len(), MARKS);
        (1..=MOST).for_each(|at| drop(traces.begin(subject(&at.to_string()))));
        assert!(traces.choices("0").is_empty() && !traces.choices("1").is_empty());
        assert_eq!(traces.latest().len(), MOST);
    }
}
