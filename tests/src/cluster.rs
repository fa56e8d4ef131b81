//! A real cluster of real processes under `baton up`, watched from outside: what it prints and logs, its processes, its
//! members, their KV blocks. It must leave nothing behind, and its log no error: both are checked at its end.

mod certificates;
pub mod client;
pub mod fault;
pub mod http;
pub mod models;
mod options;
pub mod pool;
pub mod processes;
mod stdout;
mod worker;

use std::collections::BTreeSet;
use std::fs::File;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use baton_cluster::{Member, Role, ViewReceiver};
use baton_types::WorkerId;
use rustix::process::{Pid, Signal, kill_process};
use tokio::runtime::Runtime;

use client::Client;
use http::Metrics;
use processes::Process;
use stdout::{Addresses, Stdout};

pub use certificates::{connect, learn, operator};
pub use options::ClusterOptions;
pub use worker::{Worker, exchange_with, status, status_of, wait_all_free};

/// What nothing here takes longer than; only a hang does.
pub const HANG: Duration = Duration::from_secs(120);
/// Between two looks at what has no event to wait for.
const LOOK: Duration = Duration::from_millis(20);

/// A running cluster. Start it on a thread that lives as long as it does: it ends with that thread.
#[derive(Debug)]
pub struct Cluster {
    up: Child,
    stdout: Stdout,
    addresses: Addresses,
    options: ClusterOptions,
    views: ViewReceiver,
    /// Decode workers that were members when the end began: each had a socket.
    last_decode: BTreeSet<WorkerId>,
    runtime: Option<Runtime>,
    dir: tempfile::TempDir,
    ended: bool,
}

impl Cluster {
    /// Starts `baton up` and waits until it says that it is up.
    pub fn start(options: ClusterOptions) -> anyhow::Result<Cluster> {
        let dir = tempfile::Builder::new().prefix("baton-test-").tempdir()?;
        let mut command = crate::binary::command()?;
        std::fs::create_dir(tmp(&dir))?;
        command.args(options.flags()).env("TMPDIR", tmp(&dir));
        // A prompt is handed over, however short, unless a test wants otherwise.
        command.env("BATON_LOCAL_PREFILL", "1").env("BATON_LOCAL_PROMPT", "0").envs(options.env.iter().cloned());
        command.stdout(Stdio::piped()).stderr(File::create(log_path(&dir))?);
        baton_runtime::die_with_parent(&mut command);
        let mut up = command.spawn().context("starting baton up")?;
        let mut stdout = Stdout::new(up.stdout.take().context("a pipe")?);
        let addresses = stdout.until("Ctrl-C stops everything.").and_then(|()| stdout.addresses());
        let addresses = match addresses {
            Ok(addresses) => addresses,
            Err(error) => {
                kill_all(&dir);
                up.wait()?;
                bail!("baton up did not start: {error:#}\n{}", read_log(&dir));
            }
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        let registry = &addresses.registry;
        let tls = match &addresses.certs {
            Some(folder) => Some(learn(folder.as_ref())?),
            None => certificates::learn_of_up(registry)?,
        };
        let views = async { anyhow::Ok(baton_cluster::connect(registry, tls.as_ref()).await?.watch()) };
        let views = runtime.block_on(views)?;
        Ok(Cluster {
            up,
            stdout,
            addresses,
            options,
            views,
            last_decode: BTreeSet::new(),
            runtime: Some(runtime),
            dir,
            ended: false,
        })
    }

    /// Where HTTP is served.
    pub fn http(&self) -> SocketAddr {
        self.addresses.http
    }

    /// Where gRPC is served.
    pub fn grpc(&self) -> SocketAddr {
        self.addresses.grpc
    }

    /// Where the router's admin endpoint and its page are.
    pub fn admin(&self) -> SocketAddr {
        self.addresses.admin
    }

    /// What `baton status` and `baton scale` take as `--registry`.
    pub fn registry(&self) -> &str {
        &self.addresses.registry
    }

    /// What `baton chat` takes as `--router`.
    pub fn url(&self) -> String {
        format!("http://{}", self.grpc())
    }

    /// What `baton up` printed.
    pub fn printed(&self) -> &str {
        &self.stdout.text
    }

    /// Everything logged so far, by all processes.
    pub fn log(&self) -> String {
        read_log(&self.dir)
    }

    /// Runs a future to its end.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.runtime.as_ref().expect("it is there until the drop").block_on(future)
    }

