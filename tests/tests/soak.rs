//! Streaming clients without pause. `cargo run --release -p baton-tests --example soak` does it for longer, and to real models.
#![allow(clippy::unwrap_used)]

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_cluster::{Member, Role};
use baton_tests::cluster::{Cluster, ClusterOptions, Worker, models};
use baton_tests::soak::{Load, Target, soak};
use baton_tests::tiny::random_u64;
use rustix::process::Signal;
use tempfile::TempDir;

fn load(clients: u64, seconds: u64) -> Load {
    Load {
        clients,
        duration: Duration::from_secs(seconds),
        seed: 1,
        requests: 40,
        prompt: 200,
        answer: 120,
        pressure: false,
    }
}

fn target(cluster: &Cluster, workers: Vec<Member>) -> Target {
    Target { grpc: cluster.grpc(), http: cluster.http(), processes: cluster.processes(), workers }
}

fn cluster(model: &TempDir) -> (Cluster, Target) {
    let cluster = Cluster::start(ClusterOptions { prefill: 2, decode: 2, ..ClusterOptions::new(model) }).unwrap();
    let target = target(&cluster, Vec::new());
    (cluster, target)
}

/// One at a time: two cores are all there may be.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn clients_come_go_and_break_off() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let (cluster, target) = cluster(&model);
    let report = cluster.block_on(soak(&target, &load(16, 10))).unwrap();
    println!("{report}");
    assert!(report.whole > 20 && report.broken_off > 5, "{report}");
    report.check_memory().unwrap();
    cluster.wait_idle().unwrap(); // I6
    cluster.stop().unwrap();
}

#[test]
fn clients_do_not_notice_workers_that_are_killed() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let (cluster, target) = cluster(&model);
    let soaking = cluster.spawn(async move { soak(&target, &load(8, 10)).await });
    let mut random = random_u64(1, "kills");
    let mut kills = 0;
    while !soaking.is_finished() {
        let mut workers = cluster.workers();
        // Never the last one of a role: there must be somebody to go on with.
        if workers.len() == 4 {
            let victim = workers.swap_remove(random.next().unwrap() as usize % 4);
            cluster.signal(victim.pid, Signal::KILL).unwrap();
            kills += 1;
        }
    }
    let report = cluster.block_on(soaking).unwrap().unwrap();
    println!("{report}, {kills} kills");
    assert!(kills > 1, "{kills}");
    cluster.wait_idle().unwrap(); // I6
    cluster.stop().unwrap();
}

/// A pool that is always full: sequences lose their blocks again and again, their KV comes back from host memory or is computed again, and each
/// answer is to the token what it is alone.
#[test]
fn a_full_pool_changes_no_answer() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let block_bytes = models::block_bytes(model.path()).unwrap();
    for aggregated in [true, false] {
        let options = ClusterOptions { aggregated, ..ClusterOptions::new(&model) };
        let cluster = Cluster::start(options.under_pressure(40, block_bytes, 16)).unwrap();
        let decode = cluster.wait_for_worker(Role::Decode, Worker::idle).unwrap();
        let target = target(&cluster, vec![decode.member]);
        // Short prompts find room, long answers take it from each other.
        let load = Load { pressure: true, prompt: 40, answer: 300, ..load(16, 5) };
        let report = cluster.block_on(soak(&target, &load)).unwrap();
        println!("{report}");
        let pool = &report.pools[0];
        assert!(report.whole > 20 && report.broken_off == 0, "{report}");
        pool.check_full().unwrap();
        assert!(pool.loaded > 0, "{report}");
        cluster.wait_idle().unwrap(); // I6
        cluster.stop().unwrap();
    }
}
