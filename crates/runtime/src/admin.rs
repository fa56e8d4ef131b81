//! The HTTP endpoint that every process has besides its own service: health, readiness, metrics.
//!
//! It stays up during a drain, so that orchestrators see "not ready: draining" instead of a refused connection.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Duration, MissedTickBehavior, interval};

use crate::error::RuntimeError;
use crate::metrics::MetricsHandle;
use crate::shutdown::Shutdown;

const UPKEEP: Duration = Duration::from_secs(5);

/// Whether this process can take work, and if not, why. Clones share it.
#[derive(Clone, Debug)]
pub struct Readiness(watch::Sender<Option<String>>);

impl Readiness {
    /// Not ready, for this reason.
    pub fn new(reason: impl Into<String>) -> Readiness {
        Readiness(watch::Sender::new(Some(reason.into())))
    }

    /// Ready from now on.
    pub fn ready(&self) {
        self.0.send_replace(None);
    }

    /// Not ready from now on.
    pub fn not_ready(&self, reason: impl Into<String>) {
        self.0.send_replace(Some(reason.into()));
    }

    /// Why it is not ready; `None` when it is.
    pub fn reason(&self) -> Option<String> {
        self.0.borrow().clone()
    }

    /// Completes when ready.
    pub async fn wait(&self) {
        // `self` holds a sender, so the channel cannot close.
        let _ = self.0.subscribe().wait_for(Option::is_none).await;
    }
}

/// Listens on `addr`. The error tells the user to change `flag` (with its dashes).
pub async fn listen(addr: SocketAddr, flag: &str) -> Result<TcpListener, RuntimeError> {
    TcpListener::bind(addr).await.map_err(|source| RuntimeError::Listen { addr, flag: flag.to_owned(), source })
}

/// A running admin endpoint. It ends when this is dropped.
#[derive(Debug)]
pub struct AdminServer {
    addr: SocketAddr,
    tasks: [JoinHandle<()>; 2],
}

#[derive(Clone)]
struct AdminState {
    readiness: Readiness,
    metrics: MetricsHandle,
    shutdown: Shutdown,
}

impl AdminServer {
    /// Serves `/health`, `/ready`, `/metrics` and the routes of `extra` on `addr`. `extra` must not have those three. Port 0
    /// takes a free one.
    pub async fn start(
        addr: SocketAddr,
        readiness: Readiness,
        metrics: MetricsHandle,
        shutdown: Shutdown,
        extra: Router,
    ) -> Result<AdminServer, RuntimeError> {
        let listener = listen(addr, "--admin").await?;
        let addr = listener.local_addr().unwrap_or(addr);
        let upkeep = tokio::spawn(upkeep(metrics.clone()));
        let router = Router::new()
            .route("/health", get(|| async { "alive\n" }))
            .route("/ready", get(ready))
            .route("/metrics", get(render))
            .with_state(AdminState { readiness, metrics, shutdown })
            .merge(extra);
        let server = tokio::spawn(async move {
            if let Err(error) = axum::serve(listener, router).await {
                tracing::error!(%error, "the admin endpoint ended");
            }
        });
        Ok(AdminServer { addr, tasks: [server, upkeep] })
    }

    /// The address it listens on.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for AdminServer {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn ready(State(state): State<AdminState>) -> Response {
    let draining = state.shutdown.is_draining().then(|| "draining".to_owned());
    match draining.or_else(|| state.readiness.reason()) {
        None => "ready\n".into_response(),
        Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")).into_response(),
    }
}

async fn render(State(state): State<AdminState>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], state.metrics.render()).into_response()
}

async fn upkeep(metrics: MetricsHandle) {
    let mut tick = interval(UPKEEP);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tick.tick().await;
        metrics.upkeep();
    }
}
