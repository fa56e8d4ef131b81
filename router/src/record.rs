//! The metrics of one request, and the line that is logged when its last choice has ended.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::SystemTime;

use baton_policy::{Failure, Leg};
use baton_runtime::metrics as names;
use baton_runtime::traces::{self, Span, SpanKind, SpanPlace, Value};
use baton_types::{Class, ErrorKind, Fault, FinishReason, RequestId, Usage, WorkerId};
use metrics::{Histogram, counter, gauge, histogram};
use tokio::time::Instant;

use crate::error::RequestError;
use crate::tenant::Tenant;

/// Shared by the choices of a request. It is dropped with the last of them; the drop writes the log line.
#[derive(Debug)]
pub(crate) struct Record {
    request_id: RequestId,
    tenant: Option<Arc<Tenant>>,
    received: Instant,
    /// Its place in a trace that a collector gets, if that is kept.
    span: Option<SpanPlace>,
    /// Unset: it is not known yet.
    class: OnceLock<Class>,
    first_token: OnceLock<Instant>,
    /// Tokens sent to the client.
    tokens: AtomicU32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Without its completion tokens.
    usage: Usage,
    workers: Vec<WorkerId>,
    recoveries: u32,
    failed: Option<RequestError>,
    cancelled: bool,
}

/// Measures the time between one choice's tokens.
pub(crate) struct TokenClock {
    last: Option<Instant>,
    latency: Histogram,
}

impl TokenClock {
    /// A clock for a choice that has had no token yet. It looks the metric up once, not at each token.
    pub fn new(class: &'static str) -> TokenClock {
        TokenClock { last: None, latency: histogram!(names::INTER_TOKEN_LATENCY, "class" => class) }
    }

    /// Records the time since the previous token, for one that came now.
    pub fn tick(&mut self, now: Instant) {
        if let Some(last) = self.last.replace(now) {
            self.latency.record((now - last).as_secs_f64());
        }
    }
}

