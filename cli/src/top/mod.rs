//! `baton top`: the cluster in a terminal, over the feed of a router's live page. Scales and drains after a confirmation.
//!
//! `feed` and `snapshot` say how the cluster is, `state` what the user wants to see and to change, `view` draws, `screen` is the terminal.

mod feed;
mod paint;
mod screen;
mod snapshot;
mod state;
mod steps;
mod tables;
mod view;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::Role;
use clap::{Arg, ArgMatches, Command, value_parser};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};

use self::feed::{News, Source, follow};
use self::screen::{Screen, Signals, Told, keys};
use self::state::{Change, Effect, State};
use crate::scale::{Drain, Options, Say, Wanted, drain_one, scale_to};
use crate::status::{Reach, reach, reach_args};

/// Time between two looks at what only time changes.
const TICK: Duration = Duration::from_secs(1);
/// News that wait to be shown. More wait at the router, which sends the latest (I5).
const NEWS: usize = 2;
/// Lines about changes that wait to be shown.
const LINES: usize = 16;

const HELP: &str = "\
Shows in the terminal what the live page shows: what bounds the cluster now and why, TTFT, ITL and goodput, each worker with its KV \
blocks and its queue, and the latest handoffs.

  s r    sort by the next column, reverse the order
  /      show only workers whose name, role, state, model or address has a text
  d      drain the selected worker, after a confirmation
  + -    one worker more or less of its role, after a confirmation
  ? q    explain keys and columns, quit

Without --admin, the address is that of the `baton up` that --registry names. For a release on Kubernetes, forward a port of a router; \
--release says what to scale and drain:

  kubectl port-forward deployment/baton-router 9000 &
  baton top --admin 127.0.0.1:9000 --admin-token-file FILE --release baton

NO_COLOR=1 shows no colours.";

/// `baton top`.
pub fn command() -> Command {
    Command::new("top")
        .about("Shows a running cluster in the terminal, live; drains and scales it, too")
        .after_help(HELP)
        .arg(Arg::new("admin").long("admin").value_name("HOST:PORT").help(
            "The admin address of a router, where its live page is, as `baton up` prints it; default: that of the `baton up` at --registry",
        ))
        .arg(
            Arg::new("admin-token-file")
                .long("admin-token-file")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .help("File with the token of the admin address, if it needs one"),
        )
        .args(reach_args())
}

/// Runs `baton top`.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    check_terminal(std::io::stdin().is_terminal() && std::io::stdout().is_terminal(), &variable("TERM"))?;
    let source = source(matches).await?;
    let first = source.open().await?;
    let (news, mut told) = mpsc::channel(NEWS);
    let feed = tokio::spawn(follow(source, first, news));
    // Signals first: from the moment on at which the terminal is taken, they must give it back.
    let mut signals = Signals::take().context("taking signals")?;
    let mut screen = Screen::take(variable("NO_COLOR").is_empty()).context("taking the terminal")?;
    let shown = show(matches, &mut screen, &mut signals, &mut told).await;
    drop(screen);
    feed.abort();
    shown.context("showing the cluster")
}

/// Refuses what is no terminal that a screen can be drawn on.
fn check_terminal(terminal: bool, kind: &str) -> anyhow::Result<()> {
    let instead = "`baton status` prints the workers";
    if !terminal {
        bail!("`baton top` needs a terminal as its input and output; {instead}");
    }
    if kind.is_empty() || kind == "dumb" {
        bail!(
            "TERM is {kind:?}, and `baton top` needs a terminal whose cursor it can move, such as TERM=xterm; {instead}"
        );
    }
    Ok(())
}

/// Where the feed is.
async fn source(matches: &ArgMatches) -> anyhow::Result<Source> {
    let token = matches.get_one::<PathBuf>("admin-token-file").cloned();
    if let Some(admin) = matches.get_one::<String>("admin") {
        return Ok(Source { admin: host_port(admin), token });
    }
    let how = "name the admin address of a router by --admin HOST:PORT";
    if matches.get_one::<String>("release").is_some() {
        bail!("{how}; on Kubernetes by a forwarded port, see `baton top --help`");
    }
    let Reach::Registry(registry) = reach(matches).await? else { bail!("{how}") };
    let supervisor = registry.views.borrow().members.iter().find(|member| member.role == Role::Supervisor).cloned();
    // Before, a supervisor said its own address.
    match supervisor.filter(|supervisor| supervisor.admin != supervisor.grpc) {
        Some(supervisor) => Ok(Source { admin: host_port(&supervisor.admin), token }),
        None => bail!("no `baton up` at {} says where its router's page is; {how}", registry.address),
    }
}

