//! The fleet: which workers are chosen, which are lost, and what is in flight.

use std::sync::Arc;

use baton_kv_cache::BlockName;
use baton_latency::{Backlog, BatchWork, StepCost, StepWork};
use baton_membership::{Member, Role, View};

use super::*;
use crate::kv_index::Holder;
use crate::placement::{LeastLoaded, Links, Predicted, Reserve, Slo};

fn member(id: WorkerId, role: Role) -> Member {
    Member {
        id,
        role,
        grpc: "http://127.0.0.1:1".into(),
        admin: "http://127.0.0.1:2".into(),
        model: "m".into(),
        layout: 1,
        blocks: 10,
        block_size: 16,
        window_tokens: 0,
        max_running: 0,
        context_tokens: 128,
        draining: false,
        late_targets: true,
        exchanges: 0,
        kv_secret: 0,
    }
}

fn view(mut members: Vec<Member>) -> Arc<View> {
    members.sort_by_key(|m| m.id);
    Arc::new(View { members, ..View::default() })
}

fn two_and_two() -> Vec<Member> {
    vec![member(D1, Role::Decode), member(D2, Role::Decode), member(P1, Role::Prefill), member(P2, Role::Prefill)]
}

fn fleet(members: Vec<Member>) -> Fleet {
    let mut fleet = Fleet::new("m", Box::<LeastLoaded>::default(), 0);
    let joined = fleet.update(view(members.clone())).joined;
    assert_eq!(joined.len(), members.iter().filter(|m| m.role != Role::Supervisor).count());
    fleet
}

fn ask() -> Ask {
    Ask {
        split: true,
        handed_over: false,
        decode: None,
        avoid: Vec::new(),
        names: Vec::new().into(),
        tokens: 100,
        most: 100,
        slo: Slo::default(),
        class: Class::default(),
        before: None,
    }
}

fn on(decode: WorkerId, prefill: WorkerId) -> Placed {
    Placed { decode, prefill: Some(prefill) }
}

fn flags(fleet: &Fleet, id: WorkerId) -> (bool, u32) {
    fleet.members().find(|w| w.member.id == id).map(|w| (w.lost, w.in_flight)).unwrap()
}

#[test]
fn the_fingerprint_is_that_of_the_decode_workers_that_take_requests() {
    let of = |change: fn(&mut Vec<Member>)| {
        let mut members = two_and_two();
        change(&mut members);
        fleet(members).fingerprint()
    };
    assert_eq!(of(|_| {}), 1, "all have one layout");
    assert_eq!(of(|members| members[2].layout = 2), 1, "a prefill worker's does not count");
    let both = of(|members| members[1].layout = 2);
    assert!(both > 2, "of both, whoever has which");
    assert_eq!(of(|members| members[0].layout = 2), both);
    assert_eq!(of(|members| (members[0].layout, members[0].draining) = (2, true)), 1);
    assert_eq!(of(|members| members.iter_mut().for_each(|m| m.model = "other".into())), 0);
}

#[test]
fn requests_go_where_the_fewest_are() {
    let mut fleet = fleet(two_and_two());
    let leases = [D1, P2].map(|id| fleet.lease(id).unwrap());
    for _ in 0..3 {
        assert_eq!(fleet.place(&ask(), &[], Instant::now()).map(|chosen| chosen.placed), Ok(on(D2, P1)));
    }
    assert_eq!((flags(&fleet, D1), flags(&fleet, D2)), ((false, 1), (false, 0)));
    drop(leases);
    assert_eq!(flags(&fleet, D1), (false, 0));
}

