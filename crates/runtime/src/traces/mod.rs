//! Traces: one request's way through all processes, sent to a collector by OTLP.
//!
//! A process makes a span of what it did for a request once that is over, with its own times, and hands it to a queue of bounded length that
//! a thread empties (I5). Nothing waits for the collector: what it does not take is lost, which is logged. Without an endpoint nothing is
//! recorded, and [`begin`] and [`continued`] cost one read of a variable.

mod place;
mod settings;

use std::borrow::Cow;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use baton_types::random_u64;
use opentelemetry::trace::{Event, SpanContext, SpanId, Status, TraceFlags, TraceId, TraceState};
use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::{SpanExporter, WithExportConfig, WithTonicConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanLinks, SpanProcessor,
};
use tonic::transport::Endpoint;

use crate::error::RuntimeError;
use place::Caller;
pub use place::SpanPlace;
pub use settings::{OtlpEndpoint, Share};

pub use opentelemetry::Value;
pub use opentelemetry::trace::SpanKind;

/// The longest wait for the collector: to connect, for a batch, and at the end of the process.
const PATIENCE: Duration = Duration::from_secs(5);
/// A connection on which nothing comes for so long is asked whether it still is one.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Spans that wait, and how many of them go together, and how long one waits at most.
const QUEUE: usize = 2048;
const BATCH: usize = 512;
const EVERY: Duration = Duration::from_secs(5);

static TRACER: OnceLock<Tracer> = OnceLock::new();

struct Tracer {
    spans: BatchSpanProcessor,
    scope: InstrumentationScope,
    share: f64,
}