/// The address in a URL, or as it is.
fn host_port(url: &str) -> String {
    url.strip_prefix("http://").unwrap_or(url).trim_end_matches('/').to_owned()
}

/// What comes back from a change.
enum Answer {
    Line(String),
    Done(Result<(), String>),
}

/// Shows the cluster until the user or a signal ends it.
async fn show(
    matches: &ArgMatches,
    screen: &mut Screen,
    signals: &mut Signals,
    told: &mut mpsc::Receiver<News>,
) -> std::io::Result<()> {
    let begin = Instant::now();
    let (answers, mut answered) = mpsc::channel(LINES);
    let (mut state, mut keys, mut tick) = (State::default(), keys(), interval(TICK));
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let mut anew = false;
        tokio::select! {
            key = keys.recv() => {
                // Without a terminal there is nobody to show anything to.
                let Some(key) = key else { return Ok(()) };
                match state.key(key, begin.elapsed().as_secs_f64()) {
                    Some(Effect::Quit) => return Ok(()),
                    Some(Effect::Redraw) => anew = true,
                    Some(Effect::Change(change)) => drop(tokio::spawn(make(matches.clone(), change, answers.clone()))),
                    None => {}
                }
            }
            signal = signals.next() => match signal {
                Told::End => return Ok(()),
                Told::Resized => anew = true,
            },
            Some(news) = told.recv() => match news {
                News::Snapshot(snapshot) => state.told(*snapshot, begin.elapsed().as_secs_f64()),
                News::Lost { why, again } => state.lost(&why, again.as_secs_f64(), begin.elapsed().as_secs_f64()),
            },
            Some(answer) = answered.recv() => match answer {
                Answer::Line(line) => state.said(&line, false, begin.elapsed().as_secs_f64()),
                Answer::Done(outcome) => state.answered(outcome, begin.elapsed().as_secs_f64()),
            },
            _ = tick.tick() => {}
        }
        let now = begin.elapsed().as_secs_f64();
        screen.show(anew, |buffer| view::draw(&state, now, buffer))?;
    }
}

/// Makes a change, as `baton drain` and `baton scale` do without --wait.
async fn make(matches: ArgMatches, change: Change, answers: mpsc::Sender<Answer>) {
    let lines = answers.clone();
    let say = Say::to(move |line| {
        // Who shows is gone, or has seen enough lines.
        let _ = lines.try_send(Answer::Line(line.to_owned()));
    });
    let options = Options { wait: false, timeout: Duration::ZERO, dry_run: false, force: false, say };
    let outcome = match change {
        Change::Drain { worker, .. } => {
            let drain = Drain { worker: worker.to_string(), replace: false };
            drain_one(&matches, &drain, &options).await
        }
        Change::Scale { role, to, .. } => {
            let of = |own| (role == own).then_some(to);
            let wanted = Wanted { prefill: of(Role::Prefill), decode: of(Role::Decode), kv_store: of(Role::KvStore) };
            scale_to(&matches, &wanted, &options).await
        }
    };
    // So here.
    let _ = answers.send(Answer::Done(outcome.map_err(|error| format!("{error:#}")))).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_terminal_is_refused_with_what_to_use() {
        check_terminal(true, "xterm-256color").unwrap();
        for (terminal, kind, wanted) in
            [(false, "xterm", "needs a terminal"), (true, "dumb", "TERM is \"dumb\""), (true, "", "TERM is \"\"")]
        {
            let said = check_terminal(terminal, kind).unwrap_err().to_string();
            assert!(said.contains(wanted) && said.contains("`baton status`"), "{said}");
        }
    }

    #[test]
    fn an_address_may_be_the_pages_url() {
        for said in ["127.0.0.1:9000", "http://127.0.0.1:9000", "http://127.0.0.1:9000/"] {
            assert_eq!(host_port(said), "127.0.0.1:9000");
        }
    }

    #[tokio::test]
    async fn a_release_needs_a_forwarded_port() {
        let matches = command().try_get_matches_from(["top", "--release", "baton"]).unwrap();
        let said = source(&matches).await.unwrap_err().to_string();
        assert!(said.contains("--admin HOST:PORT") && said.contains("forwarded port"), "{said}");
    }
}
