//! A long soak: `cargo run --release -p baton-tests --example soak -- --clients 64 --seconds 120 --model smollm2`.
//! Under memory pressure, ten minutes: `… --example soak -- --pressure 40 --clients 16 --seconds 600 --prompt 40 --answer 300`.
//!
//! Starts a cluster of its own, or takes one that runs (`--grpc`, `--http`, `--registry`, as `baton up` prints them). Ends with an error
//! when a request fails, a token is lost, doubled or changed, a block is not free at the end, or a process has grown.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use baton_cluster::Role;
use baton_tests::cluster::{self, Cluster, ClusterOptions, models};
use baton_tests::soak::{Load, Pool, Report, Target, soak};
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
    /// A pool that is always too small, in an own cluster of the tiny model: `--pressure 40` gives each worker 40 blocks. Nobody
    /// leaves early, and every answer is compared with that of the same request alone.
    #[arg(long, conflicts_with_all = ["grpc", "model", "kv_memory"])]
    pressure: Option<u32>,
    /// No prefill workers in an own cluster.
    #[arg(long)]
    aggregated: bool,
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
    /// Its registry, as `baton status` takes it.
    #[arg(long, default_value = "http://127.0.0.1:8002", requires = "grpc")]
    registry: String,
}

impl Args {
    fn load(&self) -> Load {
        let Args { clients, seed, requests, prompt, answer, .. } = *self;
        let (duration, pressure) = (Duration::from_secs(self.seconds), self.pressure.is_some());
        Load { clients, duration, seed, requests, prompt, answer, pressure }
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
    let (prefill, decode, aggregated) = (args.prefill, args.decode, args.aggregated);
    let options =
        |model: &Path| ClusterOptions { prefill, decode, aggregated, transport, ..ClusterOptions::new(model) };
    // Lives as long as the cluster.
    let tiny = models::tiny()?;
    let options = match args.pressure {
        Some(blocks) => {
            options(tiny.path()).under_pressure(blocks, models::block_bytes(tiny.path())?, args.clients as u32)
        }
        None => ClusterOptions {
            args: ["--kv-memory".to_owned(), args.kv_memory.clone()].into(),
            ..options(Path::new(&args.model))
        },
    };
    let cluster = Cluster::start(options)?;
    cluster.wait_idle()?;
    let workers = cluster.workers().into_iter().map(|worker| worker.member);
    let workers = if args.pressure.is_some() { workers.collect() } else { Vec::new() };
    let target = Target { grpc: cluster.grpc(), http: cluster.http(), processes: cluster.processes(), workers };
    let report = cluster.block_on(soak(&target, &args.load()))?;
    finish(&report, cluster.wait_idle())?;
    // Prompts are short beside their answers: it is decode workers that run out of blocks.
    report.pools.iter().filter(|pool| pool.role == Role::Decode).try_for_each(Pool::check_full)?;
    cluster.stop()
}

fn running(args: &Args, grpc: SocketAddr, http: SocketAddr) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let target = Target { grpc, http, processes: Vec::new(), workers: Vec::new() };
    let report = runtime.block_on(soak(&target, &args.load()))?;
    finish(&report, runtime.block_on(cluster::wait_all_free(&args.registry)))
}

fn finish(report: &Report, all_free: anyhow::Result<()>) -> anyhow::Result<()> {
    println!("{report}");
    all_free.context("after the last request")?;
    println!("all blocks are free");
    report.check_memory()
}
