//! What fails, and what is too much.

use baton_types::testing::with_seeds;

use super::rig::{Answer, Rig, config, key_of};
use crate::store::Flight;
use crate::{Decline, Effect, Input, Miss, Policy, StoreConfig, StoreLimits, Tier};

fn begun(config: StoreConfig) -> Rig {
    let mut rig = Rig::new(config, 3);
    rig.settle();
    rig
}

#[test]
fn a_disk_that_takes_no_writes_costs_no_put_and_is_tried_again() {
    let mut rig = begun(config(8));
    rig.fails.0 = true;
    for number in 0..50 {
        assert!(rig.put(number * 5), "put {number}");
        rig.settle();
    }
    let errors = rig.store.counters().disk_errors;
    assert!((1..=3).contains(&errors), "{errors}: writes rest after one has failed");
    assert!(rig.store.counters().overrun > 30);
    assert_eq!(rig.store.blocks(Tier::Disk), 0);
    rig.now = rig.now.after_ms(1000);
    rig.feed(Input::Tick);
    rig.settle();
    assert!(rig.store.counters().disk_errors > errors, "tried again");
    rig.fails.0 = false;
    rig.now = rig.now.after_ms(2000);
    for number in 50..70 {
        rig.put(number * 5);
        rig.settle();
    }
    assert!(rig.store.blocks(Tier::Disk) > 5, "the disk is well again");
}

/// Otherwise it would be lost with the process, though the disk has been well since.
#[test]
fn what_could_not_be_written_is_written_later() {
    let mut rig = begun(config(8));
    rig.fails.0 = true;
    for number in 0..4 {
        rig.put(number * 5);
        rig.settle();
    }
    assert!(rig.store.counters().disk_errors > 0);
    rig.fails.0 = false;
    for _ in 0..20 {
        rig.now = rig.now.after_ms(1000);
        rig.feed(Input::Tick);
        rig.settle();
    }
    assert_eq!(rig.store.blocks(Tier::Disk), 4);
}

#[test]
fn a_disk_that_cannot_be_read_is_a_miss() {
    let mut rig = begun(config(8));
    for number in 0..30 {
        rig.put(number * 5);
        rig.settle();
    }
    let number = (0..30).find(|number| rig.store.tier(key_of(number * 5).name) == Some(Tier::Disk)).unwrap() * 5;
    rig.fails.1 = true;
    assert_eq!(rig.fetch(number), Err(Miss::Failed));
    assert_eq!(rig.fetch(number), Err(Miss::Absent));
    assert_eq!((rig.store.counters().disk_errors, rig.verify_failures()), (1, 0));
}

#[test]
fn a_segment_that_cannot_be_scanned_is_empty() {
    let rig = Rig::new(config(8), 1);
    let mut store = rig.store;
    let mut scans = vec![0, 1, 2, 3];
    while let Some(segment) = scans.pop() {
        store.feed(Input::Scanned(segment, None), rig.now);
        scans.extend(std::iter::from_fn(|| store.next_effect()).map(|effect| match effect {
            Effect::Scan(segment) => segment,
            other => panic!("{other:?}"),
        }));
    }
    assert!(store.recovered());
    assert_eq!(store.counters().disk_errors, 8);
}

#[test]
fn reads_tickets_and_pins_are_bounded() {
    let limits = StoreLimits { reads: 2, tickets: 5, pinned: 1, ..config(8).limits };
    let mut rig = begun(StoreConfig { limits, ..config(8) });
    for number in 0..30 {
        rig.put(number * 5);
        rig.settle();
    }
    let on_disk: Vec<u32> =
        (0..30).map(|n| n * 5).filter(|n| rig.store.tier(key_of(*n).name) == Some(Tier::Disk)).collect();
    let tickets: Vec<_> = on_disk[..3].iter().map(|number| rig.get(*number)).collect();
    assert_eq!(rig.outcome(tickets[2], on_disk[2]), Some(Err(Miss::Busy)));
    rig.settle();
    assert!(tickets[..2].iter().all(|ticket| matches!(rig.answers[ticket], Answer::Ready(..))));
    let held: Vec<_> = (0..4).map(|_| rig.get(on_disk[0])).collect();
    assert_eq!(rig.answers[&held[3]], Answer::Missed(Miss::Busy), "five are out");
    assert!(!rig.put(500));
    assert_eq!(rig.store.counters().declined[Decline::Busy as usize], 1);
    rig.feed(Input::Pin(key_of(on_disk[0]).name));
    rig.feed(Input::Pin(key_of(on_disk[1]).name));
    assert_eq!(rig.store.index.pinned, 1);
}

