//! Admission: which waiting sequences start, given prefix hits, free blocks, and prefixes that are being computed right
//! now.
//!
//! Sequences start in the order of their turns. The first one that finds no room blocks those behind it, so that nobody
//! starves.
//!
//! A sequence may also wait for a leader: a running sequence that computes a prefix they share, which would otherwise
//! be computed twice. A sequence that waits for a leader does not block those behind it. It cannot starve:
//!
//! - It loses nothing to a leader with an earlier turn, which is served first anyway.
//! - It waits for a leader with a later turn only while that leader has a row in every step, and for at most as many
//!   steps in all as it has tokens.
//!
//! A sequence that was preempted asks for the KV that it had, where that is kept below the pool. It waits for the fetch that follows as for a leader.
//!
//! Sequences cannot wait in a circle either, because a leader is running or receiving its KV.
//!
//! A parked sequence waits until its owner lets it start, and does not block those behind it either. Its owner learns when
//! its turn is near, so that what it waits for can be there in time.
//!
//! A sequence that is to receive its KV also waits for a sequence with an earlier turn that receives most of what it
//! lacks: the same KV is handed over once. The wait ends with that handoff. If the handoff fails, the sequence waits
//! for no other one. If it succeeds, the sequence then lacks less than half of what it lacked before. A few missing
//! tokens are computed here, beside what runs: for a handoff the prefill side would compute again what is already here.

use std::ops::Bound;

use baton_kv_cache::{Hit, KvError, Need};
use baton_types::SeqId;

use crate::sequence::{Kept, Leader, Parked, Phase, Sequence, Turn};
use crate::{Engine, Event, Exchange, Order, Start, Time};

/// How long a parked sequence may wait after it was due, before those behind it become due in its place, in milliseconds: while there is something to
/// compute, and while there is nothing.
const DUE_WAIT_MS: u64 = 500;
const IDLE_WAIT_MS: u64 = 50;

/// What became of a waiting sequence that might start.
enum Outcome {
    /// `aged`: this start has aged another sequence, whose turn now comes before those of others.
    Started { aged: bool },
    /// Not now, usually because another sequence computes its prefix.
    Later,
    /// No room, so nobody behind it starts either.
    Full,
}

/// How a sequence starts.
pub(crate) struct Seating {
    /// What of it is in the prefix cache.
    pub hit: Hit,
    start: Start,
    /// The blocks that it takes.
    pub need: Need,
}

impl Engine {
    /// Starts waiting sequences in order while there is a place and room for all their tokens. Returns the first one that found no room.
    pub(crate) fn admit(&mut self, events: &mut Vec<Event>) -> Option<Turn> {
        let mut next = self.waiting.first().copied();
        while let Some(turn) = next
            && self.running() + self.receiving() < self.config.max_running
        {
            next = self.waiting.range((Bound::Excluded(turn), Bound::Unbounded)).next().copied();
            match self.start(turn.seq, events) {
                Outcome::Started { aged: true } => next = self.waiting.first().copied(),
                Outcome::Started { aged: false } | Outcome::Later => {}
                Outcome::Full => return Some(turn),
            }
        }
        None
    }

    /// Says of parked sequences that their turn is near: that little is left to compute before them, of sequences with an earlier turn. One that
    /// still waits a while after that counts no longer as computed before others: what it lacks may be long in coming.
    pub(crate) fn announce(&mut self, now: Time, events: &mut Vec<Event>) {
        if self.parked == 0 {
            return;
        }
        let lacks = |sequence: &Sequence| sequence.to_compute().map_or(0, |range| range.len() as u64);
        let free = |turn: &&Turn| self.sequences.get(&turn.seq).is_some_and(|s| s.parked.is_none() && lacks(s) > 0);
        let busy = self.running.iter().chain(&self.waiting).any(|turn| free(&turn));
        let wait = if busy { DUE_WAIT_MS } else { IDLE_WAIT_MS };
        let (mut before, mut running) = (0, self.running.iter().peekable());
        for turn in &self.waiting {
            while let Some(earlier) = running.next_if(|earlier| *earlier < turn) {
                before += self.sequences.get(&earlier.seq).map_or(0, lacks);
            }
            if before > u64::from(self.config.reserve_ahead) {
                return;
            }
            let Some(sequence) = self.sequences.get_mut(&turn.seq) else { continue };
            let since = match &mut sequence.parked {
                Some(parked) if parked.due.is_none() => {
                    events.push(Event::Due { seq: turn.seq });
                    *parked.due.insert(now)
                }
                Some(Parked { due: Some(due) }) => *due,
                _ => now,
            };
            if now < since.after_ms(wait) {
                before += lacks(sequence);
            }
        }
    }

