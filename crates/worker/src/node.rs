//! A worker process from start to end: load, listen, register, serve, drain.

use std::sync::Arc;
use std::time::Duration;

use baton_cluster::{Member, Role};
use baton_engine::{Engine, EngineConfig, Exchange, NameSecret, NewSequence, Start};
use baton_grammar::Grammars;
use baton_proto::OnlyFor;
use baton_proto::v1::{self, DESCRIPTORS, exchange_server::ExchangeServer, worker_server::WorkerServer};
use baton_roles::WorkerCore;
use baton_runtime::metrics as names;
use baton_runtime::tls::{TlsRole, alpn};
use baton_runtime::{AdminRoutes, Outcome, Process, Tls, secret_in};
use baton_types::{Courtesy, Decoding, WorkerId, random_u64};
use metrics::gauge;
use tokio::sync::watch;
use tonic::Status;
use tonic::service::{InterceptorLayer, Routes};

use crate::achieved::Achieved;
use crate::columns::{self, Columns};
use crate::courtesy::courtesy;
use crate::door;
use crate::ends::KvEnds;
use crate::engine_thread::Shells;
use crate::exchange::ExchangeShell;
use crate::exchange_service::ExchangeService;
use crate::gpus;
use crate::load::{Ready, load};
use crate::news::WorkerNews;
use crate::report::Told;
use crate::serving::Serving;
use crate::settings::check_settings;
use crate::sharing;
use crate::signals::{self, Limits};
use crate::tiers::{self, TiersShell};
use crate::wire::Fit;
use crate::{Commands, EngineHandle, Shell, WorkerConfig, WorkerError, WorkerService, engine_thread};

/// Most open HTTP/2 streams per connection (I5).
const MAX_STREAMS: u32 = 4096;

/// What differs between the roles' nodes.
pub trait NodeRole: Sized {
    /// The shell around its core on the engine thread.
    type Shell: Shell;
    /// Its role in the cluster's membership.
    const ROLE: Role;
    /// Prefixes that it fetches go to the tiers below its pool, too. Otherwise what the prompts after them leave does.
    const OFFERS_FETCHED: bool = false;
    /// Makes the role for the core.
    fn role(node: &Node) -> <Self::Shell as Shell>::Role;
    /// Makes the shell.
    fn shell(
        node: &Node,
        commands: Commands<<Self::Shell as Shell>::Command>,
        ends: &Arc<KvEnds>,
    ) -> Result<Self::Shell, WorkerError>;
    /// Adds its gRPC service and returns the service's name.
    fn routes(
        node: Node,
        handle: EngineHandle<<Self::Shell as Shell>::Command>,
        ends: Arc<KvEnds>,
        routes: &mut tonic::service::RoutesBuilder,
    ) -> Result<&'static str, WorkerError>;
}

/// What the parts of a worker share.
#[derive(Clone)]
pub struct Node {
    /// Its settings.
    pub config: WorkerConfig,
    /// The id of this worker process.
    pub id: WorkerId,
    /// Token ids are below this.
    pub vocab: u32,
    /// The pool's shape.
    pub geometry: baton_types::PoolGeometry,
    /// The pool's memory.
    pub pool: baton_transfer::Pool,
    /// Gives engine time.
    pub clock: crate::Clock,
    /// Compiled constraints. They are compiled before the engine thread needs them.
    pub grammars: Arc<Grammars>,
    /// For all connections between processes of the cluster.
    pub tls: Option<Tls>,
    /// From which the names of its blocks follow.
    pub secret: NameSecret,
    /// When threads that copy KV give way to its steps.
    pub courtesy: Courtesy,
}

/// A random id, never 0.
pub fn random_worker_id() -> WorkerId {
    WorkerId(random_u64().max(1))
}

impl Node {
    /// TLS for transfers, where this worker has certificates. Either role may send and receive KV.
    pub fn transfer_tls(&self) -> Option<baton_transfer::Tls> {
        let tls = self.tls.as_ref()?;
        let workers = [TlsRole::Prefill, TlsRole::Decode];
        let (client, server) = (tls.client(workers, &[]).config(), tls.server(workers, &[]).config());
        Some(baton_transfer::Tls::new(client, server, tls.is_permissive()))
    }

    /// Checks a sequence from the router. Compiles its constraint, if it has one, on a blocking thread.
    pub async fn new_sequence(&self, sequence: v1::Sequence, start: Start) -> Result<NewSequence, Status> {
        let mut new = crate::wire::new_sequence(sequence, self.fit(), start, self.clock.now())?;
        if let Some(constraint) = new.params.constraint.clone() {
            let grammars = Arc::clone(&self.grammars);
            let prepared = tokio::task::spawn_blocking(move || grammars.prepare(&constraint)).await;
            let prepared = prepared.map_err(|e| Status::internal(format!("compiling a constraint failed: {e}")))?;
            new.params.constraint = Some(prepared.map_err(|e| baton_proto::status_of(&e))?);
        }
        Ok(new)
    }

