//! The promised recoveries, each as a scenario.

use super::*;
use crate::request::{NEW_WAITS, State};

fn ids(actions: &[Action]) -> Vec<(WorkerId, bool)> {
    let open = |a: &Action| if let Action::OpenDecode { worker, local } = a { Some((*worker, *local)) } else { None };
    actions.iter().filter_map(open).collect()
}

fn prefills(actions: &[Action]) -> Vec<WorkerId> {
    actions.iter().filter_map(|a| if let Action::RunPrefill { worker } = a { Some(*worker) } else { None }).collect()
}

#[test]
fn the_plain_route() {
    let (machine, actions) = after([
        split(D1, P1),
        reserved(),
        Input::FirstToken { token: out(0), finish: None, cached_tokens: 32 },
        Input::Transferred,
        token(1),
        token(2),
        finished(FinishReason::Length),
    ]);
    assert!(machine.ended());
    assert_eq!(emitted(&actions), [0, 1, 2]);
    assert_eq!(actions.last(), Some(&Action::Finish { reason: FinishReason::Length, cached_tokens: 32 }));
}

#[test]
fn what_was_reused_is_told_of_the_attempt_that_gave_the_first_token() {
    let started = |cached_tokens| Input::Started { cached_tokens };
    let (_, actions) = after([
        local(D1),
        started(16),
        Input::DecodeLost(lost(ErrorKind::Unavailable)),
        local(D2),
        started(48),
        token(0),
        Input::DecodeLost(lost(ErrorKind::Unavailable)),
        local(D1),
        started(64),
        Input::StopMatched,
    ]);
    assert_eq!(actions.last(), Some(&Action::Finish { reason: FinishReason::Stop, cached_tokens: 48 }));
}

#[test]
fn decode_may_be_ahead_of_the_prefill_stream() {
    // I4: two connections, so token 1 may overtake token 0; the client still sees 0, 1, 2.
    let (_, actions) = after([split(D1, P1), reserved(), token(1), token(2), finished(FinishReason::Stop), first(0)]);
    assert_eq!(emitted(&actions), [0, 1, 2]);
    assert!(matches!(actions.last(), Some(Action::Finish { reason: FinishReason::Stop, .. })));
}

#[test]
fn a_lost_prefill_worker_is_replaced_under_a_new_reservation() {
    let (machine, actions) = after([
        split(D1, P1),
        reserved(),
        Input::PrefillLost(lost(ErrorKind::Unavailable)),
        split(D1, P2),
        reserved(),
        first(0),
        Input::Transferred,
        token(1),
    ]);
    assert_eq!(ids(&actions), [(D1, false), (D1, false)], "I3: dropping the first stream fences its epoch");
    assert_eq!(prefills(&actions), [P1, P2]);
    assert_eq!(emitted(&actions), [0, 1]);
    assert_eq!(machine.avoid(), [P1]);
}

#[test]
fn without_another_prefill_worker_decode_computes_the_prompt() {
    let (_, actions) = after([
        split(D1, P1),
        reserved(),
        first(0),
        Input::PrefillLost(lost(ErrorKind::Unavailable)),
        local(D1),
        token(1),
    ]);
    assert_eq!(ids(&actions), [(D1, false), (D1, true)]);
    assert_eq!(emitted(&actions), [0, 1], "token 0 was out already, so the local run begins at 1");
}

#[test]
fn a_handoff_that_fails_under_a_healthy_decode_worker_is_the_prefill_workers_fault() {
    let (machine, actions) = after([
        split(D1, P1),
        reserved(),
        Input::HandoffFailed(lost(ErrorKind::Unavailable)),
        split(D1, P2),
        reserved(),
        first(0),
    ]);
    assert_eq!((ids(&actions), prefills(&actions)), (vec![(D1, false), (D1, false)], vec![P1, P2]));
    assert_eq!(machine.avoid(), [P1]);
}

#[test]
fn a_path_that_breaks_is_nobodys_fault() {
    for told in [Input::HandoffFailed, Input::PrefillLost] {
        let broken = || told(lost(ErrorKind::PathLost));
        let (machine, actions) = after([split(D1, P1), reserved(), broken(), split(D1, P1), reserved(), first(0)]);
        assert_eq!((ids(&actions), prefills(&actions)), (vec![(D1, false), (D1, false)], vec![P1, P1]));
        assert_eq!(machine.avoid(), []);
        let recovering = actions.iter().filter(|a| matches!(a, Action::Recovering { leg: Leg::Transfer, .. }));
        assert_eq!(recovering.count(), 1);
        // After a second failure, the decode worker computes the prompt itself.
        let (_, actions) = after([split(D1, P1), reserved(), broken(), split(D1, P1), reserved(), broken()]);
        assert_eq!(ids(&actions).last(), Some(&(D1, true)));
    }
}

