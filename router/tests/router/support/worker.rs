//! Scripted workers that speak the wire contract. Each is reached over a proxy that can cut or freeze its connections, as
//! if its process had been killed or stopped.

use std::collections::{HashSet, VecDeque};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use baton_cluster::Role;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_proto::v1::worker_event::Event as WorkerEvent;
use baton_proto::{OnlyFor, v1};
use baton_types::WorkerId;
use futures::{Stream, StreamExt};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::{Interceptor, InterceptorLayer};
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status, Streaming};

use super::exchange::{Exchanges, Prefixes};
use super::{CALLS, END};

/// How a decode worker treats one request.
#[derive(Clone, Debug, Default)]
pub enum Decode {
    /// Works correctly.
    #[default]
    Work,
    /// Refuses the request.
    Refuse(Status),
    /// Sends this many tokens, then an error.
    Fail(usize, Status),
    /// Sends this many tokens, then loses its connection.
    Cut(usize),
    /// Sends this many tokens, then behaves like a stopped process: its socket stays open and silent.
    Freeze(usize),
    /// Sends this many tokens, then nothing more until the router drops the stream.
    Stall(usize),
    /// Works correctly, and rests this long before each token.
    Slow(Duration),
    /// Has this many tokens of the prompt cached, and needs no KV for the rest.
    Has(u32),
    /// Reports that the KV it received does not verify.
    BadKv,
    /// Reports that the KV will not arrive.
    NoKv,
    /// Repeats and skips tokens: sends the indices 0, 0, 1, 3, counted from its first.
    Muddle,
    /// Sends so many tokens in one message, of which the first has this number, counted from its first, and then works on after them.
    Together(usize, usize),
    /// Ends the stream without a last message.
    Vanish,
}

/// How a prefill worker treats one request.
#[derive(Clone, Debug, Default)]
pub enum Prefill {
    /// Works correctly.
    #[default]
    Work,
    /// Refuses the request.
    Refuse(Status),
    /// Sends its token, then an error.
    FailAfterToken(Status),
    /// Loses its connection before it sends anything.
    Cut,
    /// Hands the KV over, but sends its token only after decode has sent all others.
    LateToken,
    /// Sends nothing until the router drops the stream.
    Stall,
}

/// The state that all workers of a test share: the answers, and which handoffs are done.
pub struct World {
    answers: Vec<Vec<u32>>,
    done: watch::Sender<HashSet<Vec<u8>>>,
    /// Requests that came to prefill workers without a target; and whether the turn of such requests is near.
    pub queued: watch::Sender<usize>,
    pub due: watch::Sender<bool>,
    /// Number of tokens that decode workers have sent for split requests.
    decoded: watch::Sender<usize>,
    next_target: Mutex<u64>,
}

impl World {
    pub fn new(answers: &[&str]) -> Arc<World> {
        // A leading marker becomes its special token.
        let ids = |text: &&str| {
            let rest = text.strip_prefix("[TOOL_CALLS]");
            let marker = rest.map(|_| CALLS);
            marker.into_iter().chain(rest.unwrap_or(text).bytes().map(u32::from)).chain([END]).collect()
        };
        Arc::new(World {
            answers: answers.iter().map(ids).collect(),
            done: watch::Sender::default(),
            queued: watch::Sender::new(0),
            due: watch::Sender::new(true),
            decoded: watch::Sender::new(0),
            next_target: Mutex::new(0),
        })
    }

    /// The token that every worker samples at an index, and the finish reason if the answer ends with it.
    fn sample(&self, sequence: &v1::Sequence, index: usize) -> (v1::Token, Option<v1::FinishReason>) {
        let sampling = sequence.sampling.as_ref().unwrap();
        let which = sampling.seed as usize % self.answers.len();
        let answer = &self.answers[which];
        let id = answer[index.min(answer.len() - 1)];
        let finish = if sampling.stop_token_ids.contains(&id) {
            Some(v1::FinishReason::Stop)
        } else {
            (index + 1 >= sampling.max_tokens as usize).then_some(v1::FinishReason::Length)
        };
        let top = match sampling.top_logprobs {
            Some(n) => [(id, -0.25f32), (120, -2.0), (121, f32::NEG_INFINITY)]
                .into_iter()
                .take(n as usize)
                .map(|(id, logprob)| v1::TopLogprob { id, logprob })
                .collect(),
            None => Vec::new(),
        };
        // The later an answer is in the list, the likelier it is.
        let logprob = sampling.top_logprobs.map(|_| -0.25 / (1 + which) as f32);
        let logits_digest = sampling.top_logprobs.map(|_| digest_at(index));
        (v1::Token { index: index as u32, id, logprob, top, logits_digest }, finish)
    }
}

