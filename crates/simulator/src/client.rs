//! Clients: their requests, the answers they got, and the checks of these answers (I1, I4).

use baton_engine::fake;
use baton_types::testing::Random;
use baton_types::{Class, ErrorKind, FinishReason, KvLayout, SamplingParams, TokenOut};

use crate::events::Place;
use crate::stream::Micros;

/// Vocabulary size: token ids are below this.
pub(crate) const VOCAB: u32 = 97;

/// How a request ended for its client.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum End {
    Finished(FinishReason),
    Failed(ErrorKind, String),
    /// The client left.
    Left,
    /// Its router died.
    Broken,
}

/// A client, its one request and the answer so far.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    pub prompt: Vec<u32>,
    pub params: SamplingParams,
    pub salt: u64,
    pub priority: i32,
    /// Time from its arrival to its deadline.
    pub deadline: Micros,
    /// Time from its arrival until the client leaves, if it leaves early.
    pub leaves: Option<Micros>,
    /// Time the client takes for each token.
    pub reads: Micros,
    /// Index of the token that completes a stop string.
    pub stops_at: Option<u32>,
    pub router: Place,
    pub began: Micros,
    pub tokens: Vec<u32>,
    /// Tokens of the prompt with their log probabilities.
    pub scores: Vec<TokenOut>,
    /// A stop string is complete: later tokens are dropped.
    pub stopped: bool,
    pub end: Option<End>,
}

/// Bounds of the random requests.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub prompt: u64,
    pub answer: u64,
    pub families: u64,
    pub sampled: bool,
}

impl Client {
    pub(crate) fn new(random: &mut Random, shape: Shape) -> Client {
        let family = random.below(shape.families) as u32;
        let len = random.within(1, shape.prompt) as u32;
        // Prompts of a family share their first `fork` tokens. If `fork` is past the end, one is a prefix of another, as in a conversation.
        let fork = random.within(0, shape.prompt) as u32;
        let own = random.below(1 << 16) as u32;
        let token = |at: u32| (at * 31 + at * at + family + if at < fork { 0 } else { own }) % VOCAB;
        let sampled = shape.sampled && random.chance(300);
        let params = SamplingParams {
            max_tokens: random.within(1, shape.answer) as u32,
            temperature: if sampled { 0.7 } else { 0.0 },
            seed: random.bits(),
            stop_token_ids: if random.chance(300) { (0..8).collect() } else { Vec::new() },
            prompt_logprobs: own.is_multiple_of(6).then_some(own % 3),
            ..SamplingParams::default()
        };
        let late = random.chance(50);
        Client {
            prompt: (0..len).map(token).collect(),
            params,
            salt: random.below(2),
            priority: match random.below(4) as i32 - 1 {
                2 => Class::Batch.at_workers(0),
                interactive => interactive,
            },
            deadline: if late { random.within(1_000, 200_000) } else { 120_000_000 },
            leaves: random.chance(100).then(|| random.within(0, 400_000)),
            reads: if random.chance(100) { random.within(1_000, 100_000) } else { 0 },
            stops_at: random.chance(50).then(|| random.below(shape.answer) as u32),
            router: 0,
            began: 0,
            tokens: Vec::new(),
            scores: Vec::new(),
            stopped: false,
            end: None,
        }
    }

    /// Takes a token; the error says what is wrong with it.
    pub(crate) fn take(&mut self, index: u32, id: u32) -> Result<(), String> {
        // I4
        if index as usize != self.tokens.len() {
            return Err(format!("token {index} comes when {} is next", self.tokens.len()));
        }
        if let Some(end) = &self.end {
            return Err(format!("token {index} comes after the end: {end:?}"));
        }
        self.tokens.push(id);
        Ok(())
    }

    /// Takes tokens of the prompt with their log probabilities; the error says what is wrong with them.
    pub(crate) fn take_scores(&mut self, tokens: Vec<TokenOut>) -> Result<(), String> {
        if let Some(at) = (1 + self.scores.len() as u32..).zip(&tokens).find(|(due, token)| token.index != *due) {
            return Err(format!("a score of token {} of the prompt comes when {} is next", at.1.index, at.0));
        }
        if !self.tokens.is_empty() || self.end.is_some() || self.params.prompt_logprobs.is_none() {
            return Err("scores of the prompt come too late, or were not asked for".to_owned());
        }
        self.scores.extend(tokens);
        Ok(())
    }

    /// Checks that the answer is the one the request yields alone (I1).
    pub(crate) fn check(&self, layout: &KvLayout) -> Result<(), String> {
        if let Some(top) = self.params.prompt_logprobs {
            let alone = fake::scores(layout, VOCAB, &self.prompt, top).map_err(|error| error.to_string())?;
            let whole = self.scores.len() == alone.len() || self.tokens.is_empty();
            if !whole || alone.get(..self.scores.len()) != Some(&self.scores[..]) {
                return Err(format!("the prompt's scores are {:?}, alone they are {alone:?}", self.scores));
            }
        }
        let alone = fake::answer(layout, VOCAB, &self.prompt, &self.params).map_err(|error| error.to_string())?;
        let alone: Vec<u32> = alone.into_iter().map(|token| token.id).collect();
        if alone.get(..self.tokens.len()) != Some(&self.tokens[..]) {
            return Err(format!("the answer is {:?}, alone it is {alone:?}", self.tokens));
        }
        let Some(End::Finished(reason)) = &self.end else { return Ok(()) };
        let stopped = self.stops_at.is_some_and(|at| self.tokens.len() == at as usize + 1);
        let ends = alone.last().is_some_and(|id| self.params.stop_token_ids.contains(id));
        let whole = self.tokens.len() == alone.len();
        let right = match reason {
            FinishReason::Stop => stopped || ends && whole,
            FinishReason::Length => whole && !ends,
            _ => false,
        };
        match right {
            true => Ok(()),
            false => Err(format!("it ends with {reason:?} after {:?}, alone it is {alone:?}", self.tokens)),
        }
    }
}
