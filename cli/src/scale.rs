//! `baton scale` and `baton drain`: the number of workers, and which of them go.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::{Role, View};
use baton_proto::v1::{self, supervisor_client::SupervisorClient};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use tonic::transport::Channel;

use crate::kubernetes;
use crate::status::{Reach, channel, reach, reach_args, worker_status};

/// Longest wait for the answer to a request that is not waited for.
const PATIENCE: Duration = Duration::from_secs(15);

/// How many workers of each role there should be.
pub struct Wanted {
    pub prefill: Option<u32>,
    pub decode: Option<u32>,
    pub kv_store: Option<u32>,
}

/// How a change is made.
pub struct Options {
    pub wait: bool,
    pub timeout: Duration,
    pub dry_run: bool,
    /// Also where an autoscaler is in charge.
    pub force: bool,
    /// Takes each line of what is done.
    pub say: Say,
}

/// Where lines for the user go.
#[derive(Clone)]
pub struct Say(Arc<dyn Fn(&str) + Send + Sync>);

impl Say {
    /// To this function.
    pub fn to(say: impl Fn(&str) + Send + Sync + 'static) -> Say {
        Say(Arc::new(say))
    }

    /// One line.
    pub fn line(&self, line: &str) {
        (self.0)(line);
    }
}

/// A worker that goes.
pub struct Drain {
    /// Its id, or the name of its pod.
    pub worker: String,
    /// Whether another takes its place.
    pub replace: bool,
}

impl Wanted {
    /// The roles that change.
    pub fn roles(&self) -> impl Iterator<Item = (Role, u32)> {
        let all = [(Role::Prefill, self.prefill), (Role::Decode, self.decode), (Role::KvStore, self.kv_store)];
        all.into_iter().filter_map(|(role, count)| Some((role, count?)))
    }
}

/// `baton scale`.
pub fn command() -> Command {
    let count = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").value_parser(value_parser!(u32)).help(help)
    };
    Command::new("scale")
        .about("Starts or drains workers, of a `baton up` on this machine or of a release on Kubernetes")
        .arg(count("prefill", "Prefill workers there should be"))
        .arg(count("decode", "Decode workers there should be"))
        .arg(count("kv-store", "KV stores there should be"))
        .args(how())
        .args(reach_args())
}

/// `baton drain`.
pub fn drain_command() -> Command {
    Command::new("drain")
        .about("Takes one worker out of service; requests that it is answering are finished first")
        .arg(
            Arg::new("worker")
                .value_name("WORKER")
                .required(true)
                .help("Its id, or on Kubernetes the name of its pod, as `baton status` shows them"),
        )
        .arg(
            Arg::new("replace")
                .long("replace")
                .action(ArgAction::SetTrue)
                .help("Starts another in its place; under `baton up` that one serves first"),
        )
        .args(how())
        .args(reach_args())
}

fn how() -> [Arg; 4] {
    let flag = |name: &'static str, help: &'static str| Arg::new(name).long(name).action(ArgAction::SetTrue).help(help);
    [
        flag("wait", "Waits until the workers serve, and those that go have finished their requests"),
        Arg::new("timeout")
            .long("timeout")
            .value_name("DURATION")
            .default_value("10m")
            .value_parser(|text: &str| baton_runtime::config::parse_duration(text))
            .help("With --wait: how long"),
        flag("dry-run", "Only says what would be done"),
        flag("force", "Also where an autoscaler may undo it, or where requests wait because no other worker serves"),
    ]
}

fn options(matches: &ArgMatches) -> Options {
    Options {
        wait: matches.get_flag("wait"),
        timeout: matches.get_one("timeout").copied().unwrap_or(Duration::from_secs(600)),
        dry_run: matches.get_flag("dry-run"),
        force: matches.get_flag("force"),
        say: Say::to(|line| println!("{line}")),
    }
}

