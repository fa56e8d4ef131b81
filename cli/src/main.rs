//! The binary `baton`. Each subcommand starts one component or asks a running one; `up` starts and supervises the processes of a
//! whole cluster.

#![deny(unsafe_code)]

mod bench;
mod certs;
mod chat;
mod explain;
mod fetch;
mod kubernetes;
mod kv;
mod model;
mod scale;
mod shell;
mod status;
mod supervisor;
mod terminal;
mod top;
mod units;
mod up;
mod warm;

use std::process::ExitCode;

use anyhow::Context;
use baton_kv_store_node::KvStoreConfig;
use baton_router::RouterConfig;
use baton_runtime::Config;
use baton_worker::WorkerConfig;
use clap::{ArgMatches, Command};

/// Runs a component whose settings are `T`, or prints them.
fn component<T: Config>(matches: &ArgMatches, run: impl AsyncFnOnce(T) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if let Some(text) = baton_runtime::check_config::<T>(matches)? {
        print!("{text}");
        return Ok(());
    }
    let config = baton_runtime::load::<T>(matches)?;
    let runtime = runtime()?;
    let outcome = runtime.block_on(run(config));
    // Does not wait for a download or the loading of a model that is still running when the process is told to stop.
    runtime.shutdown_background();
    outcome
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().context("starting the asynchronous runtime")
}

fn command() -> Command {
    let settings = |name, about| Command::new(name).about(about);
    Command::new("baton")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Serves large language models with prefill and decode on separate workers")
        .after_help("Try it:  baton up              then, in another terminal:  baton chat \"Why is the sky blue?\"")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(baton_runtime::args::<up::UpConfig>(settings("up", "Starts a whole cluster on this machine")))
        .subcommand(baton_runtime::args::<RouterConfig>(settings(
            "router",
            "Starts a router: HTTP and gRPC for clients, places requests on workers",
        )))
        .subcommand(baton_runtime::args::<WorkerConfig>(settings(
            "prefill",
            "Starts a prefill worker: reads prompts, writes their KV into decode workers",
        )))
        .subcommand(baton_runtime::args::<WorkerConfig>(settings(
            "decode",
            "Starts a decode worker: takes KV, streams tokens",
        )))
        .subcommand(baton_runtime::args::<KvStoreConfig>(settings(
            "kv-store",
            "Starts a KV store: keeps KV that workers computed, and gives it to workers that lack it",
        )))
        .subcommand(chat::command())
        .subcommand(certs::command())
        .subcommand(model::command())
        .subcommand(status::command())
        .subcommand(top::command())
        .subcommand(explain::command())
        .subcommand(kv::command())
        .subcommand(warm::command())
        .subcommand(scale::command())
        .subcommand(scale::drain_command())
        .subcommand(bench::command())
        .subcommand(shell::completions_command())
        .subcommand(shell::manuals_command())
}

fn dispatch(matches: &ArgMatches) -> anyhow::Result<()> {
    match matches.subcommand() {
        Some(("up", m)) => component(m, async |config| up::run(config).await),
        Some(("router", m)) => component(m, async |config| Ok(baton_router::run(config).await.map(|_| ())?)),
        Some(("prefill", m)) => component(m, async |config| Ok(baton_prefill_node::run(config).await?)),
        Some(("decode", m)) => component(m, async |config| Ok(baton_decode_node::run(config).await?)),
        Some(("kv-store", m)) => component(m, async |config| Ok(baton_kv_store_node::run(config).await?)),
        Some(("chat", m)) => runtime()?.block_on(chat::run(m)),
        Some(("certs", m)) => certs::run(m),
        Some(("model", m)) => model::run(m),
        Some(("kv", m)) => kv::run(m),
        Some(("warm", m)) => runtime()?.block_on(warm::run(m)),
        Some(("explain", m)) => runtime()?.block_on(explain::run(m)),
        Some(("status", m)) => runtime()?.block_on(status::run(m)),
        Some(("top", m)) => runtime()?.block_on(top::run(m)),
        Some(("scale", m)) => runtime()?.block_on(scale::scale(m)),
        Some(("drain", m)) => runtime()?.block_on(scale::drain(m)),
        Some(("bench", m)) => bench::run(m),
        Some(("completions", m)) => {
            shell::completions(m, command());
            Ok(())
        }
        Some(("manuals", m)) => shell::manuals(m, command()),
        _ => Ok(()),
    }
}

fn main() -> ExitCode {
    let outcome = dispatch(&command().get_matches());
    baton_runtime::flush_logs();
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("baton: {error:#}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_flag_has_one_definition_and_help() {
        super::command().debug_assert();
    }
}
