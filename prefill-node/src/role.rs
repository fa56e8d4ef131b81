//! The prefill worker's part on the engine thread: which blocks travel when, and when they are free again.
//!
//! A sequence's blocks are read by the transfer engine until its handoff has ended. So they are released when the handoff
//! reports its end, or quarantined by an abort until it has gone quiet (I3).

use std::collections::HashMap;
use std::ops::Range;

use baton_engine::{Aborted, BlockTable, Engine, Event, NewSequence, Step};
use baton_runtime::metrics as names;
use baton_transfer::{Handoff, TransferError, TransferStats, TransportKind};
use baton_types::{BatonError, BlockId, ErrorKind, FinishReason, KvLayout, LiveBlocks, SeqId, TokenOut};
use baton_worker::{Accepted, Commands, Role, count_failure, write_first_token};
use metrics::{counter, histogram};
use tokio::sync::mpsc;

/// What a stream carries: a first token, then the transfer's outcome.
#[derive(Debug)]
pub(crate) enum Said {
    /// The token, what it ends, and how many tokens of the prompt were not computed.
    First(TokenOut, Option<FinishReason>, u32),
    Transferred(TransferStats),
    Failed(ErrorKind, String),
}

/// One request's way back; at most two items.
pub(crate) type Stream = mpsc::UnboundedSender<Said>;

/// What the service and the transfer threads say.
pub(crate) enum Command {
    Run {
        new: Box<NewSequence>,
        handoff: Handoff,
        stream: Stream,
        accepted: Accepted<Command>,
    },
    /// The stream was dropped.
    Cancel(SeqId),
    /// A completed handoff has ended, well or not; and what carried it, as far as it came.
    Ended(SeqId, Result<TransferStats, TransferError>, Option<TransportKind>),
    /// An aborted handoff reads no block any more.
    Quiet(SeqId),
}

struct Open {
    stream: Stream,
    /// Until it is completed or aborted.
    handoff: Option<Handoff>,
    /// A write that was refused; the sequence ends after the step.
    refused: Option<TransferError>,
}

/// Blocks of one sequence that the step in progress completes.
struct Outgoing {
    seq: SeqId,
    /// Per layer group: (local block, index in the reservation).
    pairs: Vec<Vec<(BlockId, u32)>>,
}

pub(crate) struct PrefillRole {
    layout: KvLayout,
    commands: Commands<Command>,
    open: HashMap<SeqId, Open>,
    outgoing: Vec<Outgoing>,
}

impl PrefillRole {
    pub(crate) fn new(layout: KvLayout, commands: Commands<Command>) -> PrefillRole {
        PrefillRole { layout, commands, open: HashMap::new(), outgoing: Vec::new() }
    }

    /// Ends a sequence whose handoff is not completed: nobody gets its blocks until the transfer has gone quiet.
    fn abort(&self, engine: &mut Engine, seq: SeqId, handoff: Option<Handoff>) {
        let aborted = engine.abort(seq, true).ok();
        self.quieten(seq, handoff, aborted == Some(Aborted::Quarantined));
    }

    fn quieten(&self, seq: SeqId, handoff: Option<Handoff>, quarantined: bool) {
        if let Some(handoff) = handoff {
            let commands = self.commands.clone();
            handoff.abort(Box::new(move || {
                if quarantined {
                    // Without an engine there are no blocks to free.
                    let _ = commands.send(Command::Quiet(seq));
                }
            }));
        }
    }

    fn prefilled(
        &mut self,
        engine: &mut Engine,
        seq: SeqId,
        token: TokenOut,
        finish: Option<FinishReason>,
        cached_tokens: u32,
    ) {
        let Some(open) = self.open.get_mut(&seq) else {
            // Nothing reads its blocks, and nobody would clear a quarantine.
            if let Err(error) = engine.release(seq) {
                tracing::error!(%seq, %error, "held blocks of no stream could not be freed");
            }
            return;
        };
        let tail = write_first_token(&token);
        // A closed stream is cancelled by its guard.
        let _ = open.stream.send(Said::First(token, finish, cached_tokens));
        let Some(handoff) = open.handoff.take() else { return };
        // Also when the token ends the answer: the KV is nearly there, and an abort would look like a failure to the decode
        // worker, and through it to the router, before this token gets there.
        let (commands, carrier) = (self.commands.clone(), handoff.carrier());
        handoff.complete(
            tail,
            Box::new(move |outcome| {
                // Without an engine there are no blocks to free.
                let _ = commands.send(Command::Ended(seq, outcome, carrier.transport()));
            }),
        );
    }

