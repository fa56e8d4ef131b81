//! The decode role: reserves blocks, takes the KV that a prefill worker writes once it is verified, streams tokens.
//!
//! A reservation's blocks are lent under an epoch. They come back in one of two ways: the KV is verified and the
//! sequence runs on it, or a fence confirms that no peer can write to them any more. Blocks that wait for a fence are
//! quarantined (I3).
//!
//! | stage of an open request | owns | leaves the stage when |
//! | --- | --- | --- |
//! | Queued | nothing of the pool, or its own blocks when it is computed here | the engine reserves; a token comes; it ends |
//! | Lending | an epoch whose target is being made | the target comes; lending is refused |
//! | Reserved | an epoch a peer may write under | KV is verified; the handoff fails; it is cancelled |
//! | Running | KV of its own | it ends |

use std::collections::BTreeMap;
use std::time::Duration;

use baton_engine::{Aborted, Engine, Event, NewSequence};
use baton_handoff::{FenceState, ReceiverEvent, TransferError, TransportKind};
use baton_types::{BatonError, Epoch, ErrorKind, FinishReason, SeqId, TokenOut};

use crate::first_token::parse_first_token;
use crate::loans::{Loan, Loans};
use crate::scored::in_messages;
use crate::submit::{Desk, Refused, Ticket, clear};
use crate::worker::RoleCore;

/// An item of a request's stream.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    /// The opaque target for the prefill worker.
    Reserved(Vec<u8>),
    /// Prompt tokens that were in the prefix cache. Sent before the first token, when the prompt was computed here.
    Started(u32),
    /// Tokens of the prompt with their log probabilities, at most [`crate::MOST_SCORED`]; only if they are asked for, before the
    /// first token, when the prompt was computed here.
    Scored(Vec<TokenOut>),
    /// The KV that was written for it is verified: bytes, seconds since the first of them came, transport. For people who look.
    Arrived(u64, f64, TransportKind),
    /// The next token.
    Token(TokenOut),
    /// The answer is complete. The last item.
    Finished(FinishReason),
    /// The request failed. The last item.
    Failed(ErrorKind, String),
}

impl Answer {
    /// Whether no further item follows.
    pub fn is_last(&self) -> bool {
        matches!(self, Answer::Finished(_) | Answer::Failed(..))
    }
}

/// A command to the role.
#[derive(Clone, PartialEq, Debug)]
pub enum Command {
    /// A new request.
    Generate {
        /// Repeated in [`Effect::Accepted`].
        ticket: Ticket,
        /// What to compute.
        new: Box<NewSequence>,
    },
    /// The sequence's stream was dropped.
    Cancel(SeqId),
    /// Answer to [`Effect::Lend`].
    Lent {
        /// The effect's epoch.
        epoch: Epoch,
        /// The target for the prefill worker.
        outcome: Result<Vec<u8>, TransferError>,
    },
    /// Answer to [`Effect::Fence`].
    FenceBegun {
        /// The effect's epoch.
        epoch: Epoch,
        /// Whether a peer may still write.
        state: FenceState,
    },
    /// An event of the handoff's receiving end.
    Received(ReceiverEvent),
}

/// What the role wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// The request has a sequence now, or was refused.
    Accepted {
        /// The command's ticket.
        ticket: Ticket,
        /// Its sequence.
        outcome: Result<SeqId, Refused>,
    },
    /// Send this down the sequence's stream.
    Say(SeqId, Answer),
    /// Lend blocks to whoever presents the target that is made from this. Answered by [`Command::Lent`].
    Lend(Loan),
    /// The blocks of a verified reservation belong to the engine again: end its lease.
    Release(Epoch),
    /// Take a reservation back. Answered by [`Command::FenceBegun`].
    Fence(Epoch),
    /// For metrics: verified KV has arrived.
    Arrived {
        /// The transport that carried it.
        transport: TransportKind,
        /// KV bytes.
        bytes: u64,
    },
    /// For metrics: a handoff failed at this end.
    HandoffFailed {
        /// The transport that carried it; `None` when no peer was let in.
        transport: Option<TransportKind>,
        /// Why.
        error: TransferError,
    },
}

/// Stage of an open request; see the module's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stage {
    Queued,
    Lending(Epoch),
    Reserved(Epoch),
    Running,
}

#[derive(Debug)]
struct Open {
    stage: Stage,
    /// Whether the number of reused prompt tokens has been reported, by this worker or by the prefill worker that sends
    /// the KV.
    told: bool,
}

