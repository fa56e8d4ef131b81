//! Serves a trace on a simulated cluster, with each way of placing requests, and prints what its users would see.
//!
//! ```text
//! cargo run --release -p baton-simulator --example serving -- conversation_trace.jsonl 10,12,14
//! cargo run --release -p baton-simulator --example serving -- azure_code.csv 4,8 predicted,least-loaded 6000
//! cargo run --release -p baton-simulator --example serving -- agents 4,6 all 6000 decodes=4 itl=25 routers=3
//! ```
//!
//! The numbers are how many times as fast as recorded the requests come; for `agents`, how many agents begin a second. Then which policies, and
//! how many requests. Settings: `prefills` and `decodes` workers, `routers`, and the SLOs: `ttft` in seconds, `itl` in milliseconds.
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "an example")]

use std::time::Duration;

use baton_policy::Slo;
use baton_simulator::serving::{Hardware, NAMED, Outcome, Policy, Prompt, Setup, agents, faster, serve};

/// Loads are compared over the means of so many seconds.
const LOAD: usize = 5;
/// What may be set with NAME=NUMBER.
const SETTINGS: [(&str, f64); 5] =
    [("prefills", 16.0), ("decodes", 16.0), ("routers", 1.0), ("ttft", 15.0), ("itl", 50.0)];

fn main() {
    let (settings, arguments): (Vec<String>, _) = std::env::args().skip(1).partition(|text| text.contains('='));
    let mut arguments: std::vec::IntoIter<String> = arguments.into_iter();
    let workload = arguments.next().expect("a trace, or agents");
    let rates = arguments.next().expect("rates, with commas");
    let only = arguments.next();
    let count = arguments.next().map_or(usize::MAX, |count| count.parse().unwrap());
    let [prefills, decodes, routers, ttft, itl] = set(&settings);
    println!(
        "{prefills} prefill and {decodes} decode workers, {routers} routers; SLOs: first token {ttft} s, then {itl} ms"
    );
    println!(
        "{:>6} {:<12} {:>7} {:>7} {:>7} {:>7} {:>7} {:>7} {:>6} {:>6} {:>8} {:>8} {:>11} {:>11}",
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
        "fluctuation",
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
            ("early", Policy::PresentLoad),
            ("rejecting", Policy::Predicted),
        ] {
            if only.as_ref().is_some_and(|only| !only.split(',').any(|only| only == name || only == "all")) {
                continue;
            }
            let hardware = Hardware::LLAMA_8B_ON_H200;
            let rejects = matches!(name, "early" | "rejecting");
            let limit = |seconds| rejects.then(|| Duration::from_secs_f64(seconds));
            let slo = Slo { first_token: limit(ttft), token: limit(itl / 1e3), ..Slo::default() };
            let [prefills, decodes, routers] = [prefills, decodes, routers].map(|count| count as usize);
            let setup = Setup { hardware, prefills, decodes, routers, policy, local: 256, slo };
            print(rate, name, &serve(&setup, &prompts), ttft, itl / 1e3);
        }
    }
}

fn set(settings: &[String]) -> [f64; SETTINGS.len()] {
    let mut values = SETTINGS.map(|(_, value)| value);
    for (name, value) in settings.iter().map(|setting| setting.split_once('=').unwrap()) {
        let at = SETTINGS.iter().position(|(known, _)| *known == name);
        let at = at.unwrap_or_else(|| panic!("no setting {name:?}: {:?}", SETTINGS.map(|(name, _)| name)));
        values[at] = value.parse().unwrap();
    }
    values
}

fn print(rate: f64, name: &str, outcome: &Outcome, ttft_limit: f64, itl_limit: f64) {
    let (ttft, itl, errors, fluctuation) = (outcome.ttft(), outcome.itl(), outcome.errors(), outcome.fluctuation(LOAD));
    println!(
        "{rate:>6} {name:<12} {:>7.3} {:>7.3} {:>7.2} {:>7.2} {:>7.2} {:>7.2} {:>6.3} {:>6.3} {:>8.2} {:>8} {:>5.2} {:>5.2} {:>5.2} {:>5.2}",
        ttft.mean,
        ttft.p50,
        ttft.p99,
        itl.mean * 1e3,
        itl.p50 * 1e3,
        itl.p99 * 1e3,
        outcome.hits(),
        outcome.attainment(ttft_limit, itl_limit),
        outcome.goodput(ttft_limit, itl_limit),
        outcome.rejected,
        fluctuation.0,
        fluctuation.1,
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
