//! A worker that drains.

use std::time::Duration;

use baton_engine::Start;

use super::bench::{Bench, SEQ, VOCAB, request};
use crate::decode::{Command, Effect};
use crate::{Decode, Input, Refused, Ticket};

#[test]
fn what_runs_ends_and_nothing_new_is_taken() {
    let mut bench = Bench::new(|_| Decode::new(Duration::from_secs(30), VOCAB));
    let generate = || Input::Command(Command::Generate { ticket: Ticket(1), new: request(Start::Compute, 6) });
    bench.input(generate());
    bench.input(Input::Drain);
    let snapshot = bench.core.snapshot();
    assert!(snapshot.draining && !snapshot.idle);
    bench.said.clear();
    bench.input(generate());
    let ticket = Ticket(1);
    assert_eq!(bench.said, [Effect::Accepted { ticket, outcome: Err(Refused::Draining) }]);
    while !bench.core.waits() {
        bench.input(Input::Turn);
    }
    assert!(matches!(bench.said.last(), Some(Effect::Say(SEQ, answer)) if answer.is_last()));
    assert!(bench.core.snapshot().idle);
}
