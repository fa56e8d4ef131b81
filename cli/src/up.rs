//! `baton up`: a cluster of separate processes on this machine, for one terminal.
//!
//! It is only a supervisor: it starts `baton router`, `baton prefill` and `baton decode` as a user would, restarts those that
//! die, and stops all of them at the end.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use baton_model_files::fetch;
use baton_runtime::tls::TlsRole;
use baton_runtime::{Bytes, FetchConfig, Parsed, Process, ProcessConfig, Tls, config::format_duration, make_secret};
use baton_transfer::TransportChoice;
use baton_types::KvDtype;
use baton_worker::{BackendKind, Quantization};
use tokio::net::TcpSocket;

use crate::certs::{self, OwnCertificates};
use crate::supervisor::devices::{self, Devices};
use crate::supervisor::{Kind, Supervisor};

/// A free port that only this machine reaches.
const LOOPBACK: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

baton_runtime::config! {
    /// A whole cluster on this machine.
    pub struct UpConfig {
        use fetch: FetchConfig = FetchConfig::default();
        use process: ProcessConfig = ProcessConfig { log: "warn".parse().unwrap_or_default(), ..Default::default() };
        /// The model: a name (see `baton model list`), a path, org/name on the hub, or random:NAME, which needs no download.
        model: String = "smollm2".to_owned(),
        /// Number of prefill workers.
        prefill: u32 = 1,
        /// Number of decode workers.
        decode: u32 = 1,
        /// No split: decode workers compute prompts too, and there are no prefill workers.
        aggregated: bool = false,
        /// Address of the OpenAI-compatible HTTP API; port 0 picks a free port.
        http: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8000)),
        /// Address of the gRPC API; port 0 picks a free port.
        grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8001)),
        /// Address where workers register, and where `baton status` and `baton scale` ask; port 0 picks a free port.
        internal: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8002)),
        /// Folder with the certificates of the processes, as `baton certs` makes them; default: new ones for this cluster, which no other
        /// user of the machine can read.
        certs: Option<PathBuf> = None,
        /// No TLS between the processes: every user of the machine can join the cluster and read prompts.
        insecure_internal: bool = false,
        /// Where workers are found: embedded (the router holds their leases), or etcd://HOST:PORT,…
        registry: String = "embedded".to_owned(),
        /// How KV travels between workers: auto, shm, tcp, ucx or cuda-ipc.
        transport: Parsed<TransportChoice> = Parsed(TransportChoice::Auto),
        /// Element type of the KV pools: f32, f16, bf16, q8, fp8 or int4.
        kv_type: Parsed<KvDtype> = Parsed(KvDtype::F16),
        /// Element type of the prefill workers' pools, if different; they convert KV as they send it (docs/kv-types.md).
        prefill_kv_type: Option<Parsed<KvDtype>> = None,
        /// Memory of each worker's KV pool; default: 512MiB, or on a GPU what gpu_memory_fraction leaves for it.
        kv_memory: Option<Bytes> = None,
        /// Share of each GPU's memory that the workers on it may use together, above 0 and at most 1. It is divided among as many workers
        /// as share a GPU at the start; `baton scale` adds no more.
        gpu_memory_fraction: f64 = 0.9,
        /// Longest sequence in tokens; default: the model's context, or less if the pool cannot hold it.
        context: Option<u32> = None,
        /// Layers of full attention see only the first tokens and this many of the last, so that a stream may run past the
        /// model's context; default: they see all tokens.
        attention_window: Option<u32> = None,
        /// With an attention window: number of first tokens that stay visible, rounded up to whole blocks; 0: none.
        attention_sinks: u32 = 4,
        /// Host memory of all workers together for KV that their pools have no room for, each an equal part; 0B: none (docs/kv-store.md). A worker that
        /// `baton scale` adds has as much as one of the first.
        kv_host: Bytes = Bytes(0),
        /// Folder for KV that host memory has no room for, on a local disk; each worker has a folder of its own in it. The next `baton up` finds
        /// the KV there. Needs kv_host.
        kv_disk: Option<PathBuf> = None,
        /// Most space that KV takes in kv_disk, of all workers together, each an equal part.
        kv_disk_size: Bytes = Bytes::gib(10),
        /// Object store for KV that host memory has no room for: s3://BUCKET/PREFIX, reached by AWS's variables (AWS_ENDPOINT_URL, AWS_REGION,
        /// AWS_ACCESS_KEY_ID, …), or file:///DIRECTORY. Each worker has a prefix of its own below it. The next `baton up` finds the KV there. Needs
        /// kv_host.
        kv_object: Option<String> = None,
        /// Most space that KV takes in kv_object, of all workers together, each an equal part.
        kv_object_size: Bytes = Bytes::gib(100),
        /// Only blocks that were asked for so often are written to kv_disk and kv_object (see baton decode --help).
        kv_min_uses: u32 = 1,
        /// File with a secret from which the names follow by which the processes speak of KV (see baton decode --help); default: the file secret
        /// in kv_disk, which is made if it is not there; without kv_disk none.
        kv_secret_file: Option<PathBuf> = None,
        /// Number of KV stores: processes that keep KV that workers computed, and give it to workers that lack it (docs/kv-store.md). They have
        /// parts of kv_host, kv_disk and kv_object as workers do.
        kv_stores: u32 = 0,
        /// Host memory of each KV store.
        kv_store_memory: Bytes = Bytes::gib(1),
        /// Device that workers compute on: auto, cpu or cuda (see baton decode --help).
        backend: BackendKind = BackendKind::Cpu,
        /// Device that prefill workers compute on, if different. KV of one device is not bit for bit that of another, so all prompts then
        /// go to prefill workers.
        prefill_backend: Option<BackendKind> = None,
        /// Number of GPUs over which workers on GPUs are spread, from number 0 on; default: all of this machine.
        gpus: Option<u32> = None,
        /// Quantization of the layers' weights on a GPU: none (bf16) or fp8 (see baton decode --help).
        quantization: Quantization = Quantization::None,
        /// Compute threads of each worker; default: one per core.
        threads: Option<usize> = None,
        /// On the CPU: most disk space, in the model cache, for weights as the kernels read them. Workers share them in memory, and the next start
        /// need not pack them again (docs/memory.md). 0B: each worker packs its own.
        packed_weights: Bytes = Bytes::gib(16),
        /// Number of tensor-parallel ranks of each worker (docs/tensor-parallel.md).
        tp: u32 = 1,
        /// Number of ranks of each prefill worker, if different.
        prefill_tp: Option<u32> = None,
        /// How long an answer waits for a worker when none is left that can go on with it: workers that die are started again.
        worker_wait: Duration = Duration::from_secs(30),
        /// Longest time until the cluster is ready.
        start_timeout: Duration = Duration::from_secs(120),
    }
}

