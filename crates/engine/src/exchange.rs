//! Prefixes that move between workers' prefix caches, outside of any request.
//!
//! One worker *serves* blocks that it has, another *fetches* them. Neither computes anything, and both begin at once or not at all: a fetch saves
//! work, so it is not worth a place in the queue. A prompt that comes while its prefix is being fetched waits for the fetch, as it would for a
//! sequence that computes that prefix. If the fetch fails, the prompt is computed.

use std::collections::HashMap;

use baton_kv_cache::{KvError, Need, Prefix, Readers};
use baton_types::{BlockId, RequestId, SamplingParams, SeqId};

use crate::admit::partition;
use crate::config::AGED;
use crate::engine::MOST_ENDED;
use crate::sequence::{Kept, Phase, Sequence, Turn};
use crate::{Engine, EngineError, Event, NewSequence, Share, Start, Time};

/// The leading blocks of a prompt, to be served or fetched.
#[derive(Clone, PartialEq, Debug)]
pub struct Exchange {
    /// The id of the request that they are moved for.
    pub request_id: RequestId,
    /// The prompt's tokens. Their full blocks move, but for a last block that would leave no token after it.
    pub tokens: Vec<u32>,
    /// Their key in the prefix cache.
    pub prefix: Prefix,
    /// When it fails if it has not ended.
    pub deadline: Time,
}

/// What a block in the pool was verified with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Digest {
    /// Layer group.
    pub group: usize,
    /// The block.
    pub block: BlockId,
    /// The sum of the digests of its layers, as at a handoff.
    pub of: u64,
}

impl Exchange {
    /// Tokens of the blocks that move.
    pub fn moves(&self, block_size: u32) -> u32 {
        (self.tokens.len().saturating_sub(1) as u32) / block_size * block_size
    }

    /// The sequence that owns the blocks while they move: their tokens and one more, as of a prompt that would be computed from there.
    fn sequence(self, seq: SeqId, start: Start, block_size: u32) -> Sequence {
        let moves = self.moves(block_size) as usize;
        let Exchange { request_id, mut tokens, prefix, deadline } = self;
        tokens.truncate(moves + 1);
        let new = NewSequence {
            request_id,
            prompt_tokens: tokens.len() as u32,
            tokens,
            params: SamplingParams::default(),
            start,
            deadline: Some(deadline),
            prefix: Some(prefix),
            priority: 0,
            share: Share::default(),
            parked: false,
        };
        Sequence { exchange: true, ..Sequence::new(new, Turn { turn: AGED, tag: 0, seq }, block_size) }
    }
}

impl Engine {
    /// Lends blocks to a peer that serves a prefix, from the first block that is not here. [`Event::Reserved`] follows, and the sequence ends with
    /// [`Engine::fetched`], an abort or its deadline.
    ///
    /// # Errors
    /// [`EngineError::Here`]: all of it is here or on its way, or the prefix cache is off. [`EngineError::NoRoom`]: there are no blocks or no place for it now.
    pub fn fetch(&mut self, new: Exchange, events: &mut Vec<Event>) -> Result<SeqId, EngineError> {
        let moves = new.moves(self.block_size());
        let hit = self.pools.lookup(&new.prefix, &new.tokens).without_copy();
        let here = hit.tokens().min(moves);
        if here == moves || self.comes(&new.prefix, &new.tokens[..moves as usize]) {
            return Err(EngineError::Here { tokens: moves });
        }
        let need = Need::received(moves);
        let full = self.running() + self.receiving() >= self.config.max_running;
        if full || self.pools.fits(&hit, need, self.running()).is_err() {
            return Err(EngineError::NoRoom { tokens: moves - here });
        }
        let lent = self.pools.lend(&hit, Some(new.prefix), moves)?;
        if !lent.indexed() {
            self.pools.reclaim(lent)?;
            return Err(EngineError::Here { tokens: moves });
        }
        let seq = self.take_id();
        let mut sequence = new.sequence(seq, Start::Receive, self.block_size());
        sequence.phase = Phase::Receiving(lent);
        events.push(Event::Reserved { seq, request_id: sequence.request_id.clone(), cached_tokens: here });
        self.receiving.insert(sequence.turn);
        self.insert_exchange(seq, sequence);
        Ok(seq)
    }

    /// Whether there is room for a fetch beside all that the queue needs. Where there is not, it might evict what a prompt before it finds here, or
    /// what was fetched for one, and be evicted itself before its own prompt starts. What a prompt has asked for itself has the room that it starts with
    /// ([`Engine::take_returning`]).
    pub fn fits_behind_queue(&self, new: &Exchange) -> bool {
        let queue = || self.waiting.iter().filter_map(|turn| self.sequences.get(&turn.seq));
        if queue().any(|s| s.kept == Kept::Asked && s.request_id == new.request_id) {
            return true;
        }
        let fetches = self.receiving.iter().filter_map(|turn| self.sequences.get(&turn.seq)).filter(|s| s.exchange);
        let comes: HashMap<&RequestId, u32> = fetches.map(|fetch| (&fetch.request_id, fetch.len() - 1)).collect();
        let size = self.block_size();
        let (mut taken, mut before) = (vec![self.running(); self.pools.groups()], &[][..]);
        for sequence in queue() {
            let names = &sequence.names[..];
            // What two begin with counts once, and what is lent to a fetch is taken already.
            let common = partition(names.len().min(before.len()), |at| names[at] == before[at]) as u32;
            let apart = comes.get(&sequence.request_id).map_or(0, |tokens| tokens / size).max(common);
            let need = self.need(sequence.start, sequence.len());
            (0..).zip(&mut taken).for_each(|(group, sum)| *sum += self.pools.takes(group, need, apart));
            before = names;
        }
        let hit = self.pools.lookup(&new.prefix, &new.tokens).without_copy();
        self.pools.fits_beside(&hit, Need::received(new.moves(size)), |group| taken[group]).is_ok()
    }