    fn start(&mut self, seq: SeqId, events: &mut Vec<Event>) -> Outcome {
        let Some(sequence) = self.sequences.get(&seq).filter(|s| s.parked.is_none()) else { return Outcome::Later };
        let Seating { mut hit, start, need } = match self.seating(sequence) {
            Ok(seating) => seating,
            Err(leader) => return self.defer(seq, leader),
        };
        // One spare block for each running sequence, so that the new one is not preempted at once.
        let spare = self.running.len() as u32;
        if self.pools.fits(&hit, need, spare).is_err() {
            hit = hit.without_copy();
            if self.pools.fits(&hit, need, spare).is_err() {
                return Outcome::Full;
            }
        }
        // Until the next plan nobody takes its room.
        if self.asks(seq, hit.tokens()) {
            return Outcome::Full;
        }
        self.seat(seq, start, &hit, need, events)
    }

    /// Asks for what the prefix cache lacks of what a preempted sequence had, or of a prefix for which there was no room, once.
    fn asks(&mut self, seq: SeqId, hit: u32) -> bool {
        let size = self.pools.block_size();
        let Some(s) = self.sequences.get_mut(&seq).filter(|s| s.kept == Kept::Perhaps) else { return false };
        s.kept = Kept::Asked;
        let Some(prefix) = s.prefix else { return false };
        let wanted = Exchange { request_id: s.request_id.clone(), tokens: s.tokens.clone(), prefix, deadline: Time(0) };
        let lacks = wanted.moves(size) > hit;
        self.returning.extend(lacks.then_some(wanted));
        lacks
    }

    /// How a waiting sequence would start now. An error: it waits for this leader.
    pub(crate) fn seating(&self, sequence: &Sequence) -> Result<Seating, Leader> {
        if let Some(leader) = self.awaited(sequence) {
            return Err(leader);
        }
        let mut hit = self.hit(sequence);
        let start = self.start_of(sequence, &hit);
        if let Some(leader) = self.leader(sequence, start, hit.tokens()) {
            return Err(leader);
        }
        // A peer writes whole blocks, so a partial block is not shared by copying.
        if start == Start::Receive {
            hit = hit.without_copy();
        }
        Ok(Seating { hit, start, need: self.need(start, sequence.len()) })
    }

    /// Blocks that a sequence takes when it starts.
    ///
    /// A layer group with a window needs only window and chunk at a time, and takes later blocks as the window passes
    /// earlier ones. A sequence whose blocks a transfer reads cannot be preempted. So only one such sequence at a time
    /// may still have blocks to take: two could wait for each other.
    pub(crate) fn need(&self, start: Start, tokens: u32) -> Need {
        let chunk = self.config.chunk;
        let growing = |turn: &Turn| {
            let other = self.sequences.get(&turn.seq);
            other.is_some_and(|s| s.start == Start::ComputeAndHold && s.covered() < s.len())
        };
        match start {
            Start::Receive => Need::received(tokens),
            Start::ComputeAndHold if self.running.iter().any(growing) => Need::whole(tokens),
            Start::Compute | Start::ComputeAndHold => Need::chunks(tokens, chunk),
        }
    }

    /// Looks up the sequence's tokens in the prefix cache.
    pub(crate) fn hit(&self, sequence: &Sequence) -> Hit {
        let Some(prefix) = sequence.prefix else { return Hit::default() };
        self.pools.lookup(&prefix, &sequence.tokens)
    }

    /// How a sequence that begins with `hit` starts.
    fn start_of(&self, sequence: &Sequence, hit: &Hit) -> Start {
        match sequence.start {
            Start::Receive if self.computes_here(hit.tokens(), sequence.len() - hit.tokens()) => Start::Compute,
            start => start,
        }
    }

