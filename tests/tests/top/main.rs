//! `baton top` in a real terminal, over a real cluster: a start, a scale-up, a drain, a killed worker, a router that comes back.
#![allow(clippy::unwrap_used)]

mod tmux;

use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::cluster::client::{apart, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, models, signal_pid};
use baton_tests::{binary, needs};
use rustix::process::Signal;

use tmux::Terminal;

const SIZE: (u16, u16) = (80, 24);

fn has_tmux() -> bool {
    let there = Command::new("tmux").arg("-V").stdout(Stdio::null()).status().is_ok_and(|status| status.success());
    if !there {
        needs::left_out("needs tmux");
    }
    there
}

/// The lines of workers of a role, by the beginning of their names.
fn workers<'a>(screen: &'a [String], role: &str) -> Vec<(&'a str, &'a str)> {
    let name = |line: &'a str| line.trim_start_matches(['>', ' ']).split_whitespace().next();
    let of_role = screen.iter().filter(|line| line.get(2..18).is_some_and(|line| line.contains(&format!("  {role}"))));
    of_role.filter_map(|line| Some((name(line)?, line.as_str()))).collect()
}

fn count(screen: &[String], role: &str, state: &str) -> usize {
    workers(screen, role).iter().filter(|(_, line)| line.contains(&format!(" {state} "))).count()
}

/// The beginning of a worker's name, as the screen has it.
fn short(id: impl ToString) -> String {
    id.to_string().chars().take(7).collect()
}

#[test]
fn the_cluster_is_seen_scaled_and_drained_in_a_terminal() -> anyhow::Result<()> {
    if !has_tmux() {
        return Ok(());
    }
    let model = models::slow()?;
    let token = tempfile::NamedTempFile::new()?;
    std::fs::write(token.path(), "secret\n")?;
    let token = token.path().to_str().context("a path")?;
    let args = vec!["--admin-token-file".to_owned(), token.to_owned()];
    let cluster = Cluster::start(ClusterOptions { decode: 2, args, ..ClusterOptions::new(&model) })?;
    ensure!(cluster.printed().contains(&format!(" top --registry {} --admin-token-file", cluster.registry())));
    let args = ["top", "--registry", cluster.registry(), "--admin-token-file", token];
    start(&cluster, &args)?;
    let terminal = Terminal::start(SIZE, &[], &args)?;
    scale_up(&cluster, &terminal)?;
    drain(&cluster, &terminal)?;
    killed(&cluster, &terminal)?;
    terminal.keys(&["q"])?;
    terminal.ended(0)?;
    refused(&cluster, &args)?;
    signals(&args)?;
    cluster.stop()
}

/// What is there, is shown; without colours where they are not wanted.
fn start(cluster: &Cluster, args: &[&str]) -> anyhow::Result<()> {
    let client = cluster.client()?;
    cluster.block_on(client.ask(apart(sampled(prompt(40, 1), 20, 1))))?;
    let terminal = Terminal::start(SIZE, &[("NO_COLOR", "1")], args)?;
    let shown = terminal.until("the start", |screen| count(screen, "decode", "serving") == 2)?;
    ensure!(shown.len() == 24 && shown[0].starts_with("baton top  ") && shown[0].ends_with(" live"), "{shown:#?}");
    ensure!(shown[0].contains("  1 prefill, 2 decode  "), "{shown:#?}");
    ensure!(shown[1] == "Nothing bounds the cluster: hardly anything is to be done.", "{shown:#?}");
    ensure!(shown[3].starts_with("TTFT p50 ") && shown[4].starts_with("ITL  p50 "), "{shown:#?}");
    for worker in cluster.workers() {
        let named = workers(&shown, worker.member.role.as_str());
        ensure!(named.iter().any(|(name, _)| *name == short(worker.member.id)), "{} in {shown:#?}", worker.member.id);
    }
    ensure!(shown.iter().any(|line| line.contains(" -> ") && line.contains(" shm ")), "a handoff in {shown:#?}");
    ensure!(shown[23].starts_with("arrows select") && shown[23].ends_with("q quit"), "{shown:#?}");
    let no_colours = terminal.coloured()?;
    ensure!((31..=36).all(|code| !no_colours.contains(&format!("{code}m"))), "{no_colours:?}");
    terminal.resize((132, 40))?;
    let wide = terminal.until("a larger terminal", |screen| screen.len() == 40 && screen[39].starts_with("arrows"))?;
    let address = cluster.workers().first().context("a worker")?.member.grpc.clone();
    ensure!(wide.iter().any(|line| line.contains(address.as_str())), "{address} in {wide:#?}");
    terminal.keys(&["C-c"])?;
    terminal.ended(0).map(drop)
}

fn scale_up(cluster: &Cluster, terminal: &Terminal) -> anyhow::Result<()> {
    terminal.until("the start", |screen| count(screen, "decode", "serving") == 2)?;
    ensure!(terminal.coloured()?.contains("34m"), "colours where they are wanted");
    terminal.keys(&["Down", "+"])?;
    let asks = |screen: &[String]| screen.iter().any(|line| line == "Scale decode from 2 to 3 workers? y/n");
    terminal.until("the question before scaling", asks)?;
    terminal.keys(&["n"])?;
    terminal.until("no", |screen| screen[22] == "Nothing was changed.")?;
    terminal.keys(&["+", "y"])?;
    terminal.until("three decode workers", |screen| {
        count(screen, "decode", "serving") == 3 && screen[0].contains("  1 prefill, 3 decode  ")
    })?;
    cluster.wait_for_members(|members| members.iter().filter(|member| member.role == Role::Decode).count() == 3)
}

