//! What is told of a step.

use std::time::Duration;

use baton_engine::{RunError, Start};
use baton_latency::StepWork;

use super::rig::{Rig, VOCAB, request};
use crate::decode::Command;
use crate::{Decode, Input, StepDone, Ticket};

fn rig() -> Rig<Decode> {
    let mut rig = Rig::new(|_| Decode::new(Duration::from_secs(30), VOCAB));
    rig.input(Input::Command(Command::Generate { ticket: Ticket(1), new: request(Start::Compute, 6) }));
    rig
}

#[test]
fn a_step_tells_what_it_computed() {
    let mut rig = rig();
    rig.input(Input::Turn);
    rig.input(Input::Turn);
    let prompt = StepWork { tokens: 6, pairs: 21, rows: 0, context: 0 };
    let row = StepWork { tokens: 0, pairs: 0, rows: 1, context: 7 };
    let told: Vec<_> = rig.stepped.iter().take(2).map(|done| (done.prefilled, done.work, done.sampled)).collect();
    assert_eq!(told, [(6, prompt, 1), (0, row, 1)]);
}

#[test]
fn a_step_that_fails_has_computed_nothing() {
    let mut rig = rig();
    rig.fails = Some(RunError("an illegal address".to_owned()));
    rig.input(Input::Turn);
    assert_eq!(rig.stepped, [StepDone::default()]);
}
