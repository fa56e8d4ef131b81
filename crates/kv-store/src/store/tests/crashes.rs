//! Crashes at every write boundary, and bytes that change.

use std::collections::BTreeSet;

use baton_types::Time;
use baton_types::testing::with_seeds;

use super::rig::{Rig, config, key_of};
use crate::{Effect, Head, Identity, Input, Miss, Place, Reason, Store, StoreConfig, Tier};

/// Blocks of the workload: twice as many as the disk has room for.
const BLOCKS: u32 = 40;

/// Puts and gets until so many writes were begun; the disk works as the seed says. All answers are looked at.
fn work(rig: &mut Rig, writes: u64) {
    let mut asked = Vec::new();
    let mut steps = 0;
    while rig.writes < writes && steps < 4000 {
        steps += 1;
        let number = rig.random.below(u64::from(BLOCKS)) as u32;
        match rig.random.below(8) {
            0..4 => {
                rig.put(number);
            }
            4 => asked.push((rig.get(number), number)),
            _ => {
                rig.turn();
            }
        }
        asked.retain(|(ticket, number)| rig.outcome(*ticket, *number).is_none());
    }
    assert!(rig.writes >= writes, "the workload writes enough");
}

/// Gets every block. Returns those that were found.
fn all(rig: &mut Rig) -> BTreeSet<u32> {
    rig.settle();
    (0..BLOCKS).filter(|number| rig.fetch(*number).is_ok()).collect()
}

fn small() -> StoreConfig {
    config(12)
}

/// 1,000 crashes: eight seeds, at each of 125 writes. Never a wrong block (`Rig::outcome` looks), the index is back after one scan of each
/// segment, and the store goes on as before.
#[test]
fn a_thousand_crashes_never_give_a_wrong_block() {
    let (mut crashes, mut recovered, mut lost, mut moved) = (0, 0, 0, 0);
    with_seeds(0..8, |seed| {
        for writes in 1..=125 {
            let mut rig = Rig::new(small(), seed);
            rig.settle();
            work(&mut rig, writes);
            moved += rig.store.counters().written_bytes[Reason::Moved as usize] / rig.shape.stride() as u64;
            let mut rig = rig.again(small(), true);
            while !rig.store.recovered() {
                assert!(rig.turn());
            }
            rig.scans.sort_unstable();
            assert_eq!(rig.scans, (0..8).collect::<Vec<_>>(), "each segment is scanned once, and nothing is read");
            assert_eq!(rig.store.counters().read_bytes, 0);
            recovered += rig.store.blocks(Tier::Disk);
            all(&mut rig);
            lost += rig.verify_failures();
            let more = rig.writes + 20;
            work(&mut rig, more);
            all(&mut rig);
            crashes += 1;
        }
    });
    println!(
        "{crashes} crashes after {moved} moves, {recovered} blocks recovered, {lost} found torn when they were read"
    );
    let enough = crashes == 1000 && moved > 1000 && recovered > 5000 && lost > 100;
    assert!(baton_types::testing::seed().is_some() || enough);
}

/// Who crashes often, and between two crashes hardly gets to write, still keeps what is on disk.
#[test]
fn crashes_one_after_the_other_are_survived() {
    with_seeds(0..4, |seed| {
        let mut rig = Rig::new(small(), seed);
        for _ in 0..100 {
            let writes = rig.random.below(6);
            work(&mut rig, writes);
            rig = rig.again(small(), true);
        }
        assert!(!all(&mut rig).is_empty());
    });
}

/// A process that is killed loses nothing that was written, in every state of reclaiming.
#[test]
fn what_is_on_disk_is_found_again_after_a_kill() {
    with_seeds(0..4, |seed| {
        for writes in (1..120).step_by(7) {
            let mut rig = Rig::new(small(), seed);
            rig.settle();
            work(&mut rig, writes);
            let before: BTreeSet<u32> = (0..BLOCKS).filter(|number| rig.on_disk(*number)).collect();
            let mut rig = rig.again(small(), false);
            rig.settle();
            // What had been evicted, and not overwritten, may come back; then as much is evicted again.
            assert!(rig.store.blocks(Tier::Disk) <= 12, "four of eight segments have live blocks");
            let after: BTreeSet<u32> = (0..BLOCKS).filter(|number| rig.on_disk(*number)).collect();
            let gone = before.difference(&after).count() as u64;
            assert!(gone <= rig.store.counters().evicted[Tier::Disk as usize], "{before:?}, then {after:?}");
            for number in after {
                assert_eq!(rig.fetch(number).map(|_| ()), Ok(()), "block {number}");
            }
            assert_eq!(rig.verify_failures(), 0);
        }
    });
}

