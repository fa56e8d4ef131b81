//! Streams are cancelled once, end when the device stands still, and join what may travel together.

use std::sync::mpsc as std_mpsc;
use std::task::Waker;
use std::time::Duration;

use baton_engine::fake::{FakeModel, tiny_layout};
use baton_engine::{Batch, CacheConfig, Engine, EngineConfig, ModelRunner, NewSequence, Order, RunError, Share, Start};
use baton_roles::{Decode, WorkerCore, Write, decode};
use baton_transfer::{FenceState, TransferError};
use baton_types::{Decoding, PoolGeometry, RequestId, SamplingParams, TokenOut};
use tokio_stream::StreamExt;

use super::*;
use crate::engine_thread::{Shells, channels, start};
use crate::signals::unheard;
use crate::{Clock, Shell};

const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_refusal_says_whether_the_worker_drains() {
    let full = Refused::Engine(baton_engine::EngineError::QueueFull { waiting: 1, limit: 1 });
    for (refused, drains) in [(Refused::Draining, true), (full, false)] {
        let status = refusal(&refused);
        assert_eq!(baton_proto::says_draining(&status), drains, "{status}");
        assert_eq!(status.message(), refused.to_string());
    }
}

enum Command {
    /// Waits for a signal before it submits.
    Submit(Box<NewSequence>, mpsc::UnboundedSender<Nothing>, Accepted<Command>, std_mpsc::Receiver<()>),
    Cancel(SeqId),
}

#[derive(PartialEq, Debug)]
enum Did {
    Submitted(Option<SeqId>),
    Cancelled(SeqId),
}

/// A decode role's shell that lends no blocks. It reports what it did and sends nothing on its streams.
struct Probe(std_mpsc::Sender<Did>, Streams<Nothing, Command>);

impl Shell for Probe {
    type Role = Decode;
    type Command = Command;

    fn command(&mut self, command: Command) -> decode::Command {
        match command {
            Command::Submit(new, stream, accepted, go) => {
                go.recv_timeout(PATIENCE).unwrap();
                decode::Command::Generate { ticket: self.1.ask(stream, accepted), new }
            }
            Command::Cancel(seq) => {
                self.0.send(Did::Cancelled(seq)).unwrap();
                decode::Command::Cancel(seq)
            }
        }
    }

    fn perform(&mut self, effect: decode::Effect) -> Option<decode::Command> {
        match effect {
            decode::Effect::Accepted { ticket, outcome } => {
                let seq = outcome.as_ref().ok().copied();
                self.1.answer(ticket, outcome);
                self.0.send(Did::Submitted(seq)).unwrap();
                None
            }
            decode::Effect::Lend(loan) => Some(decode::Command::Lent { epoch: loan.epoch, outcome: Ok(Vec::new()) }),
            decode::Effect::Fence(epoch) => Some(decode::Command::FenceBegun { epoch, state: FenceState::Clear }),
            _ => None,
        }
    }

    fn write(&mut self, _: Write<'_>) -> Result<(), TransferError> {
        Ok(())
    }
}

#[derive(Debug)]
struct Nothing;

impl Wire for Nothing {
    type Item = Nothing;
    type Event = ();

    fn event(_: Nothing) -> Result<((), bool), Status> {
        Ok(((), false))
    }
}

/// Computes on a device that stands still until the test signals: this GPU, or else the CPU.
struct Still(FakeModel, std_mpsc::Receiver<()>, Option<String>);

impl ModelRunner for Still {
    fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
        self.0.launch(batch, on_layer)
    }

    fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        let _ = self.1.recv();
        self.0.collect(batch, out)
    }

    fn device(&self) -> Option<String> {
        self.2.clone()
    }
}

/// An engine thread, and the reports of what its role did.
fn engine() -> (EngineHandle<Command>, std_mpsc::Receiver<Did>) {
    engine_on(PATIENCE, |model| Box::new(model))
}

