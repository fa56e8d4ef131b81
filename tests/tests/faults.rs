//! What happens to requests when a process dies, hangs or comes back: the same tokens as without the fault, each index once
//! (I4, checked by the client), within a bound (I5), and every block free afterwards on both sides (I6).
#![allow(clippy::unwrap_used)]

mod etcd;

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use baton_cluster::Role;
use baton_proto::v1::GenerateRequest;
use baton_tests::cluster::client::{Answer, Answering, Client, apart, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, Worker, models, status_of, wait};
use baton_types::{Constraint, WorkerId};
use rustix::process::Signal;
use tempfile::TempDir;

/// A cluster of a slow model, and what it says when nothing goes wrong.
struct Scene {
    cluster: Cluster,
    client: Client,
    _model: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Scene {
    /// One at a time: two cores are all there may be.
    fn new(change: impl FnOnce(ClusterOptions) -> ClusterOptions) -> Scene {
        static ONE: Mutex<()> = Mutex::new(());
        let alone = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let model = models::slow().unwrap();
        let cluster = Cluster::start(change(ClusterOptions::new(&model))).unwrap();
        let client = cluster.client().unwrap();
        Scene { cluster, client, _model: model, _alone: alone }
    }

    fn workers(prefill: u32, decode: u32, transport: &'static str) -> Scene {
        Scene::new(|options| ClusterOptions { prefill, decode, transport, ..options })
    }

    /// Nothing of it is cached: workers are to be lost while they have much to do.
    fn ask(&self, request: &GenerateRequest) -> Answer {
        self.cluster.block_on(self.client.ask(apart(request.clone()))).unwrap()
    }

    fn start(&self, request: &GenerateRequest) -> Answering {
        self.cluster.block_on(self.client.start(apart(request.clone()))).unwrap()
    }

    fn until(&self, answering: &mut Answering, tokens: usize) {
        self.cluster.block_on(answering.until(tokens)).unwrap();
    }

    fn rest(&self, answering: Answering) -> anyhow::Result<Answer> {
        self.cluster.block_on(answering.rest())
    }

    /// Kills the router, and waits until another is started in its place.
    fn restart_router(&self) {
        let old = self.cluster.pid("router").unwrap();
        self.cluster.signal(old, Signal::KILL).unwrap();
        wait(|| self.cluster.pids("router").first().filter(|&&pid| pid != old).copied()).unwrap();
    }

    fn wait_ready(&self) {
        wait(|| baton_tests::cluster::http::get(self.cluster.http(), "/ready").ok().filter(|r| r.0 == 200)).unwrap();
    }

    /// A worker of this role that has something to do.
    fn busy(&self, role: Role) -> Worker {
        self.cluster.wait_for_worker(role, |w| w.status.running > 0).unwrap()
    }

    fn signal(&self, worker: &Worker, signal: Signal) {
        self.cluster.signal(worker.pid, signal).unwrap();
    }

    fn recoveries(&self, leg: &str) -> f64 {
        let labels = format!("leg=\"{leg}\"");
        self.cluster.router_metrics().unwrap().sum("baton_recoveries_total", &labels)
    }

    /// Everything is free, and stays so until the end.
    fn end(self) {
        self.cluster.wait_idle().unwrap();
        drop(self.client);
        self.cluster.stop().unwrap();
    }
}

/// An answer that takes seconds.
fn long_answer(seed: u64) -> GenerateRequest {
    sampled(prompt(30, seed), 700, seed)
}

/// A prompt that takes many steps.
fn long_prompt(seed: u64) -> GenerateRequest {
    sampled(prompt(3000, seed), 20, seed)
}

/// The same under a constraint that keeps it as long: where the answer stands in it must be found again elsewhere.
fn constrained(mut request: GenerateRequest) -> GenerateRequest {
    if let Some(sampling) = &mut request.sampling {
        sampling.ignore_eos = false;
        sampling.constraint = Some(Constraint::Regex("([a-z]{1,9} ){800}".to_owned()).into());
    }
    request
}

fn decode_worker_killed_mid_stream(transport: &'static str, request: GenerateRequest) {
    let scene = Scene::workers(1, 2, transport);
    let want = scene.ask(&request);
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 50);
    scene.signal(&scene.busy(Role::Decode), Signal::KILL);
    assert_eq!(scene.rest(answering).unwrap(), want); // I1, I4
    assert!(scene.recoveries("decode") >= 1.0);
    scene.end();
}

#[test]
fn a_decode_worker_killed_mid_stream_shm() {
    decode_worker_killed_mid_stream("shm", long_answer(1));
}

