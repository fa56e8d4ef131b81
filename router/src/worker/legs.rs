//! One request's streams to its workers, as inputs of the request's state machine.
//!
//! A leg ends with exactly one input that says how (`Finished`, `Transferred`, lost or not verified); dropping it cancels the request on that worker at once.

use std::pin::Pin;

use baton_policy::{Failure, Input};
use baton_proto::v1;
use baton_proto::v1::decode_client::DecodeClient;
use baton_proto::v1::decode_event::Event as DecodeEvent;
use baton_proto::v1::prefill_client::PrefillClient;
use baton_proto::v1::prefill_event::Event as PrefillEvent;
use baton_types::{ErrorKind, FinishReason};
use futures::{Stream, StreamExt};
use tonic::{Code, Request, Status};

use super::link::{Lease, answered};

/// What a leg said.
pub(crate) struct Said {
    /// For the state machine.
    pub input: Input,
    /// With `Input::Reserved`: where a prefill worker may write. Opaque.
    pub target: Option<Vec<u8>>,
}

impl From<Input> for Said {
    fn from(input: Input) -> Said {
        Said { input, target: None }
    }
}

/// A running leg.
pub(crate) type Leg = Pin<Box<dyn Stream<Item = Said> + Send>>;

/// Builds the decode side's leg.
pub(crate) struct DecodeLeg;
/// Builds the prefill side's leg.
pub(crate) struct PrefillLeg;

impl DecodeLeg {
    /// Opens the stream and keeps `lease` until it ends.
    pub fn open(lease: Result<Lease, Failure>, request: v1::DecodeRequest) -> Leg {
        Box::pin(async_stream::stream! {
            let lease = match lease {
                Ok(lease) => lease,
                Err(gone) => return yield Input::DecodeLost(gone).into(),
            };
            let mut client = DecodeClient::new(lease.channel());
            let mut events = match client.generate(Request::new(request)).await {
                Ok(response) => response.into_inner(),
                Err(status) => {
                    lease.ended(&status);
                    return yield decode_ended(Some(&status)).into();
                }
            };
            let mut awaiting_kv = false;
            loop {
                match events.next().await {
                    Some(Ok(event)) => match decode_said(event) {
                        Ok(said) => {
                            // Nothing follows; the end of the stream would say that the worker is lost.
                            let last = matches!(said.input, Input::Finished(_));
                            awaiting_kv = matches!(said.input, Input::Reserved);
                            yield said;
                            if last {
                                return;
                            }
                        }
                        Err(wrong) => return yield Input::DecodeLost(wrong).into(),
                    },
                    Some(Err(status)) if awaiting_kv && is_about_kv(&status) => {
                        return yield Input::HandoffFailed(ended("decode", Some(&status))).into();
                    }
                    Some(Err(status)) => {
                        lease.ended(&status);
                        return yield decode_ended(Some(&status)).into();
                    }
                    None => return yield decode_ended(None).into(),
                }
            }
        })
    }
}

impl PrefillLeg {
    /// Opens the stream and keeps `lease` until it ends.
    pub fn open(lease: Result<Lease, Failure>, request: v1::PrefillRequest) -> Leg {
        Box::pin(async_stream::stream! {
            let lease = match lease {
                Ok(lease) => lease,
                Err(gone) => return yield Input::PrefillLost(gone).into(),
            };
            let mut client = PrefillClient::new(lease.channel());
            let mut events = match client.run(Request::new(request)).await {
                Ok(response) => response.into_inner(),
                Err(status) => {
                    lease.ended(&status);
                    return yield prefill_ended(Some(&status)).into();
                }
            };
            loop {
                match events.next().await {
                    Some(Ok(event)) => match prefill_said(event) {
                        Ok(said) => {
                            let last = matches!(said.input, Input::Transferred);
                            yield said;
                            if last {
                                return;
                            }
                        }
                        Err(wrong) => return yield Input::PrefillLost(wrong).into(),
                    },
                    Some(Err(status)) => {
                        lease.ended(&status);
                        return yield prefill_ended(Some(&status)).into();
                    }
                    None => return yield prefill_ended(None).into(),
                }
            }
        })
    }
}

