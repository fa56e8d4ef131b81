//! One sequence: its tokens, how far they are computed, and what it owns.

use std::ops::Range;

use baton_kv_cache::{BlockName, BlockTable, LentTables, Prefix, Tables};
use baton_types::{Class, FinishReason, RequestId, SamplingParams, SeqId, TokenOut};

use crate::config::{AGED, BATCH_AGED};
use crate::{EngineError, Exchange, Share, Time};

/// Where a sequence's KV comes from, and what happens then.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Start {
    /// Compute all tokens here and go on generating.
    Compute,
    /// The prefill role: compute all tokens, sample one, keep the blocks until [`crate::Engine::release`].
    ComputeAndHold,
    /// The decode role: lend blocks for all tokens to a peer, generate after [`crate::Engine::kv_arrived`]. If only a
    /// few tokens are missing here ([`crate::EngineConfig::local_prefill_tokens`]), nothing is lent and the sequence
    /// goes on as [`Start::Compute`].
    Receive,
}

/// A request as the engine takes it.
#[derive(Clone, PartialEq, Debug)]
pub struct NewSequence {
    /// The id of the client's request, repeated in every event.
    pub request_id: RequestId,
    /// The prompt, then the answer so far when the request is resumed. The model must know all ids: the engine does not
    /// check them, and a step that fails on one fails for all its sequences.
    pub tokens: Vec<u32>,
    /// How many of `tokens` are the prompt, at least 1.
    pub prompt_tokens: u32,
    /// How to sample and when to stop.
    pub params: SamplingParams,
    /// Where its KV comes from.
    pub start: Start,
    /// Time at which it fails if it has not ended.
    pub deadline: Option<Time>,
    /// Its key in the prefix cache. `None`: the cache is neither read nor filled. The same when log probabilities of the prompt are asked for.
    pub prefix: Option<Prefix>,
    /// Lower values are served earlier, under [`crate::Order::Priority`]. It also says the sequence's class ([`Class::of`]), under every order.
    pub priority: i32,
    /// Whose it is. Tenants share what is served at equal priority, under [`crate::Order::Priority`].
    pub share: Share,
    /// It does not start before [`crate::Engine::unpark`]. It keeps its turn meanwhile, and holds nobody up. [`crate::Event::Due`] says when its
    /// turn is near.
    pub parked: bool,
}

/// A sequence's place in the order of service; see [`crate::Order`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Turn {
    pub turn: u64,
    /// The finish tag of its tenant's share; 0 where shares do not count.
    pub tag: u64,
    pub seq: SeqId,
}

impl Turn {
    /// The class of the sequence.
    pub fn class(&self) -> Class {
        if self.turn >= BATCH_AGED { Class::Batch } else { Class::Interactive }
    }

    pub fn is_batch(&self) -> bool {
        self.class().is_batch()
    }

    /// The same sequence's turn once it has aged.
    pub fn aged(self) -> Turn {
        Turn { turn: if self.is_batch() { BATCH_AGED } else { AGED }, tag: 0, ..self }
    }
}

/// A sequence that computes or receives a prefix for which another sequence, its follower, waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Leader {
    pub seq: SeqId,
    /// Tokens that the leader must have computed for the wait to end.
    pub until: u32,
    /// Tokens that the follower can reuse then.
    pub shared: u32,
}

/// What a sequence is doing, with what it owns.
#[derive(Debug)]
pub(crate) enum Phase {
    /// In the queue; owns nothing of the pool.
    Waiting,
    /// Its blocks are lent to a peer.
    Receiving(LentTables),
    /// In the running set.
    Running(Tables),
    /// Computed; its blocks are read by a transfer.
    Held(Tables),
}

impl Phase {
    pub fn name(&self) -> &'static str {
        match self {
            Phase::Waiting => "waiting",
            Phase::Receiving(_) => "waiting for KV",
            Phase::Running(_) => "running",
            Phase::Held(_) => "held for a transfer",
        }
    }
}