/// Where there are many workers, a router looks at few: others than another router at the same time, and always at those that hold the prompt.
#[test]
fn routers_look_at_workers_of_their_own() {
    let role = |id: u64| if id.is_multiple_of(2) { Role::Prefill } else { Role::Decode };
    let workers: Vec<_> = (1..=2000).map(|id| member(WorkerId(id), role(id))).collect();
    let placed = |seed: u64| {
        let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), seed);
        fleet.update(view(workers.clone()));
        let holds = Holder { worker: WorkerId(1000), blocks: 6 };
        let ask = Ask { names: (0..6).map(BlockName).collect(), ..ask() };
        assert_eq!(fleet.place(&ask, &[holds], Instant::now()).unwrap().placed.prefill, Some(holds.worker));
        (0..20).map(|_| fleet.place(&self::ask(), &[], Instant::now()).unwrap().placed.decode).collect::<Vec<_>>()
    };
    assert_eq!(placed(1), placed(1));
    let (one, other) = (placed(1), placed(1 << 40));
    let both = one.iter().filter(|id| other.contains(id)).count();
    assert!(both <= 5, "{both} of {one:?}");
}

#[test]
fn a_lost_worker_is_left_alone_until_it_answers_or_nobody_else_is_there() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    let lease = fleet.lease(D1).unwrap();
    assert_eq!(fleet.ended(&lease, &answered(ErrorKind::Internal), now), None, "it lives");
    assert_eq!(fleet.ended(&lease, &LegEnd::Early, now), None);
    let probe = fleet.ended(&lease, &lost(false), now).unwrap();
    assert_eq!((probe.worker(), probe.at()), (D1, now + PROBE_EVERY));
    assert_eq!(fleet.ended(&lease, &lost(true), now), None, "one probe for all requests that lost it");
    drop(lease);
    for _ in 0..3 {
        assert_eq!(fleet.place(&ask(), &[], Instant::now()).unwrap().placed.decode, D2);
    }
    let only = Ask { avoid: vec![D2], ..ask() };
    assert_eq!(fleet.place(&only, &[], Instant::now()).unwrap().placed.decode, D1, "rather than nobody");
    let now = now + PROBE_EVERY * 3;
    let probe = fleet.probed(probe, false, now).unwrap();
    assert_eq!((probe.at(), flags(&fleet, D1).0), (now + PROBE_EVERY, true));
    assert_eq!(fleet.probed(probe, true, now), None);
    assert!(!flags(&fleet, D1).0);
    let placed: Vec<_> = (0..2).map(|_| fleet.place(&ask(), &[], Instant::now()).unwrap().placed.decode).collect();
    assert!(placed.contains(&D1) && placed.contains(&D2), "in turn again");
}

#[test]
fn a_worker_that_says_that_it_drains_is_not_chosen_whatever_the_view_says() {
    // I7: the registry may be away and unable to say so.
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    let lease = fleet.lease(D1).unwrap();
    assert_eq!(fleet.ended(&lease, &LegEnd::Draining { message: "no".into() }, now), None, "it lives");
    fleet.update(view(two_and_two()));
    for _ in 0..3 {
        assert_eq!(fleet.place(&ask(), &[], Instant::now()).unwrap().placed.decode, D2);
    }
    let nobody_else = fleet.place(&Ask { avoid: vec![D2], ..ask() }, &[], Instant::now());
    assert!(nobody_else.is_err());
    fleet.update(view(two_and_two().split_off(1)));
    fleet.update(view(two_and_two()));
    assert_eq!(
        fleet.place(&Ask { avoid: vec![D2], ..ask() }, &[], Instant::now()).unwrap().placed.decode,
        D1,
        "another process"
    );
    assert_eq!(fleet.ended(&lease, &LegEnd::Draining { message: "no".into() }, now), None, "of the one before");
    assert_eq!(fleet.place(&Ask { avoid: vec![D2], ..ask() }, &[], Instant::now()).unwrap().placed.decode, D1);
}

#[test]
fn a_request_keeps_its_lost_decode_worker_and_is_not_given_a_lost_prefill_worker() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    for id in [D1, P1] {
        let lease = fleet.lease(id).unwrap();
        fleet.ended(&lease, &lost(false), now);
    }
    for _ in 0..3 {
        assert_eq!(
            fleet.place(&Ask { decode: Some(D1), ..ask() }, &[], Instant::now()).map(|chosen| chosen.placed),
            Ok(on(D1, P2))
        );
    }
}

