//! A bit that flips while KV is on its way between two processes: it is found every time (I2) and counted, and the client
//! gets the tokens it would have got. Over each transport at the place where bytes leave one worker's hands and are not yet in
//! the other's.
#![allow(clippy::unwrap_used)]

#[path = "flipped/relay.rs"]
mod relay;

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use baton_cluster::Role;
use baton_proto::v1::GenerateRequest;
use baton_tests::cluster::client::{Answer, Client, apart, prompt, sampled};
use baton_tests::cluster::http::Metrics;
use baton_tests::cluster::{Cluster, ClusterOptions, Worker, models, wait};
use rustix::process::Signal;

/// How often, over each transport.
const FLIPS: u32 = 3;

struct Scene {
    cluster: Cluster,
    client: Client,
    _model: tempfile::TempDir,
}

impl Scene {
    fn new(transport: &'static str, env: Vec<(String, String)>) -> Scene {
        let model = models::slow().unwrap();
        let options = ClusterOptions { transport, env, ..ClusterOptions::new(&model) };
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

    /// Every flip was found, by the decode worker's own count, and made good.
    fn end(self) {
        let admin = relay::behind(&self.decode().member.admin).unwrap();
        let counted = Metrics::of(admin).unwrap().sum("baton_verify_failures_total", "");
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

/// A decode worker's KV pool, from outside.
struct Pool(File);

impl Pool {
    fn of(worker: &Worker) -> Pool {
        let fds = std::fs::read_dir(format!("/proc/{}/fd", worker.pid)).unwrap().map(|fd| fd.unwrap().path());
        let is_pool =
            |fd: &PathBuf| std::fs::read_link(fd).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:baton-kv"));
        let path = fds.into_iter().find(is_pool).expect("a memfd of the pool");
        Pool(OpenOptions::new().read(true).write(true).open(path).unwrap())
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.0.metadata().unwrap().len() as usize];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        bytes
    }

    /// Waits until a byte is not as `before`; answers where.
    fn until_changed(&self, before: &[u8]) -> usize {
        // Piece by piece, so that a worker that stands still meanwhile does not seem to be gone.
        const PIECE: usize = 4096;
        let changed = || {
            let now = self.bytes();
            let piece = now.chunks(PIECE).zip(before.chunks(PIECE)).position(|(now, before)| now != before)?;
            (piece * PIECE..now.len()).find(|&at| now[at] != before[at])
        };
        wait(changed).expect("KV that arrives")
    }

    fn flip(&self, at: usize) {
        let mut byte = [0];
        self.0.read_exact_at(&mut byte, at as u64).unwrap();
        self.0.write_all_at(&[byte[0] ^ 4], at as u64).unwrap();
    }
}

fn stands_still(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

#[test]
fn over_shm() {
    let scene = Scene::new("shm", vec![]);
    let decode = scene.decode();
    let pool = Pool::of(&decode);
    for seed in 0..u64::from(FLIPS) {
        let request = sampled(prompt(2000, seed), 20, seed);
        let want = scene.ask(&request);
        let before = pool.bytes();
        let answering = scene.cluster.block_on(scene.client.start(apart(request))).unwrap();
        pool.until_changed(&before);
        // The prefill worker was let in, and copies by itself; the decode worker stands still, so what comes now it has not
        // digested.
        scene.cluster.signal(decode.pid, Signal::STOP).unwrap();
        wait(|| stands_still(decode.pid).then_some(())).unwrap();
        let before = pool.bytes();
        pool.flip(pool.until_changed(&before));
        scene.cluster.signal(decode.pid, Signal::CONT).unwrap();
        assert_eq!(told(scene.cluster.block_on(answering.rest()).unwrap()), want);
    }
    scene.end();
}

#[test]
fn over_tcp() {
    let scene = Scene::new("tcp", vec![("BATON_ADVERTISE".to_owned(), relay::ADDRESS.to_string())]);
    let flip = relay::before(&scene.cluster).unwrap();
    for seed in 0..u64::from(FLIPS) {
        let request = sampled(prompt(600, seed), 20, seed);
        let want = scene.ask(&request);
        flip.arm(50_000 + 30_011 * seed as i64);
        assert_eq!(scene.ask(&request), want);
        assert!(flip.is_done());
    }
    scene.end();
}

/// Where UCX is, as `tools/fetch-ucx` finds or fetches it; None, said aloud, where it does not.
fn ucx_library() -> Option<String> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tools/fetch-ucx");
    let found = Command::new(script).output().unwrap();
    if !found.status.success() {
        println!("not over ucx: {}", String::from_utf8_lossy(&found.stderr));
        return None;
    }
    Some(format!("{}/lib", String::from_utf8(found.stdout).unwrap().trim()))
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
    let Some(library) = ucx_library() else { return };
    let dir = tempfile::tempdir().unwrap();
    let (shim, armed) = (build_shim(dir.path()), dir.path().join("armed"));
    let env = [
        ("BATON_UCX_LIBRARY", library),
        ("BATON_UCX_OPTIONS", "TLS=tcp".to_owned()),
        ("LD_PRELOAD", shim),
        ("BATON_TEST_FLIP", armed.to_str().unwrap().to_owned()),
    ];
    let scene = Scene::new("ucx", env.map(|(key, value)| (key.to_owned(), value)).to_vec());
    for seed in 0..u64::from(FLIPS) {
        let request = sampled(prompt(600, seed), 20, seed);
        let want = scene.ask(&request);
        File::create(&armed).unwrap();
        assert_eq!(scene.ask(&request), want);
        assert!(!armed.exists(), "no large message was sent");
    }
    scene.end();
}
