//! `baton bench transfer`: speed of handoffs between two processes on one host or two, beside memcpy and a plain TCP stream.

mod control;
mod measure;
mod memory;
mod peer;
mod report;
mod request;
mod serve;
mod table;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process;

use anyhow::Context;
use baton_runtime::die_with_parent;
use baton_transfer::{Cpus, MAX_TCP_CONNECTIONS, TransportKind, UcxOptions, UcxSettings};
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION, PoolGeometry};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use peer::Peer;
use report::BenchOptions;
use serve::{ServeOptions, Served, serve};
use table::Table;

/// Named KV shapes: layers, KV heads, head dimension.
const SHAPES: [(&str, [u32; 3]); 3] =
    [("smollm2", [30, 3, 64]), ("qwen2.5-1.5b", [28, 2, 128]), ("llama-3.1-8b", [32, 8, 128])];
/// The parts of a shape with their help texts. Each can be set by a flag of its own.
const PARTS: [(&str, &str); 3] = [
    ("layers", "Layers, instead of the shape's"),
    ("kv-heads", "KV heads, instead of the shape's"),
    ("head-dim", "Elements of a head, instead of the shape's"),
];
/// Prefix of the line in which a child says its address, since its output may hold other lines.
const MARK: &str = "@ ";
/// Default seed of the random order of scattered blocks.
const SEED: &str = "1";

/// `baton bench transfer`.
pub fn command() -> Command {
    Command::new("transfer")
        .about("Bandwidth and latency of handoffs between two processes or hosts, by transport")
        .after_help(
            "Between two hosts:  baton bench transfer --listen 0.0.0.0:7400      on the one that receives, then\n                    \
             baton bench transfer --to THAT-HOST:7400        on the other",
        )
        .args(places())
        .args(amounts())
        .args(ways())
}

fn number(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("N").value_parser(value_parser!(u32).range(1..)).help(help)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn cpus(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name("LIST").default_value("").value_parser(value_parser!(Cpus)).help(help)
}

fn places() -> [Arg; 4] {
    [
        Arg::new("listen")
            .long("listen")
            .value_name("HOST:PORT")
            .value_parser(value_parser!(SocketAddr))
            .conflicts_with_all(["to", "json"])
            .help("Receive what other processes measure, until stopped; they use this port and the two after it"),
        Arg::new("to")
            .long("to")
            .value_name("HOST:PORT")
            .help("Send to the receiver at this address; default: to a child process"),
        flag("once", "With --listen: end with the first").requires("listen").hide(true),
        Arg::new("sockets").long("sockets").value_name("DIR").value_parser(value_parser!(PathBuf)).help(
            "A folder that both ends can write to, as two pods of a node; then shm works between network namespaces",
        ),
    ]
}

fn amounts() -> Vec<Arg> {
    let shape = Arg::new("shape")
        .long("shape")
        .default_value("smollm2")
        .value_parser(SHAPES.map(|(name, _)| name))
        .help("Whose KV to move");
    let dtype = Arg::new("dtype")
        .long("dtype")
        .default_value("f16")
        .value_parser(KvDtype::ALL.map(KvDtype::as_str))
        .help("Element type of the KV");
    let list = |arg: Arg| arg.value_delimiter(',').action(ArgAction::Append);
    let tokens =
        list(number("tokens", "Tokens of the prompt whose blocks move; several, separated by commas, in turn"));
    let blocks = list(number("blocks", "Blocks to move, instead of tokens").conflicts_with("tokens"));
    [shape]
        .into_iter()
        .chain(PARTS.map(|(name, help)| number(name, help)))
        .chain([dtype, number("block-size", "Tokens of a block").default_value("16")])
        .chain([tokens.default_value("1000"), blocks])
        .chain([
            flag(
                "scattered",
                "Blocks lie in both pools in random order, as in a busy pool, and not one after the other",
            ),
            Arg::new("seed")
                .long("seed")
                .default_value(SEED)
                .value_parser(value_parser!(u64))
                .help("Of the random order"),
            number("rounds", "Rounds; medians are printed").default_value("5"),
            number("round-trips", "Handoffs of one block whose time is taken, by each way").default_value("200"),
            flag("json", "One JSON object instead of tables"),
        ])
        .collect()
}

fn ways() -> [Arg; 7] {
    let kinds = [TransportKind::Shm, TransportKind::Tcp, TransportKind::Ucx].map(TransportKind::as_str);
    [
        Arg::new("transport")
            .long("transport")
            .value_parser(kinds)
            .value_delimiter(',')
            .action(ArgAction::Append)
            .help(
                "Measure handoffs over this; may be repeated; default: shm (within a host, or with --sockets) and tcp",
            ),
        number("connections", "Connections of handoffs over tcp, 1 to 16; several, separated by commas, in turn")
            .value_parser(value_parser!(u32).range(1..=MAX_TCP_CONNECTIONS as i64))
            .value_delimiter(',')
            .action(ArgAction::Append)
            .default_value("1"),
        flag("no-verify", "Also measure handoffs whose bytes nobody checks; workers always check"),
        Arg::new("ucx-library")
            .long("ucx-library")
            .value_name("DIR")
            .value_parser(value_parser!(PathBuf))
            .help("Directory of UCX's libucp.so.0; default: where the system looks for libraries"),
        Arg::new("ucx-options")
            .long("ucx-options")
            .value_name("NAME=VALUE …")
            .default_value("")
            .value_parser(value_parser!(UcxOptions))
            .help("Settings of UCX by its own names, separated by spaces; each end has its own"),
        cpus("cpus", "CPUs that this end runs on, as 0-3,8; default: any, as the system likes"),
        cpus("child-cpus", "The same for the child process that receives").conflicts_with_all(["listen", "to"]),
    ]
}

/// Runs the benchmark and prints its report, or, with --listen, receives.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let ucx = UcxSettings {
        directory: matches.get_one::<PathBuf>("ucx-library").cloned(),
        options: matches.get_one::<UcxOptions>("ucx-options").cloned().unwrap_or_default(),
    };
    let cpus_of = |name| matches.get_one::<Cpus>(name).cloned().unwrap_or_default();
    if let Some(&listen) = matches.get_one::<SocketAddr>("listen") {
        let (once, sockets, cpus) = (matches.get_flag("once"), sockets(matches), cpus_of("cpus"));
        return receive(ServeOptions { listen, once, ucx, sockets, cpus });
    }
    let options = BenchOptions { cpus: cpus_of("cpus"), ..options(matches, ucx)? };
    let to = matches.get_one::<String>("to");
    let peer = match to {
        Some(address) => Peer::at(address)?,
        None => Peer::child(child(&options, &cpus_of("child-cpus"))?)?,
    };
    let report = measure::run(&options, peer)?;
    let table = Table { options: &options, report: &report, to: to.map(String::as_str) };
    match matches.get_flag("json") {
        true => println!("{}", table.json()),
        false => print!("{table}"),
    }
    Ok(())
}