#[test]
fn a_worker_that_comes_back_is_not_what_it_was() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    let (old, other) = (fleet.lease(D1).unwrap(), fleet.lease(D1).unwrap());
    let probe = fleet.ended(&old, &lost(false), now).unwrap();
    let changes = fleet.update(view(two_and_two().split_off(1)));
    assert_eq!((changes.joined.len(), changes.left), (0, vec![D1]));
    assert_eq!(fleet.lease(D1).err(), Some(LegEnd::Left { worker: D1 }));
    assert_eq!(fleet.update(view(two_and_two())).joined, [member(D1, Role::Decode)]);
    let new = fleet.lease(D1).unwrap();
    assert_eq!(fleet.probed(probe, false, now), None, "of the old connection");
    assert_eq!(fleet.ended(&other, &lost(false), now), None);
    drop((old, other));
    assert_eq!(flags(&fleet, D1), (false, 1));
    drop(new);
    assert_eq!(flags(&fleet, D1), (false, 0));
}

#[test]
fn a_worker_nobody_can_connect_to_is_never_chosen_and_tried_with_every_view() {
    let mut fleet = fleet(vec![member(D1, Role::Decode), member(D2, Role::Decode)]);
    fleet.unusable(D1);
    assert_eq!(
        fleet.place(&Ask { avoid: vec![D2], ..ask() }, &[], Instant::now()).unwrap_err().kind,
        ErrorKind::Unavailable
    );
    let again = fleet.update(view(vec![member(D1, Role::Decode), member(D2, Role::Decode)]));
    assert_eq!(again.joined, [member(D1, Role::Decode)]);
}

#[test]
fn readiness_asks_for_a_decode_worker_of_the_model() {
    let draining = Member { draining: true, ..member(D1, Role::Decode) };
    let foreign = Member { model: "other".into(), ..member(D2, Role::Decode) };
    let supervisor = member(WorkerId(1), Role::Supervisor);
    let mut fleet = fleet(vec![draining, foreign, supervisor, member(P1, Role::Prefill)]);
    assert_eq!(fleet.not_ready().unwrap(), "no decode worker for model \"m\" yet");
    assert_eq!(fleet.members().count(), 4, "people see all");
    fleet.update(view(two_and_two()));
    assert_eq!(fleet.not_ready(), None);
}

#[test]
fn capacity_is_of_the_largest_pool_and_the_shortest_context() {
    let mut fleet = fleet(Vec::new());
    assert_eq!(fleet.capacity(), Capacity::UNKNOWN);
    let large = Member { blocks: 20, ..member(D2, Role::Decode) };
    let short = Member { context_tokens: 64, ..member(P1, Role::Prefill) };
    let foreign = Member { model: "other".into(), blocks: 99, context_tokens: 1, ..member(P2, Role::Decode) };
    fleet.update(view(vec![member(D1, Role::Decode), large, short, foreign]));
    assert_eq!((fleet.capacity().pool(), fleet.capacity().context()), (320, Some(64)));
    let windowed = Member { window_tokens: 32, ..member(D1, Role::Decode) };
    fleet.update(view(vec![windowed]));
    assert_eq!(fleet.capacity().pool(), u32::MAX, "a stream may outgrow the pool");
}

#[test]
fn what_was_sent_somewhere_is_sent_there_again() {
    let mut fleet = fleet(two_and_two());
    let names: Arc<[BlockName]> = vec![BlockName(1), BlockName(2)].into();
    fleet.note(on(D2, P2), &names, 10, Instant::now());
    let near = Ask { names: Arc::clone(&names), ..ask() };
    assert_eq!(fleet.place(&near, &[], Instant::now()).map(|chosen| chosen.placed), Ok(on(D2, P2)));
    assert_eq!(fleet.place(&near, &[], Instant::now()).map(|chosen| chosen.placed), Ok(on(D2, P2)));
}

fn judged(fleet: &mut Fleet, on: Subject, outcome: Outcome, times: usize, now: Instant) -> Option<Judgement> {
    (0..times).filter_map(|_| fleet.judge(Verdict { on, placed: now, outcome }, now)).last()
}