    /// Runs a future beside the test.
    pub fn spawn<F: Future<Output: Send> + Send + 'static>(&self, future: F) -> tokio::task::JoinHandle<F::Output> {
        self.runtime.as_ref().expect("it is there until the drop").spawn(future)
    }

    /// A gRPC client.
    pub fn client(&self) -> anyhow::Result<Client> {
        self.block_on(Client::connect(self.grpc()))
    }

    /// The process id of `baton up`.
    pub fn up_pid(&self) -> u32 {
        self.up.id()
    }

    /// All processes, `up` included.
    pub fn processes(&self) -> Vec<Process> {
        processes::of(&tmp(&self.dir))
    }

    /// Process ids of a role: up, router, prefill or decode.
    pub fn pids(&self, role: &str) -> Vec<u32> {
        self.processes().into_iter().filter(|p| p.role == role).map(|p| p.pid).collect()
    }

    /// The only process of a role.
    pub fn pid(&self, role: &str) -> anyhow::Result<u32> {
        match self.pids(role).as_slice() {
            [pid] => Ok(*pid),
            pids => bail!("{} {role} processes, not one: {pids:?}", pids.len()),
        }
    }

    /// Sends a signal.
    pub fn signal(&self, pid: u32, signal: Signal) -> anyhow::Result<()> {
        signal_pid(pid, signal)
    }

    /// Members of the last known view.
    pub fn members(&self) -> Vec<Member> {
        self.views.borrow().members.clone()
    }

    /// Waits for a view in which `condition` holds.
    pub fn wait_for_members(&self, condition: impl Fn(&[Member]) -> bool) -> anyhow::Result<()> {
        let mut views = self.views.clone();
        let met = async { views.wait_for(|v| !v.stale && condition(&v.members)).await.map(drop) };
        match self.block_on(async { tokio::time::timeout(HANG, met).await }) {
            Ok(met) => Ok(met?),
            Err(_) => bail!("members are still {:#?}", self.members()),
        }
    }

    /// The workers that answer. One that was killed may be a member for a while, but is not among these.
    pub fn workers(&self) -> Vec<Worker> {
        let workers = self.members().into_iter().filter(|m| m.role != Role::Supervisor);
        let processes = self.processes();
        workers.filter_map(|member| self.worker(member, &processes)).collect()
    }

    /// The workers of a role that answer.
    pub fn workers_of(&self, role: Role) -> Vec<Worker> {
        self.workers().into_iter().filter(|w| w.member.role == role).collect()
    }

    fn worker(&self, member: Member, processes: &[Process]) -> Option<Worker> {
        let port: u16 = member.grpc.rsplit_once(':')?.1.parse().ok()?;
        let pid = processes.iter().find(|p| processes::listening_ports(p.pid).contains(&port))?.pid;
        let status = self.block_on(status(&member)).ok()?;
        Some(Worker { member, pid, status })
    }

    /// Waits until some worker of this role is as wished, and returns it.
    pub fn wait_for_worker(&self, role: Role, wish: impl Fn(&Worker) -> bool) -> anyhow::Result<Worker> {
        let found = wait(|| self.workers_of(role).into_iter().find(&wish));
        found.with_context(|| format!("no {} worker is as wished: {:#?}", role.as_str(), self.workers()))
    }

    /// Waits until each of the wanted number of workers answers and holds nothing (I6).
    pub fn wait_idle(&self) -> anyhow::Result<()> {
        let wanted = if self.options.aggregated { 0 } else { self.options.prefill } + self.options.decode;
        self.wait_idle_workers(wanted as usize)
    }

    /// The same after scaling.
    pub fn wait_idle_workers(&self, wanted: usize) -> anyhow::Result<()> {
        let idle = wait(|| {
            let workers = self.workers();
            (workers.len() == wanted && workers.iter().all(Worker::idle)).then_some(())
        });
        idle.with_context(|| format!("not {wanted} idle workers, but {:#?}", self.workers()))
    }

    /// The router's metrics.
    pub fn router_metrics(&self) -> anyhow::Result<Metrics> {
        Metrics::of(self.addresses.admin)
    }

    /// Interrupts `baton up` and waits for its end, after which nothing may be left.
    pub fn stop(mut self) -> anyhow::Result<()> {
        self.remember();
        signal_pid(self.up.id(), Signal::INT)?;
        self.wait_for_end()?;
        self.finish()
    }

    /// Waits until `baton up` has ended well.
    pub fn wait_for_end(&mut self) -> anyhow::Result<()> {
        let status = self.wait_for_exit()?;
        ensure!(status.success(), "baton up ended with {status}\n{}", self.log());
        Ok(())
    }

    /// Waits until `baton up` has ended somehow.
    pub fn wait_for_exit(&mut self) -> anyhow::Result<ExitStatus> {
        let ended = wait(|| self.up.try_wait().transpose());
        let status = ended.with_context(|| format!("baton up does not end\n{}", self.log()))??;
        // Its last words.
        let _ = self.stdout.until("\0");
        Ok(status)
    }

    /// Kills `baton up` as `kill -9` does.
    pub fn kill_up(&mut self) -> anyhow::Result<()> {
        self.remember();
        self.up.kill()?;
        let status = self.up.wait()?;
        ensure!(status.signal() == Some(Signal::KILL.as_raw()), "baton up ended before it was killed: {status}");
        Ok(())
    }

    /// Waits until all processes are gone, then checks that nothing else is left and that the log has no error.
    pub fn finish(mut self) -> anyhow::Result<()> {
        self.end()
    }

    fn end(&mut self) -> anyhow::Result<()> {
        self.ended = true;
        // Before its sockets close: a client that is still there would keep the router from ending.
        self.runtime.take().into_iter().for_each(Runtime::shutdown_background);
        let gone = wait(|| self.processes().is_empty().then_some(()));
        gone.with_context(|| format!("still running: {:?}\n{}", self.processes(), self.log()))?;
        self.check_leftovers()?;
        self.check_log()
    }

    fn remember(&mut self) {
        let members = self.members();
        self.last_decode.extend(members.iter().filter(|m| m.role == Role::Decode).map(|m| m.id));
    }

    fn check_leftovers(&self) -> anyhow::Result<()> {
        let files: Vec<_> = std::fs::read_dir(tmp(&self.dir))?.flatten().map(|e| e.path()).collect();
        ensure!(files.is_empty(), "left behind: {files:?}");
        let shm = std::fs::read_dir("/dev/shm").into_iter().flatten().flatten().map(|e| e.file_name());
        let shm: Vec<_> = shm.filter(|name| name.to_string_lossy().contains("baton")).collect();
        ensure!(shm.is_empty(), "left in /dev/shm: {shm:?}");
        for id in &self.last_decode {
            let left = processes::abstract_sockets_like(&format!("@baton-{:x}-", id.0));
            ensure!(left.is_empty(), "left behind: {left:?}");
        }
        for address in [self.http(), self.grpc(), self.addresses.admin] {
            // A client of another cluster, beside this one, may have been given the port meanwhile.
            wait(|| TcpListener::bind(address).ok()).with_context(|| format!("{address} is still taken"))?;
        }
        Ok(())
    }

    fn check_log(&self) -> anyhow::Result<()> {
        let log = self.log();
        let expected = |line: &str| self.options.expected_errors.iter().any(|text| line.contains(text));
        let errors: Vec<&str> = log.lines().filter(|l| l.contains(" ERROR ") && !expected(l)).collect();
        ensure!(errors.is_empty(), "errors in the log: {errors:#?}\n{log}");
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        kill_all(&self.dir);
        // Killed a line above.
        let _ = self.up.wait();
        if std::thread::panicking() {
            eprintln!("--- the cluster's log\n{}---", self.log());
            return;
        }
        if let Err(error) = self.end() {
            panic!("after the end of a cluster: {error:#}");
        }
    }
}

