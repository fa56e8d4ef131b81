//! A bit that flips while KV is on its way between two processes: it is found every time (I2) and counted, and the client
//! gets the tokens it would have got. Over each transport at the place where bytes leave one worker's hands and are not yet in
//! the other's; over TCP also in what the decode worker answers.
#![allow(clippy::unwrap_used)]

#[path = "flipped/relay.rs"]
mod relay;

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Command;

use baton_cluster::Role;
use baton_proto::v1::GenerateRequest;
use baton_tests::cluster::client::{Answer, Client, apart, prompt, sampled};
use baton_tests::cluster::http::Metrics;
use baton_tests::cluster::pool::Pool;
use baton_tests::cluster::processes::stands_still;
use baton_tests::cluster::{Cluster, ClusterOptions, Worker, models, wait};
use baton_tests::ucx;
use rustix::process::Signal;

/// How often, over each transport.
const FLIPS: u32 = 3;

struct Scene {
    cluster: Cluster,
    client: Client,
    _model: tempfile::TempDir,
}

impl Scene {
    /// Without TLS, which would find the flips first.
    fn new(transport: &'static str, env: Vec<(String, String)>) -> Scene {
        Scene::with(transport, env, vec!["--insecure-internal".to_owned()])
    }

    fn with(transport: &'static str, env: Vec<(String, String)>, args: Vec<String>) -> Scene {
        let model = models::slow().unwrap();
        let options = ClusterOptions { transport, env, args, ..ClusterOptions::new(&model) };
        let cluster = Cluster::start(options).unwrap();
        let client = cluster.client().unwrap();
        Scene { cluster, client, _model: model }
    }

    /// Nothing of it is cached, so that all of it travels.
    fn ask(&self, request: &GenerateRequest) -> (Vec<u32>, String) {
        told(self.cluster.block_on(self.client.ask(apart(request.clone()))).unwrap())
    }

    fn decode(&self) -> Worker {
        self.cluster.wait_for_worker(Role::Decode, |_| true).unwrap()
    }

    /// Past the relay.
    fn decode_metrics(&self) -> Metrics {
        Metrics::of(relay::behind(&self.decode().member.admin).unwrap()).unwrap()
    }

    /// Flips a bit of what a relay carries to the decode worker, so often; answers are as without.
    fn flip_on_the_way(&self) {
        let flip = relay::before(&self.cluster).unwrap().there;
        for seed in 0..u64::from(FLIPS) {
            let request = sampled(prompt(600, seed), 20, seed);
            let want = self.ask(&request);
            flip.arm(50_000 + 30_011 * seed as i64);
            assert_eq!(self.ask(&request), want);
            assert!(flip.is_done());
        }
    }

    /// Every flip was found, by the decode worker's own count, and made good.
    fn end(self) {
        let counted = self.decode_metrics().sum("baton_verify_failures_total", "");
        assert_eq!(counted, f64::from(FLIPS));
        assert!(self.cluster.router_metrics().unwrap().sum("baton_recoveries_total", "") >= counted);
        self.cluster.wait_idle().unwrap();
        drop(self.client);
        self.cluster.stop().unwrap();
    }
}

/// What must be as without the fault. How much of the prompt the second attempt found cached may differ.
fn told(answer: Answer) -> (Vec<u32>, String) {
    (answer.ids, answer.text)
}

#[test]
fn over_shm() {
    let scene = Scene::new("shm", vec![]);
    let decode = scene.decode();
    let pool = Pool::of(&decode).unwrap();
    for seed in 0..u64::from(FLIPS) {
        let request = sampled(prompt(2000, seed), 20, seed);
        let want = scene.ask(&request);
        let before = pool.bytes().unwrap();
        let answering = scene.cluster.block_on(scene.client.start(apart(request))).unwrap();
        pool.until_changed(&before).unwrap();
        // The prefill worker was let in, and copies by itself; the decode worker stands still, so what comes now it has not
        // digested.
        scene.cluster.signal(decode.pid, Signal::STOP).unwrap();
        wait(|| stands_still(decode.pid).then_some(())).unwrap();
        let before = pool.bytes().unwrap();
        pool.flip(pool.until_changed(&before).unwrap()).unwrap();
        scene.cluster.signal(decode.pid, Signal::CONT).unwrap();
        assert_eq!(told(scene.cluster.block_on(answering.rest()).unwrap()), want);
    }
    scene.end();
}

#[test]
fn over_tcp() {
    let scene = Scene::new("tcp", vec![("BATON_ADVERTISE".to_owned(), relay::ADDRESS.to_string())]);
    scene.flip_on_the_way();
    scene.end();
}

