//! Hosts, as far as the network can tell: a namespace each for router, prefill and decode worker.

use std::fs::File;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use anyhow::{Context, ensure};
use baton_tests::binary;
use baton_tests::cluster::{http, learn, signal_pid, wait};
use baton_tests::needs;
use rustix::process::Signal;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, capabilities, move_into_link_name_space};

use crate::wire::{Quality, Wire};

pub const ROUTER: &str = "10.77.0.1";
pub const PREFILL: &str = "10.77.0.2";
pub const DECODE: &str = "10.77.0.3";
pub const REGISTRY: &str = "https://10.77.0.1:8002";
const ROLES: [&str; 3] = ["router", "prefill", "decode"];

/// The namespaces, and what runs in them.
pub struct Hosts {
    pub name: String,
    /// What joins them, if no bridge does.
    pub wire: Option<Wire>,
    dir: tempfile::TempDir,
    /// The folder of sockets that workers share, as pods of one node.
    sockets: Option<PathBuf>,
    processes: Vec<(Child, &'static str)>,
}

impl Hosts {
    fn new(quality: Option<Quality>) -> anyhow::Result<Hosts> {
        let name = format!("baton-{}", std::process::id());
        let mut hosts = Hosts { name, wire: None, dir: tempfile::tempdir()?, sockets: None, processes: vec![] };
        hosts.script(if quality.is_some() { "taps" } else { "up" })?;
        if let Some(quality) = quality {
            let ends =
                ROLES.iter().map(|role| Ok(File::open(hosts.file(role))?)).collect::<anyhow::Result<Vec<_>>>()?;
            hosts.wire = Some(Wire::between(&ends, quality)?);
        }
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

    /// `baton` in the namespace of a role.
    pub fn command(&self, role: &str) -> anyhow::Result<Command> {
        let baton = binary::command()?;
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &format!("{}-{role}", self.name)]).arg(baton.get_program());
        baton_runtime::die_with_parent(&mut command);
        Ok(command)
    }

    /// Starts `baton ROLE` in the namespace of its role.
    fn start(&mut self, role: &'static str, args: &[&str]) -> anyhow::Result<()> {
        let mut command = self.command(role)?;
        command.arg(role).args(args);
        // Every prompt is handed over, however short.
        command.env("BATON_LOCAL_PREFILL", "1");
        if let Some(folder) = self.sockets.as_ref().filter(|_| role != "router") {
            command.env("BATON_TRANSFER_SOCKETS", folder);
        }
        command.stderr(File::create(self.dir.path().join(role))?);
        self.processes.push((command.spawn()?, role));
        Ok(())
    }

    fn log(&self) -> String {
        let read = |role: &str| std::fs::read_to_string(self.dir.path().join(role)).unwrap_or_default();
        self.processes.iter().map(|(_, role)| read(role)).collect()
    }

    /// Does something on a thread in the router's namespace.
    pub fn visit<T: Send>(&self, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
        let namespace = File::open(self.file("router"))?;
        inside(&namespace, work)
    }

    /// All are told to stop and must do so.
    pub fn stop(mut self) -> anyhow::Result<()> {
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

/// Does something on a thread in a namespace.
pub fn inside<T: Send>(namespace: &File, work: impl FnOnce() -> anyhow::Result<T> + Send) -> anyhow::Result<T> {
    let enter = || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).context("entering")?;
        work()
    };
    std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

pub fn address(host: &str, port: u16) -> SocketAddr {
    format!("{host}:{port}").parse().unwrap()
}

/// True for root with a root's rights; a container's root may have none over networks.
fn may_make_namespaces() -> bool {
    let needed = CapabilitySet::NET_ADMIN | CapabilitySet::SYS_ADMIN;
    capabilities(None).is_ok_and(|have| have.effective.contains(needed))
}

/// Three hosts, joined by a bridge or by a wire of that quality; None where nobody can make any.
pub fn joined(quality: Option<Quality>) -> Option<Hosts> {
    if !may_make_namespaces() {
        needs::left_out("needs root, to make network namespaces");
        return None;
    }
    if Command::new("ip").arg("-V").output().is_err() {
        needs::left_out("needs ip, of the package iproute2");
        return None;
    }
    Some(Hosts::new(quality).unwrap())
}

/// A cluster on three hosts.
pub fn three_hosts(model: &Path, quality: Option<Quality>) -> Option<Hosts> {
    Some(cluster(joined(quality)?, model))
}

/// A cluster of three pods on one host: the workers share a folder of sockets.
pub fn three_pods(model: &Path) -> Option<Hosts> {
    let mut pods = joined(None)?;
    let folder = pods.dir.path().join("sockets");
    std::fs::create_dir(&folder).unwrap();
    pods.sockets = Some(folder);
    Some(cluster(pods, model))
}

fn cluster(mut hosts: Hosts, model: &Path) -> Hosts {
    let model = model.to_str().unwrap();
    let certs = hosts.dir.path().join("certs");
    let folder = certs.to_str().unwrap();
    binary::output(&["certs", folder]).unwrap();
    learn(&certs).unwrap();
    let tls = |role: &str| {
        let file = |end: &str| format!("{folder}/{role}{end}.pem");
        let ca = format!("{folder}/ca.pem");
        ["--tls-cert".to_owned(), file(""), "--tls-key".to_owned(), file("-key"), "--tls-ca".to_owned(), ca]
    };
    let router = [
        "--http",
        "10.77.0.1:8000",
        "--grpc",
        "10.77.0.1:8001",
        "--internal",
        "10.77.0.1:8002",
        "--admin",
        "10.77.0.1:9000",
        // Short prompts are handed over, too.
        "--local-prompt",
        "0",
    ];
    let start = |hosts: &mut Hosts, role: &'static str, args: &[&str]| {
        let tls = tls(role);
        let args: Vec<&str> = args.iter().copied().chain(tls.iter().map(String::as_str)).collect();
        hosts.start(role, &args).unwrap();
    };
    start(&mut hosts, "router", &[&["--model", model][..], &router].concat());
    let worker = ["--model", model, "--registry", REGISTRY, "--kv-memory", "64MiB"];
    let prefill = ["--grpc", "10.77.0.2:0", "--admin", "10.77.0.2:9000"];
    start(&mut hosts, "prefill", &[&worker[..], &prefill].concat());
    // As in a container, which does not know its address beforehand.
    let decode =
        ["--grpc", "0.0.0.0:9001", "--admin", "0.0.0.0:9000", "--transfer", "0.0.0.0:9002", "--advertise", DECODE];
    start(&mut hosts, "decode", &[&worker[..], &decode].concat());
    let ready = || {
        for (host, port) in [(PREFILL, 9000), (DECODE, 9000), (ROUTER, 8000)] {
            let ready = || http::get(address(host, port), "/ready").ok().filter(|(code, _)| *code == 200);
            wait(ready).with_context(|| format!("{host} does not get ready"))?;
        }
        Ok(())
    };
    hosts.visit(ready).unwrap();
    hosts
}
