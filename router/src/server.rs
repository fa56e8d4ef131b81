//! Puts the router together, starts it and shuts it down.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Json;
use axum::extract::Path;
use axum::http::StatusCode;
use axum::response::IntoResponse;
use baton_cluster::{EmbeddedRegistry, Registry, Restored, ViewReceiver};
use baton_model_text::fetch;
use baton_policy::{NameSecret, Patience, Slo};
use baton_proto::v1::DESCRIPTORS;
use baton_proto::v1::inference_server::InferenceServer;
use baton_runtime::tls::{HTTP2_BEGINNING, PublicTls, TlsRole, alpn};
use baton_runtime::{
    AdminRoutes, FetchConfig, Outcome, Process, Readiness, RuntimeError, Shutdown, Tasks, Tls, secret_in,
};
use tokio::net::TcpListener;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tonic::service::Routes;

use crate::config::{DefaultsKind, EMBEDDED, RouterConfig};
use crate::error::RouterError;
use crate::front::{Front, FrontLimits};
use crate::grpc::Inference;
use crate::http;
use crate::keys::KeyRing;
use crate::listener::Bounds;
use crate::model::ServedModel;
use crate::models::Models;
use crate::page::{self, Opened};
use crate::serving::{ListenerTls, Serving};
use crate::view_file;
use crate::watcher::{INFERENCE, Watcher};
use crate::worker::Shared;

/// Maximum size of a message to health or reflection, which need no key.
const SMALL: usize = 64 << 10;
const HEALTH: &str = "grpc.health.v1.Health";

/// The registry from which the router learns of its workers.
#[derive(Clone)]
pub enum RegistryChoice {
    /// In this process. Workers reach it at the router's internal address.
    Embedded(EmbeddedRegistry),
    /// In another process.
    Other(Arc<dyn Registry>),
}

impl RegistryChoice {
    /// Opens the registry that a configuration names.
    ///
    /// # Errors
    /// `spec` names no registry.
    pub async fn open(spec: &str, tls: Option<&Tls>) -> Result<RegistryChoice, RouterError> {
        Ok(match spec {
            EMBEDDED => RegistryChoice::Embedded(EmbeddedRegistry::new()),
            other => RegistryChoice::Other(baton_cluster::connect(other, tls).await?),
        })
    }

    fn watch(&self) -> ViewReceiver {
        match self {
            RegistryChoice::Embedded(registry) => registry.watch(),
            RegistryChoice::Other(registry) => registry.watch(),
        }
    }
}

/// A router that accepts requests.
pub struct RunningRouter {
    /// Where HTTP listens.
    pub http_addr: SocketAddr,
    /// Where gRPC listens.
    pub grpc_addr: SocketAddr,
    /// Where workers register, if the registry is embedded.
    pub internal_addr: Option<SocketAddr>,
    front: Arc<Front>,
}

impl std::fmt::Debug for RunningRouter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunningRouter").field("http_addr", &self.http_addr).finish_non_exhaustive()
    }
}

impl RunningRouter {
    /// The workers' state as JSON, as served by GET /cluster.
    pub fn cluster(&self) -> serde_json::Value {
        self.front.models.describe()
    }
}

/// Runs a router as a process of its own until it is told to stop.
///
/// # Errors
/// A bad configuration, a model that cannot be opened, an address that is taken.
pub async fn run(config: RouterConfig) -> Result<Outcome, RouterError> {
    let opened: Opened = Arc::default();
    let guarded = cluster_page(Arc::clone(&opened)).merge(page::routes(&opened, &config));
    let routes = AdminRoutes { guarded, ..AdminRoutes::default() };
    let process = Process::start("router", &config.process, routes).await?;
    process.shutdown.outlive_hangups()?;
    let mut bound = Bound::listen(&config).await?;
    if config.keys_file.is_some() {
        bound.hangups = Some(signal(SignalKind::hangup()).map_err(RuntimeError::Signals)?);
    }
    let registry = RegistryChoice::open(&config.registry, bound.tls.as_ref()).await?;
    let settings = config.clone();
    let opening = tokio::task::spawn_blocking(move || open_models(&settings));
    let models = tokio::select! {
        opened = opening => opened.map_err(|e| RouterError::Interrupted(e.to_string()))??,
        // Told to stop while the model is fetched: nothing to drain.
        () = process.shutdown.draining() => return Ok(Outcome::Clean),
    };
    for model in &models {
        tracing::info!(model = model.id(), context = model.context_tokens(), "model opened");
    }
    let Process { shutdown, tasks, readiness, .. } = &process;
    let router = bound.start(&config, models, registry, shutdown.clone(), tasks, readiness.clone())?;
    let _ = opened.set(Arc::clone(&router.front));
    let internal = router.internal_addr.map(tracing::field::display);
    tracing::info!(http = %router.http_addr, grpc = %router.grpc_addr, internal, admin = %process.admin_addr(), "serving");
    Ok(process.join().await)
}

