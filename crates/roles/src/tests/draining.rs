//! A worker that drains.

use std::time::Duration;

use baton_engine::Start;

use super::rig::{Rig, SEQ, VOCAB, request};
use crate::decode::{Command, Effect};
use crate::{Decode, Input, Refused, Ticket};

#[test]
fn what_runs_ends_and_nothing_new_is_taken() {
    let mut rig = Rig::new(|_| Decode::new(Duration::from_secs(30), VOCAB));
    let generate = || Input::Command(Command::Generate { ticket: Ticket(1), new: request(Start::Compute, 6) });
    rig.input(generate());
    rig.input(Input::Drain);
    let snapshot = rig.core.snapshot();
    assert!(snapshot.draining && !snapshot.idle);
    rig.said.clear();
    rig.input(generate());
    let ticket = Ticket(1);
    assert_eq!(rig.said, [Effect::Accepted { ticket, outcome: Err(Refused::Draining) }]);
    while !rig.core.waits() {
        rig.input(Input::Turn);
    }
    assert!(matches!(rig.said.last(), Some(Effect::Say(SEQ, answer)) if answer.is_last()));
    assert!(rig.core.snapshot().idle);
}
