//! The engine's state and everything that may happen to it between steps.
//!
//! [`crate::admit`], [`crate::plan`] and [`crate::apply`] hold the step itself.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use baton_kv_cache::{BlockCopy, BlockCounts, BlockName, BlockTable, Cached, KvError, KvPools, Quarantine, Readers};
use baton_types::{Class, PoolGeometry, RequestId, SeqId, TokenOut};

use crate::config::AGED;
use crate::sequence::{Doom, Kept, Phase, Sequence, Turn};
use crate::share::{Share, Shares, Tags};
use crate::{EngineConfig, EngineError, Event, Exchange, NewSequence, Order, Row, Start, StepRow, Time};

/// Most ended sequences that are noted for who takes them (I5).
pub(crate) const MOST_ENDED: usize = 256;

/// What [`Engine::abort`] left behind.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Aborted {
    /// Nothing: the blocks are free now, or when the steps in flight end.
    Freed,
    /// Quarantined blocks, until [`Engine::clear_quarantine`].
    Quarantined,
}

/// Continuous batching over one KV pool. See the crate's documentation for the order of calls.
///
/// Sequences are served in one order ([`crate::Order`]), first come first served by default. Nobody bypasses a sequence
/// that finds no room. Blocks are taken only from sequences with a later turn, never from those with an earlier one. So
/// every sequence ends.
#[derive(Debug)]
pub struct Engine {
    pub(crate) config: EngineConfig,
    pub(crate) pools: KvPools,
    pub(crate) sequences: BTreeMap<SeqId, Sequence>,
    /// Sequences in [`Phase::Waiting`].
    pub(crate) waiting: BTreeSet<Turn>,
    /// How many of these are parked.
    pub(crate) parked: u32,
    /// Sequences in [`Phase::Running`], in order of turns.
    pub(crate) running: Vec<Turn>,
    /// Sequences in [`Phase::Receiving`].
    pub(crate) receiving: BTreeSet<Turn>,
    /// Quarantined blocks of sequences that are gone.
    pub(crate) quarantine: BTreeMap<SeqId, Quarantine>,
    /// No deadline is earlier than this, so most plans need not look at the deadlines.
    pub(crate) earliest_deadline: Option<Time>,
    /// Set while no step is possible and only quarantined blocks may come free: when the first in turn fails for that.
    pub(crate) starved: Option<Time>,
    /// Of each class: interactive, batch.
    pub(crate) shares: [Shares; 2],
    pub(crate) next_seq: u64,
    pub(crate) steps: u64,
    /// Steps that are planned and neither applied nor failed.
    pub(crate) in_flight: u32,
    /// How many pairs of a token and one that it attends to cost as much as the rest of a token; 0 while that is not known.
    pub(crate) pairs_per_token: u32,
    pub(crate) preemptions: u64,
    pub(crate) hit_tokens: u64,
    pub(crate) decoded: u64,
    pub(crate) decoded_wasted: u64,
    /// Prompts and answers whose blocks an ended sequence left in the prefix cache, if somebody wants to know.
    pub(crate) ended: Option<Vec<Exchange>>,
    /// Preempted sequences that could start again, if their KV came from there where it was kept.
    pub(crate) returning: Vec<Exchange>,
    /// A request that asks for its prefix when there is room.
    pub(crate) asks_later: Option<RequestId>,
    /// The fetch whose blocks fill layer by layer now ([`Engine::streams`]).
    pub(crate) streams: Option<SeqId>,
    /// The step in flight is behind a fetch: none is planned before it is over.
    pub(crate) joined: bool,
    /// Prefixes that were fetched are among these.
    pub(crate) notes_fetched: bool,
    /// First error of a block operation that should never fail; reported by [`Engine::check`].
    pub(crate) defect: Option<KvError>,
    /// Buffers kept from step to step.
    pub(crate) spare_steps: Vec<Vec<StepRow>>,
    pub(crate) spare_rows: Vec<Row<'static>>,
    pub(crate) spare_copies: Vec<BlockCopy>,
}

