//! Log probabilities of prompts: each token once, in order, the same whatever the way.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod rig;

use baton_engine::fake::scores;
use baton_engine::{EngineConfig, Event, NewSequence, Prefix, Start};
use baton_types::{SamplingParams, SeqId, TokenOut};
use rig::{LIMITS, Rig, VOCAB, layout, request};

fn scored(start: Start, prompt: u32, max_tokens: u32) -> NewSequence {
    let new = request(start, prompt, max_tokens);
    let params = SamplingParams { prompt_logprobs: Some(2), ..new.params };
    NewSequence { params, prefix: Some(Prefix::default()), ..new }
}

fn scores_of(rig: &Rig, seq: SeqId) -> Vec<TokenOut> {
    let scores = rig.events.iter().filter_map(|event| match event {
        Event::Scored { seq: of, tokens } if *of == seq => Some(tokens.clone()),
        _ => None,
    });
    scores.flatten().collect()
}

fn alone(prompt: u32) -> Vec<TokenOut> {
    scores(&layout(), VOCAB, &(0..prompt).collect::<Vec<_>>(), 2).unwrap()
}

#[test]
fn each_token_but_the_first_is_scored_before_the_answer_begins() {
    for chunk in [1, 3, 32] {
        for start in [Start::Compute, Start::ComputeAndHold] {
            let mut rig = Rig::new(EngineConfig { chunk, ..LIMITS }, 16);
            let seq = rig.engine.submit(scored(start, 11, 3)).unwrap();
            let other = rig.submit(Start::Compute, 6, 9);
            rig.steps(20);
            assert_eq!(scores_of(&rig, seq), alone(11), "{chunk}");
            assert_eq!(scores_of(&rig, other), []);
            let of_seq: Vec<_> = rig.events.iter().filter(|event| event.seq() == seq).collect();
            let begins = of_seq.iter().position(|event| !matches!(event, Event::Scored { .. })).unwrap();
            assert!(of_seq[begins..].iter().all(|event| !matches!(event, Event::Scored { .. })), "{of_seq:?}");
        }
    }
}

#[test]
fn cached_kv_is_not_read_because_it_has_no_logits() {
    let mut rig = Rig::new(LIMITS, 16);
    let plain = NewSequence { prefix: Some(Prefix::default()), ..request(Start::Compute, 12, 2) };
    rig.engine.submit(plain.clone()).unwrap();
    rig.steps(4);
    let seq = rig.engine.submit(scored(Start::Compute, 12, 2)).unwrap();
    assert_eq!(rig.step(), [(seq.0, 12)]);
    assert_eq!(scores_of(&rig, seq), alone(12));
    rig.steps(4);
    let again = rig.engine.submit(plain).unwrap();
    assert_eq!(rig.step(), [(again.0, 1)], "the others reuse as before");
}

#[test]
fn what_was_reported_is_not_reported_again_after_a_preemption() {
    let mut rig = Rig::new(LIMITS, 7);
    let first = rig.submit(Start::Compute, 8, 16);
    let seq = rig.engine.submit(scored(Start::Compute, 12, 16)).unwrap();
    rig.steps(60);
    assert!(rig.engine.preemptions() > 0 && rig.engine.idle());
    assert_eq!(scores_of(&rig, seq), alone(12));
    assert_eq!((rig.tokens_of(first).len(), rig.tokens_of(seq).len()), (16, 16));
}

#[test]
fn a_step_may_follow_one_that_scores() {
    let mut rig = Rig::new(EngineConfig { chunk: 5, ..LIMITS }, 16);
    let before = rig.submit(Start::Compute, 4, 12);
    rig.step();
    let seq = rig.engine.submit(scored(Start::Compute, 11, 4)).unwrap();
    let mut flying = std::collections::VecDeque::new();
    for _ in 0..30 {
        flying.extend(rig.launch());
        if flying.len() == 2 || rig.engine.running() == 0 {
            flying.pop_front().into_iter().for_each(|step| rig.collect(step));
        }
    }
    flying.into_iter().for_each(|step| rig.collect(step));
    assert_eq!(scores_of(&rig, seq), alone(11));
    let mut apart = Rig::new(LIMITS, 16);
    let same = apart.submit(Start::Compute, 4, 12);
    apart.steps(14);
    assert_eq!(rig.tokens_of(before), apart.tokens_of(same), "rows take the tokens that are theirs");
}