/// Runs the cluster until it is told to stop.
pub async fn run(mut config: UpConfig) -> anyhow::Result<()> {
    if config.aggregated {
        config.prefill = 0;
    }
    if config.decode == 0 {
        bail!("--decode is 0; a cluster needs at least one decode worker");
    }
    check_admin(&config.process)?;
    check_kv_stores(&config)?;
    let [http, grpc, internal] = [("--http", config.http), ("--grpc", config.grpc), ("--internal", config.internal)];
    for (one, other) in [(http, grpc), (http, internal), (grpc, internal)] {
        if one.1 == other.1 && one.1.port() != 0 {
            bail!("{} and {} are both {}; they must differ", one.0, other.0, one.1);
        }
    }
    // The admin address is the router's; this process has one of its own. It works on no request, and so has no spans.
    let own = ProcessConfig { admin: LOOPBACK, otlp_endpoint: None, ..config.process.clone() };
    let process = Process::start("up", &own, Default::default()).await?;
    let shutdown = process.shutdown.clone();
    tokio::select! {
        fetched = fetch_model(&config) => fetched?,
        () = shutdown.draining() => bail!("told to stop before the model was there"),
    }
    let (http, _kept_http) = keep(config.http, "--http")?;
    let (grpc, _kept_grpc) = keep(config.grpc, "--grpc")?;
    // With another registry nobody listens there.
    let kept = (config.registry == "embedded").then(|| keep(config.internal, "--internal")).transpose()?;
    let internal = kept.as_ref().map_or(config.internal, |(internal, _)| *internal);
    let (admin, _kept_admin) = keep(config.process.admin, "--admin")?;
    (config.http, config.grpc, config.internal) = (http, grpc, internal);
    if config.certs.is_some() && config.insecure_internal {
        bail!("--certs and --insecure-internal cannot be used together");
    }
    let port = kept.as_ref().map(|(internal, _)| internal.port());
    port.into_iter().for_each(certs::forget);
    let own = (config.certs.is_none() && !config.insecure_internal).then(|| OwnCertificates::make(port)).transpose()?;
    let certs = config.certs.clone().or_else(|| own.as_ref().map(|own| own.folder().to_owned()));
    let tls = certs.as_deref().map(certs::operator).transpose()?;
    let registry = match config.registry.as_str() {
        "embedded" => format!("{}://{internal}", Tls::scheme(tls.as_ref())),
        other => other.to_owned(),
    };
    let program = std::env::current_exe().context("finding this program's file")?;
    if let Some(tls) = &tls {
        process.tasks.spawn("certificates", tls.clone().watch(shutdown.clone()));
    }
    config.kv_secret_file = kv_secret(&config)?;
    let mut supervisor = Supervisor::new(program, tls);
    supervisor.keep_kv_in(config.kv_disk.clone(), config.kv_object.clone());
    let insecure = config.insecure_internal.then(|| "--insecure-internal".to_owned());
    let files = |role| certs.iter().flat_map(move |folder| certs::flags(folder, role)).chain(insecure.clone());
    let mut router = router_args(&config, admin);
    router.extend(files(TlsRole::Router));
    supervisor.define(Kind::Router, router);
    let prefill_kv_type = config.prefill_kv_type.unwrap_or(config.kv_type);
    let prefill_tp = config.prefill_tp.unwrap_or(config.tp);
    let prefill_backend = config.prefill_backend.unwrap_or(config.backend);
    let gpus = config.gpus.unwrap_or_else(devices::count);
    let on_gpus = |backend| match backend {
        BackendKind::Cpu => false,
        BackendKind::Auto => gpus > 0,
        BackendKind::Cuda => true,
    };
    let ranks = BTreeMap::from_iter(
        [(Kind::Prefill, prefill_backend, prefill_tp), (Kind::Decode, config.backend, config.tp)]
            .into_iter()
            .filter(|(_, backend, _)| on_gpus(*backend))
            .map(|(kind, _, tp)| (kind, tp)),
    );
    let devices = devices_for(&config, gpus.max(1), &ranks)?;
    let fraction = config.gpu_memory_fraction / f64::from(devices.shares());
    let mut prefill = worker_args(&config, &registry, prefill_kv_type.0, prefill_tp, prefill_backend, fraction);
    prefill.extend(files(TlsRole::Prefill));
    supervisor.define(Kind::Prefill, prefill);
    let mut decode = worker_args(&config, &registry, config.kv_type.0, config.tp, config.backend, fraction);
    if (prefill_kv_type, prefill_tp, prefill_backend) != (config.kv_type, config.tp, config.backend) {
        // (I1) The KV that a prompt is computed over must not depend on how much of its prefix a decode worker has cached.
        decode.extend(flag("local-prefill", 0));
    }
    decode.extend(files(TlsRole::Decode));
    supervisor.define(Kind::Decode, decode);
    if all_on_cpu(&config) {
        let mut store = kv_store_args(&config, &registry);
        store.extend(files(TlsRole::Decode));
        supervisor.define(Kind::KvStore, store);
    }
    supervisor.spread(devices, ranks);
    supervisor.scale(Kind::Router, 1);
    supervisor.scale(Kind::Prefill, config.prefill as usize);
    supervisor.scale(Kind::Decode, config.decode as usize);
    supervisor.scale(Kind::KvStore, config.kv_stores as usize);
    // Other commands find those of an embedded registry by its port.
    let told = certs.as_deref().filter(|_| config.certs.is_some() || port.is_none());
    let outcome = supervise(&config, admin, &registry, told, &mut supervisor, &process).await;
    if outcome.is_ok() {
        eprintln!("stopping: running requests may finish (Ctrl-C again cuts them off)");
    }
    // Also after an error, so that no process is left behind.
    supervisor.stop(&shutdown).await;
    outcome
}

