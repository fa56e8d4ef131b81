//! The shell around prefixes that move between workers (`baton_roles::exchange`), on the engine thread: their streams, and their ends of handoffs.
//!
//! A prefix that is served is written as a whole, which may wait for the peer. So a thread of its own does that, one prefix at a time.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

use baton_engine::Exchange as Prefix;
use baton_roles::Ticket;
use baton_roles::exchange::{Answer, Command, Effect};
use baton_roles::prefill::Target;
use baton_runtime::metrics as names;
use baton_transfer::{Handoff, Known, TransferError, TransferStats, TransportKind, Wanted};
use baton_types::{BlockId, KvLayout, SeqId};
use metrics::{counter, histogram};

use crate::ends::KvEnds;
use crate::engine_thread;
use crate::{Accepted, Commands, Streams, WorkerError, count_failure};

/// The tier that other workers and KV stores are, in metrics.
const PEER: &str = "peer";

/// Messages from the service and the thread that serves.
pub(crate) enum Message<C> {
    Fetch {
        prefix: Box<Prefix>,
        stream: tokio::sync::mpsc::UnboundedSender<Answer>,
        accepted: Accepted<C>,
    },
    Serve {
        prefix: Box<Prefix>,
        handoff: Box<Handoff>,
        stream: tokio::sync::mpsc::UnboundedSender<Answer>,
        accepted: Accepted<C>,
    },
    /// The stream was dropped.
    Cancel(SeqId),
    /// Nothing reads the blocks of a prefix that was served any more. The last part is its transport, if it got one.
    Ended(SeqId, Result<TransferStats, TransferError>, Option<TransportKind>),
}

pub(crate) struct ExchangeShell<C> {
    ends: Arc<KvEnds>,
    streams: Streams<Answer, C>,
    /// Handoffs of prefixes that are not accepted yet.
    opened: HashMap<Ticket, Handoff>,
    /// Handoffs of accepted ones, until they are sent.
    handoffs: HashMap<SeqId, Handoff>,
    /// Set for those that are sent and to be given up.
    sent: HashMap<SeqId, Arc<AtomicBool>>,
    jobs: mpsc::Sender<Job>,
    /// Layers of each group.
    layers: Arc<[usize]>,
}

impl<C: Send + 'static> ExchangeShell<C> {
    /// Starts the thread that serves. It ends with the shell.
    pub fn start(ends: Arc<KvEnds>, layout: &KvLayout, commands: Commands<C>) -> Result<ExchangeShell<C>, WorkerError> {
        let layers = layout.groups.iter().map(|group| group.layers.len()).collect();
        let (jobs, inbox) = mpsc::channel::<Job>();
        std::thread::Builder::new()
            .name("kv-serve".to_owned())
            .spawn(move || inbox.into_iter().for_each(|job| job.run(&commands)))?;
        let (opened, handoffs, sent) = (HashMap::new(), HashMap::new(), HashMap::new());
        Ok(ExchangeShell { ends, streams: Streams::default(), opened, handoffs, sent, jobs, layers })
    }
}

impl<C> ExchangeShell<C> {
    /// Updates the metrics of the receiving end.
    pub fn count(&self) {
        self.ends.count();
    }

    /// Keeps the parts of a message that belong to the shell and returns the rest for the core.
    pub fn command(&mut self, message: Message<C>) -> Command {
        match message {
            Message::Fetch { prefix, stream, accepted } => {
                Command::Fetch { ticket: self.streams.ask(stream, accepted), prefix }
            }
            Message::Serve { prefix, handoff, stream, accepted } => {
                let target = Target { tokens: handoff.tokens(), first: handoff.first_blocks().to_vec() };
                let ticket = self.streams.ask(stream, accepted);
                self.opened.insert(ticket, *handoff);
                Command::Serve { ticket, prefix, target }
            }
            Message::Cancel(seq) => {
                self.streams.forget(seq);
                Command::Cancel(seq)
            }
            Message::Ended(seq, outcome, transport) => {
                self.sent.remove(&seq);
                Command::Ended { seq, outcome, transport }
            }
        }
    }