/// What is known of something: names and values.
pub type About = Vec<(&'static str, Value)>;

/// Something a process did for a request. It is over.
#[derive(Debug)]
pub struct Span {
    /// Where it belongs.
    pub place: SpanPlace,
    /// What was done; one of few names.
    pub name: &'static str,
    /// Whether it answers a caller, waits for another process, or neither.
    pub kind: SpanKind,
    /// When it began.
    pub from: SystemTime,
    /// When it was over.
    pub to: SystemTime,
    /// What is known of it.
    pub about: About,
    /// What happened in it, and when.
    pub events: Vec<(SystemTime, &'static str, About)>,
    /// Why it failed.
    pub error: Option<String>,
}

/// Sends spans of this process, whose role is `role`, to the collector at `endpoint`: of all requests whose callers keep theirs, and of a
/// `share` of those whose callers say nothing. Changes nothing when this process does so already.
///
/// # Errors
/// The endpoint cannot be used.
pub(crate) fn init(role: &'static str, endpoint: &OtlpEndpoint, share: Share) -> Result<(), RuntimeError> {
    let refused = |why: &dyn std::fmt::Display| RuntimeError::Otlp(endpoint.to_string(), why.to_string());
    let channel = Endpoint::from_shared(endpoint.0.clone()).map_err(|e| refused(&e))?;
    let channel = channel.connect_timeout(PATIENCE).timeout(PATIENCE).http2_keep_alive_interval(KEEP_ALIVE);
    let channel = channel.keep_alive_timeout(PATIENCE).connect_lazy();
    let exporter = SpanExporter::builder().with_tonic().with_channel(channel).with_timeout(PATIENCE).build();
    let exporter = exporter.map_err(|e| refused(&e))?;
    let queue = BatchConfigBuilder::default().with_max_queue_size(QUEUE).with_max_export_batch_size(BATCH);
    let queue = queue.with_scheduled_delay(EVERY).build();
    let exporter = Reporting { exporter, endpoint: endpoint.clone(), fails: AtomicBool::default() };
    let mut spans = BatchSpanProcessor::builder(exporter).with_batch_config(queue).build();
    let about = [
        KeyValue::new("service.namespace", "baton"),
        KeyValue::new("service.instance.id", format!("{role}-{:016x}", random_u64())),
        KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
    ];
    spans.set_resource(&Resource::builder().with_service_name(format!("baton-{role}")).with_attributes(about).build());
    let scope = InstrumentationScope::builder("baton").build();
    let _ = TRACER.set(Tracer { spans, scope, share: share.0 });
    Ok(())
}

/// Sends what is left, for 5 seconds at most. Blocks.
pub(crate) fn flush() {
    if let Some(tracer) = TRACER.get() {
        // What fails was logged.
        let _ = tracer.spans.shutdown_with_timeout(PATIENCE);
    }
}

/// The place of a client's request, if a trace of it is to be kept: as its caller says in the header `traceparent`, or else by lot.
pub fn begin(traceparent: Option<&str>) -> Option<SpanPlace> {
    let tracer = TRACER.get()?;
    match traceparent.and_then(Caller::read) {
        Some(caller) => caller.sampled.then(|| caller.child()),
        None => drawn(tracer.share, random_u64()).then(SpanPlace::first),
    }
}

/// The place of what another process of the cluster asks for, if it keeps a trace of that.
pub fn continued(traceparent: Option<&str>) -> Option<SpanPlace> {
    TRACER.get()?;
    let caller = traceparent.and_then(Caller::read)?;
    caller.sampled.then(|| caller.child())
}

/// Whether a random number is among a share of all numbers.
fn drawn(share: f64, random: u64) -> bool {
    (random >> 11) as f64 / (1u64 << 53) as f64 <= share && share > 0.0
}

/// Hands over a span. If the queue is full, it is lost.
pub fn end(span: Span) {
    if let Some(tracer) = TRACER.get() {
        tracer.spans.on_end(data(span, &tracer.scope));
    }
}

fn data(span: Span, scope: &InstrumentationScope) -> SpanData {
    let Span { place, name, kind, from, to, about, events, error } = span;
    let known =
        |about: About| -> Vec<KeyValue> { about.into_iter().map(|(key, value)| KeyValue::new(key, value)).collect() };
    let (trace, span) = (TraceId::from_bytes(place.trace.to_be_bytes()), SpanId::from_bytes(place.span.to_be_bytes()));
    let mut told = SpanEvents::default();
    told.events = events.into_iter().map(|(at, what, about)| Event::new(what, at, known(about), 0)).collect();
    SpanData {
        span_context: SpanContext::new(trace, span, TraceFlags::SAMPLED, false, TraceState::default()),
        parent_span_id: SpanId::from_bytes(place.parent.to_be_bytes()),
        parent_span_is_remote: place.remote,
        span_kind: kind,
        name: Cow::Borrowed(name),
        start_time: from,
        end_time: to.max(from),
        attributes: known(about),
        dropped_attributes_count: 0,
        events: told,
        links: SpanLinks::default(),
        status: error.map_or(Status::Unset, Status::error),
        instrumentation_scope: scope.clone(),
    }
}

/// Logs when spans begin to be lost, and when they arrive again.
#[derive(Debug)]
struct Reporting {
    exporter: SpanExporter,
    endpoint: OtlpEndpoint,
    fails: AtomicBool,
}

impl opentelemetry_sdk::trace::SpanExporter for Reporting {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let sent = self.exporter.export(batch).await;
        let failed = self.fails.swap(sent.is_err(), Ordering::Relaxed);
        match &sent {
            Err(error) if !failed => {
                tracing::warn!(endpoint = %self.endpoint, %error, "traces are lost: the collector does not take them (--otlp-endpoint)");
            }
            Ok(()) if failed => tracing::info!(endpoint = %self.endpoint, "the collector takes traces again"),
            _ => {}
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.exporter.shutdown_with_timeout(timeout)
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.exporter.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_requests_a_share_is_traced() {
        let of = |share| (0..1000u64).filter(|at| drawn(share, at << 54)).count();
        assert_eq!((of(0.0), of(1.0)), (0, 1000));
        assert!((240..260).contains(&of(0.25)), "{}", of(0.25));
        assert!(drawn(1.0, u64::MAX) && !drawn(0.0, 0));
    }

    #[test]
    fn a_span_keeps_its_place_and_its_times() {
        let (place, now) = (SpanPlace::first().child(), SystemTime::now());
        let about = vec![("baton.request_id", Value::from("r"))];
        let events = vec![(now, "token", vec![("n", Value::from(3i64))])];
        let (from, to, error) = (now, now - Duration::from_secs(1), Some("gone".to_owned()));
        let span = Span { place, name: "decode", kind: SpanKind::Client, from, to, about, events, error };
        let data = data(span, &InstrumentationScope::default());
        assert_eq!(data.span_context.trace_id().to_string(), place.trace_id());
        assert_eq!(data.parent_span_id.to_string(), format!("{:016x}", place.parent));
        assert_eq!((data.start_time, data.end_time), (now, now), "a clock that was set back");
        assert_eq!((data.attributes.len(), data.events.len(), data.status), (1, 1, Status::error("gone")));
    }

    #[test]
    fn without_an_endpoint_nothing_is_traced() {
        let caller = SpanPlace::first().traceparent();
        assert_eq!((begin(Some(&caller)), begin(None), continued(Some(&caller))), (None, None, None));
    }
}