fn is_ejected(fleet: &Fleet, id: WorkerId) -> bool {
    fleet.members().find(|w| w.member.id == id).unwrap().ejected
}

#[test]
fn a_worker_that_fails_is_left_out_and_tried_by_one_request() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    let (d1, wanted) = (Subject::Worker(D1), Ask { avoid: vec![D2], ..ask() });
    assert_eq!(judged(&mut fleet, d1, Outcome::Failed, 5, now), None, "not yet");
    let Some(Judgement::Ejected { time, .. }) = judged(&mut fleet, d1, Outcome::Failed, 1, now) else { panic!() };
    for _ in 0..4 {
        assert_eq!(fleet.place(&ask(), &[], now).unwrap().placed.decode, D2);
    }
    assert!(is_ejected(&fleet, D1) && !is_ejected(&fleet, D2));
    assert_eq!(fleet.place(&wanted, &[], now).unwrap().placed.decode, D1, "rather than nobody");
    assert_eq!(
        fleet.place(&Ask { decode: Some(D1), ..ask() }, &[], now).unwrap().placed.decode,
        D1,
        "who has it keeps it"
    );
    assert_eq!(judged(&mut fleet, d1, Outcome::Failed, 9, now), None, "those are from before");
    // Half open: one request tries it, others do not.
    let later = now + time;
    let tried: Vec<_> = (0..4).map(|_| fleet.place(&ask(), &[], later).unwrap().placed.decode).collect();
    assert_eq!(tried.iter().filter(|id| **id == D1).count(), 1, "{tried:?}");
    let old = Verdict { on: d1, placed: now, outcome: Outcome::Worked(None) };
    assert_eq!(fleet.judge(old, later), None, "its request was placed before the trial");
    let again = judged(&mut fleet, d1, Outcome::Failed, 1, later);
    assert!(matches!(again, Some(Judgement::Ejected { time: longer, .. }) if longer == 2 * time), "{again:?}");
    let later = later + 2 * time;
    let tried: Vec<_> = (0..4).map(|_| fleet.place(&ask(), &[], later).unwrap().placed.decode).collect();
    assert!(tried.contains(&D1));
    assert_eq!(judged(&mut fleet, d1, Outcome::Worked(None), 1, later), Some(Judgement::Readmitted(d1)));
    assert!(!is_ejected(&fleet, D1));
}

#[test]
fn a_trial_that_nobody_judges_is_followed_by_another() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    judged(&mut fleet, Subject::Worker(D1), Outcome::Failed, 6, now);
    let mut tries = 0;
    for second in 0..60 {
        tries += u32::from(fleet.place(&ask(), &[], now + Duration::from_secs(second)).unwrap().placed.decode == D1);
    }
    assert_eq!(tries, 2, "at 5 s, and 30 s later");
}

#[test]
fn no_more_than_half_of_the_workers_are_left_out() {
    let now = Instant::now();
    let mut three = fleet([two_and_two(), vec![member(WorkerId(0xd3), Role::Decode)]].concat());
    for id in [D1, D2, WorkerId(0xd3)] {
        judged(&mut three, Subject::Worker(id), Outcome::Failed, 20, now);
    }
    assert_eq!([D1, D2, WorkerId(0xd3)].map(|id| is_ejected(&three, id)), [true, false, false]);
    let mut one = fleet(vec![member(D1, Role::Decode)]);
    judged(&mut one, Subject::Worker(D1), Outcome::Failed, 20, now);
    assert!(!is_ejected(&one, D1));
}

#[test]
fn a_worker_that_is_much_slower_than_the_others_is_left_out() {
    let now = Instant::now();
    let pace = |ms| Outcome::Worked(Some(Duration::from_millis(ms)));
    for (slow, ejected) in [(70, true), (30, false)] {
        let mut fleet = fleet(two_and_two());
        judged(&mut fleet, Subject::Worker(D2), pace(10), 20, now);
        assert_eq!(judged(&mut fleet, Subject::Worker(D1), pace(slow), 7, now), None, "too few to say");
        assert_eq!(judged(&mut fleet, Subject::Worker(D1), pace(slow), 1, now).is_some(), ejected, "{slow} ms");
    }
}