/// The role's state: requests with a stream, and epochs that are not over.
#[derive(Debug)]
pub struct Decode {
    lease: Duration,
    /// Token ids are below this.
    vocab: u32,
    open: BTreeMap<SeqId, Open>,
    loans: Loans,
}

impl Decode {
    /// Lends blocks for `lease` at most, for a model whose token ids are below `vocab`.
    pub fn new(lease: Duration, vocab: u32) -> Decode {
        Decode { lease, vocab, open: BTreeMap::new(), loans: Loans::of_answers() }
    }

    /// Requests with a stream.
    pub fn streams(&self) -> usize {
        self.open.len()
    }

    /// How many epochs a peer may write under, and how many are being fenced.
    pub fn epochs(&self) -> (usize, usize) {
        self.loans.counts()
    }

    #[cfg(test)]
    pub(crate) fn stage(&self, seq: SeqId) -> Option<Stage> {
        self.open.get(&seq).map(|open| open.stage)
    }

    /// The engine has set blocks aside: lends them under a new epoch.
    fn reserved(&mut self, engine: &mut Engine, seq: SeqId, out: &mut Vec<Effect>) {
        let Some(open) = self.open.get_mut(&seq) else {
            // Cancelled between submit and reservation: nobody is told where to write.
            give_up(engine, seq, false);
            return;
        };
        let loan = self.loans.lend(engine, seq, self.lease);
        open.stage = Stage::Lending(loan.epoch);
        out.push(Effect::Lend(loan));
    }

    fn lent(
        &mut self,
        engine: &mut Engine,
        epoch: Epoch,
        outcome: Result<Vec<u8>, TransferError>,
        out: &mut Vec<Effect>,
    ) {
        // Given up meanwhile. Its fence was asked for after this lending, so the fence covers it.
        let Some(seq) = self.loans.get(epoch) else { return };
        match outcome {
            Ok(target) => {
                if let Some(open) = self.open.get_mut(&seq) {
                    (open.stage, open.told) = (Stage::Reserved(epoch), true);
                }
                out.push(Effect::Say(seq, Answer::Reserved(target)));
            }
            Err(error) => {
                self.loans.end(epoch);
                // Nobody was told where to write.
                give_up(engine, seq, false);
                self.finish(seq, failed(&error), out);
            }
        }
    }

    fn received(&mut self, desk: Desk<'_>, event: ReceiverEvent, out: &mut Vec<Effect>) {
        match event {
            ReceiverEvent::Verified { epoch, tail, bytes, seconds, transport, .. } => {
                out.push(Effect::Arrived { transport, bytes });
                tracing::debug!(%epoch, bytes, seconds, transport = transport.as_str(), "KV verified");
                let told =
                    self.loans.get(epoch).map(|seq| Effect::Say(seq, Answer::Arrived(bytes, seconds, transport)));
                out.extend(told);
                self.verified(desk, epoch, &tail, out);
            }
            ReceiverEvent::Failed { epoch, error, transport } => {
                self.handoff_failed(desk.engine, epoch, &error, out);
                out.push(Effect::HandoffFailed { transport, error });
            }
            ReceiverEvent::Fenced { epoch } => self.loans.fenced(desk.engine, epoch),
        }
    }

    fn verified(&mut self, desk: Desk<'_>, epoch: Epoch, tail: &[u8], out: &mut Vec<Effect>) {
        // Given up meanwhile: the fence has cleared it.
        let Some(seq) = self.loans.end(epoch) else { return };
        out.push(Effect::Release(epoch));
        if let Some(open) = self.open.get_mut(&seq) {
            open.stage = Stage::Running;
        }
        let Desk { engine, events, .. } = desk;
        let taken = parse_first_token(tail, self.vocab)
            .map_err(|e| (e.kind(), e.to_string()))
            .and_then(|first| engine.kv_arrived(seq, &first, events).map_err(|e| (e.kind(), e.to_string())));
        // If the first token ended the answer, the prefill worker tells the router, which then drops this stream.
        events.retain(|event| !matches!(event, Event::Finished { seq: ended, .. } if *ended == seq));
        if let Err((kind, message)) = taken {
            // Verified means that the peer's access is over, so the blocks need no fence.
            give_up(engine, seq, false);
            self.finish(seq, Answer::Failed(kind, message), out);
        }
    }

