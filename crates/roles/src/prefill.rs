//! The prefill role: which blocks travel when, and when they are free again.
//!
//! The transfer engine reads a sequence's blocks until its handoff has ended. So the blocks are released when the
//! handoff reports its end. After an abort they are quarantined until the handoff has gone quiet (I3).
//!
//! A request may come before it is known where its KV goes. Then it is parked in the engine, and its stream says when its turn is near
//! ([`Answer::Due`]); nothing of it is computed before its target is here.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use baton_engine::{Aborted, BlockTable, Engine, Event, NewSequence, Step};
use baton_handoff::{TransferError, TransferStats, TransportKind};
use baton_types::{BatonError, BlockId, ErrorKind, FinishReason, KvLayout, LiveBlocks, SeqId, TokenOut};

use crate::first_token::write_first_token;
use crate::launch::Outgoing;
use crate::scored::in_messages;
use crate::submit::{Desk, Refused, Ticket, clear};
use crate::worker::RoleCore;

/// An item of a request's stream: scores of the prompt if they are asked for, a first token, then the transfer's outcome.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    /// The request came without a target, and its turn is near: it computes nothing before the target is here.
    Due,
    /// The first token of the answer. The last item when it ends the answer: the transfer's outcome is not reported
    /// then.
    FirstToken {
        /// The token.
        token: TokenOut,
        /// Why the answer ends with it, if it does.
        finish: Option<FinishReason>,
        /// Prompt tokens that were in the prefix cache.
        cached_tokens: u32,
    },
    /// Tokens of the prompt with their log probabilities, at most [`crate::MOST_SCORED`].
    Scored(Vec<TokenOut>),
    /// The decode worker has verified the KV. The last item.
    Transferred(TransferStats),
    /// The request failed. The last item.
    Failed(ErrorKind, String),
}

impl Answer {
    /// Whether no further item follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Answer::FirstToken { finish: None, .. } | Answer::Scored(_) | Answer::Due)
    }
}

/// What a reservation asks for, as its handoff knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Target {
    /// Tokens of the sequence.
    pub tokens: u32,
    /// Per group: index in the sequence of the reservation's first block.
    pub first: Vec<u32>,
}

/// A command to the role.
#[derive(Clone, PartialEq, Debug)]
pub enum Command {
    /// A new request. The shell has opened its handoff, if it has a target.
    Run {
        /// Repeated in [`Effect::Accepted`].
        ticket: Ticket,
        /// What to compute.
        new: Box<NewSequence>,
        /// Where its KV goes; `None`: [`Command::Target`] will say. It is parked until then ([`NewSequence::parked`]).
        target: Option<Target>,
    },
    /// The target of a request that came without. The shell has opened its handoff. Followed by [`Effect::Abort`] if the request is gone.
    Target {
        /// The request's sequence.
        seq: SeqId,
        /// Where its KV goes, or why nothing can be written there.
        target: Result<Target, (ErrorKind, String)>,
    },
    /// The sequence's stream was dropped.
    Cancel(SeqId),
    /// A completed handoff has ended, with success or not.
    Ended {
        /// The handoff's sequence.
        seq: SeqId,
        /// How it ended.
        outcome: Result<TransferStats, TransferError>,
        /// The transport, if it got as far as having one.
        transport: Option<TransportKind>,
    },
    /// An aborted handoff no longer reads any block.
    Quiet(SeqId),
}

/// What the role wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// The request has a sequence now. If it was refused instead, abort its handoff.
    Accepted {
        /// The command's ticket.
        ticket: Ticket,
        /// Its sequence.
        outcome: Result<SeqId, Refused>,
    },
    /// Send this down the sequence's stream.
    Say(SeqId, Answer),
    /// All of the sequence's blocks are written: complete its handoff, and send [`Command::Ended`] when the handoff has
    /// ended.
    Complete {
        /// The sequence.
        seq: SeqId,
        /// Bytes that travel with the KV: the first token.
        tail: Vec<u8>,
    },
    /// Abort the sequence's handoff.
    Abort {
        /// The sequence.
        seq: SeqId,
        /// Its blocks are quarantined: send [`Command::Quiet`] when the handoff no longer reads any of them.
        quarantined: bool,
    },
    /// For metrics: a handoff was verified.
    Moved(TransferStats),
    /// For metrics: a handoff failed at this end.
    HandoffFailed {
        /// The transport, if it is known.
        transport: Option<TransportKind>,
        /// Why.
        error: TransferError,
    },
    /// For metrics: a handoff refused a write while the shell still had it.
    WriteRefused {
        /// The sequence.
        seq: SeqId,
        /// Why.
        error: TransferError,
    },
}

