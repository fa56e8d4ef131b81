//! A store with a fake disk, which carries out effects when and in the order that a seed says.

use std::collections::BTreeMap;
use std::sync::Arc;

use baton_types::Time;
use baton_types::testing::Random;

use super::disk::FakeDisk;
use crate::testing::{data, key, shape};
use crate::{
    Block, BlockKey, Buffer, DiskConfig, Effect, Head, Identity, Input, Miss, ObjectName, ReadError, Shape, Store,
    StoreConfig, Ticket, Tier, check_record,
};

/// Blocks of the tests: each conversation is a chain of so many.
pub const CHAIN: u32 = 5;
pub const IDENTITY: Identity = Identity { layout: 11, numerics: 12 };

/// Block `number` and what it follows.
pub fn key_of(number: u32) -> BlockKey {
    key(number, (!number.is_multiple_of(CHAIN)).then(|| number - 1))
}

pub fn config(buffers: u32) -> StoreConfig {
    let mut config = StoreConfig::new(shape(), IDENTITY, buffers, Some(DiskConfig { segments: 8, records: 3 }));
    config.limits.writes = 3;
    config
}

/// What came of a put or a get.
#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    Filled,
    Declined(crate::Decline),
    Ready(Buffer, Tier),
    Missed(Miss),
}

pub struct Rig {
    pub store: Store,
    pub disk: FakeDisk,
    /// The object store, the oldest object first, and whether it answers.
    pub objects: Vec<(ObjectName, Vec<u8>)>,
    pub away: bool,
    /// Its uploads and removals fail, and its listings and fetches.
    pub refuses: (bool, bool),
    pub random: Random,
    pub shape: Shape,
    pub memory: Vec<Vec<u8>>,
    pub waiting: Vec<Effect>,
    pub answers: BTreeMap<Ticket, Answer>,
    /// Puts whose data are to be copied.
    puts: BTreeMap<Ticket, u32>,
    pub blocks: BTreeMap<Ticket, Block>,
    pub now: Time,
    next: Ticket,
    pub writes: u64,
    pub syncs: u64,
    pub scans: Vec<u32>,
    /// All writes, and all reads, fail.
    pub fails: (bool, bool),
    /// What events say is stored.
    pub told: BTreeMap<(baton_kv_cache::BlockName, Tier), ()>,
}

impl Rig {
    pub fn new(config: StoreConfig, seed: u64) -> Rig {
        let shape = config.shape.clone();
        let size = config.disk.map_or(0, |disk| disk.segment_bytes(&shape)) as usize;
        Rig::on(FakeDisk::of(size), config, seed)
    }

    pub fn on(disk: FakeDisk, config: StoreConfig, seed: u64) -> Rig {
        Rig::over(disk, Vec::new(), config, seed)
    }

    pub fn over(disk: FakeDisk, objects: Vec<(ObjectName, Vec<u8>)>, config: StoreConfig, seed: u64) -> Rig {
        let shape = config.shape.clone();
        let memory = vec![vec![0xaa; shape.stride()]; config.buffers as usize];
        let store = Store::new(config).unwrap();
        let mut rig = Rig {
            store,
            disk,
            objects,
            away: false,
            refuses: (false, false),
            random: Random(seed),
            shape,
            memory,
            waiting: Vec::new(),
            answers: BTreeMap::new(),
            puts: BTreeMap::new(),
            blocks: BTreeMap::new(),
            now: Time(0),
            next: 0,
            writes: 0,
            syncs: 0,
            scans: Vec::new(),
            fails: (false, false),
            told: BTreeMap::new(),
        };
        rig.drain_effects();
        rig
    }

    pub fn feed(&mut self, input: Input) {
        self.store.feed(input, self.now);
        self.drain_effects();
        self.store.check().unwrap();
    }