impl Engine {
    /// An idle engine whose pool has the blocks of `geometry`.
    pub fn new(config: EngineConfig, geometry: &PoolGeometry) -> Result<Engine, EngineError> {
        config.validate()?;
        Ok(Engine {
            config,
            pools: KvPools::new(geometry, config.cache)?,
            sequences: BTreeMap::new(),
            waiting: BTreeSet::new(),
            parked: 0,
            running: Vec::new(),
            receiving: BTreeSet::new(),
            quarantine: BTreeMap::new(),
            earliest_deadline: None,
            starved: None,
            shares: Default::default(),
            next_seq: 0,
            steps: 0,
            in_flight: 0,
            pairs_per_token: 0,
            preemptions: 0,
            hit_tokens: 0,
            decoded: 0,
            decoded_wasted: 0,
            ended: None,
            returning: Vec::new(),
            asks_later: None,
            streams: None,
            joined: false,
            notes_fetched: false,
            defect: None,
            spare_steps: Vec::new(),
            spare_rows: Vec::new(),
            spare_copies: Vec::new(),
        })
    }

    /// Says what attention costs here: how many pairs of a token and one that it attends to cost as much as the rest of a token. Chunks of
    /// long prompts are shorter from then on. 0: not known.
    pub fn set_pairs_per_token(&mut self, pairs: u32) {
        self.pairs_per_token = pairs;
    }

    /// Queues a sequence. [`Engine::plan`] starts it, or lends its blocks and emits [`Event::Reserved`].
    ///
    /// Refuses at once a sequence that can never fit, and any sequence while the queue is full (I5).
    pub fn submit(&mut self, new: NewSequence) -> Result<SeqId, EngineError> {
        new.validate(self.config.context_tokens, self.pools.capacity_tokens(self.config.chunk))?;
        let class = Class::of(new.priority);
        let (waiting, free) =
            (self.waiting_before(class), self.config.max_running.saturating_sub(self.running() + self.receiving()));
        if waiting >= self.config.max_waiting.saturating_add(free) {
            return Err(EngineError::QueueFull { waiting, limit: self.config.max_waiting });
        }
        let seq = self.take_id();
        if let Some(deadline) = new.deadline {
            self.earliest_deadline = Some(self.earliest_deadline.map_or(deadline, |known| known.min(deadline)));
        }
        let (priority, share) = (new.priority, new.share);
        let mut sequence = Sequence::new(new, Turn { turn: AGED, tag: 0, seq }, self.pools.block_size());
        if sequence.start != Start::Receive || self.config.order == Order::ShortestFirst {
            sequence.expected = self.hit(&sequence).tokens();
        }
        let cached = if self.config.order == Order::ShortestFirst { sequence.expected } else { 0 };
        let tags = self.tags(class, share, sequence.len());
        (sequence.turn.tag, sequence.start_tag) = (tags.finish, tags.start);
        if self.asks_later.as_ref() == Some(&sequence.request_id) && sequence.prefix.is_some() {
            sequence.kept = Kept::Perhaps;
        }
        sequence.turn.turn = self.config.turn(priority, sequence.len() - cached);
        self.waiting.insert(sequence.turn);
        self.parked += u32::from(sequence.parked.is_some());
        self.sequences.insert(seq, sequence);
        Ok(seq)
    }

    /// There was no room to fetch the prefix of this request, which is submitted next, or no need: what is not here is asked for when there is room
    /// ([`Engine::take_returning`]).
    pub fn asks_later(&mut self, request_id: RequestId) {
        self.asks_later = Some(request_id);
    }

    pub(crate) fn take_id(&mut self) -> SeqId {
        let seq = SeqId(self.next_seq);
        self.next_seq += 1;
        seq
    }

    /// The tags of a new sequence of this class with this many tokens. What a tenant has waiting of batch work holds up nothing else of it.
    fn tags(&mut self, class: Class, share: Share, tokens: u32) -> Tags {
        if self.config.order != Order::Priority || self.config.overtakes == 0 {
            return Tags::default();
        }
        let computes = |s: &&Sequence| {
            s.turn.class() == class && s.doomed.is_none() && !matches!(s.phase, Phase::Held(_)) && s.remaining() > 1
        };
        let earliest = self.sequences.values().filter(computes).map(|s| s.start_tag).min();
        self.shares[usize::from(class.is_batch())].tags(share, tokens, earliest)
    }

    /// The sequence's block tables, one per layer group; empty while it waits, `None` when it is not here.
    pub fn tables(&self, seq: SeqId) -> Option<&[BlockTable]> {
        self.sequences.get(&seq).map(Sequence::tables)
    }

