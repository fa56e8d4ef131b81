//! The processes of `baton up`: starts them, restarts those that die and stops them in order. `operator.rs` changes their number.

pub mod devices;
mod operator;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::Future;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use baton_cluster::{Member, Role, ViewReceiver};
use baton_proto::v1::supervisor_server;
use baton_runtime::tls::{TlsRole, alpn};
use baton_runtime::{Shutdown, Tls, die_with_parent};
use baton_types::WorkerId;
use baton_worker::{incoming, random_worker_id};
use rustix::process::{Pid, Signal, kill_process};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

use self::devices::{Devices, Gpus};
use self::operator::{Request, Service};

/// A process that ends sooner than this counts as a short life. Before the cluster has been ready, [`MAX_SHORT_LIVES`] of
/// one kind in a row end it.
const SHORT_LIFE: Duration = Duration::from_secs(5);
const MAX_SHORT_LIVES: u32 = 3;
/// Half the wait before a restart after the first short life. Each further short life doubles the wait.
const MIN_BACKOFF: Duration = Duration::from_millis(250);

/// The role of a process.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Kind {
    Router,
    Decode,
    Prefill,
    KvStore,
}

impl Kind {
    /// The subcommand that starts it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Router => "router",
            Kind::Decode => "decode",
            Kind::Prefill => "prefill",
            Kind::KvStore => "kv-store",
        }
    }

    /// Its role as a member; routers have none.
    fn role(self) -> Option<Role> {
        match self {
            Kind::Router => None,
            Kind::Decode => Some(Role::Decode),
            Kind::Prefill => Some(Role::Prefill),
            Kind::KvStore => Some(Role::KvStore),
        }
    }
}

struct Process {
    kind: Kind,
    child: Child,
    pid: u32,
    started: Instant,
    /// It was told to stop, so its end is expected.
    stopping: bool,
    /// It is told to stop once others serve.
    leaving: Option<Leaving>,
    /// The GPUs that it computes on, if on any.
    gpus: Option<Gpus>,
    /// No other process of its kind has the same number.
    number: usize,
}

/// How a process goes that is to be drained.
#[derive(Clone, Copy)]
struct Leaving {
    worker: WorkerId,
    /// All the others that there should be have to serve first, not just one.
    replaced: bool,
}

impl Process {
    /// It counts as one of the processes that there should be.
    fn stays(&self) -> bool {
        !self.stopping && self.leaving.is_none()
    }
}

/// The processes and how to start more of them.
pub struct Supervisor {
    program: PathBuf,
    tls: Option<Tls>,
    args: BTreeMap<Kind, Vec<String>>,
    devices: Option<Devices>,
    /// Of the workers that compute on GPUs: on how many each.
    ranks: BTreeMap<Kind, u32>,
    wanted: BTreeMap<Kind, usize>,
    processes: Vec<Process>,
    /// Per kind: short lives in a row, and the earliest time of the next start.
    short_lives: BTreeMap<Kind, (u32, tokio::time::Instant)>,
    /// Where workers keep KV on disk and in an object store, each in a folder of its own.
    kv_disk: Option<PathBuf>,
    kv_object: Option<String>,
    /// The cluster has been ready. From then on a worker that keeps dying is restarted again and again, after growing waits.
    settled: bool,
    pending: Vec<Request>,
    /// Who serves, once the supervisor is part of the cluster.
    views: ViewReceiver,
}

impl Supervisor {
    /// A supervisor that runs no processes yet.
    /// `tls`: for its own connections, as an operator.
    pub fn new(program: PathBuf, tls: Option<Tls>) -> Supervisor {
        Supervisor {
            program,
            tls,
            args: BTreeMap::new(),
            devices: None,
            ranks: BTreeMap::new(),
            wanted: BTreeMap::new(),
            processes: Vec::new(),
            short_lives: BTreeMap::new(),
            kv_disk: None,
            kv_object: None,
            settled: false,
            pending: Vec::new(),
            views: tokio::sync::watch::channel(Default::default()).1,
        }
    }