#[test]
fn a_request_is_refused_when_two_workers_refuse_it() {
    for kind in [ErrorKind::InvalidArgument, ErrorKind::NotFound, ErrorKind::TooLarge] {
        let refused = || Input::DecodeLost(lost(kind));
        let (machine, actions) = after([local(D1), refused(), local(D2), token(0), finished(FinishReason::Stop)]);
        assert_eq!((emitted(&actions), machine.avoid()), (vec![0], &[D1][..]));
        let (machine, actions) = after([local(D1), refused(), local(D2), refused()]);
        assert!(machine.ended());
        assert_eq!(actions.last(), Some(&Action::Fail(lost(kind))));
    }
}

#[test]
fn a_lost_decode_worker_is_replaced_at_the_next_index() {
    let (machine, actions) = after([
        split(D1, P1),
        reserved(),
        first(0),
        token(1),
        Input::DecodeLost(lost(ErrorKind::Unavailable)),
        split(D2, P1),
        reserved(),
        first(2),
        token(3),
        finished(FinishReason::Stop),
    ]);
    assert!(machine.ended());
    assert_eq!(emitted(&actions), [0, 1, 2, 3]);
    assert_eq!(machine.avoid(), [D1]);
}

#[test]
fn a_decode_worker_lost_after_the_last_token_costs_nothing() {
    let before = [local(D1)].into_iter().chain((0..8).map(token));
    let (_, actions) = after(before.chain([Input::DecodeLost(lost(ErrorKind::Unavailable))]));
    assert_eq!(actions.last(), Some(&Action::Finish { reason: FinishReason::Length, cached_tokens: 0 }));
    let stop = TokenOut { index: 0, id: STOP, ..TokenOut::default() };
    let (_, actions) = after([local(D1), Input::Token(stop), Input::DecodeLost(lost(ErrorKind::Unavailable))]);
    assert_eq!(actions.last(), Some(&Action::Finish { reason: FinishReason::Stop, cached_tokens: 0 }));
}

#[test]
fn kv_that_does_not_verify_is_sent_again_then_computed_where_it_is_needed() {
    // I2
    let again = [split(D1, P1), reserved(), first(0), verify(), reserved(), first(1), verify()];
    let (_, actions) = after(again.into_iter().chain([token(2), finished(FinishReason::Stop)]));
    assert_eq!(ids(&actions), [(D1, false), (D1, false), (D1, true)]);
    assert_eq!(prefills(&actions), [P1, P1]);
    assert_eq!(emitted(&actions), [0, 1, 2]);
}

#[test]
fn a_prefill_worker_lost_after_its_token_leaves_no_trace_in_the_numbering() {
    let (_, actions) = after([
        split(D1, P1),
        reserved(),
        first(0),
        Input::PrefillLost(lost(ErrorKind::Unavailable)),
        split(D1, P2),
        reserved(),
        first(1),
        Input::Transferred,
        token(2),
    ]);
    assert_eq!(emitted(&actions), [0, 1, 2], "I4");
}

#[test]
fn an_answer_that_ends_with_the_first_token_cancels_decode() {
    let ends = Input::FirstToken { token: out(0), finish: Some(FinishReason::Stop), cached_tokens: 0 };
    let (_, actions) = after([split(D1, P1), reserved(), ends]);
    let tail = &actions[actions.len() - 4..];
    assert!(matches!(
        tail,
        [
            Action::Emit(_),
            Action::CancelDecode,
            Action::CancelPrefill,
            Action::Finish { reason: FinishReason::Stop, .. }
        ]
    ));
}

#[test]
fn attempts_are_bounded() {
    let die = || Input::DecodeLost(lost(ErrorKind::Unavailable));
    let (machine, actions) = after([local(D1), die(), local(D2), die(), local(D1), die(), local(D2)]);
    assert!(machine.ended());
    assert_eq!(ids(&actions).len(), 3);
    assert_eq!(actions.last(), Some(&Action::Fail(lost(ErrorKind::Unavailable))));
}

