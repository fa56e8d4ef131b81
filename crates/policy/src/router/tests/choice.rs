//! The rules of the choice itself: waiting for the prefill stream's report, the meaning of a stream's end, the timers, and
//! what the choice asks for.

use super::*;
use crate::request::{Condition, Leg, State};

fn recovering(effects: &[Effect]) -> Option<(Leg, &Failure)> {
    effects.iter().find_map(|e| if let Effect::Recovering { leg, cause } = e { Some((*leg, cause)) } else { None })
}

/// The decode worker says that its path to the prefill worker broke, while the prefill stream is open.
fn path_lost() -> Scene {
    let mut scene = Scene::after([split(D1, P1), reserved()]);
    let effects = scene.step(ChoiceInput::DecodeEnded(answered(ErrorKind::PathLost)));
    assert_eq!((effects.as_slice(), scene.wakes_in()), (&[][..], Some(SECOND_WORD)));
    scene
}

#[test]
fn the_prefill_stream_has_the_second_word_on_a_path_that_broke() {
    let mut scene = path_lost();
    let effects = scene.step(ChoiceInput::PrefillEnded(lost(true)));
    let (leg, cause) = recovering(&effects).unwrap();
    assert_eq!((leg, cause.worker), (Leg::Prefill, Condition::Silent), "the worker is gone, not only the path");
    assert!(effects.contains(&Effect::DropDecode));
    assert_eq!(scene.wakes_in(), Some(DEADLINE), "the decode worker's word is forgotten with its stream");
}

#[test]
fn a_prefill_stream_that_says_nothing_leaves_the_first_word() {
    let mut scene = path_lost();
    scene.now += SECOND_WORD - Duration::from_nanos(1);
    assert_eq!(scene.step(ChoiceInput::Wake), [], "not yet");
    let effects = scene.wake();
    let (leg, cause) = recovering(&effects).unwrap();
    assert_eq!((leg, cause.kind), (Leg::Transfer, ErrorKind::PathLost));
    assert!(matches!(effects.last(), Some(Effect::Place(ask)) if ask.decode == Some(D1) && ask.avoid.is_empty()));
}

#[test]
fn a_token_is_no_second_word() {
    let mut scene = path_lost();
    assert_eq!(scene.step(first(0)).last(), Some(&Effect::Emit(out(0))));
    assert_eq!(scene.wakes_in(), Some(SECOND_WORD));
    assert_eq!(recovering(&scene.wake()).unwrap().0, Leg::Transfer);
}

#[test]
fn nobody_is_waited_for_who_has_said_his_last_word() {
    let mut scene = Scene::after([split(D1, P1), reserved(), first(0), transferred()]);
    let effects = scene.step(ChoiceInput::DecodeEnded(answered(ErrorKind::PathLost)));
    assert_eq!(recovering(&effects).unwrap().0, Leg::Decode, "all KV is there: it is the decode worker that failed");
}

#[test]
fn only_right_after_its_reservation_a_decode_worker_speaks_of_kv() {
    let end = || ChoiceInput::DecodeEnded(answered(ErrorKind::Unavailable));
    let kv = Scene::after([split(D1, P1), reserved()]).step(end());
    assert_eq!(recovering(&kv).unwrap().0, Leg::Prefill);
    let decode = Scene::after([split(D1, P1), reserved(), first(0), token(1)]).step(end());
    assert_eq!(recovering(&decode).unwrap().0, Leg::Decode);
    let connection = Scene::after([split(D1, P1), reserved()]).step(ChoiceInput::DecodeEnded(lost(false)));
    assert_eq!(recovering(&connection).unwrap().0, Leg::Decode, "not its own word");
    // The reservation of an earlier stream does not count for a new stream.
    let mut again = Scene::after([split(D1, P1), reserved(), end(), split(D1, P2)]);
    assert_eq!(recovering(&again.step(end())).unwrap().0, Leg::Decode);
}