    /// Sets the flags of every process of a kind.
    pub fn define(&mut self, kind: Kind, args: Vec<String>) {
        self.args.insert(kind, args);
    }

    /// Gives the processes of these kinds GPUs, so many each.
    pub fn spread(&mut self, devices: Devices, ranks: BTreeMap<Kind, u32>) {
        (self.devices, self.ranks) = (Some(devices), ranks);
    }

    /// The GPUs for another process of a kind. None inside: it needs none. None: no GPU has room for it.
    fn room(&self, kind: Kind) -> Option<Option<Gpus>> {
        let (Some(devices), Some(ranks)) = (self.devices, self.ranks.get(&kind)) else { return Some(None) };
        let taken: Vec<Gpus> = self.processes.iter().filter_map(|process| process.gpus.clone()).collect();
        devices.pick(&taken, *ranks).map(Some)
    }

    /// Workers keep KV below this folder and this URL from now on. A worker that takes another's place takes its folder, and finds the KV there.
    pub fn keep_kv_in(&mut self, folder: Option<PathBuf>, url: Option<String>) {
        (self.kv_disk, self.kv_object) = (folder, url);
    }

    /// Where a worker keeps its KV.
    fn kv_flags(&self, kind: Kind, number: usize) -> Vec<OsString> {
        if kind == Kind::Router {
            return Vec::new();
        }
        let own = format!("{}-{number}", kind.name());
        let below = |url: &str| format!("{}/{own}", url.strip_suffix('/').unwrap_or(url));
        let disk = self.kv_disk.iter().flat_map(|folder| ["--kv-disk".into(), folder.join(&own).into_os_string()]);
        let object = self.kv_object.iter().flat_map(|url| ["--kv-object".into(), below(url).into()]);
        disk.chain(object).collect()
    }

    /// The least number that no process of this kind has.
    fn free_number(&self, kind: Kind) -> usize {
        let taken = |number: &usize| self.processes.iter().any(|p| p.kind == kind && p.number == *number);
        (0..).find(|number| !taken(number)).unwrap_or_default()
    }

    /// Sets how many processes of a kind should run.
    pub fn scale(&mut self, kind: Kind, count: usize) {
        self.wanted.insert(kind, count);
    }

    /// The running processes with their pids, in the order of [`Kind`].
    pub fn processes(&self) -> Vec<(Kind, u32)> {
        let mut all: Vec<_> = self.processes.iter().map(|p| (p.kind, p.pid)).collect();
        all.sort_unstable();
        all
    }

    fn count(&self, kind: Kind) -> usize {
        self.processes.iter().filter(|p| p.kind == kind && p.stays()).count()
    }

    fn start(&mut self, kind: Kind, gpus: Option<Gpus>) -> anyhow::Result<()> {
        let mut command = std::process::Command::new(&self.program);
        command.arg(kind.name()).args(self.args.get(&kind).into_iter().flatten());
        let number = self.free_number(kind);
        command.args(self.kv_flags(kind, number));
        if let Some(gpus) = &gpus {
            command.args(["--first-gpu".to_owned(), gpus.start.to_string()]);
        }
        // The child must not read this process's settings file: it gets all settings from it as flags. Its admin pages are this process's to read.
        command.env_remove("BATON_CONFIG").env_remove("BATON_ADMIN_TOKEN_FILE").stdin(std::process::Stdio::null());
        // Its own process group keeps Ctrl-C away from the child: this process stops the children in order.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        die_with_parent(&mut command);
        let child = Command::from(command).spawn().with_context(|| format!("starting {}", kind.name()))?;
        let pid = child.id().unwrap_or_default();
        tracing::info!(process = kind.name(), pid, "started");
        self.processes.push(Process {
            kind,
            child,
            pid,
            started: Instant::now(),
            stopping: false,
            leaving: None,
            gpus,
            number,
        });
        Ok(())
    }

