//! Replays a trace of a chat service through the engine and prints how much of it the prefix cache finds.
//!
//! ```text
//! cargo run -p baton-engine --release --example replay -- conversation_trace.jsonl [requests]
//! ```
//!
//! Each line is one JSON object: `timestamp` (ms), `input_length`, `output_length` (tokens), `hash_ids` (one per block
//! of 512 tokens). Lengths are divided by 32, so that a block is 16 tokens.
#![allow(clippy::unwrap_used, reason = "an example")]

#[path = "../tests/replay/mod.rs"]
mod replay;

use baton_engine::{CacheConfig, Eviction};
use replay::{Request, oracle, replay};

const SCALE: u32 = 32;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let path = arguments.next().expect("the path of a trace");
    let count = arguments.next().map_or(1000, |count| count.parse().expect("a number of requests"));
    let text = std::fs::read_to_string(&path).expect("a readable trace");
    let requests: Vec<Request> = text.lines().take(count).map(parse).collect();
    // Room for every prompt and answer at once: nothing is ever evicted.
    let ample = requests.iter().map(|request| (request.input + request.output).div_ceil(replay::BLOCK) + 1).sum();
    let unlimited = replay(&requests, CacheConfig::default(), ample);
    let expected = oracle(&requests);
    println!("{} requests, {} prompt tokens", requests.len(), unlimited.prompt_tokens);
    println!("{:<24} {:>12} {:>8} {:>10} {:>10}", "cache", "hit tokens", "share", "blocks", "evictions");
    let line = |name: &str, found: &replay::Outcome| {
        let share = 100.0 * found.hit_tokens as f64 / found.prompt_tokens as f64;
        println!("{name:<24} {:>12} {share:>7.2}% {:>10} {:>10}", found.hit_tokens, found.cached, found.evictions);
    };
    line("unlimited", &unlimited);
    println!("{:<24} {expected:>12}", "  oracle of the trace");
    for (name, eviction) in [("LRU", Eviction::Lru), ("LFU", Eviction::Lfu), ("priority", Eviction::Priority)] {
        let cache = CacheConfig { max_blocks: unlimited.cached / 2, eviction, ..CacheConfig::default() };
        line(&format!("half the size, {name}"), &replay(&requests, cache, ample));
    }
    assert_eq!(unlimited.hit_tokens, expected, "an unlimited cache finds what the oracle finds");
}

fn parse(line: &str) -> Request {
    let value: serde_json::Value = serde_json::from_str(line).expect("a JSON object a line");
    let number = |field: &str| value[field].as_u64().expect("a number") as u32;
    let names = value["hash_ids"].as_array().expect("hash_ids");
    let input = number("input_length").div_ceil(SCALE).max(1);
    Request {
        at_ms: value["timestamp"].as_u64().expect("a number"),
        input,
        output: number("output_length").div_ceil(SCALE).max(1),
        blocks: names.iter().map(|name| name.as_u64().expect("a number") as u32).collect(),
    }
}