    fn handoff_failed(&mut self, engine: &mut Engine, epoch: Epoch, error: &TransferError, out: &mut Vec<Effect>) {
        let Some(seq) = self.loans.end(epoch) else { return };
        match error.is_withdrawal() {
            true => tracing::debug!(%seq, %epoch, %error, "handoff withdrawn"),
            false => tracing::warn!(%seq, %epoch, %error, "handoff failed"),
        }
        if give_up(engine, seq, true) == Some(Aborted::Quarantined) {
            self.loans.give_up(epoch, seq);
        }
        self.finish(seq, failed(error), out);
    }

    /// Fences a reservation whose blocks are already quarantined (I3).
    fn fence(&mut self, seq: SeqId, epoch: Epoch, out: &mut Vec<Effect>) {
        self.loans.give_up(epoch, seq);
        out.push(Effect::Fence(epoch));
    }

    fn cancel(&mut self, engine: &mut Engine, seq: SeqId, out: &mut Vec<Effect>) {
        let Some(open) = self.open.remove(&seq) else { return };
        let epoch = open.stage.epoch();
        let aborted = give_up(engine, seq, epoch.is_some());
        if let (Some(Aborted::Quarantined), Some(epoch)) = (aborted, epoch) {
            self.fence(seq, epoch, out);
        }
    }

    /// Sends a stream's last item and forgets the request. Returns the epoch it had.
    fn finish(&mut self, seq: SeqId, item: Answer, out: &mut Vec<Effect>) -> Option<Epoch> {
        let open = self.open.remove(&seq)?;
        out.push(Effect::Say(seq, item));
        open.stage.epoch()
    }

    fn token(&mut self, seq: SeqId, token: TokenOut, cached_tokens: u32, out: &mut Vec<Effect>) {
        let Some(open) = self.open.get_mut(&seq) else { return };
        open.stage = Stage::Running;
        if !std::mem::replace(&mut open.told, true) {
            out.push(Effect::Say(seq, Answer::Started(cached_tokens)));
        }
        out.push(Effect::Say(seq, Answer::Token(token)));
    }
}

impl Stage {
    /// The epoch under which a peer may write.
    fn epoch(self) -> Option<Epoch> {
        match self {
            Stage::Lending(epoch) | Stage::Reserved(epoch) => Some(epoch),
            Stage::Queued | Stage::Running => None,
        }
    }
}

impl RoleCore for Decode {
    type Command = Command;
    type Effect = Effect;

    fn command(&mut self, mut desk: Desk<'_>, command: Command, out: &mut Vec<Effect>) {
        match command {
            Command::Generate { ticket, new } => {
                let outcome = desk.submit(*new);
                if let Ok(seq) = outcome {
                    self.open.insert(seq, Open { stage: Stage::Queued, told: false });
                }
                out.push(Effect::Accepted { ticket, outcome });
            }
            Command::Cancel(seq) => self.cancel(desk.engine, seq, out),
            Command::Lent { epoch, outcome } => self.lent(desk.engine, epoch, outcome, out),
            Command::FenceBegun { epoch, state } => self.loans.fence_begun(desk.engine, epoch, state),
            Command::Received(event) => self.received(desk, event, out),
        }
    }

    fn event(&mut self, engine: &mut Engine, event: Event, out: &mut Vec<Effect>) {
        match event {
            Event::Reserved { seq, .. } => self.reserved(engine, seq, out),
            Event::Token { seq, token, cached_tokens, .. } => self.token(seq, token, cached_tokens, out),
            Event::Scored { seq, tokens } => {
                if self.open.contains_key(&seq) {
                    out.extend(in_messages(tokens).map(|tokens| Effect::Say(seq, Answer::Scored(tokens))));
                }
            }
            Event::Finished { seq, reason, .. } => {
                self.finish(seq, Answer::Finished(reason), out);
            }
            Event::Failed { seq, error, quarantined, .. } => {
                let epoch = self.finish(seq, failed(&error), out);
                match epoch {
                    Some(epoch) if quarantined => self.fence(seq, epoch, out),
                    _ if quarantined => clear(engine, seq),
                    _ => {}
                }
            }
            Event::Prefilled { seq, .. } | Event::Due { seq } => {
                tracing::error!(%seq, "a decode worker never holds KV for others, and parks nothing");
                give_up(engine, seq, false);
            }
        }
    }
}

fn failed(error: &impl BatonError) -> Answer {
    Answer::Failed(error.kind(), error.to_string())
}

/// Ends a sequence in the engine. The sequence may be gone already.
fn give_up(engine: &mut Engine, seq: SeqId, quarantine: bool) -> Option<Aborted> {
    engine.abort(seq, quarantine).ok()
}
