//! Sets up what every component needs, in the right order: logs, metrics, admin endpoint, signals, tasks.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::admin::{AdminRoutes, AdminServer, Readiness};
use crate::error::RuntimeError;
use crate::files;
use crate::shutdown::{Outcome, Shutdown};
use crate::tasks::Tasks;
use crate::telemetry::{self, LogFilter, LogFormat};
use crate::traces::{self, OtlpEndpoint, Share};

crate::config! {
    /// Settings of every process.
    pub struct ProcessConfig {
        /// What is logged: a level (error, warn, info, debug, trace), or levels by module such as info,baton_router=debug.
        log: LogFilter = LogFilter::default(),
        /// How log lines look: text or json.
        log_format: LogFormat = LogFormat::Text,
        /// Address of the admin endpoint (/health, /ready, /metrics); port 0 takes a free one.
        admin: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// File with the token that admin pages other than /health, /ready and /metrics need, sent as Authorization: Bearer TOKEN. It is
        /// read for each request. Without it, these pages are served only if the admin address is this machine's own.
        admin_token_file: Option<PathBuf> = None,
        /// Where traces go: a collector that takes OTLP over gRPC, such as http://127.0.0.1:4317. Without it, nothing is traced.
        otlp_endpoint: Option<OtlpEndpoint> = None,
        /// Which share of requests is traced, 0 to 1, of those whose callers do not say so themselves in the header traceparent.
        otlp_sample: Share = Share::ALL,
        /// How long running requests may take to finish once the process is told to stop.
        drain_timeout: Duration = Duration::from_secs(30),
    }
}

crate::config! {
    /// Settings of every process that opens a model.
    pub struct FetchConfig {
        /// Folder for fetched models; default: baton/models in the user's cache folder.
        model_cache: Option<PathBuf> = None,
        /// Base URL of the hub from which org/name is fetched, for example a mirror; default: the public hub.
        hub_endpoint: Option<String> = None,
        /// File that holds the hub's access token, for models that need one.
        hub_token_file: Option<PathBuf> = None,
        /// Workers that may have the model already (--share-models): http://HOST:PORT of their admin endpoints, with commas. Large files of a hub's
        /// model come from there if they can, and are checked against the digests that the hub tells; default: none.
        model_peers: Option<String> = None,
    }
}

/// The shared parts of a running process.
#[derive(Debug)]
pub struct Process {
    /// Ends the process.
    pub shutdown: Shutdown,
    /// The process's background tasks.
    pub tasks: Tasks,
    /// Starts as "starting"; the component says when it is ready.
    pub readiness: Readiness,
    admin: AdminServer,
}

impl Process {
    /// Starts logging, metrics, signal handling and the admin endpoint with the additional `routes`.
    pub async fn start(
        role: &'static str,
        config: &ProcessConfig,
        routes: AdminRoutes,
    ) -> Result<Process, RuntimeError> {
        telemetry::init(role, &config.log, config.log_format);
        files::allow_all();
        files::make_room();
        if let Some(endpoint) = &config.otlp_endpoint {
            traces::init(role, endpoint, config.otlp_sample)?;
        }
        let metrics = crate::metrics::install()?;
        let shutdown = Shutdown::new(config.drain_timeout);
        shutdown.listen_for_signals()?;
        let readiness = Readiness::new("starting");
        let token = config.admin_token_file.clone();
        let admin =
            AdminServer::start(config.admin, token, readiness.clone(), metrics, shutdown.clone(), routes).await?;
        let tasks = Tasks::new(shutdown.clone());
        Ok(Process { shutdown, tasks, readiness, admin })
    }

    /// Where the admin endpoint listens.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.addr()
    }

    /// Waits for the drain to start and to end; the admin endpoint answers until then.
    pub async fn join(self) -> Outcome {
        let outcome = self.tasks.join().await;
        // A thread that panicked has lost its spans.
        let _ = tokio::task::spawn_blocking(traces::flush).await;
        match &outcome {
            Outcome::Clean => tracing::info!("stopped"),
            Outcome::Cut(names) => tracing::warn!(tasks = names.join(", "), "stopped before these tasks had finished"),
        }
        outcome
    }
}