/// The logits digest that every worker reports at an index.
pub fn digest_at(index: usize) -> u64 {
    u64::MAX - index as u64
}

/// One scripted worker.
pub struct FakeWorker {
    door: watch::Sender<Door>,
    address: std::net::SocketAddr,
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

struct Shared {
    world: Arc<World>,
    decode: Mutex<VecDeque<Decode>>,
    prefill: Mutex<VecDeque<Prefill>>,
    /// What it says to who follows it, one list for each time.
    news: Mutex<VecDeque<Vec<WorkerEvent>>>,
    /// How often it was followed.
    followed: watch::Sender<usize>,
    /// The sequences of all requests it got.
    asked: watch::Sender<Vec<v1::Sequence>>,
    /// Number of requests that the router dropped before their end.
    dropped: watch::Sender<usize>,
    door: watch::Sender<Door>,
    /// Its id.
    id: AtomicU64,
    prefixes: Prefixes,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Door {
    Open,
    Cut,
    Frozen,
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl FakeWorker {
    pub async fn start(role: Role, world: Arc<World>) -> Arc<FakeWorker> {
        let door = watch::Sender::new(Door::Open);
        let shared = Arc::new(Shared {
            world,
            decode: Mutex::default(),
            prefill: Mutex::default(),
            news: Mutex::default(),
            followed: watch::Sender::new(0),
            asked: watch::Sender::default(),
            dropped: watch::Sender::new(0),
            door: door.clone(),
            id: AtomicU64::new(0),
            prefixes: Prefixes::default(),
        });
        let inner = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let inner_address = inner.local_addr().unwrap();
        let service = Service(Arc::clone(&shared));
        let own = Arc::clone(&shared);
        let only = InterceptorLayer::new(move |call: Request<()>| {
            assert!(call.metadata().contains_key("baton-worker"), "each call names its worker");
            OnlyFor(WorkerId(own.id.load(Ordering::Relaxed))).call(call)
        });
        let own = v1::worker_server::WorkerServer::new(Service(Arc::clone(&shared)));
        let exchange = v1::exchange_server::ExchangeServer::new(Service(Arc::clone(&shared)));
        let server = tonic::transport::Server::builder().layer(only).add_service(own).add_service(exchange);
        let incoming = TcpIncoming::from(inner).with_nodelay(Some(true));
        let server = match role {
            Role::Prefill => server.add_service(v1::prefill_server::PrefillServer::new(service)),
            _ => server.add_service(v1::decode_server::DecodeServer::new(service)),
        };
        let server = tokio::spawn(async move { server.serve_with_incoming(incoming).await.unwrap() });
        let outer = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = outer.local_addr().unwrap();
        let watch = door.clone();
        let proxy = tokio::spawn(async move {
            loop {
                let (client, _) = outer.accept().await.unwrap();
                tokio::spawn(forward(client, inner_address, watch.subscribe()));
            }
        });
        Arc::new(FakeWorker { door, address, shared, tasks: vec![server, proxy] })
    }

    pub fn address(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Has this id from now on.
    pub fn is(&self, id: WorkerId) {
        self.shared.id.store(id.0, Ordering::Relaxed);
    }

    /// Another process listens at its address from now on.
    pub fn is_replaced(&self) {
        self.is(WorkerId(u64::MAX));
    }

    /// Scripts the next requests, in order. The worker treats later ones correctly.
    pub fn decode_will(&self, plan: impl IntoIterator<Item = Decode>) -> &Self {
        self.shared.decode.lock().unwrap().extend(plan);
        self
    }

    pub fn prefill_will(&self, plan: impl IntoIterator<Item = Prefill>) -> &Self {
        self.shared.prefill.lock().unwrap().extend(plan);
        self
    }

    /// Scripts how it takes and gives the next prefixes.
    pub fn exchange_will(&self, plan: impl IntoIterator<Item = Exchanges>) {
        self.shared.prefixes.plan.lock().unwrap().extend(plan);
    }

    /// Prefixes that it was to take, and those that it was to give.
    pub fn exchanged(&self) -> (Vec<v1::Prefix>, Vec<v1::ServeRequest>) {
        let Prefixes { taken, given, .. } = &self.shared.prefixes;
        (taken.borrow().clone(), given.borrow().clone())
    }

    /// The first prefix that it was to load ahead of need.
    pub async fn recalled(&self) -> v1::Prefix {
        let mut recalled = self.shared.prefixes.recalled.subscribe();
        let first = recalled.wait_for(|all| !all.is_empty());
        tokio::time::timeout(Duration::from_secs(30), first).await.expect("a prefix to load").unwrap()[0].clone()
    }

    /// How often it was to load one.
    pub fn recalls(&self) -> usize {
        self.shared.prefixes.recalled.borrow().len()
    }

    /// Scripts what it says to who follows it, one list for each time. Without one it refuses.
    pub fn news_will_be(&self, lists: impl IntoIterator<Item = Vec<WorkerEvent>>) {
        self.shared.news.lock().unwrap().extend(lists);
    }

    /// Completes when it was followed this often, which takes no longer than a few attempts.
    pub async fn was_followed(&self, times: usize) {
        let mut followed = self.shared.followed.subscribe();
        let often = followed.wait_for(|followed| *followed >= times);
        tokio::time::timeout(Duration::from_secs(30), often).await.expect("it is followed anew").unwrap();
    }

    /// The sequences of all requests it got.
    pub fn asked(&self) -> Vec<v1::Sequence> {
        self.shared.asked.borrow().clone()
    }

    /// Completes when it has got this many requests.
    pub async fn was_asked(&self, times: usize) {
        self.shared.asked.subscribe().wait_for(|asked| asked.len() >= times).await.unwrap();
    }

    /// Completes when the router has dropped this many requests before their end.
    pub async fn was_dropped(&self, times: usize) {
        self.shared.dropped.subscribe().wait_for(|dropped| *dropped >= times).await.unwrap();
    }

    /// Cuts all connections, also new ones, like a process that was killed.
    pub fn cut(&self) {
        self.door.send_replace(Door::Cut);
    }

    /// Undoes `cut`.
    pub fn mend(&self) {
        self.door.send_replace(Door::Open);
    }
}

async fn forward(mut client: TcpStream, to: std::net::SocketAddr, mut door: watch::Receiver<Door>) {
    if *door.borrow() == Door::Cut {
        return;
    }
    let mut server = TcpStream::connect(to).await.unwrap();
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    let left = tokio::select! {
        _ = copy_bidirectional(&mut client, &mut server) => None,
        changed = door.wait_for(|door| *door != Door::Open) => changed.ok().map(|door| *door),
    };
    if left == Some(Door::Frozen) {
        // Both sockets stay open and silent.
        std::future::pending::<()>().await;
    }
}

struct Service(Arc<Shared>);

pub type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl v1::decode_server::Decode for Service {
    type GenerateStream = Events<v1::DecodeEvent>;

    async fn generate(&self, request: Request<v1::DecodeRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let request = request.into_inner();
        let plan = self.0.decode.lock().unwrap().pop_front().unwrap_or_default();
        let sequence = request.sequence.unwrap();
        assert!(request.takes_more);
        self.0.asked.send_modify(|asked| asked.push(sequence.clone()));
        if let Decode::Refuse(status) = plan {
            return Err(status);
        }
        let (out, events) = mpsc::channel(1);
        let run = DecodeRun { shared: Arc::clone(&self.0), sequence, plan, out };
        tokio::spawn(run.go(request.compute_here));
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }
}

#[tonic::async_trait]
impl v1::exchange_server::Exchange for Service {
    type FetchStream = Events<v1::FetchEvent>;
    type ServeStream = Events<v1::ServeEvent>;

    async fn fetch(&self, request: Request<v1::FetchRequest>) -> Result<Response<Self::FetchStream>, Status> {
        self.0.prefixes.fetch(request)
    }

    async fn serve(&self, request: Request<v1::ServeRequest>) -> Result<Response<Self::ServeStream>, Status> {
        self.0.prefixes.serve(request)
    }

    async fn recall(&self, request: Request<v1::RecallRequest>) -> Result<Response<v1::RecallResponse>, Status> {
        self.0.prefixes.recall(request)
    }
}

#[tonic::async_trait]
impl v1::worker_server::Worker for Service {
    type FollowStream = Events<v1::WorkerEvent>;

    async fn status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        Err(Status::unimplemented("a made-up worker"))
    }

    async fn columns(&self, _: Request<v1::ColumnsRequest>) -> Result<Response<v1::ColumnsResponse>, Status> {
        Err(Status::unimplemented("a worker of an earlier version"))
    }

    async fn follow(&self, _: Request<v1::FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        self.0.followed.send_modify(|times| *times += 1);
        let script = self.0.news.lock().unwrap().pop_front();
        let script = script.ok_or_else(|| Status::unimplemented("a worker of an earlier version"))?;
        // What only later versions know has to be skipped.
        let later = v1::WorkerEvent { event: None };
        let events = script.into_iter().map(|event| v1::WorkerEvent { event: Some(event) });
        let events: Vec<_> = std::iter::once(later).chain(events).map(Ok).collect();
        Ok(Response::new(Box::pin(futures::stream::iter(events).chain(futures::stream::pending()))))
    }
}

struct DecodeRun {
    shared: Arc<Shared>,
    sequence: v1::Sequence,
    plan: Decode,
    out: mpsc::Sender<Result<v1::DecodeEvent, Status>>,
}

/// The router dropped the stream.
struct Dropped;

impl DecodeRun {
    async fn go(self, local: bool) {
        if self.run(local).await.is_err() {
            self.shared.dropped.send_modify(|n| *n += 1);
        }
    }

    async fn say(&self, event: DecodeEvent) -> Result<(), Dropped> {
        self.out
            .send(Ok(v1::DecodeEvent { event: Some(event), ..v1::DecodeEvent::default() }))
            .await
            .map_err(|_| Dropped)
    }

    async fn run(&self, local: bool) -> Result<(), Dropped> {
        // What only later versions know has to be skipped.
        self.out.send(Ok(v1::DecodeEvent::default())).await.map_err(|_| Dropped)?;
        let given = self.sequence.tokens.len() - self.sequence.prompt_tokens as usize;
        let mut index = given;
        if let Decode::Has(cached_tokens) = self.plan {
            self.say(DecodeEvent::Started(v1::Started { cached_tokens })).await?;
        } else if !local {
            self.handoff().await?;
            index += 1;
            if let Decode::BadKv = self.plan {
                let _ = self.out.send(Err(Status::data_loss("block b3 from w1 has digest 1, not 2"))).await;
                return Ok(());
            }
        }
        if let Decode::Muddle = self.plan {
            for i in [index, index, index + 1, index + 3] {
                self.say(DecodeEvent::Token(self.shared.world.sample(&self.sequence, i).0)).await?;
            }
            return self.stall().await;
        }
        if let Decode::Together(tokens, first) = self.plan {
            let numbers = index + first..index + first + tokens;
            index = numbers.end;
            let mut tokens = numbers.map(|number| self.shared.world.sample(&self.sequence, number).0);
            let event = tokens.next().map(DecodeEvent::Token);
            let more = tokens.map(|token| token.id).collect();
            self.out.send(Ok(v1::DecodeEvent { event, more })).await.map_err(|_| Dropped)?;
        }
        for count in 0.. {
            match &self.plan {
                Decode::Fail(at, status) if *at == count => {
                    let _ = self.out.send(Err(status.clone())).await;
                    return Ok(());
                }
                Decode::Vanish => return Ok(()),
                Decode::Cut(at) if *at == count => {
                    self.shared.door.send_replace(Door::Cut);
                    return self.stall().await;
                }
                Decode::Freeze(at) if *at == count => {
                    self.shared.door.send_replace(Door::Frozen);
                    return self.stall().await;
                }
                Decode::Stall(at) if *at == count => return self.stall().await,
                Decode::Slow(rest) => tokio::time::sleep(*rest).await,
                _ => {}
            }
            let (token, finish) = self.shared.world.sample(&self.sequence, index);
            self.say(DecodeEvent::Token(token)).await?;
            if !local {
                self.shared.world.decoded.send_modify(|n| *n += 1);
            }
            index += 1;
            if let Some(reason) = finish {
                let finished = v1::Finished { reason: reason.into() };
                return self.say(DecodeEvent::Finished(finished)).await;
            }
        }
        Ok(())
    }

    async fn handoff(&self) -> Result<(), Dropped> {
        let target = {
            let mut next = self.shared.world.next_target.lock().unwrap();
            *next += 1;
            next.to_le_bytes().to_vec()
        };
        let mut done = self.shared.world.done.subscribe();
        self.say(DecodeEvent::Reserved(v1::Reserved { target: target.clone() })).await?;
        if let Decode::NoKv = self.plan {
            let _ = self.out.send(Err(Status::unavailable("lost w1: it closed the connection"))).await;
            return self.stall().await;
        }
        tokio::select! {
            _ = done.wait_for(|done| done.contains(&target)) => Ok(()),
            () = self.out.closed() => Err(Dropped),
        }
    }

    async fn stall(&self) -> Result<(), Dropped> {
        self.out.closed().await;
        Err(Dropped)
    }
}

/// The prompt's tokens with their log probabilities, if they are asked for: -0.5, and twice as much for another token.
fn scores(sequence: &v1::Sequence) -> Option<v1::Scored> {
    let top = sequence.sampling.as_ref()?.prompt_logprobs?;
    let prompt = &sequence.tokens[..sequence.prompt_tokens as usize];
    let score = |(index, &id): (u32, &u32)| v1::Token {
        index,
        id,
        logprob: Some(-0.5),
        top: (0..top).map(|i| v1::TopLogprob { id: b'x'.into(), logprob: -1.0 - i as f32 }).collect(),
        logits_digest: Some(1),
    };
    Some(v1::Scored { tokens: (0..).zip(prompt).skip(1).map(score).collect() })
}

#[tonic::async_trait]
impl v1::prefill_server::Prefill for Service {
    type RunStream = Events<v1::PrefillEvent>;

    async fn run(&self, request: Request<Streaming<v1::PrefillRequest>>) -> Result<Response<Self::RunStream>, Status> {
        let mut requests = request.into_inner();
        let v1::PrefillRequest { sequence, mut target, target_follows } = requests.message().await?.unwrap();
        let (sequence, shared) = (sequence.unwrap(), Arc::clone(&self.0));
        let plan = shared.prefill.lock().unwrap().pop_front().unwrap_or_default();
        shared.asked.send_modify(|asked| asked.push(sequence.clone()));
        if let Prefill::Refuse(status) = plan {
            return Err(status);
        }
        let (out, events) = mpsc::channel(1);
        tokio::spawn(async move {
            // What only later versions know has to be skipped.
            let _ = out.send(Ok(v1::PrefillEvent { event: None })).await;
            if target_follows {
                shared.world.queued.send_modify(|queued| *queued += 1);
                let mut due = shared.world.due.subscribe();
                tokio::select! {
                    due = due.wait_for(|due| *due) => drop(due.unwrap()),
                    () = out.closed() => return shared.dropped.send_modify(|dropped| *dropped += 1),
                }
                let event = Some(PrefillEvent::Due(v1::Due {}));
                let _ = out.send(Ok(v1::PrefillEvent { event })).await;
                let Ok(Some(follows)) = requests.message().await else {
                    return shared.dropped.send_modify(|dropped| *dropped += 1);
                };
                assert!(follows.sequence.is_none(), "the target alone");
                target = follows.target;
            }
            let index = sequence.tokens.len() - sequence.prompt_tokens as usize;
            if let Some(scored) = scores(&sequence) {
                let event = Some(PrefillEvent::Scored(scored));
                let _ = out.send(Ok(v1::PrefillEvent { event })).await;
            }
            let (token, finish) = shared.world.sample(&sequence, index);
            let first = v1::FirstToken { token: Some(token), finish: finish.map(Into::into), cached_tokens: 1 };
            let say = async |event| out.send(Ok(v1::PrefillEvent { event: Some(event) })).await;
            let done = || shared.world.done.send_if_modified(|done| done.insert(target.clone()));
            match plan {
                Prefill::Work | Prefill::Refuse(_) => {
                    let _ = say(PrefillEvent::FirstToken(first)).await;
                    if finish.is_some() {
                        // Nobody needs the KV.
                        return;
                    }
                    done();
                    let _ = say(PrefillEvent::Transferred(v1::Transferred::default())).await;
                }
                Prefill::FailAfterToken(status) => {
                    let _ = say(PrefillEvent::FirstToken(first)).await;
                    let _ = out.send(Err(status)).await;
                }
                Prefill::Cut => {
                    shared.door.send_replace(Door::Cut);
                    out.closed().await;
                }
                Prefill::LateToken => {
                    done();
                    let _ =
                        shared.world.decoded.subscribe().wait_for(|n| *n >= shared.world.answers[0].len() - 1).await;
                    let _ = say(PrefillEvent::FirstToken(first)).await;
                    let _ = say(PrefillEvent::Transferred(v1::Transferred::default())).await;
                }
                Prefill::Stall => {
                    out.closed().await;
                    shared.dropped.send_modify(|n| *n += 1);
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(events))))
    }
}