/// Of many workers, some random ones stand for all.
#[test]
fn one_of_many_is_judged_beside_some() {
    let (now, ids) = (Instant::now(), (1000..1400).map(WorkerId));
    let pace = |ms| Outcome::Worked(Some(Duration::from_millis(ms)));
    let mut fleet = fleet(ids.clone().map(|id| member(id, Role::Decode)).collect());
    ids.clone().for_each(|id| drop(judged(&mut fleet, Subject::Worker(id), pace(10), 20, now)));
    judged(&mut fleet, Subject::Worker(WorkerId(1399)), pace(70), 30, now);
    assert!(is_ejected(&fleet, WorkerId(1399)), "slower than the others");
    for id in ids.clone() {
        fleet.place(&Ask { decode: Some(id), ..ask() }, &[], now).unwrap();
        judged(&mut fleet, Subject::Worker(id), Outcome::Failed, 20, now);
    }
    let ejected = ids.filter(|id| is_ejected(&fleet, *id)).count();
    assert!((150..=250).contains(&ejected), "{ejected} of 400 are out, and half may be");
}

#[test]
fn one_request_that_waited_makes_no_worker_slow() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    for id in [D1, D2] {
        judged(&mut fleet, Subject::Worker(id), Outcome::Worked(Some(Duration::from_millis(10))), 20, now);
    }
    let waited = Outcome::Worked(Some(Duration::from_secs(60)));
    assert_eq!(judged(&mut fleet, Subject::Worker(D1), waited, 3, now), None);
    assert!(judged(&mut fleet, Subject::Worker(D1), waited, 30, now).is_some());
}

#[test]
fn a_lost_worker_is_no_equal_and_comes_after_one_that_does_worse() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    let lease = fleet.lease(D2).unwrap();
    fleet.ended(&lease, &lost(false), now);
    assert_eq!(judged(&mut fleet, Subject::Worker(D1), Outcome::Failed, 20, now), None, "it is the only one");
    assert_eq!(fleet.place(&ask(), &[], now).unwrap().placed.decode, D1);
    let (mut fleet, now) = (self::fleet(two_and_two()), Instant::now());
    judged(&mut fleet, Subject::Worker(D1), Outcome::Failed, 20, now);
    let lease = fleet.lease(D2).unwrap();
    fleet.ended(&lease, &lost(false), now);
    assert_eq!(fleet.place(&ask(), &[], now).unwrap().placed.decode, D1);
}

#[test]
fn workers_that_cannot_reach_each_other_work_with_others() {
    let (mut fleet, now) = (fleet(two_and_two()), Instant::now());
    let pair = Subject::Pair { prefill: P1, decode: D1 };
    judged(&mut fleet, pair, Outcome::Failed, 6, now);
    let pinned = |decode| Ask { decode: Some(decode), ..ask() };
    for _ in 0..3 {
        assert_eq!(fleet.place(&pinned(D1), &[], now).unwrap().placed.prefill, Some(P2));
    }
    let with: Vec<_> = (0..2).map(|_| fleet.place(&pinned(D2), &[], now).unwrap().placed.prefill).collect();
    assert!(with.contains(&Some(P1)), "{with:?}");
    judged(&mut fleet, Subject::Pair { prefill: P2, decode: D1 }, Outcome::Failed, 6, now);
    assert_eq!(fleet.place(&pinned(D1), &[], now).unwrap().placed.prefill, None, "it computes the prompt itself");
    fleet.update(view(two_and_two().into_iter().filter(|m| m.id != P1).collect()));
    fleet.update(view(two_and_two()));
    assert_eq!(fleet.place(&pinned(D1), &[], now).unwrap().placed.prefill, Some(P1), "another process");
}

