//! Whole clusters serve a workload, placed in different ways.

use std::time::Duration;

use baton_policy::Slo;
use baton_simulator::serving::{Hardware, Outcome, Policy, Prompt, Setup, serve};

const NO_SLO: Slo = Slo { first_token: None, token: None, deadline: None, waited: Duration::ZERO };

/// Conversations of six turns, which begin `every` so many ms. Each turn adds 512 tokens.
fn conversations(count: u64, every: u64) -> Vec<Prompt> {
    let turn = |conversation: u64, turn: u64| Prompt {
        at: 1000 * (every * conversation + 700 * turn),
        input: 512 * (turn as u32 + 1),
        output: 10,
        names: (0..=turn).map(|at| 100 * conversation + at).collect(),
    };
    let mut all: Vec<Prompt> =
        (0..count).flat_map(|conversation| (0..6).map(move |at| turn(conversation, at))).collect();
    all.sort_by_key(|prompt| prompt.at);
    all
}

/// On devices twenty times slower at arithmetic, so that little is much.
fn served(policy: Policy, routers: usize, slo: Slo, prompts: &[Prompt]) -> Outcome {
    let fast = Hardware::LLAMA_8B_ON_H200;
    let hardware = Hardware { blocks: 1500, flops: fast.flops / 20.0, ..fast };
    serve(&Setup { hardware, prefills: 2, decodes: 2, routers, policy, local: 0, slo }, prompts)
}

#[test]
fn predicted_placement_finds_what_is_cached_and_answers_sooner() {
    let prompts = conversations(24, 900);
    let turns = served(Policy::RoundRobin, 1, NO_SLO, &prompts);
    for routers in [1, 3] {
        let predicted = served(Policy::Predicted, routers, NO_SLO, &prompts);
        assert_eq!((predicted.served.len(), turns.served.len()), (prompts.len(), prompts.len()));
        let (ours, theirs) = (predicted.ttft().mean, turns.ttft().mean);
        assert!(ours < 0.8 * theirs, "{routers} routers: {ours} s to the first token; in turn {theirs} s");
        assert!(predicted.hits() > turns.hits(), "{} {}", predicted.hits(), turns.hits());
    }
}

#[test]
fn what_would_come_too_late_is_rejected_and_the_others_come_in_time() {
    let prompts = conversations(24, 300);
    let limit = Slo { first_token: Some(Duration::from_secs(1)), ..NO_SLO };
    let (all, some) = (served(Policy::Predicted, 1, NO_SLO, &prompts), served(Policy::Predicted, 1, limit, &prompts));
    assert_eq!((some.served.len() + some.rejected, all.rejected), (prompts.len(), 0));
    let (late, rejecting) = (all.attainment(1.0, 9.0), some.attainment(1.0, 9.0));
    assert!(some.rejected > 0 && rejecting > late, "{rejecting} in time and {} rejected; {late} of all", some.rejected);
}

/// Prompts of all lengths take seconds to compute, and one decode worker is not enough for their answers.
#[test]
fn rejection_by_predicted_load_serves_more_in_time_and_keeps_the_load_even() {
    let prompt = |at: u64| {
        let blocks = 1 + at * 7 % 8;
        let names = (0..blocks).map(|block| 1000 * at + block).collect();
        Prompt { at: 60_000 * at, input: 512 * blocks as u32, output: 40, names }
    };
    let prompts: Vec<Prompt> = (0..400).map(prompt).collect();
    let slo = Slo { first_token: None, token: Some(Duration::from_millis(60)), ..Slo::default() };
    let fast = Hardware::LLAMA_8B_ON_H200;
    let hardware = Hardware { flops: fast.flops / 20.0, memory: fast.memory / 10.0, ..fast };
    let outcome =
        |policy| serve(&Setup { hardware, prefills: 24, decodes: 1, routers: 1, policy, local: 0, slo }, &prompts);
    let (ours, present) = (outcome(Policy::Predicted), outcome(Policy::PresentLoad));
    let in_time = |outcome: &Outcome| outcome.attainment(9.0, 0.06);
    assert!(in_time(&ours) > 1.5 * in_time(&present), "{} and {} in time", in_time(&ours), in_time(&present));
    let ((prefill, decode), (prefill_present, decode_present)) = (ours.fluctuation(1), present.fluctuation(1));
    let all = [prefill, prefill_present, decode, decode_present];
    assert!(prefill < 0.5 * prefill_present && decode < 0.5 * decode_present, "{all:?}");
}