/// Looks again and again until there is something.
pub fn wait<T>(mut look: impl FnMut() -> Option<T>) -> anyhow::Result<T> {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return Ok(found);
        }
        ensure!(start.elapsed() < HANG, "nothing for {HANG:?}");
        std::thread::sleep(LOOK);
    }
}

/// Sends a signal.
pub fn signal_pid(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let target = Pid::from_raw(pid as i32).context("a process id is not 0")?;
    kill_process(target, signal).with_context(|| format!("sending {signal:?} to {pid}"))
}

/// A folder of their own for the temporary files of a cluster's processes.
fn tmp(dir: &tempfile::TempDir) -> std::path::PathBuf {
    dir.path().join("tmp")
}

fn log_path(dir: &tempfile::TempDir) -> std::path::PathBuf {
    dir.path().join("log")
}

fn read_log(dir: &tempfile::TempDir) -> String {
    String::from_utf8_lossy(&std::fs::read(log_path(dir)).unwrap_or_default()).into_owned()
}

fn kill_all(dir: &tempfile::TempDir) {
    let mut killed = BTreeSet::new();
    // `up` may have started another while the first were found.
    while let Some(process) = processes::of(&tmp(dir)).iter().find(|p| !killed.contains(&p.pid)) {
        killed.insert(process.pid);
        let _ = signal_pid(process.pid, Signal::KILL);
    }
}
