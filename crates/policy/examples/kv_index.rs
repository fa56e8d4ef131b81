//! What the index of workers' blocks costs: bytes a block, events taken in, lookups; and a whole placement among so many workers.
//!
//!     cargo run --release -p baton-policy --example kv_index -- [BLOCKS] [WORKERS]
//!
//! Each worker holds the blocks of one system prompt that all share, and of conversations of its own. Blocks are told in changes of 50 ms, as
//! workers tell them.

#![allow(clippy::disallowed_methods, reason = "it takes times")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_membership::{Member, Role, View};
use baton_policy::{
    Ask, Backlog, BlockName, Fleet, Known, KvChange, KvIndex, Links, Outcome, Predicted, Slo, StepCost, StepWork,
    Subject, Verdict,
};
use baton_types::{WorkerId, mix};

/// Blocks of the system prompt, of a conversation, and of a prompt of 100,000 tokens.
const SHARED: u64 = 100;
const OWN: u64 = 150;
const LONG: u64 = 100_000 / 16;
/// Names in a change, and how often a worker tells one.
const CHANGE: usize = 100;
const EVERY: Duration = Duration::from_millis(50);

fn name(chain: u64, at: u64) -> BlockName {
    BlockName(mix(mix(chain) ^ at).into())
}

/// The blocks of a conversation.
fn conversation(chain: u64, own: u64) -> Vec<BlockName> {
    (0..SHARED).map(|at| name(0, at)).chain((0..own).map(|at| name(chain, at))).collect()
}

fn main() {
    let mut numbers = std::env::args().skip(1).map(|text| text.parse::<u64>());
    let mut number = |or| numbers.next().transpose().unwrap_or_else(|e| panic!("a number: {e}")).unwrap_or(or);
    let (blocks, workers) = (number(10_000_000), number(10_000));
    let mut index = KvIndex::new(blocks as usize);
    let conversations = (blocks / OWN / workers).max(1);
    let (begun, mut told) = (Instant::now(), 0u64);
    for worker in 1..=workers {
        let shared: Vec<u64> = (0..SHARED).map(|at| name(0, at).short()).collect();
        let chains = (0..conversations).map(|at| worker * 1_000_000 + at);
        let own = chains.flat_map(|chain| (0..OWN).map(move |at| name(chain, at).short()));
        let all: Vec<u64> = shared.into_iter().chain(own).collect();
        for (at, stored) in all.chunks(CHANGE).enumerate() {
            let change =
                KvChange { number: at as u64, afresh: at == 0, stored: stored.to_vec(), ..KvChange::default() };
            index.follow(WorkerId(worker), &change);
            told += stored.len() as u64;
        }
    }
    let took = begun.elapsed();
    let bytes = index.bytes() as f64 / index.blocks() as f64;
    println!("{} blocks of {workers} workers: {bytes:.1} bytes each; {told} told", index.blocks());
    let each = took.as_secs_f64() / told as f64;
    println!("taken in: {:.0} ns a name", each * 1e9);
    let a_second = 1000.0 * CHANGE as f64 / EVERY.as_secs_f64();
    println!("1,000 workers that each tell {CHANGE} names every {EVERY:?}: {:.0}% of a core", 100.0 * a_second * each);
    lookups(&index, workers, conversations);
    placements(&index, workers, conversations);
    let begun = Instant::now();
    index.leave(WorkerId(workers / 2 + 1));
    println!("forgetting a worker: {:.1} ms", begun.elapsed().as_secs_f64() * 1e3);
}