    /// Whether a sequence that is to receive its KV computes the `lacks` missing tokens here instead. They must be no
    /// more than the `has` tokens that are here. Together with the tokens that running prompts lack, they must fit in
    /// `local_prefill_tokens`, so that decodes are not held up. A single missing token needs only to fit alone: it
    /// costs a step no more than a decode row.
    fn computes_here(&self, has: u32, lacks: u32) -> bool {
        let most = self.config.local_prefill_tokens;
        let beside = || {
            let running = self.running.iter().filter_map(|turn| self.sequences.get(&turn.seq));
            running.map(|other| u64::from(other.remaining() - 1)).sum::<u64>()
        };
        lacks <= most && (lacks == 1 || lacks <= has && beside() + u64::from(lacks) <= u64::from(most))
    }

    fn seat(&mut self, seq: SeqId, start: Start, hit: &Hit, need: Need, events: &mut Vec<Event>) -> Outcome {
        let Some(s) = self.sequences.get_mut(&seq) else { return Outcome::Later };
        let prefix = s.prefix;
        let taken = match start {
            Start::Receive => self.pools.lend(hit, prefix, s.len()).map(Phase::Receiving),
            _ => self.pools.seat(hit, prefix, need).map(Phase::Running),
        };
        let phase = match taken {
            Ok(phase) => phase,
            Err(error) => return self.broken(error),
        };
        s.start = start;
        let first = self.found(seq, hit.tokens());
        let Some(s) = self.sequences.get_mut(&seq) else { return Outcome::Later };
        if start == Start::Receive {
            events.push(Event::Reserved { seq, request_id: s.request_id.clone(), cached_tokens: hit.tokens() });
        } else {
            s.computed = hit.tokens();
        }
        self.leave_queue(seq, phase);
        Outcome::Started { aged: first && self.overtake(seq) }
    }

    /// Counts what a sequence that starts has found of its prompt. Whether this is its first start.
    pub(crate) fn found(&mut self, seq: SeqId, tokens: u32) -> bool {
        let Some(s) = self.sequences.get_mut(&seq).filter(|s| s.cached.is_none()) else { return false };
        let of_prompt = tokens.min(s.prompt_tokens);
        s.cached = Some(of_prompt);
        self.hit_tokens += u64::from(of_prompt);
        true
    }

    pub(crate) fn leave_queue(&mut self, seq: SeqId, phase: Phase) {
        let Some(s) = self.sequences.get_mut(&seq) else { return };
        (s.fresh, s.sealed, s.last_step, s.leader) = (true, false, self.steps, None);
        let turn = s.turn;
        self.waiting.remove(&turn);
        match phase {
            Phase::Receiving(_) => drop(self.receiving.insert(turn)),
            _ => self.running.insert(self.running.partition_point(|other| *other < turn), turn),
        }
        s.phase = phase;
    }

    /// Called when `seq` has started for the first time. It has overtaken each sequence of its class that was submitted
    /// earlier, has a later turn, and still waits or computes its prompt. Sequences that have been overtaken often enough age.
    /// Returns whether any did.
    pub(crate) fn overtake(&mut self, seq: SeqId) -> bool {
        let most = match self.config.order {
            Order::Fcfs => 0,
            Order::ShortestFirst | Order::Priority => self.config.overtakes,
        };
        let Some(turn) = self.sequences.get(&seq).map(|s| s.turn).filter(|_| most > 0) else { return false };
        let mut aged = Vec::new();
        for (_, other) in self.sequences.range_mut(..seq) {
            let served = match other.phase {
                Phase::Waiting => false,
                Phase::Running(_) => other.remaining() <= 1,
                Phase::Receiving(_) | Phase::Held(_) => true,
            };
            if !served && other.turn > turn && other.turn.class() == turn.class() {
                other.overtaken += 1;
                aged.extend((other.overtaken >= most).then_some(other.turn));
            }
        }
        aged.iter().for_each(|turn| self.set_turn(*turn, turn.aged()));
        !aged.is_empty()
    }

    /// Gives a sequence another turn, in whichever list it is.
    pub(crate) fn set_turn(&mut self, old: Turn, new: Turn) {
        if let Some(sequence) = self.sequences.get_mut(&old.seq) {
            sequence.turn = new;
        }
        for turns in [&mut self.waiting, &mut self.receiving] {
            if turns.remove(&old) {
                turns.insert(new);
            }
        }
        if let Ok(at) = self.running.binary_search(&old) {
            self.running.remove(at);
            let at = self.running.partition_point(|other| *other < new);
            self.running.insert(at, new);
        }
    }