fn wanted(matches: &ArgMatches) -> Wanted {
    let count = |name| matches.get_one::<u32>(name).copied();
    Wanted { prefill: count("prefill"), decode: count("decode"), kv_store: count("kv-store") }
}

/// Runs `baton scale`.
pub async fn scale(matches: &ArgMatches) -> anyhow::Result<()> {
    let (wanted, options) = (wanted(matches), options(matches));
    if wanted.roles().next().is_none() {
        bail!("nothing to do: give --prefill N, --decode N, --kv-store N, or several of them");
    }
    scale_to(matches, &wanted, &options).await
}

/// Makes it so many workers, of the cluster that the arguments name.
pub async fn scale_to(matches: &ArgMatches, wanted: &Wanted, options: &Options) -> anyhow::Result<()> {
    if wanted.decode == Some(0) {
        bail!("--decode is 0; a cluster needs at least one decode worker");
    }
    match reach(matches).await? {
        Reach::Release(release) => kubernetes::scale(&release, wanted, options).await,
        Reach::Registry(registry) => Up::find(registry).await?.scale(wanted, options).await,
    }
}

/// Runs `baton drain`.
pub async fn drain(matches: &ArgMatches) -> anyhow::Result<()> {
    let worker = matches.get_one::<String>("worker").cloned().unwrap_or_default();
    let (drain, options) = (Drain { worker, replace: matches.get_flag("replace") }, options(matches));
    drain_one(matches, &drain, &options).await
}

/// Takes one worker out of service, of the cluster that the arguments name.
pub async fn drain_one(matches: &ArgMatches, drain: &Drain, options: &Options) -> anyhow::Result<()> {
    match reach(matches).await? {
        Reach::Release(release) => kubernetes::drain(&release, drain, options).await,
        Reach::Registry(registry) => Up::find(registry).await?.drain(drain, options).await,
    }
}

/// A `baton up`, and its view of the cluster.
struct Up {
    client: SupervisorClient<Channel>,
    registry: crate::status::Registry,
}

impl Up {
    async fn find(registry: crate::status::Registry) -> anyhow::Result<Up> {
        let supervisor = registry.views.borrow().members.iter().find(|m| m.role == Role::Supervisor).cloned();
        let Some(supervisor) = supervisor else {
            bail!(
                "no `baton up` is part of the cluster at {}; on Kubernetes, name the release by --release",
                registry.address
            );
        };
        let client = SupervisorClient::new(channel(&supervisor.grpc, supervisor.role, registry.tls.as_ref())?);
        Ok(Up { client, registry })
    }

    fn count(view: &View, role: Role) -> u32 {
        view.serving(role).count() as u32
    }

    async fn scale(mut self, wanted: &Wanted, options: &Options) -> anyhow::Result<()> {
        let view = Arc::clone(&*self.registry.views.borrow());
        for (role, to) in wanted.roles() {
            options.say.line(&format!("{}: {} -> {to} workers", role.as_str(), Up::count(&view, role)));
        }
        if options.dry_run {
            options.say.line("nothing was changed (--dry-run)");
            return Ok(());
        }
        let Wanted { prefill, decode, kv_store } = *wanted;
        let request = v1::ScaleRequest { prefill, decode, kv_store, at_once: !options.wait };
        let now = answered(options, self.client.scale(request)).await?;
        if kv_store.is_some() && now.kv_store.is_none() {
            bail!("this `baton up` is of a version that does not scale KV stores; start it anew with --kv-stores N");
        }
        self.wait(now, options).await
    }