    fn ended(
        &mut self,
        engine: &mut Engine,
        seq: SeqId,
        outcome: Result<TransferStats, TransferError>,
        transport: Option<TransportKind>,
    ) {
        let item = match outcome {
            Ok(stats) => {
                let transport = stats.transport.as_str();
                counter!(names::TRANSFER_BYTES, "transport" => transport).increment(stats.bytes);
                counter!(names::TRANSFER_SLICES, "transport" => transport).increment(stats.slices);
                histogram!(names::TRANSFER_SECONDS, "transport" => transport).record(stats.seconds);
                Said::Transferred(stats)
            }
            Err(error) => {
                count_failure(transport, &error);
                Said::Failed(error.kind(), error.to_string())
            }
        };
        match self.open.remove(&seq) {
            Some(open) => {
                if let Err(error) = engine.release(seq) {
                    tracing::error!(%seq, %error, "held blocks could not be freed");
                }
                let _ = open.stream.send(item);
            }
            // Cancelled meanwhile: its blocks waited for this.
            None => clear(engine, seq),
        }
    }
}

/// The blocks of a range of the sequence that go on living with it, each with its index in a reservation that begins with
/// block `first`.
fn pairs_of(table: &BlockTable, range: Range<usize>, live: LiveBlocks, first: u32) -> Vec<(BlockId, u32)> {
    range.filter_map(|at| Some((*table.blocks().get(at)?, live.place(first, at as u32)?))).collect()
}

fn clear(engine: &mut Engine, seq: SeqId) {
    if let Err(error) = engine.clear_quarantine(seq) {
        tracing::error!(%seq, %error, "quarantined blocks could not be freed");
    }
}

impl Role for PrefillRole {
    type Command = Command;

    fn command(&mut self, engine: &mut Engine, command: Command, _: &mut Vec<Event>) {
        match command {
            Command::Run { new, handoff, stream, accepted } => {
                // A handoff without a sequence is aborted by being dropped.
                if let Some(seq) = accepted.submit(engine, *new) {
                    self.open.insert(seq, Open { stream, handoff: Some(handoff), refused: None });
                }
            }
            Command::Cancel(seq) => {
                if let Some(open) = self.open.remove(&seq) {
                    // Once completed, `Ended` will come and free the quarantined blocks.
                    self.abort(engine, seq, open.handoff);
                }
            }
            Command::Ended(seq, outcome, transport) => self.ended(engine, seq, outcome, transport),
            Command::Quiet(seq) => clear(engine, seq),
        }
    }

    fn event(&mut self, engine: &mut Engine, event: Event) {
        match event {
            Event::Prefilled { seq, token, finish, cached_tokens, .. } => {
                self.prefilled(engine, seq, token, finish, cached_tokens)
            }
            Event::Failed { seq, error, quarantined, .. } => {
                let Some(open) = self.open.remove(&seq) else {
                    if quarantined {
                        clear(engine, seq);
                    }
                    return;
                };
                let _ = open.stream.send(Said::Failed(error.kind(), error.to_string()));
                self.quieten(seq, open.handoff, quarantined);
            }
            Event::Reserved { seq, .. } | Event::Token { seq, .. } | Event::Finished { seq, .. } => {
                tracing::error!(%seq, "a prefill worker only computes prompts");
                match self.open.remove(&seq) {
                    Some(open) => self.abort(engine, seq, open.handoff),
                    None => drop(engine.abort(seq, false)),
                }
            }
        }
    }

    fn step_planned(&mut self, engine: &Engine, step: &Step) {
        self.outgoing.clear();
        for row in step.rows().iter().filter(|row| row.held) {
            let Some(open) = self.open.get(&row.seq) else { continue };
            let Some(handoff) = &open.handoff else { continue };
            let ready = row.completed_blocks(self.layout.block_size);
            let tables = engine.tables(row.seq).unwrap_or_default();
            let groups = self.layout.groups.iter().map(|group| group.live(handoff.tokens(), self.layout.block_size));
            let wanted = groups.zip(handoff.first_blocks());
            let pairs: Vec<_> = tables
                .iter()
                .zip(wanted)
                .map(|(table, (live, first))| pairs_of(table, ready.clone(), live, *first))
                .collect();
            if pairs.iter().any(|pairs| !pairs.is_empty()) {
                self.outgoing.push(Outgoing { seq: row.seq, pairs });
            }
        }
    }

    fn layer_stored(&mut self, layer: u32) {
        let Some((group, index)) = self.layout.locate(layer) else { return };
        for outgoing in &self.outgoing {
            let Some(open) = self.open.get_mut(&outgoing.seq) else { continue };
            if let (Some(handoff), None) = (&mut open.handoff, &open.refused) {
                open.refused = handoff.write(group, index, &outgoing.pairs[group]).err();
            }
        }
    }

    fn step_done(&mut self, engine: &mut Engine) {
        for outgoing in std::mem::take(&mut self.outgoing) {
            let seq = outgoing.seq;
            let refused = self.open.get_mut(&seq).and_then(|open| open.refused.take());
            if let Some(error) = refused
                && let Some(open) = self.open.remove(&seq)
            {
                match error.is_withdrawal() {
                    true => tracing::debug!(%seq, %error, "handoff withdrawn"),
                    false => tracing::warn!(%seq, %error, "handoff failed"),
                }
                count_failure(open.handoff.as_ref().and_then(|handoff| handoff.carrier().transport()), &error);
                let _ = open.stream.send(Said::Failed(error.kind(), error.to_string()));
                self.abort(engine, seq, open.handoff);
            }
        }
    }
}
