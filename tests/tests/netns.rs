//! Three hosts, as far as the network can tell: router, prefill and decode worker in a network namespace each, joined by a
//! bridge. KV must find its way over TCP, and the answer must be that of one process.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, ensure};
use baton_cluster::{Role, View};
use baton_model_files::fetch;
use baton_tests::binary;
use baton_tests::cluster::client::{Client, greedy, prompt};
use baton_tests::cluster::http::{self, Metrics};
use baton_tests::cluster::{models, signal_pid, status, wait, wait_all_free};
use baton_tests::local::{Local, Options};
use baton_types::SamplingParams;
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};

const ROUTER: &str = "10.77.0.1";
const PREFILL: &str = "10.77.0.2";
const DECODE: &str = "10.77.0.3";
const REGISTRY: &str = "http://10.77.0.1:8001";

/// The namespaces, and what runs in them.
struct Hosts {
    name: String,
    dir: tempfile::TempDir,
    processes: Vec<(Child, &'static str)>,
}

impl Hosts {
    fn new() -> anyhow::Result<Hosts> {
        let hosts =
            Hosts { name: format!("baton-{}", std::process::id()), dir: tempfile::tempdir()?, processes: vec![] };
        hosts.script("up")?;
        Ok(hosts)
    }

    fn script(&self, word: &str) -> anyhow::Result<()> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("netns.sh");
        let output = Command::new(script).args([word, &self.name]).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "tests/netns.sh {word}: {said} (it needs `ip`, of the package iproute2)");
        Ok(())
    }

    fn file(&self, role: &str) -> String {
        format!("/run/netns/{}-{role}", self.name)
    }

    /// Starts `baton ROLE` in the namespace of its role.
    fn start(&mut self, role: &'static str, args: &[&str]) -> anyhow::Result<()> {
        let baton = binary::command()?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{role}", self.name)]).arg(baton.get_program()).arg(role).args(args);
        command.stderr(File::create(self.dir.path().join(role))?);
        baton_runtime::die_with_parent(&mut command);
        self.processes.push((command.spawn()?, role));
        Ok(())
    }

    fn log(&self) -> String {
        let read = |role: &str| std::fs::read_to_string(self.dir.path().join(role)).unwrap_or_default();
        self.processes.iter().map(|(_, role)| read(role)).collect()
    }

    /// Does something on a thread in the router's namespace.
    fn visit<T: Send>(&self, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        let namespace = File::open(self.file("router"))?;
        let enter = move || {
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).context("entering")?;
            work()
        };
        std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
    }

    /// All are told to stop and must do so.
    fn stop(mut self) -> anyhow::Result<()> {
        // `ip netns exec` becomes the program, so the child is baton itself. The registry, in the router, goes last.
        while let Some((mut process, role)) = self.processes.pop() {
            signal_pid(process.id(), Signal::TERM)?;
            let status = wait(|| process.try_wait().transpose())??;
            ensure!(status.success(), "{role} ended with {status}\n{}", self.log());
        }
        Ok(())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        for (process, _) in &mut self.processes {
            // Gone already is as good.
            let _ = process.kill();
            let _ = process.wait();
        }
        let down = self.script("down");
        assert!(down.is_ok() || std::thread::panicking(), "{down:?}");
    }
}

fn address(host: &str, port: u16) -> SocketAddr {
    format!("{host}:{port}").parse().unwrap()
}

/// True for root with a root's rights; a container's root may have none over networks.
fn may_make_namespaces() -> bool {
    let needed = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    capabilities(None).is_ok_and(|have| have.effective.contains(needed))
}

/// What one process answers, greedily.
fn one_process(path: &Path, prompt: &[u32], tokens: u32) -> Vec<u32> {
    let params = SamplingParams { temperature: 0.0, max_tokens: tokens, ..SamplingParams::default() };
    let mut local = Local::open(path, Options::default()).unwrap();
    local.one(prompt, &params).unwrap().into_iter().map(|token| token.id).collect()
}