    /// Carries out an effect of the core; returns its answer, if it has one.
    pub fn perform(&mut self, effect: Effect) -> Option<Command> {
        match effect {
            Effect::Accepted { ticket, outcome } => {
                // If it was refused, dropping its handoff aborts it.
                if let (Some(handoff), Ok(seq)) = (self.opened.remove(&ticket), &outcome) {
                    self.handoffs.insert(*seq, handoff);
                }
                self.streams.answer(ticket, outcome);
            }
            Effect::Say(seq, answer) => {
                let is_last = answer.is_last();
                self.streams.say(seq, answer, is_last);
            }
            Effect::Lend(loan) => {
                let wanted = Wanted { tokens: loan.tokens, first: &loan.first, blocks: &loan.blocks };
                let outcome = self.ends.receiver.reserve(loan.epoch, &wanted, loan.lease);
                return Some(Command::Lent { epoch: loan.epoch, outcome });
            }
            Effect::Fence(epoch) => {
                return Some(Command::FenceBegun { epoch, state: self.ends.receiver.fence(epoch) });
            }
            Effect::Release(epoch) => self.ends.receiver.release(epoch),
            Effect::Send { seq, pairs, known } => return self.send(seq, pairs, known),
            Effect::Abort(seq) => {
                self.sent.get(&seq).into_iter().for_each(|given_up| given_up.store(true, Ordering::Relaxed));
            }
            Effect::Fetched { transport, bytes, tokens, seconds } => {
                counter!(names::TRANSFER_RECEIVED_BYTES, "transport" => transport.as_str()).increment(bytes);
                counter!(names::FETCHED_TOKENS).increment(tokens.into());
                counter!(names::TIER_HIT_TOKENS, "tier" => PEER).increment(tokens.into());
                counter!(names::TIER_READ_BYTES, "tier" => PEER).increment(bytes);
                histogram!(names::TIER_LOAD_SECONDS, "tier" => PEER).record(seconds);
            }
            Effect::Served(stats) => {
                let transport = stats.transport.as_str();
                counter!(names::TRANSFER_BYTES, "transport" => transport).increment(stats.bytes);
                counter!(names::TRANSFER_SLICES, "transport" => transport).increment(stats.slices);
            }
            Effect::Failed { fetched, transport, error } => {
                match error {
                    TransferError::Changed { .. } => {
                        tracing::warn!(%error, "a block is not what it was when it came here; it is not given away");
                        counter!(names::TIER_VERIFY_FAILURES, "tier" => "pool").increment(1);
                    }
                    _ if fetched && error.is_corruption() => {
                        counter!(names::TIER_VERIFY_FAILURES, "tier" => PEER).increment(1)
                    }
                    _ => {}
                }
                count_failure(transport, &error);
            }
        }
        None
    }

    /// Has the thread write a prefix. If it is gone, that is the answer.
    fn send(&mut self, seq: SeqId, pairs: Vec<Vec<(BlockId, u32)>>, known: Vec<Known>) -> Option<Command> {
        let handoff = self.handoffs.remove(&seq)?;
        handoff.knows(known);
        let (given_up, layers) = (Arc::new(AtomicBool::new(false)), Arc::clone(&self.layers));
        self.sent.insert(seq, Arc::clone(&given_up));
        self.jobs.send(Job { seq, handoff, pairs, layers, given_up }).err()?;
        Some(Command::Ended { seq, outcome: Err(TransferError::Closed), transport: None })
    }
}

/// A prefix to be written to a peer.
struct Job {
    seq: SeqId,
    handoff: Handoff,
    pairs: Vec<Vec<(BlockId, u32)>>,
    /// Layers of each group.
    layers: Arc<[usize]>,
    given_up: Arc<AtomicBool>,
}

impl Job {
    fn run<C: Send + 'static>(mut self, commands: &Commands<C>) {
        let (seq, carrier, commands) = (self.seq, self.handoff.carrier(), commands.clone());
        let ended = move |outcome| {
            // If the engine is gone, there are no blocks to free.
            let _ = commands.post(engine_thread::Message::Exchange(Message::Ended(seq, outcome, carrier.transport())));
        };
        match self.write() {
            Ok(()) => self.handoff.complete(Vec::new(), Box::new(ended)),
            Err(error) => self.handoff.abort(Box::new(move || ended(Err(error)))),
        }
    }

    fn write(&mut self) -> Result<(), TransferError> {
        for (group, pairs) in self.pairs.iter().enumerate().filter(|(_, pairs)| !pairs.is_empty()) {
            for layer in 0..self.layers[group] {
                if self.given_up.load(Ordering::Relaxed) {
                    return Err(TransferError::Closed);
                }
                self.handoff.write(group, layer, pairs)?;
            }
        }
        Ok(())
    }
}