#[derive(Debug)]
struct Open {
    /// Where its KV goes, once that is known and until its handoff is completed or aborted.
    target: Option<Target>,
}

/// The role's state: requests with a stream.
#[derive(Debug)]
pub struct Prefill {
    layout: Arc<KvLayout>,
    open: BTreeMap<SeqId, Open>,
}

impl Prefill {
    /// The role's state for a pool of this layout.
    pub fn new(layout: Arc<KvLayout>) -> Prefill {
        Prefill { layout, open: BTreeMap::new() }
    }

    /// Requests with a stream.
    pub fn streams(&self) -> usize {
        self.open.len()
    }

    /// For tests: whether the sequence's handoff is neither completed nor aborted; `None` without a stream.
    #[cfg(test)]
    pub(crate) fn writes(&self, seq: SeqId) -> Option<bool> {
        self.open.get(&seq).map(|open| open.target.is_some())
    }

    /// Ends a sequence: nobody gets its blocks until the transfer has gone quiet.
    fn abort(&self, engine: &mut Engine, seq: SeqId, open: Open, out: &mut Vec<Effect>) {
        let aborted = engine.abort(seq, true).ok();
        quieten(seq, open, aborted == Some(Aborted::Quarantined), out);
    }

    /// Lets a parked sequence start, now that it is known where its KV goes.
    fn aim(
        &mut self,
        engine: &mut Engine,
        seq: SeqId,
        target: Result<Target, (ErrorKind, String)>,
        out: &mut Vec<Effect>,
    ) {
        match (self.open.get_mut(&seq), target) {
            (None, Ok(_)) => out.push(Effect::Abort { seq, quarantined: false }),
            (None, Err(_)) => {}
            (Some(open), Ok(target)) => {
                open.target = Some(target);
                if let Err(error) = engine.unpark(seq) {
                    tracing::error!(%seq, %error, "a request's sequence is not in the engine");
                }
            }
            (Some(_), Err((kind, message))) => {
                out.push(Effect::Say(seq, Answer::Failed(kind, message)));
                if let Some(open) = self.open.remove(&seq) {
                    self.abort(engine, seq, open, out);
                }
            }
        }
    }

    fn prefilled(
        &mut self,
        engine: &mut Engine,
        seq: SeqId,
        (token, finish, cached_tokens): (TokenOut, Option<FinishReason>, u32),
        out: &mut Vec<Effect>,
    ) {
        let Some(open) = self.open.get_mut(&seq) else {
            // Nothing reads its blocks, and nobody would clear a quarantine.
            if let Err(error) = engine.release(seq) {
                tracing::error!(%seq, %error, "held blocks of no stream could not be freed");
            }
            return;
        };
        let tail = write_first_token(&token);
        out.push(Effect::Say(seq, Answer::FirstToken { token, finish, cached_tokens }));
        // Also when the token ends the answer: the KV is nearly there. An abort would look like a failure to the decode
        // worker, and through it to the router, before this token gets there.
        if open.target.take().is_some() {
            out.push(Effect::Complete { seq, tail });
        }
    }

    fn ended(
        &mut self,
        engine: &mut Engine,
        seq: SeqId,
        outcome: Result<TransferStats, TransferError>,
        transport: Option<TransportKind>,
        out: &mut Vec<Effect>,
    ) {
        let item = match outcome {
            Ok(stats) => {
                out.push(Effect::Moved(stats));
                Answer::Transferred(stats)
            }
            Err(error) => {
                let item = Answer::Failed(error.kind(), error.to_string());
                out.push(Effect::HandoffFailed { transport, error });
                item
            }
        };
        match self.open.remove(&seq) {
            Some(_) => {
                if let Err(error) = engine.release(seq) {
                    tracing::error!(%seq, %error, "held blocks could not be freed");
                }
                out.push(Effect::Say(seq, item));
            }
            // Cancelled meanwhile: its quarantined blocks waited for this.
            None => clear(engine, seq),
        }
    }
}

