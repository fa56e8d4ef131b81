//! Whatever inputs come, in whatever order: each index is emitted once and in order (I4), and the request ends (I5).

use proptest::prelude::*;

use super::*;
use crate::request::State;

fn any_failure() -> impl Strategy<Value = Failure> {
    prop::sample::select(ErrorKind::ALL.to_vec()).prop_map(lost)
}

fn any_reason() -> impl Strategy<Value = FinishReason> {
    prop::sample::select(vec![FinishReason::Stop, FinishReason::Length, FinishReason::Cancelled])
}

fn any_reserve() -> impl Strategy<Value = Reserve> {
    prop::sample::select(vec![Reserve::First, Reserve::Meanwhile, Reserve::Late])
}

/// Any input at all, sensible or not.
fn any_input() -> impl Strategy<Value = Input> {
    let worker = || prop::sample::select(vec![D1, D2, P1, P2]);
    let any_token = (0u32..6, prop::bool::weighted(0.1))
        .prop_map(|(index, stray)| TokenOut { id: if stray { 5 } else { id_at(index) }, ..out(index) });
    prop_oneof![
        5 => (worker(), prop::option::of(worker()), any_reserve())
            .prop_map(|(decode, prefill, reserve)| Input::Placed(Placed { decode, prefill }, reserve)),
        2 => Just(Input::Due),
        1 => any_failure().prop_map(Input::NotPlaced),
        3 => Just(Input::Reserved),
        1 => (0u32..9).prop_map(|cached_tokens| Input::Started { cached_tokens }),
        3 => (any_token.clone(), prop::option::weighted(0.1, any_reason()))
            .prop_map(|(token, finish)| Input::FirstToken { token, finish, cached_tokens: 0 }),
        1 => Just(Input::Transferred),
        6 => any_token.prop_map(Input::Token),
        1 => any_reason().prop_map(finished),
        1 => any_failure().prop_map(Input::DecodeLost),
        1 => any_failure().prop_map(Input::PrefillLost),
        1 => any_failure().prop_map(Input::HandoffFailed),
        1 => any_failure().prop_map(Input::VerifyFailed),
        1 => any_failure().prop_map(Input::Stalled),
        1 => Just(Input::BackoffOver),
    ]
}

/// Checks what must hold of all actions of a machine.
fn check(actions: &[Action], ended: bool) {
    for (at, index) in emitted(actions).into_iter().enumerate() {
        assert_eq!(index as usize, at, "I4: each index once, in order");
    }
    assert!(emitted(actions).len() <= limits().max_tokens as usize);
    let is_end = |a: &Action| matches!(a, Action::Finish { .. } | Action::Fail(_));
    assert_eq!(actions.iter().filter(|a| is_end(a)).count(), usize::from(ended));
    assert!(!ended || actions.last().is_some_and(is_end), "nothing follows the end");
}

/// The inputs with which a cluster answers one action. `luck` decides whether the work succeeds or is lost.
fn reply(machine: &RequestMachine, asked: &Action, luck: u8) -> Vec<Input> {
    let base = machine.emitted().len() as u32;
    let kind = [ErrorKind::Unavailable, ErrorKind::ResourceExhausted, ErrorKind::Internal][luck as usize % 3];
    match asked {
        Action::Place { .. } if luck.is_multiple_of(11) => vec![Input::NotPlaced(lost(ErrorKind::Unavailable))],
        Action::Place { decode: Some(d), .. } => vec![if luck.is_multiple_of(2) { split(*d, P2) } else { local(*d) }],
        Action::Place { split: false, .. } => vec![local(D1)],
        Action::Place { .. } => {
            let decode = if luck.is_multiple_of(2) { D1 } else { D2 };
            vec![[late, meanwhile, split][luck as usize % 3](decode, P1)]
        }
        Action::QueuePrefill { .. } if luck < 40 => vec![Input::PrefillLost(lost(kind))],
        Action::QueuePrefill { .. } => vec![Input::Due],
        Action::OpenDecode { local: false, .. } if luck < 40 => vec![Input::DecodeLost(lost(kind))],
        Action::OpenDecode { local: false, .. } => vec![reserved()],
        Action::OpenDecode { local: true, .. } => {
            let upto = if luck < 60 { base + luck as u32 % 3 } else { 8 };
            let end = if luck < 60 { Input::DecodeLost(lost(kind)) } else { finished(FinishReason::Length) };
            (base..upto.min(8)).map(token).chain([end]).collect()
        }
        Action::RunPrefill { .. } | Action::SendTarget if luck < 30 => vec![Input::PrefillLost(lost(kind))],
        Action::RunPrefill { .. } | Action::SendTarget if luck < 50 => {
            vec![first(base), Input::PrefillLost(lost(kind))]
        }
        Action::RunPrefill { .. } | Action::SendTarget if luck < 60 => {
            vec![first(base), Input::HandoffFailed(lost(kind))]
        }
        Action::RunPrefill { .. } | Action::SendTarget if luck < 70 => vec![first(base), verify()],
        Action::RunPrefill { .. } | Action::SendTarget => {
            // `luck` decides how the two streams interleave: the prefill stream's token comes somewhere among the decode tokens.
            let mut inputs: Vec<Input> = (base + 1..8).map(token).chain([finished(FinishReason::Length)]).collect();
            let at = luck as usize % (inputs.len() + 1);
            inputs.insert(at, first(base));
            inputs
        }
        Action::Backoff(_) => vec![Input::BackoffOver],
        _ => Vec::new(),
    }
}

proptest! {
    #[test]
    fn any_inputs_at_all(inputs in prop::collection::vec(any_input(), 0..80), last in 0..3u8) {
        let (mut machine, mut actions) = after(inputs);
        check(&actions, machine.ended());
        let end = [Input::Deadline, Input::ClientGone, Input::StopMatched][last as usize].clone();
        machine.step(end, &mut actions);
        prop_assert!(machine.ended(), "I5: a deadline ends it in any state");
        check(&actions, true);
    }

    #[test]
    fn every_request_ends_by_itself_in_a_cluster_that_fails(luck in prop::collection::vec(any::<u8>(), 64)) {
        let (mut machine, start) = RequestMachine::start(limits());
        let (mut all, mut todo) = (vec![start.clone()], vec![start]);
        let mut luck = luck.into_iter();
        while let Some(asked) = todo.pop() {
            let roll = luck.next().expect("I5: bounded by attempts and waits, not by luck");
            for input in reply(&machine, &asked, roll) {
                let before = machine.state();
                let mut said = Vec::new();
                machine.step(input, &mut said);
                let asks = |a: &Action| matches!(a,
                    Action::Place { .. } | Action::OpenDecode { .. } | Action::QueuePrefill { .. }
                    | Action::RunPrefill { .. } | Action::SendTarget | Action::Backoff(_));
                let next = said.iter().rfind(|a| asks(a)).cloned();
                all.extend(said);
                // A dropped stream sends nothing more.
                let go_on = next.is_none() || before == State::Placing;
                todo.extend(next);
                if !go_on { break }
            }
        }
        prop_assert!(machine.ended());
        check(&all, true);
        let complete = matches!(all.last(), Some(Action::Finish { .. }));
        prop_assert!(!complete || machine.emitted().iter().enumerate().all(|(i, id)| *id == id_at(i as u32)));
        prop_assert!(!complete || machine.emitted().len() == 8, "an answer that ends well is whole");
    }
}
