//! A path between two workers that breaks in the middle of a handoff: the request goes on over the next one and gets the tokens
//! it would have got, `baton status` says over what KV goes and why not over the other, and the broken path is tried again.
#![allow(clippy::unwrap_used)]

use std::os::fd::RawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_tests::cluster::client::{Client, apart, prompt, sampled};
use baton_tests::cluster::pool::Pool;
use baton_tests::cluster::{Cluster, ClusterOptions, models, wait};
use baton_tests::{binary, ucx};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};
use serde_json::Value;

/// How long a path that has failed once is not tried. A status read later no longer says that it has failed.
const PAUSE: Duration = Duration::from_secs(5);

/// Shuts down a process's connections to sockets of decode workers on this host, as if they had broken.
fn cut_unix_sessions(pid: u32) -> usize {
    let process = pidfd_open(Pid::from_raw(pid as i32).unwrap(), PidfdFlags::empty()).unwrap();
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let fds = fds.filter_map(|fd| fd.file_name().to_str()?.parse::<RawFd>().ok());
    let streams =
        fds.filter_map(|fd| Some(UnixStream::from(pidfd_getfd(&process, fd, PidfdGetfdFlags::empty()).ok()?)));
    let is_session = |stream: &UnixStream| {
        let peer = stream.peer_addr().ok();
        peer.is_some_and(|peer| peer.as_abstract_name().is_some_and(|name| name.starts_with(b"baton-")))
    };
    let cut = streams.filter(is_session).map(|stream| stream.shutdown(std::net::Shutdown::Both).unwrap());
    cut.count()
}

struct Scene {
    cluster: Cluster,
    client: Client,
}

impl Scene {
    fn ask(&self, seed: u64) -> Vec<u32> {
        self.cluster.block_on(self.client.ask(apart(sampled(prompt(600, seed), 8, seed)))).unwrap().ids
    }

    fn status(&self, flags: &[&str]) -> String {
        let registry = self.cluster.registry().to_owned();
        let said = binary::run(&[&["status", "--registry", &registry], flags].concat()).unwrap();
        assert_eq!(said.code, Some(0), "{}", said.err);
        said.out
    }

    /// The only pair of workers.
    fn pair(&self) -> Value {
        let status: Value = serde_json::from_str(&self.status(&["--json"])).unwrap();
        let pairs = status["pairs"].as_array().unwrap();
        assert_eq!(pairs.len(), 1, "{status:#}");
        pairs[0].clone()
    }
}

fn path<'a>(pair: &'a Value, transport: &str) -> &'a Value {
    pair["paths"].as_array().unwrap().iter().find(|path| path["transport"] == transport).unwrap()
}

fn falls_back_to(next: &str, env: Vec<(String, String)>) {
    let model = models::slow().unwrap();
    // UCX encrypts nothing, so with TLS nobody falls back to it.
    let args = if next == "ucx" { vec!["--insecure-internal".to_owned()] } else { vec![] };
    let cluster = Cluster::start(ClusterOptions { env, args, ..ClusterOptions::new(&model) }).unwrap();
    let scene = Scene { client: cluster.client().unwrap(), cluster };
    let request = sampled(prompt(2400, 1), 8, 1);
    let want = scene.cluster.block_on(scene.client.ask(apart(request.clone()))).unwrap().ids;
    let pair = scene.pair();
    assert_eq!(pair["over"], "shm", "{pair:#}");
    assert!(path(&pair, "shm")["bytes_per_second"].as_f64().unwrap() > 0.0, "{pair:#}");
    assert_eq!(path(&pair, "tcp")["unused"], "in reserve behind shm");

    let prefill = scene.cluster.wait_for_worker(Role::Prefill, |_| true).unwrap();
    let pool = Pool::of(&scene.cluster.wait_for_worker(Role::Decode, |_| true).unwrap()).unwrap();
    let before = pool.bytes().unwrap();
    let answering = scene.cluster.block_on(scene.client.start(apart(request))).unwrap();
    pool.until_changed(&before).unwrap();
    let cut = Instant::now();
    assert_eq!(cut_unix_sessions(prefill.pid), 1);
    assert_eq!(scene.cluster.block_on(answering.rest()).unwrap().ids, want); // I1
    let pair = scene.pair();
    assert_eq!(pair["over"], next, "{pair:#}");
    let why = path(&pair, "shm")["unused"].as_str().unwrap();
    let told = why.starts_with("failed ") && why.contains("tried again in");
    assert!(told || cut.elapsed() >= PAUSE, "{why}");
    assert_eq!(path(&pair, "shm")["failures"], 1);
    let table = scene.status(&[]);
    let told = table.contains("shm (") && table.contains(": failed ");
    assert!(told || cut.elapsed() >= PAUSE, "{table}");
    // It was the same prefill worker that went on, over another path.
    let carried = format!("transport=\"{next}\"");
    assert!(prefill.metrics().unwrap().sum("baton_transfer_bytes_total", &carried) > 0.0);
    assert_eq!(scene.cluster.router_metrics().unwrap().sum("baton_recoveries_total", "leg=\"transfer\""), 1.0);

    // Once its pause is over.
    let want = scene.ask(2);
    let again = || {
        assert_eq!(scene.ask(2), want); // I1: over whichever path it went.
        (scene.pair()["over"] == "shm").then_some(())
    };
    wait(again).unwrap();
    scene.cluster.wait_idle().unwrap(); // I6
    drop(scene.client);
    scene.cluster.stop().unwrap();
}

#[test]
fn shared_memory_falls_back_to_tcp() {
    falls_back_to("tcp", vec![]);
}

#[test]
fn shared_memory_falls_back_to_ucx_where_that_is_set_up() {
    let Some(library) = ucx::library() else { return };
    falls_back_to("ucx", ucx::env(library));
}
