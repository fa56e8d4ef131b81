//! Prefixes that move from one worker's prefix cache to another's. Both roles do both parts, beside their own work.
//!
//! | part | owns | ends when |
//! | --- | --- | --- |
//! | fetch | blocks that are lent to the worker that serves | the KV is verified; the transfer fails; it is cancelled; its deadline passes |
//! | serve | blocks that a transfer reads | the transfer has ended |
//!
//! What a request computes never depends on it: where a fetch fails, the prefix is computed.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_engine::{Aborted, Digest, Engine, Event, Exchange as Prefix};
use baton_handoff::{FenceState, Known, ReceiverEvent, TransferError, TransferStats, TransportKind};
use baton_types::{BatonError, BlockId, Epoch, ErrorKind, KvLayout, SeqId};

use crate::loans::{Loan, Loans, lent_blocks};
use crate::prefill::{Target, pairs_of};
use crate::submit::{Desk, Refused, Ticket, clear};

/// Most prefixes that a worker serves, and most that it fetches, at a time (I5).
pub const MOST_EXCHANGES: usize = 16;

/// An item of an exchange's stream.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    /// Fetch: the opaque target for the worker that serves.
    Reserved(Vec<u8>),
    /// Fetch: the prefix of this many tokens is here. The last item.
    Fetched(u32),
    /// Serve: the other worker has verified the KV. The last item.
    Served(TransferStats),
    /// It failed. The last item.
    Failed(ErrorKind, String),
}

impl Answer {
    /// Whether no further item follows.
    pub fn is_last(&self) -> bool {
        !matches!(self, Answer::Reserved(_))
    }
}

/// A command.
#[derive(Clone, PartialEq, Debug)]
pub enum Command {
    /// Take a prefix that another worker has.
    Fetch {
        /// Repeated in [`Effect::Accepted`].
        ticket: Ticket,
        /// Which.
        prefix: Box<Prefix>,
    },
    /// Give a prefix to another worker. The shell has opened the handoff.
    Serve {
        /// Repeated in [`Effect::Accepted`].
        ticket: Ticket,
        /// Which.
        prefix: Box<Prefix>,
        /// What the other worker has set aside for it.
        target: Target,
    },
    /// The stream was dropped.
    Cancel(SeqId),
    /// Answer to [`Effect::Lend`].
    Lent {
        /// The effect's epoch.
        epoch: Epoch,
        /// The target for the worker that serves.
        outcome: Result<Vec<u8>, TransferError>,
    },
    /// Answer to [`Effect::Fence`].
    FenceBegun {
        /// The effect's epoch.
        epoch: Epoch,
        /// Whether a peer may still write.
        state: FenceState,
    },
    /// An event of the handoffs' receiving end, of an epoch that this part knows ([`Exchange::knows`]).
    Received(ReceiverEvent),
    /// The handoff of a prefix that is served has ended: nothing reads its blocks any more. Sent once for each [`Effect::Send`].
    Ended {
        /// The handoff's sequence.
        seq: SeqId,
        /// How it ended.
        outcome: Result<TransferStats, TransferError>,
        /// The transport, if it got as far as having one.
        transport: Option<TransportKind>,
    },
}