fn sockets(matches: &ArgMatches) -> Option<PathBuf> {
    matches.get_one::<PathBuf>("sockets").cloned()
}

fn options(matches: &ArgMatches, ucx: UcxSettings) -> anyhow::Result<BenchOptions> {
    let layout = layout(matches)?;
    let all = |name: &str| matches.get_many::<u32>(name).into_iter().flatten().copied();
    let blocks: Vec<u32> = match matches.contains_id("blocks") {
        true => all("blocks").collect(),
        false => all("tokens").map(|tokens| layout.blocks_for(tokens as usize) as u32).collect(),
    };
    let most = blocks.iter().copied().max().context("--blocks")?;
    let near = !matches.contains_id("to") || matches.contains_id("sockets");
    let named: Vec<&String> = matches.get_many("transport").into_iter().flatten().collect();
    let asked = |kind: &TransportKind| match named.is_empty() {
        false => named.iter().any(|name| *name == kind.as_str()),
        true => *kind == TransportKind::Tcp || *kind == TransportKind::Shm && near,
    };
    let one = |name: &str| matches.get_one::<u32>(name).copied().unwrap_or(1);
    Ok(BenchOptions {
        geometry: PoolGeometry::uniform(layout, most),
        blocks,
        rounds: one("rounds"),
        round_trips: one("round-trips"),
        transports: [TransportKind::Shm, TransportKind::Tcp, TransportKind::Ucx].into_iter().filter(asked).collect(),
        connections: all("connections").map(|count| count as usize).collect(),
        unverified: matches.get_flag("no-verify"),
        scattered: matches.get_one::<u64>("seed").copied().filter(|_| matches.get_flag("scattered")),
        ucx,
        sockets: sockets(matches),
        cpus: Cpus::default(),
    })
}

fn layout(matches: &ArgMatches) -> anyhow::Result<KvLayout> {
    let shape = matches.get_one::<String>("shape").context("--shape")?;
    let (_, parts) = SHAPES.into_iter().find(|(name, _)| name == shape).context("--shape")?;
    let mut set =
        PARTS.iter().zip(parts).map(|((name, _), of_shape)| matches.get_one(name).copied().unwrap_or(of_shape));
    let [layers, kv_heads, head_dim] = std::array::from_fn(|_| set.next().unwrap_or(1));
    let dtype = matches.get_one::<String>("dtype").context("--dtype")?.parse().map_err(anyhow::Error::msg)?;
    let block_size = matches.get_one::<u32>("block-size").copied().context("--block-size")?;
    let group = KvGroup { layers: (0..layers).collect(), planes: 2, kv_heads, head_dim, window: None, sinks: 0 };
    Ok(KvLayout { version: PROTOCOL_VERSION, model: 0, dtype, block_size, groups: vec![group] })
}

/// A command that runs this program as the receiver of one measurement; it dies with this process.
fn child(options: &BenchOptions, cpus: &Cpus) -> anyhow::Result<process::Command> {
    let BenchOptions { ucx, sockets, .. } = options;
    let mut command = process::Command::new(std::env::current_exe()?);
    command.args(["bench", "transfer", "--listen", "127.0.0.1:0", "--once"]);
    command.arg("--cpus").arg(cpus.to_string()).arg("--ucx-options").arg(ucx.options.to_string());
    if let Some(directory) = &ucx.directory {
        command.arg("--ucx-library").arg(directory);
    }
    if let Some(folder) = sockets {
        command.arg("--sockets").arg(folder);
    }
    die_with_parent(&mut command);
    Ok(command)
}

fn receive(options: ServeOptions) -> anyhow::Result<()> {
    let tell = |served| match served {
        Served::Listening(address) if options.once => println!("{MARK}{address}"),
        Served::Listening(address) => println!("listening on {address}; stop with Ctrl-C"),
        Served::Ended(from, Ok(())) => println!("{from}: measured"),
        Served::Ended(from, Err(error)) => eprintln!("{from}: {error:#}"),
    };
    serve(&options, tell)
}