#[test]
fn what_a_streams_end_means() {
    use Condition::{Leaving, Silent, Usable};
    let cases = [
        (LegEnd::Early, ErrorKind::Unavailable, "the decode worker ended the stream too early", Usable),
        (answered(ErrorKind::Internal), ErrorKind::Internal, "the decode worker answered: no", Usable),
        (answered(ErrorKind::Cancelled), ErrorKind::Unavailable, "the decode worker cancelled the request", Usable),
        (lost(false), ErrorKind::Unavailable, "the decode worker is lost: broken pipe", Usable),
        (lost(true), ErrorKind::Unavailable, "the decode worker is lost: broken pipe", Silent),
        (LegEnd::Unclear { message: "what?".into() }, ErrorKind::Internal, "what?", Usable),
        (LegEnd::Draining { message: "no".into() }, ErrorKind::Unavailable, "the decode worker answered: no", Leaving),
        (LegEnd::Left { worker: D1 }, ErrorKind::Unavailable, "worker wd1 has left", Leaving),
        (answered(ErrorKind::DataLoss), ErrorKind::DataLoss, "the decode worker answered: no", Usable),
    ];
    for (end, kind, message, worker) in cases {
        let effects = Scene::after([local(D1)]).step(ChoiceInput::DecodeEnded(end));
        let (leg, cause) = recovering(&effects).unwrap();
        assert_eq!((leg, cause), (Leg::Decode, &Failure { worker, ..Failure::new(kind, message) }));
    }
    let prefill = Scene::after([split(D1, P1), reserved()]).step(ChoiceInput::PrefillEnded(LegEnd::Early));
    assert_eq!(recovering(&prefill).unwrap().1.message, "the prefill worker ended the stream too early");
}

#[test]
fn kv_that_does_not_verify_is_nobodys_fault_whichever_stream_says_so() {
    // I2
    for said in [ChoiceInput::DecodeEnded, ChoiceInput::PrefillEnded] {
        let effects = Scene::after([split(D1, P1), reserved()]).step(said(answered(ErrorKind::DataLoss)));
        assert_eq!(recovering(&effects).unwrap().0, Leg::Transfer);
        assert!(matches!(effects.last(), Some(Effect::OpenDecode { worker: D1, local: false, .. })));
    }
}

#[test]
fn a_stream_that_has_said_its_last_word_is_not_heard_any_more() {
    // The decode stream is ahead and done. Only the first token is missing (I4).
    let mut scene = Scene::after([split(D1, P1), reserved(), token(1), finished()]);
    assert_eq!(scene.step(ChoiceInput::DecodeEnded(LegEnd::Early)), []);
    assert_eq!(scene.step(token(2)), []);
    scene.step(first(0));
    assert_eq!(scene.emitted(), [0, 1]);
    assert!(scene.choice.ended());
    let mut scene = Scene::after([split(D1, P1), reserved(), first(0), transferred()]);
    assert_eq!(scene.step(ChoiceInput::PrefillEnded(LegEnd::Early)), []);
}

#[test]
fn streams_are_opened_for_what_the_client_has_and_the_time_that_is_left() {
    let mut scene = Scene::after([split(D1, P1)]);
    scene.now += DEADLINE / 2;
    let effects = scene.step(reserved());
    let [Effect::OpenPrefill { worker: P1, target, sequence }] = effects.as_slice() else { panic!("{effects:?}") };
    let target = target.as_deref();
    assert_eq!((target, &sequence.tokens[..], sequence.prompt_tokens), (Some(&[7][..]), &[1, 2][..], 2));
    assert_eq!(sequence.time_left, DEADLINE / 2);
    scene.step(first(0));
    scene.step(token(1));
    scene.step(ChoiceInput::DecodeEnded(LegEnd::Early));
    let effects = scene.step(local(D2));
    let [Effect::OpenDecode { worker: D2, local: true, sequence }] = effects.as_slice() else { panic!("{effects:?}") };
    assert_eq!((&sequence.tokens[..], sequence.prompt_tokens), (&[1, 2, 10, 11][..], 2), "I4");
}