fn decode_said(event: v1::DecodeEvent) -> Result<Said, Failure> {
    Ok(match event.event {
        Some(DecodeEvent::Reserved(v1::Reserved { target })) => Said { input: Input::Reserved, target: Some(target) },
        Some(DecodeEvent::Token(token)) => Input::Token(token.into()).into(),
        Some(DecodeEvent::Started(v1::Started { cached_tokens })) => Input::Started { cached_tokens }.into(),
        Some(DecodeEvent::Finished(v1::Finished { reason })) => Input::Finished(finish_reason(reason)?).into(),
        None => return Err(unknown_event("decode")),
    })
}

fn prefill_said(event: v1::PrefillEvent) -> Result<Said, Failure> {
    Ok(match event.event {
        Some(PrefillEvent::FirstToken(v1::FirstToken { token, finish, cached_tokens })) => {
            let token = token.ok_or_else(|| Failure::new(ErrorKind::Internal, "first_token.token is missing"))?.into();
            Input::FirstToken { token, finish: finish.map(finish_reason).transpose()?, cached_tokens }.into()
        }
        Some(PrefillEvent::Transferred(_)) => Input::Transferred.into(),
        None => return Err(unknown_event("prefill")),
    })
}

fn unknown_event(role: &str) -> Failure {
    Failure::new(ErrorKind::Internal, format!("the {role} worker sent an event this version does not know"))
}

fn finish_reason(number: i32) -> Result<FinishReason, Failure> {
    let reason = v1::FinishReason::try_from(number).unwrap_or(v1::FinishReason::Unspecified);
    FinishReason::try_from(reason).map_err(|e| Failure::new(ErrorKind::Internal, e.to_string()))
}

/// The decode worker's own word that the KV it waits for will not come.
fn is_about_kv(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Aborted) && answered(status)
}

fn decode_ended(status: Option<&Status>) -> Input {
    match ended("decode", status) {
        failure if failure.kind == ErrorKind::DataLoss => Input::VerifyFailed(failure),
        failure => Input::DecodeLost(failure),
    }
}

fn prefill_ended(status: Option<&Status>) -> Input {
    match ended("prefill", status) {
        failure if failure.kind == ErrorKind::DataLoss => Input::VerifyFailed(failure),
        failure => Input::PrefillLost(failure),
    }
}

/// What the end of a stream means.
fn ended(role: &str, status: Option<&Status>) -> Failure {
    let Some(status) = status else {
        return Failure::new(ErrorKind::Unavailable, format!("the {role} worker ended the stream too early"));
    };
    if let Some(source) = std::error::Error::source(status) {
        let lost = format!("the {role} worker is lost: {}", deepest(source));
        return match hangs_or_is_gone(source) {
            true => Failure::silent(lost),
            false => Failure::new(ErrorKind::Unavailable, lost),
        };
    }
    match ErrorKind::from_grpc_code(status.code().into()) {
        // Nobody on this side cancelled, or the leg would be gone.
        ErrorKind::Cancelled => {
            Failure::new(ErrorKind::Unavailable, format!("the {role} worker cancelled the request"))
        }
        kind => Failure::new(kind, format!("the {role} worker answered: {}", status.message())),
    }
}

/// True when a connection was given up because nothing came over it (no answer to a ping, or to a connect), and when
/// nobody listens at its end: whoever does so later is another process, and another worker.
fn hangs_or_is_gone(error: &(dyn std::error::Error + 'static)) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, TimedOut};
    std::iter::successors(Some(error), |e| e.source()).any(|e| {
        let connect = e.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        matches!(connect, Some(TimedOut | ConnectionRefused)) || e.downcast_ref().is_some_and(hyper::Error::is_timeout)
    })
}

fn deepest(error: &dyn std::error::Error) -> &dyn std::error::Error {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}
