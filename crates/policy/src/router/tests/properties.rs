//! Whatever inputs come, in whatever order and at whatever time: each index is emitted once and in order (I4), and the
//! answer ends (I5).

use proptest::prelude::*;

use super::*;

fn any_end() -> impl Strategy<Value = LegEnd> {
    prop_oneof![
        Just(LegEnd::Early),
        prop::sample::select(ErrorKind::ALL.to_vec()).prop_map(answered),
        any::<bool>().prop_map(lost),
        Just(LegEnd::Left { worker: D1 }),
    ]
}

fn any_input() -> impl Strategy<Value = ChoiceInput> {
    prop_oneof![
        2 => Just(split(D1, P1)),
        1 => Just(split(D2, P2)),
        1 => Just(late(D1, P1)),
        2 => Just(due()),
        1 => Just(local(D2)),
        1 => Just(nobody()),
        3 => Just(reserved()),
        6 => (0u32..6).prop_map(token),
        1 => Just(finished()),
        3 => (0u32..4).prop_map(first),
        1 => Just(transferred()),
        2 => any_end().prop_map(ChoiceInput::DecodeEnded),
        2 => any_end().prop_map(ChoiceInput::PrefillEnded),
        2 => Just(ChoiceInput::Taken(Taken::Sent)),
        3 => Just(ChoiceInput::Wake),
    ]
}

/// Checks what must hold of all effects of a choice.
fn check(scene: &Scene) {
    for (at, index) in scene.emitted().into_iter().enumerate() {
        assert_eq!(index as usize, at, "I4: each index once, in order");
    }
    let is_end = |e: &Effect| matches!(e, Effect::Finish { .. } | Effect::Fail(_));
    let ended = scene.choice.ended();
    assert_eq!(scene.effects.iter().filter(|e| is_end(e)).count(), usize::from(ended));
    assert!(!ended || scene.effects.last().is_some_and(is_end), "nothing follows the end");
    assert_eq!(scene.choice.next_wake().is_none(), ended);
}

proptest! {
    #[test]
    fn any_inputs_at_any_time(inputs in prop::collection::vec((any_input(), 0u64..200), 0..80)) {
        let mut scene = Scene::new();
        for (input, millis) in inputs {
            scene.now += Duration::from_millis(millis);
            scene.step(input);
            check(&scene);
        }
        // No more inputs come: the clock alone ends the answer, in a few steps.
        for _ in 0..4 {
            if !scene.choice.ended() {
                scene.now = scene.now.max(scene.choice.next_wake().unwrap());
                scene.step(ChoiceInput::Wake);
            }
        }
        prop_assert!(scene.choice.ended(), "I5: {:?}", scene.choice.state());
        check(&scene);
    }
}