/// Between a block's move and the end of its old segment it is on disk twice.
#[test]
fn of_two_records_of_a_block_the_later_counts() {
    let block = crate::testing::block(&crate::testing::shape(), 0);
    for order in [[2, 5], [5, 2]] {
        let mut store = Store::new(small()).unwrap();
        for at in 0..8 {
            let generation = match at {
                0 | 1 => order[at as usize],
                _ => 1,
            };
            let place = Place { segment: at, index: 0, generation };
            let head = Head { identity: small().identity, place, block: block.clone() };
            store.feed(Input::Scanned(at, Some(vec![Ok(head)])), Time(0));
            store.check().unwrap();
        }
        assert_eq!((store.counters().outdated, store.blocks(Tier::Disk)), (7, 1));
        store.feed(Input::Get(1, block.key.clone()), Time(0));
        let read = std::iter::from_fn(|| store.next_effect()).find_map(|effect| match effect {
            Effect::Read { place, .. } => Some(place.generation),
            _ => None,
        });
        assert_eq!(read, Some(5), "{order:?}");
    }
}

fn written() -> (Rig, Vec<u32>) {
    let mut rig = Rig::new(small(), 1);
    rig.settle();
    (0..14).for_each(|number| {
        rig.put(number);
        rig.settle();
    });
    let rig = rig.again(small(), false);
    let mut rig = rig;
    rig.settle();
    let there: Vec<u32> = (0..14).filter(|number| rig.on_disk(*number)).collect();
    assert!(there.len() > 3);
    (rig, there)
}

#[test]
fn a_flipped_byte_of_data_is_found_and_counted() {
    let (mut rig, there) = written();
    let at = rig.shape.head_bytes() + 700;
    rig.flip(at);
    for (count, number) in (1..).zip(there) {
        assert_eq!(rig.fetch(number), Err(Miss::Damaged));
        assert_eq!(rig.verify_failures(), count);
        assert_eq!(rig.fetch(number), Err(Miss::Absent), "it is forgotten");
    }
}

#[test]
fn a_flipped_byte_of_a_head_is_found_by_the_scan_or_by_the_read() {
    for at in [0, 9, 20, 35, 50, 97, 130] {
        let (mut rig, there) = written();
        rig.flip(at);
        assert_eq!(rig.fetch(there[0]), Err(Miss::Damaged), "byte {at}");
        let mut rig = rig.again(small(), false);
        rig.settle();
        assert_eq!(rig.store.blocks(Tier::Disk), 0, "byte {at}");
        let counters = rig.store.counters();
        assert!(counters.damaged_heads + counters.outdated >= there.len() as u64, "byte {at}");
        // Byte 9 is of the version: a head of another one is not damaged.
        assert_eq!(counters.damaged_heads > 0, at != 9, "byte {at}");
        assert_eq!(counters.verify_failures, [0, counters.damaged_heads, 0], "byte {at}");
        assert_eq!(rig.fetch(there[0]), Err(Miss::Absent));
    }
}

/// The bytes are whole and right, but of another block: a write that went astray.
#[test]
fn a_record_in_another_record_s_place_is_no_block() {
    let (mut rig, there) = written();
    let stride = rig.shape.stride();
    for segment in rig.disk.now.values_mut() {
        segment.rotate_left(stride);
    }
    for number in &there {
        assert!(rig.fetch(*number).is_err());
    }
    let mut rig = rig.again(small(), false);
    rig.settle();
    assert_eq!((rig.store.blocks(Tier::Disk), rig.store.counters().damaged_heads > 0), (0, true));
}

#[test]
fn kv_of_another_model_or_numerics_is_not_read_and_is_overwritten() {
    let (rig, there) = written();
    let other = StoreConfig { identity: Identity { numerics: 99, ..small().identity }, ..small() };
    let mut rig = rig.again(other.clone(), false);
    rig.settle();
    assert_eq!(rig.store.blocks(Tier::Disk), 0);
    assert!(rig.store.counters().outdated >= there.len() as u64);
    work(&mut rig, 60);
    let rig = rig.again(other, false);
    let mut rig = rig;
    rig.settle();
    assert!(rig.store.blocks(Tier::Disk) > 3);
}

#[test]
fn a_flipped_byte_in_host_memory_is_found_by_who_reads_it() {
    let mut rig = Rig::new(small(), 1);
    rig.settle();
    rig.put(0);
    let ticket = rig.get(0);
    let head = rig.shape.head_bytes();
    rig.memory.iter_mut().for_each(|buffer| buffer[head + 3] ^= 1);
    assert_eq!(rig.outcome(ticket, 0), Some(Err(Miss::Damaged)));
    assert_eq!(rig.store.counters().verify_failures, [1, 0, 0]);
    assert_eq!(rig.store.tier(key_of(0).name), None);
    assert_eq!(rig.fetch(0), Err(Miss::Absent));
}