    /// Starts missing processes and drains surplus ones.
    fn reconcile(&mut self) -> anyhow::Result<()> {
        let wanted: Vec<(Kind, usize)> = self.wanted.iter().map(|(k, n)| (*k, *n)).collect();
        for (kind, count) in wanted {
            while self.count(kind) < count && self.may_start(kind) {
                // Without room it starts when another has ended.
                let Some(gpus) = self.room(kind) else { break };
                self.start(kind, gpus)?;
            }
            for _ in count..self.count(kind) {
                // The youngest is drained first.
                if let Some(process) = self.processes.iter_mut().rev().find(|p| p.kind == kind && p.stays()) {
                    tracing::info!(process = kind.name(), pid = process.pid, "draining");
                    terminate(process);
                }
            }
        }
        Ok(())
    }

    fn may_start(&self, kind: Kind) -> bool {
        self.short_lives.get(&kind).is_none_or(|(_, when)| *when <= tokio::time::Instant::now())
    }

    /// The earliest time at which a kind that lacks processes may start one; far in the future when no kind lacks any.
    fn next_start(&self) -> tokio::time::Instant {
        let lacking = self.wanted.iter().filter(|(kind, count)| self.count(**kind) < **count);
        let lacking = lacking.filter(|(kind, _)| self.room(**kind).is_some());
        let times = lacking.filter_map(|(kind, _)| self.short_lives.get(kind).map(|(_, when)| *when));
        times.min().unwrap_or_else(|| tokio::time::Instant::now() + Duration::from_secs(3600))
    }

    /// Waits until some process has ended and removes it from the list.
    async fn reap(&mut self) -> anyhow::Result<()> {
        if self.processes.is_empty() {
            return std::future::pending().await;
        }
        let ends = self.processes.iter_mut().map(|p| Box::pin(p.child.wait()));
        let (status, index, _) = futures::future::select_all(ends).await;
        let process = self.processes.remove(index);
        let status = status.context("waiting for a process")?;
        match process.stays() {
            true => self.died(&process, status)?,
            false => tracing::info!(process = process.kind.name(), pid = process.pid, "stopped"),
        }
        Ok(())
    }

    fn died(&mut self, process: &Process, status: ExitStatus) -> anyhow::Result<()> {
        let (name, pid) = (process.kind.name(), process.pid);
        let lives = self.short_lives.get(&process.kind).map_or(0, |(lives, _)| *lives);
        let lives = if process.started.elapsed() >= SHORT_LIFE { 0 } else { lives + 1 };
        // After a normal life it restarts at once. Each short life in a row doubles the wait.
        let wait = if lives == 0 { Duration::ZERO } else { MIN_BACKOFF * (1 << lives.min(7)) };
        self.short_lives.insert(process.kind, (lives, tokio::time::Instant::now() + wait));
        // A router that exits by itself shortly after its start would do so again. One that a signal killed may start next time.
        let hopeless = process.kind == Kind::Router && lives > 0 && status.code().is_some();
        if hopeless || (!self.settled && lives >= MAX_SHORT_LIVES) {
            bail!("{name} (pid {pid}) ended with {status} shortly after its start; its message is above");
        }
        tracing::warn!(process = name, pid, %status, "died; starting it again");
        Ok(())
    }

    /// Keeps the wanted processes running until `until` completes.
    ///
    /// # Errors
    /// When the processes cannot be kept running.
    pub async fn run_until<T>(&mut self, until: impl Future<Output = T>) -> anyhow::Result<T> {
        tokio::pin!(until);
        let mut views = self.views.clone();
        loop {
            self.reconcile()?;
            self.retire();
            self.answer_requests();
            let next_start = self.next_start();
            tokio::select! {
                done = &mut until => return Ok(done),
                reaped = self.reap() => reaped?,
                () = tokio::time::sleep_until(next_start) => {}
                Ok(()) = views.changed() => {}
            }
        }
    }

