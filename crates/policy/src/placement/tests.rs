//! What all placements have in common, and how they differ.

use std::collections::BTreeSet;
use std::time::Duration;

use baton_latency::{StepCost, StepWork};

use super::turns::ROOM;
use super::*;

static UNTOLD: Links = Links::NONE;

pub(super) fn worker(id: u64, role: Role) -> Candidate<'static> {
    let (id, links) = (WorkerId(id), &UNTOLD);
    Candidate { id, role, model: "m", layout: 1, draining: false, in_flight: 0, load: None, links, exchanges: 0 }
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

pub(super) const ASK: PlacementInput<'static> = PlacementInput {
    model: "m",
    tokens: 100,
    answer: 100,
    block_size: 16,
    slo: Slo { first_token: None, token: None, deadline: None, waited: Duration::ZERO },
    late: f64::INFINITY,
    delays: Delays { first_token: 0.0, token: 0.0, expected: 0.0 },
    split: true,
    handed_over: false,
    decode: None,
    avoid: &[],
    sent: None,
    held: Held { blocks: 0, by: &[], stored: &[] },
    apart: &[],
    turn: 0,
};

/// Every implementation, for tests of their common behaviour.
fn all() -> Vec<Box<dyn Placement>> {
    let mut all = in_turn();
    all.push(Box::new(Predicted::new(0)));
    all
}

/// Those that know no load.
fn in_turn() -> Vec<Box<dyn Placement>> {
    vec![Box::<RoundRobin>::default(), Box::<LeastLoaded>::default()]
}