/// A cluster on three hosts; None where nobody can make any.
fn three_hosts(model: &Path) -> Option<Hosts> {
    if !may_make_namespaces() {
        println!("skipped: needs root, to make network namespaces");
        return None;
    }
    if Command::new("ip").arg("-V").output().is_err() {
        println!("skipped: needs ip, of the package iproute2");
        return None;
    }
    let mut hosts = Hosts::new().unwrap();
    let model = model.to_str().unwrap();
    hosts.start("router", &["--model", model, "--http", "10.77.0.1:8000", "--grpc", "10.77.0.1:8001"]).unwrap();
    let worker = ["--model", model, "--registry", REGISTRY, "--kv-memory", "64MiB"];
    let prefill = ["--grpc", "10.77.0.2:0", "--admin", "10.77.0.2:9000"];
    hosts.start("prefill", &[&worker[..], &prefill].concat()).unwrap();
    // As in a container, which does not know its address beforehand.
    let decode =
        ["--grpc", "0.0.0.0:9001", "--admin", "0.0.0.0:9000", "--transfer", "0.0.0.0:9002", "--advertise", DECODE];
    hosts.start("decode", &[&worker[..], &decode].concat()).unwrap();
    let ready = || {
        for (host, port) in [(PREFILL, 9000), (DECODE, 9000), (ROUTER, 8000)] {
            let ready = || http::get(address(host, port), "/ready").ok().filter(|(code, _)| *code == 200);
            wait(ready).with_context(|| format!("{host} does not get ready"))?;
        }
        Ok(())
    };
    hosts.visit(ready).unwrap();
    Some(hosts)
}

/// One test at a time: there is one set of addresses.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn three_hosts_answer_like_one_process() {
    let _alone = alone();
    let path = fetch::resolve("smollm2", &fetch::default_cache().unwrap(), &fetch::ProgressBar::new()).unwrap();
    let Some(hosts) = three_hosts(&path) else { return };
    let (prompt, tokens) = (prompt(150, 1), 24);
    let want = one_process(&path, &prompt, tokens);
    let work = || {
        let answer = runtime()?.block_on(async {
            let client = Client::connect(address(ROUTER, 8001)).await?;
            let answer = client.ask(greedy(prompt, tokens)).await?;
            wait_all_free(REGISTRY).await?;
            anyhow::Ok(answer)
        })?;
        let bytes = Metrics::of(address(PREFILL, 9000))?.sum("baton_transfer_bytes_total", "transport=\"tcp\"");
        Ok((answer.ids, bytes))
    };
    let (ids, bytes) = hosts.visit(work).unwrap();
    assert_eq!(ids, want); // I1
    assert!(bytes > 0.0, "no KV went over TCP");
    hosts.stop().unwrap();
}

#[test]
fn a_cable_pulled_mid_prompt_changes_no_answer() {
    let _alone = alone();
    let model = models::slow().unwrap();
    let Some(hosts) = three_hosts(model.path()) else { return };
    let (prompt, tokens) = (prompt(3000, 1), 20);
    let want = one_process(model.path(), &prompt, tokens);
    let cable = |state: &str| {
        let hub = format!("{}-hub", hosts.name);
        let status = Command::new("ip").args(["-n", &hub, "link", "set", "prefill", state]).status()?;
        ensure!(status.success(), "ip link set prefill {state}");
        anyhow::Ok(())
    };
    let work = || {
        let runtime = runtime()?;
        let mut views = runtime.block_on(async { anyhow::Ok(baton_cluster::connect(REGISTRY).await?.watch()) })?;
        let both = |view: &Arc<View>| view.members.len() == 2;
        let view = runtime.block_on(views.wait_for(both))?.clone();
        let prefill = view.members.iter().find(|m| m.role == Role::Prefill).context("a prefill worker")?;
        let client = runtime.block_on(Client::connect(address(ROUTER, 8001)))?;
        let answering = runtime.block_on(client.start(greedy(prompt.clone(), tokens)))?;
        wait(|| runtime.block_on(status(prefill)).ok().filter(|s| s.running > 0))?;
        cable("down")?;
        // Nothing says that the worker is gone; its silence does (I5).
        let cut = runtime.block_on(answering.rest())?;
        let recoveries = Metrics::of(address(ROUTER, 8000))?.sum("baton_recoveries_total", "");
        cable("up")?;
        runtime.block_on(views.wait_for(both)).map(drop)?;
        runtime.block_on(wait_all_free(REGISTRY))?; // I6
        let whole = runtime.block_on(client.ask(greedy(prompt, tokens)))?;
        Ok((cut.ids, whole.ids, recoveries))
    };
    let (cut, whole, recoveries) = hosts.visit(work).unwrap();
    assert_eq!((cut, whole), (want.clone(), want));
    assert!(recoveries >= 1.0);
    hosts.stop().unwrap();
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
