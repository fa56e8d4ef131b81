//! A collector of traces for tests: it takes OTLP over gRPC, as a real one does, and keeps all spans.
//!
//! With `BATON_TEST_COLLECTOR`, the path of a real collector, that one takes the spans, and passes them on to this one.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::net::SocketAddr;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, PoisonError};

use opentelemetry_proto::tonic::collector::trace::v1::trace_service_server::{TraceService, TraceServiceServer};
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::{KeyValue, any_value};
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use crate::cluster::wait;

/// A span as it arrived.
#[derive(Clone, Debug)]
pub struct Span {
    /// Hexadecimal, as all ids here.
    pub trace: String,
    /// Its own.
    pub id: String,
    /// Empty: none.
    pub parent: String,
    /// Of the process.
    pub service: String,
    /// What was done.
    pub name: String,
    /// Nanoseconds since 1970.
    pub from: u64,
    /// The same.
    pub to: u64,
    /// Its attributes.
    pub about: BTreeMap<String, String>,
    /// Names.
    pub events: Vec<String>,
    /// Why it failed.
    pub error: Option<String>,
}

#[derive(Clone, Default)]
struct Kept(Arc<Mutex<Vec<Span>>>);

/// A running collector.
pub struct Collector {
    address: SocketAddr,
    kept: Kept,
    _server: JoinHandle<()>,
    real: Option<Real>,
}

/// A real collector, between the processes and this one.
struct Real {
    address: SocketAddr,
    process: Child,
    _folder: TempDir,
}

impl Real {
    /// Starts the program, which passes on to `address`.
    fn start(program: &OsStr, address: SocketAddr) -> anyhow::Result<Real> {
        let folder = tempfile::tempdir()?;
        let own = std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?;
        let settings = folder.path().join("collector.yaml");
        let text = format!(
            "receivers: {{otlp: {{protocols: {{grpc: {{endpoint: '{own}'}}}}}}}}\n\
             processors: {{batch: {{timeout: 100ms}}}}\n\
             exporters: {{otlp: {{endpoint: '{address}', tls: {{insecure: true}}, compression: none}}}}\n\
             service:\n  telemetry: {{metrics: {{level: none}}}}\n  \
             pipelines: {{traces: {{receivers: [otlp], processors: [batch], exporters: [otlp]}}}}\n"
        );
        std::fs::write(&settings, text)?;
        let process = Command::new(program).arg("--config").arg(&settings).spawn()?;
        wait(|| std::net::TcpStream::connect(own).ok())?;
        Ok(Real { address: own, process, _folder: folder })
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Collector {
    /// Listens on a free port.
    pub async fn start() -> anyhow::Result<Collector> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let (address, kept) = (listener.local_addr()?, Kept::default());
        let service = TraceServiceServer::new(kept.clone());
        let server = tonic::transport::Server::builder().add_service(service);
        let server = server.serve_with_incoming(TcpIncoming::from(listener));
        let server = tokio::spawn(async move { server.await.expect("the collector serves") });
        let real = std::env::var_os("BATON_TEST_COLLECTOR");
        let real = real.map(|program| Real::start(&program, address)).transpose()?;
        Ok(Collector { address, kept, _server: server, real })
    }

    /// The value of `--otlp-endpoint`.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.real.as_ref().map_or(self.address, |real| real.address))
    }

    /// All spans so far.
    pub fn spans(&self) -> Vec<Span> {
        self.kept.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The spans of a trace, once they are as wished.
    pub fn trace(&self, trace: &str, wish: impl Fn(&[Span]) -> bool) -> anyhow::Result<Vec<Span>> {
        let of = || self.spans().into_iter().filter(|span| span.trace == trace).collect::<Vec<_>>();
        wait(|| Some(of()).filter(|spans| wish(spans))).map_err(|e| e.context(format!("{:#?}", of())))
    }
}

#[tonic::async_trait]
impl TraceService for Kept {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for of_process in request.into_inner().resource_spans {
            let process = texts(of_process.resource.map(|resource| resource.attributes).unwrap_or_default());
            let service = process.get("service.name").cloned().unwrap_or_default();
            for span in of_process.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                let failed = span.status.filter(|status| status.code == 2);
                kept.push(Span {
                    trace: hex(&span.trace_id),
                    id: hex(&span.span_id),
                    parent: hex(&span.parent_span_id),
                    service: service.clone(),
                    name: span.name,
                    from: span.start_time_unix_nano,
                    to: span.end_time_unix_nano,
                    about: texts(span.attributes),
                    events: span.events.into_iter().map(|event| event.name).collect(),
                    error: failed.map(|status| status.message),
                });
            }
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn texts(about: Vec<KeyValue>) -> BTreeMap<String, String> {
    let text = |value: any_value::Value| match value {
        any_value::Value::StringValue(text) => text,
        any_value::Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    };
    let pair = |pair: KeyValue| Some((pair.key, text(pair.value?.value?)));
    about.into_iter().filter_map(pair).collect()
}