#[test]
fn decode_blocks_are_asked_for_when_the_prompts_turn_is_near() {
    let mut scene = Scene::new();
    let queued = scene.step(late(D1, P1));
    let [Effect::OpenPrefill { worker: P1, target: None, sequence }] = queued.as_slice() else { panic!("{queued:?}") };
    assert_eq!(&sequence.tokens[..], [1, 2]);
    let due = scene.step(due());
    let [Effect::OpenDecode { worker: D1, local: false, sequence }] = due.as_slice() else { panic!("{due:?}") };
    assert_eq!(&sequence.tokens[..], [1, 2]);
    assert_eq!(scene.step(reserved()), [Effect::SendTarget(vec![7])]);
    scene.step(first(0));
    scene.step(token(1));
    assert_eq!(scene.emitted(), [0, 1]);
    // The decode worker has the prompt: nobody needs to compute it.
    let mut cached = Scene::after([late(D1, P1), super::due()]);
    let started = cached.step(ChoiceInput::DecodeSaid(DecodeWord::Started { cached_tokens: 1 }));
    assert_eq!(started, [Effect::DropPrefill]);
}

/// Neither worker waits for the other one's step: each answers between two of its own.
#[test]
fn both_workers_are_asked_at_once_and_the_target_follows() {
    let mut scene = Scene::new();
    let asked = scene.step(meanwhile(D1, P1));
    let [
        Effect::OpenPrefill { worker: P1, target: None, sequence },
        Effect::OpenDecode { worker: D1, local: false, sequence: same },
    ] = asked.as_slice()
    else {
        panic!("{asked:?}")
    };
    assert_eq!(sequence, same);
    assert_eq!(scene.step(due()), [], "they are reserved already");
    assert_eq!(scene.step(reserved()), [Effect::SendTarget(vec![7])]);
    scene.step(first(0));
    scene.step(token(1));
    assert_eq!(scene.emitted(), [0, 1]);
    // One that takes no prompt has not been told of any handoff.
    let mut refused = Scene::after([meanwhile(D1, P1)]);
    let full = ChoiceInput::PrefillEnded(answered(ErrorKind::Unavailable));
    let effects = refused.step(full);
    let blames = |effect: &&Effect| matches!(effect, Effect::Judge(Verdict { on: Subject::Worker(P1), .. }));
    assert!(effects.iter().any(|effect| blames(&effect)), "{effects:?}");
}

/// A prefill worker is not slow because a decode worker has no blocks.
#[test]
fn what_a_prompt_waits_for_after_its_turn_came_is_not_its_prefill_workers_doing() {
    let mut scene = Scene::after([late(D1, P1)]);
    for input in [due(), reserved(), first(0)] {
        scene.now += DEADLINE / 4;
        let effects = scene.step(input);
        let worked = effects.iter().find_map(|effect| match effect {
            Effect::Judge(Verdict { on: Subject::Worker(P1), outcome: Outcome::Worked(Some(time)), .. }) => Some(*time),
            _ => None,
        });
        if let Some(time) = worked {
            // In the queue, and computing: half of the deadline for two tokens.
            let each = crate::router::pace::of_prompt(DEADLINE / 2, 2, 0);
            assert_eq!(time, each);
            return;
        }
    }
    panic!("it was not judged");
}

#[test]
fn what_was_answered_may_be_what_the_next_prompt_begins_with() {
    let mut scene = Scene::after([local(D1), token(0)]);
    let effects = scene.step(finished());
    let [Effect::Judge(_), Effect::Note { placed, names, tokens, answer }, Effect::Finish { .. }] = effects.as_slice()
    else {
        panic!("{effects:?}")
    };
    assert_eq!(*placed, Placed { decode: D1, prefill: None });
    assert_eq!(*names, crate::Prefixes::names(crate::NameChain::default(), 2, &[], &[1, 2, 10]));
    assert_eq!((names.len(), *answer), (1, 1), "a block of two tokens");
    assert_eq!(**tokens, [1, 2, 10]);
    assert_eq!(Scene::new().step(ChoiceInput::ClientGone).len(), 1, "nobody has anything yet");
}

