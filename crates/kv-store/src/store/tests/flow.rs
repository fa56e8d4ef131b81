//! Where blocks go: up, down, and out.

use super::rig::{Answer, Rig, config, key_of};
use crate::{BlockKey, Decline, Effect, Input, Miss, Policy, StoreConfig, Tier};

fn begun(config: StoreConfig) -> Rig {
    let mut rig = Rig::new(config, 3);
    rig.settle();
    rig
}

#[test]
fn a_block_is_found_in_host_memory_then_on_disk_then_in_host_memory_again() {
    let mut rig = begun(config(8));
    assert_eq!(rig.fetch(0), Err(Miss::Absent));
    assert!(rig.put(0));
    assert_eq!(rig.fetch(0), Ok(Tier::Host));
    (5..15).for_each(|number| {
        rig.put(number);
        rig.settle();
    });
    assert_eq!(rig.store.tier(key_of(0).name), Some(Tier::Disk));
    assert_eq!(rig.fetch(0), Ok(Tier::Disk));
    assert_eq!(rig.fetch(0), Ok(Tier::Host));
    assert_eq!(rig.store.counters().hit_tokens, [8, 4, 0]);
    assert_eq!(rig.store.counters().hit_bytes, [2, 1, 0].map(|hits| hits * rig.shape.data_bytes() as u64));
}

#[test]
fn what_is_told_is_what_is_held() {
    let mut rig = begun(config(8));
    for round in 0..300 {
        let number = rig.random.below(40) as u32;
        rig.put(number);
        if round % 3 == 0 {
            let _ = rig.fetch(number);
        }
        rig.turn();
        let told: Vec<_> = rig.told.keys().copied().collect();
        let mut held: Vec<_> = rig.store.snapshot().collect();
        held.sort_unstable();
        assert_eq!(told, held);
    }
    let prompt = [0, 1, 2, 3].map(|number| key_of(number).name);
    assert_eq!(
        rig.store.held(&prompt).len(),
        prompt.iter().take_while(|name| rig.store.tier(**name).is_some()).count()
    );
}

#[test]
fn a_block_that_is_there_is_not_taken_again() {
    let mut rig = begun(config(8));
    assert!(rig.put(0) && !rig.put(0));
    assert_eq!(rig.store.counters().declined[Decline::Held as usize], 1);
    let ticket = rig.ask(|ticket| Input::Get(ticket, key_of(0)));
    assert!(matches!(rig.answers[&ticket], Answer::Ready(..)));
}

#[test]
fn a_put_that_is_given_up_leaves_nothing() {
    let mut rig = begun(config(8));
    for given in [None, Some(vec![1, 2].into())] {
        rig.store.feed(Input::Put(77, key_of(0)), rig.now);
        assert!(matches!(rig.store.next_effect(), Some(Effect::Fill(77, _))));
        rig.feed(Input::Filled(77, given));
        assert_eq!(rig.fetch(0), Err(Miss::Absent));
    }
}

#[test]
fn two_who_want_the_same_block_wait_for_one_read() {
    let mut rig = begun(config(8));
    rig.put(0);
    (5..15).for_each(|number| {
        rig.put(number);
        rig.settle();
    });
    let read = rig.store.counters().read_bytes;
    let (one, two, three) = (rig.get(0), rig.get(0), rig.get(0));
    rig.feed(Input::Cancel(two));
    rig.settle();
    assert_eq!(rig.outcome(one, 0), Some(Ok(Tier::Disk)));
    assert_eq!((rig.outcome(two, 0), rig.outcome(three, 0)), (None, Some(Ok(Tier::Disk))));
    assert_eq!(rig.store.counters().read_bytes - read, rig.shape.stride() as u64);
}

#[test]
fn a_name_alone_gets_nothing() {
    let mut rig = begun(config(8));
    rig.put(0);
    let other = BlockKey { tokens: [8, 8, 8, 8].into(), ..key_of(0) };
    for on_disk in [false, true] {
        if on_disk {
            (5..15).for_each(|number| {
                rig.put(number);
                rig.settle();
            });
        }
        let ticket = rig.ask(|ticket| Input::Get(ticket, other.clone()));
        rig.settle();
        assert_eq!(rig.outcome(ticket, 0), Some(Err(Miss::Differs)), "on disk: {on_disk}");
        assert!(rig.fetch(0).is_ok(), "and the right one is still there");
    }
}

#[test]
fn a_block_with_more_layer_groups_replaces_one_with_fewer() {
    let mut rig = begun(config(8));
    let part = BlockKey { groups: 0b10, ..key_of(0) };
    rig.store.feed(Input::Put(77, part.clone()), rig.now);
    rig.store.next_effect();
    rig.feed(Input::Filled(77, Some(vec![1].into())));
    let ticket = rig.ask(|ticket| Input::Get(ticket, part));
    assert!(matches!(rig.answers[&ticket], Answer::Ready(..)));
    rig.feed(Input::Done(ticket, true));
    assert_eq!(rig.fetch(0), Err(Miss::Differs));
    assert!(rig.put(0));
    assert_eq!(rig.fetch(0), Ok(Tier::Host));
}

#[test]
fn what_was_seen_once_is_not_written() {
    let mut rig = begun(StoreConfig { min_uses: 2, ..config(8) });
    for number in 0..30 {
        if number % 2 == 0 {
            rig.feed(Input::Seen(vec![key_of(number * 5).name]));
        }
        rig.put(number * 5);
        rig.settle();
    }
    let odd = (1..30).step_by(2).filter(|number| rig.on_disk(number * 5)).count();
    let even = (0..30).step_by(2).filter(|number| rig.on_disk(number * 5)).count();
    assert!(odd == 0 && even > 5, "{odd} and {even}");
    assert!(rig.store.counters().not_admitted > 5);
}

