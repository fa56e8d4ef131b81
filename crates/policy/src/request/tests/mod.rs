//! The whole transition table is pinned. Properties hold under every order and loss of inputs.

mod properties;
mod recovery;
pub(crate) mod table;

use std::time::Duration;

use baton_types::{ErrorKind, FinishReason, TokenOut, WorkerId};

use super::{Action, Failure, Input, Leg, RequestLimits, RequestMachine};
use crate::placement::{Placed, Reserve};

const D1: WorkerId = WorkerId(0xd1);
const D2: WorkerId = WorkerId(0xd2);
const P1: WorkerId = WorkerId(0xf1);
const P2: WorkerId = WorkerId(0xf2);
const STOP: u32 = 99;

fn limits() -> RequestLimits {
    RequestLimits { max_tokens: 8, stop_token_ids: vec![STOP], max_attempts: 3, worker_wait: Duration::from_secs(3) }
}

/// The token every worker would sample at an index.
fn id_at(index: u32) -> u32 {
    index + 10
}

fn out(index: u32) -> TokenOut {
    TokenOut { index, id: id_at(index), ..TokenOut::default() }
}

fn token(index: u32) -> Input {
    Input::Token(out(index))
}

fn first(index: u32) -> Input {
    Input::FirstToken { token: out(index), finish: None, cached_tokens: 0 }
}

fn reserved() -> Input {
    Input::Reserved
}

fn finished(reason: FinishReason) -> Input {
    Input::Finished(reason)
}

fn split(decode: WorkerId, prefill: WorkerId) -> Input {
    Input::Placed(Placed { decode, prefill: Some(prefill) }, Reserve::First)
}

fn late(decode: WorkerId, prefill: WorkerId) -> Input {
    Input::Placed(Placed { decode, prefill: Some(prefill) }, Reserve::Late)
}

fn meanwhile(decode: WorkerId, prefill: WorkerId) -> Input {
    Input::Placed(Placed { decode, prefill: Some(prefill) }, Reserve::Meanwhile)
}

fn local(decode: WorkerId) -> Input {
    Input::Placed(Placed { decode, prefill: None }, Reserve::First)
}

fn lost(kind: ErrorKind) -> Failure {
    Failure::new(kind, "gone")
}

fn verify() -> Input {
    Input::VerifyFailed(Failure::new(ErrorKind::DataLoss, "block 3"))
}

/// A machine after these inputs, and all its actions.
fn after(inputs: impl IntoIterator<Item = Input>) -> (RequestMachine, Vec<Action>) {
    let (mut machine, start) = RequestMachine::start(limits());
    let mut actions = vec![start];
    for input in inputs {
        machine.step(input, &mut actions);
    }
    (machine, actions)
}

fn emitted(actions: &[Action]) -> Vec<u32> {
    actions.iter().filter_map(|a| if let Action::Emit(t) = a { Some(t.index) } else { None }).collect()
}
