//! Planning a step: who expires, who keeps or loses its blocks, and which tokens are computed.
//!
//! Why every sequence ends:
//!
//! - A sequence takes blocks for all its tokens when it starts, so it can always compute the next one. After that it
//!   takes one block at a time, from the prefix cache when no block is free.
//! - In layer groups with a window it takes only what window and next chunk need. It takes more as the window passes
//!   blocks and gives them back. Others may share a block that is given back, so possibly none comes free.
//! - An interactive sequence that waits for a place or blocks takes those of batch sequences ([`crate::class`]).
//! - When there is no block, the preemptible sequence with the last turn gives up its own and waits in its old place in
//!   the queue. What it had computed stays cached as long as nobody needs the room.
//! - So the first preemptible sequence always advances, or it is alone and waits for blocks that are lent, held or in
//!   quarantine.
//! - A lent or held sequence gives its blocks back without taking further ones, except for one held sequence at a time,
//!   and that one waits for no other held sequence. Lent and held blocks come back within the time limits of a handoff.
//! - Blocks in quarantine have no time limit while a peer that may write to them stands still. So nobody waits long for
//!   those alone.
//!
//! A prompt never holds up decodes: decode rows come first, and prompts share the rest of the token budget.
//!
//! A step may be planned ahead, while another is in flight. The plan assumes that the step in flight succeeds and that
//! no answer ends with it except by its length. If an answer ends in another way, its row in the planned step is
//! computed in vain, and the token is not delivered. Planning ahead never takes blocks back, and never plans a row whose
//! sampling must look at a token that is not known yet. If any sequence needs one of these, all wait for the step in
//! flight, so that nobody advances at another's cost.

use baton_kv_cache::{KvError, Readers, Tables};
use baton_types::SeqId;

use crate::chunk::chunk_at;
use crate::engine::MOST_ENDED;
use crate::sequence::{Doom, Kept, Phase, Sequence, Turn};
use crate::share::Shares;
use crate::{Engine, EngineConfig, Event, Order, SequenceError, Start, Step, StepRow, Time};

/// Most steps that are planned and not applied: the one being computed and the one launched behind it.
const MOST_IN_FLIGHT: u32 = 2;

/// How long a sequence waits for blocks in quarantine when nothing else can give it any, in milliseconds (I5).
const QUARANTINE_WAIT_MS: u64 = 2_000;

/// The shortest chunk of a long prompt is a whole one divided by this: shorter ones lose speed, since each reads all of the context again.
const LEAST_CHUNK: u32 = 4;

/// Whose prompts are not computed in a step though they are first, because they do not fit as a whole.
#[derive(Clone, Copy)]
enum PassedOver {
    Nobody,
    Only(u64),
    Several,
}

impl PassedOver {
    fn add(&mut self, tenant: u64) {
        *self = match *self {
            PassedOver::Nobody => PassedOver::Only(tenant),
            PassedOver::Only(known) if known == tenant => PassedOver::Only(tenant),
            _ => PassedOver::Several,
        };
    }

    /// Whether a later prompt of this tenant may be computed before theirs.
    fn lets(self, tenant: u64) -> bool {
        match self {
            PassedOver::Nobody => true,
            PassedOver::Only(known) => known == tenant,
            PassedOver::Several => false,
        }
    }
}

impl Engine {
    /// Plans the next step; `None` when there is nothing to compute now. Also ends sequences whose deadline has passed,
    /// and lends blocks to those that wait for a peer. `events` reports both.
    ///
    /// While one step is in flight, another is planned ahead unless something must wait for the first. While two are in
    /// flight, none is planned.
    pub fn plan(&mut self, now: Time, events: &mut Vec<Event>) -> Option<Step> {
        if self.in_flight >= MOST_IN_FLIGHT || self.joined {
            return None;
        }
        self.pools.advance(now);
        self.expire(now, events);
        self.announce(now, events);
        if self.waits() || !self.cover() || !self.make_way() {
            return None;
        }
        let mut rows = self.spare_steps.pop().unwrap_or_default();
        rows.clear();
        self.plan_decodes(&mut rows);
        let full = self.admit(events);
        self.plan_chunks(&mut rows);
        let behind = if rows.is_empty() { self.join(full, &mut rows) } else { None };
        if rows.is_empty() {
            debug_assert_eq!(self.check(), Ok(()), "I6");
            if self.in_flight == 0 {
                self.give_up_starved(now, events);
            }
            self.spare_steps.push(rows);
            return None;
        }
        let mut given = 0;
        for row in &rows {
            given += row.gives();
            if let Some(sequence) = self.sequences.get_mut(&row.seq).filter(|_| row.samples) {
                sequence.flight.place = given - 1;
            }
        }
        self.starved = None;
        self.joined = behind.is_some();
        self.in_flight += 1;
        self.steps += 1;
        debug_assert_eq!(self.check(), Ok(()), "I6");
        Some(Step { rows, number: self.steps, behind })
    }

