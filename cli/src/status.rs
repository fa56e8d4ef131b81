//! `baton status`: shows a running cluster's workers. Also how commands find a cluster.

mod report;
mod tiers;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use baton_cluster::{Member, Role, ViewReceiver};
use baton_proto::v1::{self, worker_client::WorkerClient};
use baton_runtime::Tls;
use baton_runtime::tls::TlsRole;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tonic::transport::Channel;

use crate::certs;
use crate::kubernetes::{self, Release};

pub use report::Answered;

/// Longest wait for a view of the cluster or for a worker's answer.
const PATIENCE: Duration = Duration::from_secs(3);

/// The arguments that name a cluster.
pub fn reach_args() -> [Arg; 4] {
    let [release, namespace] = kubernetes::args();
    let registry = Arg::new("registry")
        .long("registry")
        .value_name("URL")
        .default_value("http://127.0.0.1:8002")
        .help("The cluster's registry: http://HOST:PORT of a router's internal address, or etcd://HOST:PORT,…; with TLS https:// or etcds://");
    let certs = Arg::new("certs").long("certs").value_name("DIR").value_parser(value_parser!(PathBuf)).help(
        "Folder with an operator's certificate, as `baton certs` makes it; default: that of this user's own `baton up`",
    );
    [registry, certs, release, namespace]
}

/// `baton status`.
pub fn command() -> Command {
    let json = Arg::new("json").long("json").action(ArgAction::SetTrue).help("Prints JSON");
    Command::new("status")
        .about("Shows the workers of a running cluster, their KV blocks, and over what KV goes between them")
        .arg(json)
        .arg(Arg::new("kv").long("kv").action(ArgAction::SetTrue).help(
            "Shows instead what each worker's pool, host memory, disk and object store hold (--kv-host, --kv-disk, --kv-object). Hits are \
             tokens that the KV store has handed out since the worker began, and each tier's share of them",
        ))
        .args(reach_args())
}

/// A cluster that the arguments name.
pub enum Reach {
    Registry(Registry),
    Release(Release),
}

/// A registry that has answered.
pub struct Registry {
    pub address: String,
    pub tls: Option<Tls>,
    pub views: ViewReceiver,
}

/// Finds the cluster; its registry has given a fresh view.
pub async fn reach(matches: &ArgMatches) -> anyhow::Result<Reach> {
    let given = matches.get_one::<PathBuf>("certs");
    if matches.contains_id("release") {
        let tls = given.map(|folder| certs::operator(folder)).transpose()?;
        if let Some(release) = Release::named(matches, tls) {
            return Ok(Reach::Release(release.await?));
        }
    }
    let registry = matches.get_one::<String>("registry").map_or("", String::as_str);
    let (address, tls) = certs::reach(registry, given)?;
    let views = views(&address, tls.as_ref()).await?;
    Ok(Reach::Registry(Registry { address, tls, views }))
}

/// Watches the registry; returns once the first fresh view is there.
async fn views(registry: &str, tls: Option<&Tls>) -> anyhow::Result<ViewReceiver> {
    let mut views = baton_cluster::connect(registry, tls).await?.watch();
    let fresh = tokio::time::timeout(PATIENCE, views.wait_for(|view| !view.stale)).await.is_ok_and(|view| view.is_ok());
    if !fresh {
        let with = if tls.is_some() { " with these certificates" } else { "" };
        bail!(
            "no registry answers at {registry}{with}; is the cluster up? Name another with --registry: etcd, or a router's --internal \
             address; on Kubernetes, name the release by --release"
        );
    }
    Ok(views)
}

/// What a worker says of itself.
pub async fn worker_status(member: &Member, tls: Option<&Tls>) -> anyhow::Result<v1::StatusResponse> {
    ask_at(&member.grpc, member.role, tls).await
}

/// What the worker at an address says of itself.
pub async fn ask_at(url: &str, role: Role, tls: Option<&Tls>) -> anyhow::Result<v1::StatusResponse> {
    let ask = async {
        let mut client = WorkerClient::new(channel(url, role, tls)?);
        anyhow::Ok(client.status(v1::StatusRequest {}).await?.into_inner())
    };
    tokio::time::timeout(PATIENCE, ask).await.context("no answer")?
}

/// A channel to a member, which must have the certificate of its role if its address says that it has TLS.
pub fn channel(url: &str, role: Role, tls: Option<&Tls>) -> anyhow::Result<Channel> {
    let role = match role {
        Role::Prefill => TlsRole::Prefill,
        Role::Decode | Role::KvStore => TlsRole::Decode,
        Role::Supervisor => TlsRole::Operator,
    };
    let secure = url.starts_with("https://");
    let tls = secure
        .then(|| tls.context("it has TLS; name the folder of an operator's certificate by --certs"))
        .transpose()?;
    Ok(baton_cluster::channel(url, tls.map(|tls| (tls, role)))?)
}

/// Prints the workers and the transport that KV takes between each pair of them.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let workers = match reach(matches).await? {
        Reach::Release(release) => kubernetes::status(&release).await?,
        Reach::Registry(Registry { views, tls, .. }) => {
            let view = views.borrow().clone();
            let members = view.members.iter().filter(|m| m.role != Role::Supervisor).cloned();
            let ask = |member: Member| async {
                let answer = worker_status(&member, tls.as_ref()).await;
                Answered::member(member, answer)
            };
            futures::future::join_all(members.map(ask)).await
        }
    };
    match matches.get_flag("json") {
        true => println!("{:#}", report::json(&workers)),
        false if matches.get_flag("kv") => print!("{}", tiers::table(&workers)),
        false => print!("{}", report::table(&workers)),
    }
    Ok(())
}

/// Sends an HTTP/1.0 GET to an admin endpoint, with the token that it may need. The answer comes from the stream.
pub async fn send_get(address: SocketAddr, path: &str, token: Option<&str>) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect(address).await?;
    let token = token.map_or(String::new(), |token| format!("Authorization: Bearer {token}\r\n"));
    stream.write_all(format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n{token}\r\n").as_bytes()).await?;
    Ok(stream)
}

/// The whole answer to such a GET: status and body.
pub async fn get(address: SocketAddr, path: &str, token: Option<&str>) -> anyhow::Result<(u16, String)> {
    let mut stream = send_get(address, path, token).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split_whitespace().nth(1).and_then(|word| word.parse().ok()).context("no HTTP answer")?;
    let body = answer.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    Ok((status, body.to_owned()))
}
