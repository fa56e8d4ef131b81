//! Blocks of which only some layer groups are stored: what is said to be held is held.

use baton_types::Time;
use baton_types::testing::with_seeds;

use super::rig::{Answer, IDENTITY, Rig, config, key_of};
use crate::testing::{data, shape};
use crate::{Block, BlockKey, Effect, Head, Input, Miss, ObjectConfig, ObjectName, Place, Store, StoreConfig, Tier};

fn begun(config: StoreConfig) -> Rig {
    let mut rig = Rig::new(config, 3);
    rig.settle();
    rig
}

fn held(rig: &Rig, number: u32) -> Option<(Tier, u32)> {
    rig.store.held_groups(&[key_of(number).name]).first().copied()
}

/// Gets these layer groups of a block.
fn fetch_part(rig: &mut Rig, number: u32, groups: u32) -> Result<Tier, Miss> {
    let ticket = rig.ask(|ticket| Input::Get(ticket, BlockKey { groups, ..key_of(number) }));
    rig.settle();
    rig.outcome(ticket, number).expect("an answer")
}

/// Compares what the index says with the records on disk and the names of the objects.
fn check_groups(rig: &Rig) {
    let stride = rig.shape.stride();
    for (name, node) in rig.store.index.all() {
        if let Some(place) = node.disk {
            let bytes = rig.disk.read(place.segment, place.index as usize * stride, rig.shape.head_bytes());
            let head = Head::parse(&rig.shape, &bytes).unwrap();
            assert_eq!((head.place, head.block.key.name, head.block.key.groups), (place, name, node.groups));
        }
        let object = ObjectName { name, parent: node.parent, groups: node.groups };
        assert!(!node.object || rig.objects.iter().any(|(there, _)| *there == object), "{object} is not there");
    }
}

/// Puts other blocks until this one is on disk only.
fn push_down(rig: &mut Rig, number: u32) {
    let name = key_of(number).name;
    for other in 20.. {
        if rig.store.tier(name) == Some(Tier::Disk) {
            return;
        }
        rig.put(other);
        rig.settle();
    }
}

#[test]
fn a_part_does_not_hide_the_whole_and_what_is_lost_is_not_held() {
    let mut rig = begun(config(8));
    assert!(rig.put(0));
    push_down(&mut rig, 0);
    assert!(!rig.put_part(0, 0b10), "more is held");
    assert_eq!(held(&rig, 0).map(|(_, groups)| groups), Some(0b11));
    assert!(fetch_part(&mut rig, 0, 0b11).is_ok(), "the whole is on disk");
    push_down(&mut rig, 0);
    rig.put_part(0, 0b10);
    // The copy on disk goes.
    rig.store.drop_copy(key_of(0).name, Tier::Disk);
    rig.feed(Input::Tick);
    if let Some((_, groups)) = held(&rig, 0) {
        assert!(fetch_part(&mut rig, 0, groups).is_ok(), "{groups:#b} are held");
    }
    rig.put(0);
    assert!(fetch_part(&mut rig, 0, 0b11).is_ok(), "the whole is taken again");
}

/// A block that was put while it was not known to be in the object store.
#[test]
fn what_a_listing_finds_while_a_block_is_filled_has_the_same_groups_or_gives_way() {
    let with_objects = || StoreConfig { disk: None, object: Some(ObjectConfig { most: 100 }), ..config(6) };
    for (there, comes, stays) in [(0b11, 0b01, 0b11), (0b01, 0b11, 0b11), (0b11, 0b11, 0b11), (0b01, 0b10, 0b10)] {
        let mut rig = begun(with_objects());
        assert!(rig.put_part(0, there));
        rig.settle();
        let mut rig = rig.again(with_objects(), false);
        let key = BlockKey { groups: comes, ..key_of(0) };
        rig.store.feed(Input::Put(1000, key), rig.now);
        assert!(matches!(rig.store.next_effect(), Some(Effect::Fill(1000, _))));
        rig.settle();
        assert_eq!(held(&rig, 0), Some((Tier::Object, there)));
        let digests = rig.shape.digests(comes, &data(&rig.shape, 0));
        rig.feed(Input::Filled(1000, Some(digests)));
        rig.settle();
        check_groups(&rig);
        assert_eq!(held(&rig, 0).map(|(_, groups)| groups), Some(stays), "{there:#b}, then {comes:#b}");
        // It is uploaded once, and stays.
        let uploaded = rig.store.counters().uploaded_bytes;
        for _ in 0..5 {
            rig.feed(Input::Seen(vec![key_of(0).name]));
            rig.settle();
        }
        assert_eq!((rig.store.counters().uploaded_bytes, rig.objects.len()), (uploaded, 1));
    }
}

