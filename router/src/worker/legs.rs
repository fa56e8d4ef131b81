//! Legs: one choice's streams from its workers, as inputs of its [`baton_policy::Choice`].
//!
//! A leg ends with its worker's last message, or with an input that says why there is none. Dropping a leg cancels the
//! request on that worker at once. Messages are validated here but not interpreted.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use baton_policy::{ChoiceInput, DecodeWord, LegEnd, PrefillWord};
use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_runtime::traces::SpanPlace;
use baton_types::{FinishReason, TokenOut};
use futures::future::BoxFuture;
use futures::{Stream as _, StreamExt as _, stream};
use tokio::sync::oneshot;
use tokio::time::Instant;
use tonic::{Request, Response, Status, Streaming};

use super::fetch::{FetchBegins, fetch_begins};
use super::link::WorkerLink;

/// A message of a worker.
pub(crate) trait Word: Sized {
    /// The message on the wire.
    type Event;

    /// Reads a message; None for one that only later versions know, which is skipped.
    fn read(event: Self::Event) -> Result<Option<Self>, LegEnd>;

    /// What comes together with a message.
    type More: ExactSizeIterator<Item = Self> + Default;

    /// What came together with this message.
    fn more(event: &mut Self::Event) -> Self::More;

    /// What a message says of the handoff besides that it succeeded: a decode worker when the KV is verified there, a prefill worker when it has heard
    /// of that.
    fn transferred(_: &Self::Event) -> Option<&v1::Transferred> {
        None
    }

    /// True when nothing follows.
    fn is_last(&self) -> bool;

    /// The message as an input.
    fn said(self) -> ChoiceInput;

    /// The end of its stream as an input.
    fn ended(end: LegEnd) -> ChoiceInput;
}

/// A running leg: a stream of inputs for its choice.
pub(crate) struct Leg<W: Word> {
    stage: Stage<W::Event>,
    /// What came together with the last message.
    more: W::More,
    /// What the worker said of the handoff, and when.
    transferred: Option<(Instant, v1::Transferred)>,
}

enum Stage<E> {
    /// There is no worker to ask.
    Gone(LegEnd),
    /// The worker is asked.
    Opening(Asked<E>),
    /// The worker answers.
    Open(Box<Streaming<E>>, WorkerLink),
    Over,
}

/// How a worker answers, and the link to it.
type Asked<E> = BoxFuture<'static, (Result<Response<Streaming<E>>, Status>, WorkerLink)>;

/// The request with what makes the worker's spans children of `span`.
pub(crate) fn traced<T>(message: T, span: Option<SpanPlace>) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(value) = span.and_then(|span| span.traceparent().parse().ok()) {
        request.metadata_mut().insert("traceparent", value);
    }
    request
}

/// Opens the decode stream and keeps `link` until it ends. The worker is asked once `fetch` has begun, if there is one.
pub(crate) fn open_decode(
    link: Result<WorkerLink, LegEnd>,
    request: Request<v1::DecodeRequest>,
    fetch: Option<FetchBegins>,
) -> Leg<DecodeWord> {
    Leg::open(link, |link| {
        Box::pin(async move {
            fetch_begins(fetch).await;
            (DecodeClient::new(link.channel()).generate(request).await, link)
        })
    })
}

/// As [`open_decode`], for the prefill stream. Returns where to give the target if that is to follow.
pub(crate) fn open_prefill(
    link: Result<WorkerLink, LegEnd>,
    request: Request<v1::PrefillRequest>,
    fetch: Option<FetchBegins>,
) -> (Leg<PrefillWord>, Option<oneshot::Sender<Vec<u8>>>) {
    let (metadata, extensions, request) = request.into_parts();
    let (target, follows) = request.target_follows.then(oneshot::channel).unzip();
    let later = stream::iter(follows).filter_map(|target| async {
        let target = target.await.ok()?;
        Some(v1::PrefillRequest { target, ..v1::PrefillRequest::default() })
    });
    let requests = Request::from_parts(metadata, extensions, stream::iter([request]).chain(later));
    let leg = Leg::open(link, |link| {
        Box::pin(async move {
            fetch_begins(fetch).await;
            (PrefillClient::new(link.channel()).run(requests).await, link)
        })
    });
    (leg, target)
}

impl<W: Word> Leg<W> {
    fn open(link: Result<WorkerLink, LegEnd>, ask: impl FnOnce(WorkerLink) -> Asked<W::Event>) -> Leg<W> {
        let stage = match link {
            Ok(link) => Stage::Opening(ask(link)),
            Err(gone) => Stage::Gone(gone),
        };
        Leg { stage, more: W::More::default(), transferred: None }
    }

    /// Whether more came together with the last message.
    pub fn has_more(&self) -> bool {
        self.more.len() > 0
    }

    /// What the worker said of the handoff that has succeeded, and when. Returned once.
    pub fn take_transferred(&mut self) -> Option<(Instant, v1::Transferred)> {
        self.transferred.take()
    }