#[test]
fn decode_blocks_are_reserved_while_the_prompt_is_asked_for_or_late_where_it_has_to_wait() {
    let (now, cost) = (Instant::now(), StepCost { token: 1e-3, ..StepCost::default() });
    let reserve = |member: Member, from: Option<u64>, decode: Option<WorkerId>| {
        let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), 0);
        fleet.update(view(vec![member, self::member(D1, Role::Decode)]));
        fleet.reserve_late(from.map(Duration::from_millis));
        // Half a second of them.
        let work = StepWork { tokens: 500, ..StepWork::default() };
        fleet.told(P1, Backlog { work, room: 1000, step_tokens: 512, cost, ..Backlog::default() }, 2, now);
        fleet.place(&Ask { decode, ..ask() }, &[], now).unwrap().reserve
    };
    let prefill = || member(P1, Role::Prefill);
    let old = Member { late_targets: false, ..prefill() };
    let times = [Some(400), Some(900), None].map(|from| reserve(prefill(), from, None));
    assert_eq!(times, [Reserve::Late, Reserve::Meanwhile, Reserve::Meanwhile]);
    assert_eq!(reserve(old, Some(0), None), Reserve::First, "a worker of an older version");
    assert_eq!(reserve(prefill(), Some(0), Some(D1)), Reserve::Meanwhile, "it has its decode worker already");
}

#[test]
fn nothing_is_rejected_for_its_deadline_before_anybody_knows_how_long_prompts_take() {
    let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), 0);
    fleet.update(view(vec![member(D1, Role::Decode)]));
    let work = StepWork { tokens: 1_000_000, ..StepWork::default() };
    let mut place = |cost, deadline| {
        let now = Instant::now();
        fleet.told(D1, Backlog { work, room: 1000, step_tokens: 512, cost, ..Backlog::default() }, 2, now);
        let slo = Slo { deadline: Some(Duration::from_secs(deadline)), ..Slo::default() };
        fleet.place(&Ask { slo, ..ask() }, &[], now).map_err(|failure| failure.late)
    };
    assert!(place(StepCost::default(), 1).is_ok());
    let known = StepCost { token: 1e-4, ..StepCost::default() };
    assert!(place(known, 10).unwrap_err());
    assert!(place(known, 1000).is_ok());
}

#[test]
fn batch_work_is_in_the_way_of_batch_requests_alone() {
    let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), 0);
    fleet.update(view(vec![member(D1, Role::Decode)]));
    let now = Instant::now();
    let prompts = |tokens| StepWork { tokens, ..StepWork::default() };
    let (cost, batch) =
        (StepCost { token: 1e-3, ..StepCost::default() }, BatchWork { work: prompts(9000), ..BatchWork::default() });
    let load = Backlog { work: prompts(10_000), room: 1000, step_tokens: 500, cost, batch, ..Backlog::default() };
    fleet.told(D1, load, 2, now);
    let mut queue = |class| {
        let chosen = fleet.place(&Ask { class, ..ask() }, &[], now).unwrap();
        chosen.why.unwrap().terms.queue
    };
    assert!((1.0..2.0).contains(&queue(Class::Interactive)));
    assert!(queue(Class::Batch) > 9.0);
}

#[test]
fn the_prompts_of_others_are_in_a_tenants_way_as_far_as_it_shares_with_them() {
    let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), 0);
    fleet.update(view(vec![member(D1, Role::Decode)]));
    let (now, work) = (Instant::now(), StepWork { tokens: 9000, ..StepWork::default() });
    let cost = StepCost { token: 1e-3, ..StepCost::default() };
    // In use, so that what it says counts.
    let _lease = fleet.lease(D1).unwrap();
    let mut queue = |routers, before| {
        fleet.told(D1, Backlog { work, room: 1000, step_tokens: 500, cost, ..Backlog::default() }, routers, now);
        let chosen = fleet.place(&Ask { before, ..ask() }, &[], now).unwrap();
        fleet.begun(&chosen);
        chosen.why.unwrap().terms.queue
    };
    assert!((1.5..2.0).contains(&queue(1, Some(1000))), "a step of 500 tokens is being computed");
    assert!(queue(2, Some(1000)) > 9.0, "what another router let in is not known");
    assert!(queue(1, None) > 9.0);
}

