//! Simulated handoffs under faults, and what happens when a rule is broken on purpose.
#![allow(clippy::unwrap_used)]

use baton_simulator::{Options, Sabotage, Summary, run};

/// How to play a seed again.
fn again(seed: u64, handoffs: u32) -> String {
    format!("cargo run -p baton-simulator --example handoffs -- 1 {handoffs} {seed}")
}

fn play(seeds: std::ops::Range<u64>, options: &Options) -> Summary {
    let mut sum = Summary::default();
    for seed in seeds {
        match run(seed, options) {
            Ok(summary) => sum.add(&summary),
            Err(violation) => panic!("{violation}; seed {seed}: {}", again(seed, options.handoffs)),
        }
    }
    sum
}

#[test]
fn no_invariant_is_violated_under_faults() {
    let sum = play(0..100, &Options::default());
    assert!(sum.handoffs > 9_000, "{sum:?}");
    // Faults did strike, of every kind, and many handoffs went well all the same.
    assert_eq!(sum.faults.len(), 10, "{sum:?}");
    assert!(sum.verified > sum.handoffs / 8, "{sum:?}");
    assert!(sum.joined > 500 && sum.left_out > 50 && sum.overtook > 80, "{sum:?}");
    for cause in ["verify", "incomplete", "peer lost", "stalled", "expired", "aborted"] {
        assert!(sum.failed.contains_key(cause), "no handoff failed by {cause}: {sum:?}");
    }
}

#[test]
fn without_faults_nothing_fails_but_what_is_late_or_given_up() {
    let sum = play(0..10, &Options { calm: true, ..Options::default() });
    let unexpected: Vec<_> = sum.failed.keys().filter(|cause| !matches!(**cause, "expired" | "aborted")).collect();
    // I5: heartbeats keep alive what takes several times as long as silence may last.
    assert!(unexpected.is_empty(), "{sum:?}");
}

#[test]
fn a_run_is_a_function_of_its_seed() {
    let options = Options::default();
    assert_eq!(run(7, &options), run(7, &options));
    assert_ne!(run(7, &options), run(8, &options));
}

#[test]
fn every_broken_rule_is_noticed() {
    for sabotage in Sabotage::ALL {
        // What only costs handoffs shows where nothing else does.
        let calm = sabotage.breaks() == "delivery";
        let options = Options { sabotage: Some(sabotage), calm, ..Options::default() };
        // One seed may show it in another way first: blocks that are never given back may also keep a run from its end.
        let by_its_checker = |seed| run(seed, &options).err().filter(|v| v.invariant == sabotage.breaks());
        let noticed = (0..150).find_map(|seed| by_its_checker(seed).map(|violation| (seed, violation)));
        let (seed, violation) = noticed.unwrap_or_else(|| panic!("{sabotage:?} goes unnoticed"));
        println!("{sabotage:?}: seed {seed}: {violation}");
    }
}