    fn drain_effects(&mut self) {
        while let Some(effect) = self.store.next_effect() {
            match effect {
                Effect::Fill(ticket, buffer) => {
                    let data = data(&self.shape, self.puts[&ticket]);
                    let head = self.shape.head_bytes();
                    self.memory[buffer.0 as usize].fill(0);
                    self.memory[buffer.0 as usize][head..head + data.len()].copy_from_slice(&data);
                    self.answers.insert(ticket, Answer::Filled);
                }
                Effect::Declined(ticket, why) => drop(self.answers.insert(ticket, Answer::Declined(why))),
                Effect::Missed(ticket, why) => drop(self.answers.insert(ticket, Answer::Missed(why))),
                Effect::Ready(ticket, buffer, block, tier) => {
                    self.answers.insert(ticket, Answer::Ready(buffer, tier));
                    self.blocks.insert(ticket, block);
                }
                Effect::Stored(name, tier) => assert!(self.told.insert((name, tier), ()).is_none(), "stored twice"),
                Effect::Removed(name, tier) => {
                    assert!(self.told.remove(&(name, tier)).is_some(), "removed, never stored")
                }
                other => {
                    let buffer = |effect: &Effect| match effect {
                        Effect::Read { into, .. } => Some(*into),
                        Effect::Write { from, .. } | Effect::Upload { from, .. } => Some(*from),
                        Effect::Fetch { into, .. } => Some(*into),
                        _ => None,
                    };
                    let shared = self
                        .waiting
                        .iter()
                        .filter(|waiting| !both_read(waiting, &other))
                        .any(|waiting| buffer(waiting).is_some() && buffer(waiting) == buffer(&other));
                    assert!(!shared, "two use {:?} at once", buffer(&other));
                    self.waiting.push(other);
                }
            }
        }
    }

