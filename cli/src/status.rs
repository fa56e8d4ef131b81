//! `baton status` and `baton scale`: shows a running cluster's workers and changes their number.

mod report;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::{Member, Role, View, ViewReceiver};
use baton_proto::v1::{self, supervisor_client::SupervisorClient, worker_client::WorkerClient};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Longest wait for a view of the cluster or for a worker's answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest wait for new workers to load their model.
const LOADING: Duration = Duration::from_secs(300);

fn registry_arg() -> Arg {
    Arg::new("registry")
        .long("registry")
        .value_name("URL")
        .default_value("http://127.0.0.1:8002")
        .help("The cluster's registry: http://HOST:PORT of a router's internal address, or etcd://HOST:PORT,…")
}

/// `baton status`.
pub fn command() -> Command {
    let json = Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints JSON");
    Command::new("status")
        .about("Shows the workers of a running cluster, their KV blocks, and over what KV goes between them")
        .arg(json)
        .arg(registry_arg())
}

/// `baton scale`.
pub fn scale_command() -> Command {
    let count = |name: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").value_parser(value_parser!(u32)).help(help)
    };
    Command::new("scale")
        .about("Starts or drains workers of a running `baton up`")
        .arg(count("prefill", "Prefill workers there should be"))
        .arg(count("decode", "Decode workers there should be"))
        .arg(registry_arg())
}

fn url(matches: &ArgMatches) -> &str {
    matches.get_one::<String>("registry").map_or("", String::as_str)
}

/// Watches the registry; returns once the first fresh view is there.
async fn views(registry: &str) -> anyhow::Result<ViewReceiver> {
    let mut views = baton_cluster::connect(registry).await?.watch();
    let fresh = tokio::time::timeout(PATIENCE, views.wait_for(|view| !view.stale)).await.is_ok_and(|view| view.is_ok());
    if !fresh {
        bail!(
            "no registry answers at {registry}; is the cluster up? Name another with --registry: etcd, or a router's --internal address"
        );
    }
    Ok(views)
}

async fn worker_status(member: &Member) -> anyhow::Result<v1::StatusResponse> {
    let ask = async {
        let mut client = WorkerClient::connect(member.grpc.clone()).await?;
        anyhow::Ok(client.status(v1::StatusRequest {}).await?.into_inner())
    };
    tokio::time::timeout(PATIENCE, ask).await.context("no answer")?
}

/// Prints the workers and the transport that KV takes between each pair of them.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let view = views(url(matches)).await?.borrow().clone();
    let members = view.members.iter().filter(|m| m.role != Role::Supervisor).cloned();
    let ask = |member: Member| async move {
        let answer = worker_status(&member).await;
        (member, answer)
    };
    let workers = futures::future::join_all(members.map(ask)).await;
    match matches.get_flag("json") {
        true => println!("{:#}", report::json(&workers)),
        false => print!("{}", report::table(&workers)),
    }
    Ok(())
}

/// Asks the supervisor for new worker counts and waits until that many serve.
pub async fn scale(matches: &ArgMatches) -> anyhow::Result<()> {
    let (prefill, decode) = (matches.get_one::<u32>("prefill").copied(), matches.get_one::<u32>("decode").copied());
    if prefill.is_none() && decode.is_none() {
        bail!("nothing to do: give --prefill N, --decode M, or both");
    }
    let registry = url(matches);
    let mut views = views(registry).await?;
    let supervisor = views.borrow().members.iter().find(|m| m.role == Role::Supervisor).cloned();
    let Some(supervisor) = supervisor else {
        bail!("no `baton up` is part of the cluster at {registry}; on Kubernetes, scale the Deployments instead");
    };
    let mut client = SupervisorClient::connect(supervisor.grpc.clone())
        .await
        .with_context(|| format!("reaching the supervisor at {}", supervisor.grpc))?;
    let now =
        client.scale(v1::ScaleRequest { prefill, decode }).await.map_err(|s| anyhow::anyhow!("{}", s.message()))?;
    let now = now.into_inner();
    // The processes run already. They serve once they have loaded the model.
    let serving = |view: &Arc<View>| {
        let count = |role| view.serving(role).count() as u32;
        count(Role::Prefill) == now.prefill && count(Role::Decode) == now.decode
    };
    if tokio::time::timeout(LOADING, views.wait_for(serving)).await.is_err() {
        bail!("the processes run, but not all of them serve yet; `baton status` shows which");
    }
    println!("{} prefill and {} decode workers serve", now.prefill, now.decode);
    Ok(())
}

/// Sends an HTTP/1.0 GET to a server on this machine; returns status and body.
pub async fn get(address: SocketAddr, path: &str) -> anyhow::Result<(u16, String)> {
    let mut stream = tokio::net::TcpStream::connect(address).await?;
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split_whitespace().nth(1).and_then(|word| word.parse().ok()).context("no HTTP answer")?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok((status, body.to_owned()))
}
