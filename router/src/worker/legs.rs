//! Legs: one choice's streams from its workers, as inputs of its [`baton_policy::Choice`].
//!
//! A leg ends with its worker's last message, or with an input that says why there is none. Dropping a leg cancels the
//! request on that worker at once. Messages are validated here but not interpreted.

use std::pin::Pin;

use baton_policy::{ChoiceInput, DecodeWord, LegEnd, PrefillWord};
use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_types::FinishReason;
use futures::{Stream, StreamExt};
use tonic::Request;

use super::link::WorkerLink;

/// A running leg: a stream of inputs for its choice.
pub(crate) type Leg = Pin<Box<dyn Stream<Item = ChoiceInput> + Send>>;

/// Opens the decode stream and keeps `link` until it ends.
pub(crate) fn open_decode(link: Result<WorkerLink, LegEnd>, request: v1::DecodeRequest) -> Leg {
    Box::pin(async_stream::stream! {
        let link = match link {
            Ok(link) => link,
            Err(gone) => return yield ChoiceInput::DecodeEnded(gone),
        };
        let mut client = DecodeClient::new(link.channel());
        let mut events = match client.generate(Request::new(request)).await {
            Ok(response) => response.into_inner(),
            Err(status) => return yield ChoiceInput::DecodeEnded(link.ended(&status)),
        };
        loop {
            let word = match events.next().await {
                Some(Ok(event)) => decode_word(event),
                Some(Err(status)) => Err(link.ended(&status)),
                None => Err(LegEnd::Early),
            };
            match word {
                Ok(None) => {}
                Ok(Some(word)) => {
                    // Stop here. Reading on would report the end of the stream as a failure ([`LegEnd::Early`]).
                    let last = word.is_last();
                    yield ChoiceInput::DecodeSaid(word);
                    if last {
                        return;
                    }
                }
                Err(end) => return yield ChoiceInput::DecodeEnded(end),
            }
        }
    })
}

/// Opens the prefill stream and keeps `link` until it ends.
pub(crate) fn open_prefill(link: Result<WorkerLink, LegEnd>, request: v1::PrefillRequest) -> Leg {
    Box::pin(async_stream::stream! {
        let link = match link {
            Ok(link) => link,
            Err(gone) => return yield ChoiceInput::PrefillEnded(gone),
        };
        let mut client = PrefillClient::new(link.channel());
        let mut events = match client.run(Request::new(request)).await {
            Ok(response) => response.into_inner(),
            Err(status) => return yield ChoiceInput::PrefillEnded(link.ended(&status)),
        };
        loop {
            let word = match events.next().await {
                Some(Ok(event)) => prefill_word(event),
                Some(Err(status)) => Err(link.ended(&status)),
                None => Err(LegEnd::Early),
            };
            match word {
                Ok(None) => {}
                Ok(Some(word)) => {
                    let last = word.is_last();
                    yield ChoiceInput::PrefillSaid(word);
                    if last {
                        return;
                    }
                }
                Err(end) => return yield ChoiceInput::PrefillEnded(end),
            }
        }
    })
}

/// What a decode worker says; None for an event that only later versions know, which is skipped.
fn decode_word(event: v1::DecodeEvent) -> Result<Option<DecodeWord>, LegEnd> {
    let Some(event) = event.event else { return Ok(None) };
    Ok(Some(match event {
        DecodeEvent::Reserved(v1::Reserved { target }) => DecodeWord::Reserved { target },
        DecodeEvent::Scored(v1::Scored { tokens }) => DecodeWord::Scored(tokens.into_iter().map(Into::into).collect()),
        DecodeEvent::Token(token) => DecodeWord::Token(token.into()),
        DecodeEvent::Started(v1::Started { cached_tokens }) => DecodeWord::Started { cached_tokens },
        DecodeEvent::Finished(v1::Finished { reason }) => DecodeWord::Finished(finish_reason(reason)?),
    }))
}

/// The same for a prefill worker.
fn prefill_word(event: v1::PrefillEvent) -> Result<Option<PrefillWord>, LegEnd> {
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
    }))
}

fn unclear(message: impl Into<String>) -> LegEnd {
    LegEnd::Unclear { message: message.into() }
}

fn finish_reason(number: i32) -> Result<FinishReason, LegEnd> {
    let reason = v1::FinishReason::try_from(number).unwrap_or(v1::FinishReason::Unspecified);
    FinishReason::try_from(reason).map_err(|e| unclear(e.to_string()))
}
