//! Three hosts, as far as the network can tell: router, prefill and decode worker in a network namespace each, joined by a
//! bridge. KV must find its way over TCP, and the answer must be that of one process.
#![allow(clippy::unwrap_used)]

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::{Child, Command};

use anyhow::{Context, ensure};
use baton_model_files::fetch;
use baton_tests::binary;
use baton_tests::cluster::client::{Client, greedy, prompt};
use baton_tests::cluster::http::{self, Metrics};
use baton_tests::cluster::{signal_pid, wait, wait_all_free};
use baton_tests::local::{Local, Options};
use baton_types::SamplingParams;
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};

const ROUTER: &str = "10.77.0.1";
const PREFILL: &str = "10.77.0.2";
const DECODE: &str = "10.77.0.3";

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

#[test]
fn three_hosts_answer_like_one_process() {
    if !may_make_namespaces() {
        println!("skipped: needs root, to make network namespaces");
        return;
    }
    let path = fetch::resolve("smollm2", &fetch::default_cache().unwrap(), &fetch::ProgressBar::new()).unwrap();
    let (prompt, tokens) = (prompt(150, 1), 24);
    let params = SamplingParams { temperature: 0.0, max_tokens: tokens, ..SamplingParams::default() };
    let want: Vec<u32> = {
        let mut local = Local::open(&path, Options::default()).unwrap();
        local.one(&prompt, &params).unwrap().into_iter().map(|token| token.id).collect()
    };
    let mut hosts = Hosts::new().unwrap();
    let registry = format!("http://{ROUTER}:8001");
    let model = path.to_str().unwrap();
    hosts.start("router", &["--model", model, "--http", "10.77.0.1:8000", "--grpc", "10.77.0.1:8001"]).unwrap();
    let worker = ["--model", model, "--registry", &registry, "--kv-memory", "64MiB"];
    let prefill = ["--grpc", "10.77.0.2:0", "--admin", "10.77.0.2:9000"];
    hosts.start("prefill", &[&worker[..], &prefill].concat()).unwrap();
    // As in a container, which does not know its address beforehand.
    let decode =
        ["--grpc", "0.0.0.0:9001", "--admin", "0.0.0.0:9000", "--transfer", "0.0.0.0:9002", "--advertise", DECODE];
    hosts.start("decode", &[&worker[..], &decode].concat()).unwrap();
    let visit = || {
        for (host, port) in [(PREFILL, 9000), (DECODE, 9000), (ROUTER, 8000)] {
            let ready = || http::get(address(host, port), "/ready").ok().filter(|(code, _)| *code == 200);
            wait(ready).with_context(|| format!("{host} does not get ready"))?;
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let answer = runtime.block_on(async {
            let client = Client::connect(address(ROUTER, 8001)).await?;
            let answer = client.ask(greedy(prompt, tokens)).await?;
            wait_all_free(&registry).await?;
            anyhow::Ok(answer)
        })?;
        let bytes = Metrics::of(address(PREFILL, 9000))?.sum("baton_transfer_bytes_total", "transport=\"tcp\"");
        Ok((answer.ids, bytes))
    };
    let (ids, bytes) = hosts.visit(visit).unwrap();
    assert_eq!(ids, want); // I1
    assert!(bytes > 0.0, "no KV went over TCP");
    hosts.stop().unwrap();
}