/// Of two records of a block the later counts, unless there is a copy elsewhere that has other groups.
#[test]
fn a_scan_after_a_listing_does_not_change_what_is_held() {
    let of = |groups| {
        let (key, shape) = (BlockKey { groups, ..key_of(0) }, shape());
        Block { key, digests: shape.digests(groups, &data(&shape, 0)) }
    };
    let mut store = Store::new(StoreConfig { object: Some(ObjectConfig { most: 9 }), ..config(8) }).unwrap();
    let scanned = |store: &mut Store, segment: u32, groups: u32| {
        let place = Place { segment, index: 0, generation: u64::from(segment) + 1 };
        let head = Head { identity: IDENTITY, place, block: of(groups) };
        store.feed(Input::Scanned(segment, Some(vec![Ok(head)])), Time(0));
        store.check().unwrap();
        store.index.get(key_of(0).name).map(|node| (node.disk, node.groups))
    };
    let first = scanned(&mut store, 0, 0b01);
    assert_eq!(first.map(|(_, groups)| groups), Some(0b01));
    store.feed(Input::Listed(Some(vec![ObjectName::of(&of(0b01))])), Time(0));
    assert_eq!(scanned(&mut store, 1, 0b11), first);
    let later = Place { segment: 2, index: 0, generation: 3 };
    assert_eq!(scanned(&mut store, 2, 0b01), Some((Some(later), 0b01)));
}

/// An object whose name says more than is in it, as after a copy by hand, is no block, and is removed.
#[test]
fn an_object_with_other_groups_than_its_name_says_is_damaged() {
    let with_objects = || StoreConfig { disk: None, object: Some(ObjectConfig { most: 100 }), ..config(6) };
    let mut rig = begun(with_objects());
    assert!(rig.put_part(0, 0b01));
    rig.settle();
    rig.objects[0].0.groups = 0b11;
    let mut rig = rig.again(with_objects(), false);
    rig.settle();
    assert_eq!(held(&rig, 0), Some((Tier::Object, 0b11)));
    assert_eq!(fetch_part(&mut rig, 0, 0b11), Err(Miss::Damaged));
    assert_eq!((held(&rig, 0), rig.objects.len(), rig.store.counters().verify_failures), (None, 0, [0, 0, 1]));
}

/// Whatever is put, read, evicted, lost and found again: what is held can be had, once nobody else uses it.
#[test]
fn what_is_held_can_be_had_in_any_order_of_events() {
    with_seeds(0..40, |seed| {
        let object = (seed % 3 > 0).then_some(ObjectConfig { most: 12 });
        let disk = config(8).disk.filter(|_| seed % 3 < 2);
        let config = || StoreConfig { disk, object, ..config(8) };
        let mut rig = Rig::new(config(), seed);
        for step in 0..600u64 {
            let (number, groups) = (rig.random.below(25) as u32, 1 + rig.random.below(3) as u32);
            rig.now = rig.now.after_ms(rig.random.below(100));
            match rig.random.below(8) {
                0..3 => _ = rig.put_part(number, groups),
                3 | 4 => {
                    let ticket = rig.ask(|ticket| Input::Get(ticket, BlockKey { groups, ..key_of(number) }));
                    (0..3).for_each(|_| _ = rig.turn());
                    if rig.outcome(ticket, number).is_none() {
                        rig.feed(Input::Cancel(ticket));
                        rig.answers.retain(|_, answer| matches!(answer, Answer::Filled));
                    }
                }
                5 if step % 8 == 0 => rig.fails = (rig.random.chance(300), rig.random.chance(100)),
                5 if step % 8 == 1 => rig.refuses = (rig.random.chance(200), rig.random.chance(200)),
                _ => _ = rig.turn(),
            }
            check_groups(&rig);
            if step % 150 == 149 {
                rig = rig.again(config(), false);
            }
        }
        (rig.fails, rig.refuses) = ((false, false), (false, false));
        rig.now = rig.now.after_ms(60_000);
        rig.feed(Input::Tick);
        rig.settle();
        for number in 0..25 {
            if let Some((_, groups)) = held(&rig, number) {
                assert!(fetch_part(&mut rig, number, groups).is_ok(), "block {number}, {groups:#b}");
            }
        }
    });
}
