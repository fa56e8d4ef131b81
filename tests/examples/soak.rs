//! A long soak: `cargo run --release -p baton-tests --example soak -- --clients 64 --seconds 120 --model smollm2`.
//!
//! Starts a cluster of its own, or takes one that runs (`--grpc`, `--http`, as `baton up` prints them). Ends with an error
//! when a request fails, a token is lost, doubled or changed, a block is not free at the end, or a process has grown.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Context;
use baton_tests::cluster::{self, Cluster, ClusterOptions};
use baton_tests::soak::{Load, Report, Target, soak};
use clap::Parser;

#[derive(Parser)]
#[command(about = "Streaming clients without pause, with random lengths and random disconnects")]
struct Args {
    /// Clients at a time.
    #[arg(long, default_value_t = 64)]
    clients: u64,
    /// How long new requests are begun.
    #[arg(long, default_value_t = 120)]
    seconds: u64,
    /// Another seed, another order.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Different requests.
    #[arg(long, default_value_t = 64)]
    requests: u64,
    /// Most tokens of a prompt.
    #[arg(long, default_value_t = 300)]
    prompt: u64,
    /// Most tokens of an answer.
    #[arg(long, default_value_t = 80)]
    answer: u64,
    /// The model of an own cluster: a path or a name.
    #[arg(long, default_value = "smollm2")]
    model: String,
    /// Prefill workers of an own cluster.
    #[arg(long, default_value_t = 1)]
    prefill: u32,
    /// Decode workers of an own cluster.
    #[arg(long, default_value_t = 1)]
    decode: u32,
    /// Memory of the KV pool of each worker of an own cluster.
    #[arg(long, default_value = "2GiB")]
    kv_memory: String,
    /// How KV travels in an own cluster: auto, shm or tcp.
    #[arg(long, default_value = "auto")]
    transport: String,
    /// The gRPC address of a running cluster, instead of an own one.
    #[arg(long, requires = "http")]
    grpc: Option<SocketAddr>,
    /// Its HTTP address.
    #[arg(long, requires = "grpc")]
    http: Option<SocketAddr>,
}

impl Args {
    fn load(&self) -> Load {
        let Args { clients, seed, requests, prompt, answer, .. } = *self;
        Load { clients, duration: Duration::from_secs(self.seconds), seed, requests, prompt, answer }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    match (args.grpc, args.http) {
        (Some(grpc), Some(http)) => running(&args, grpc, http),
        _ => own(&args),
    }
}

fn own(args: &Args) -> anyhow::Result<()> {
    let transport = match args.transport.as_str() {
        "shm" => "shm",
        "tcp" => "tcp",
        _ => "auto",
    };
    let (prefill, decode) = (args.prefill, args.decode);
    let memory = ["--kv-memory".to_owned(), args.kv_memory.clone()].into();
    let options = ClusterOptions { prefill, decode, transport, args: memory, ..ClusterOptions::new(&args.model) };
    let cluster = Cluster::start(options)?;
    let target = Target { grpc: cluster.grpc(), http: cluster.http(), processes: cluster.processes() };
    let report = cluster.block_on(soak(&target, &args.load()))?;
    finish(&report, cluster.wait_idle())?;
    cluster.stop()
}

fn running(args: &Args, grpc: SocketAddr, http: SocketAddr) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let target = Target { grpc, http, processes: Vec::new() };
    let report = runtime.block_on(soak(&target, &args.load()))?;
    finish(&report, runtime.block_on(cluster::wait_all_free(&format!("http://{grpc}"))))
}

fn finish(report: &Report, all_free: anyhow::Result<()>) -> anyhow::Result<()> {
    println!("{report}");
    all_free.context("after the last request")?;
    println!("all blocks are free");
    report.check_memory()
}