#[test]
fn a_decode_worker_killed_mid_stream_tcp() {
    decode_worker_killed_mid_stream("tcp", constrained(long_answer(1)));
}

#[test]
fn the_only_decode_worker_killed_under_several_streams() {
    let scene = Scene::workers(1, 1, "auto");
    let requests = [1, 2, 3, 4].map(long_answer);
    let want = requests.each_ref().map(|r| scene.ask(r));
    let mut answering = requests.each_ref().map(|r| scene.start(r));
    answering.iter_mut().for_each(|a| scene.until(a, 20));
    scene.signal(&scene.busy(Role::Decode), Signal::KILL);
    // It is started again within the time a request waits.
    assert_eq!(answering.map(|a| scene.rest(a).unwrap()), want);
    assert!(scene.recoveries("decode") >= 4.0);
    scene.end();
}

/// A worker that takes its time to start: longer than a new request would wait.
#[test]
fn the_only_decode_worker_dies_again_while_it_starts() {
    let scene = Scene::workers(1, 1, "auto");
    let request = long_answer(6);
    let want = scene.ask(&request);
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 20);
    let mut killed = scene.busy(Role::Decode).pid;
    let began = Instant::now();
    scene.cluster.signal(killed, Signal::KILL).unwrap();
    while began.elapsed() < Duration::from_secs(4) {
        killed = wait(|| scene.cluster.pids("decode").first().filter(|&&pid| pid != killed).copied()).unwrap();
        scene.cluster.signal(killed, Signal::KILL).unwrap();
    }
    assert_eq!(scene.rest(answering).unwrap(), want);
    scene.end();
}

fn prefill_worker_killed_mid_prompt(prefill: u32, transport: &'static str) {
    let scene = Scene::workers(prefill, 1, transport);
    let request = long_prompt(1);
    let want = scene.ask(&request);
    let answering = scene.start(&request);
    scene.signal(&scene.busy(Role::Prefill), Signal::KILL);
    assert_eq!(scene.rest(answering).unwrap(), want);
    assert!(scene.recoveries("prefill") >= 1.0);
    scene.end();
}

#[test]
fn a_prefill_worker_killed_mid_prompt_shm() {
    prefill_worker_killed_mid_prompt(2, "shm");
}

#[test]
fn a_prefill_worker_killed_mid_prompt_tcp() {
    prefill_worker_killed_mid_prompt(2, "tcp");
}

#[test]
fn the_only_prefill_worker_killed_mid_prompt() {
    prefill_worker_killed_mid_prompt(1, "auto");
}

#[test]
fn a_decode_worker_that_hangs_is_given_up_and_may_come_back() {
    let scene = Scene::workers(1, 2, "auto");
    let request = long_answer(2);
    let want = scene.ask(&request);
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 50);
    let stopped = scene.busy(Role::Decode);
    scene.signal(&stopped, Signal::STOP);
    assert_eq!(scene.rest(answering).unwrap(), want);
    assert!(scene.recoveries("decode") >= 1.0);
    // Back, it goes on with a sequence nobody wants, learns that, and takes new requests.
    scene.signal(&stopped, Signal::CONT);
    scene.cluster.wait_idle().unwrap();
    assert_eq!(scene.ask(&request), want);
    assert_eq!(scene.ask(&request), want);
    scene.end();
}

#[test]
fn the_only_decode_worker_hangs_and_its_requests_get_a_typed_error() {
    let env = vec![("BATON_WORKER_WAIT".to_owned(), "2s".to_owned())];
    let scene = Scene::new(|options| ClusterOptions { prefill: 1, decode: 1, env, ..options });
    let request = long_answer(5);
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 20);
    let stopped = scene.busy(Role::Decode);
    scene.signal(&stopped, Signal::STOP);
    let error = scene.rest(answering).unwrap_err();
    let status = error.downcast_ref::<tonic::Status>().map(tonic::Status::code);
    assert_eq!(status, Some(tonic::Code::Unavailable), "{error:#}"); // I5
    scene.signal(&stopped, Signal::CONT);
    scene.cluster.wait_idle().unwrap();
    assert_eq!(scene.ask(&request).ids.len(), 700);
    scene.end();
}