/// With TLS below, a record that changed ends the connection before a byte of it is used, so that digests have nothing to find.
/// Who shows no certificate comes no further than that.
#[test]
fn over_tcp_with_tls() {
    let env = vec![("BATON_ADVERTISE".to_owned(), relay::ADDRESS.to_string())];
    let scene = Scene::with("tcp", env, vec![]);
    scene.flip_on_the_way();
    let metrics = scene.cluster.router_metrics().unwrap();
    assert!(metrics.sum("baton_recoveries_total", "") >= f64::from(FLIPS));
    assert_eq!(scene.decode_metrics().sum("baton_verify_failures_total", ""), 0.0);
    // Whatever is no TLS record, as what a session begins with, is answered by an alert and the end.
    let mut stranger = TcpStream::connect(relay::door(&scene.cluster).unwrap()).unwrap();
    stranger.write_all(&[b'B'; 64]).unwrap();
    let mut answer = Vec::new();
    stranger.read_to_end(&mut answer).unwrap();
    assert!(matches!(answer[..], [0x15, 0x03, ..]), "{answer:?}");
    scene.cluster.wait_idle().unwrap(); // I6
    drop(scene.client);
    scene.cluster.stop().unwrap();
}

/// Bytes of the frame that grants so many blocks of one group, before those of what the decode worker says next.
fn granted(blocks: i64) -> i64 {
    16 + 14 + 4 * blocks
}

#[test]
fn over_tcp_on_the_way_back() {
    let scene = Scene::new("tcp", vec![("BATON_ADVERTISE".to_owned(), relay::ADDRESS.to_string())]);
    let flip = relay::before(&scene.cluster).unwrap().back;
    let request = sampled(prompt(592, 1), 20, 1);
    let want = scene.ask(&request);
    // In what is granted, and behind it in a heartbeat or in the word that all is verified.
    for after in [20, granted(37) + 18] {
        flip.arm(after);
        assert_eq!(scene.ask(&request), want);
        assert!(flip.is_done());
    }
    // In a fence: its reader is made to stand still, so that it does not give up before it is told.
    let pool = Pool::of(&scene.decode()).unwrap();
    let prefill = scene.cluster.pid("prefill").unwrap();
    let before = pool.bytes().unwrap();
    flip.arm(granted(125) + 18);
    let answering = scene.cluster.block_on(scene.client.start(apart(sampled(prompt(2000, 2), 20, 2)))).unwrap();
    pool.until_changed(&before).unwrap();
    scene.cluster.signal(prefill, Signal::STOP).unwrap();
    wait(|| stands_still(prefill).then_some(())).unwrap();
    drop(answering);
    wait(|| flip.is_done().then_some(())).unwrap();
    scene.cluster.signal(prefill, Signal::CONT).unwrap();
    scene.cluster.wait_idle().unwrap(); // I6
    assert_eq!(scene.ask(&request), want);
    scene.cluster.wait_idle().unwrap();
    // Found where it arrived.
    let prefill = scene.cluster.wait_for_worker(Role::Prefill, |_| true).unwrap();
    assert_eq!(prefill.metrics().unwrap().sum("baton_verify_failures_total", ""), 3.0);
    drop(scene.client);
    scene.cluster.stop().unwrap();
}

fn build_shim(dir: &Path) -> String {
    let (source, library) =
        (Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/flipped/shim.rs"), dir.join("libshim.so"));
    let rustc = Path::new(env!("CARGO")).with_file_name("rustc");
    let flags = ["--crate-type=cdylib", "--edition=2024", "-O", "-o"];
    let built = Command::new(rustc).args(flags).arg(&library).arg(source).output().unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    library.to_str().unwrap().to_owned()
}

#[test]
fn over_ucx() {
    let Some(library) = ucx::library() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (shim, armed) = (build_shim(dir.path()), dir.path().join("armed"));
    let preload = [("LD_PRELOAD", shim), ("BATON_TEST_FLIP", armed.to_str().unwrap().to_owned())];
    let preload = preload.map(|(key, value)| (key.to_owned(), value));
    let scene = Scene::new("ucx", ucx::env(library).into_iter().chain(preload).collect());
    for seed in 0..u64::from(FLIPS) {
        let request = sampled(prompt(600, seed), 20, seed);
        let want = scene.ask(&request);
        File::create(&armed).unwrap();
        assert_eq!(scene.ask(&request), want);
        assert!(!armed.exists(), "no large message was sent");
    }
    scene.end();
}