    /// Keeps the processes running and serves requests of `baton scale` and `baton drain` until the drain starts.
    /// `admin`: of the router, which `baton top` finds by this.
    pub async fn serve(&mut self, registry: &str, admin: SocketAddr, shutdown: &Shutdown) -> anyhow::Result<()> {
        let (requests, mut inbox) = mpsc::channel(16);
        let listener = tokio::net::TcpListener::bind((std::net::Ipv4Addr::LOCALHOST, 0)).await?;
        let member = member(listener.local_addr()?, admin, self.tls.as_ref());
        let accept = self.tls.as_ref().map(|tls| tls.server([TlsRole::Operator], &[alpn::HTTP2]));
        let service = supervisor_server::SupervisorServer::new(Service { requests });
        let server = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming_shutdown(incoming(listener, accept), shutdown.token().cancelled_owned());
        let server = tokio::spawn(server);
        let registry = baton_cluster::connect(registry, self.tls.as_ref()).await?;
        self.settled = true;
        self.views = registry.watch();
        let lease = tokio::select! {
            lease = self.run_until(registry.register(member, Duration::from_secs(5))) => lease??,
            () = shutdown.draining() => return Ok(()),
        };
        loop {
            let request: Option<Request> = tokio::select! {
                request = self.run_until(inbox.recv()) => request?,
                () = shutdown.draining() => break,
            };
            if let Some(request) = request {
                self.take(request);
            }
        }
        lease.revoke().await;
        server.abort();
        Ok(())
    }

    /// Stops all processes: first the router, so that no request is placed on a stopping worker, then the workers. Kills the
    /// processes that are left when the drain is forced or its time is over.
    pub async fn stop(&mut self, shutdown: &Shutdown) {
        shutdown.start("stopping");
        // The registry stops with the router, which is then no news.
        self.views = tokio::sync::watch::channel(Default::default()).1;
        for routers in [true, false] {
            for process in self.processes.iter_mut().filter(|p| (p.kind == Kind::Router) == routers) {
                terminate(process);
            }
            let deadline = shutdown.deadline().unwrap_or_else(tokio::time::Instant::now) + Duration::from_secs(2);
            let gone = self.wait_for(routers);
            let late = tokio::select! {
                () = gone => false,
                () = shutdown.forced() => true,
                () = tokio::time::sleep_until(deadline) => true,
            };
            if late {
                for process in self.processes.iter_mut().filter(|p| (p.kind == Kind::Router) == routers) {
                    // An error means that it has ended already.
                    let _ = process.child.kill().await;
                }
            }
        }
        self.processes.clear();
    }

    async fn wait_for(&mut self, routers: bool) {
        for process in self.processes.iter_mut().filter(|p| (p.kind == Kind::Router) == routers) {
            // An error means that there is no process to wait for.
            let _ = process.child.wait().await;
        }
    }
}

fn terminate(process: &mut Process) {
    process.stopping = true;
    if let (Ok(None), Some(pid)) = (process.child.try_wait(), Pid::from_raw(process.pid as i32)) {
        // The child was not reaped yet, so the pid is still its own.
        let _ = kill_process(pid, Signal::TERM);
    }
}

fn member(address: SocketAddr, admin: SocketAddr, tls: Option<&Tls>) -> Member {
    Member {
        id: random_worker_id(),
        role: Role::Supervisor,
        grpc: format!("{}://{address}", Tls::scheme(tls)),
        admin: format!("http://{admin}"),
        model: String::new(),
        layout: 0,
        block_size: 0,
        window_tokens: 0,
        max_running: 0,
        blocks: 0,
        context_tokens: 0,
        draining: false,
        late_targets: false,
        exchanges: 0,
        kv_secret: 0,
    }
}