fn engine_on(
    timeout: Duration,
    wrap: impl FnOnce(FakeModel) -> Box<dyn ModelRunner>,
) -> (EngineHandle<Command>, std_mpsc::Receiver<Did>) {
    let geometry = PoolGeometry::uniform(tiny_layout(4), 8);
    let config = EngineConfig {
        token_budget: 4,
        chunk: 4,
        pack_tokens: u32::MAX,
        max_running: 2,
        max_waiting: 2,
        context_tokens: 16,
        local_prefill_tokens: 0,
        reserve_ahead: 16,
        order: Order::default(),
        overtakes: 0,
        cache: CacheConfig::default(),
    };
    let engine = Engine::new(config, &geometry).unwrap();
    let role = Decode::new(PATIENCE, 50);
    let core = WorkerCore::new(engine, role, geometry.layout.clone().into(), PATIENCE, false);
    let (tell, told) = std_mpsc::channel();
    let model = wrap(FakeModel::new(geometry, 50));
    let (handle, inbox) = channels();
    let shells = Shells {
        role: Probe(tell, Streams::default()),
        exchange: None,
        tiers: None,
        columns: None,
        achieved: None,
        decoding: Decoding::default(),
    };
    start(core, model, Clock::start(), Some(timeout), unheard(), inbox, shells).unwrap();
    (handle, told)
}

/// A sequence that waits for a peer's KV, so it does not end by itself.
fn sequence(tokens: usize) -> NewSequence {
    NewSequence {
        request_id: RequestId("r".into()),
        tokens: vec![1; tokens],
        prompt_tokens: tokens as u32,
        params: SamplingParams { max_tokens: 4, ..SamplingParams::default() },
        start: Start::Receive,
        deadline: None,
        prefix: None,
        priority: 0,
        share: Share::default(),
        parked: false,
    }
}

type Opening<'a> = Pin<Box<dyn Future<Output = Result<Response<Events<Nothing, Command>>, Status>> + 'a>>;

/// Opens a stream and polls it once, before the engine handles the command.
fn opening(engine: &EngineHandle<Command>, new: NewSequence) -> (Opening<'_>, std_mpsc::Sender<()>) {
    let (go, may_go) = std_mpsc::channel();
    let new = Box::new(new);
    let submit = move |stream, accepted| Command::Submit(new, stream, accepted, may_go);
    let mut future: Opening = Box::pin(Events::open(engine, Command::Cancel, None, submit));
    assert!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    (future, go)
}

#[track_caller]
fn next(told: &std_mpsc::Receiver<Did>) -> Did {
    told.recv_timeout(PATIENCE).expect("the engine thread to do something")
}

fn submitted(told: &std_mpsc::Receiver<Did>) -> SeqId {
    match next(told) {
        Did::Submitted(Some(seq)) => seq,
        other => panic!("{other:?}"),
    }
}

/// Numbers, of which even ones may travel together.
struct Numbers;

impl Wire for Numbers {
    type Item = u32;
    type Event = Vec<u32>;

    fn event(item: u32) -> Result<(Vec<u32>, bool), Status> {
        Ok((vec![item], item == 9))
    }

    fn join(event: &mut Vec<u32>, item: u32) -> Option<u32> {
        if event[0].is_multiple_of(2) && item.is_multiple_of(2) {
            event.push(item);
            return None;
        }
        Some(item)
    }
}

#[test]
fn what_is_ready_together_travels_together_if_it_may() {
    let (engine, _told) = engine();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for (joins, want) in [
        (true, vec![vec![2, 4], vec![5], vec![7], vec![6, 8], vec![9]]),
        (false, [2, 4, 5, 7, 6, 8, 9].map(|n| vec![n]).to_vec()),
    ] {
        let (tell, items) = mpsc::unbounded_channel();
        let guard = Guard { seq: SeqId(1), engine: engine.clone(), cancels: Cancels::Role(Command::Cancel) };
        let stalled = Box::pin(engine.stall().told());
        let mut events =
            Events::<Numbers, _> { items, joins: false, next: None, stalled, ended: false, guard, spans: None };
        if joins {
            events.join();
        }
        for item in [2, 4, 5, 7, 6, 8] {
            tell.send(item).unwrap();
        }
        let mut got = Vec::new();
        for _ in 1..want.len() {
            got.push(runtime.block_on(events.next()).unwrap().unwrap());
        }
        tell.send(9).unwrap();
        got.push(runtime.block_on(events.next()).unwrap().unwrap());
        assert_eq!(got, want);
        assert!(runtime.block_on(events.next()).is_none());
    }
}

