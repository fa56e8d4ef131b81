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
mod tests;
