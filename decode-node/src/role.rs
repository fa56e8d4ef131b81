//! The shell around the decode role's core, on the engine thread: the requests' streams and the receiving end of handoffs.
//!
//! `baton_roles::decode` decides; this file does what it says.

use std::sync::Arc;

use baton_engine::NewSequence;
use baton_roles::decode::{Answer, Command, Effect};
use baton_roles::{Decode, Write};
use baton_runtime::metrics as names;
use baton_transfer::{ReceiverEvent, TransferError, Wanted};
use baton_types::SeqId;
use baton_worker::{Accepted, KvEnds, Shell, Streams, count_failure};
use metrics::counter;
use tokio::sync::mpsc;

/// The answers to one request. Bounded by the request itself: at most `max_tokens` tokens and a few other items.
pub(crate) type Stream = mpsc::UnboundedSender<Answer>;

/// Messages from the service.
pub(crate) enum Message {
    Generate {
        new: Box<NewSequence>,
        stream: Stream,
        accepted: Accepted<Message>,
    },
    /// The request's stream was dropped.
    Cancel(SeqId),
}

pub(crate) struct DecodeShell {
    ends: Arc<KvEnds>,
    streams: Streams<Answer, Message>,
}

impl DecodeShell {
    pub(crate) fn new(ends: Arc<KvEnds>) -> DecodeShell {
        DecodeShell { ends, streams: Streams::default() }
    }
}

impl Shell for DecodeShell {
    type Role = Decode;
    type Command = Message;

    fn brings(message: &Message) -> Option<&NewSequence> {
        match message {
            Message::Generate { new, .. } => Some(new),
            _ => None,
        }
    }

    fn command(&mut self, message: Message) -> Command {
        match message {
            Message::Generate { new, stream, accepted } => {
                Command::Generate { ticket: self.streams.ask(stream, accepted), new }
            }
            Message::Cancel(seq) => {
                self.streams.forget(seq);
                Command::Cancel(seq)
            }
        }
    }

    fn received(&mut self, event: ReceiverEvent) -> Option<Command> {
        Some(Command::Received(event))
    }

    fn perform(&mut self, effect: Effect) -> Option<Command> {
        match effect {
            Effect::Accepted { ticket, outcome } => self.streams.answer(ticket, outcome),
            Effect::Say(seq, answer) => {
                let is_last = answer.is_last();
                self.streams.say(seq, answer, is_last);
            }
            Effect::Lend(loan) => {
                let wanted = Wanted { tokens: loan.tokens, first: &loan.first, blocks: &loan.blocks };
                let outcome = self.ends.receiver.reserve(loan.epoch, &wanted, loan.lease);
                return Some(Command::Lent { epoch: loan.epoch, outcome });
            }
            Effect::Fence(epoch) => return Some(Command::FenceBegun { epoch, state: self.ends.receiver.fence(epoch) }),
            Effect::Release(epoch) => self.ends.receiver.release(epoch),
            Effect::Arrived { transport, bytes } => {
                counter!(names::TRANSFER_RECEIVED_BYTES, "transport" => transport.as_str()).increment(bytes);
            }
            Effect::HandoffFailed { transport, error } => count_failure(transport, &error),
        }
        None
    }

    /// A decode worker writes to no peer, so this always fails.
    fn write(&mut self, _: Write<'_>) -> Result<(), TransferError> {
        Err(TransferError::Closed)
    }
}
