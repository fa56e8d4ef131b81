//! Clients reach the router by the chart's HTTPRoute and Ingresses, carried out by a real Envoy: SSE and gRPC, errors, answers that take long,
//! clients that go away.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_proto::v1::inference_client::InferenceClient;
use baton_tests::cluster::client::{Client, apart, greedy, prompt};
use baton_tests::cluster::{Cluster, ClusterOptions, HANG, http, models, signal_pid};
use rustix::process::Signal;
use serde_json::{Value, json};
use tonic::Code;
use tonic::transport::Endpoint;

use crate::chart::Release;
use crate::gateway::Gateway;

const HOST: &str = "llm.example.com";
/// Envoy ends an answer after 15 s unless it is told otherwise.
const LONG: Duration = Duration::from_secs(17);
/// More than anybody waits for.
const ENDLESS: u32 = 6000;

/// A process that runs a tenth of the time, so that answers take long on any machine.
struct Slowed(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Slowed {
    fn start(pid: u32) -> Slowed {
        let over = Arc::<AtomicBool>::default();
        let seen = Arc::clone(&over);
        let thread = std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                for (signal, time) in [(Signal::STOP, 270), (Signal::CONT, 30)] {
                    // A process that is gone is what the test finds.
                    let _ = signal_pid(pid, signal);
                    std::thread::sleep(Duration::from_millis(time));
                }
            }
        });
        Slowed(over, Some(thread))
    }
}

impl Drop for Slowed {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        // Its last signal lets the process run.
        self.1.take().map(JoinHandle::join);
    }
}

fn completion(max_tokens: u32, stream: bool) -> Value {
    json!({
        "prompt": prompt(40, 1), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "stream": stream,
        "cache_salt": format!("{max_tokens} {stream}"),
    })
}

async fn ask(to: SocketAddr, body: &Value) -> anyhow::Result<reqwest::Response> {
    let request = reqwest::Client::new().post(format!("http://{to}/v1/completions")).header("host", HOST);
    Ok(request.json(body).send().await?)
}

fn route(more: &str) -> anyhow::Result<Release> {
    let set = format!("router.httpRoute.enabled=true,router.httpRoute.parentRefs[0].name=public{more}");
    Release::render(&set, &["--set", &set])
}

/// What comes through is what the router says: answers by both APIs, and their errors.
async fn comes_through(client: &Client, gateway: SocketAddr, router: SocketAddr) -> anyhow::Result<()> {
    let (straight, through) = (ask(router, &completion(30, false)).await?, ask(gateway, &completion(30, false)).await?);
    let (straight, through): (Value, Value) = (straight.json().await?, through.json().await?);
    let text = straight["choices"][0]["text"].as_str().filter(|text| !text.is_empty()).context("a text")?;
    ensure!(through["choices"][0]["text"] == text, "{through} instead of {straight}");
    let streamed = ask(gateway, &completion(30, true)).await?.text().await?;
    ensure!(http::streamed_text(&streamed)? == text, "{streamed}");
    let answer = client.ask(greedy(prompt(40, 1), 30)).await?;
    ensure!(answer.text == text, "by gRPC {:?} instead of {text:?}", answer.text);
    let refused = ask(gateway, &json!({"prompt": "x", "temperature": -1})).await?;
    let (status, error) = (refused.status(), refused.text().await?);
    ensure!(status == 400 && error.contains("temperature"), "{status} {error}");
    let error = client.start(greedy(prompt(9000, 1), 30)).await.err().context("a prompt longer than the context")?;
    ensure!(error.code() == Code::InvalidArgument && error.message().contains("8192"), "{error}");
    Ok(())
}

/// Takes what comes for so long: the number of pieces.
async fn for_so_long(mut answer: reqwest::Response, time: Duration) -> anyhow::Result<usize> {
    let (begin, mut pieces) = (Instant::now(), 0);
    while begin.elapsed() < time {
        let piece = tokio::time::timeout(HANG, answer.chunk()).await??;
        ensure!(piece.is_some(), "the answer ended after {pieces} pieces");
        pieces += 1;
    }
    Ok(pieces)
}

