//! Simulated clusters under faults, and what happens when a rule is broken on purpose.
#![allow(clippy::unwrap_used)]

use baton_simulator::{Fault, Options, Sabotage, Summary, run};

fn play(seeds: std::ops::Range<u64>, options: &Options) -> Summary {
    let mut sum = Summary::default();
    for seed in seeds {
        match run(seed, options) {
            Ok(summary) => sum.add(&summary),
            Err(violation) => {
                let again = "cargo run -p baton-simulator --example cluster -- 1 --first";
                panic!("{violation}; its story: {again} {seed} --requests {}", options.requests)
            }
        }
    }
    sum
}

#[test]
fn no_invariant_is_violated_under_faults() {
    let sum = play(0..300, &Options::default());
    // Every kind of fault struck, and most requests went well all the same.
    for fault in Fault::ALL {
        assert!(sum.faults.contains_key(&fault), "{fault:?} did not strike: {sum:?}");
    }
    assert!(sum.finished > 6_000 && sum.verified > 1_500, "{sum:?}");
    for leg in ["prefill", "decode", "transfer"] {
        assert!(sum.recoveries.contains_key(leg), "nothing recovered from its {leg}: {sum:?}");
    }
    for cause in ["corruption", "incomplete", "peer_lost", "stalled", "deadline", "withdrawn"] {
        assert!(sum.handoffs_failed.contains_key(cause), "no handoff failed by {cause}: {sum:?}");
    }
    assert!(sum.joined > 300 && sum.left_out > 5 && sum.overtook > 30, "{sum:?}");
}

#[test]
fn without_faults_nothing_fails_but_what_is_late_or_given_up() {
    let sum = play(0..100, &Options { calm: true, ..Options::default() });
    let unexpected = |kind: &&String| *kind != "DeadlineExceeded" && *kind != "ResourceExhausted";
    assert_eq!(sum.failed.keys().find(unexpected), None, "{sum:?}");
    assert!(sum.finished > 2_500 && sum.verified > 1_000, "{sum:?}");
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
        let noticed = (0..2000).find_map(|seed| by_its_checker(seed).map(|violation| (seed, violation)));
        let (seed, violation) = noticed.unwrap_or_else(|| panic!("{sabotage:?} goes unnoticed"));
        println!("{sabotage:?}: seed {seed}: {violation}");
    }
}