/// Starts a router inside this process: its tasks end with `shutdown`, and `readiness` follows its workers.
///
/// # Errors
/// An address that is taken.
pub async fn start(
    config: &RouterConfig,
    models: impl IntoIterator<Item = ServedModel>,
    registry: RegistryChoice,
    shutdown: Shutdown,
    tasks: &Tasks,
    readiness: Readiness,
) -> Result<RunningRouter, RouterError> {
    Bound::listen(config).await?.start(config, models, registry, shutdown, tasks, readiness)
}

/// Finds the models, fetches the files that are missing, and opens everything but the weights.
fn open_models(config: &RouterConfig) -> Result<Vec<ServedModel>, RouterError> {
    let FetchConfig { model_cache, hub_endpoint, hub_token_file, model_peers } = config.fetch.clone();
    let source =
        fetch::Source::new(model_cache, hub_endpoint, hub_token_file.as_deref())?.with_peers(model_peers.as_deref())?;
    let names = config.served_name.as_deref().unwrap_or_default();
    // Models without names of their own have their default names.
    let names = names.split(';').chain(std::iter::repeat(""));
    let specs = config.model.split(',').map(str::trim).filter(|spec| !spec.is_empty());
    let open = |(spec, names): (&str, &str)| {
        let model = source.open_text(spec, &Logged)?;
        let mut names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        let id = model.served_name(spec, names.next());
        let model = ServedModel::new(model, id).with_aliases(names.map(str::to_owned));
        let model = model.with_token_cache(config.token_cache);
        Ok(match config.sampling_defaults {
            DefaultsKind::Model => model,
            DefaultsKind::Api => model.with_api_defaults(),
        })
    };
    specs.zip(names).map(open).collect()
}

/// Logs a fetch. Workers on the same host fetch into the same cache, so only the end is logged above debug level.
struct Logged;

impl fetch::Progress for Logged {
    fn update(&self, what: &str, done: u64, total: Option<u64>) {
        tracing::debug!(what, done, total, "fetching");
    }

    fn finish(&self, what: &str) {
        tracing::info!(what, "fetched");
    }
}

/// GET /cluster and /placements/REQUEST-ID at the admin endpoint, which starts before the router does.
fn cluster_page(router: Opened) -> axum::Router {
    let starting = || (StatusCode::SERVICE_UNAVAILABLE, "starting\n").into_response();
    let known = Arc::clone(&router);
    let page =
        move || async move { known.get().map_or_else(starting, |front| Json(front.models.describe()).into_response()) };
    let explain = move |Path(id): Path<String>| async move {
        let Some(front) = router.get() else { return starting() };
        match front.models.explain(&id, None) {
            placements if placements.is_empty() => {
                let unknown = format!("no placement of request {id:?} is known here: the latest are, of this router\n");
                (StatusCode::NOT_FOUND, unknown).into_response()
            }
            placements => Json(placements).into_response(),
        }
    };
    axum::Router::new()
        .route("/cluster", axum::routing::get(page))
        .route("/placements/{id}", axum::routing::get(explain))
}

/// All listeners, opened before anything slow happens.
struct Bound {
    http: TcpListener,
    grpc: TcpListener,
    /// None where the registry is in another process.
    internal: Option<TcpListener>,
    /// For the connections between processes of the cluster.
    tls: Option<Tls>,
    /// For clients.
    public: Option<PublicTls>,
    keys: Option<Arc<KeyRing>>,
    secret: NameSecret,
    /// SIGHUP, of a process that is only a router.
    hangups: Option<Signal>,
}

impl Bound {
    async fn listen(config: &RouterConfig) -> Result<Bound, RouterError> {
        config.check()?;
        let tls = Tls::open(&config.internal_tls)?;
        let (cert, key) = (&config.public_tls_cert, &config.public_tls_key);
        let public = PublicTls::open(("public_tls_cert", cert), ("public_tls_key", key))?;
        let keys =
            config.keys_file.as_deref().map(|path| KeyRing::open(path, config.predicts())).transpose()?.map(Arc::new);
        let secret = config.kv_secret_file.as_deref().map(|path| secret_in("kv_secret_file", path)).transpose()?;
        let secret = secret.map(|secret| NameSecret::of(&secret)).unwrap_or_default();
        let http = baton_runtime::listen(config.http, "--http").await?;
        let grpc = baton_runtime::listen(config.grpc, "--grpc").await?;
        let internal = match config.registry.as_str() {
            EMBEDDED => Some(baton_runtime::listen(config.internal, "--internal").await?),
            _ => None,
        };
        Ok(Bound { http, grpc, internal, tls, public, keys, secret, hangups: None })
    }

