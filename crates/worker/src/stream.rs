//! One request's stream of events, from the engine thread to the router. Dropping the stream cancels the request.

use std::collections::HashMap;
use std::pin::Pin;
use std::task::{Context, Poll};

use baton_roles::{Refused, Ticket};
use baton_types::SeqId;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::{Response, Status};

use crate::engine_thread::Message;
use crate::spans::{Moment, Spans, Traced};
use crate::watchdog::Stall;
use crate::{EngineHandle, exchange};

/// Who cancels a sequence.
enum Cancels<C> {
    /// The role, by this message.
    Role(fn(SeqId) -> C),
    /// The part that moves prefixes.
    Exchange,
}

impl<C> Clone for Cancels<C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<C> Copy for Cancels<C> {}

/// Cancels its sequence when dropped. For a sequence that has ended this does nothing.
struct Guard<C> {
    seq: SeqId,
    engine: EngineHandle<C>,
    cancels: Cancels<C>,
}

impl<C> Drop for Guard<C> {
    fn drop(&mut self) {
        // If the engine is gone there is nothing to cancel.
        let _ = self.engine.post(match self.cancels {
            Cancels::Role(cancel) => Message::Command(cancel(self.seq)),
            Cancels::Exchange => Message::Exchange(exchange::Message::Cancel(self.seq)),
        });
    }
}

/// The engine thread's way to answer a request for a new sequence.
pub struct Accepted<C> {
    answer: oneshot::Sender<Result<Guard<C>, Refused>>,
    engine: EngineHandle<C>,
    cancels: Cancels<C>,
}

impl<C> Accepted<C> {
    /// Answers the request. The answer carries the guard. If the service has gone away, or goes before it reads the answer, the guard is
    /// dropped with it and cancels the sequence (I6).
    fn answer(self, outcome: Result<SeqId, Refused>) {
        let Accepted { answer, engine, cancels } = self;
        // If nobody receives the answer it is dropped, and its guard with it.
        let _ = answer.send(outcome.map(|seq| Guard { seq, engine, cancels }));
    }
}

/// The engine thread's ends of all streams. `I` is the type of their items, `C` the shell's command.
pub struct Streams<I, C> {
    next: u64,
    asked: HashMap<Ticket, (Accepted<C>, mpsc::UnboundedSender<I>)>,
    open: HashMap<SeqId, mpsc::UnboundedSender<I>>,
}

impl<I, C> Default for Streams<I, C> {
    fn default() -> Self {
        Streams { next: 0, asked: HashMap::new(), open: HashMap::new() }
    }
}

impl<I, C> Streams<I, C> {
    /// Registers a new stream whose request is not accepted yet.
    pub fn ask(&mut self, stream: mpsc::UnboundedSender<I>, accepted: Accepted<C>) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.asked.insert(ticket, (accepted, stream));
        ticket
    }

    /// Records that the request was accepted or refused, and answers it.
    pub fn answer(&mut self, ticket: Ticket, outcome: Result<SeqId, Refused>) {
        let Some((accepted, stream)) = self.asked.remove(&ticket) else { return };
        if let Ok(seq) = outcome {
            self.open.insert(seq, stream);
        }
        accepted.answer(outcome);
    }

    /// Sends an item, and closes the stream after the last one.
    pub fn say(&mut self, seq: SeqId, item: I, is_last: bool) {
        if let Some(stream) = self.open.get(&seq) {
            // If the stream was dropped, its guard cancels the sequence.
            let _ = stream.send(item);
        }
        if is_last {
            self.open.remove(&seq);
        }
    }

    /// Drops the stream of a sequence whose other end is gone.
    pub fn forget(&mut self, seq: SeqId) {
        self.open.remove(&seq);
    }
}

/// How a role's items become messages on the wire.
pub trait Wire: 'static {
    /// An item of the role.
    type Item: Send + Unpin + 'static;
    /// The message on the wire.
    type Event: Send + 'static;
    /// Converts an item into a message, and tells whether it is the last. An error status is always the last.
    fn event(item: Self::Item) -> Result<(Self::Event, bool), Status>;
    /// What an item says of the request's progress.
    fn moment(_: &Self::Item) -> Moment {
        Moment::Other
    }
    /// Adds an item to a message, if both may travel together; returns it if not.
    fn join(_: &mut Self::Event, item: Self::Item) -> Option<Self::Item> {
        Some(item)
    }
}

/// A request's events. The request itself bounds the channel behind it: `max_tokens` tokens and an end.
pub struct Events<W: Wire, C> {
    items: mpsc::UnboundedReceiver<W::Item>,
    /// Items that are ready together may travel in one message.
    joins: bool,
    /// An item that could not travel with those before it.
    next: Option<W::Item>,
    stalled: Pin<Box<WaitForCancellationFutureOwned>>,
    ended: bool,
    guard: Guard<C>,
    /// If a collector is to get them.
    spans: Option<Spans>,
}

impl<W: Wire, C> Events<W, C> {
    /// The request's sequence.
    pub fn seq(&self) -> SeqId {
        self.guard.seq
    }

    /// From now on, items that are ready together may travel in one message.
    pub fn join(&mut self) {
        self.joins = true;
    }

