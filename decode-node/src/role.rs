//! The decode worker's part on the engine thread: streams, reservations, fences.
//!
//! A reservation's blocks are lent under an epoch. They come back in one of two ways: verified (the sequence runs on them),
//! or after a fence, when no peer can write to them any more; in between they are quarantined (I3).

use std::collections::HashMap;
use std::time::Duration;

use baton_engine::{Aborted, BlockTable, Engine, Event, HOLE, NewSequence};
use baton_runtime::metrics as names;
use baton_transfer::{FenceState, Receiver, ReceiverEvent, ReceiverStats, TransferError, Wanted};
use baton_types::{BatonError, BlockId, Epoch, ErrorKind, FinishReason, SeqId, TokenOut};
use baton_worker::{Accepted, Role, count_failure, parse_first_token};
use metrics::{counter, gauge};
use tokio::sync::mpsc;

/// What a stream carries.
#[derive(Debug)]
pub(crate) enum Said {
    /// Opaque target for the prefill worker.
    Reserved(Vec<u8>),
    /// Before the first token, when the prompt was computed here: how many of its tokens were not computed.
    Started(u32),
    Token(TokenOut),
    Finished(FinishReason),
    Failed(ErrorKind, String),
}

/// One request's way back. Bounded by the request itself: at most `max_tokens` items and an end.
pub(crate) type Stream = mpsc::UnboundedSender<Said>;

/// What the service and the receiver say.
pub(crate) enum Command {
    Generate {
        new: Box<NewSequence>,
        stream: Stream,
        accepted: Accepted<Command>,
    },
    /// The stream was dropped.
    Cancel(SeqId),
    Received(ReceiverEvent),
}

struct Open {
    stream: Stream,
    epoch: Option<Epoch>,
    /// Somebody has told what of the prompt was reused: this worker, or the prefill worker its KV comes from.
    told: bool,
}

pub(crate) struct DecodeRole {
    receiver: Receiver,
    lease: Duration,
    /// Token ids are below this.
    vocab: u32,
    open: HashMap<SeqId, Open>,
    /// Reservations that are neither verified nor given up.
    epochs: HashMap<Epoch, SeqId>,
    /// Given up, not fenced yet.
    fencing: HashMap<Epoch, SeqId>,
    next_epoch: u64,
    /// Verification failures that are counted.
    verify_failures: u64,
}

impl DecodeRole {
    pub(crate) fn new(receiver: Receiver, lease: Duration, vocab: u32) -> DecodeRole {
        DecodeRole {
            receiver,
            lease,
            vocab,
            open: HashMap::new(),
            epochs: HashMap::new(),
            fencing: HashMap::new(),
            next_epoch: 1,
            verify_failures: 0,
        }
    }

    fn reserve(&mut self, engine: &Engine, seq: SeqId) -> Result<(Epoch, Vec<u8>), TransferError> {
        let tables = engine.tables(seq).unwrap_or_default();
        // I3: the blocks before are shared with others, and nobody is told to write to them.
        let from = engine.lent_from(seq).unwrap_or(0);
        // What the next token does not see does not travel.
        let here =
            |blocks: &[BlockId]| -> Vec<BlockId> { blocks.iter().copied().filter(|block| *block != HOLE).collect() };
        let lent = |t: &BlockTable| here(t.blocks().get(from as usize..).unwrap_or_default());
        let blocks: Vec<Vec<BlockId>> = tables.iter().map(lent).collect();
        let tokens = tables.first().map_or(0, |t| t.tokens());
        let epoch = Epoch(self.next_epoch);
        self.next_epoch += 1;
        let first = vec![from; blocks.len()];
        let wanted = Wanted { tokens, first: &first, blocks: &blocks };
        self.receiver.reserve(epoch, &wanted, self.lease).map(|target| (epoch, target))
    }

    fn reserved(&mut self, engine: &mut Engine, seq: SeqId) {
        if !self.open.contains_key(&seq) {
            // Cancelled between submit and reservation: nobody is told where to write.
            give_up(engine, seq, false);
            return;
        }
        let outcome = self.reserve(engine, seq);
        let Some(open) = self.open.get_mut(&seq) else { return };
        match outcome {
            Ok((epoch, target)) => {
                open.epoch = Some(epoch);
                open.told = true;
                self.epochs.insert(epoch, seq);
                // A closed stream is cancelled by its guard.
                let _ = open.stream.send(Said::Reserved(target));
            }
            Err(error) => {
                give_up(engine, seq, false);
                self.finish(seq, Said::Failed(error.kind(), error.to_string()));
            }
        }
    }

    /// Tells what the receiver counts by itself.
    fn count(&mut self) {
        let ReceiverStats { verify_failures, sessions, .. } = self.receiver.stats();
        counter!(names::VERIFY_FAILURES).increment(verify_failures - self.verify_failures);
        gauge!(names::TRANSFER_SESSIONS).set(sessions as f64);
        self.verify_failures = verify_failures;
    }