#[test]
fn a_worker_is_looked_for_again_after_each_wait() {
    let mut scene = Scene::after([local(D1), token(0), ChoiceInput::DecodeEnded(LegEnd::Early), nobody()]);
    assert_eq!(scene.wakes_in(), Some(Duration::from_millis(50)));
    assert_eq!(scene.step(ChoiceInput::Wake), [], "not yet");
    assert!(matches!(scene.wake().as_slice(), [Effect::Place(_)]));
    assert_eq!(scene.choice.state(), State::Placing);
    scene.step(nobody());
    assert_eq!(scene.wakes_in(), Some(Duration::from_millis(100)));
}

#[test]
fn nothing_that_workers_say_is_taken_after_the_deadline() {
    // I5
    for said in [token(0), finished(), ChoiceInput::DecodeEnded(LegEnd::Early), ChoiceInput::Wake] {
        let mut scene = Scene::after([local(D1)]);
        scene.now = scene.begun + DEADLINE;
        let effects = scene.step(said);
        assert!(
            matches!(effects.last(), Some(Effect::Fail(f)) if f.kind == ErrorKind::DeadlineExceeded),
            "{effects:?}"
        );
        assert_eq!(scene.choice.next_wake(), None);
    }
    let mut scene = Scene::after([local(D1)]);
    scene.now = scene.begun + DEADLINE;
    assert!(matches!(scene.step(ChoiceInput::ClientGone).last(), Some(Effect::Finish { .. })));
}

#[test]
fn what_the_client_does_ends_it() {
    let ends = |input| Scene::after([local(D1), token(0)]).step(input);
    let reason = |effects: Vec<Effect>| match effects.last() {
        Some(Effect::Finish { reason, .. }) => *reason,
        other => panic!("{other:?}"),
    };
    assert_eq!(ends(ChoiceInput::Taken(Taken::Sent)), []);
    assert_eq!(reason(ends(ChoiceInput::Taken(Taken::StopMatched))), FinishReason::Stop);
    assert_eq!(reason(ends(ChoiceInput::Taken(Taken::ClientGone))), FinishReason::Cancelled);
    assert_eq!(reason(ends(ChoiceInput::ClientGone)), FinishReason::Cancelled);
    let stopping = ends(ChoiceInput::Stopping);
    assert!(matches!(stopping.last(), Some(Effect::Fail(f)) if f.message == "the router is stopping"));
}

/// All verdicts of a request that goes through these inputs, a millisecond apart.
fn verdicts(inputs: impl IntoIterator<Item = ChoiceInput>) -> Vec<(Subject, Outcome)> {
    verdicts_in(Class::Interactive, inputs)
}

#[test]
fn what_a_request_asks_of_its_placement_is_asked() {
    for handed_over in [false, true] {
        let scene = Scene::asked(|new| NewRequest { handed_over, class: Class::Batch, ..new });
        let [Effect::Place(ask)] = &scene.effects[..] else { panic!("{:?}", scene.effects) };
        assert_eq!((ask.handed_over, ask.class, ask.tokens), (handed_over, Class::Batch, 2));
    }
}

fn verdicts_in(class: Class, inputs: impl IntoIterator<Item = ChoiceInput>) -> Vec<(Subject, Outcome)> {
    let mut scene = Scene::in_class(class, &[1, 2], false, Patience { first_token: 2 * DEADLINE, token: 2 * DEADLINE });
    let mut verdicts = Vec::new();
    for input in inputs {
        scene.now += Duration::from_millis(1);
        let said = scene.step(input);
        verdicts.extend(said.into_iter().filter_map(|effect| match effect {
            Effect::Judge(Verdict { on, outcome, .. }) => Some((on, outcome)),
            _ => None,
        }));
    }
    verdicts
}