    /// Sends the command made by `submit` and waits until the engine accepts or refuses the sequence, or stands still.
    pub async fn open(
        engine: &EngineHandle<C>,
        cancel: fn(SeqId) -> C,
        traced: Option<Traced>,
        submit: impl FnOnce(mpsc::UnboundedSender<W::Item>, Accepted<C>) -> C,
    ) -> Result<Response<Self>, Status> {
        let submit = |stream, accepted| Message::Command(submit(stream, accepted));
        Events::ask(engine, Cancels::Role(cancel), traced, submit).await
    }

    /// As [`Events::open`], for a prefix that moves.
    pub(crate) async fn open_exchange(
        engine: &EngineHandle<C>,
        submit: impl FnOnce(mpsc::UnboundedSender<W::Item>, Accepted<C>) -> exchange::Message<C>,
    ) -> Result<Response<Self>, Status> {
        let submit = |stream, accepted| Message::Exchange(submit(stream, accepted));
        Events::ask(engine, Cancels::Exchange, None, submit).await
    }

    async fn ask(
        engine: &EngineHandle<C>,
        cancels: Cancels<C>,
        traced: Option<Traced>,
        submit: impl FnOnce(mpsc::UnboundedSender<W::Item>, Accepted<C>) -> Message<C>,
    ) -> Result<Response<Self>, Status> {
        let mut spans = traced.map(Spans::new);
        let asked = Events::<W, C>::accepted(engine, cancels, submit).await;
        if let (Err(status), Some(spans)) = (&asked, &mut spans) {
            spans.fails(status.message());
        }
        let (items, guard) = asked?;
        let stalled = Box::pin(engine.stall().told());
        Ok(Response::new(Events { items, joins: false, next: None, stalled, ended: false, guard, spans }))
    }

    /// The items of a sequence that the engine has accepted, and what cancels it.
    async fn accepted(
        engine: &EngineHandle<C>,
        cancels: Cancels<C>,
        submit: impl FnOnce(mpsc::UnboundedSender<W::Item>, Accepted<C>) -> Message<C>,
    ) -> Result<(mpsc::UnboundedReceiver<W::Item>, Guard<C>), Status> {
        let (stream, items) = mpsc::unbounded_channel();
        let (accepted, answer) = oneshot::channel();
        let accepted = Accepted { answer: accepted, engine: engine.clone(), cancels };
        engine.post(submit(stream, accepted)).map_err(|e| baton_proto::status_of(&e))?;
        let answer = tokio::select! {
            answer = answer => answer.map_err(|_| stopped())?,
            () = engine.stall().told() => return Err(status_of(engine.stall())),
        };
        Ok((items, answer.map_err(|refused| refusal(&refused))?))
    }
}

/// The status of a refusal. A draining worker says so, so that the router asks another worker at once.
fn refusal(refused: &Refused) -> Status {
    match refused {
        Refused::Draining => baton_proto::draining_status(refused.to_string()),
        Refused::Engine(_) | Refused::Exchanges { .. } => baton_proto::status_of(refused),
    }
}

fn stopped() -> Status {
    Status::unavailable("the engine has stopped")
}

/// The status of an engine whose device stands still.
fn status_of(stall: &Stall) -> Status {
    stall.get().map_or_else(stopped, |stalled| baton_proto::status_of(stalled))
}

impl<W: Wire, C> Events<W, C> {
    /// The message of an item, and of those that are there already and may travel with it.
    fn event(&mut self, item: W::Item) -> Result<(W::Event, bool), Status> {
        self.happens(W::moment(&item));
        let (mut event, last) = W::event(item)?;
        while self.joins && !last && self.next.is_none() {
            let Ok(item) = self.items.try_recv() else { break };
            let moment = W::moment(&item);
            self.next = W::join(&mut event, item);
            if self.next.is_none() {
                self.happens(moment);
            }
        }
        Ok((event, last))
    }

    /// An item leaves the worker.
    fn happens(&mut self, moment: Moment) {
        if let Some(spans) = &mut self.spans {
            spans.happens(moment);
        }
    }
}

impl<W: Wire, C> Stream for Events<W, C> {
    type Item = Result<W::Event, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let next = self.next.take();
        let event = match next.map_or_else(|| self.items.poll_recv(context), |item| Poll::Ready(Some(item))) {
            Poll::Ready(Some(item)) => self.event(item),
            Poll::Ready(None) => Err(stopped()),
            Poll::Pending => {
                std::task::ready!(self.stalled.as_mut().poll(context));
                Err(status_of(self.guard.engine.stall()))
            }
        };
        if let (Err(status), Some(spans)) = (&event, &mut self.spans) {
            spans.fails(status.message());
        }
        self.ended = matches!(event, Err(_) | Ok((_, true)));
        Poll::Ready(Some(event.map(|(event, _)| event)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc as std_mpsc;
    use std::task::Waker;
    use std::time::Duration;

    use baton_engine::fake::{FakeModel, tiny_layout};
    use baton_engine::{
        Batch, CacheConfig, Engine, EngineConfig, ModelRunner, NewSequence, Order, RunError, Share, Start, SwapConfig,
    };
    use baton_roles::{Decode, WorkerCore, Write, decode};
    use baton_transfer::{FenceState, TransferError};
    use baton_types::{PoolGeometry, RequestId, SamplingParams, TokenOut};
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
                decode::Effect::Lend(loan) => {
                    Some(decode::Command::Lent { epoch: loan.epoch, outcome: Ok(Vec::new()) })
                }
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
            swap: SwapConfig::default(),
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
        assert_eq!(
            told.recv_timeout(PATIENCE),
            Err(std_mpsc::RecvTimeoutError::Disconnected),
            "nothing left to cancel"
        );
    }
}