    /// Whether the next step can only be planned when the one in flight is over.
    fn waits(&self) -> bool {
        let mut running = self.running.iter().filter_map(|turn| self.sequences.get(&turn.seq));
        self.in_flight > 0 && running.any(Sequence::waits_for_tokens)
    }

    fn expire(&mut self, now: Time, events: &mut Vec<Event>) {
        if self.earliest_deadline.is_none_or(|earliest| now < earliest) {
            return;
        }
        let due = |deadline: Option<Time>| deadline.is_some_and(|at| at <= now);
        let lives = |s: &Sequence| s.doomed.is_none();
        let expired = self.sequences.iter().filter(|(_, s)| lives(s) && due(s.deadline));
        let expired: Vec<SeqId> = expired.map(|(id, _)| *id).collect();
        for seq in expired {
            let state = self.sequences.get(&seq).map_or("gone", |s| s.phase.name());
            self.end_failed(seq, SequenceError::Deadline { state }, events);
        }
        self.earliest_deadline = self.sequences.values().filter(|s| lives(s)).filter_map(|s| s.deadline).min();
    }

    /// Called when nothing can be computed. The first in turn fails if the only blocks that may yet come free are in
    /// quarantine, and have been for [`QUARANTINE_WAIT_MS`]. Other workers may have room for it, and a shorter sequence
    /// behind it may find room here.
    fn give_up_starved(&mut self, now: Time, events: &mut Vec<Event>) {
        let parked = |turn: &Turn| self.sequences.get(&turn.seq).is_some_and(|s| s.parked.is_some());
        let first = self.running.first().or_else(|| self.waiting.iter().find(|turn| !parked(turn)));
        let first = first.map(|turn| turn.seq);
        let comes_back = |s: &Sequence| matches!(s.phase, Phase::Receiving(_) | Phase::Held(_));
        let Some(first) = first.filter(|_| !self.quarantine.is_empty() && !self.sequences.values().any(comes_back))
        else {
            return self.starved = None;
        };
        if *self.starved.get_or_insert(now.after_ms(QUARANTINE_WAIT_MS)) <= now {
            let blocks = self.counts().quarantined;
            self.end_failed(first, SequenceError::Quarantined { blocks }, events);
        }
    }

    /// Ends a sequence with an error. Blocks that others may reach are quarantined, since nobody has fenced them yet
    /// (I3).
    pub(crate) fn end_failed(&mut self, seq: SeqId, error: SequenceError, events: &mut Vec<Event>) {
        let Some(sequence) = self.sequences.get(&seq) else { return };
        let (request_id, quarantined) = (sequence.request_id.clone(), sequence.exposed());
        self.end(seq, if quarantined { Doom::Quarantine } else { Doom::Free });
        events.push(Event::Failed { seq, request_id, error, quarantined });
    }

    /// Gives the running sequences, in turn, blocks for what they compute next. This may preempt some of them. While a
    /// step is in flight none is preempted: returns false if one lacks blocks then.
    fn cover(&mut self) -> bool {
        let mut next = self.running.first().copied();
        while let Some(turn) = next {
            if !self.grow(turn.seq) {
                return false;
            }
            next = self.running.get(self.running.partition_point(|other| *other <= turn)).copied();
        }
        true
    }

    /// One row for each running sequence that lacks one token, in the order of turns.
    fn plan_decodes(&mut self, rows: &mut Vec<StepRow>) {
        for at in 0..self.running.len() {
            let seq = self.running[at].seq;
            if self.sequences.get(&seq).is_some_and(|s| s.lacks() == 1 && s.covered() > s.next_start()) {
                self.push_row(seq, 1, rows);
            }
        }
    }

