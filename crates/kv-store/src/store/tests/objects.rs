//! The object tier: what is uploaded, found again and removed, and what a store that is away costs.

use super::rig::{Rig, config, key_of};
use crate::{Input, Miss, ObjectConfig, StoreConfig, Tier};

/// Host memory for a few blocks, no disk, and room for so many objects.
fn objects(most: u64) -> StoreConfig {
    let mut config = StoreConfig { disk: None, object: Some(ObjectConfig { most }), ..config(6) };
    (config.limits.uploads, config.limits.removals, config.limits.fetches) = (2, 2, 3);
    config
}

fn begun(config: StoreConfig) -> Rig {
    let mut rig = Rig::new(config, 5);
    rig.settle();
    rig
}

fn put_all(rig: &mut Rig, numbers: std::ops::Range<u32>) {
    for number in numbers {
        assert!(rig.put(number));
        rig.settle();
    }
}

fn tier(rig: &Rig, number: u32) -> Option<Tier> {
    rig.store.tier(key_of(number).name)
}

#[test]
fn a_block_that_has_left_host_memory_is_fetched_also_by_the_next_process() {
    let mut rig = begun(objects(100));
    put_all(&mut rig, 0..20);
    assert_eq!((tier(&rig, 0), rig.objects.len()), (Some(Tier::Object), 20));
    assert_eq!(rig.fetch(0), Ok(Tier::Object));
    assert_eq!(rig.fetch(0), Ok(Tier::Host));
    let counters = *rig.store.counters();
    assert_eq!((counters.hit_tokens, counters.object_errors), ([4, 0, 4], 0));
    assert_eq!(counters.uploaded_bytes, 20 * crate::object_bytes(&rig.shape));
    let mut again = rig.again(objects(100), false);
    again.settle();
    assert_eq!(again.fetch(3), Ok(Tier::Object), "a listing is the whole index");
    assert_eq!(again.store.counters().recovered, 20);
    assert_eq!(again.fetch(99), Err(Miss::Absent));
}

#[test]
fn below_a_disk_the_disk_is_read_first_and_a_block_that_left_it_is_fetched() {
    let mut rig = begun(StoreConfig { object: Some(ObjectConfig { most: 100 }), ..config(8) });
    put_all(&mut rig, 0..60);
    let of = |rig: &Rig, wanted| (0..60).find(|number| tier(rig, *number) == Some(wanted)).unwrap();
    let (on_disk, fetched) = (of(&rig, Tier::Disk), of(&rig, Tier::Object));
    assert_eq!(rig.fetch(on_disk), Ok(Tier::Disk));
    assert_eq!(rig.fetch(fetched), Ok(Tier::Object));
    rig.settle();
    assert!(rig.on_disk(fetched), "it is on disk again");
}

#[test]
fn there_are_never_more_objects_than_may_be_and_the_coldest_go_first() {
    let mut rig = begun(objects(8));
    put_all(&mut rig, 0..1);
    for number in 1..60 {
        rig.put(number);
        while rig.turn() {
            assert!(rig.objects.len() <= 8, "{} objects", rig.objects.len());
        }
        // Block 0 is asked for again and again.
        assert!(rig.fetch(0).is_ok(), "after {number}");
    }
    assert!(rig.store.counters().evicted[Tier::Object as usize] > 20);
    let mut again = rig.again(objects(3), false);
    again.settle();
    assert!(again.objects.len() <= 3, "less room than before");
    assert_eq!(again.store.blocks(Tier::Object), again.objects.len() as u64);
}

#[test]
fn what_is_damaged_is_a_miss_counted_and_removed() {
    let mut rig = begun(objects(100));
    put_all(&mut rig, 0..20);
    let head = rig.shape.head_bytes();
    for (at, (_, bytes)) in rig.objects.iter_mut().enumerate() {
        // A byte of the data, a byte of the head, or an end that is missing.
        match at % 3 {
            0 => bytes[head + at] ^= 8,
            1 => bytes[40] ^= 8,
            _ => bytes.truncate(head + 5),
        }
    }
    let gone = (0..20).filter(|number| tier(&rig, *number) == Some(Tier::Object)).collect::<Vec<_>>();
    for number in &gone {
        assert_eq!(rig.fetch(*number), Err(Miss::Damaged), "block {number}");
        assert_eq!(tier(&rig, *number), None);
    }
    assert_eq!(rig.store.counters().verify_failures, [0, 0, gone.len() as u64]);
    assert_eq!(rig.objects.len(), 20 - gone.len());
    assert!(rig.put(gone[0]));
    rig.settle();
    assert_eq!(rig.objects.len(), 21 - gone.len(), "computed and uploaded again");
}

#[test]
fn an_object_that_somebody_else_removed_is_absent_and_the_others_are_not() {
    let mut rig = begun(objects(100));
    put_all(&mut rig, 0..20);
    rig.objects.retain(|(object, _)| object.name != key_of(0).name);
    assert_eq!(rig.fetch(0), Err(Miss::Absent));
    assert_eq!((tier(&rig, 0), rig.fetch(5)), (None, Ok(Tier::Object)));
}

