//! The shell around the prefill role's core, on the engine thread: the requests' streams and their handoffs.
//!
//! `baton_roles::prefill` decides; this file does what it says.

use std::collections::HashMap;

use baton_engine::NewSequence;
use baton_roles::prefill::{Answer, Command, Effect, Target};
use baton_roles::{Prefill, Ticket, Write};
use baton_runtime::metrics as names;
use baton_transfer::{Handoff, TransferError, TransferStats, TransportKind};
use baton_types::{ErrorKind, SeqId};
use baton_worker::{Accepted, Commands, Shell, Streams, count_failure};
use metrics::{counter, histogram};
use tokio::sync::mpsc;

/// The answers to one request.
pub(crate) type Stream = mpsc::UnboundedSender<Answer>;

/// Messages from the service and the transfer threads.
pub(crate) enum Message {
    Run {
        new: Box<NewSequence>,
        /// `None`: it follows with [`Message::Target`].
        handoff: Option<Handoff>,
        stream: Stream,
        accepted: Accepted<Message>,
    },
    /// The handoff of a request that came without one, or why there is none. Sent once.
    Target(SeqId, Result<Box<Handoff>, (ErrorKind, String)>),
    /// The request's stream was dropped.
    Cancel(SeqId),
    /// A completed handoff has ended, successfully or not. The last part is its transport, if it got one.
    Ended(SeqId, Result<TransferStats, TransferError>, Option<TransportKind>),
    /// An aborted handoff no longer reads any block.
    Quiet(SeqId),
}

pub(crate) struct PrefillShell {
    commands: Commands<Message>,
    streams: Streams<Answer, Message>,
    /// Handoffs of requests that are not accepted yet.
    opened: HashMap<Ticket, Handoff>,
    /// Handoffs of accepted requests, neither completed nor aborted.
    handoffs: HashMap<SeqId, Handoff>,
}

impl PrefillShell {
    pub(crate) fn new(commands: Commands<Message>) -> PrefillShell {
        let (opened, handoffs) = (HashMap::new(), HashMap::new());
        PrefillShell { commands, streams: Streams::default(), opened, handoffs }
    }

    fn complete(&mut self, seq: SeqId, tail: Vec<u8>) {
        let Some(handoff) = self.handoffs.remove(&seq) else { return };
        let (commands, carrier) = (self.commands.clone(), handoff.carrier());
        let ended = move |outcome| {
            // If the engine is gone, there are no blocks to free.
            let _ = commands.send(Message::Ended(seq, outcome, carrier.transport()));
        };
        handoff.complete(tail, Box::new(ended));
    }

    fn abort(&mut self, seq: SeqId, quarantined: bool) {
        let Some(handoff) = self.handoffs.remove(&seq) else { return };
        let commands = self.commands.clone();
        handoff.abort(Box::new(move || {
            if quarantined {
                // If the engine is gone, there are no blocks to free.
                let _ = commands.send(Message::Quiet(seq));
            }
        }));
    }
}

fn target_of(handoff: &Handoff) -> Target {
    Target { tokens: handoff.tokens(), first: handoff.first_blocks().to_vec() }
}

impl Shell for PrefillShell {
    type Role = Prefill;
    type Command = Message;

    fn brings(message: &Message) -> Option<&NewSequence> {
        match message {
            Message::Run { new, .. } => Some(new),
            _ => None,
        }
    }

    fn command(&mut self, message: Message) -> Command {
        match message {
            Message::Run { new, handoff, stream, accepted } => {
                let target = handoff.as_ref().map(target_of);
                let ticket = self.streams.ask(stream, accepted);
                if let Some(handoff) = handoff {
                    self.opened.insert(ticket, handoff);
                }
                Command::Run { ticket, new, target }
            }
            Message::Target(seq, handoff) => {
                let target = handoff.map(|handoff| {
                    let target = target_of(&handoff);
                    self.handoffs.insert(seq, *handoff);
                    target
                });
                Command::Target { seq, target }
            }
            Message::Cancel(seq) => {
                self.streams.forget(seq);
                Command::Cancel(seq)
            }
            Message::Ended(seq, outcome, transport) => Command::Ended { seq, outcome, transport },
            Message::Quiet(seq) => Command::Quiet(seq),
        }
    }

    fn perform(&mut self, effect: Effect) -> Option<Command> {
        match effect {
            Effect::Accepted { ticket, outcome } => {
                // If the request was refused, dropping its handoff aborts it.
                if let (Some(handoff), Ok(seq)) = (self.opened.remove(&ticket), &outcome) {
                    self.handoffs.insert(*seq, handoff);
                }
                self.streams.answer(ticket, outcome);
            }
            Effect::Say(seq, answer) => {
                let is_last = answer.is_last();
                self.streams.say(seq, answer, is_last);
            }
            Effect::Complete { seq, tail } => self.complete(seq, tail),
            Effect::Abort { seq, quarantined } => self.abort(seq, quarantined),
            Effect::Moved(stats) => {
                let transport = stats.transport.as_str();
                counter!(names::TRANSFER_BYTES, "transport" => transport).increment(stats.bytes);
                counter!(names::TRANSFER_SLICES, "transport" => transport).increment(stats.slices);
                histogram!(names::TRANSFER_SECONDS, "transport" => transport).record(stats.seconds);
                histogram!(names::VERIFY_SECONDS, "transport" => transport).record(stats.verify_seconds);
            }
            Effect::HandoffFailed { transport, error } => count_failure(transport, &error),
            Effect::WriteRefused { seq, error } => {
                let carrier = self.handoffs.get(&seq).map(Handoff::carrier);
                count_failure(carrier.and_then(|carrier| carrier.transport()), &error);
            }
        }
        None
    }

    fn write(&mut self, write: Write<'_>) -> Result<(), TransferError> {
        let handoff = self.handoffs.get_mut(&write.seq).ok_or(TransferError::Closed)?;
        handoff.write(write.group, write.layer, write.pairs)
    }
}
