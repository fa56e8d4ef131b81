//! What all placements have in common, and how they differ.

use super::turns::ROOM;
use super::*;

fn worker(id: u64, role: Role) -> Candidate<'static> {
    Candidate { id: WorkerId(id), role, model: "m", layout: 1, draining: false, in_flight: 0 }
}

fn view() -> Vec<Candidate<'static>> {
    vec![
        worker(1, Role::Prefill),
        worker(2, Role::Prefill),
        worker(11, Role::Decode),
        worker(12, Role::Decode),
        worker(13, Role::Decode),
    ]
}

const ASK: PlacementInput<'static> = PlacementInput {
    model: "m",
    split: true,
    decode: None,
    avoid: &[],
    sent: None,
    held: Held { blocks: 0, by: &[] },
    apart: &[],
};

/// Every implementation, for tests of their common behaviour.
fn all() -> Vec<Box<dyn Placement>> {
    vec![Box::<RoundRobin>::default(), Box::<LeastLoaded>::default()]
}

fn ids(placed: Placed) -> (u64, Option<u64>) {
    (placed.decode.0, placed.prefill.map(|p| p.0))
}

#[test]
fn round_robin_gives_each_worker_its_turn_whatever_the_order_of_the_view() {
    let mut policy = RoundRobin::default();
    let mut view = view();
    let mut seen = Vec::new();
    for _ in 0..6 {
        seen.push(ids(policy.place(&view, &ASK).unwrap()));
        view.rotate_left(1);
    }
    assert_eq!(seen, [(11, Some(1)), (12, Some(2)), (13, Some(1)), (11, Some(2)), (12, Some(1)), (13, Some(2))]);
}

#[test]
fn a_worker_that_leaves_does_not_upset_the_turn() {
    let mut policy = RoundRobin::default();
    let mut view = view();
    assert_eq!(policy.place(&view, &ASK).unwrap().decode.0, 11);
    view.retain(|c| c.id.0 != 11);
    assert_eq!(policy.place(&view, &ASK).unwrap().decode.0, 12);
    assert_eq!(policy.place(&view, &ASK).unwrap().decode.0, 13);
}

#[test]
fn least_loaded_takes_the_idlest_of_each_role() {
    let mut policy = LeastLoaded::default();
    let mut view = view();
    for (at, load) in [(0, 4), (1, 1), (2, 3), (3, 2), (4, 2)] {
        view[at].in_flight = load;
    }
    assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (12, Some(2)));
    assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (13, Some(2)), "in turn among equals");
}

#[test]
fn draining_failed_and_foreign_workers_are_never_chosen() {
    for mut policy in all() {
        let mut view = view();
        view[2].draining = true;
        view[3].model = "other";
        view[0].layout = 2;
        for _ in 0..4 {
            assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (13, Some(2)));
        }
        let avoid = [WorkerId(2)];
        let placed = policy.place(&view, &PlacementInput { avoid: &avoid, ..ASK }).unwrap();
        assert_eq!(ids(placed), (13, None), "no prefill worker of its layout left: decode prefills");
    }
}

#[test]
fn a_pinned_decode_worker_stays_and_only_prefill_is_chosen() {
    for mut policy in all() {
        let mut view = view();
        view[3].draining = true;
        view[3].in_flight = 9;
        let avoid = [WorkerId(1)];
        let ask = PlacementInput { decode: Some(WorkerId(12)), avoid: &avoid, ..ASK };
        assert_eq!(ids(policy.place(&view, &ask).unwrap()), (12, Some(2)));
    }
}

/// The choices of one request, and the next turn of a conversation, go to the workers that have their KV.
#[test]
fn workers_that_have_the_prefix_are_taken_where_they_have_room() {
    for mut policy in all() {
        let mut view = view();
        let sent = Some(Sent { to: Placed { decode: WorkerId(12), prefill: Some(WorkerId(2)) }, blocks: 1 });
        for _ in 0..3 {
            assert_eq!(ids(policy.place(&view, &PlacementInput { sent, ..ASK }).unwrap()), (12, Some(2)));
        }
        assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (11, Some(1)), "they took no turn");
        (view[1].in_flight, view[3].in_flight) = (ROOM, ROOM);
        assert_eq!(ids(policy.place(&view, &PlacementInput { sent, ..ASK }).unwrap()), (12, Some(2)));
        view[3].in_flight += 1;
        let more = [(); 3].map(|()| ids(policy.place(&view, &PlacementInput { sent, ..ASK }).unwrap()));
        assert!(more.iter().any(|placed| placed.0 != 12) && more.iter().all(|placed| placed.1 == Some(2)), "{more:?}");
        let avoid = [WorkerId(2)];
        let ask = PlacementInput { decode: Some(WorkerId(13)), avoid: &avoid, sent, ..ASK };
        assert_eq!(ids(policy.place(&view, &ask).unwrap()), (13, Some(1)), "nearness is no must");
    }
}

/// What workers say that they hold counts for more than where prompts were sent.
#[test]
fn the_worker_that_holds_most_is_taken_where_it_has_room() {
    for mut policy in all() {
        let mut view = view();
        let holder = |id, blocks| Holder { worker: WorkerId(id), blocks };
        let by = [holder(13, 9), holder(2, 8), holder(12, 6), holder(11, 5)];
        let to = Placed { decode: WorkerId(11), prefill: Some(WorkerId(1)) };
        let (held, sent) = (Held { blocks: 10, by: &by }, Some(Sent { to, blocks: 6 }));
        let ask = PlacementInput { held, sent, ..ASK };
        assert_eq!(ids(policy.place(&view, &ask).unwrap()), (13, Some(2)));
        view[4].in_flight = ROOM + 1;
        view[1].draining = true;
        assert_eq!(
            ids(policy.place(&view, &ask).unwrap()),
            (12, Some(1)),
            "the next that holds most; where it was sent"
        );
        view[3].draining = true;
        assert_eq!(policy.place(&view, &ask).unwrap().decode.0, 11, "half is not enough, but it was sent there");
        let whole = Some(Sent { to, blocks: 10 });
        view[4].in_flight = 0;
        assert_eq!(
            policy.place(&view, &PlacementInput { sent: whole, ..ask }).unwrap().decode.0,
            11,
            "it computes all of it"
        );
        view[4].in_flight = ROOM + 1;
        let ask = PlacementInput { sent: None, ..ask };
        let placed = [(); 2].map(|()| policy.place(&view, &ask).unwrap().decode.0);
        assert!(placed.contains(&11), "in turn: {placed:?}");
    }
}

#[test]
fn aggregated_requests_get_no_prefill_worker() {
    for mut policy in all() {
        let placed = policy.place(&view(), &PlacementInput { split: false, ..ASK }).unwrap();
        assert_eq!(placed.prefill, None);
    }
}

#[test]
fn an_error_says_why_nobody_can() {
    for mut policy in all() {
        let none = PlacementError::NoDecodeWorker { model: "m".into(), draining: 0 };
        assert_eq!(policy.place(&view()[..2], &ASK), Err(none));
        let avoid = [WorkerId(11), WorkerId(12), WorkerId(13)];
        let all_failed = PlacementError::AllFailed { model: "m".into(), failed: 3 };
        assert_eq!(policy.place(&view(), &PlacementInput { avoid: &avoid, ..ASK }), Err(all_failed));
        let mut draining = view();
        draining.iter_mut().for_each(|c| c.draining = true);
        let text = policy.place(&draining, &ASK).unwrap_err().to_string();
        assert!(text.contains("3 draining"), "{text}");
    }
}