/// What it wants done.
#[derive(Clone, PartialEq, Debug)]
pub enum Effect {
    /// The exchange has begun, or was refused. If it was refused, its handoff is aborted.
    Accepted {
        /// The command's ticket.
        ticket: Ticket,
        /// The sequence that owns its blocks.
        outcome: Result<SeqId, Refused>,
    },
    /// Send this down the stream.
    Say(SeqId, Answer),
    /// Lend blocks to whoever presents the target that is made from this. Answered by [`Command::Lent`].
    Lend(Loan),
    /// The blocks of a verified loan belong to the engine again: end its lease.
    Release(Epoch),
    /// Take a loan back. Answered by [`Command::FenceBegun`].
    Fence(Epoch),
    /// Write every layer of these blocks, and complete the handoff.
    Send {
        /// The sequence.
        seq: SeqId,
        /// Per group: pairs of local block and index in the loan.
        pairs: Vec<Vec<(BlockId, u32)>>,
        /// Of those that came here from elsewhere: what they were verified with then.
        known: Vec<Known>,
    },
    /// Abort the handoff of [`Effect::Send`] if it has not ended.
    Abort(SeqId),
    /// For metrics: a prefix was fetched.
    Fetched {
        /// The transport that carried it.
        transport: TransportKind,
        /// KV bytes.
        bytes: u64,
        /// Tokens of the prefix.
        tokens: u32,
        /// Seconds from granting access to verification.
        seconds: f64,
    },
    /// For metrics: a prefix was served.
    Served(TransferStats),
    /// For metrics: a transfer failed at this end.
    Failed {
        /// It was to bring a prefix here.
        fetched: bool,
        /// The transport, if it is known.
        transport: Option<TransportKind>,
        /// Why.
        error: TransferError,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Part {
    Fetch(Option<Epoch>),
    Serve,
}

/// The exchanges of one worker.
#[derive(Debug)]
pub struct Exchange {
    lease: Duration,
    open: BTreeMap<SeqId, Part>,
    loans: Loans,
}

impl Exchange {
    /// Lends blocks for `lease` at most.
    pub(crate) fn new(lease: Duration) -> Exchange {
        Exchange { lease, open: BTreeMap::new(), loans: Loans::of_fetches() }
    }

    /// Exchanges with a stream.
    pub fn streams(&self) -> usize {
        self.open.len()
    }

    /// How many epochs a peer may write under, and how many are being fenced.
    pub fn epochs(&self) -> (usize, usize) {
        self.loans.counts()
    }

    /// Whether an event of the receiving end is about one of its loans.
    pub fn knows(&self, epoch: Epoch) -> bool {
        self.loans.has(epoch)
    }

    /// Whether an event of the engine is about one of its sequences.
    pub(crate) fn owns(&self, seq: SeqId) -> bool {
        self.open.contains_key(&seq)
    }

    pub(crate) fn command(&mut self, desk: Desk<'_>, layout: &KvLayout, command: Command, out: &mut Vec<Effect>) {
        match command {
            Command::Fetch { ticket, prefix } => {
                let outcome = self.fetch(desk, *prefix);
                out.push(Effect::Accepted { ticket, outcome });
            }
            Command::Serve { ticket, prefix, target } => self.serve(desk, layout, (ticket, *prefix, target), out),
            Command::Cancel(seq) => self.cancel(desk.engine, seq, out),
            Command::Lent { epoch, outcome } => self.lent(desk.engine, epoch, outcome, out),
            Command::FenceBegun { epoch, state } => self.loans.fence_begun(desk.engine, epoch, state),
            Command::Received(event) => self.received(desk.engine, event, out),
            Command::Ended { seq, outcome, transport } => self.ended(desk.engine, seq, outcome, transport, out),
        }
    }

    fn room(&self, draining: bool, is: fn(&Part) -> bool) -> Result<(), Refused> {
        match self.open.values().filter(|part| is(part)).count() {
            _ if draining => Err(Refused::Draining),
            begun if begun >= MOST_EXCHANGES => Err(Refused::Exchanges { begun }),
            _ => Ok(()),
        }
    }

    fn fetch(&mut self, desk: Desk<'_>, prefix: Prefix) -> Result<SeqId, Refused> {
        self.room(desk.draining, |part| matches!(part, Part::Fetch(_)))?;
        let seq = desk.engine.fetch(prefix, desk.events)?;
        self.open.insert(seq, Part::Fetch(None));
        Ok(seq)
    }

    fn serve(
        &mut self,
        desk: Desk<'_>,
        layout: &KvLayout,
        (ticket, prefix, target): (Ticket, Prefix, Target),
        out: &mut Vec<Effect>,
    ) {
        let room = self.room(desk.draining, |part| *part == Part::Serve);
        let outcome = room.and_then(|()| Ok(desk.engine.serve(prefix)?));
        out.push(Effect::Accepted { ticket, outcome: outcome.clone() });
        let Ok(seq) = outcome else { return };
        self.open.insert(seq, Part::Serve);
        let tables = desk.engine.tables(seq).unwrap_or_default();
        let live = layout.groups.iter().map(|group| group.live(target.tokens, layout.block_size));
        let pairs = tables.iter().zip(live).zip(&target.first);
        let pairs = pairs.map(|((table, live), first)| pairs_of(table, 0..table.blocks().len(), live, *first));
        let pairs: Vec<Vec<(BlockId, u32)>> = pairs.collect();
        let known = (0..).zip(&pairs).flat_map(|(group, pairs)| pairs.iter().map(move |pair| (group, *pair)));
        let known = known.filter_map(|(group, (block, index))| {
            let digest = desk.engine.digest(group as usize, block)?;
            Some(Known { group, index, block, digest })
        });
        let known = known.collect();
        out.push(Effect::Send { seq, pairs, known });
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
            Ok(target) => out.push(Effect::Say(seq, Answer::Reserved(target))),
            Err(error) => {
                self.loans.end(epoch);
                // Nobody was told where to write.
                let _ = engine.abort(seq, false);
                self.finish(seq, failed(&error), out);
            }
        }
    }

    fn received(&mut self, engine: &mut Engine, event: ReceiverEvent, out: &mut Vec<Effect>) {
        match event {
            ReceiverEvent::Verified { epoch, bytes, transport, seconds, digests, .. } => {
                // Given up meanwhile: the fence has cleared it.
                let Some(seq) = self.loans.end(epoch) else { return };
                out.push(Effect::Release(epoch));
                let digests = digests_of(engine, seq, &digests);
                match engine.fetched(seq, &digests) {
                    Ok(tokens) => {
                        out.push(Effect::Fetched { transport, bytes, tokens, seconds });
                        self.finish(seq, Answer::Fetched(tokens), out);
                    }
                    Err(error) => {
                        // Verified means that the peer's access is over, so the blocks need no fence.
                        let _ = engine.abort(seq, false);
                        self.finish(seq, failed(&error), out);
                    }
                }
            }
            ReceiverEvent::Failed { epoch, error, transport } => {
                let Some(seq) = self.loans.end(epoch) else { return };
                if engine.abort(seq, true) == Ok(Aborted::Quarantined) {
                    self.loans.give_up(epoch, seq);
                }
                self.finish(seq, failed(&error), out);
                out.push(Effect::Failed { fetched: true, transport, error });
            }
            ReceiverEvent::Fenced { epoch } => self.loans.fenced(engine, epoch),
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
        let changed = match outcome {
            Err(TransferError::Changed { group, block, .. }) => Some((group as usize, block)),
            _ => None,
        };
        let item = match outcome {
            Ok(stats) => {
                out.push(Effect::Served(stats));
                Answer::Served(stats)
            }
            Err(error) => {
                let item = failed(&error);
                out.push(Effect::Failed { fetched: false, transport, error });
                item
            }
        };
        if self.open.contains_key(&seq) {
            if let Err(error) = engine.release(seq) {
                tracing::error!(%seq, %error, "blocks that were served could not be freed");
            }
            self.finish(seq, item, out);
        } else {
            // Cancelled meanwhile, or too late: its quarantined blocks waited for this.
            clear(engine, seq);
        }
        if let Some((group, block)) = changed {
            engine.spoilt(group, block);
        }
    }

    fn cancel(&mut self, engine: &mut Engine, seq: SeqId, out: &mut Vec<Effect>) {
        let Some(part) = self.open.remove(&seq) else { return };
        let lent = part != Part::Fetch(None);
        let aborted = engine.abort(seq, lent);
        match part {
            Part::Serve => out.push(Effect::Abort(seq)),
            Part::Fetch(Some(epoch)) if aborted == Ok(Aborted::Quarantined) => self.fence(seq, epoch, out),
            Part::Fetch(_) => {}
        }
    }

    /// Fences a loan whose blocks are already quarantined (I3).
    fn fence(&mut self, seq: SeqId, epoch: Epoch, out: &mut Vec<Effect>) {
        self.loans.give_up(epoch, seq);
        out.push(Effect::Fence(epoch));
    }

    /// Sends a stream's last item and forgets the exchange.
    fn finish(&mut self, seq: SeqId, item: Answer, out: &mut Vec<Effect>) {
        if self.open.remove(&seq).is_some() {
            out.push(Effect::Say(seq, item));
        }
    }

    /// Handles an event of one of its sequences.
    pub(crate) fn event(&mut self, engine: &mut Engine, event: Event, out: &mut Vec<Effect>) {
        match event {
            Event::Reserved { seq, .. } => {
                let loan = self.loans.lend(engine, seq, self.lease);
                self.open.insert(seq, Part::Fetch(Some(loan.epoch)));
                out.push(Effect::Lend(loan));
            }
            Event::Failed { seq, error, quarantined, .. } => {
                let part = self.open.get(&seq).copied();
                self.finish(seq, failed(&error), out);
                match part {
                    Some(Part::Serve) => out.push(Effect::Abort(seq)),
                    Some(Part::Fetch(Some(epoch))) if quarantined => self.fence(seq, epoch, out),
                    _ if quarantined => clear(engine, seq),
                    _ => {}
                }
            }
            other => {
                let seq = other.seq();
                tracing::error!(%seq, "a prefix that moves computes nothing");
                self.cancel(engine, seq, out);
            }
        }
    }
}

/// The digests of what was lent for a sequence, by its blocks. `by_index`: per group, in the order of the loan's blocks.
fn digests_of(engine: &Engine, seq: SeqId, by_index: &[Vec<u64>]) -> Vec<Digest> {
    let blocks = lent_blocks(engine, seq);
    let groups = blocks.iter().zip(by_index).enumerate();
    groups
        .flat_map(|(group, (blocks, digests))| {
            blocks.iter().zip(digests).map(move |(block, of)| Digest { group, block: *block, of: *of })
        })
        .collect()
}

fn failed(error: &impl BatonError) -> Answer {
    Answer::Failed(error.kind(), error.to_string())
}