    async fn drain(mut self, drain: &Drain, options: &Options) -> anyhow::Result<()> {
        let view = Arc::clone(&*self.registry.views.borrow());
        let members = view.members.iter().filter(|member| member.role != Role::Supervisor);
        let Some(member) = members.into_iter().find(|member| member.id.to_string() == drain.worker) else {
            bail!("no worker has the id {:?}; `baton status` shows them", drain.worker);
        };
        let then = if drain.replace { "once another serves in its place" } else { "and is not replaced" };
        options.say.line(&format!(
            "{} worker {} goes {then}; it finishes its requests first",
            member.role.as_str(),
            drain.worker
        ));
        if options.dry_run {
            options.say.line("nothing was changed (--dry-run)");
            return Ok(());
        }
        let pid = worker_status(member, self.registry.tls.as_ref()).await?.pid;
        if pid == 0 {
            bail!("the worker is of a version that does not say which process it is; use `baton scale`");
        }
        let request = v1::DrainRequest { worker: member.id.0, pid, replace: drain.replace, at_once: !options.wait };
        let now = answered(options, self.client.drain(request)).await?;
        self.wait(now, options).await
    }

    /// Waits until as many workers serve as there are processes, which load the model first. Prints every change.
    async fn wait(mut self, now: v1::ScaleResponse, options: &Options) -> anyhow::Result<()> {
        if !options.wait {
            return Ok(());
        }
        // The version before says nothing of stores, so they are not waited for.
        let stores = |view: &View| now.kv_store.map_or(0, |_| Up::count(view, Role::KvStore));
        let serving = |view: &Arc<View>| [Up::count(view, Role::Prefill), Up::count(view, Role::Decode), stores(view)];
        let wanted = [now.prefill, now.decode, now.kv_store.unwrap_or_default()];
        let wait = async {
            loop {
                let view = Arc::clone(&*self.registry.views.borrow_and_update());
                let before = serving(&view);
                options.say.line(&progress(before, wanted));
                if before == wanted {
                    return anyhow::Ok(());
                }
                self.registry.views.wait_for(|view| serving(view) != before).await.context("the registry is gone")?;
            }
        };
        let late = "the processes run, but not all of them serve yet (--timeout); `baton status` shows which";
        tokio::time::timeout(options.timeout, wait).await.context(late)?
    }
}

/// How many serve of those that there will be: prefill workers, decode workers, KV stores.
fn progress([prefill, decode, stores]: [u32; 3], wanted: [u32; 3]) -> String {
    let workers = format!("{prefill} of {} prefill and {decode} of {} decode workers serve", wanted[0], wanted[1]);
    match stores.max(wanted[2]) {
        0 => workers,
        _ => format!("{workers}, and {stores} of {} KV stores", wanted[2]),
    }
}

/// The answer of the supervisor. With --wait it comes when the processes run, and those that go have ended.
async fn answered(
    options: &Options,
    answer: impl Future<Output = Result<tonic::Response<v1::ScaleResponse>, tonic::Status>>,
) -> anyhow::Result<v1::ScaleResponse> {
    let patience = if options.wait { options.timeout } else { PATIENCE };
    let answer = tokio::time::timeout(patience, answer).await;
    let answer = answer.with_context(|| format!("no answer of `baton up` within {patience:?} (--timeout)"))?;
    Ok(answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_role_has_a_number_of_its_own() {
        let matches = command().try_get_matches_from(["scale", "--kv-store", "3", "--decode", "2"]).unwrap();
        let wanted = wanted(&matches);
        assert_eq!(wanted.roles().collect::<Vec<_>>(), [(Role::Decode, 2), (Role::KvStore, 3)]);
        let refused = command().try_get_matches_from(["scale", "--kv-store", "some"]).unwrap_err().to_string();
        assert!(refused.contains("--kv-store <N>"), "{refused}");
    }

    #[test]
    fn stores_are_told_of_where_there_are_any() {
        assert_eq!(progress([1, 2, 0], [1, 3, 0]), "1 of 1 prefill and 2 of 3 decode workers serve");
        assert_eq!(
            progress([1, 2, 1], [1, 3, 0]),
            "1 of 1 prefill and 2 of 3 decode workers serve, and 1 of 0 KV stores"
        );
        assert_eq!(
            progress([0, 1, 0], [0, 1, 2]),
            "0 of 0 prefill and 1 of 1 decode workers serve, and 0 of 2 KV stores"
        );
    }
}