#[test]
fn a_prefill_worker_that_hangs_is_given_up_and_its_late_writes_change_nothing() {
    let scene = Scene::workers(2, 1, "auto");
    let request = long_prompt(2);
    let want = scene.ask(&request);
    let answering = scene.start(&request);
    let stopped = scene.busy(Role::Prefill);
    scene.signal(&stopped, Signal::STOP);
    assert_eq!(scene.rest(answering).unwrap(), want); // I3
    assert!(scene.recoveries("prefill") >= 1.0);
    scene.signal(&stopped, Signal::CONT);
    scene.cluster.wait_idle().unwrap();
    assert_eq!(scene.ask(&request), want);
    assert_eq!(scene.ask(&request), want);
    scene.end();
}

#[test]
fn clients_that_leave_free_both_sides() {
    let scene = Scene::workers(1, 1, "auto");
    for round in 0..3 {
        let mut mid_answer: Vec<_> = (0..4).map(|seed| scene.start(&long_answer(seed))).collect();
        mid_answer.iter_mut().for_each(|a| scene.until(a, 3 + round));
        let mid_prompt: Vec<_> = (0..2).map(|seed| scene.start(&long_prompt(seed))).collect();
        scene.busy(Role::Prefill);
        drop((mid_answer, mid_prompt));
        scene.cluster.wait_idle().unwrap();
    }
    assert_eq!(scene.ask(&long_answer(9)).ids.len(), 700);
    scene.end();
}

#[test]
fn a_killed_router_comes_back_and_finds_its_workers() {
    let scene = Scene::workers(1, 1, "auto");
    let request = long_answer(3);
    let want = scene.ask(&request);
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 10);
    let workers = |cluster: &Cluster| cluster.workers().iter().map(|w| w.member.id).collect::<Vec<_>>();
    let before = workers(&scene.cluster);
    scene.restart_router();
    let error = scene.rest(answering).unwrap_err();
    assert!(error.downcast_ref::<tonic::Status>().is_some(), "{error:#}");
    // Its stream is gone, so its blocks are free; the workers live on and register again.
    scene.cluster.wait_idle().unwrap();
    assert_eq!(workers(&scene.cluster), before);
    scene.wait_ready();
    assert_eq!(scene.cluster.block_on(scene.cluster.client().unwrap().ask(request)).unwrap(), want);
    scene.end();
}

/// An address outlives the worker behind it.
#[test]
fn a_worker_refuses_what_is_meant_for_another() {
    let scene = Scene::workers(1, 1, "auto");
    for worker in scene.cluster.workers() {
        let gone = WorkerId(worker.member.id.0 ^ 1);
        let refused = scene.cluster.block_on(status_of(&worker.member, gone)).unwrap_err();
        assert!(refused.downcast_ref().is_some_and(baton_proto::says_another_worker), "{refused:#}");
        assert!(scene.cluster.block_on(status_of(&worker.member, worker.member.id)).is_ok());
    }
    scene.end();
}

#[test]
fn losing_etcd_stops_no_request() {
    // I7
    let mut etcd = etcd::Etcd::start();
    let registry = Some(etcd.spec("faults"));
    let folder = tempfile::tempdir().unwrap();
    let view = folder.path().join("view.json").to_string_lossy().into_owned();
    let env = vec![("BATON_VIEW_FILE".to_owned(), view)];
    let scene = Scene::new(|options| ClusterOptions { prefill: 1, decode: 2, registry, env, ..options });
    let request = long_answer(4);
    let want = scene.ask(&request);
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 10);
    etcd.kill();
    assert_eq!(scene.rest(answering).unwrap(), want);
    // New requests are placed by the last known view.
    assert_eq!([scene.ask(&request), scene.ask(&request)], [want.clone(), want.clone()]);
    // A worker that dies meanwhile is not in the way, though the view cannot say that it is gone.
    let mut answering = scene.start(&request);
    scene.until(&mut answering, 10);
    let killed = scene.busy(Role::Decode);
    scene.signal(&killed, Signal::KILL);
    assert_eq!(scene.rest(answering).unwrap(), want);
    assert_eq!([scene.ask(&request), scene.ask(&request)], [want.clone(), want.clone()]);
    // A router that starts meanwhile has the view that the one before it saved.
    scene.restart_router();
    scene.wait_ready();
    assert_eq!(scene.cluster.block_on(scene.cluster.client().unwrap().ask(request.clone())).unwrap(), want);
    etcd.restart();
    // The view is true again: the dead worker is gone, the one started in its place is there.
    let dead = killed.member.id;
    let decode = |m: &&baton_cluster::Member| m.role == Role::Decode;
    let healed =
        |all: &[baton_cluster::Member]| all.iter().filter(decode).count() == 2 && all.iter().all(|m| m.id != dead);
    scene.cluster.wait_for_members(healed).unwrap();
    assert_eq!(scene.ask(&request), want);
    scene.end();
}
