//! The shell around the decode role's core, on the engine thread: the requests' streams and the receiving end of handoffs.
//!
//! `baton_roles::decode` decides; this file does what it says.

use baton_engine::NewSequence;
use baton_roles::decode::{Answer, Command, Effect};
use baton_roles::{Decode, Write};
use baton_runtime::metrics as names;
use baton_transfer::{Receiver, ReceiverEvent, ReceiverStats, TransferError, Wanted};
use baton_types::SeqId;
use baton_worker::{Accepted, Shell, Streams, count_failure};
use metrics::{counter, gauge};
use tokio::sync::mpsc;

/// The answers to one request. Bounded by the request itself: at most `max_tokens` tokens and a few other items.
pub(crate) type Stream = mpsc::UnboundedSender<Answer>;

/// Messages from the service and the receiver.
pub(crate) enum Message {
    Generate {
        new: Box<NewSequence>,
        stream: Stream,
        accepted: Accepted<Message>,
    },
    /// The request's stream was dropped.
    Cancel(SeqId),
    Received(ReceiverEvent),
}

pub(crate) struct DecodeShell {
    receiver: Receiver,
    streams: Streams<Answer, Message>,
    /// Verification failures that the metric has counted already.
    verify_failures: u64,
}

impl DecodeShell {
    pub(crate) fn new(receiver: Receiver) -> DecodeShell {
        DecodeShell { receiver, streams: Streams::default(), verify_failures: 0 }
    }

    /// Updates the metrics of what the receiver counts by itself.
    fn count(&mut self) {
        let ReceiverStats { verify_failures, sessions, .. } = self.receiver.stats();
        counter!(names::VERIFY_FAILURES).increment(verify_failures - self.verify_failures);
        gauge!(names::TRANSFER_SESSIONS).set(sessions as f64);
        self.verify_failures = verify_failures;
    }
}

impl Shell for DecodeShell {
    type Role = Decode;
    type Command = Message;

    fn command(&mut self, message: Message) -> Command {
        match message {
            Message::Generate { new, stream, accepted } => {
                Command::Generate { ticket: self.streams.ask(stream, accepted), new }
            }
            Message::Cancel(seq) => {
                self.streams.forget(seq);
                Command::Cancel(seq)
            }
            Message::Received(event) => {
                self.count();
                Command::Received(event)
            }
        }
    }

    fn perform(&mut self, effect: Effect) -> Option<Command> {
        match effect {
            Effect::Accepted { ticket, outcome } => self.streams.answer(ticket, outcome),
            Effect::Say(seq, answer) => {
                let is_last = answer.is_last();
                self.streams.say(seq, answer, is_last);
            }
            Effect::Lend { epoch, tokens, first, blocks, lease, .. } => {
                let wanted = Wanted { tokens, first: &first, blocks: &blocks };
                return Some(Command::Lent { epoch, outcome: self.receiver.reserve(epoch, &wanted, lease) });
            }
            Effect::Fence(epoch) => return Some(Command::FenceBegun { epoch, state: self.receiver.fence(epoch) }),
            Effect::Release(epoch) => self.receiver.release(epoch),
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
