//! Measures handoffs between two processes: `cargo run --release -p baton-transfer --example bench [BLOCKS [ROUNDS]]`.

use std::process::Command;

use baton_transfer::bench::{BenchOptions, run, serve};
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == "serve") {
        return Ok(serve()?);
    }
    let number = |i: usize, default: u32| args.get(i).map_or(Ok(default), |text| text.parse());
    // A small model: 30 layers of 3 heads of 64, in half precision; 12 KiB a block and layer.
    let group = KvGroup { layers: (0..30).collect(), planes: 2, kv_heads: 3, head_dim: 64, window: None };
    let layout =
        KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout, number(0, 64)?);
    let mut child = Command::new(std::env::current_exe()?);
    child.arg("serve");
    println!("{}", run(&BenchOptions { geometry, rounds: number(1, 20)? }, child)?);
    Ok(())
}
