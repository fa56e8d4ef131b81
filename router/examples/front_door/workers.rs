//! Prefill and decode workers that speak Baton's wire contract, over one registry.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_cluster::{Member, Role};
use baton_proto::v1;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_types::WorkerId;
use futures::Stream;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::Arguments;
use super::pace::{Pace, Steps};

/// The id of every token; a letter in the vocabularies that start with bytes.
const TOKEN: u32 = 120;

/// What the workers share: who waits for which KV.
#[derive(Clone)]
struct World {
    pace: Pace,
    next: Arc<AtomicU64>,
    waiting: Arc<Mutex<HashMap<Vec<u8>, oneshot::Sender<()>>>>,
}

/// Serves until it is killed.
pub async fn serve(arguments: &Arguments) {
    let registry = baton_cluster::connect(arguments.must("registry"), None).await.unwrap();
    let world = World { pace: arguments.pace(), next: Arc::default(), waiting: Arc::default() };
    let mut leases = Vec::new();
    for pair in 0..arguments.or("pairs", 2u64) {
        for (role, id) in [(Role::Prefill, 2 * pair + 1), (Role::Decode, 2 * pair + 2)] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::spawn(listen(role, world.clone(), listener));
            let member = Member {
                id: WorkerId(id),
                role,
                grpc: format!("http://{address}"),
                admin: "http://127.0.0.1:1".into(),
                model: arguments.must("model").into(),
                layout: 7,
                blocks: 1 << 20,
                block_size: 16,
                window_tokens: 0,
                max_running: 0,
                context_tokens: 1 << 16,
                draining: false,
                late_targets: role == Role::Prefill,
                exchanges: 0,
                kv_secret: 0,
            };
            leases.push(registry.register(member, Duration::from_secs(60)).await.unwrap());
        }
    }
    println!("registered");
    std::future::pending::<()>().await;
}

async fn listen(role: Role, world: World, listener: TcpListener) {
    // The server's own setting applies only to sockets it accepted itself.
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let service = Worker { steps: Steps::start(world.pace), world };
    let mut server = tonic::transport::Server::builder();
    match role {
        Role::Prefill => server.add_service(v1::prefill_server::PrefillServer::new(service)),
        _ => server.add_service(v1::decode_server::DecodeServer::new(service)),
    }
    .serve_with_incoming(incoming)
    .await
    .unwrap();
}

struct Worker {
    world: World,
    steps: Steps,
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

fn token(index: u32) -> v1::Token {
    v1::Token { index, id: TOKEN, ..v1::Token::default() }
}

/// Index of the next token, and of the one after the last.
fn range(sequence: &v1::Sequence) -> (u32, u32) {
    let max_tokens = sequence.sampling.as_ref().map_or(1, |sampling| sampling.max_tokens);
    (sequence.tokens.len() as u32 - sequence.prompt_tokens, max_tokens)
}

#[tonic::async_trait]
impl v1::decode_server::Decode for Worker {
    type GenerateStream = Events<v1::DecodeEvent>;

    async fn generate(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let (mut next, end) = range(&request.sequence.unwrap());
        let (world, steps) = (self.world.clone(), self.steps.clone());
        let event = |event| Ok(v1::DecodeEvent { event: Some(event), more: Vec::new() });
        let stream = async_stream::stream! {
            if request.compute_here {
                yield event(DecodeEvent::Started(v1::Started::default()));
                tokio::time::sleep(world.pace.first).await;
                yield event(DecodeEvent::Token(token(next)));
            } else {
                let target = world.next.fetch_add(1, Ordering::Relaxed).to_le_bytes().to_vec();
                let (arrived, arrives) = oneshot::channel();
                world.waiting.lock().unwrap().insert(target.clone(), arrived);
                yield event(DecodeEvent::Reserved(v1::Reserved { target }));
                let _ = arrives.await;
            }
            next += 1;
            let mut ready = steps.add(next..end);
            while let Some(mut indices) = ready.recv().await {
                while let Some(index) = indices.next() {
                    let more = if request.takes_more { indices.by_ref().map(|_| TOKEN).collect() } else { Vec::new() };
                    yield Ok(v1::DecodeEvent { event: Some(DecodeEvent::Token(token(index))), more });
                }
            }
            yield event(DecodeEvent::Finished(v1::Finished { reason: v1::FinishReason::Length.into() }));
        };
        Ok(Response::new(Box::pin(stream)))
    }
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for Worker {
    type RunStream = Events<v1::PrefillEvent>;

    async fn run(&self, request: Request<Streaming<v1::PrefillRequest>>) -> Result<Response<Self::RunStream>, Status> {
        let mut requests = request.into_inner();
        let v1::PrefillRequest { sequence, mut target, target_follows } = requests.message().await?.unwrap();
        let (next, _) = range(&sequence.unwrap());
        let world = self.world.clone();
        let event = |event| Ok(v1::PrefillEvent { event: Some(event) });
        let stream = async_stream::stream! {
            if target_follows {
                yield event(PrefillEvent::Due(v1::Due {}));
                let Ok(Some(follows)) = requests.message().await else { return };
                target = follows.target;
            }
            tokio::time::sleep(world.pace.first).await;
            let arrived = world.waiting.lock().unwrap().remove(&target);
            if let Some(arrived) = arrived {
                let _ = arrived.send(());
            }
            let first = v1::FirstToken { token: Some(token(next)), finish: None, cached_tokens: 0 };
            yield event(PrefillEvent::FirstToken(first));
            yield event(PrefillEvent::Transferred(v1::Transferred::default()));
        };
        Ok(Response::new(Box::pin(stream)))
    }
}