/// The file with the secret of this cluster's KV.
fn kv_secret(config: &UpConfig) -> anyhow::Result<Option<PathBuf>> {
    let (None, Some(folder)) = (&config.kv_secret_file, &config.kv_disk) else {
        return Ok(config.kv_secret_file.clone());
    };
    std::fs::create_dir_all(folder).with_context(|| format!("making kv_disk {}", folder.display()))?;
    let path = folder.join("secret");
    make_secret(&path)?;
    Ok(Some(path))
}

/// Refuses an admin address that this program could not ask itself.
fn check_admin(process: &ProcessConfig) -> anyhow::Result<()> {
    let admin = process.admin;
    if !admin.ip().is_loopback() && process.admin_token_file.is_none() {
        bail!(
            "--admin is {admin}, which others may reach; set a token with --admin-token-file, or listen on 127.0.0.1"
        );
    }
    Ok(())
}

/// Refuses KV stores for KV that is not all of one kind, or of which this program does not know what computes it.
fn check_kv_stores(config: &UpConfig) -> anyhow::Result<()> {
    if config.kv_stores > 0 && !all_on_cpu(config) {
        bail!(
            "--kv-stores is {}; it must be 0 unless all workers compute on the CPU. Start `baton kv-store` beside, with --computed-by \
             as the workers' log names their backend",
            config.kv_stores
        );
    }
    Ok(())
}

