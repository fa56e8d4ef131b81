//! `baton status` and `baton scale`: shows a running cluster's workers and changes their number.

mod report;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::{Member, Role, View, ViewReceiver};
use baton_proto::v1::{self, supervisor_client::SupervisorClient, worker_client::WorkerClient};
use baton_runtime::Tls;
use baton_runtime::tls::TlsRole;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::transport::Channel;

use crate::certs;

/// Longest wait for a view of the cluster or for a worker's answer.
const PATIENCE: Duration = Duration::from_secs(3);
/// Longest wait for new workers to load their model.
const LOADING: Duration = Duration::from_secs(300);

fn registry_arg() -> Arg {
    Arg::new("registry")
        .long("registry")
        .value_name("URL")
        .default_value("http://127.0.0.1:8002")
        .help("The cluster's registry: http://HOST:PORT of a router's internal address, or etcd://HOST:PORT,…; with TLS https:// or etcds://")
}

fn certs_arg() -> Arg {
    Arg::new("certs").long("certs").value_name("DIR").value_parser(value_parser!(PathBuf)).help(
        "Folder with an operator's certificate, as `baton certs` makes it; default: that of this user's own `baton up`",
    )
}

/// `baton status`.
pub fn command() -> Command {
    let json = Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints JSON");
    Command::new("status")
        .about("Shows the workers of a running cluster, their KV blocks, and over what KV goes between them")
        .arg(json)
        .arg(registry_arg())
        .arg(certs_arg())
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
        .arg(certs_arg())
}

fn reach(matches: &ArgMatches) -> anyhow::Result<(String, Option<Tls>)> {
    let registry = matches.get_one::<String>("registry").map_or("", String::as_str);
    certs::reach(registry, matches.get_one("certs"))
}

/// Watches the registry; returns once the first fresh view is there.
async fn views(registry: &str, tls: Option<&Tls>) -> anyhow::Result<ViewReceiver> {
    let mut views = baton_cluster::connect(registry, tls).await?.watch();
    let fresh = tokio::time::timeout(PATIENCE, views.wait_for(|view| !view.stale)).await.is_ok_and(|view| view.is_ok());
    if !fresh {
        let with = if tls.is_some() { " with these certificates" } else { "" };
        bail!(
            "no registry answers at {registry}{with}; is the cluster up? Name another with --registry: etcd, or a router's --internal address"
        );
    }
    Ok(views)
}

async fn worker_status(member: &Member, tls: Option<&Tls>) -> anyhow::Result<v1::StatusResponse> {
    let ask = async {
        let mut client = WorkerClient::new(channel(member, tls)?);
        anyhow::Ok(client.status(v1::StatusRequest {}).await?.into_inner())
    };
    tokio::time::timeout(PATIENCE, ask).await.context("no answer")?
}

/// A channel to a member, which must have the certificate of its role if its address says that it has TLS.
fn channel(member: &Member, tls: Option<&Tls>) -> anyhow::Result<Channel> {
    let role = match member.role {
        Role::Prefill => TlsRole::Prefill,
        Role::Decode => TlsRole::Decode,
        Role::Supervisor => TlsRole::Operator,
    };
    let secure = member.grpc.starts_with("https://");
    let tls = secure
        .then(|| tls.context("it has TLS; name the folder of an operator's certificate by --certs"))
        .transpose()?;
    Ok(baton_cluster::channel(&member.grpc, tls.map(|tls| (tls, role)))?)
}

/// Prints the workers and the transport that KV takes between each pair of them.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let (registry, tls) = reach(matches)?;
    let view = views(&registry, tls.as_ref()).await?.borrow().clone();
    let members = view.members.iter().filter(|m| m.role != Role::Supervisor).cloned();
    let ask = |member: Member| async {
        let answer = worker_status(&member, tls.as_ref()).await;
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
    let (registry, tls) = reach(matches)?;
    let mut views = views(&registry, tls.as_ref()).await?;
    let supervisor = views.borrow().members.iter().find(|m| m.role == Role::Supervisor).cloned();
    let Some(supervisor) = supervisor else {
        bail!("no `baton up` is part of the cluster at {registry}; on Kubernetes, scale the Deployments instead");
    };
    let mut client = SupervisorClient::new(channel(&supervisor, tls.as_ref())?);
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
