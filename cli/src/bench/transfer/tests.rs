//! Two processes measure a small pool.

use std::process::Command;

use baton_transfer::conformance::{ucx, ucx_is_here};
use baton_transfer::{Cpus, TransportKind};
use baton_types::{KvDtype, KvGroup, KvLayout, PoolGeometry};

use super::MARK;
use super::measure::{check, order, run};
use super::peer::Peer;
use super::report::{BenchOptions, Samples};
use super::serve::{ServeOptions, Served, serve};

/// Set in the process that receives.
const CHILD: &str = "BATON_BENCH_TEST_CHILD";

/// This test binary again, as the receiving end of one measurement.
fn child() -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "bench::transfer::tests::started", "--nocapture", "--test-threads=1"]).env(CHILD, "");
    command
}

/// Not a test: what [`child`] runs.
#[test]
fn started() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let (listen, sockets) = (([127, 0, 0, 1], 0).into(), None);
    let options = ServeOptions { listen, once: true, ucx: ucx(), sockets, cpus: Cpus::default() };
    let listening = |served| {
        if let Served::Listening(address) = served {
            println!("{MARK}{address}");
        }
    };
    // One test asks for what is refused; the parent hears of it.
    if let Err(error) = serve(&options, listening) {
        eprintln!("the benchmark was refused: {error:#}");
    }
}

fn options() -> BenchOptions {
    let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 1, head_dim: 64, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let mut transports = vec![TransportKind::Shm, TransportKind::Tcp];
    transports.extend(ucx_is_here().then_some(TransportKind::Ucx));
    BenchOptions {
        geometry: PoolGeometry::uniform(layout, 4),
        blocks: vec![4, 2],
        rounds: 2,
        round_trips: 3,
        transports,
        connections: vec![1, 3],
        unverified: true,
        scattered: Some(7),
        ucx: ucx(),
        sockets: None,
        cpus: Cpus::default(),
    }
}

#[test]
fn quantiles_are_values_that_were_seen() {
    let samples = Samples::new((1..=200).rev().map(f64::from).collect());
    assert_eq!([0.0, 0.5, 0.99, 1.0].map(|share| samples.quantile(share)), [1.0, 100.0, 198.0, 200.0]);
    assert!(Samples::default().quantile(0.5).is_nan());
}

#[test]
fn a_scattered_pool_has_all_its_blocks_in_an_order_of_its_seed() {
    let geometry = PoolGeometry::uniform(options().geometry.layout, 64);
    let [plain, one, same, two] = [None, Some(1), Some(1), Some(2)].map(|seed| order(&geometry, seed).remove(0));
    assert_eq!(one, same);
    assert!(one != two && one != plain);
    let mut sorted = one.clone();
    sorted.sort();
    assert_eq!(sorted, plain);
}

#[test]
fn a_run_measures_what_is_asked_for() {
    let options = options();
    let report = run(&options, Peer::child(child()).unwrap()).unwrap();
    let ways = 2 + 2 * (options.transports.len() + 1);
    assert_eq!((report.bandwidth.len(), report.latency.len()), (2 * ways, ways - 1));
    let bytes: Vec<_> = report.bandwidth.iter().map(|row| (row.blocks, row.bytes)).collect();
    assert_eq!((bytes[0], bytes[ways]), ((4, 2 * 4 * 4096), (2, 2 * 2 * 4096)));
    for row in &report.bandwidth {
        assert!(row.rates.count() == 2 && row.rates.quantile(0.0) > 0.0, "{row:?}");
    }
    for row in &report.latency {
        assert_eq!((row.bytes, row.seconds.count()), (2 * 4096, 3), "{row:?}");
    }
    assert!(!report.here.is_empty() && report.here == report.there);
}

#[test]
fn what_cannot_be_measured_is_an_error() {
    assert!(Peer::child(Command::new("false")).is_err());
    for (blocks, rounds, wrong) in [
        (vec![5], 1, "blocks is 5"),
        (vec![0], 1, "blocks is 0"),
        (vec![], 1, "blocks: none"),
        (vec![1], 0, "rounds is 0"),
    ] {
        let error = check(&BenchOptions { blocks, rounds, ..options() }).unwrap_err().to_string();
        assert!(error.starts_with(wrong), "{error}");
    }
    let mut huge = options();
    huge.geometry.layout.groups[0].layers = (0..60_000).collect();
    huge.geometry.layout.groups[0].kv_heads = u32::MAX;
    let mut peer = Peer::child(child()).unwrap();
    let refused = peer.begin(&huge.geometry, None).unwrap_err();
    assert!(refused.to_string().contains("more than"), "{refused}");
}