/// Buffers that are being read are never written to, and a put finds none rather than taking one.
#[test]
fn a_buffer_that_is_read_is_nobody_else_s() {
    let mut rig = begun(config(8));
    let mut leased = Vec::new();
    for number in 0..6 {
        assert!(rig.put(number * 5));
        leased.push((rig.get(number * 5), number * 5));
    }
    assert!(!rig.put(500), "six of eight buffers are read, and two move blocks");
    rig.settle();
    for (ticket, number) in leased {
        assert_eq!(rig.outcome(ticket, number), Some(Ok(Tier::Host)));
        assert!(rig.fetch(number).is_ok(), "nor is its block lost");
    }
    assert!(rig.put(500));
}

/// A block that moves from its buffer in host memory, and is evicted from disk meanwhile, is not written from that buffer a second time
/// (`Rig` looks) before the first write has ended.
#[test]
fn a_buffer_is_written_by_one_at_a_time() {
    let limits = StoreLimits { writes: 16, ..StoreLimits::default() };
    with_seeds(0..50, |seed| {
        let mut rig = Rig::new(StoreConfig { policy: Policy::Lru, limits, ..config(12) }, seed);
        let moving = (0..4000).find_map(|step| {
            let number = rig.random.below(30) as u32;
            match step % 4 {
                0 => rig.get(number) > 0,
                1 => rig.turn(),
                _ => rig.put(number),
            };
            let tickets: Vec<_> = rig.answers.keys().copied().collect();
            tickets.into_iter().for_each(|ticket| rig.feed(Input::Cancel(ticket)));
            rig.answers.clear();
            rig.store.flights.values().find_map(|flight| match flight {
                Flight::Write { block, buffer, old: Some(_), .. } => {
                    let copy = rig.store.index.get(block.key.name)?.host.as_ref()?;
                    (copy.buffer == *buffer).then_some(block.key.name)
                }
                _ => None,
            })
        });
        let name = moving.expect("a block that moves from host memory");
        rig.store.evict(name, Tier::Disk);
        rig.feed(Input::Flush);
        rig.settle();
        assert!(rig.store.tier(name).is_some());
    });
}

/// Whatever fails and whenever: all is accounted for, and nobody waits for ever.
#[test]
fn faults_at_any_time_leave_nothing_behind() {
    with_seeds(0..40, |seed| {
        let mut rig = Rig::new(config(6 + (seed % 8) as u32), seed);
        let mut asked = Vec::new();
        for _ in 0..600 {
            let number = rig.random.below(40) as u32;
            match rig.random.below(16) {
                0..5 => {
                    rig.put(number);
                }
                5..8 => asked.push((rig.get(number), number)),
                8 => rig.fails = (rig.random.chance(300), rig.random.chance(300)),
                9 => rig.now = rig.now.after_ms(700),
                10 => {
                    if let Some((ticket, _)) = asked.pop() {
                        rig.feed(Input::Cancel(ticket));
                        rig.answers.remove(&ticket);
                    }
                }
                11 => rig.feed(Input::Pin(key_of(number).name)),
                12 => rig.feed(Input::Unpin(key_of(number).name)),
                13 if rig.random.chance(100) => rig.feed(Input::Flush),
                _ => {
                    rig.turn();
                }
            }
            if rig.random.chance(500) {
                asked.retain(|(ticket, number)| rig.outcome(*ticket, *number).is_none());
            }
        }
        rig.settle();
        asked.retain(|(ticket, number)| rig.outcome(*ticket, *number).is_none());
        assert!(asked.is_empty(), "{asked:?} have no answer");
        assert!(rig.store.waiting.is_empty() && rig.store.filling.is_empty() && rig.store.reading.is_empty());
        assert_eq!(
            u64::from(rig.store.buffers.free()) + rig.store.blocks(Tier::Host) + 2,
            u64::from(rig.store.config.buffers)
        );
    });
}