    /// Adds chunks of running sequences that lack more. They are chosen in this order:
    ///
    /// 1. the first in turn, so that one long prompt is computed at a time;
    /// 2. those that can be finished in this step;
    /// 3. the others, in the order of turns.
    ///
    /// Batch sequences get what interactive ones leave, in the same order.
    ///
    /// Where tenants share ([`Order::Priority`]), a short prompt takes the place of a long one of its own tenant only: it would
    /// have more than its share otherwise.
    ///
    /// Together they get at most [`crate::EngineConfig::pack_tokens`], but the first always gets its whole chunk. If
    /// that does not finish it, others may finish beside it up to the token budget: they delay it little, while waiting
    /// for it would delay them by all it lacks.
    ///
    /// A chunk of a long prompt is as long as makes it take about the time of one at a prompt's beginning ([`chunk_at`]), but at least
    /// `pack_tokens` and a [`LEAST_CHUNK`]th of a whole one.
    fn plan_chunks(&mut self, rows: &mut Vec<StepRow>) {
        let budget = self.config.token_budget.saturating_sub(rows.iter().map(|row| row.len).sum());
        let decodes = rows.len();
        // Prompt tokens in the step so far; whether the first prompt goes on after it (`None` before there is a first).
        let (mut packed, mut goes_on) = (0, None);
        let shares = self.config.order == Order::Priority;
        let (batch, all) = (self.running.partition_point(|turn| !turn.is_batch()), self.running.len());
        for (class, whole) in [(0..batch, true), (0..batch, false), (batch..all, true), (batch..all, false)] {
            let mut passed_over = PassedOver::Nobody;
            for at in class {
                let seq = self.running[at].seq;
                let Some(sequence) = self.sequences.get(&seq) else { continue };
                let most = match goes_on {
                    None => budget,
                    Some(true) if whole => budget,
                    Some(_) => budget.min(self.config.pack_tokens),
                };
                // Skips a sequence that has a row already, or has no blocks now.
                let seated = sequence.last_step > self.steps;
                let remaining = sequence.lacks();
                let len = if seated { 0 } else { remaining.min(self.chunk_of(sequence)) };
                let len = len.min(most.saturating_sub(packed));
                if len == 0 || sequence.covered() < sequence.next_start() + len {
                    continue;
                }
                let ends = len == remaining && (!shares || passed_over.lets(sequence.tenant));
                if goes_on.is_none() || !whole || ends {
                    self.push_row(seq, len, rows);
                    packed += len;
                } else {
                    passed_over.add(sequence.tenant);
                }
                goes_on.get_or_insert(len < remaining);
            }
        }
        // Chunks stand in the order of turns, however the budget was given out.
        rows[decodes..].sort_unstable_by_key(|row| self.sequences.get(&row.seq).map(|s| s.turn));
    }

    /// Most tokens of a sequence in the next step. Where it is the only one, nobody waits for a step, and its chunks are whole. What one chunk
    /// computes behind a cached prefix is not split. Chunks of batch work, and where tenants share, are the shortest: who comes next, and is to go
    /// first, waits for the step that is being computed.
    pub(crate) fn chunk_of(&self, sequence: &Sequence) -> u32 {
        let EngineConfig { chunk, pack_tokens, .. } = self.config;
        let least = pack_tokens.max(chunk / LEAST_CHUNK).min(chunk);
        let alone = self.running.len() + self.waiting.len() + self.receiving.len() == 1;
        if alone || sequence.fresh && sequence.lacks() <= chunk {
            return chunk;
        }
        if sequence.turn.is_batch() || self.shares.iter().any(Shares::are_several) {
            return least;
        }
        chunk_at(sequence.next_start(), chunk, least, self.pairs_per_token)
    }

    pub(crate) fn push_row(&mut self, seq: SeqId, len: u32, rows: &mut Vec<StepRow>) {
        if let Some(s) = self.sequences.get_mut(&seq) {
            s.last_step = self.steps + 1;
            let start = s.next_start();
            let since = if std::mem::take(&mut s.fresh) { 0 } else { start };
            let (samples, held) = (len == s.lacks(), s.start == Start::ComputeAndHold);
            let follows = (start + len > s.len()).then_some(s.flight.place);
            rows.push(StepRow {
                seq,
                start,
                len,
                samples,
                held,
                since,
                index: s.next_index() + s.flight.chosen,
                scores: s.scores(start, len),
                follows,
            });
            s.flight.rows += 1;
            s.flight.tokens += len;
            s.flight.chosen += u32::from(samples);
        }
    }