/// What comes again and again is on disk before its slot is needed, and so outlives a crash.
#[test]
fn what_was_seen_twice_is_written_ahead() {
    for seen_before in [true, false] {
        let config = StoreConfig { min_uses: 2, ..config(40) };
        let mut rig = begun(config.clone());
        let see = |rig: &mut Rig, times: usize| {
            (0..times).for_each(|_| rig.feed(Input::Seen((0..12).map(|number| key_of(number * 5).name).collect())))
        };
        see(&mut rig, if seen_before { 2 } else { 1 });
        (0..12).for_each(|number| assert!(rig.put(number * 5)));
        rig.put(100);
        rig.settle();
        see(&mut rig, usize::from(!seen_before));
        rig.settle();
        assert!((0..12).all(|number| rig.on_disk(number * 5)) && !rig.on_disk(100), "seen before: {seen_before}");
        assert_eq!(rig.fetch(0), Ok(Tier::Host), "and it stays where it is");
        let mut again = rig.again(config, true);
        again.settle();
        assert_eq!(again.fetch(0), Ok(Tier::Disk));
    }
}

/// A full disk keeps what is asked for often, and not what came last.
#[test]
fn by_the_sketch_a_block_that_is_wanted_often_outlives_those_that_came_after_it() {
    for policy in Policy::ALL {
        let mut rig = begun(StoreConfig { policy, sample: Some(1 << 20), ..config(8) });
        for number in 0..10u32 {
            (0..3).for_each(|_| rig.feed(Input::Seen(vec![key_of(number * 5).name])));
            rig.put(number * 5);
            rig.settle();
        }
        for number in 10..60u32 {
            rig.put(number * 5);
            rig.settle();
        }
        let kept = (0..10).filter(|number| rig.store.tier(key_of(number * 5).name).is_some()).count();
        let counts = matches!(policy, Policy::Sketch | Policy::TinyLfu);
        assert_eq!(kept, if counts { 10 } else { 0 }, "{policy}");
        let written = rig.store.counters().written_bytes[0] / rig.shape.stride() as u64;
        assert_eq!(written < 13, policy == Policy::TinyLfu, "{policy}: {written} writes");
    }
}

#[test]
fn a_pinned_block_and_what_is_before_it_stay() {
    let mut rig = begun(config(8));
    (0..2).for_each(|number| {
        rig.put(number);
    });
    rig.feed(Input::Pin(key_of(1).name));
    let fill = |rig: &mut Rig, from: u32| {
        (from..from + 60).for_each(|number| {
            rig.put(number * 5);
            rig.settle();
        })
    };
    fill(&mut rig, 10);
    assert_eq!((rig.fetch(0), rig.fetch(1)), (Ok(Tier::Host), Ok(Tier::Host)));
    rig.feed(Input::Unpin(key_of(1).name));
    fill(&mut rig, 100);
    assert_eq!(rig.fetch(1), Err(Miss::Absent));
}

/// Blocks that move are counted apart, and the disk never grows.
#[test]
fn writes_are_counted_by_reason() {
    let mut rig = begun(StoreConfig { policy: Policy::Lru, ..config(8) });
    for number in 0..200u32 {
        rig.put(number * 5);
        // Every fourth stays wanted for longer, so that segments do not die as a whole.
        for older in (0..number).rev().take(28).filter(|older| older % 4 == 0) {
            let _ = rig.fetch(older * 5);
        }
        rig.settle();
    }
    let counters = rig.store.counters();
    let [demoted, moved] = counters.written_bytes;
    assert_eq!((demoted + moved) / rig.shape.stride() as u64, rig.writes);
    assert!(moved > 0 && counters.write_amplification() > 1.0);
    assert!(
        (1..=rig.writes / 3).contains(&rig.syncs),
        "{} syncs, at most one for each segment of three records",
        rig.syncs
    );
    assert_eq!(counters.overrun, 0);
    assert!(rig.disk.now.len() <= 8 && rig.store.blocks(Tier::Disk) <= 12);
}

/// Before a process ends, what it has in host memory goes to disk; the process that follows finds it.
#[test]
fn a_flush_leaves_nothing_in_host_memory_alone() {
    let mut rig = begun(StoreConfig { min_uses: 2, ..config(12) });
    for number in 0..9 {
        rig.put(number);
        if number != 3 {
            rig.feed(Input::Seen(vec![key_of(number).name]));
        }
    }
    let leased = rig.get(5);
    rig.feed(Input::Flush);
    rig.settle();
    let on_disk: Vec<u32> = (0..9).filter(|number| rig.on_disk(*number)).collect();
    assert_eq!(on_disk, [0, 1, 2, 4, 5, 6, 7, 8], "3 was seen once");
    assert_eq!(rig.outcome(leased, 5), Some(Ok(Tier::Host)));
    let mut rig = rig.again(config(12), false);
    rig.settle();
    assert_eq!((rig.fetch(8), rig.fetch(3)), (Ok(Tier::Disk), Err(Miss::Absent)));
}

/// Who asks and does not wait has a block brought up ahead of need.
#[test]
fn a_get_that_is_cancelled_is_a_prefetch() {
    let mut rig = begun(config(8));
    rig.put(0);
    (5..15).for_each(|number| {
        rig.put(number);
        rig.settle();
    });
    let ticket = rig.get(0);
    rig.feed(Input::Cancel(ticket));
    rig.settle();
    assert_eq!(rig.answers.get(&ticket), None);
    assert_eq!((rig.store.counters().hit_tokens, rig.fetch(0)), ([0, 0, 0], Ok(Tier::Host)));
}