#[test]
fn answers_take_as_long_as_they_need_through_an_http_route() -> anyhow::Result<()> {
    let model = models::slow()?;
    // Connections end while streams are on them.
    let env = vec![("BATON_CONNECTION_AGE".to_owned(), "2s".to_owned())];
    let cluster = Cluster::start(ClusterOptions { env, ..ClusterOptions::new(model.path()) })?;
    let gateway = Gateway::start(&route("")?, "HTTPRoute", &cluster)?;
    let client = cluster.block_on(Client::connect(gateway.address))?;
    cluster.block_on(comes_through(&client, gateway.address, cluster.http()))?;

    let slowed = Slowed::start(cluster.pid("decode")?);
    let sse = cluster.block_on(ask(gateway.address, &completion(ENDLESS, true)))?;
    let sse = cluster.spawn(for_so_long(sse, LONG));
    let mut stream = cluster.block_on(client.start(apart(greedy(prompt(40, 2), ENDLESS))))?;
    let begin = Instant::now();
    let tokens = cluster.block_on(async move {
        while begin.elapsed() < LONG {
            let came = tokio::time::timeout(HANG, stream.next()).await??;
            ensure!(came, "the answer ended after {} tokens", stream.so_far().ids.len());
        }
        Ok(stream.so_far().ids.len())
    })?;
    // One piece would mean that they are held back on the way.
    let pieces = cluster.block_on(sse)??;
    ensure!(tokens > 50 && pieces > 50, "{tokens} tokens, {pieces} pieces in {LONG:?}");
    drop(slowed);
    // I6: both clients have gone.
    cluster.wait_idle()?;
    cluster.stop()
}

/// A limit that is set is the gateway's, and what it ends is given up in the cluster, too.
#[test]
fn an_answer_that_a_gateway_ends_leaves_nothing_behind() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(ClusterOptions::new(model.path()))?;
    let gateway = Gateway::start(&route(",router.httpRoute.requestTimeout=1500ms")?, "HTTPRoute", &cluster)?;
    let client = cluster.block_on(Client::connect(gateway.address))?;
    let slowed = Slowed::start(cluster.pid("decode")?);
    let sse = cluster.block_on(ask(gateway.address, &completion(ENDLESS, true)))?;
    ensure!(cluster.block_on(for_so_long(sse, HANG)).is_err(), "an answer by HTTP took as long as it needed");
    let ended = cluster.block_on(async { client.start(apart(greedy(prompt(40, 2), ENDLESS))).await?.rest().await });
    ensure!(ended.is_err(), "an answer by gRPC took as long as it needed");
    cluster.wait_for_worker(Role::Decode, |decode| decode.idle())?;
    drop(slowed);
    cluster.wait_idle()?;
    cluster.stop()
}

#[test]
fn ingresses_lead_a_host_to_both_apis() -> anyhow::Result<()> {
    let model = models::slow()?;
    let cluster = Cluster::start(ClusterOptions::new(model.path()))?;
    let set = format!("router.ingress.enabled=true,router.ingress.grpc.enabled=true,router.ingress.hosts[0]={HOST}");
    let release = Release::render(&set, &["--set", &set])?;
    let gateway = Gateway::start(&release, "Ingress", &cluster)?;
    let connects = |host: &str| {
        let endpoint =
            Endpoint::from_shared(format!("http://{}", gateway.address))?.origin(format!("http://{host}").parse()?);
        let channel = cluster.block_on(endpoint.connect())?;
        anyhow::Ok(Client::from(InferenceClient::new(channel)))
    };
    cluster.block_on(comes_through(&connects(HOST)?, gateway.address, cluster.http()))?;
    let stranger = connects("other.example.com")?;
    let error = cluster.block_on(stranger.start(greedy(prompt(40, 1), 1))).err().context("another host's")?;
    ensure!(error.code() == Code::Unimplemented, "{error}");
    let of_none = cluster.block_on(reqwest::get(format!("http://{}/v1/models", gateway.address)))?;
    ensure!(of_none.status() == 404, "{} of another host", of_none.status());
    cluster.wait_idle()?;
    cluster.stop()
}
