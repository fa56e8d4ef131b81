//! Replays a trace through a pool, host memory and a disk, and prints how many of its prompts' tokens each of them finds, beside a cache that
//! never evicts; and what is written to disk.
//!
//! ```text
//! cargo run --release -p baton-simulator --example tiers -- conversation_trace.jsonl
//! cargo run --release -p baton-simulator --example tiers -- conversation_trace.jsonl 500,2000 4,40
//! ```
//!
//! The numbers are blocks of the pool, of 512 tokens; then how many times as large host memory and disk are.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "an example")]

use baton_simulator::serving::Prompt;
use baton_simulator::tiers::{Found, Policy, Sizes, play, unlimited};

/// Which blocks stay, and how often a block must have been asked for to be written to disk.
const WAYS: [(Policy, u8); 7] = [
    (Policy::Lru, 1),
    (Policy::Lfu, 1),
    (Policy::Sketch, 1),
    (Policy::TinyLfu, 1),
    (Policy::Lru, 2),
    (Policy::Lfu, 2),
    (Policy::Sketch, 2),
];

fn main() {
    let mut arguments = std::env::args().skip(1);
    let trace = arguments.next().expect("a trace");
    let numbers = |text: String| text.split(',').map(|number| number.parse().unwrap()).collect::<Vec<u32>>();
    let pools = numbers(arguments.next().unwrap_or("500,1000,2000".to_owned()));
    let [host, disk] = numbers(arguments.next().unwrap_or("4,40".to_owned()))[..] else { panic!("two numbers") };
    let text = std::fs::read_to_string(trace).expect("a readable trace");
    let prompts: Vec<Prompt> = text.lines().map(mooncake).collect();
    let all = unlimited(&prompts);
    let asked: u64 = prompts.iter().map(|prompt| u64::from(prompt.input)).sum();
    println!(
        "{} prompts, {} million tokens; a cache that never evicts finds {} million",
        prompts.len(),
        asked / M,
        all / M
    );
    println!(
        "{:>6} {:<7} {:>4} {:>7} {:>6} {:>6} {:>6} {:>7} {:>9} {:>7} {:>6} {:>7}",
        "pool",
        "policy",
        "uses",
        "pool %",
        "host %",
        "disk %",
        "all %",
        "oracle %",
        "written M",
        "moved M",
        "amplif",
        "saved %"
    );
    for pool in pools {
        let mut first = None;
        for (policy, min_uses) in WAYS {
            let found =
                play(Sizes { pool, host: host * pool, disk: disk * pool, object: 0, policy, min_uses }, &prompts);
            let baseline = *first.get_or_insert(found.demoted + found.moved);
            print(pool, policy, min_uses, &found, all, baseline);
        }
    }
}

const M: u64 = 1_000_000;

fn print(pool: u32, policy: Policy, min_uses: u8, found: &Found, all: u64, baseline: u64) {
    let share = |tokens: u64, of: u64| 100.0 * tokens as f64 / of as f64;
    let written = found.demoted + found.moved;
    println!(
        "{pool:>6} {:<7} {min_uses:>4} {:>7.1} {:>6.1} {:>6.1} {:>6.1} {:>8.1} {:>9.1} {:>7.1} {:>6.2} {:>7.1}",
        policy.as_str(),
        share(found.pool, found.asked),
        share(found.host, found.asked),
        share(found.disk, found.asked),
        share(found.all(), found.asked),
        share(found.all(), all),
        written as f64 / M as f64,
        found.moved as f64 / M as f64,
        found.counters.write_amplification(),
        100.0 - share(written, baseline),
    );
}

fn mooncake(line: &str) -> Prompt {
    let value: serde_json::Value = serde_json::from_str(line).expect("a JSON object a line");
    let number = |field: &str| value[field].as_u64().expect("a number");
    let names = value["hash_ids"].as_array().unwrap().iter().map(|name| name.as_u64().unwrap()).collect();
    Prompt {
        at: number("timestamp") * 1000,
        input: number("input_length") as u32,
        output: number("output_length") as u32,
        names,
    }
}