/// Aborts a handoff that is neither completed nor aborted. A completed one ends by itself.
fn quieten(seq: SeqId, open: Open, quarantined: bool, out: &mut Vec<Effect>) {
    if open.target.is_some() {
        out.push(Effect::Abort { seq, quarantined });
    }
}

/// The blocks of `range` that the sequence still needs after its last token, each with its index in a reservation that
/// begins with block `first` of the sequence.
pub(crate) fn pairs_of(table: &BlockTable, range: Range<usize>, live: LiveBlocks, first: u32) -> Vec<(BlockId, u32)> {
    range.filter_map(|at| Some((*table.blocks().get(at)?, live.place(first, at as u32)?))).collect()
}

impl RoleCore for Prefill {
    type Command = Command;
    type Effect = Effect;

    fn command(&mut self, mut desk: Desk<'_>, command: Command, out: &mut Vec<Effect>) {
        match command {
            Command::Run { ticket, new, target } => {
                let outcome = desk.submit(NewSequence { parked: target.is_none(), ..*new });
                if let Ok(seq) = outcome {
                    self.open.insert(seq, Open { target });
                }
                out.push(Effect::Accepted { ticket, outcome });
            }
            Command::Target { seq, target } => self.aim(desk.engine, seq, target, out),
            Command::Cancel(seq) => {
                if let Some(open) = self.open.remove(&seq) {
                    // Once completed, `Ended` will come and free the quarantined blocks.
                    self.abort(desk.engine, seq, open, out);
                }
            }
            Command::Ended { seq, outcome, transport } => self.ended(desk.engine, seq, outcome, transport, out),
            Command::Quiet(seq) => clear(desk.engine, seq),
        }
    }

    fn event(&mut self, engine: &mut Engine, event: Event, out: &mut Vec<Effect>) {
        match event {
            Event::Due { seq } => {
                if self.open.contains_key(&seq) {
                    out.push(Effect::Say(seq, Answer::Due));
                }
            }
            Event::Prefilled { seq, token, finish, cached_tokens, .. } => {
                self.prefilled(engine, seq, (token, finish, cached_tokens), out)
            }
            Event::Scored { seq, tokens } => {
                if self.open.contains_key(&seq) {
                    out.extend(in_messages(tokens).map(|tokens| Effect::Say(seq, Answer::Scored(tokens))));
                }
            }
            Event::Failed { seq, error, quarantined, .. } => {
                let Some(open) = self.open.remove(&seq) else {
                    if quarantined {
                        clear(engine, seq);
                    }
                    return;
                };
                out.push(Effect::Say(seq, Answer::Failed(error.kind(), error.to_string())));
                quieten(seq, open, quarantined, out);
            }
            Event::Reserved { seq, .. } | Event::Token { seq, .. } | Event::Finished { seq, .. } => {
                tracing::error!(%seq, "a prefill worker only computes prompts");
                match self.open.remove(&seq) {
                    Some(open) => self.abort(engine, seq, open, out),
                    None => drop(engine.abort(seq, false)),
                }
            }
        }
    }

    fn outgoing(&self, engine: &Engine, step: &Step) -> Vec<Outgoing> {
        let mut outgoing = Vec::new();
        for row in step.rows().iter().filter(|row| row.held) {
            let Some(target) = self.open.get(&row.seq).and_then(|open| open.target.as_ref()) else { continue };
            let ready = row.completed_blocks(self.layout.block_size);
            let tables = engine.tables(row.seq).unwrap_or_default();
            let groups = self.layout.groups.iter().map(|group| group.live(target.tokens, self.layout.block_size));
            let wanted = groups.zip(&target.first);
            let pairs: Vec<_> = tables
                .iter()
                .zip(wanted)
                .map(|(table, (live, first))| pairs_of(table, ready.clone(), live, *first))
                .collect();
            if pairs.iter().any(|pairs| !pairs.is_empty()) {
                outgoing.push(Outgoing { seq: row.seq, pairs });
            }
        }
        outgoing
    }