    /// Makes the sequence's tables cover what it computes next. Where blocks are missing, the last in turn is
    /// preempted, possibly this sequence itself. When nobody can be preempted, the sequence waits. While a step is in
    /// flight nobody is preempted: returns false if the sequence lacks blocks then.
    fn grow(&mut self, seq: SeqId) -> bool {
        loop {
            let Some(sequence) = self.sequences.get_mut(&seq) else { return true };
            let tokens = sequence.next_start() + sequence.lacks().min(self.config.chunk);
            let Phase::Running(tables) = &mut sequence.phase else { return true };
            match self.pools.grow(tables, tokens) {
                Ok(()) => return true,
                Err(KvError::OutOfBlocks { .. }) if self.in_flight > 0 => return false,
                Err(KvError::OutOfBlocks { .. }) => {}
                Err(error) => {
                    self.defect.get_or_insert(error);
                    return true;
                }
            }
            let preemptible = |id: &SeqId| self.sequences.get(id).is_some_and(|s| s.preemptible());
            let mut candidates = self.running.iter().rev().map(|turn| turn.seq).filter(preemptible);
            let (last, other) = (candidates.next(), candidates.next());
            match last {
                Some(victim) if victim != seq || other.is_some() => self.preempt(victim),
                _ => return true,
            }
        }
    }

    /// Takes a sequence's blocks. It keeps its tokens and waits in its place in the queue. Later its KV comes back from where it was kept below the
    /// pool, or is computed again (I1), as far as it is not in the prefix cache by then.
    pub(crate) fn preempt(&mut self, seq: SeqId) {
        let Some(sequence) = self.sequences.get_mut(&seq) else { return };
        let (turn, computed) = (sequence.turn, std::mem::take(&mut sequence.computed));
        if let Phase::Running(mut tables) = std::mem::replace(&mut sequence.phase, Phase::Waiting) {
            let tokens = &sequence.tokens[..computed as usize];
            let indexed = self.pools.index(&mut tables, tokens, Readers::Nobody, true);
            // Those that run may need a block each before the others are kept.
            let size = self.pools.block_size();
            let kept = computed.saturating_sub(self.running.len() as u32 * size);
            if let Some(ended) = self.ended.as_mut().filter(|ended| ended.len() < MOST_ENDED)
                && let Some(left) = sequence.leaves(kept)
            {
                sequence.names = left.prefix.root.chain(&sequence.tokens, size).collect();
                sequence.kept = Kept::Perhaps;
                ended.push(left);
            }
            if let Err(error) = indexed.and_then(|()| self.pools.free(tables)) {
                self.defect.get_or_insert(error);
            }
        }
        self.running.retain(|other| *other != turn);
        self.waiting.insert(turn);
        self.preemptions += 1;
    }

    /// After a step: releases the sources of its copies, indexes full blocks, and gives back blocks that windows have
    /// passed.
    pub(crate) fn settle(&mut self, seq: SeqId, sampled: bool) {
        let Some(sequence) = self.sequences.get_mut(&seq) else { return };
        let readers = match (sequence.start == Start::ComputeAndHold, sequence.in_step()) {
            (true, _) => Readers::Transfer,
            (false, true) => Readers::Step,
            (false, false) => Readers::Nobody,
        };
        let seal = sampled && !sequence.sealed;
        sequence.sealed |= sampled;
        let computed = sequence.computed;
        let Phase::Running(tables) = &mut sequence.phase else { return };
        let pools = &mut self.pools;
        let settle = |tables: &mut Tables, tokens: &[u32]| {
            pools.copied(tables)?;
            pools.index(tables, tokens, readers, seal)?;
            // Blocks that no later token sees do not go to a peer either. A step in flight begins with the first later
            // token (I3).
            pools.trim(tables, computed)
        };
        if let Err(error) = { settle }(tables, &sequence.tokens[..computed as usize]) {
            self.defect.get_or_insert(error);
        }
    }
}