    /// Carries out one effect, whichever the seed says. False: there is none.
    pub fn turn(&mut self) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        let effect = self.waiting.swap_remove(self.random.index(self.waiting.len()));
        let stride = self.shape.stride();
        match effect {
            Effect::Scan(segment) => {
                self.scans.push(segment);
                let records = self.disk.size / stride;
                let head =
                    |at| Head::parse(&self.shape, &self.disk.read(segment, at * stride, self.shape.head_bytes()));
                let heads = (0..records).map(head).collect();
                self.feed(Input::Scanned(segment, Some(heads)));
            }
            Effect::Read { job, place, into, expect } => {
                let bytes = self.disk.read(place.segment, place.index as usize * stride, stride);
                let read = check_record(&self.shape, &bytes, &expect).map_err(ReadError::Mismatch);
                self.memory[into.0 as usize] = bytes;
                self.feed(Input::Read(job, if self.fails.1 { Err(ReadError::Io) } else { read }));
            }
            Effect::Write { job, place, from, head } => {
                let buffer = &mut self.memory[from.0 as usize];
                buffer[..head.len()].copy_from_slice(&head);
                if !self.fails.0 {
                    self.disk.write(place.segment, place.index as usize * stride, buffer.clone());
                }
                self.writes += 1;
                self.feed(Input::Written(job, !self.fails.0));
            }
            Effect::Sync(segment) => {
                self.syncs += 1;
                self.disk.sync(segment, &mut self.random);
            }
            other => self.call(other),
        }
        true
    }

    /// Carries out a call of the object store.
    fn call(&mut self, effect: Effect) {
        let at = |objects: &[(ObjectName, Vec<u8>)], wanted| objects.iter().position(|(name, _)| *name == wanted);
        let (writes, reads) = (!self.away && !self.refuses.0, !self.away && !self.refuses.1);
        let input = match effect {
            Effect::List { most } => {
                let names = self.objects.iter().map(|(name, _)| *name).take(most as usize).collect();
                Input::Listed(reads.then_some(names))
            }
            Effect::Fetch { job, .. } if !reads => Input::Read(job, Err(ReadError::Io)),
            Effect::Fetch { job, object, into, expect } => {
                let bytes = at(&self.objects, object).map(|at| self.objects[at].1.clone()).ok_or(ReadError::Absent);
                let read = bytes.and_then(|mut bytes| {
                    bytes.resize(self.shape.stride(), 0);
                    self.memory[into.0 as usize] = bytes;
                    let bytes = &self.memory[into.0 as usize];
                    check_record(&self.shape, bytes, &expect).map_err(ReadError::Mismatch)
                });
                Input::Read(job, read)
            }
            Effect::Upload { job, object, from, mut head } => {
                let data = self.shape.head_bytes()..self.shape.head_bytes() + self.shape.data_bytes();
                head.extend_from_slice(&self.memory[from.0 as usize][data]);
                // What is said to have failed may be there all the same.
                if writes || self.random.below(2) == 0 {
                    self.objects.retain(|(name, _)| *name != object);
                    self.objects.push((object, head));
                }
                Input::Uploaded(job, writes)
            }
            Effect::Remove { job, object } => {
                if writes {
                    self.objects.retain(|(name, _)| *name != object);
                }
                Input::Deleted(job, writes)
            }
            other => panic!("{other:?} is no work for a disk or an object store"),
        };
        self.feed(input);
    }

    pub fn settle(&mut self) {
        while self.turn() {}
        assert!(self.store.idle(), "the disk has nothing to do, and something waits for it");
    }

    pub fn ask(&mut self, input: impl FnOnce(Ticket) -> Input) -> Ticket {
        self.next += 1;
        self.feed(input(self.next));
        self.next
    }

    /// Puts a block. True: it was taken.
    pub fn put(&mut self, number: u32) -> bool {
        self.put_part(number, 0b11)
    }

    /// Puts these layer groups of a block.
    pub fn put_part(&mut self, number: u32, groups: u32) -> bool {
        self.puts.insert(self.next + 1, number);
        let key = BlockKey { groups, ..key_of(number) };
        self.feed(Input::Seen(vec![key.name]));
        let ticket = self.ask(|ticket| Input::Put(ticket, key));
        let taken = self.answers.remove(&ticket) == Some(Answer::Filled);
        if taken {
            let digests: Arc<[u64]> = self.shape.digests(groups, &data(&self.shape, number));
            self.feed(Input::Filled(ticket, Some(digests)));
        }
        self.puts.remove(&ticket);
        taken
    }

    pub fn get(&mut self, number: u32) -> Ticket {
        self.ask(|ticket| Input::Get(ticket, key_of(number)))
    }

    /// What a get came to. A block that is handed out is compared with the truth, and given back.
    pub fn outcome(&mut self, ticket: Ticket, number: u32) -> Option<Result<Tier, Miss>> {
        match self.answers.remove(&ticket)? {
            Answer::Missed(why) => Some(Err(why)),
            Answer::Ready(buffer, tier) => {
                let head = self.shape.head_bytes();
                let found = &self.memory[buffer.0 as usize][head..head + self.shape.data_bytes()];
                let block = self.blocks.remove(&ticket).unwrap();
                let verified = self.shape.verify(&block, found).is_ok();
                let right = found == data(&self.shape, number);
                assert!(right || !verified, "block {number} has the wrong KV, and nobody noticed");
                self.feed(Input::Done(ticket, verified));
                Some(if verified { Ok(tier) } else { Err(Miss::Damaged) })
            }
            other => panic!("{other:?} for a get"),
        }
    }

    /// Gets a block, and waits for it.
    pub fn fetch(&mut self, number: u32) -> Result<Tier, Miss> {
        let ticket = self.get(number);
        self.settle();
        self.outcome(ticket, number).expect("an answer")
    }

    /// A store that begins on what this one's disk is left with.
    pub fn again(mut self, config: StoreConfig, crash: bool) -> Rig {
        match crash {
            true => self.disk.crash(&mut self.random),
            false => self.disk.kill(),
        }
        let seed = self.random.bits();
        Rig::over(self.disk, self.objects, config, seed)
    }

    pub fn on_disk(&self, number: u32) -> bool {
        self.store.snapshot().any(|at| at == (key_of(number).name, Tier::Disk))
    }

    /// Flips a bit of each record of the disk, at this byte.
    pub fn flip(&mut self, at: usize) {
        let stride = self.shape.stride();
        for record in self.disk.now.values_mut().flat_map(|segment| segment.chunks_mut(stride)) {
            record[at] ^= 4;
        }
    }

    pub fn verify_failures(&self) -> u64 {
        self.store.counters().verify_failures.iter().sum()
    }
}

/// One writes a buffer to disk, and the other uploads it: neither changes the data.
fn both_read(one: &Effect, other: &Effect) -> bool {
    let reads = |effect: &Effect| matches!(effect, Effect::Write { .. } | Effect::Upload { .. });
    reads(one) && reads(other)
}