/// The worker that is busiest, which finishes what it does.
fn drain(cluster: &Cluster, terminal: &Terminal) -> anyhow::Result<()> {
    let client = cluster.client()?;
    let mut answering = cluster.block_on(client.start(sampled(prompt(40, 2), 8000, 2)))?;
    cluster.block_on(answering.until(5))?;
    let busy = cluster.wait_for_worker(Role::Decode, |worker| worker.status.running > 0)?.member.id;
    // By sequences that run: five columns after the role.
    terminal.keys(&["s", "s", "s", "s", "s"])?;
    let first = format!("> {} ", short(busy));
    terminal
        .until("the busiest worker first", |screen| screen[5].contains(" RUNv ") && screen[6].contains(&short(busy)))?;
    terminal.keys(&["Home"])?;
    terminal.until("the first worker selected", |screen| screen[6].starts_with(&first))?;
    terminal.keys(&["d"])?;
    let question = format!("Drain decode worker {busy} once its requests are done? y/n");
    terminal.until("the question before a drain", |screen| screen[22] == question)?;
    ensure!(cluster.members().iter().all(|member| !member.draining), "nothing before a yes");
    terminal.keys(&["y"])?;
    let drains = |screen: &[String]| {
        workers(screen, "decode").iter().any(|(name, line)| *name == short(busy) && line.contains(" draining "))
    };
    terminal.until("a worker that drains", |screen| drains(screen) && screen[0].contains("  1 prefill, 2 decode  "))?;
    cluster.block_on(answering.until(20))?;
    drop(answering);
    let gone = |screen: &[String]| workers(screen, "decode").iter().all(|(name, _)| *name != short(busy));
    terminal.until("without the drained worker", |screen| gone(screen) && count(screen, "decode", "serving") == 2)?;
    Ok(())
}

/// A worker, and then the router, whose feed breaks off.
fn killed(cluster: &Cluster, terminal: &Terminal) -> anyhow::Result<()> {
    let dies = cluster.wait_for_worker(Role::Decode, |_| true)?;
    cluster.signal(dies.pid, Signal::KILL)?;
    let name = short(dies.member.id);
    let is = |screen: &[String], states: &[&str]| {
        let lines = workers(screen, "decode");
        lines.iter().any(|(own, line)| *own == name && states.iter().any(|state| line.contains(state)))
    };
    terminal.until("a killed worker", |screen| is(screen, &[" lost ", " silent "]))?;
    terminal.until("another in its place", |screen| !is(screen, &[" "]) && count(screen, "decode", "serving") == 2)?;
    cluster.signal(cluster.pid("router")?, Signal::KILL)?;
    let lost = terminal.until("a lost feed", |screen| {
        screen[0].ends_with("NO FEED") && screen[21].starts_with("Feed lost; this is ")
    })?;
    ensure!(count(&lost, "decode", "serving") == 2, "the last news stay: {lost:#?}");
    let back = |screen: &[String]| screen[0].ends_with(" live") && count(screen, "decode", "serving") == 2;
    terminal.until("the feed again", back)?;
    cluster.wait_idle()
}

/// What cannot be shown is said before the terminal is taken.
fn refused(cluster: &Cluster, args: &[&str]) -> anyhow::Result<()> {
    let piped = binary::run(args)?;
    ensure!(piped.code == Some(1) && piped.out.is_empty() && piped.err.contains("`baton status`"), "{piped:?}");
    let admin = cluster.admin().to_string();
    let http = cluster.http().to_string();
    for (env, args, wanted) in [
        (&[("TERM", "dumb")][..], args, "`baton status` prints the workers"),
        (&[], &["top", "--admin", &admin], "wants a token; name its file by --admin-token-file"),
        (&[], &["top", "--admin", &http], "has no live page"),
        (&[], &["top", "--admin", "127.0.0.1:1"], "no router answers at 127.0.0.1:1 (--admin)"),
        (&[], &["top", "--registry", "http://127.0.0.1:1"], "no registry answers at http://127.0.0.1:1"),
    ] {
        let terminal = Terminal::start((120, 24), env, args)?;
        let said = terminal.ended(1)?.concat();
        ensure!(said.contains(wanted), "{args:?}: {said}, not {wanted}");
    }
    Ok(())
}

/// Whatever ends it, the terminal is as before.
fn signals(args: &[&str]) -> anyhow::Result<()> {
    for signal in [Signal::INT, Signal::TERM, Signal::HUP] {
        let terminal = Terminal::start(SIZE, &[], args)?;
        terminal.until("the start", |screen| count(screen, "decode", "serving") == 2)?;
        signal_pid(terminal.pid()?, signal)?;
        terminal.ended(0)?;
    }
    Ok(())
}