    /// What the listeners speak.
    fn listeners(&self) -> ListenerTls {
        let public = |protocol| self.public.as_ref().map(|public| public.server(&[protocol]));
        let grpc = public(alpn::HTTP2).map(|server| server.beginning_with(HTTP2_BEGINNING));
        let peers = [TlsRole::Prefill, TlsRole::Decode, TlsRole::Router, TlsRole::Operator];
        let internal = self.tls.as_ref().map(|tls| tls.server(peers, &[alpn::HTTP2]).beginning_with(HTTP2_BEGINNING));
        ListenerTls { http: public(alpn::HTTP1), grpc, internal }
    }

    fn start(
        self,
        config: &RouterConfig,
        models: impl IntoIterator<Item = ServedModel>,
        registry: RegistryChoice,
        shutdown: Shutdown,
        tasks: &Tasks,
        readiness: Readiness,
    ) -> Result<RunningRouter, RouterError> {
        let shared = Shared { tls: self.tls.as_ref(), secret: self.secret };
        let models = Arc::new(Models::new(models, config, shared)?);
        let limits = FrontLimits {
            request_timeout: config.request_timeout,
            max_attempts: config.max_attempts,
            worker_wait: config.worker_wait,
            patience: Patience { first_token: config.first_token_timeout, token: config.token_timeout },
            slo: Slo { first_token: config.reject_ttft, token: config.reject_itl, ..Slo::default() },
            predicts: config.predicts(),
            max_inflight: config.max_inflight,
            body_limit: usize::try_from(config.body_limit.0).unwrap_or(usize::MAX),
            body_memory: config.body_memory,
            keep_alive: config.keep_alive,
            send_timeout: config.send_timeout,
        };
        let tls = self.listeners();
        if let Some(public) = self.public.clone() {
            tasks.spawn("public certificates", public.watch(shutdown.clone()));
        }
        if let Some(internal) = self.tls.clone() {
            tasks.spawn("certificates", internal.watch(shutdown.clone()));
        }
        let keys = self.keys;
        if let Some(keys) = &keys {
            tasks.spawn("API keys", Arc::clone(keys).watch(self.hangups, shutdown.clone()));
        }
        let front = Arc::new(Front::new(Arc::clone(&models), shutdown.clone(), limits, keys));
        let (health, health_service) = tonic_health::server::health_reporter();
        let mut routes = Routes::builder();
        routes.add_service(health_service.max_decoding_message_size(SMALL));
        let reflection = || {
            tonic_reflection::server::Builder::configure()
                .register_encoded_file_descriptor_set(DESCRIPTORS)
                .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
                // What is served here; the descriptors have the internal services, too.
                .with_service_name(INFERENCE)
                .with_service_name(HEALTH)
        };
        // Reflection clients speak v1 or v1alpha.
        let (v1, v1alpha) = (reflection().build_v1()?, reflection().build_v1alpha()?);
        routes.add_service(v1.max_decoding_message_size(SMALL));
        routes.add_service(v1alpha.max_decoding_message_size(SMALL));
        let inference = InferenceServer::new(Inference::new(Arc::clone(&front)));
        routes.add_service(inference.max_decoding_message_size(limits.body_limit));
        if let (RegistryChoice::Embedded(registry), true) = (&registry, config.registry_on_grpc) {
            tracing::warn!(
                "--registry-on-grpc: every client of the gRPC API can register a worker and so receive prompts"
            );
            routes.add_service(registry.service());
        }
        let bounds = Bounds::new(config.max_connections, config.idle_timeout, config.send_timeout);
        let app = http::routes(Arc::clone(&front));
        let address = |listener: &TcpListener, asked| listener.local_addr().unwrap_or(asked);
        let running = RunningRouter {
            http_addr: address(&self.http, config.http),
            grpc_addr: address(&self.grpc, config.grpc),
            internal_addr: self.internal.as_ref().map(|listener| address(listener, config.internal)),
            front: Arc::clone(&front),
        };
        let saved = config.view_file.as_deref().map(view_file::read).unwrap_or_default();
        let seen = watch::Sender::default();
        if let Some(path) = &config.view_file {
            tasks.spawn("view file", view_file::keep(path.clone(), seen.subscribe()));
        }
        let watcher = Watcher { models, readiness, health, shutdown: shutdown.clone(), seen };
        tasks.spawn("view", watcher.run(registry.watch(), Restored::new(saved)));
        let serving = Serving { bounds, front, shutdown, tls };
        tasks.spawn("http", serving.clone().http(self.http, app));
        tasks.spawn("grpc", serving.clone().grpc(self.grpc, routes.routes(), config.connection_age));
        if let (Some(listener), RegistryChoice::Embedded(registry)) = (self.internal, registry) {
            tasks.spawn("internal", serving.internal(listener, registry));
        }
        Ok(running)
    }
}