#[test]
fn who_worked_and_who_failed_is_judged() {
    let (pair, ms) = (Subject::Pair { prefill: P1, decode: D1 }, Duration::from_millis(1));
    let worked = |time| Outcome::Worked(time);
    let begin = || vec![split(D1, P1), reserved(), first(0), transferred()];
    let through = |more: Vec<ChoiceInput>| verdicts(begin().into_iter().chain(more));
    let well = [(Subject::Worker(P1), worked(Some(ms / 64))), (pair, worked(None))];
    let all = through((1..9).map(token).chain([finished()]).collect());
    assert_eq!(all, [well[0], well[1], (Subject::Worker(D1), worked(Some(ms)))]);
    let batch = begin().into_iter().chain((1..9).map(token)).chain([finished()]);
    let gave_way = [(Subject::Worker(P1), worked(None)), (pair, worked(None)), (Subject::Worker(D1), worked(None))];
    assert_eq!(verdicts_in(Class::Batch, batch), gave_way, "its times say nothing of the worker");
    let broken = through(vec![token(1), ChoiceInput::DecodeEnded(answered(ErrorKind::Internal))]);
    assert_eq!(broken, [well[0], well[1], (Subject::Worker(D1), Outcome::Failed)]);
    let corrupt = ChoiceInput::DecodeEnded(answered(ErrorKind::DataLoss));
    assert_eq!(verdicts([split(D1, P1), reserved(), corrupt]), [(pair, Outcome::Failed)]);
    let prefill = |kind| verdicts([split(D1, P1), reserved(), ChoiceInput::PrefillEnded(answered(kind))]);
    assert_eq!(prefill(ErrorKind::Internal), [(Subject::Worker(P1), Outcome::Failed)]);
    // Not clear whose fault it is.
    for between in [ErrorKind::PathLost, ErrorKind::Unavailable] {
        assert_eq!(prefill(between), [(pair, Outcome::Failed)]);
    }
    let gone = through(vec![token(1), ChoiceInput::ClientGone]);
    assert_eq!(gone, well, "it may have left because nothing came");
    for nobody in [ErrorKind::ResourceExhausted, ErrorKind::InvalidArgument, ErrorKind::DeadlineExceeded] {
        assert_eq!(prefill(nobody), [], "{nobody:?}");
    }
    let draining = ChoiceInput::DecodeEnded(LegEnd::Draining { message: "no".into() });
    assert_eq!(verdicts([split(D1, P1), draining]), []);
    assert_eq!(verdicts([split(D1, P1), ChoiceInput::ClientGone]), []);
}

/// A request that has gone through these inputs, whose workers may send nothing for 10 s before the first token, then for 1 s.
fn impatient(inputs: impl IntoIterator<Item = ChoiceInput>) -> Scene {
    let patience = Patience { first_token: Duration::from_secs(10), token: Duration::from_secs(1) };
    let mut scene = Scene::with(patience);
    inputs.into_iter().for_each(|input| drop(scene.step(input)));
    scene
}

#[test]
fn a_worker_that_sends_nothing_is_given_up() {
    let prefilling = || vec![split(D1, P1), reserved()];
    let more = |inputs: Vec<ChoiceInput>| prefilling().into_iter().chain(inputs).collect();
    let cases: [(Vec<ChoiceInput>, u64, Leg, &[Effect]); 5] = [
        (vec![split(D1, P1)], 10, Leg::Decode, &[Effect::DropDecode]),
        (prefilling(), 10, Leg::Prefill, &[Effect::DropDecode, Effect::DropPrefill]),
        (more(vec![first(0)]), 1, Leg::Prefill, &[Effect::DropDecode, Effect::DropPrefill]),
        (more(vec![first(0), transferred()]), 1, Leg::Decode, &[Effect::DropDecode]),
        (vec![local(D1), token(0)], 1, Leg::Decode, &[Effect::DropDecode]),
    ];
    for (inputs, seconds, leg, drops) in cases {
        let mut scene = impatient(inputs);
        assert_eq!(scene.wakes_in(), Some(Duration::from_secs(seconds)), "{leg:?}");
        let effects = scene.wake();
        let (of, cause) = recovering(&effects).unwrap();
        assert_eq!((of, cause.worker), (leg, Condition::Silent));
        assert!(drops.iter().all(|drop| effects.contains(drop)), "{effects:?}");
        assert!(matches!(effects.last(), Some(Effect::Place(_))), "{effects:?}");
    }
}