fn ids(chosen: Chosen) -> (u64, Option<u64>) {
    let placed = chosen.placed;
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
    assert_eq!(policy.place(&view, &ASK).unwrap().placed.decode.0, 11);
    view.retain(|c| c.id.0 != 11);
    assert_eq!(policy.place(&view, &ASK).unwrap().placed.decode.0, 12);
    assert_eq!(policy.place(&view, &ASK).unwrap().placed.decode.0, 13);
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
    for mut policy in in_turn() {
        let mut view = view();
        let sent =
            Some(Sent { to: Placed { decode: WorkerId(12), prefill: Some(WorkerId(2)) }, blocks: 1, lately: true });
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
    for mut policy in in_turn() {
        let mut view = view();
        let holder = |id, blocks| Holder { worker: WorkerId(id), blocks };
        let by = [holder(13, 9), holder(2, 8), holder(12, 6), holder(11, 5)];
        let to = Placed { decode: WorkerId(11), prefill: Some(WorkerId(1)) };
        let (held, sent) = (Held { blocks: 10, by: &by, stored: &[] }, Some(Sent { to, blocks: 6, lately: true }));
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
        assert_eq!(policy.place(&view, &ask).unwrap().placed.decode.0, 11, "half is not enough, but it was sent there");
        let whole = Some(Sent { to, blocks: 10, lately: true });
        view[4].in_flight = 0;
        assert_eq!(
            policy.place(&view, &PlacementInput { sent: whole, ..ask }).unwrap().placed.decode.0,
            11,
            "it computes all of it"
        );
        view[4].in_flight = ROOM + 1;
        let ask = PlacementInput { sent: None, ..ask };
        let placed = [(); 2].map(|()| policy.place(&view, &ask).unwrap().placed.decode.0);
        assert!(placed.contains(&11), "in turn: {placed:?}");
    }
}

#[test]
fn aggregated_requests_get_no_prefill_worker() {
    for mut policy in all() {
        let placed = policy.place(&view(), &PlacementInput { split: false, ..ASK }).unwrap();
        assert_eq!(placed.placed.prefill, None);
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

/// What a worker says: it has so much to do, and room for all.
fn load(work: StepWork) -> Option<Backlog> {
    let cost = StepCost { base: 8e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 5e-5, pair: 0.0 };
    Some(Backlog { work, room: 10_000, step_tokens: 512, cost, ..Backlog::default() })
}

fn loaded() -> Vec<Candidate<'static>> {
    let mut view = view();
    view.iter_mut().for_each(|worker| worker.load = load(StepWork::default()));
    view
}

const LONG: PlacementInput<'static> = PlacementInput { tokens: 4000, ..ASK };

fn queue(tokens: u64) -> Option<Backlog> {
    load(StepWork::default().with_prompt(0, tokens))
}

fn rows(rows: u64) -> Option<Backlog> {
    load((0..rows).fold(StepWork::default(), |work, _| work.with_row(2000)))
}

#[test]
fn a_prompt_goes_where_it_is_computed_first() {
    let (mut policy, mut view) = (Predicted::new(0), loaded());
    (view[0].load, view[1].load) = (queue(3000), queue(1000));
    let place = |policy: &mut Predicted, view: &[_], ask: &_| ids(policy.place(view, ask).unwrap()).1;
    assert_eq!(place(&mut policy, &view, &LONG), Some(2), "the shorter queue");
    let by = [Holder { worker: WorkerId(1), blocks: 240 }];
    let held = PlacementInput { held: Held { blocks: 250, by: &by, stored: &[] }, ..LONG };
    assert_eq!(place(&mut policy, &view, &held), Some(1), "who holds it has less to compute");
    view[0].load = queue(30_000);
    assert_eq!(place(&mut policy, &view, &held), Some(2), "the queue is longer than that");
    let (decode, prefill) = (WorkerId(11), Some(WorkerId(2)));
    let sent = |lately| Some(Sent { to: Placed { decode, prefill }, blocks: 240, lately });
    (view[0].load, view[1].load) = (queue(1000), queue(3000));
    let ask = PlacementInput { sent: sent(true), ..LONG };
    assert_eq!(place(&mut policy, &view, &ask), Some(2), "it is being computed there");
    let ask = PlacementInput { sent: sent(false), ..LONG };
    assert_eq!(place(&mut policy, &view, &ask), Some(1), "it would say so by now");
}

#[test]
fn an_answer_goes_where_its_tokens_come_fastest_and_there_is_room() {
    let (mut policy, mut view) = (Predicted::new(0), loaded());
    (view[2].load, view[3].load, view[4].load) = (rows(40), rows(10), rows(30));
    let place = |policy: &mut Predicted, view: &[_]| policy.place(view, &LONG).unwrap();
    let chosen = place(&mut policy, &view);
    assert_eq!(chosen.placed.decode.0, 12);
    let why = chosen.why.unwrap();
    // The ten answers, and this one in the middle of its own.
    assert!((why.terms.token - 0.0126).abs() < 1e-4, "{why:?}");
    assert!(why.terms.room == 0.0 && why.next.unwrap().1.sum() > why.terms.sum() - 1e-3 && why.considered == 6);
    view[3].load.as_mut().unwrap().room = -3000;
    let chosen = place(&mut policy, &view);
    assert_eq!(chosen.placed.decode.0, 13, "not where it would wait for blocks");
    view.iter_mut().for_each(|worker| worker.load.as_mut().unwrap().room = 50);
    let waits = place(&mut policy, &view).why.unwrap().terms;
    assert!(waits.room > 0.0 && waits.first_token > waits.room, "{waits:?}");
}

#[test]
fn a_short_prompt_is_computed_where_it_is_answered_if_that_is_soonest() {
    let (mut policy, mut view) = (Predicted::new(256), loaded());
    let short = PlacementInput { tokens: 200, ..LONG };
    (view[0].load, view[1].load) = (queue(3000), queue(3000));
    let place = |policy: &mut Predicted, view: &[_], ask: &_| ids(policy.place(view, ask).unwrap()).1;
    assert_eq!(place(&mut policy, &view, &short), None, "nothing is queued at the decode workers");
    assert!(place(&mut policy, &view, &PlacementInput { tokens: 257, ..short }).is_some(), "too long for that");
    let pinned = PlacementInput { decode: Some(WorkerId(11)), ..short };
    assert!(place(&mut policy, &view, &pinned).is_some(), "it waits for KV");
    let asked = PlacementInput { handed_over: true, ..short };
    assert!(place(&mut policy, &view, &asked).is_some(), "it was asked for");
    assert_eq!(place(&mut policy, &view[2..], &asked), None, "where there is a prefill worker");
    view[2..].iter_mut().for_each(|decode| decode.load = rows(64));
    assert!(place(&mut policy, &view, &short).is_some(), "many answers would wait for it");
    assert!(place(&mut Predicted::new(0), &loaded(), &short).is_some());
}

/// Workers that have learned nothing, or say nothing, are taken for like the others.
#[test]
fn unknown_workers_are_neither_shunned_nor_flooded() {
    let (mut policy, mut view) = (Predicted::new(0), view());
    let mut seen = std::collections::BTreeSet::new();
    seen.extend((0..60).map(|turn| ids(policy.place(&view, &PlacementInput { turn, ..LONG }).unwrap())));
    assert_eq!(seen.len(), 6, "equals take turns: {seen:?}");
    view[2].in_flight = 30;
    view[3].load = load(StepWork::default());
    view[3].load.as_mut().unwrap().cost = StepCost::default();
    view[4].load = rows(20);
    let placed = [(); 20].map(|()| policy.place(&view, &LONG).unwrap().placed.decode.0);
    assert_eq!(placed, [12; 20], "it has nothing to do, and costs what the others do");
}

#[test]
fn what_would_come_too_late_is_rejected_and_says_why() {
    let (mut policy, mut view) = (Predicted::new(0), loaded());
    (view[0].load, view[1].load) = (queue(60_000), queue(40_000));
    let slo = |first_token: u64| Slo { first_token: Some(Duration::from_millis(first_token)), ..Slo::default() };
    let ask = |first_token| PlacementInput { slo: slo(first_token), ..LONG };
    assert_eq!(ids(policy.place(&view, &ask(3000)).unwrap()).1, Some(2));
    let PlacementError::Late(missed) = policy.place(&view, &ask(2000)).unwrap_err() else { panic!() };
    assert!(missed.terms.queue < 2.8, "of the worker where it is least late: {missed}");
    assert_eq!(missed.retry_after(), Some(Duration::from_secs(1)));
    view[1].load = queue(0);
    view[2..].iter_mut().for_each(|decode| decode.load = rows(100));
    let slow = PlacementInput { slo: Slo { token: Some(Duration::from_millis(20)), ..Slo::default() }, ..LONG };
    let PlacementError::Late(missed) = policy.place(&view, &slow).unwrap_err() else { panic!() };
    assert!(missed.token.is_some() && missed.first_token.is_none(), "{missed}");
    view[3].load = rows(3);
    assert_eq!(ids(policy.place(&view, &slow).unwrap()).0, 12, "there it is met");
}

/// Who takes long to compute is not taken instead of those who do not.
#[test]
fn long_and_short_prompts_are_rejected_at_the_same_load() {
    let (mut policy, mut view) = (Predicted::new(0), loaded());
    let mut rejected = |tokens: u32, rows: u64, queued: u64| {
        view[..2].iter_mut().for_each(|prefill| prefill.load = queue(queued));
        view[2..].iter_mut().for_each(|decode| decode.load = self::rows(rows));
        let slo = Slo { first_token: None, token: Some(Duration::from_millis(25)), ..Slo::default() };
        policy.place(&view, &PlacementInput { tokens, slo, ..ASK }).is_err()
    };
    assert_eq!((rejected(2000, 59, 0), rejected(20_000, 59, 0)), (true, true));
    assert_eq!((rejected(2000, 30, 0), rejected(20_000, 30, 0)), (false, false));
    assert_eq!((rejected(2000, 59, 40_000), rejected(20_000, 59, 40_000)), (false, false), "most will have ended");
}

/// A worker may say anything.
#[test]
fn no_load_is_too_much_to_place_a_request() {
    let huge = StepWork { tokens: u64::MAX, pairs: u64::MAX, rows: u64::MAX, context: u64::MAX };
    let cost = StepCost { base: 1e300, row: 1e300, context: 1e300, chunk: 1e300, token: 1e300, pair: 1e300 };
    let load = Some(Backlog { work: huge, room: i64::MIN, cost, ..Backlog::default() });
    let (mut policy, mut view) = (Predicted::new(256), loaded());
    view[0].load = load;
    view[2].load = load;
    for _ in 0..8 {
        let (decode, prefill) = ids(policy.place(&view, &LONG).unwrap());
        assert!(decode != 11 && prefill != Some(1), "others have nothing to do");
    }
    view.iter_mut().for_each(|worker| worker.load = load);
    policy.place(&view, &LONG).unwrap();
}

/// While KV is on its way to a decode worker, that worker cannot compute with it.
#[test]
fn a_decode_worker_that_waits_for_kv_is_not_taken_for_one_that_holds_it() {
    let (mut policy, mut view) = (Predicted::new(256), loaded());
    view[..2].iter_mut().for_each(|prefill| prefill.load = queue(4000));
    let to = Placed { decode: WorkerId(12), prefill: Some(WorkerId(1)) };
    let ask = PlacementInput { sent: Some(Sent { to, blocks: 249, lately: true }), ..LONG };
    for _ in 0..8 {
        assert_eq!(ids(policy.place(&view, &ask).unwrap()).1, Some(1), "it is computed there already");
    }
    let alone = Some(Sent { to: Placed { prefill: None, ..to }, blocks: 249, lately: true });
    assert_eq!(ids(policy.place(&view, &PlacementInput { sent: alone, ..LONG }).unwrap()), (12, None));
}

/// Pairs are looked for among all decode workers, not among the four best ones whatever their layout.
#[test]
fn decode_workers_without_a_peer_do_not_hide_those_that_have_one() {
    let mut view: Vec<_> = (21..26).map(|id| Candidate { layout: 9, ..worker(id, Role::Decode) }).collect();
    view.extend([worker(1, Role::Prefill), worker(11, Role::Decode)]);
    view.iter_mut().for_each(|worker| worker.load = load(StepWork::default()));
    view[6].load = rows(2);
    let chosen = Predicted::new(0).place(&view, &LONG).unwrap();
    assert_eq!(chosen.why.unwrap().considered, 6, "five alone, and the pair");
}

#[test]
fn kv_takes_the_link_that_is_fast_enough() {
    // 13 MB of KV: a quarter of a second over the slow one.
    let rates = |rates: [f64; 3]| Links::new(1 << 17, [11, 12, 13].map(WorkerId).into_iter().zip(rates));
    let decodes = |links: &Links| -> BTreeSet<u64> {
        let mut view = view();
        view.iter_mut().filter(|worker| worker.role == Role::Prefill).for_each(|worker| worker.links = links);
        let place = |turn| Predicted::new(0).place(&view, &PlacementInput { turn, ..ASK });
        (0..50).map(|turn| place(turn).unwrap().placed.decode.0).collect()
    };
    assert_eq!(decodes(&rates([5e7, 1e9, 5e7])), BTreeSet::from([12]));
    assert_eq!(decodes(&rates([1e9; 3])), BTreeSet::from([11, 12, 13]), "the handoff is hidden by what is computed");
    // 11 is slow, and so may be the others: no reason to open a session.
    assert_eq!(decodes(&Links::new(1 << 17, [(WorkerId(11), 5e7)].into_iter())), BTreeSet::from([11]));
}

/// A pair that has a session is taken among pairs that are alike, also where there are more decode workers than are tried; and not where
/// another pair is faster by more than nothing.
#[test]
fn of_pairs_that_are_alike_the_one_with_an_open_session_is_taken() {
    let open = Links::new(1 << 10, [(WorkerId(25), 1e9)].into_iter());
    let mut view: Vec<_> = (1..4).map(|id| worker(id, Role::Prefill)).collect();
    view.extend((11..40).map(|id| worker(id, Role::Decode)));
    view.iter_mut().for_each(|worker| worker.load = load(StepWork::default()));
    let place = |view: &[Candidate<'_>], turn| {
        let placed = Predicted::new(0).place(view, &PlacementInput { turn, ..LONG }).unwrap().placed;
        (placed.prefill.unwrap().0, placed.decode.0)
    };
    let spread: BTreeSet<_> = (0..50).map(|turn| place(&view, turn)).collect();
    assert!(spread.len() > 20, "without sessions each has its turn: {spread:?}");
    view[1].links = &open;
    assert!((0..50).all(|turn| place(&view, turn) == (2, 25)));
    // The prefill worker of that pair has a prompt to compute: seconds, not a session, decide.
    view[1].load = load(StepWork::default().with_prompt(0, 2000));
    assert!((0..50).all(|turn| place(&view, turn).0 != 2));
}

/// Few prefill workers are tried with a decode worker: those that can hand over to it.
#[test]
fn workers_that_cannot_hand_over_are_in_nobodys_way() {
    let mut view: Vec<_> = (21..60).map(|id| Candidate { layout: 2, ..worker(id, Role::Prefill) }).collect();
    view.extend([worker(1, Role::Prefill), worker(11, Role::Decode)]);
    view.iter_mut().for_each(|worker| worker.load = load(StepWork::default()));
    view[39].load = queue(1000);
    assert_eq!(ids(Predicted::new(0).place(&view, &LONG).unwrap()), (11, Some(1)));
    // Of many that can, those that are sooner.
    view.iter_mut().for_each(|worker| worker.layout = 1);
    view[..39].iter_mut().for_each(|worker| worker.load = queue(2000));
    assert_eq!(ids(Predicted::new(0).place(&view, &LONG).unwrap()), (11, Some(1)));
}

/// A wait of which nothing says when it ends is none for a deadline, reserved late or not.
#[test]
fn a_wait_for_blocks_that_nobody_knows_misses_no_deadline() {
    let cost = StepCost { base: 8e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 2e-4, pair: 0.0 };
    let load = |work, room| Backlog { work, room, step_tokens: 512, cost, ..Backlog::default() };
    let queued = StepWork { tokens: 1000, ..StepWork::default() };
    let view = [
        Candidate { load: Some(load(queued, 1000)), ..worker(1, Role::Prefill) },
        Candidate { load: Some(load(StepWork::default(), 0)), ..worker(11, Role::Decode) },
    ];
    let slo = Slo { deadline: Some(Duration::from_secs(60)), ..ASK.slo };
    for late in [0.0, f64::INFINITY] {
        let chosen = Predicted::new(0).place(&view, &PlacementInput { late, slo, ..ASK }).unwrap();
        assert!(chosen.why.is_some_and(|why| why.terms.room >= 600.0 && why.terms.queue > 0.1), "{chosen:?}");
    }
}

#[test]
fn blocks_that_are_reserved_late_come_free_while_the_prompt_waits() {
    let cost = StepCost { base: 8e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 2e-4, pair: 0.0 };
    let load = |work, room| Backlog { work, room, step_tokens: 512, cost, ..Backlog::default() };
    let view = [
        Candidate {
            load: Some(load(StepWork { tokens: 300, ..StepWork::default() }, 1000)),
            ..worker(1, Role::Prefill)
        },
        Candidate {
            load: Some(load(StepWork { rows: 9, context: 1600, ..StepWork::default() }, 0)),
            ..worker(11, Role::Decode)
        },
    ];
    let terms = |late| Predicted::new(0).place(&view, &PlacementInput { late, ..ASK }).unwrap().why.unwrap().terms;
    let (early, late) = (terms(f64::INFINITY), terms(0.0));
    assert!(early.room > early.queue && early.queue > 0.03, "{early:?}");
    assert!((early.room - late.room - late.queue).abs() < 1e-9, "{late:?}");
}

/// Answers that end while the prompt is computed are not beside its own; an SLO is compared as if they might be.
#[test]
fn a_long_prompt_finds_fewer_answers_beside_its_own() {
    let mut view = vec![worker(1, Role::Prefill), worker(11, Role::Decode)];
    (view[0].load, view[1].load) = (queue(0), rows(8));
    let terms = |tokens| {
        let ask = PlacementInput { tokens, answer: 16, ..ASK };
        Predicted::new(0).place(&view, &ask).unwrap().why.unwrap().terms
    };
    let (short, long) = (terms(100), terms(8000));
    assert!(short.expected > 0.9 * short.token, "{short:?}");
    // A row and its context: 0.2 ms and more each.
    assert!(long.token - long.expected > 8.0 * 2e-4 && long.expected >= 8e-3, "{long:?}");
}

/// A prefill worker has steps without prompts only by chance, and knows little of what they cost.
#[test]
fn what_tokens_cost_is_asked_of_decode_workers() {
    let mut view = loaded();
    let expected = |view: &[Candidate<'_>]| Predicted::new(0).place(view, &ASK).unwrap().why.unwrap().terms.expected;
    let before = expected(&view);
    for worker in view.iter_mut().filter(|worker| worker.role == Role::Prefill) {
        let load = worker.load.as_mut().unwrap();
        load.cost = StepCost { base: load.cost.base * 1.5, context: 1e-5, ..load.cost };
    }
    assert_eq!(expected(&view), before);
}