    /// Whether it exchanges prefixes with others: it keeps some, and others get to where KV comes in as they get to its gRPC server.
    fn exchanges(&self, limits: EngineConfig) -> bool {
        let local = |address: std::net::SocketAddr| address.ip().is_loopback();
        limits.cache.max_blocks > 0 && (local(self.config.join.grpc) || !local(self.config.transfers.transfer))
    }

    /// Checks a prefix that the router wants moved, in at most `left`.
    pub(crate) fn exchange(&self, prefix: v1::Prefix, left: Duration) -> Result<Exchange, Status> {
        crate::wire::exchange(prefix, self.fit(), left, self.clock.now())
    }

    fn fit(&self) -> Fit {
        let layout = &self.geometry.layout;
        let (fingerprint, block_size) = (layout.fingerprint(), layout.block_size);
        let (vocab, secret, max_keep) = (self.vocab, self.secret, self.config.max_keep);
        Fit { vocab, layout: fingerprint, block_size, secret, max_keep }
    }

    /// Runs a worker of role `N` until it is told to stop.
    pub async fn run<N: NodeRole>(config: WorkerConfig) -> Result<(), WorkerError> {
        Node::run_loaded::<N>(config, load).await
    }

    /// The same as [`Node::run`], but `load` loads the model instead of the backend that the settings choose.
    pub async fn run_loaded<N: NodeRole>(
        config: WorkerConfig,
        load: impl FnOnce(&WorkerConfig) -> Result<Ready, WorkerError> + Send + 'static,
    ) -> Result<(), WorkerError> {
        check_settings(&config)?;
        let tls = Tls::open(&config.internal_tls)?;
        let secret =
            config.tiers.kv_secret_file.as_deref().map(|path| secret_in("kv_secret_file", path)).transpose()?;
        let secret = secret.map(|secret| NameSecret::of(&secret)).unwrap_or_default();
        let (told, signals) = watch::channel(None);
        let open = signals::routes(signals).merge(sharing::routes(&config)?);
        let routes = AdminRoutes { open, ..AdminRoutes::default() };
        let process = Process::start(N::ROLE.as_str(), &config.process, routes).await?;
        process.shutdown.outlive_hangups()?;
        let listener = baton_runtime::listen(config.join.grpc, "--grpc").await?;
        let addr = listener.local_addr()?;
        let (settings, loading) = (config.clone(), std::time::Instant::now());
        let loaded = tokio::task::spawn_blocking(move || load(&settings));
        let Ready { runner, backend, vocab, grammars, geometry, pool, engine: limits, name, costs, gpus } = tokio::select! {
            loaded = loaded => loaded.map_err(|_| WorkerError::EngineStopped)??,
            // The process was told to stop while loading: nothing to drain.
            _ = process.shutdown.draining() => return Ok(()),
        };
        tracing::info!(
            model = name,
            backend,
            seconds = format!("{:.1}", loading.elapsed().as_secs_f64()),
            kv_tokens = geometry.blocks[0] * geometry.layout.block_size,
            "model loaded"
        );
        gpus::report(gpus);
        gauge!(names::PACK_TOKENS).set(f64::from(limits.pack_tokens.min(limits.token_budget)));
        let mut engine = Engine::new(limits, &geometry)?;
        engine.note_cache_changes();
        if config.keeps_kv() {
            engine.note_ended();
        }
        if N::OFFERS_FETCHED {
            engine.note_fetched();
        }
        let (id, clock) = (random_worker_id(), crate::Clock::start());
        let decoding = Decoding::default();
        let courtesy = courtesy(decoding.clone());
        let node = Node { id, vocab, grammars, clock, geometry, pool, config, tls, secret, courtesy };
        let (clock, timeout) = (node.clock, node.config.step_timeout);
        let layout = node.geometry.layout.clone().into();
        let by_layer = runner.reads_by_layer();
        let core = WorkerCore::new(engine, N::role(&node), layout, node.config.kv_lease, runner.overlaps())
            .with_pair_share(costs.arithmetic.pair / costs.arithmetic.token);
        let keeps = Limits { ttft: node.config.slo_ttft, itl: node.config.slo_itl, max_running: limits.max_running };
        let news = Arc::<WorkerNews>::default();
        let told = Told { signals: told, limits: keeps, news: Arc::clone(&news) };
        let (handle, inbox) = engine_thread::channels();
        let ends = Arc::new(KvEnds::open(&node, handle.commands())?);
        let exchange = ExchangeShell::start(Arc::clone(&ends), &node.geometry.layout, handle.commands())?;
        let role = N::shell(&node, handle.commands(), &ends)?;
        let store = tiers::open(&node, &backend)?;
        let (of_store, at_end) = (store.clone(), store.clone());
        let tiers =
            store.map(|store| TiersShell::start(store, &node, handle.commands(), &news, by_layer)).transpose()?;
        let load_seconds = tiers.as_ref().map(TiersShell::load_seconds);
        let shells = Shells {
            role,
            exchange: Some(exchange),
            tiers,
            columns: Some(Columns::of(&node)),
            achieved: Some(Achieved::new(costs)),
            decoding,
        };
        engine_thread::start(core, runner, clock, timeout, told, inbox, shells)?;
        let publisher = Arc::clone(&news);
        tokio::spawn(async move { publisher.publish().await });
        let pool = (node.pool.exported_as(), node.geometry.layout.block_bytes_all_groups());
        let service = WorkerService::new(node.id, N::ROLE.as_str(), handle.snapshot(), pool, news);
        if let Some(store) = of_store {
            service.report_tiers(move || tiers::told(&store));
        }
        service.show_columns(columns::asks(node.clone(), handle.commands()));
        let peers = Arc::clone(&ends);
        service.report_peers(move || peers.peers());
        let (links, layout) = (service.clone(), &node.geometry.layout);
        let token_bytes = (layout.block_bytes_all_groups() / u64::from(layout.block_size)) as u32;
        let load_seconds = move || load_seconds.as_ref().map_or(0.0, |seconds| seconds());
        tokio::spawn(async move { links.tell_links(token_bytes, load_seconds).await });
        let numerics = tiers::numerics(&node.config, &backend);
        let member = node.member(N::ROLE, &name, (addr, process.admin_addr()), limits, numerics);
        let served = node.serve::<N>(process, handle, (service, ends), listener, member).await;
        if let Some(store) = at_end {
            tiers::flush(store).await;
        }
        served
    }

