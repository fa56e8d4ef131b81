//! A request as its client sees it, and what it demands.

use baton_engine::{Prefix, Time, fake};
use baton_types::{BlockId, FinishReason, KvLayout, SamplingParams, SeqId, TokenOut};

pub const VOCAB: u32 = 97;

/// How a request's KV comes to the decode side.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Route {
    /// Computed there.
    Local,
    /// Written layer by layer while the prefill side computes.
    Eager,
    /// Read from the prefill side's blocks as late as possible.
    Late,
    /// Found corrupt when it lands; the request is computed on the decode side.
    Corrupt,
}

#[derive(Clone, Debug)]
pub struct Spec {
    pub prompt: u32,
    /// Prompts of a family are the same up to here.
    pub fork: u32,
    /// Shares KV with those of the same tenant.
    pub shares: bool,
    pub priority: i32,
    pub max_tokens: u32,
    pub sampled: bool,
    pub seed: u64,
    pub stops: bool,
    pub route: Route,
    pub arrival: u64,
    /// Ticks between the end of the prefill and the arrival of its KV, and between an abort and its fence.
    pub delay: u64,
    pub cancel: Option<u64>,
    /// The decode side loses it; it is placed again with what the client has.
    pub resume: Option<u64>,
    pub deadline: Option<u64>,
}

impl Spec {
    pub fn params(&self) -> SamplingParams {
        SamplingParams {
            max_tokens: self.max_tokens,
            temperature: if self.sampled { 0.7 } else { 0.0 },
            seed: self.seed,
            stop_token_ids: if self.stops { (0..12).collect() } else { Vec::new() },
            top_logprobs: self.sampled.then_some(1),
            ..SamplingParams::default()
        }
    }

    pub fn prefix(&self) -> Option<Prefix> {
        let seed = self.seed / 3 % 2;
        self.shares.then_some(Prefix { seed, keep: (self.seed % 4) as u8, keep_until: Some(Time(self.seed % 90)) })
    }

    pub fn tokens(&self) -> Vec<u32> {
        let (family, own) = (self.seed as u32 % 3, self.seed as u32 / 3);
        let token = |at| at * 31 + at * at + family + if at < self.fork { 0 } else { own };
        (0..self.prompt).map(|at| token(at) % VOCAB).collect()
    }
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub enum End {
    Finished(FinishReason),
    Cancelled,
    Deadline,
}

pub struct Client {
    pub spec: Spec,
    pub answer: Vec<TokenOut>,
    pub end: Option<End>,
    /// Sequences it has on the two sides.
    pub at: [Option<SeqId>; 2],
    /// Counts prefill attempts; what an older one would still write is fenced off.
    pub epoch: u32,
    pub first: Option<TokenOut>,
    /// Copies not yet made: (from, to) byte offsets and length.
    pub pending: Vec<(usize, usize, usize)>,
    pub targets: Vec<Vec<BlockId>>,
    /// Leading blocks the decode side has.
    pub cached: usize,
}

impl Client {
    pub fn new(spec: Spec) -> Client {
        Client {
            spec,
            answer: Vec::new(),
            end: None,
            at: [None; 2],
            epoch: 0,
            first: None,
            pending: Vec::new(),
            targets: Vec::new(),
            cached: 0,
        }
    }

    pub fn deliver(&mut self, token: TokenOut) {
        assert_eq!(token.index as usize, self.answer.len(), "I4: each index once, in order");
        assert_eq!(self.end, None, "nothing after the end");
        self.answer.push(token);
    }

    pub fn check_answer(&self, layout: &KvLayout) {
        let params = self.spec.params();
        let alone = fake::answer(layout, VOCAB, &self.spec.tokens(), &params).unwrap();
        match self.end.unwrap() {
            End::Finished(reason) => {
                assert_eq!(self.answer, alone, "I1");
                let stopped = alone.last().is_some_and(|token| params.stop_token_ids.contains(&token.id));
                assert_eq!(reason, if stopped { FinishReason::Stop } else { FinishReason::Length });
            }
            End::Cancelled => assert_eq!(self.answer[..], alone[..self.answer.len()], "I1"),
            End::Deadline => assert_eq!(self.answer[..], alone[..self.answer.len()], "I1"),
        }
    }
}