fn all_on_cpu(config: &UpConfig) -> bool {
    config.backend == BackendKind::Cpu && config.prefill_backend.is_none_or(|backend| backend == BackendKind::Cpu)
}

/// Runs the processes from their start until the drain starts.
async fn supervise(
    config: &UpConfig,
    admin: SocketAddr,
    registry: &str,
    certs: Option<&Path>,
    supervisor: &mut Supervisor,
    process: &Process,
) -> anyhow::Result<()> {
    let ready = tokio::select! {
        ready = supervisor.run_until(wait_ready(config, admin)) => ready?,
        () = process.shutdown.draining() => return Ok(()),
    };
    if !ready {
        let timeout = format_duration(config.start_timeout);
        bail!("the cluster was not ready within {timeout}; start with --log info to see why");
    }
    let text =
        announcement(config, admin, registry, certs, &supervisor.processes(), &served_model(config, admin).await?);
    // A closed standard output is no reason to stop.
    let _ = std::io::stdout().write_all(text.as_bytes());
    process.readiness.ready();
    supervisor.serve(registry, admin, &process.shutdown).await
}

/// Fetches the model once, with a progress bar, so that the workers find it in the cache.
async fn fetch_model(config: &UpConfig) -> anyhow::Result<()> {
    let (spec, from) = (config.model.clone(), config.fetch.clone());
    let fetched = tokio::task::spawn_blocking(move || {
        let source = fetch::Source::new(from.model_cache, from.hub_endpoint, from.hub_token_file.as_deref())?
            .with_peers(from.model_peers.as_deref())?;
        fetch::find(&source, &spec, &fetch::ProgressBar::new())
    });
    fetched.await.context("fetching the model")??;
    Ok(())
}

/// Reserves an address: returns it with its actual port (port 0 picks a free one), and the socket that keeps it.
///
/// The socket is bound, so that the system gives the port to no other process. It does not listen, so that the router can
/// listen there, also after a restart.
fn keep(address: SocketAddr, flag: &str) -> anyhow::Result<(SocketAddr, TcpSocket)> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        Ok::<_, std::io::Error>((socket.local_addr()?, socket))
    };
    bound()
        .with_context(|| format!("cannot listen on {address}; is another cluster running? Choose another with {flag}"))
}

fn router_args(config: &UpConfig, admin: SocketAddr) -> Vec<String> {
    let mut args = common_args(config, admin);
    args.extend(config.process.admin_token_file.iter().flat_map(|path| flag("admin-token-file", path.display())));
    args.extend(flag("internal", config.internal));
    args.extend(flag("http", config.http));
    args.extend(flag("grpc", config.grpc));
    args.extend(flag("registry", &config.registry));
    args.extend(flag("worker-wait", baton_runtime::config::format_duration(config.worker_wait)));
    args
}

/// The GPUs, divided among the workers that use them.
fn devices_for(config: &UpConfig, gpus: u32, ranks: &BTreeMap<Kind, u32>) -> anyhow::Result<Devices> {
    let workers = [(Kind::Prefill, config.prefill), (Kind::Decode, config.decode)];
    let workers = workers.into_iter().filter_map(|(kind, count)| Some((*ranks.get(&kind)?, count)));
    let each: Vec<u32> = workers.flat_map(|(ranks, count)| std::iter::repeat_n(ranks, count as usize)).collect();
    Devices::new(gpus, &each).with_context(|| {
        format!(
            "a worker of {} ranks needs as many GPUs, and there are {gpus} (--gpus)",
            each.iter().max().unwrap_or(&1)
        )
    })
}