#[test]
fn only_what_workers_keep_waiting_counts() {
    let mut scene = impatient([local(D1)]);
    scene.now += Duration::from_secs(9);
    scene.step(token(0));
    assert_eq!(scene.wakes_in(), Some(Duration::from_secs(1)));
    // The client took the token late. The worker could not send more meanwhile.
    scene.now += Duration::from_secs(5);
    scene.step(ChoiceInput::Taken(Taken::Sent));
    assert_eq!(scene.wakes_in(), Some(Duration::from_secs(1)));
    assert_eq!(scene.step(ChoiceInput::Wake), []);
    let waiting = impatient([local(D1), token(0), ChoiceInput::DecodeEnded(LegEnd::Early), nobody()]);
    assert_eq!(waiting.wakes_in(), Some(Duration::from_millis(50)), "nobody is asked");
}

/// Each takes nothing on, so none costs an attempt; there are more of them than attempts.
#[test]
fn workers_at_whose_address_nobody_listens_cost_no_attempt() {
    let refused = || LegEnd::Lost { message: "connection refused".into(), broken: Broken::Refused };
    let mut scene = Scene::new();
    for id in 1..=9 {
        scene.step(local(WorkerId(id)));
        let effects = scene.step(ChoiceInput::DecodeEnded(refused()));
        let Some(Effect::Place(ask)) = effects.last() else { panic!("{effects:?}") };
        assert_eq!(ask.avoid.len() as u64, id);
    }
    let effects = scene.step(local(D1));
    assert!(matches!(effects[..], [Effect::OpenDecode { worker: D1, .. }]), "{effects:?}");
}

/// Tokens of the prompt `[7, 8, 9, 10]` from these positions, as scores.
fn scores(positions: std::ops::Range<u32>) -> Vec<TokenOut> {
    positions.map(|index| TokenOut { index, id: 7 + index, logprob: Some(-1.0), ..TokenOut::default() }).collect()
}

fn scene_with_scores() -> Scene {
    let mut scene = Scene::of(&[7, 8, 9, 10], true, Patience { first_token: 2 * DEADLINE, token: 2 * DEADLINE });
    scene.step(split(D1, P1));
    scene.step(reserved());
    scene
}

#[test]
fn each_score_is_given_once_also_after_a_failure() {
    let said = |tokens| ChoiceInput::PrefillSaid(PrefillWord::Scored(tokens));
    let mut scene = scene_with_scores();
    assert_eq!(scene.step(said(scores(1..3))), [Effect::EmitScored(scores(1..3))]);
    let effects = scene.step(ChoiceInput::PrefillEnded(lost(true)));
    assert!(recovering(&effects).is_some());
    let mut effects = Vec::new();
    for input in [split(D1, P2), reserved()] {
        effects.extend(scene.step(input));
    }
    let asks = |e: &Effect| matches!(e, Effect::OpenPrefill { sequence, .. } if sequence.scored);
    assert!(effects.iter().any(asks), "{effects:?}");
    assert_eq!(scene.step(said(scores(1..2))), []);
    assert_eq!(scene.step(said(scores(2..4))), [Effect::EmitScored(scores(3..4))]);
    assert!(scene.step(first(0)).contains(&Effect::Emit(out(0))));
    let ended = scene.step(ChoiceInput::Taken(Taken::StopMatched));
    assert!(matches!(ended.last(), Some(Effect::Finish { .. })));
    assert!(!ended.iter().any(|e| matches!(e, Effect::Note { .. })), "its KV is kept nowhere: {ended:?}");
}

#[test]
fn an_answer_does_not_begin_without_the_scores_that_were_asked_for() {
    let said = |tokens| ChoiceInput::PrefillSaid(PrefillWord::Scored(tokens));
    let failed = |effects: &[Effect]| matches!(effects.last(), Some(Effect::Fail(failure)) if failure.kind == ErrorKind::Internal);
    let mut scene = scene_with_scores();
    assert_eq!(scene.step(token(1)), [], "the decode stream may be ahead");
    assert!(failed(&scene.step(first(0))));
    let mut scene = scene_with_scores();
    assert!(failed(&scene.step(said(scores(2..3)))), "a gap");
    let mut scene = scene_with_scores();
    let other = vec![TokenOut { id: 5, ..scores(1..2).remove(0) }];
    assert!(failed(&scene.step(said(other))), "another prompt");
}