#[test]
fn a_full_cluster_is_said_at_once() {
    let full = Input::DecodeLost(lost(ErrorKind::ResourceExhausted));
    let nobody = Input::NotPlaced(lost(ErrorKind::Unavailable));
    let (_, actions) = after([local(D1), full, nobody]);
    assert_eq!(actions.last(), Some(&Action::Fail(lost(ErrorKind::ResourceExhausted))));
}

#[test]
fn waiting_for_a_worker_is_bounded() {
    let nobody = [Input::NotPlaced(lost(ErrorKind::Unavailable)), Input::BackoffOver];
    let nobody = || nobody.iter().cycle().take(20).cloned();
    let waits = |actions: &[Action]| -> Vec<u128> {
        actions.iter().filter_map(|a| if let Action::Backoff(d) = a { Some(d.as_millis()) } else { None }).collect()
    };
    let begun = [local(D1), token(0), Input::DecodeLost(lost(ErrorKind::Unavailable))];
    let (machine, actions) = after(begun.iter().cloned().chain(nobody()));
    assert!(machine.ended());
    assert_eq!(waits(&actions), [50, 100, 200, 400, 500, 500, 500, 500, 250]);
    assert_eq!(waits(&actions).iter().sum::<u128>(), limits().worker_wait.as_millis(), "I5");
    // A new one gives up sooner.
    let (machine, actions) = after(nobody());
    assert!(machine.ended());
    assert_eq!(waits(&actions).iter().sum::<u128>(), NEW_WAITS.as_millis(), "I5");
    // One that goes on in between may wait as long again.
    let again = [local(D2), token(1), Input::DecodeLost(lost(ErrorKind::Unavailable))];
    let (machine, actions) = after(begun.into_iter().chain(nobody().take(16)).chain(again).chain(nobody()));
    assert!(machine.ended());
    assert_eq!(waits(&actions).iter().sum::<u128>(), 2750 + 3000);
}

#[test]
fn what_would_be_late_waits_for_no_worker() {
    let (machine, actions) = after([Input::NotPlaced(lost(ErrorKind::ResourceExhausted))]);
    assert!(machine.ended());
    assert_eq!(actions.last(), Some(&Action::Fail(lost(ErrorKind::ResourceExhausted))));
}

#[test]
fn a_worker_that_hangs_is_not_asked_again() {
    // I5: each try at such a worker takes as long as noticing that it hangs.
    let asked_again = |failure: Failure| {
        let (mut machine, _) = after([local(D1), token(0), Input::DecodeLost(failure)]);
        let mut avoided = Vec::new();
        loop {
            machine.step(Input::NotPlaced(lost(ErrorKind::Unavailable)), &mut Vec::new());
            if machine.ended() {
                return avoided;
            }
            avoided.push(machine.avoid().to_vec());
            machine.step(Input::BackoffOver, &mut Vec::new());
        }
    };
    assert_eq!(asked_again(Failure::silent("gone")), vec![vec![D1]; 9]);
    assert_eq!(asked_again(Failure::leaving("drains")), vec![vec![D1]; 9]);
    assert_eq!(asked_again(lost(ErrorKind::Unavailable)), vec![vec![]; 9]);
}

#[test]
fn workers_that_take_nothing_on_cost_no_attempt() {
    // I7: while the registry is away, a router learns of a rolling restart only from refusals.
    let many = (0..20).flat_map(|n| [local(WorkerId(n)), Input::DecodeLost(Failure::leaving("drains"))]);
    let (machine, actions) =
        after(many.chain([split(D1, P1), reserved(), Input::PrefillLost(Failure::leaving("left"))]));
    assert_eq!(machine.state(), State::PlacingPrefill { decode: D1 });
    assert_eq!(machine.avoid().len(), 21, "none of them is asked again");
    assert!(!actions.iter().any(|action| matches!(action, Action::Fail(_))));
    let (machine, _) = after((0..3).flat_map(|n| [local(WorkerId(n)), Input::DecodeLost(lost(ErrorKind::Internal))]));
    assert!(machine.ended(), "failures of work that was begun are counted");
}

#[test]
fn a_worker_that_answers_something_else_is_left() {
    // I1, I4: the client already has token 0, so an answer with another token 0 cannot be continued.
    let stray = Input::Token(TokenOut { index: 0, id: 5, ..TokenOut::default() });
    let (machine, actions) = after([local(D1), token(0), stray, local(D2), token(1)]);
    assert_eq!(emitted(&actions), [0, 1]);
    assert_eq!(machine.avoid(), [D1]);
}
