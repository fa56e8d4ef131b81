//! `baton bench transfer`: how fast KV moves between two processes of this machine, beside memcpy and a plain TCP stream.

use std::path::PathBuf;
use std::process;

use anyhow::Context;
use baton_transfer::bench::{self, BenchOptions};
use baton_transfer::{UcxOptions, UcxSettings};
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

/// Subcommand of the receiving process.
pub const SERVE: &str = "transfer-peer";

/// Shapes by name: layers, KV heads, head dimension.
const SHAPES: [(&str, [u32; 3]); 3] =
    [("smollm2", [30, 3, 64]), ("qwen2.5-1.5b", [28, 2, 128]), ("llama-3.1-8b", [32, 8, 128])];

/// `baton bench transfer`.
pub fn command() -> Command {
    let number = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("N")
            .default_value(default)
            .value_parser(value_parser!(u32).range(1..))
            .help(help)
    };
    Command::new("transfer")
        .about("Bandwidth of handoffs between two processes, by transport")
        .arg(
            Arg::new("shape")
                .long("shape")
                .default_value("smollm2")
                .value_parser(SHAPES.map(|(name, _)| name))
                .help("Whose KV to move, in f16"),
        )
        .arg(number("tokens", "1000", "Tokens of the prompt whose blocks move"))
        .arg(number("rounds", "5", "Rounds; medians are printed"))
        .arg(
            Arg::new("no-verify")
                .long("no-verify")
                .action(ArgAction::SetTrue)
                .help("Also measure handoffs whose bytes nobody checks; workers always check"),
        )
        .arg(
            Arg::new("transport")
                .long("transport")
                .value_parser(["ucx"])
                .help("Also measure handoffs over this, beside shared memory and TCP"),
        )
        .arg(
            Arg::new("ucx-library")
                .long("ucx-library")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("Directory of UCX's libucp.so.0; default: where the system looks for libraries"),
        )
        .arg(
            Arg::new("ucx-options")
                .long("ucx-options")
                .value_name("NAME=VALUE …")
                .default_value("")
                .value_parser(value_parser!(UcxOptions))
                .help("Settings of UCX by its own names, separated by spaces"),
        )
}

/// The receiving process, started by [`run`].
pub fn serve_command() -> Command {
    Command::new(SERVE).hide(true)
}

/// Measures and prints a table.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let shape = matches.get_one::<String>("shape").context("shape")?;
    let number = |name: &str| matches.get_one::<u32>(name).copied().unwrap_or(1);
    let (_, [layers, kv_heads, head_dim]) = SHAPES.into_iter().find(|(name, _)| name == shape).context("shape")?;
    let group = KvGroup { layers: (0..layers).collect(), planes: 2, kv_heads, head_dim, window: None, sinks: 0 };
    let layout =
        KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] };
    let blocks = layout.blocks_for(number("tokens") as usize) as u32;
    let geometry = PoolGeometry::uniform(layout, blocks);
    let ucx = matches.get_one::<String>("transport").map(|_| UcxSettings {
        directory: matches.get_one::<PathBuf>("ucx-library").cloned(),
        options: matches.get_one::<UcxOptions>("ucx-options").cloned().unwrap_or_default(),
    });
    let options = BenchOptions { geometry, rounds: number("rounds"), unverified: matches.get_flag("no-verify"), ucx };
    let mut peer = process::Command::new(std::env::current_exe()?);
    peer.args(["bench", SERVE]);
    let report = bench::run(&options, peer)?;
    println!("{} tokens of {shape}", number("tokens"));
    println!("{report}");
    Ok(())
}

/// Runs the receiving end until its parent is done.
pub fn serve() -> anyhow::Result<()> {
    Ok(bench::serve()?)
}