    fn member(
        &self,
        role: Role,
        model: &str,
        (grpc, admin): (std::net::SocketAddr, std::net::SocketAddr),
        limits: EngineConfig,
        numerics: u64,
    ) -> Member {
        let reach = |addr: std::net::SocketAddr| match &self.config.join.advertise {
            Some(host) => format!("{host}:{}", addr.port()),
            None => addr.to_string(),
        };
        let secret = self.secret.mark();
        Member {
            id: self.id,
            role,
            grpc: format!("{}://{}", Tls::scheme(self.tls.as_ref()), reach(grpc)),
            admin: format!("http://{}", reach(admin)),
            model: model.to_owned(),
            layout: self.geometry.layout.family(),
            block_size: self.geometry.layout.block_size,
            blocks: self.geometry.blocks.iter().copied().min().unwrap_or(0),
            window_tokens: self.geometry.layout.most_tokens(limits.chunk).unwrap_or(0),
            max_running: limits.max_running,
            context_tokens: limits.context_tokens,
            draining: false,
            late_targets: role == Role::Prefill,
            exchanges: if self.exchanges(limits) { self.geometry.layout.fingerprint() ^ numerics ^ secret } else { 0 },
            kv_secret: secret,
        }
    }

    async fn serve<N: NodeRole>(
        self,
        process: Process,
        handle: EngineHandle<<N::Shell as Shell>::Command>,
        (service, ends): (WorkerService, Arc<KvEnds>),
        listener: tokio::net::TcpListener,
        member: Member,
    ) -> Result<(), WorkerError> {
        let addr = listener.local_addr()?;
        let (config, tls) = (self.config.clone(), self.tls.clone());
        let (health, health_service) = tonic_health::server::health_reporter();
        let mut routes = Routes::builder();
        routes.add_service(health_service).add_service(WorkerServer::new(service.clone()));
        let exchange = ExchangeService { node: self.clone(), engine: handle.clone(), ends: Arc::clone(&ends) };
        routes.add_service(ExchangeServer::new(exchange));
        let served = N::routes(self, handle.clone(), ends, &mut routes)?;
        let reflection = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
            .build_v1()
            .map_err(|e| WorkerError::Grpc { addr, problem: e.to_string() })?;
        routes.add_service(reflection);
        let stop = tokio_util::sync::CancellationToken::new();
        let accept = tls.as_ref().map(|tls| tls.server([TlsRole::Router, TlsRole::Operator], &[alpn::HTTP2]));
        let incoming = door::incoming(listener, accept);
        if let Some(tls) = tls.clone() {
            process.tasks.spawn("certificates", tls.watch(process.shutdown.clone()));
        }
        let server = tonic::transport::Server::builder()
            .http2_keepalive_interval(Some(Duration::from_secs(5)))
            .max_concurrent_streams(MAX_STREAMS)
            .layer(InterceptorLayer::new(OnlyFor(member.id)))
            .add_routes(routes.routes())
            .serve_with_incoming_shutdown(incoming, stop.clone().cancelled_owned());
        let server = tokio::spawn(server);
        let id = member.id;
        let registry = baton_cluster::connect(&config.join.registry, tls.as_ref()).await?;
        let lease = tokio::select! {
            lease = registry.register(member, config.join.registry_ttl) => lease?,
            _ = process.shutdown.draining() => return Ok(()),
        };
        health.set_service_status(served, tonic_health::ServingStatus::Serving).await;
        process.readiness.ready();
        tracing::info!(%addr, worker = %id, registry = config.join.registry, "serving");
        let left = Serving::new(handle, process.shutdown.clone(), health, served, lease).until_left().await;
        service.end();
        stop.cancel();
        // Streams still open belong to requests that were cut off.
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
        let (Outcome::Clean | Outcome::Cut(_)) = process.join().await;
        left
    }
}
