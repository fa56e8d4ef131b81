//! One request's stream of events, from the engine thread to the router. Dropping it cancels the request.

use std::pin::Pin;
use std::task::{Context, Poll};

use baton_engine::EngineError;
use baton_types::SeqId;
use tokio::sync::{mpsc, oneshot};
use tokio_stream::Stream;
use tonic::{Response, Status};

use crate::EngineHandle;

/// The engine's answer to a new sequence.
pub type Accepted = oneshot::Sender<Result<SeqId, EngineError>>;

/// What a role sends down its streams.
pub trait Item: Send + 'static {
    /// The message on the wire.
    type Event: Send + 'static;
    /// The message, and whether it is the last; a status is always the last.
    fn into_event(self) -> Result<(Self::Event, bool), Status>;
}

/// A request's events. The channel behind it is bounded by the request itself: its `max_tokens` and an end.
pub struct Events<I, C> {
    items: mpsc::UnboundedReceiver<I>,
    ended: bool,
    seq: SeqId,
    engine: EngineHandle<C>,
    cancel: fn(SeqId) -> C,
}

impl<I: Item, C> Events<I, C> {
    /// Sends the command that `submit` makes and waits until the engine has taken or refused the sequence.
    pub async fn open(
        engine: &EngineHandle<C>,
        cancel: fn(SeqId) -> C,
        submit: impl FnOnce(mpsc::UnboundedSender<I>, Accepted) -> C,
    ) -> Result<Response<Self>, Status> {
        let (stream, items) = mpsc::unbounded_channel();
        let (accepted, answer) = oneshot::channel();
        engine.send(submit(stream, accepted)).map_err(|e| baton_proto::status_of(&e))?;
        let seq = answer.await.map_err(|_| stopped())?.map_err(|e| baton_proto::status_of(&e))?;
        Ok(Response::new(Events { items, ended: false, seq, engine: engine.clone(), cancel }))
    }
}

fn stopped() -> Status {
    Status::unavailable("the engine has stopped")
}

impl<I, C> Drop for Events<I, C> {
    fn drop(&mut self) {
        // A sequence that has ended does not mind, and without an engine there is nothing to cancel.
        let _ = self.engine.send((self.cancel)(self.seq));
    }
}

impl<I: Item, C> Stream for Events<I, C> {
    type Item = Result<I::Event, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let event = std::task::ready!(self.items.poll_recv(context)).map_or_else(|| Err(stopped()), I::into_event);
        self.ended = matches!(event, Err(_) | Ok((_, true)));
        Poll::Ready(Some(event.map(|(event, _)| event)))
    }
}