    fn refused(&mut self, engine: &mut Engine, seq: SeqId, error: TransferError, out: &mut Vec<Effect>) {
        let Some(open) = self.open.remove(&seq) else { return };
        match error.is_withdrawal() {
            true => tracing::debug!(%seq, %error, "handoff withdrawn"),
            false => tracing::warn!(%seq, %error, "handoff failed"),
        }
        out.push(Effect::Say(seq, Answer::Failed(error.kind(), error.to_string())));
        out.push(Effect::WriteRefused { seq, error });
        self.abort(engine, seq, open, out);
    }
}

/// Checks that a target can be written to. The decode worker makes it and the router passes it on, so it is not trusted
/// (I8). `sequence` is the number of tokens that are to be computed.
pub fn check_target(
    layout: &KvLayout,
    tokens: u32,
    first: &[u32],
    counts: &[u32],
    sequence: usize,
) -> Result<(), TargetError> {
    if tokens as usize != sequence {
        return Err(TargetError::Tokens { tokens, sequence });
    }
    if counts.iter().all(|count| *count == 0) {
        return Err(TargetError::Empty);
    }
    let blocks = tokens.div_ceil(layout.block_size);
    for (group, (first, count)) in first.iter().zip(counts).enumerate() {
        let live = layout.groups[group].live(tokens, layout.block_size);
        let due = blocks.checked_sub(*first).map(|rest| rest - live.missing(*first, blocks));
        if due != Some(*count) {
            let (wants, first, has) = (*count, *first, due.unwrap_or(0));
            return Err(TargetError::Reach { wants, group, first, has, blocks });
        }
    }
    Ok(())
}

/// Why a target cannot be written to.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TargetError {
    /// It is for another sequence.
    #[error("target is for {tokens} tokens, the sequence has {sequence}")]
    Tokens {
        /// Tokens of the target.
        tokens: u32,
        /// Tokens of the sequence.
        sequence: usize,
    },
    /// It asks for no block at all.
    #[error("target wants no block at all")]
    Empty,
    /// In each layer group, the target must ask for all blocks, from some block of the sequence on, that the token
    /// after the last one sees. Otherwise the handoff could never be complete.
    #[error(
        "target wants {wants} blocks of layer group {group} from block {first} on; the sequence has {has} of {blocks}"
    )]
    Reach {
        /// Blocks it wants.
        wants: u32,
        /// The layer group.
        group: usize,
        /// The first block of the sequence it wants.
        first: u32,
        /// Blocks the sequence has from there on.
        has: u32,
        /// Blocks of the whole sequence.
        blocks: u32,
    },
}

impl BatonError for TargetError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::InvalidArgument
    }
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup};

    use super::*;

    #[test]
    fn a_target_must_reach_from_within_the_sequence_to_its_end() {
        let group = |window, sinks| KvGroup { layers: Vec::new(), planes: 2, kv_heads: 1, head_dim: 8, window, sinks };
        let layout = |window, sinks| {
            let groups = vec![group(None, 0), group(window, sinks)];
            KvLayout { version: 1, model: 0, dtype: KvDtype::F16, block_size: 16, groups }
        };
        // The 101st token sees a window of 32 from block 4 on.
        let (full, window, sinks) = (layout(None, 0), layout(Some(32), 0), layout(Some(32), 16));
        for (layout, first, counts) in [
            (&full, [0, 0], [7, 7]),
            (&full, [6, 2], [1, 5]),
            (&full, [7, 6], [0, 1]),
            (&window, [0, 0], [7, 3]),
            (&window, [2, 5], [5, 2]),
            (&sinks, [0, 0], [7, 4]),
            (&sinks, [1, 1], [6, 3]),
        ] {
            assert!(check_target(layout, 100, &first, &counts, 100).is_ok(), "{first:?} {counts:?}");
        }
        for (layout, first, counts) in [
            (&full, [0, 0], [7, 6]),
            (&full, [1, 0], [7, 7]),
            (&full, [7, 7], [0, 0]),
            (&full, [u32::MAX, 0], [8, 7]),
            (&window, [0, 0], [7, 7]),
            (&sinks, [0, 0], [7, 3]),
        ] {
            let refused = check_target(layout, 100, &first, &counts, 100).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{first:?} {counts:?}");
        }
    }
}