    /// A [`Start::Receive`] sequence's KV is complete and verified (I2), and the peer's access to it is over (I3).
    ///
    /// `first` is the token the prefill side sampled. The client has it already, so there is no [`Event::Token`] for it;
    /// the sequence goes on with the next one, or ends with [`Event::Finished`] when `first` ends the answer.
    pub fn kv_arrived(&mut self, seq: SeqId, first: &TokenOut, events: &mut Vec<Event>) -> Result<(), EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        let (index, expected) = (first.index, sequence.next_index());
        match std::mem::replace(&mut sequence.phase, Phase::Waiting) {
            Phase::Receiving(lent) if index == expected && !sequence.exchange => match self.pools.accept(lent) {
                Ok(tables) => sequence.phase = Phase::Running(tables),
                Err(error) => return Err(self.defect.get_or_insert(error).clone().into()),
            },
            other => {
                let lent = matches!(other, Phase::Receiving(_)) && !sequence.exchange;
                let state = other.name();
                sequence.phase = other;
                return Err(if lent {
                    EngineError::FirstToken { seq, index, expected }
                } else {
                    EngineError::WrongState { seq, operation: "take KV for", state }
                });
            }
        }
        // From here on it is like any other sequence: if it is preempted, it is computed again here.
        sequence.start = Start::Compute;
        sequence.computed = sequence.len();
        // By the peer.
        sequence.scored = sequence.prompt_tokens;
        let (turn, cached_tokens) = (sequence.turn, sequence.cached_tokens());
        self.receiving.remove(&turn);
        let at = self.running.partition_point(|other| *other < turn);
        self.running.insert(at, turn);
        // I2: only what was verified may be shared.
        self.settle(seq, true);
        let finish = self.sequences.get_mut(&seq).and_then(|sequence| sequence.push(first));
        if finish.is_none() {
            self.keep_early(seq);
        }
        if let Some(reason) = finish
            && let Some(gone) = self.remove(seq, Doom::Free)
        {
            events.push(Event::Finished { seq, request_id: gone.request_id, reason, cached_tokens });
        }
        Ok(())
    }

    /// A parked sequence may start from now on. Nothing happens to one that is not parked.
    pub fn unpark(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        self.parked -= u32::from(sequence.parked.take().is_some());
        Ok(())
    }

    /// The transfer of a [`Start::ComputeAndHold`] sequence no longer reads its blocks: frees them.
    pub fn release(&mut self, seq: SeqId) -> Result<(), EngineError> {
        let sequence = self.sequences.get(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        if !matches!(sequence.phase, Phase::Held(_)) {
            return Err(EngineError::WrongState { seq, operation: "release", state: sequence.phase.name() });
        }
        self.remove(seq, Doom::Free);
        Ok(())
    }

    /// Ends a sequence in any state, without an event.
    ///
    /// `quarantine`: a peer may still write to its lent blocks, or a transfer may still read its held ones (I3). Those
    /// blocks go to nobody until [`Engine::clear_quarantine`]. Blocks that only this engine touches are freed either
    /// way. A sequence with rows in steps in flight ends with the last of those steps.
    pub fn abort(&mut self, seq: SeqId, quarantine: bool) -> Result<Aborted, EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        if sequence.doomed.is_some() {
            return Err(EngineError::UnknownSequence(seq));
        }
        let (doom, aborted) = if quarantine && sequence.exposed() {
            (Doom::Quarantine, Aborted::Quarantined)
        } else {
            (Doom::Free, Aborted::Freed)
        };
        if sequence.in_step() {
            sequence.doomed = Some(doom);
        } else {
            self.remove(seq, doom);
        }
        Ok(aborted)
    }

    /// Frees the blocks that an abort or a failure of `seq` left in quarantine. Call this when no peer or transfer can
    /// reach them any more.
    pub fn clear_quarantine(&mut self, seq: SeqId) -> Result<(), EngineError> {
        if let Some(quarantine) = self.quarantine.remove(&seq) {
            let cleared = self.pools.clear_quarantine(quarantine);
            return cleared.map_err(|error| self.defect.get_or_insert(error).clone().into());
        }
        match self.sequences.get_mut(&seq) {
            Some(Sequence { doomed: Some(doom), .. }) => *doom = Doom::Free,
            Some(other) => {
                let state = other.phase.name();
                return Err(EngineError::WrongState { seq, operation: "clear the quarantine of", state });
            }
            None => return Err(EngineError::UnknownSequence(seq)),
        }
        Ok(())
    }

    /// Blocks by state, over all layer groups.
    pub fn counts(&self) -> BlockCounts {
        self.pools.counts()
    }

    /// The configuration the engine was made with.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Tokens per block.
    pub fn block_size(&self) -> u32 {
        self.pools.block_size()
    }

    /// Sequences in the batch.
    pub fn running(&self) -> u32 {
        self.running.len() as u32
    }

    /// Sequences in the queue.
    pub fn waiting(&self) -> u32 {
        self.waiting.len() as u32
    }

    /// Sequences whose blocks are lent to a peer.
    pub fn receiving(&self) -> u32 {
        self.receiving.len() as u32
    }

    /// Sequences whose prompt is computed and whose blocks are held for a transfer.
    pub fn held(&self) -> u32 {
        self.sequences.len() as u32 - self.running() - self.waiting() - self.receiving()
    }

    /// Tokens that are to be computed here before their sequences can go on answering: of prompts, and of answers that lost their KV.
    /// Takes a time that grows with the sequences.
    pub fn queued_tokens(&self) -> u64 {
        let waiting = self.waiting.iter().chain(&self.running).filter_map(|turn| self.sequences.get(&turn.seq));
        waiting.map(Sequence::to_prefill).map(u64::from).sum()
    }

    /// Positions of the tokens that are to be computed here, those of steps in flight included, one range for each prompt, and the prompt's
    /// class. Of a prompt that waits, what the prefix cache held when it came, or what it waits for another to compute, does not count.
    pub fn prompts(&self) -> impl Iterator<Item = (Class, Range<u32>)> {
        let here = self.waiting.iter().chain(&self.running).filter_map(|turn| self.sequences.get(&turn.seq));
        here.filter_map(|s| Some((s.turn.class(), s.to_compute()?)))
    }

    /// Class and tokens of each sequence that gives tokens of its answer here.
    pub fn answers(&self) -> impl Iterator<Item = (Class, u32)> {
        let running = self.running.iter().filter_map(|turn| self.sequences.get(&turn.seq));
        let answers =
            |s: &&Sequence| s.doomed.is_none() && s.start != Start::ComputeAndHold && s.to_compute().is_none();
        running.filter(answers).map(|s| (s.turn.class(), s.len()))
    }

    /// Class and tokens of each sequence that waits for its KV, or for blocks for it.
    pub fn arriving(&self) -> impl Iterator<Item = (Class, u32)> {
        let waiting = self.waiting.iter().chain(&self.receiving).filter_map(|turn| self.sequences.get(&turn.seq));
        waiting.filter(|s| s.start == Start::Receive && !s.exchange).map(|s| (s.turn.class(), s.len()))
    }

    /// Blocks that no sequence owns, less those that waiting sequences will take: what is left for others. Below 0 where there are not enough
    /// even for those.
    pub fn room(&self) -> i64 {
        let BlockCounts { free, cached, .. } = self.counts();
        let waiting = self.waiting.iter().filter_map(|turn| self.sequences.get(&turn.seq));
        i64::from(free) + i64::from(cached) - waiting.map(|s| self.wanted(s)).sum::<i64>()
    }

    /// Blocks that a waiting sequence will take.
    pub(crate) fn wanted(&self, sequence: &Sequence) -> i64 {
        i64::from(self.pools.blocks_for(sequence.len() - sequence.expected.min(sequence.len())))
    }

    /// Steps planned so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// For a [`Start::Receive`] sequence that waits for its KV: index of the first lent block in each of its tables.
    /// The blocks before it are shared and must not be written to. `None` for any other sequence.
    pub fn lent_from(&self, seq: SeqId) -> Option<u32> {
        match &self.sequences.get(&seq)?.phase {
            Phase::Receiving(lent) => Some(lent.shared()),
            _ => None,
        }
    }

    /// Prompt tokens found in the prefix cache when their sequence first started.
    pub fn prefix_hit_tokens(&self) -> u64 {
        self.hit_tokens
    }

    /// Tokens delivered from decode rows, which are sampling rows of one token. The first token of an answer counts
    /// only if one token of its prompt was left to compute.
    pub fn decoded_tokens(&self) -> u64 {
        self.decoded
    }

    /// Decode rows computed after their answer had ended.
    pub fn decoded_wasted(&self) -> u64 {
        self.decoded_wasted
    }

    /// Blocks evicted from the prefix cache.
    pub fn evictions(&self) -> u64 {
        self.pools.evictions()
    }

    /// Blocks of tokens in the prefix cache that are kept ([`crate::Prefix::keep`]).
    pub fn kept_blocks(&self) -> u32 {
        self.pools.kept()
    }

    /// From now on notes which blocks enter and leave the prefix cache, for [`Engine::take_cache_changes`].
    pub fn note_cache_changes(&mut self) {
        self.pools.note_changes();
    }

    /// Passes on, in order, which blocks entered and left the prefix cache since the last call.
    pub fn take_cache_changes(&mut self) -> impl Iterator<Item = Cached> {
        self.pools.take_changes()
    }

    /// From now on notes which tokens sequences that end or are preempted leave in the prefix cache, for [`Engine::take_ended`]; and asks for the KV
    /// of those that come back ([`Engine::take_returning`]).
    pub fn note_ended(&mut self) {
        self.ended.get_or_insert_default();
    }

    /// From now on prefixes that were fetched count as ended sequences, too: no prompt follows that would be noted.
    pub fn note_fetched(&mut self) {
        self.notes_fetched = true;
    }

    /// Passes on the tokens of sequences that ended or were preempted since the last call, as far as their KV was in the prefix cache then. Some are
    /// left out when there are many (I5). Whoever moves them sets the deadline.
    pub fn take_ended(&mut self) -> Vec<Exchange> {
        self.ended.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Passes on the tokens of sequences that could start now, and lack KV: of preempted ones that lack what they had, and of those for which there was no
    /// room to fetch their prefix when they came ([`Engine::asks_later`]). Each is asked for once: it waits for an
    /// [`Engine::fetch`] for its request that begins before the next plan, and is computed otherwise.
    pub fn take_returning(&mut self) -> Vec<Exchange> {
        std::mem::take(&mut self.returning)
    }

    /// Whether there are such sequences: the next plan may start them.
    pub fn is_asking(&self) -> bool {
        !self.returning.is_empty()
    }

    /// Names of the blocks in the prefix cache, in no order.
    pub fn cached_blocks(&self) -> impl Iterator<Item = BlockName> {
        self.pools.block_names()
    }

    /// Evicts from the prefix cache everything that no sequence uses.
    pub fn clear_cache(&mut self) -> Result<(), EngineError> {
        Ok(self.pools.clear_cache()?)
    }

    /// Times a sequence lost its blocks to one with an earlier turn.
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// No sequence is here and no block is owned. A drained worker must reach this state (I6).
    pub fn idle(&self) -> bool {
        self.sequences.is_empty() && self.counts().idle()
    }

    /// Removes a sequence from its list and frees or quarantines its blocks.
    pub(crate) fn remove(&mut self, seq: SeqId, doom: Doom) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&seq)?;
        self.parked -= u32::from(sequence.parked.is_some());
        let fence = doom == Doom::Quarantine && sequence.exposed();
        let leaves = matches!(sequence.phase, Phase::Running(_) | Phase::Held(_)) && !sequence.exchange;
        if sequence.unverified {
            sequence.computed = 0;
        }
        let disposed = match std::mem::replace(&mut sequence.phase, Phase::Waiting) {
            Phase::Waiting => {
                self.waiting.remove(&sequence.turn);
                Ok(None)
            }
            Phase::Receiving(lent) => {
                self.receiving.remove(&sequence.turn);
                if fence { self.pools.quarantine(lent).map(Some) } else { self.pools.reclaim(lent).map(|()| None) }
            }
            Phase::Running(mut tables) | Phase::Held(mut tables) => {
                self.running.retain(|other| *other != sequence.turn);
                let readers = match sequence.start == Start::ComputeAndHold {
                    true => Readers::Transfer,
                    false => Readers::Nobody,
                };
                let pools = &mut self.pools;
                let computed = &sequence.tokens[..sequence.computed as usize];
                pools.index(&mut tables, computed, readers, true).and_then(|()| match fence {
                    true => pools.quarantine_used(tables).map(Some),
                    false => pools.free(tables).map(|()| None),
                })
            }
        };
        match disposed {
            Ok(Some(quarantine)) => drop(self.quarantine.insert(seq, quarantine)),
            Ok(None) => {}
            Err(error) => drop(self.defect.get_or_insert(error)),
        }
        if leaves && let (Some(ended), Some(prefix)) = (&mut self.ended, sequence.prefix) {
            sequence.tokens.truncate(sequence.computed as usize + 1);
            let (request_id, tokens) = (sequence.request_id.clone(), std::mem::take(&mut sequence.tokens));
            // What still keeps it is the one who takes it.
            let left = Exchange { request_id, tokens, prefix, deadline: Time(0) };
            ended.extend((ended.len() < MOST_ENDED).then_some(left));
        }
        Some(sequence)
    }
}
