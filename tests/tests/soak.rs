//! Streaming clients without pause. `cargo run --release -p baton-tests --example soak` does it for longer, and to real models.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use baton_tests::cluster::{Cluster, ClusterOptions, models};
use baton_tests::soak::{Load, Target, soak};

#[test]
fn clients_come_go_and_break_off() {
    let model = models::tiny().unwrap();
    let cluster = Cluster::start(ClusterOptions { prefill: 2, decode: 2, ..ClusterOptions::new(&model) }).unwrap();
    let target = Target { grpc: cluster.grpc(), http: cluster.http(), processes: cluster.processes() };
    let load = Load { clients: 16, duration: Duration::from_secs(10), seed: 1, requests: 40, prompt: 200, answer: 120 };
    let report = cluster.block_on(soak(&target, &load)).unwrap();
    println!("{report}");
    assert!(report.whole > 100 && report.broken_off > 30, "{report}");
    report.check_memory().unwrap();
    cluster.wait_idle().unwrap(); // I6
    cluster.stop().unwrap();
}