#[test]
fn a_request_dropped_between_the_answer_and_its_arrival_is_cancelled() {
    // I6
    let (engine, told) = engine();
    let (future, go) = opening(&engine, sequence(4));
    go.send(()).unwrap();
    let seq = submitted(&told);
    drop(future);
    assert_eq!(next(&told), Did::Cancelled(seq));
}

#[test]
fn a_request_dropped_before_the_answer_is_cancelled() {
    let (engine, told) = engine();
    let (future, go) = opening(&engine, sequence(4));
    drop(future);
    go.send(()).unwrap();
    let seq = submitted(&told);
    assert_eq!(next(&told), Did::Cancelled(seq));
}

/// I5: the engine thread is blocked in a step that never ends, so it cannot tell anybody.
#[test]
fn a_device_that_stands_still_ends_the_streams_that_are_open_and_those_that_open() {
    for (gpu, name) in [(Some("device 7"), "device 7"), (None, "the CPU")] {
        stands_still(gpu.map(str::to_owned), name);
    }
}

fn stands_still(gpu: Option<String>, name: &str) {
    let (go_on, still) = std_mpsc::channel();
    let (engine, told) = engine_on(Duration::from_millis(20), |model| Box::new(Still(model, still, gpu)));
    let (mut future, go) = opening(&engine, NewSequence { start: Start::Compute, ..sequence(4) });
    go.send(()).unwrap();
    submitted(&told);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let mut events = runtime.block_on(&mut future).expect("taken before the step").into_inner();
    let end = runtime.block_on(async { tokio::time::timeout(PATIENCE, events.next()).await });
    let status = end.expect("the device is watched").expect("an end").unwrap_err();
    let said = format!("{name} stands still: step 1 (4 tokens) is not over after 20ms");
    assert!(status.message().starts_with(&said), "{status}");
    assert_eq!(status.code(), tonic::Code::Unavailable, "to be resumed elsewhere");
    assert!(runtime.block_on(events.next()).is_none());
    let (_go, may_go) = std_mpsc::channel();
    let another = |stream, accepted| Command::Submit(Box::new(sequence(4)), stream, accepted, may_go);
    let refused = runtime.block_on(Events::<Nothing, _>::open(&engine, Command::Cancel, None, another));
    let refused = refused.err().expect("nobody answers");
    assert_eq!(refused.message(), status.message());
    // If the device goes on after all, the thread ends.
    drop((events, future));
    drop(go_on);
    while told.recv_timeout(PATIENCE).is_ok() {}
    assert_eq!(told.recv_timeout(PATIENCE), Err(std_mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_dropped_stream_is_cancelled_once_and_a_refused_one_never() {
    let (engine, told) = engine();
    let (mut future, go) = opening(&engine, sequence(4));
    go.send(()).unwrap();
    let seq = submitted(&told);
    let Poll::Ready(Ok(events)) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("the answer was there")
    };
    drop(future);
    assert!(told.try_recv().is_err());
    drop(events);
    assert_eq!(next(&told), Did::Cancelled(seq));
    let (mut future, go) = opening(&engine, sequence(99));
    go.send(()).unwrap();
    assert_eq!(next(&told), Did::Submitted(None));
    let answer = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(answer, Poll::Ready(Err(_))));
    drop(future);
    drop(engine);
    assert_eq!(told.recv_timeout(PATIENCE), Err(std_mpsc::RecvTimeoutError::Disconnected), "nothing left to cancel");
}
