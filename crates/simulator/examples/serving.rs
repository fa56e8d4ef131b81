//! Serves a trace on a simulated cluster, with each way of placing requests, and prints what its users would see.
//!
//! ```text
//! cargo run --release -p baton-simulator --example serving -- conversation_trace.jsonl 10,12,14
//! cargo run --release -p baton-simulator --example serving -- azure_code.csv 4,8
//! cargo run --release -p baton-simulator --example serving -- agents 4,6
//! ```
//!
//! The numbers are how many times as fast as recorded the requests come; for `agents`, how many agents begin a second.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "an example")]

use std::time::Duration;

use baton_policy::Slo;
use baton_simulator::serving::{Hardware, NAMED, Outcome, Policy, Prompt, Setup, agents, faster, serve};

/// What a request has to meet, in seconds: the first token, and the mean time from one to the next.
const TTFT: f64 = 15.0;
const ITL: f64 = 0.05;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let workload = arguments.next().expect("a trace, or agents");
    let rates = arguments.next().expect("rates, with commas");
    let only = arguments.next();
    let count = arguments.next().map_or(usize::MAX, |count| count.parse().unwrap());
    println!("16 prefill and 16 decode workers; SLOs: first token {TTFT} s, then {} ms", ITL * 1e3);
    println!(
        "{:>6} {:<12} {:>8} {:>8} {:>8} {:>8} {:>8} {:>8} {:>6} {:>6} {:>8} {:>8} {:>12}",
        "rate",
        "placement",
        "ttft",
        "p50",
        "p99",
        "itl ms",
        "p50",
        "p99",
        "hits",
        "met",
        "goodput",
        "rejected",
        "errors"
    );
    for rate in rates.split(',').map(|rate| rate.parse::<f64>().unwrap()) {
        let prompts = prompts(&workload, rate, count);
        for (name, policy) in [
            ("round-robin", Policy::RoundRobin),
            ("least-loaded", Policy::LeastLoaded),
            ("affinity", Policy::Affinity),
            ("held", Policy::Held),
            ("predicted", Policy::Predicted),
            ("rejecting", Policy::Predicted),
        ] {
            if only.as_ref().is_some_and(|only| !only.split(',').any(|only| only == name || only == "all")) {
                continue;
            }
            let hardware = Hardware::LLAMA_8B_ON_H200;
            let limit = |seconds| (name == "rejecting").then(|| Duration::from_secs_f64(seconds));
            let slo = Slo { first_token: limit(TTFT), token: limit(ITL), deadline: None };
            let setup = Setup { hardware, prefills: 16, decodes: 16, routers: 1, policy, local: 256, slo };
            print(rate, name, &serve(&setup, &prompts));
        }
    }
}

fn print(rate: f64, name: &str, outcome: &Outcome) {
    let (ttft, itl, errors) = (outcome.ttft(), outcome.itl(), outcome.errors());
    println!(
        "{rate:>6} {name:<12} {:>8.3} {:>8.3} {:>8.2} {:>8.2} {:>8.2} {:>8.2} {:>6.3} {:>6.3} {:>8.2} {:>8} {:>5.2} {:>5.2}",
        ttft.mean,
        ttft.p50,
        ttft.p99,
        itl.mean * 1e3,
        itl.p50 * 1e3,
        itl.p99 * 1e3,
        outcome.hits(),
        outcome.attainment(TTFT, ITL),
        outcome.goodput(TTFT, ITL),
        outcome.rejected,
        errors.0,
        errors.1
    );
}

fn prompts(workload: &str, rate: f64, count: usize) -> Vec<Prompt> {
    if workload == "agents" {
        return agents(count.min(20_000), rate, 7);
    }
    let text = std::fs::read_to_string(workload).expect("a readable trace");
    let read = if workload.ends_with(".csv") { azure } else { mooncake };
    let mut prompts: Vec<Prompt> = read(&text);
    prompts.truncate(count);
    faster(&prompts, rate)
}

fn mooncake(text: &str) -> Vec<Prompt> {
    let read = |line: &str| {
        let value: serde_json::Value = serde_json::from_str(line).expect("a JSON object a line");
        let number = |field: &str| value[field].as_u64().expect("a number");
        Prompt {
            at: number("timestamp") * 1000,
            input: number("input_length") as u32,
            output: (number("output_length") as u32).max(1),
            names: value["hash_ids"].as_array().unwrap().iter().map(|name| name.as_u64().unwrap()).collect(),
        }
    };
    text.lines().map(read).collect()
}

/// It has no prefixes: each prompt is of its own.
fn azure(text: &str) -> Vec<Prompt> {
    let seconds = |time: &str| {
        let (_, clock) = time.split_once(' ').unwrap();
        clock.split(':').fold(0.0, |sum, part| sum * 60.0 + part.parse::<f64>().unwrap())
    };
    let mut first = None;
    let read = |(at, line): (usize, &str)| {
        let mut fields = line.split(',');
        let time = seconds(fields.next().unwrap());
        let begun = *first.get_or_insert(time);
        let mut number = || fields.next().unwrap().trim().parse::<u32>().unwrap().max(1);
        let (input, output) = (number(), number());
        let names = (0..u64::from(input.div_ceil(NAMED))).map(|name| (at as u64) << 20 | name).collect();
        Prompt { at: ((time - begun) * 1e6) as u64, input, output, names }
    };
    text.lines().skip(1).enumerate().map(read).collect()
}
