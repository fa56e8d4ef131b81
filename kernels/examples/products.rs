//! How near products of many rows come to what the machine can do:
//! `cargo run --release -p baton-kernels --example products -- --rows 8,32,512`. Options: `--isa`, `--threads`, `--types Q4K,Q6K`, `--cols`,
//! `--outs`.
//!
//! Of each weight type and number of rows: billions of multiplications and additions a second, the best of many short runs, and
//! the share of the 8-bit ceiling measured in the same run. Rounding the rows to 8 bits is timed too. Every core used must be idle.

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kernels::WeightSource;
use baton_kernels::conformance::{DTYPES, Random, random_weight};
use baton_kernels::{
    Backend, Ceilings, CpuBackend, CpuOptions, First, HostPool, Input, Isa, KernelError, Product, Room,
};
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};

/// Time for each figure; the best run counts.
const LONG_ENOUGH: Duration = Duration::from_millis(400);

/// The value behind `--name`.
fn option(name: &str) -> Option<String> {
    std::env::args().skip_while(|arg| arg.strip_prefix("--") != Some(name)).nth(1)
}

fn number(name: &str, default: usize) -> usize {
    option(name).and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn main() -> Result<(), KernelError> {
    let isa = option("isa").unwrap_or_else(|| Isa::detect().name().into());
    let Some(isa) = Isa::available().into_iter().find(|found| found.name() == isa) else {
        println!("this CPU has no {isa}");
        return Ok(());
    };
    let options = CpuOptions { threads: number("threads", 1), isa, pinned: false };
    let types = option("types").unwrap_or_else(|| "Q4_1,Q5_0,Q8_0,Q4K,Q5K,Q6K".into());
    let rows: Vec<usize> =
        option("rows").unwrap_or_else(|| "1,8,32,128,512".into()).split(',').filter_map(|n| n.parse().ok()).collect();
    let (cols, outs) = (number("cols", 1536), number("outs", 2048));
    let ceiling = Ceilings::measure(options)?.int8;
    println!(
        "{}, {} threads, {cols} inputs, {outs} outputs, ceiling {:.0} GOP/s",
        isa.name(),
        options.threads,
        ceiling / 1e9
    );
    for dtype in DTYPES.into_iter().filter(|d| types.split(',').any(|name| name == format!("{d:?}"))) {
        let mut random = Random(1);
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let layout =
            KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
        let pool = HostPool::in_memory(PoolGeometry::uniform(layout, 1))?;
        let mut backend = CpuBackend::new(options, Arc::new(pool))?;
        let data = random_weight(dtype, outs, cols, &mut random);
        let source = WeightSource { name: "w", dtype, rows: outs, cols, data: data[..].into(), row_order: None };
        let weight = backend.linear(&source)?;
        print!("{:6}", format!("{dtype:?}"));
        for &rows in &rows {
            backend.reserve(&Room { rows, cols, ..Room::default() })?;
            let mut x = backend.upload(&random.vector(rows * cols))?;
            let mut out = backend.buffer(rows * outs)?;
            let (mut best, started) = (f64::INFINITY, Instant::now());
            while started.elapsed() < LONG_ENOUGH {
                let run = Instant::now();
                let product = Product { weight: &weight, bias: None, out: &mut out };
                backend.matmul(Input { x: &mut x, rows, first: First::Nothing }, [product]);
                best = best.min(run.elapsed().as_secs_f64());
            }
            let rate = (2 * rows * cols * outs) as f64 / best;
            print!("  {rows:4}: {:6.0} ({:2.0}%)", rate / 1e9, rate / ceiling * 100.0);
        }
        println!();
    }
    println!("ceiling after: {:.0} GOP/s", Ceilings::measure(options)?.int8 / 1e9);
    Ok(())
}