/// A worker that fetches a prefix has the rest to compute: the next prompt waits for that. While its network lets nothing through, it fetches none.
#[test]
fn what_is_fetched_is_no_work_and_what_does_not_come_is_left_alone() {
    let cost = StepCost { base: 8e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 2e-4, pair: 0.0 };
    let exchanging = |id, role| Member { exchanges: 9, ..member(id, role) };
    let members = vec![exchanging(D1, Role::Decode), exchanging(P1, Role::Prefill), exchanging(P2, Role::Prefill)];
    let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), 0);
    fleet.update(view(members));
    let loaded = |fleet: &mut Fleet, at| {
        for (id, tokens) in [(D1, 0), (P1, 40_000), (P2, 0)] {
            let work = StepWork { tokens, ..StepWork::default() };
            fleet.told(id, Backlog { work, room: 9000, step_tokens: 512, cost, ..Backlog::default() }, 2, at);
        }
    };
    let tell = |fleet: &mut Fleet, at| {
        loaded(fleet, at);
        [D1, P1, P2].into_iter().for_each(|id| fleet.linked(id, Links::new(1 << 10, [].into_iter())));
    };
    let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(31));
    tell(&mut fleet, now);
    let holds = [Holder { worker: P1, blocks: 200 }];
    let place = |fleet: &mut Fleet, first: u64, now| {
        // Names of another prompt each time, of which the busy worker holds most.
        let names = (0..250).map(|at| BlockName(u128::from(first * 1000 + at))).collect();
        fleet.place(&Ask { names, tokens: 4000, ..ask() }, &holds, now).unwrap()
    };
    let chosen = place(&mut fleet, 1, now);
    assert_eq!(chosen.fetch.map(|fetch| (fetch.to, fetch.tokens)), Some((P2, 3200)));
    // 800 tokens in two steps, of this router and as many of the other one, and a share for those that overtake.
    let waits = place(&mut fleet, 2, now).why.unwrap().terms.queue;
    assert!((0.3..0.6).contains(&waits), "{waits} s behind 800 tokens; 4,000 would be 1.9");
    fleet.not_fetched(P2, now);
    assert_eq!(place(&mut fleet, 3, now).fetch, None);
    let soon = now + Duration::from_secs(3);
    tell(&mut fleet, soon);
    assert!(place(&mut fleet, 7, soon).fetch.is_some(), "what connects them may have been slow to begin");
    fleet.not_fetched(P2, soon);
    tell(&mut fleet, soon + Duration::from_secs(3));
    assert_eq!(place(&mut fleet, 8, soon + Duration::from_secs(3)).fetch, None, "twice");
    tell(&mut fleet, later);
    assert!(place(&mut fleet, 4, later).fetch.is_some());
    // Its process may have been killed, and the view names it for a while: nothing is asked of it until it tells everything again.
    fleet.untold(P1);
    loaded(&mut fleet, later);
    assert_eq!(place(&mut fleet, 5, later).fetch, None);
    tell(&mut fleet, later);
    assert!(place(&mut fleet, 6, later).fetch.is_some());
}

/// The told time from token to token follows what is measured in both directions; what an SLO is compared with only grows.
#[test]
fn predictions_that_are_too_long_are_told_shorter_and_kept_careful() {
    let cost = StepCost { base: 10e-3, row: 2e-4, context: 1e-7, chunk: 4e-3, token: 2e-4, pair: 0.0 };
    let mut fleet = Fleet::new("m", Box::new(Predicted::new(0)), 0);
    fleet.update(view(two_and_two()));
    let now = Instant::now();
    for id in [D1, D2, P1, P2] {
        fleet.told(id, Backlog { room: 1000, step_tokens: 512, cost, ..Backlog::default() }, 1, now);
    }
    let terms = |fleet: &mut Fleet| fleet.place(&ask(), &[], now).unwrap().why.unwrap().terms;
    let before = terms(&mut fleet);
    (0..500).for_each(|_| fleet.measured(&before, None, Some(0.8 * before.later)));
    let after = terms(&mut fleet);
    assert!(after.expected < 0.9 * before.expected, "{before:?} {after:?}");
    assert!(after.token >= before.token, "{before:?} {after:?}");
}