#[test]
fn a_store_that_is_away_is_asked_once_in_a_while_and_has_all_when_it_is_back() {
    let mut rig = begun(objects(100));
    put_all(&mut rig, 0..20);
    rig.away = true;
    assert_eq!(rig.fetch(0), Err(Miss::Failed));
    assert_eq!(tier(&rig, 0), None, "nobody is told to wait for it");
    let ticket = rig.get(0);
    assert!(rig.waiting.is_empty(), "no call is made");
    assert_eq!(rig.outcome(ticket, 0), Some(Err(Miss::Failed)));
    assert!(rig.put(30), "puts go on");
    rig.settle();
    rig.now = rig.now.after_ms(1000);
    assert_eq!(rig.fetch(0), Err(Miss::Failed), "one more try");
    rig.now = rig.now.after_ms(1000);
    assert_eq!(tier(&rig, 0), None, "the second rest is longer");
    rig.now = rig.now.after_ms(1000);
    rig.away = false;
    rig.feed(Input::Tick);
    rig.settle();
    assert_eq!(rig.fetch(0), Ok(Tier::Object));
    assert_eq!(rig.objects.len(), 21, "what came meanwhile is uploaded");
    // Two gets, and two uploads: each of the two rests from its first failure on.
    assert_eq!(rig.store.counters().object_errors, 4);
}

/// A bucket whose quota is used up, or which may only be read, has what is in it.
#[test]
fn a_store_that_takes_no_writes_is_read_all_the_same() {
    let mut rig = begun(objects(20));
    put_all(&mut rig, 0..20);
    rig.refuses.0 = true;
    for second in 0..300 {
        // Uploads, and removals of what they are to replace.
        assert!(rig.put(100 + second));
        rig.settle();
        let far = (0..20).find(|number| tier(&rig, *number) == Some(Tier::Object)).expect("a block to fetch");
        assert_eq!(rig.fetch(far), Ok(Tier::Object), "second {second}");
        rig.now = rig.now.after_ms(1000);
    }
    let errors = rig.store.counters().object_errors;
    // Rests of 1 s, 2 s and so on, up to 60 s: about ten, after each of which no more fail than are in flight at once.
    assert!((10..=44).contains(&errors), "{errors} errors");
    rig.refuses.0 = false;
    rig.now = rig.now.after_ms(60_000);
    put_all(&mut rig, 500..501);
    assert!(rig.objects.iter().any(|(object, _)| object.name == key_of(500).name), "it is written to again");
}

/// The same for gets that fail. A lost connection is found by writes, too, and they rest then.
#[test]
fn a_store_that_cannot_be_read_takes_writes() {
    let mut rig = begun(objects(100));
    put_all(&mut rig, 0..20);
    rig.refuses.1 = true;
    for number in 20..30 {
        assert_eq!(rig.fetch(0), Err(Miss::Failed));
        put_all(&mut rig, number..number + 1);
        assert_eq!(rig.objects.len() as u32, number + 1);
    }
    assert_eq!(rig.store.counters().object_errors, 1, "gets rest");
}

#[test]
fn nothing_is_uploaded_before_it_is_known_what_is_there() {
    let mut rig = Rig::new(objects(4), 5);
    rig.away = true;
    rig.settle();
    assert!(rig.put(0));
    rig.settle();
    rig.now = rig.now.after_ms(999);
    rig.away = false;
    rig.feed(Input::Tick);
    assert!(rig.waiting.is_empty() && rig.objects.is_empty());
    rig.now = rig.now.after_ms(1);
    rig.feed(Input::Tick);
    rig.settle();
    assert_eq!(rig.objects.len(), 1);
}

#[test]
fn blocks_that_were_asked_for_too_seldom_are_not_uploaded() {
    let mut rig = begun(StoreConfig { min_uses: 2, ..objects(100) });
    put_all(&mut rig, 0..3);
    assert!(rig.objects.is_empty());
    rig.feed(Input::Seen(vec![key_of(1).name]));
    rig.settle();
    assert_eq!(rig.objects.iter().map(|(object, _)| object.name).collect::<Vec<_>>(), [key_of(1).name]);
    rig.feed(Input::Seen(vec![key_of(2).name]));
    rig.feed(Input::Flush);
    rig.settle();
    assert_eq!(rig.objects.len(), 2);
}

/// Whatever happens in whatever order: no wrong block, all accounts right, and never too many objects.
#[test]
fn any_order_of_calls_and_failures_is_survived() {
    for seed in 0..40 {
        let with_disk = seed % 2 == 0;
        let config = StoreConfig { disk: config(6).disk.filter(|_| with_disk), ..objects(10) };
        let mut rig = Rig::new(config.clone(), seed);
        for step in 0..400u64 {
            let number = rig.random.below(30) as u32;
            rig.now = rig.now.after_ms(rig.random.below(100));
            match rig.random.below(8) {
                0 | 1 => _ = rig.put(number),
                2 => {
                    let ticket = rig.get(number);
                    for _ in 0..3 {
                        rig.turn();
                    }
                    if rig.outcome(ticket, number).is_none() {
                        rig.feed(Input::Cancel(ticket));
                    }
                }
                3 if step % 5 == 0 => rig.away = !rig.away,
                5 if step % 7 == 0 => rig.refuses = (rig.random.chance(300), rig.random.chance(300)),
                4 if !rig.objects.is_empty() && step % 4 == 0 => {
                    let at = rig.random.index(rig.objects.len());
                    let byte = rig.random.index(rig.objects[at].1.len());
                    rig.objects[at].1[byte] ^= 1;
                }
                _ => _ = rig.turn(),
            }
            assert!(rig.objects.len() <= 10, "seed {seed}: {} objects", rig.objects.len());
        }
        (rig.away, rig.refuses) = (false, (false, false));
        rig.now = rig.now.after_ms(60_000);
        rig.feed(Input::Tick);
        rig.settle();
        assert_eq!(rig.objects.len() as u64, rig.store.blocks(Tier::Object), "seed {seed}");
    }
}