#[derive(Debug)]
pub(crate) struct Sequence {
    pub request_id: RequestId,
    /// Prompt and answer so far; never shortened, never changed (I1).
    pub tokens: Vec<u32>,
    pub prompt_tokens: u32,
    pub params: SamplingParams,
    pub start: Start,
    pub deadline: Option<Time>,
    pub prefix: Option<Prefix>,
    /// Chain hashes of the full blocks it was submitted with, or had when it was preempted.
    pub names: Vec<BlockName>,
    pub turn: Turn,
    pub tenant: u64,
    /// The start tag of its tenant's share.
    pub start_tag: u64,
    pub phase: Phase,
    /// Whether its KV may be kept elsewhere.
    pub kept: Kept,
    /// Leading tokens whose KV is in its blocks.
    pub computed: u32,
    /// These are being written to while its first step computes: nobody may find them yet (I2).
    pub unverified: bool,
    /// Its rows in steps in flight.
    pub flight: RowsInFlight,
    /// Set when it has ended while a step computes it: what becomes of its blocks after the last such step. No further
    /// events are reported for it.
    pub doomed: Option<Doom>,
    /// Prompt tokens that its first computation found in the prefix cache; `None` before that.
    pub cached: Option<u32>,
    /// Leading tokens that were in the prefix cache when it came, if it was looked up then.
    pub expected: u32,
    /// Leading tokens of its prompt whose log probabilities were reported, or have none: the first. All, if none are asked
    /// for.
    pub scored: u32,
    /// It has had no row since it started.
    pub fresh: bool,
    /// It has sampled since it started. Its tokens were indexed then, including a partly full last block.
    pub sealed: bool,
    /// Number of the last step it had a row in. On starting, the number of the step before.
    pub last_step: u64,
    /// Whom it waits for. `waited` counts the steps it has waited for leaders with a later turn.
    pub leader: Option<Leader>,
    pub waited: u32,
    /// How many sequences submitted later, with an earlier turn, have started while it waited or computed its prompt.
    pub overtaken: u32,
    pub parked: Option<Parked>,
    /// It only owns blocks that move from one worker's prefix cache to another's ([`crate::Exchange`]).
    pub exchange: bool,
}

/// Whether KV of a sequence that waits may be kept below the pool, and is asked for before it starts: what it had when it was preempted, or a prefix for
/// which there was no room when it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kept {
    /// Neither, or nobody keeps what it left.
    Nowhere,
    /// Nobody was asked for it yet.
    Perhaps,
    /// It was asked for: the sequence waits for a fetch for its request.
    Asked,
}

/// A sequence that waits to be told that it may start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Parked {
    /// When its owner was told that its turn is near.
    pub due: Option<Time>,
}

/// What the steps in flight compute of one sequence.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct RowsInFlight {
    /// Rows, at most one in each step.
    pub rows: u32,
    /// Tokens of these rows.
    pub tokens: u32,
    /// Tokens that these rows sample; not known yet.
    pub chosen: u32,
    /// Place of the token that its last sampling row samples, among all that that step gives.
    pub place: u32,
}

/// What becomes of the blocks of a sequence that ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Doom {
    Free,
    Quarantine,
}

impl Sequence {
    pub fn new(new: NewSequence, turn: Turn, block_size: u32) -> Self {
        let NewSequence {
            request_id,
            tokens,
            prompt_tokens,
            params,
            start,
            deadline,
            prefix,
            priority: _,
            share,
            parked,
        } = new;
        // Cached KV has no logits.
        let prefix = prefix.filter(|_| params.prompt_logprobs.is_none());
        let scored = if params.prompt_logprobs.is_some() { 1 } else { prompt_tokens };
        let names = prefix.map_or(Vec::new(), |p| p.root.chain(&tokens, block_size).collect());
        Sequence {
            request_id,
            tokens,
            prompt_tokens,
            params,
            start,
            deadline,
            prefix,
            names,
            turn,
            tenant: share.tenant,
            start_tag: 0,
            phase: Phase::Waiting,
            kept: Kept::Nowhere,
            computed: 0,
            unverified: false,
            flight: RowsInFlight::default(),
            doomed: None,
            cached: None,
            expected: 0,
            scored,
            fresh: true,
            sealed: false,
            last_step: 0,
            leader: None,
            waited: 0,
            overtaken: 0,
            parked: parked.then_some(Parked { due: None }),
            exchange: false,
        }
    }

    /// Its first `computed` tokens and the next, as a prefix that others may keep. None: its KV is found by nobody.
    pub fn leaves(&self, computed: u32) -> Option<Exchange> {
        let tokens = self.tokens.get(..=computed as usize)?.to_vec();
        Some(Exchange { request_id: self.request_id.clone(), tokens, prefix: self.prefix?, deadline: Time(0) })
    }

    /// Tokens of the prompt that its first computation found in the prefix cache.
    pub fn cached_tokens(&self) -> u32 {
        self.cached.unwrap_or(0)
    }

    pub fn len(&self) -> u32 {
        self.tokens.len() as u32
    }

    /// Tokens still to compute before the next one can be sampled; 1 for a sequence that decodes.
    pub fn remaining(&self) -> u32 {
        self.len() - self.computed
    }

    /// Whether a step in flight computes it, so that its blocks are written to.
    pub fn in_step(&self) -> bool {
        self.flight.rows > 0
    }

    /// Position of the first token that no step in flight computes.
    pub fn next_start(&self) -> u32 {
        self.computed + self.flight.tokens
    }

    /// Tokens still to compute, after the steps in flight, before the next one can be sampled; 0 when it ends with
    /// those steps.
    pub fn lacks(&self) -> u32 {
        let known = self.next_index() + self.flight.chosen;
        let last = self.start == Start::ComputeAndHold || known >= self.params.max_tokens;
        if self.doomed.is_some() || (self.flight.chosen > 0 && last) {
            return 0;
        }
        self.len() + self.flight.chosen - self.next_start()
    }