fn worker_args(
    config: &UpConfig,
    registry: &str,
    kv_type: KvDtype,
    tp: u32,
    backend: BackendKind,
    fraction: f64,
) -> Vec<String> {
    let mut args = common_args(config, "127.0.0.1:0");
    args.extend(flag("grpc", "127.0.0.1:0"));
    args.extend(flag("registry", registry));
    args.extend(flag("transport", config.transport.0));
    args.extend(flag("kv-type", kv_type));
    args.extend(config.kv_memory.into_iter().flat_map(|bytes| flag("kv-memory", bytes)));
    args.extend(flag("gpu-memory-fraction", fraction));
    args.extend(config.context.into_iter().flat_map(|n| flag("context", n)));
    args.extend(config.attention_window.into_iter().flat_map(|n| flag("attention-window", n)));
    args.extend(flag("attention-sinks", config.attention_sinks));
    args.extend(kv_parts(config));
    args.extend(flag("backend", backend));
    args.extend(flag("quantization", config.quantization));
    args.extend(config.threads.into_iter().flat_map(|n| flag("threads", n)));
    args.extend(flag("packed-weights", config.packed_weights));
    args.extend(flag("tp", tp));
    args
}

/// Each process's part of the tiers below its pool.
fn kv_parts(config: &UpConfig) -> impl Iterator<Item = String> + use<> {
    let part = |all: Bytes| Bytes(all.0 / u64::from(config.prefill + config.decode + config.kv_stores).max(1));
    let [host, disk, object] = [config.kv_host, config.kv_disk_size, config.kv_object_size].map(part);
    let sizes = [flag("kv-host", host), flag("kv-disk-size", disk), flag("kv-object-size", object)];
    sizes.into_iter().flatten().chain(flag("kv-min-uses", config.kv_min_uses))
}

fn kv_store_args(config: &UpConfig, registry: &str) -> Vec<String> {
    let mut args = common_args(config, "127.0.0.1:0");
    args.extend(flag("grpc", "127.0.0.1:0"));
    args.extend(flag("registry", registry));
    args.extend(flag("transport", config.transport.0));
    args.extend(flag("kv-type", config.kv_type.0));
    args.extend(flag("kv-memory", config.kv_store_memory));
    args.extend(config.attention_window.into_iter().flat_map(|n| flag("attention-window", n)));
    args.extend(flag("attention-sinks", config.attention_sinks));
    args.extend(kv_parts(config));
    args.extend(flag("quantization", config.quantization));
    args.extend(flag("tp", config.tp));
    args
}

fn common_args(config: &UpConfig, admin: impl ToString) -> Vec<String> {
    let mut args: Vec<String> = flag("model", &config.model).into();
    args.extend(config.fetch.model_cache.iter().flat_map(|path| flag("model-cache", path.display())));
    args.extend(config.fetch.hub_endpoint.iter().flat_map(|url| flag("hub-endpoint", url)));
    args.extend(config.fetch.hub_token_file.iter().flat_map(|path| flag("hub-token-file", path.display())));
    args.extend(config.fetch.model_peers.iter().flat_map(|peers| flag("model-peers", peers)));
    args.extend(config.kv_secret_file.iter().flat_map(|path| flag("kv-secret-file", path.display())));
    args.extend(flag("log", &config.process.log));
    args.extend(flag("log-format", config.process.log_format));
    args.extend(config.process.otlp_endpoint.iter().flat_map(|endpoint| flag("otlp-endpoint", endpoint)));
    args.extend(flag("otlp-sample", config.process.otlp_sample));
    args.extend(flag("admin", admin));
    args.extend(flag("drain-timeout", format_duration(config.process.drain_timeout)));
    args
}

fn flag(name: &str, value: impl ToString) -> [String; 2] {
    [format!("--{name}"), value.to_string()]
}

/// Asks the router's admin endpoint.
async fn ask(config: &UpConfig, admin: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let token = config.process.admin_token_file.as_ref().map(std::fs::read_to_string).transpose()?;
    crate::status::get(admin, path, token.as_deref().map(str::trim)).await
}

/// Waits until the router can serve and sees all workers; false when `start_timeout` passes first.
async fn wait_ready(config: &UpConfig, admin: SocketAddr) -> bool {
    let ready = async {
        let mut tick = tokio::time::interval(Duration::from_millis(100));
        loop {
            tick.tick().await;
            let serves = matches!(ask(config, admin, "/ready").await, Ok((200, _)));
            if serves && all_workers(config, admin).await.is_some_and(|all| all) {
                return;
            }
        }
    };
    tokio::time::timeout(config.start_timeout, ready).await.is_ok()
}