    fn received(&mut self, engine: &mut Engine, event: ReceiverEvent, events: &mut Vec<Event>) {
        self.count();
        match event {
            ReceiverEvent::Verified { epoch, tail, bytes, seconds, transport } => {
                counter!(names::TRANSFER_RECEIVED_BYTES, "transport" => transport.as_str()).increment(bytes);
                // Given up meanwhile: the fence has cleared it.
                let Some(seq) = self.epochs.remove(&epoch) else { return };
                self.receiver.release(epoch);
                if let Some(open) = self.open.get_mut(&seq) {
                    open.epoch = None;
                }
                tracing::debug!(%seq, %epoch, bytes, seconds, transport = transport.as_str(), "KV verified");
                let taken = parse_first_token(&tail, self.vocab)
                    .map_err(|e| (e.kind(), e.to_string()))
                    .and_then(|first| engine.kv_arrived(seq, &first, events).map_err(|e| (e.kind(), e.to_string())));
                // The first token ended the answer: its sender tells the router, which then drops this stream.
                events.retain(|event| !matches!(event, Event::Finished { seq: ended, .. } if *ended == seq));
                if let Err((kind, message)) = taken {
                    // Verified means that the peer's access is over, so the blocks need no fence.
                    give_up(engine, seq, false);
                    self.finish(seq, Said::Failed(kind, message));
                }
            }
            ReceiverEvent::Failed { epoch, error, transport } => {
                count_failure(transport, &error);
                let Some(seq) = self.epochs.remove(&epoch) else { return };
                match error.is_withdrawal() {
                    true => tracing::debug!(%seq, %epoch, %error, "handoff withdrawn"),
                    false => tracing::warn!(%seq, %epoch, %error, "handoff failed"),
                }
                if give_up(engine, seq, true) == Some(Aborted::Quarantined) {
                    self.fencing.insert(epoch, seq);
                }
                self.finish(seq, Said::Failed(error.kind(), error.to_string()));
            }
            ReceiverEvent::Fenced { epoch } => {
                if let Some(seq) = self.fencing.remove(&epoch) {
                    clear(engine, seq);
                }
            }
        }
    }

    /// Takes a reservation back whose blocks are already quarantined (I3).
    fn fence(&mut self, engine: &mut Engine, seq: SeqId, epoch: Epoch) {
        self.epochs.remove(&epoch);
        match self.receiver.fence(epoch) {
            FenceState::Clear => clear(engine, seq),
            FenceState::Pending => {
                self.fencing.insert(epoch, seq);
            }
        }
    }

    fn cancel(&mut self, engine: &mut Engine, seq: SeqId) {
        let Some(open) = self.open.remove(&seq) else { return };
        let aborted = give_up(engine, seq, open.epoch.is_some());
        if let (Some(Aborted::Quarantined), Some(epoch)) = (aborted, open.epoch) {
            self.fence(engine, seq, epoch);
        }
    }

    /// Sends a stream's last item and forgets it.
    fn finish(&mut self, seq: SeqId, item: Said) -> Option<Epoch> {
        let open = self.open.remove(&seq)?;
        let _ = open.stream.send(item);
        open.epoch
    }
}

/// Ends a sequence in the engine; one that is gone already is fine.
fn give_up(engine: &mut Engine, seq: SeqId, quarantine: bool) -> Option<Aborted> {
    engine.abort(seq, quarantine).ok()
}

fn clear(engine: &mut Engine, seq: SeqId) {
    if let Err(error) = engine.clear_quarantine(seq) {
        tracing::error!(%seq, %error, "quarantined blocks could not be freed");
    }
}

impl Role for DecodeRole {
    type Command = Command;

    fn command(&mut self, engine: &mut Engine, command: Command, events: &mut Vec<Event>) {
        match command {
            Command::Generate { new, stream, accepted } => {
                if let Some(seq) = accepted.submit(engine, *new) {
                    self.open.insert(seq, Open { stream, epoch: None, told: false });
                }
            }
            Command::Cancel(seq) => self.cancel(engine, seq),
            Command::Received(event) => self.received(engine, event, events),
        }
    }

    fn event(&mut self, engine: &mut Engine, event: Event) {
        match event {
            Event::Reserved { seq, .. } => self.reserved(engine, seq),
            Event::Token { seq, token, cached_tokens, .. } => {
                if let Some(open) = self.open.get_mut(&seq) {
                    // A closed stream is cancelled by its guard.
                    if !std::mem::replace(&mut open.told, true) {
                        let _ = open.stream.send(Said::Started(cached_tokens));
                    }
                    let _ = open.stream.send(Said::Token(token));
                }
            }
            Event::Finished { seq, reason, .. } => {
                self.finish(seq, Said::Finished(reason));
            }
            Event::Failed { seq, error, quarantined, .. } => {
                let epoch = self.finish(seq, Said::Failed(error.kind(), error.to_string()));
                match epoch {
                    Some(epoch) if quarantined => self.fence(engine, seq, epoch),
                    _ if quarantined => clear(engine, seq),
                    _ => {}
                }
            }
            Event::Prefilled { seq, .. } => {
                tracing::error!(%seq, "a decode worker never holds KV for others");
                give_up(engine, seq, false);
            }
        }
    }
}