    /// Tokens of its prompt, and of an answer that lost its KV, that are still to be computed here. The single token that a decode row
    /// computes does not count, nor does what a peer computes.
    pub fn to_prefill(&self) -> u32 {
        let elsewhere = matches!(self.phase, Phase::Waiting) && self.start == Start::Receive;
        let comes = matches!(self.phase, Phase::Receiving(_) | Phase::Held(_));
        if elsewhere || comes {
            return 0;
        }
        Some(self.lacks()).filter(|lacks| *lacks > 1).unwrap_or(0)
    }

    /// Positions of the tokens that are still to be computed here before it can go on answering, those of steps in flight included.
    pub fn to_compute(&self) -> Option<Range<u32>> {
        let elsewhere = matches!(self.phase, Phase::Waiting) && self.start == Start::Receive;
        if elsewhere || self.doomed.is_some() {
            return None;
        }
        let from = match self.phase {
            Phase::Waiting => self.expected.max(self.leader.map_or(0, |leader| leader.shared)),
            Phase::Running(_) => self.computed,
            Phase::Receiving(_) | Phase::Held(_) => return None,
        };
        // The single token of a decode row does not count.
        (from + 1 < self.len()).then(|| from..self.len())
    }

    /// Whether its next row must wait until the tokens that steps in flight sample are known.
    pub fn waits_for_tokens(&self) -> bool {
        self.flight.chosen > 0 && self.lacks() > 0 && self.params.looks_back()
    }

    /// Number of the next token of the answer (I4).
    pub fn next_index(&self) -> u32 {
        self.len() - self.prompt_tokens
    }

    /// The tokens of the prompt that a row of `len` tokens from position `start` on scores: the first one's position, and
    /// how many. What was reported before a preemption is not scored again.
    pub fn scores(&self, start: u32, len: u32) -> (u32, u32) {
        let first = self.scored.max(start + 1);
        (first, (start + len + 1).min(self.prompt_tokens).saturating_sub(first))
    }

    pub fn tables(&self) -> &[BlockTable] {
        match &self.phase {
            Phase::Waiting => &[],
            Phase::Receiving(lent) => lent.as_slice(),
            Phase::Running(tables) | Phase::Held(tables) => tables.as_slice(),
        }
    }

    /// Leading tokens for which it has blocks in every layer group.
    pub fn covered(&self) -> u32 {
        self.tables().iter().map(BlockTable::tokens).min().unwrap_or(0)
    }

    /// Whether a peer or a transfer may access its blocks, so that taking them back needs a fence (I3).
    pub fn exposed(&self) -> bool {
        match self.phase {
            Phase::Waiting => false,
            Phase::Receiving(_) | Phase::Held(_) => true,
            Phase::Running(_) => self.start == Start::ComputeAndHold,
        }
    }

    /// Whether its blocks can be taken and computed again later.
    pub fn preemptible(&self) -> bool {
        matches!(self.phase, Phase::Running(_)) && self.start != Start::ComputeAndHold
    }

    /// Appends the next token and says whether it ends the answer.
    pub fn push(&mut self, token: &TokenOut) -> Option<FinishReason> {
        self.tokens.push(token.id);
        if self.params.stop_token_ids.contains(&token.id) {
            return Some(FinishReason::Stop);
        }
        (self.next_index() >= self.params.max_tokens).then_some(FinishReason::Length)
    }
}

impl NewSequence {
    /// Most tokens whose KV it needs at once. The last token of an answer is never computed.
    fn kv_tokens(&self) -> u64 {
        match self.start {
            Start::ComputeAndHold => self.tokens.len() as u64,
            _ => (u64::from(self.prompt_tokens) + u64::from(self.params.max_tokens) - 1).max(self.tokens.len() as u64),
        }
    }

    /// Refuses what can never run, however long it waits.
    pub(crate) fn validate(&self, context: u32, capacity: u64) -> Result<(), EngineError> {
        let (prompt, max_tokens) = (self.prompt_tokens, self.params.max_tokens);
        if prompt == 0 || prompt as usize > self.tokens.len() {
            return Err(EngineError::PromptTokens { prompt, tokens: self.tokens.len() });
        }
        self.params.validate()?;
        if u64::from(prompt) + u64::from(max_tokens) > u64::from(context) {
            return Err(EngineError::ExceedsContext { prompt, max_tokens, context });
        }
        let generated = self.tokens.len() - prompt as usize;
        let complete = |why| Err(EngineError::AlreadyComplete { generated: generated as u32, why });
        if generated >= max_tokens as usize {
            return complete("as many as max_tokens allows");
        }
        let last = self.tokens[prompt as usize..].last();
        if last.is_some_and(|id| self.params.stop_token_ids.contains(id)) {
            return complete("the last of them one of stop_token_ids");
        }
        let needed = self.kv_tokens();
        if needed > capacity {
            return Err(EngineError::ExceedsPool { needed, capacity });
        }
        Ok(())
    }
}
