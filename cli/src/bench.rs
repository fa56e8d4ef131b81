//! `baton bench`: measures this machine. `bench/` has comparisons with other programs.

mod engine;
mod profile;
mod transfer;

use clap::{ArgMatches, Command};

/// `baton bench`.
pub fn command() -> Command {
    Command::new("bench")
        .about("Measures this machine")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(engine::command())
        .subcommand(transfer::command())
}

/// Runs the chosen benchmark.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    match matches.subcommand() {
        Some(("engine", m)) => engine::run(m),
        Some(("transfer", m)) => transfer::run(m),
        _ => Ok(()),
    }
}