    /// Whether a fetch of these tokens is under way, or of more that begins with them.
    fn comes(&self, prefix: &Prefix, tokens: &[u32]) -> bool {
        let fetches = self.receiving.iter().filter_map(|turn| self.sequences.get(&turn.seq)).filter(|s| s.exchange);
        let same = |s: &Sequence| s.prefix.is_some_and(|theirs| theirs.seed == prefix.seed);
        { fetches }.any(|fetch| same(fetch) && fetch.tokens.starts_with(tokens))
    }

    /// A fetch is complete and verified (I2), and the peer's access to its blocks is over (I3): they are in the prefix cache now. `digests` are
    /// those it was verified with, as far as they are known: [`Engine::digest`] returns them. Returns the tokens of the prefix that is here.
    pub fn fetched(&mut self, seq: SeqId, digests: &[Digest]) -> Result<u32, EngineError> {
        let sequence = self.sequences.get_mut(&seq).ok_or(EngineError::UnknownSequence(seq))?;
        let moved = sequence.len() - 1;
        let (operation, state) = ("take fetched KV for", sequence.phase.name());
        match std::mem::replace(&mut sequence.phase, Phase::Waiting) {
            Phase::Receiving(lent) if sequence.exchange => {
                let tokens = std::mem::take(&mut sequence.tokens);
                let (request_id, prefix) = (sequence.request_id.clone(), sequence.prefix.unwrap_or_default());
                self.receiving.remove(&sequence.turn);
                self.sequences.remove(&seq);
                let taken = self.take_fetched(lent, &tokens[..moved as usize]);
                taken.map_err(|error| self.defect.get_or_insert(error).clone())?;
                // Of a block that was here already, the digest is of no use.
                digests.iter().for_each(|digest| self.pools.vouch(digest.group, digest.block, digest.of));
                if let (true, Some(ended)) = (self.notes_fetched, &mut self.ended) {
                    let left = Exchange { request_id, tokens, prefix, deadline: Time(0) };
                    ended.extend((ended.len() < MOST_ENDED).then_some(left));
                }
                Ok(moved)
            }
            other => {
                sequence.phase = other;
                Err(EngineError::WrongState { seq, operation, state })
            }
        }
    }

    fn take_fetched(&mut self, lent: baton_kv_cache::LentTables, tokens: &[u32]) -> Result<(), KvError> {
        let mut tables = self.pools.accept(lent)?;
        self.pools.index(&mut tables, tokens, Readers::Nobody, false)?;
        self.pools.free(tables)
    }

    /// The digest that a block in the prefix cache was verified with when it came. `None`: it was computed here, or has left the cache.
    pub fn digest(&self, group: usize, block: BlockId) -> Option<u64> {
        self.pools.digest(group, block)
    }

    /// A block's bytes are not those of its [`Engine::digest`] any more (I2): nobody finds it from now on, nor what continues it.
    pub fn spoilt(&mut self, group: usize, block: BlockId) {
        if let Err(error) = self.pools.spoilt(group, block) {
            self.defect.get_or_insert(error);
        }
    }

    /// Leading tokens of a prefix that are in the prefix cache.
    pub fn here(&self, prefix: &Prefix, tokens: &[u32]) -> u32 {
        self.pools.lookup(prefix, tokens).without_copy().tokens()
    }

    /// The blocks that hold the leading tokens of a prefix, of a layer group: full ones, as far as they are in the prefix cache. Valid until the
    /// engine changes; nobody writes to them.
    pub fn blocks_of(&self, prefix: &Prefix, tokens: &[u32], group: usize) -> Vec<BlockId> {
        self.pools.blocks_of(&self.pools.lookup(prefix, tokens), group)
    }

    /// Holds the blocks of a prefix for a transfer that reads them ([`Engine::tables`]), until [`Engine::release`], an abort or its deadline.
    ///
    /// # Errors
    /// [`EngineError::NotHere`]: not all of it is in the prefix cache.
    pub fn serve(&mut self, new: Exchange) -> Result<SeqId, EngineError> {
        let moves = new.moves(self.block_size());
        let end = (moves as usize + 1).min(new.tokens.len());
        let hit = self.pools.lookup(&new.prefix, &new.tokens[..end]).without_copy();
        if hit.tokens() != moves || moves == 0 {
            return Err(EngineError::NotHere { tokens: moves, here: hit.tokens() });
        }
        let tables = self.pools.seat(&hit, Some(new.prefix), Need::whole(moves))?;
        let seq = self.take_id();
        let mut sequence = new.sequence(seq, Start::ComputeAndHold, self.block_size());
        sequence.computed = moves;
        sequence.phase = Phase::Held(tables);
        self.insert_exchange(seq, sequence);
        Ok(seq)
    }

    fn insert_exchange(&mut self, seq: SeqId, sequence: Sequence) {
        let known = self.earliest_deadline;
        self.earliest_deadline = sequence.deadline.into_iter().chain(known).min();
        self.sequences.insert(seq, sequence);
    }
}
