//! Who begins when.

use super::*;

type Tenants = Gate<&'static str, u32>;

const ROOM: GateRoom =
    GateRoom { prefills: 1, prompt_tokens: 1000, answers: 16, kv_tokens: 100_000, answer_tokens: u64::MAX };

fn asks(weight: u32, prompt_tokens: u32) -> Asks {
    Asks { class: Class::Interactive, weight, priority: 0, prompt_tokens, alone: true }
}

fn push(gate: &mut Tenants, tenant: &'static str, weight: u32, prompt_tokens: u32, request: u32) {
    gate.push(tenant, asks(weight, prompt_tokens), request);
}

fn push_batch(gate: &mut Tenants, tenant: &'static str, prompt_tokens: u32, request: u32) -> Ticket {
    gate.push(tenant, Asks { class: Class::Batch, ..asks(1, prompt_tokens) }, request)
}

fn numbers(begun: &[(u32, Begun<&'static str>)]) -> Vec<u32> {
    begun.iter().map(|(request, _)| *request).collect()
}

fn begin_all(gate: &mut Tenants, room: &GateRoom) -> Vec<(u32, Begun<&'static str>)> {
    std::iter::from_fn(|| gate.begin(room)).collect()
}

#[test]
fn prompts_begin_while_they_fit_and_one_for_each_worker_always() {
    let mut gate = Tenants::default();
    for (request, tokens) in [(0, 5000), (1, 400), (2, 500), (3, 200), (4, 1)] {
        push(&mut gate, "a", 1, tokens, request);
    }
    let mut begun = begin_all(&mut gate, &ROOM);
    assert_eq!(begun.len(), 1, "longer than the room, and it begins all the same");
    gate.computed(&mut begun[0].1);
    begun.extend(begin_all(&mut gate, &ROOM));
    assert_eq!(begun.len(), 3, "the fourth does not fit, and the fifth does not go around it");
    assert_eq!(gate.waiting(), 2);
    begun.into_iter().for_each(|(_, begun)| gate.ended(begun));
    begin_all(&mut gate, &ROOM).into_iter().for_each(|(_, begun)| gate.ended(begun));
    assert_eq!((gate.waiting(), gate.interactive.all), (0, Held::default()));
    assert!(gate.interactive.tenants.is_empty());
}

#[test]
fn what_goes_before_a_prompt_is_its_tenants_and_others_by_their_shares() {
    let mut gate = Tenants::default();
    let mut before = |tenant, weight, tokens| {
        push(&mut gate, tenant, weight, tokens, 0);
        gate.begin(&ROOM).map(|(_, begun)| begun.before())
    };
    assert_eq!((before("flood", 1, 400), before("flood", 1, 500)), (Some(None), Some(None)), "it is alone");
    assert_eq!(before("flood", 1, 500), None, "it waits");
    assert_eq!(
        before("calm", 1, 90),
        Some(Some(90)),
        "the flood has as much in the same time, however much it has there"
    );
    assert_eq!(before("calm", 2, 10), Some(Some(140)), "it is done when 100 of its tokens are, and 50 of the flood's");
}

#[test]
fn the_room_is_that_of_all_workers_that_stay() {
    let decode = Member { role: Role::Decode, blocks: 10, block_size: 16, ..baton_membership::testing::member(1) };
    let room = |members: &[Member]| GateRoom::together(members.iter(), 1000);
    let two = [decode.clone(), decode.clone()];
    let (answers, kv_tokens, answer_tokens) = (128, 320, u64::MAX);
    assert_eq!(room(&two), GateRoom { prefills: 2, prompt_tokens: 2000, answers, kv_tokens, answer_tokens });
    let prefill = Member { role: Role::Prefill, ..decode.clone() };
    let leaving = Member { draining: true, ..decode.clone() };
    let old = Member { max_running: 0, ..decode.clone() };
    let room = room(&[prefill.clone(), decode, leaving.clone(), old]);
    let (answers, kv_tokens, answer_tokens) = (u64::MAX, 320, u64::MAX);
    assert_eq!(room, GateRoom { prefills: 1, prompt_tokens: 1000, answers, kv_tokens, answer_tokens });
    assert_eq!(GateRoom::together([prefill, leaving].iter(), 1000), GateRoom::UNKNOWN);
}

#[test]
fn a_flood_leaves_room_for_answers_of_others() {
    let mut gate = Tenants::default();
    for request in 0..40 {
        push(&mut gate, "flood", 1, 10, request);
    }
    let flood = begin_all(&mut gate, &ROOM);
    assert_eq!(flood.len(), 14, "seven eighths of 16");
    for request in 0..4 {
        push(&mut gate, "calm", 1, 10, 100 + request);
    }
    let calm = begin_all(&mut gate, &ROOM);
    assert_eq!(calm.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [100, 101]);
    // What comes free goes to who has less.
    flood.into_iter().take(2).for_each(|(_, begun)| gate.ended(begun));
    let next: Vec<u32> = begin_all(&mut gate, &ROOM).into_iter().map(|(request, _)| request).collect();
    assert_eq!(next, [102, 103]);
}

#[test]
fn a_flood_of_long_prompts_holds_up_only_itself() {
    let mut gate = Tenants::default();
    for request in 0..4 {
        push(&mut gate, "flood", 1, 900, request);
    }
    let mut flood = begin_all(&mut gate, &ROOM);
    assert_eq!(flood.len(), 1, "the window has room for one");
    for request in 100..102 {
        push(&mut gate, "calm", 1, 600, request);
    }
    let calm = begin_all(&mut gate, &ROOM);
    assert_eq!(calm.iter().map(|(request, _)| *request).collect::<Vec<_>>(), [100], "the next waits for its own");
    gate.computed(&mut flood[0].1);
    assert_eq!(begin_all(&mut gate, &ROOM).len(), 1);
}

#[test]
fn who_has_little_and_needs_much_is_waited_for() {
    let room = GateRoom { prefills: 100, prompt_tokens: u64::MAX, answers: u64::MAX, kv_tokens: 1000, ..ROOM };
    let mut gate = Tenants::default();
    for request in 0..20 {
        push(&mut gate, "flood", 1, 100, request);
    }
    let mut flood = begin_all(&mut gate, &room);
    assert_eq!(flood.len(), 8);
    push(&mut gate, "calm", 1, 400, 100);
    gate.ended(flood.pop().unwrap().1);
    assert_eq!(gate.begin(&room), None, "nobody takes what comes free before it has enough");
    gate.ended(flood.pop().unwrap().1);
    assert_eq!(gate.begin(&room).map(|(request, _)| request), Some(100));
}

#[test]
fn answers_that_keep_a_window_count_no_more_than_that() {
    let room = GateRoom { prefills: 100, prompt_tokens: u64::MAX, kv_tokens: 800, answer_tokens: 100, ..ROOM };
    let mut gate = Tenants::default();
    for request in 0..9 {
        push(&mut gate, "a", 1, 5000, request);
    }
    let mut begun = begin_all(&mut gate, &room);
    assert_eq!(begun.len(), 7);
    gate.answered(&mut begun[0].1, 10_000);
    assert_eq!(gate.interactive.all.kv_tokens, 700);
}

#[test]
fn who_alone_has_a_single_place_may_use_it() {
    let room = GateRoom { answers: 1, kv_tokens: 8, ..ROOM };
    let mut gate = Tenants::default();
    push(&mut gate, "a", 1, 700, 1);
    push(&mut gate, "a", 1, 1, 2);
    let mut begun = begin_all(&mut gate, &room);
    assert_eq!(begun.len(), 1, "the engine refuses what is too long, not the gate");
    gate.ended(begun.remove(0).1);
    assert_eq!(begin_all(&mut gate, &room).len(), 1);
}

#[test]
fn answers_count_for_whose_turn_it_is_and_weights_share_them() {
    // One answer at a time, 40 tokens of prompt, an answer of 200 or 20 tokens.
    let room = GateRoom { answers: 2, prompt_tokens: 40, ..ROOM };
    let mut gate = Tenants::default();
    let mut served: BTreeMap<&str, u64> = BTreeMap::new();
    for request in 0..4000 {
        push(&mut gate, "one", 1, 40, request);
        push(&mut gate, "three", 3, 40, request);
    }
    for _ in 0..2000 {
        let Some((_, mut begun)) = gate.begin(&room) else { break };
        gate.computed(&mut begun);
        let tokens = if begun.tenant == "one" { 200 } else { 20 };
        gate.answered(&mut begun, tokens);
        *served.entry(begun.tenant).or_default() += 40 + u64::from(tokens);
        gate.ended(begun);
    }
    let ratio = served["three"] as f64 / served["one"] as f64;
    assert!((2.9..3.1).contains(&ratio), "{ratio}");
}

/// A long prompt counts when it begins. Until the next one does, a tenant that asks little is not held up.
#[test]
fn who_asks_less_than_its_share_does_not_wait_for_the_next_long_prompt() {
    let mut gate = Tenants::default();
    for request in 0..3 {
        push(&mut gate, "flood", 1, 3000, request);
    }
    let flood = begin_all(&mut gate, &ROOM);
    assert_eq!(flood.len(), 1);
    for request in 0..5 {
        push(&mut gate, "calm", 1, 600, 100 + request);
        let (begun, turn) = gate.begin(&ROOM).unwrap();
        assert_eq!(begun, 100 + request);
        gate.ended(turn);
    }
}

/// There are ways past others, and none past the weights: requests that end soon, or are small, are few at a time, and yet many.
#[test]
fn who_has_little_because_it_ends_soon_gets_no_more_than_its_share() {
    let all_prompts = GateRoom { prompt_tokens: u64::MAX, ..ROOM };
    let all_answers = GateRoom { answers: u64::MAX, kv_tokens: u64::MAX, ..ROOM };
    for room in [all_prompts, all_answers] {
        let mut gate = Tenants::default();
        for request in 0..4000 {
            push(&mut gate, "one", 1, 200, request);
            push(&mut gate, "three", 3, 400, request);
        }
        let mut running: Vec<(u32, Begun<&str>)> = Vec::new();
        let mut served: BTreeMap<&str, u64> = BTreeMap::new();
        for now in 0..20_000 {
            while let Some((_, begun)) = gate.begin(&room) {
                let (tokens, lasts) = if begun.tenant == "one" { (200, 10) } else { (400, 100) };
                *served.entry(begun.tenant).or_default() += tokens;
                running.push((now + lasts, begun));
            }
            let over = |(ends, _): &mut (u32, Begun<&str>)| *ends <= now;
            running.extract_if(.., over).for_each(|(_, begun)| gate.ended(begun));
        }
        let ratio = served["three"] as f64 / served["one"] as f64;
        assert!((2.9..3.1).contains(&ratio), "{ratio} with {room:?}");
    }
}

#[test]
fn batch_begins_only_while_no_interactive_request_waits() {
    let mut gate = Tenants::default();
    let room = GateRoom { prefills: 1, prompt_tokens: 100, ..ROOM };
    push_batch(&mut gate, "b", 10, 1);
    push(&mut gate, "a", 1, 90, 2);
    push(&mut gate, "a", 1, 90, 3);
    let mut begun = begin_all(&mut gate, &room);
    assert_eq!(numbers(&begun), [2], "there would be room for the batch request beside it");
    gate.computed(&mut begun[0].1);
    begun.extend(begin_all(&mut gate, &room));
    assert_eq!(numbers(&begun), [2, 3, 1], "now there is nobody else");
}

#[test]
fn batch_fills_what_interactive_work_leaves_and_is_in_nobodys_way() {
    let mut gate = Tenants::default();
    (0..3).for_each(|request| push(&mut gate, "a", 1, 10, request));
    for request in 10..40 {
        push_batch(&mut gate, "b", 10, request);
    }
    let begun = begin_all(&mut gate, &ROOM);
    assert_eq!((begun.len(), gate.waiting()), (14, 19), "seven eighths of 16");
    push_batch(&mut gate, "c", 10, 40);
    assert_eq!(
        begin_all(&mut gate, &ROOM),
        [],
        "the last eighth is not for batch work, though this tenant has nothing"
    );
    (50..70).for_each(|request| push(&mut gate, "a", 1, 10, request));
    let more = begin_all(&mut gate, &ROOM);
    assert_eq!(more.len(), 11, "as if there was no batch work");
    let (interactive, batch): (Vec<_>, Vec<_>) = begun.into_iter().chain(more).partition(|(r, _)| *r < 10 || *r >= 50);
    interactive.into_iter().for_each(|(_, begun)| gate.ended(begun));
    let rest = begin_all(&mut gate, &ROOM);
    assert!(rest.iter().all(|(request, _)| *request >= 50), "interactive ones first");
    batch.into_iter().chain(rest).for_each(|(_, begun)| gate.ended(begun));
    assert_eq!((gate.interactive.all, gate.batch.all), (Held::default(), Held::default()));
}

#[test]
fn batch_prompts_wait_for_room_whatever_their_tenant_has() {
    let mut gate = Tenants::default();
    push(&mut gate, "a", 1, 900, 1);
    push_batch(&mut gate, "b", 200, 2);
    push_batch(&mut gate, "c", 50, 3);
    let mut begun = begin_all(&mut gate, &ROOM);
    assert_eq!(numbers(&begun), [1, 3]);
    gate.computed(&mut begun[0].1);
    assert_eq!(numbers(&begin_all(&mut gate, &ROOM)), [2]);
}

#[test]
fn batch_makes_room_for_interactive_requests_and_never_the_other_way_round() {
    let mut gate = Tenants::default();
    assert!(!gate.may_make_room(Class::Interactive) && !gate.may_make_room(Class::Batch));
    (0..4).for_each(|request| push(&mut gate, "a", 1, 10, request));
    assert!(gate.may_make_room(Class::Interactive) && !gate.may_make_room(Class::Batch));
    let tickets: Vec<Ticket> = (10..14).map(|request| push_batch(&mut gate, "a", 10, request)).collect();
    assert_eq!(gate.make_room(Class::Interactive, &"a", 1, 2), [13, 12], "its own, too, the last first");
    assert_eq!(gate.make_room(Class::Batch, &"a", 1, 1), [], "not its own for its own");
    assert_eq!(gate.make_room(Class::Batch, &"b", 1, 1), [11]);
    assert_eq!(gate.make_room(Class::Batch, &"b", 1, 2), [], "never interactive ones");
    assert_eq!(
        gate.make_room(Class::Interactive, &"b", 1, 2),
        [3, 2],
        "of other tenants, where there is no batch work"
    );
    assert_eq!(gate.remove(Class::Batch, &"a", tickets[0]), Some(10));
    assert_eq!(gate.remove(Class::Batch, &"a", tickets[0]), None);
}