/// Whether the router sees at least as many workers of each role as were started; None when it does not answer.
async fn all_workers(config: &UpConfig, admin: SocketAddr) -> Option<bool> {
    let (_, body) = ask(config, admin, "/cluster").await.ok()?;
    let cluster: serde_json::Value = serde_json::from_str(&body).ok()?;
    let members = cluster["members"].as_array()?;
    let count = |role: &str| members.iter().filter(|m| m["role"] == role).count();
    let wanted = [("prefill", config.prefill), ("decode", config.decode), ("kv-store", config.kv_stores)];
    Some(wanted.into_iter().all(|(role, wanted)| count(role) >= wanted as usize))
}

/// The model's name as clients send it.
async fn served_model(config: &UpConfig, admin: SocketAddr) -> anyhow::Result<String> {
    let (_, body) = ask(config, admin, "/cluster").await?;
    let cluster: serde_json::Value = serde_json::from_str(&body).context("reading the router's /cluster")?;
    Ok(cluster["served_name"].as_str().context("the router's /cluster has no served_name")?.to_owned())
}

/// The text that the terminal shows once everything runs.
fn announcement(
    config: &UpConfig,
    admin: SocketAddr,
    registry: &str,
    certs: Option<&Path>,
    processes: &[(Kind, u32)],
    model: &str,
) -> String {
    let (bold, plain) = if std::io::stdout().is_terminal() { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
    let UpConfig { http, grpc, .. } = config;
    let line = |(kind, pid): &(Kind, u32)| {
        let place = match kind {
            Kind::Router => format!("http://{http}  grpc {grpc}  admin http://{admin}"),
            Kind::Prefill => "computes prompts, writes KV to decode".to_owned(),
            Kind::Decode if config.prefill == 0 => "computes prompts and streams tokens".to_owned(),
            Kind::Decode => "takes KV, streams tokens".to_owned(),
            Kind::KvStore => "keeps KV that workers computed".to_owned(),
        };
        format!("  {:8} {pid:<8} {place}\n", kind.name())
    };
    let processes: String = processes.iter().map(line).collect();
    let question = "Why is the sky blue?";
    let quoted = serde_json::Value::from(model);
    let body = format!(
        r#"{{"model": {quoted}, "stream": true, "temperature": 0, "messages": [{{"role": "user", "content": "{question}"}}]}}"#
    );
    let certs = certs.map(|folder| format!(" --certs {}", folder.display())).unwrap_or_default();
    let token = config.process.admin_token_file.as_ref();
    let token = token.map(|file| format!(" --admin-token-file {}", file.display())).unwrap_or_default();
    let program = std::env::args().next().unwrap_or_else(|| "baton".to_owned());
    format!(
        "\n{bold}Baton is up{plain}, serving {model}\n\n  process  pid      address\n{processes}\nTry:\n  \
         curl -N http://{http}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n  \
         {program} chat --router http://{grpc} \"{question}\"\n  {program} status --registry {registry}{certs}\n  \
         {program} top --registry {registry}{certs}{token}\n\nThe cluster live: \
         http://{admin}/\n\nCtrl-C stops everything.\n"
    )
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind::AddrInUse;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_page_that_others_reach_needs_a_token() {
        let process = |admin: &str, token: Option<&str>| ProcessConfig {
            admin: admin.parse().unwrap(),
            admin_token_file: token.map(PathBuf::from),
            ..ProcessConfig::default()
        };
        let error = check_admin(&process("0.0.0.0:9000", None)).unwrap_err().to_string();
        assert!(error.starts_with("--admin is 0.0.0.0:9000") && error.contains("--admin-token-file"), "{error}");
        for fine in [process("127.0.0.1:9000", None), process("[::1]:0", None), process("0.0.0.0:9000", Some("token"))]
        {
            check_admin(&fine).unwrap();
        }
    }

    #[tokio::test]
    async fn a_port_is_kept_for_who_listens_there() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let (address, kept) = keep(any, "--http").unwrap();
        // A process that binds the port without `SO_REUSEADDR`.
        let chance = TcpSocket::new_v4().unwrap();
        assert_eq!(chance.bind(address).unwrap_err().kind(), AddrInUse);
        for _ in 0..2 {
            let listener = TcpListener::bind(address).unwrap();
            let other = keep(address, "--http").unwrap_err().to_string();
            assert!(other.contains("--http") && other.contains(&address.to_string()), "{other}");
            std::net::TcpStream::connect(address).unwrap();
            drop(listener.accept().unwrap());
        }
        drop(kept);
    }
}