    fn broken(&mut self, error: KvError) -> Outcome {
        self.defect.get_or_insert(error);
        Outcome::Full
    }

    fn defer(&mut self, seq: SeqId, leader: Leader) -> Outcome {
        let turn = self.sequences.get(&leader.seq).map(|s| s.turn);
        if let Some(sequence) = self.sequences.get_mut(&seq) {
            sequence.leader = Some(leader);
            sequence.waited += u32::from(turn > Some(sequence.turn));
        }
        Outcome::Later
    }

    /// The leader that the sequence waits for already, if that one has not yet computed enough and is still worth
    /// waiting for.
    fn awaited(&self, sequence: &Sequence) -> Option<Leader> {
        let on_its_way = |leader: &Leader| {
            self.sequences.get(&leader.seq).is_some_and(|s| self.leads(s, sequence) && s.computed < leader.until)
        };
        sequence.leader.filter(on_its_way)
    }

    /// Whether `other` is worth waiting for: it computes or receives a prompt, and its blocks go into the prefix index.
    fn leads(&self, other: &Sequence, sequence: &Sequence) -> bool {
        let earlier = other.turn < sequence.turn;
        match &other.phase {
            Phase::Running(tables) => {
                let advances = other.last_step == self.steps && sequence.waited < sequence.len();
                !other.sealed && tables.indexed() && (earlier || advances)
            }
            // I5: not for a fetch that began after it came, but for one that it has asked for. Others may follow that one, and none has to succeed.
            Phase::Receiving(lent) if other.exchange => {
                let asked = sequence.kept == Kept::Asked && other.request_id == sequence.request_id;
                lent.indexed() && (asked || other.turn.seq < sequence.turn.seq)
            }
            Phase::Receiving(lent) => sequence.start == Start::Receive && lent.indexed() && earlier,
            Phase::Waiting | Phase::Held(_) => false,
        }
    }

    /// The best leader for `sequence`: the one that will provide the longest prefix beyond the `hit` tokens found
    /// already.
    fn leader(&self, sequence: &Sequence, start: Start, hit: u32) -> Option<Leader> {
        let prefix = sequence.prefix?;
        let receives = sequence.start == Start::Receive;
        if receives && sequence.leader.is_some_and(|leader| hit < leader.shared) {
            // The handoff it waited for has failed: it waits for no other.
            return None;
        }
        let size = self.pools.block_size();
        let mut best = (hit, None);
        for turn in self.running.iter().chain(&self.receiving) {
            let Some(other) = self.sequences.get(&turn.seq) else { continue };
            // A sequence that computes its missing tokens here does not wait for a handoff.
            if matches!(other.phase, Phase::Receiving(_)) && !other.exchange && start != Start::Receive {
                continue;
            }
            if !self.leads(other, sequence) || other.prefix.is_none_or(|theirs| theirs.seed != prefix.seed) {
                continue;
            }
            // A block's name covers all tokens before it too, so binary search finds the first that differs.
            let (ours, theirs) = (&sequence.names, &other.names);
            let blocks = partition(ours.len().min(theirs.len()), |at| ours[at] == theirs[at]) as u32;
            let next = (blocks * size) as usize;
            let pairs = sequence.tokens[next..].iter().zip(&other.tokens[next..]).take(size as usize);
            // Of what is fetched, only whole blocks come.
            let pairs = pairs.take(if other.exchange { 0 } else { size as usize });
            let common = pairs.take_while(|(ours, theirs)| ours == theirs).count() as u32;
            let shared = (blocks * size + common).min(sequence.len() - 1);
            let until = match &other.phase {
                Phase::Receiving(lent) if !self.pools.will_hold(lent, shared) => continue,
                Phase::Receiving(_) => other.len(),
                // The block in which they part can be copied once it is full or the leader's prompt ends.
                _ if common > 0 => ((blocks + 1) * size).min(other.len()),
                _ => blocks * size,
            };
            // A prefill worker could begin at once with what is missing, so only most of it is worth the wait.
            let worth = !receives || shared.saturating_sub(hit) > sequence.len() - shared;
            if shared > best.0 && other.computed < until && worth {
                best = (shared, Some(Leader { seq: turn.seq, until, shared }));
            }
        }
        best.1
    }
}

/// The first index in `0..len` for which `holds` is false. `holds` must be true before that index and false from there
/// on.
pub(crate) fn partition(len: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, len);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}