    /// The next message; an error when there is none any more.
    fn poll_word(&mut self, cx: &mut Context<'_>) -> Poll<Result<W, LegEnd>> {
        if let Some(word) = self.more.next() {
            return Poll::Ready(Ok(word));
        }
        loop {
            match &mut self.stage {
                Stage::Gone(end) => return Poll::Ready(Err(end.clone())),
                Stage::Opening(answer) => match ready!(answer.as_mut().poll(cx)) {
                    (Ok(response), link) => self.stage = Stage::Open(Box::new(response.into_inner()), link),
                    (Err(status), link) => return Poll::Ready(Err(link.ended(&status))),
                },
                Stage::Open(events, link) => {
                    let mut event = match ready!(Pin::new(events).poll_next(cx)) {
                        Some(Ok(event)) => event,
                        Some(Err(status)) => return Poll::Ready(Err(link.ended(&status))),
                        None => return Poll::Ready(Err(LegEnd::Early)),
                    };
                    if let Some(told) = W::transferred(&event) {
                        self.transferred = Some((Instant::now(), told.clone()));
                    }
                    self.more = W::more(&mut event);
                    if let Some(word) = W::read(event).transpose() {
                        return Poll::Ready(word);
                    }
                }
                Stage::Over => return Poll::Pending,
            }
        }
    }

    /// The next message, or how the stream ended, as an input; None at the end.
    pub fn poll_said(&mut self, cx: &mut Context<'_>) -> Poll<Option<ChoiceInput>> {
        if matches!(self.stage, Stage::Over) {
            return Poll::Ready(None);
        }
        let word = ready!(self.poll_word(cx));
        // Reading on after the last message would report the end of the stream as a failure ([`LegEnd::Early`]).
        if word.as_ref().map_or(true, W::is_last) {
            self.stage = Stage::Over;
        }
        Poll::Ready(Some(word.map_or_else(W::ended, W::said)))
    }
}

impl Word for DecodeWord {
    type Event = v1::DecodeEvent;

    type More = Following;

    fn more(event: &mut v1::DecodeEvent) -> Following {
        let ids = std::mem::take(&mut event.more).into_iter();
        match &event.event {
            Some(DecodeEvent::Token(first)) => Following { index: first.index, ids },
            _ => Following::default(),
        }
    }

    fn transferred(event: &v1::DecodeEvent) -> Option<&v1::Transferred> {
        match &event.event {
            Some(DecodeEvent::Arrived(told)) => Some(told),
            _ => None,
        }
    }

    fn read(event: v1::DecodeEvent) -> Result<Option<DecodeWord>, LegEnd> {
        let Some(event) = event.event else { return Ok(None) };
        Ok(Some(match event {
            DecodeEvent::Reserved(v1::Reserved { target }) => DecodeWord::Reserved { target },
            DecodeEvent::Scored(v1::Scored { tokens }) => {
                DecodeWord::Scored(tokens.into_iter().map(Into::into).collect())
            }
            DecodeEvent::Token(token) => DecodeWord::Token(token.into()),
            DecodeEvent::Started(v1::Started { cached_tokens }) => DecodeWord::Started { cached_tokens },
            // Of no consequence for the choice.
            DecodeEvent::Arrived(_) => return Ok(None),
            DecodeEvent::Finished(v1::Finished { reason }) => DecodeWord::Finished(finish_reason(reason)?),
        }))
    }

    fn is_last(&self) -> bool {
        self.is_last()
    }

    fn said(self) -> ChoiceInput {
        ChoiceInput::DecodeSaid(self)
    }

    fn ended(end: LegEnd) -> ChoiceInput {
        ChoiceInput::DecodeEnded(end)
    }
}

/// The tokens that follow one in its message.
#[derive(Default)]
pub(crate) struct Following {
    /// Of the token before.
    index: u32,
    ids: std::vec::IntoIter<u32>,
}

impl Iterator for Following {
    type Item = DecodeWord;

    fn next(&mut self) -> Option<DecodeWord> {
        let id = self.ids.next()?;
        self.index = self.index.wrapping_add(1);
        Some(DecodeWord::Token(TokenOut { index: self.index, id, ..TokenOut::default() }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ids.size_hint()
    }
}

impl ExactSizeIterator for Following {}

impl Word for PrefillWord {
    type Event = v1::PrefillEvent;
    type More = std::iter::Empty<PrefillWord>;

    fn more(_: &mut v1::PrefillEvent) -> Self::More {
        std::iter::empty()
    }

    fn transferred(event: &v1::PrefillEvent) -> Option<&v1::Transferred> {
        match &event.event {
            Some(PrefillEvent::Transferred(told)) => Some(told),
            _ => None,
        }
    }

    fn read(event: v1::PrefillEvent) -> Result<Option<PrefillWord>, LegEnd> {
        let Some(event) = event.event else { return Ok(None) };
        Ok(Some(match event {
            PrefillEvent::Scored(v1::Scored { tokens }) => {
                PrefillWord::Scored(tokens.into_iter().map(Into::into).collect())
            }
            PrefillEvent::FirstToken(v1::FirstToken { token, finish, cached_tokens }) => {
                let token = token.ok_or_else(|| unclear("first_token.token is missing"))?.into();
                PrefillWord::FirstToken { token, finish: finish.map(finish_reason).transpose()?, cached_tokens }
            }
            PrefillEvent::Transferred(_) => PrefillWord::Transferred,
            PrefillEvent::Due(_) => PrefillWord::Due,
        }))
    }

    fn is_last(&self) -> bool {
        self.is_last()
    }

    fn said(self) -> ChoiceInput {
        ChoiceInput::PrefillSaid(self)
    }

    fn ended(end: LegEnd) -> ChoiceInput {
        ChoiceInput::PrefillEnded(end)
    }
}

fn unclear(message: impl Into<String>) -> LegEnd {
    LegEnd::Unclear { message: message.into() }
}

fn finish_reason(number: i32) -> Result<FinishReason, LegEnd> {
    let reason = v1::FinishReason::try_from(number).unwrap_or(v1::FinishReason::Unspecified);
    FinishReason::try_from(reason).map_err(|e| unclear(e.to_string()))
}