fn lookups(index: &KvIndex, workers: u64, conversations: u64) {
    let worker = |turn: u64| 1 + mix(turn) % workers;
    let chain = |turn: u64| worker(turn) * 1_000_000 + mix(turn ^ 5) % conversations;
    let known = |turn: u64| conversation(chain(turn), OWN + 20);
    let long = |turn: u64| conversation(chain(turn), LONG);
    let strange = |turn: u64| (0..LONG).map(|at| name(turn + (1 << 60), at)).collect();
    let cases = [
        ("a conversation that one worker holds", (0..1000).map(known).collect::<Vec<Vec<BlockName>>>()),
        ("a prompt of 100,000 tokens that begins so", (0..1000).map(long).collect()),
        ("a prompt that nobody holds", (0..1000).map(strange).collect()),
    ];
    for (what, prompts) in cases {
        let mut times: Vec<Duration> = Vec::new();
        let mut found = 0;
        for (turn, names) in prompts.iter().enumerate() {
            let begun = Instant::now();
            found += index.find(names, 64, turn).len();
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        println!("{what}: {:?} median, {:?} p99, {} holders a lookup", times[500], times[990], found / prompts.len());
    }
}

/// Peers that each worker has sessions with.
const PEERS: u64 = 64;

/// A router's whole placement: the lookups, and the choice by predicted time, among all workers.
fn placements(index: &KvIndex, workers: u64, conversations: u64) {
    let member = |id: u64| Member {
        id: WorkerId(id),
        role: if id.is_multiple_of(2) { Role::Prefill } else { Role::Decode },
        grpc: "http://127.0.0.1:1".to_owned(),
        admin: "http://127.0.0.1:2".to_owned(),
        model: "m".to_owned(),
        layout: 1,
        blocks: 10_000,
        block_size: 16,
        window_tokens: 0,
        max_running: 0,
        context_tokens: 0,
        draining: false,
        late_targets: false,
        exchanges: 9,
        kv_secret: 0,
    };
    let mut fleet = Fleet::new("m", Box::new(Predicted::new(256)), 0);
    fleet.update(Arc::new(View { members: (1..=workers).map(member).collect(), ..View::default() }));
    let cost = StepCost { base: 8e-3, row: 1e-4, context: 1e-8, chunk: 4e-3, token: 3e-5, pair: 1e-10 };
    for worker in 1..=workers {
        let work = StepWork { tokens: mix(worker) % 10_000, rows: mix(worker) % 50, ..StepWork::default() };
        let load = Backlog { work, room: 1000, step_tokens: 8192, cost, ..Backlog::default() };
        fleet.told(WorkerId(worker), load, 1, Instant::now());
        // Sessions with some of the decode workers, and a store.
        let peers = (0..PEERS).map(|peer| (WorkerId(1 + 2 * (mix(worker ^ peer << 20) % (workers / 2))), 1e9));
        fleet.linked(WorkerId(worker), Links::new(1 << 17, peers).with_load(1e-5));
        let outcome = Outcome::Worked(None);
        fleet.judge(Verdict { on: Subject::Worker(WorkerId(worker)), placed: Instant::now(), outcome }, Instant::now());
    }
    let chain = |turn: u64| (1 + mix(turn) % workers) * 1_000_000 + mix(turn ^ 5) % conversations;
    for (what, blocks) in [("a prompt of 2,000 tokens", 125), ("a prompt of 100,000 tokens", LONG)] {
        let mut times: Vec<Duration> = Vec::new();
        for turn in 0..1000 {
            let names: Arc<[BlockName]> = conversation(chain(turn), blocks).into();
            let (tokens, avoid, slo) = (16 * names.len() as u32, Vec::new(), Slo::default());
            let begun = Instant::now();
            let held = index.find(&names, 32, turn as usize);
            let ask = Ask {
                handed_over: false,
                before: None,
                split: true,
                decode: None,
                avoid,
                names: Arc::clone(&names),
                tokens,
                most: 1000,
                slo,
                class: Default::default(),
            };
            let stored = index.find(&names, 16, turn as usize + 1);
            fleet.place(&ask, Known { pool: &held, store: &stored }, begun).expect("there are workers");
            times.push(begun.elapsed());
        }
        times.sort_unstable();
        println!("placing {what} among {workers} workers: {:?} median, {:?} p99", times[500], times[990]);
    }
}