impl Record {
    /// The record of a request that arrived at `received`.
    pub fn new(
        request_id: RequestId,
        tenant: Option<Arc<Tenant>>,
        received: Instant,
        span: Option<SpanPlace>,
    ) -> Record {
        gauge!(names::REQUESTS_IN_FLIGHT).increment(1);
        let (first_token, tokens) = (OnceLock::new(), AtomicU32::new(0));
        let class = OnceLock::new();
        Record { request_id, tenant, received, span, class, first_token, tokens, state: Mutex::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The request's id.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// When the request arrived.
    pub fn received(&self) -> Instant {
        self.received
    }

    /// Its place in a trace that a collector gets, if that is kept.
    pub fn span(&self) -> Option<SpanPlace> {
        self.span
    }

    /// The class of the request is this.
    pub fn class(&self, class: Class) {
        let _ = self.class.set(class);
    }

    /// The word for its class, for metrics.
    pub fn class_name(&self) -> &'static str {
        self.class.get().map_or("unknown", |class| class.as_str())
    }

    /// Counts it as refused before any work was done.
    pub fn rejected(&self, error: &RequestError) {
        rejected(error, self.class_name());
    }

    /// Counts a token that is sent to the client now. The first one is recorded as the TTFT.
    pub fn token(&self, now: Instant) {
        self.tokens.fetch_add(1, Ordering::Relaxed);
        if self.first_token.get().is_none() && self.first_token.set(now).is_ok() {
            histogram!(names::TIME_TO_FIRST_TOKEN, "class" => self.class_name())
                .record((now - self.received).as_secs_f64());
        }
    }

    /// Notes that work was started on a worker.
    pub fn worker(&self, worker: WorkerId) {
        let mut state = self.state();
        if !state.workers.contains(&worker) {
            state.workers.push(worker);
        }
    }

    /// Counts and logs the recovery from a failure.
    pub fn recovering(&self, leg: Leg, cause: &Failure) {
        self.state().recoveries += 1;
        counter!(names::RECOVERIES, "leg" => leg.as_str(), "cause" => cause.kind.as_str()).increment(1);
        tracing::warn!(request = %self.request_id, leg = leg.as_str(), cause = cause.message, "recovering");
    }

    /// Notes that a choice ended without an error, or that its client left.
    pub fn finished(&self, reason: FinishReason, usage: Usage) {
        let mut state = self.state();
        state.usage.prompt_tokens = state.usage.prompt_tokens.max(usage.prompt_tokens);
        state.usage.cached_tokens = state.usage.cached_tokens.max(usage.cached_tokens);
        state.cancelled |= reason == FinishReason::Cancelled;
    }

    /// Notes that a choice ended with an error. The request keeps its first error.
    pub fn failed(&self, error: &RequestError) {
        self.state().failed.get_or_insert_with(|| error.clone());
    }
}

/// Counts a request that was refused before any work was done.
pub(crate) fn rejected(error: &RequestError, class: &'static str) {
    counter!(names::REJECTED, "reason" => error.code.unwrap_or(error.kind.as_str()), "class" => class).increment(1);
}

impl Drop for Record {
    fn drop(&mut self) {
        gauge!(names::REQUESTS_IN_FLIGHT).decrement(1);
        let seconds = self.received.elapsed().as_secs_f64();
        histogram!(names::REQUEST_SECONDS).record(seconds);
        let class = self.class_name();
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let outcome = match &state.failed {
            Some(error) => error.kind.as_str(),
            None if state.cancelled => "cancelled",
            None => "ok",
        };
        counter!(names::REQUESTS, "outcome" => outcome).increment(1);
        let workers: Vec<String> = state.workers.iter().map(WorkerId::to_string).collect();
        let ttft = self.first_token.get().map(|at| (*at - self.received).as_secs_f64());
        let Usage { prompt_tokens, cached_tokens, .. } = state.usage;
        let completion_tokens = self.tokens.load(Ordering::Relaxed);
        if let Some(place) = self.span {
            let to = SystemTime::now();
            let mut about = vec![
                ("baton.request_id", Value::from(self.request_id.to_string())),
                ("baton.class", Value::from(class)),
                ("baton.outcome", Value::from(outcome)),
                ("baton.prompt_tokens", Value::from(i64::from(prompt_tokens))),
                ("baton.completion_tokens", Value::from(i64::from(completion_tokens))),
                ("baton.cached_tokens", Value::from(i64::from(cached_tokens))),
                ("baton.recoveries", Value::from(i64::from(state.recoveries))),
            ];
            about.extend(self.tenant.as_ref().map(|tenant| ("baton.tenant", Value::from(tenant.name().to_owned()))));
            let error = state.failed.as_ref().filter(|error| error.kind.fault() != Fault::Client);
            traces::end(Span {
                place,
                name: "request",
                kind: SpanKind::Server,
                from: to.checked_sub(self.received.elapsed()).unwrap_or(to),
                to,
                about,
                events: Vec::new(),
                error: error.map(ToString::to_string),
            });
        }
        tracing::info!(
            request = %self.request_id,
            trace = self.span.map(|span| span.trace_id()),
            tenant = self.tenant.as_ref().map(|tenant| tenant.name()),
            class,
            outcome,
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            ttft = ttft.map(|s| format!("{s:.3}s")),
            duration = format!("{seconds:.3}s"),
            workers = workers.join(","),
            recoveries = state.recoveries,
            "request"
        );
        match &state.failed {
            Some(error) if error.kind == ErrorKind::Internal => {
                tracing::error!(request = %self.request_id, %error, "request failed")
            }
            Some(error) if error.kind.fault() != Fault::Client => {
                tracing::warn!(request = %self.request_id, %error, "request failed")
            }
            Some(error) => tracing::debug!(request = %self.request_id, %error, "request refused"),
            None => {}
        }
    }
}
