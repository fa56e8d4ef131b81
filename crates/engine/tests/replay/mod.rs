//! Replays a chat service's requests through the engine, without a model, and counts what the prefix cache finds.
//!
//! A request is a list of block names. Equal names at the same place, after equal beginnings, mean equal blocks of
//! tokens. The [`oracle`] knows only the names; the engine gets tokens made from them.

#![allow(dead_code, reason = "the test and the example each use their part")]

use std::collections::{BTreeMap, BTreeSet};

use baton_engine::{CacheConfig, Engine, EngineConfig, Event, NewSequence, Order, Prefix, Share, Start, Time, fake};
use baton_types::{PoolGeometry, RequestId, SamplingParams, TokenOut};

/// Tokens per block.
pub const BLOCK: u32 = 16;
/// How long a conversation that goes on is kept, in milliseconds, by an eviction policy that considers this.
const KEEP_MS: u64 = 300_000;
/// Most sequences at once.
const RUNNING: u32 = 16;

#[derive(Clone, Debug)]
pub struct Request {
    pub at_ms: u64,
    pub input: u32,
    pub output: u32,
    /// Names of its blocks; the last may be partly full.
    pub blocks: Vec<u32>,
}

impl Request {
    fn tokens(&self) -> Vec<u32> {
        // Answers are made of zeros, which no block name yields.
        let token = |at: u32| self.blocks[(at / BLOCK) as usize] * BLOCK + at % BLOCK + 1;
        (0..self.input).map(token).collect()
    }
}

/// What the cache did.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    pub prompt_tokens: u64,
    pub hit_tokens: u64,
    pub evictions: u64,
    /// Blocks of tokens cached at the end.
    pub cached: u32,
    pub preemptions: u64,
}

/// Prompt tokens that a cache without limit finds. For each request that is the longest prefix it shares with earlier
/// ones, without the last token if the prefix is the whole prompt.
pub fn oracle(requests: &[Request]) -> u64 {
    // By path of names and next name: the path that both make, and how many tokens of its last block are known.
    let mut known: BTreeMap<(u32, u32), (u32, u32)> = BTreeMap::new();
    let (mut paths, mut hits) = (1, 0);
    for request in requests {
        let (mut path, mut hit, mut hitting) = (0, 0, true);
        for (at, name) in (0u32..).zip(&request.blocks) {
            let length = BLOCK.min(request.input - at * BLOCK);
            let (next, tokens) = known.entry((path, *name)).or_insert_with(|| {
                paths += 1;
                (paths, 0)
            });
            if hitting {
                hit += length.min(*tokens);
                hitting = *tokens == BLOCK;
            }
            *tokens = length.max(*tokens);
            path = *next;
        }
        hits += u64::from(hit.min(request.input - 1));
    }
    hits
}

/// Serves all requests in order, `RUNNING` at once.
pub fn replay(requests: &[Request], cache: CacheConfig, blocks: u32) -> Outcome {
    let mut layout = fake::tiny_layout(BLOCK);
    layout.groups.truncate(1);
    let config = EngineConfig {
        token_budget: 2048,
        chunk: 2048,
        pack_tokens: u32::MAX,
        max_running: RUNNING,
        max_waiting: RUNNING,
        context_tokens: 1 << 20,
        local_prefill_tokens: 0,
        reserve_ahead: 16,
        order: Order::Fcfs,
        overtakes: 0,
        cache,
    };
    let mut engine = Engine::new(config, &PoolGeometry::uniform(layout, blocks)).unwrap();
    let (mut events, mut out) = (Vec::new(), Vec::new());
    let (mut next, mut going_on, mut now, mut told) = (0, BTreeSet::new(), Time(0), 0);
    while next < requests.len() || !engine.idle() {
        while next < requests.len() && engine.running() + engine.waiting() < RUNNING {
            let request = &requests[next];
            now = now.max(Time(0).after_ms(request.at_ms));
            engine.submit(sequence(next, request, &mut going_on, now)).unwrap();
            next += 1;
        }
        let Some(step) = engine.plan(now, &mut events) else { panic!("work is left and nothing is planned") };
        engine.with_batch(&step, |batch| {
            let token = |index| TokenOut { index, id: 0, ..TokenOut::default() };
            out.extend(batch.rows.iter().filter_map(|row| row.sample.as_ref()).map(|sample| token(sample.index)));
        });
        engine.apply(step, &mut out, &mut events);
        for event in events.drain(..) {
            if let Event::Finished { cached_tokens, .. } = event {
                told += u64::from(cached_tokens);
            }
        }
    }
    assert_eq!(told, engine.prefix_hit_tokens(), "what events say adds up to what is counted");
    Outcome {
        prompt_tokens: requests.iter().map(|request| u64::from(request.input)).sum(),
        hit_tokens: told,
        evictions: engine.evictions(),
        cached: engine.counts().cached,
        preemptions: engine.preemptions(),
    }
}

/// Builds a request's sequence. Conversations that go on are worth more than those that have only begun.
fn sequence(number: usize, request: &Request, going_on: &mut BTreeSet<u32>, now: Time) -> NewSequence {
    let again = request.blocks.iter().skip(1).take(1).any(|name| !going_on.insert(*name));
    NewSequence {
        request_id: RequestId(number.to_string()),
        tokens: request.tokens(),
        prompt_tokens: request.input,
        params: SamplingParams { max_tokens: request.output, temperature: 0.0, ..SamplingParams::default() },
        start: Start::Compute,
        deadline: None,
        prefix: Some(Prefix {
            seed: 1,
            keep: u8::from(again),
            keep_until: Some(now.after_ms(KEEP_MS)),
            ..Prefix::default()
        }),
        priority: 0,
        share: Share::default(),
        parked: false,
    }
}
