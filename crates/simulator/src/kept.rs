//! A worker's own store below its pool: the real core ([`baton_kv_store::Store`]) over a simulated disk, and the threads that copy. What a disk has
//! written outlives the worker's process. `storing.rs` connects it to the worker.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use baton_engine::fake::KvMemory;
use baton_kv_store::{
    BlockKey, BlockName, Buffer, Decline, DiskConfig, Effect, Head, Identity, Input, ReadError, Shape, Store,
    StoreConfig, Ticket, check_record,
};
use baton_roles::tiers::{Copied, Move};
use baton_types::testing::Random;
use baton_types::{BlockId, KvLayout, PoolGeometry, SeqId, Time, digest_block};

use crate::pool::Bytes;

/// Buffers of host memory.
const BUFFERS: u32 = 14;
/// Segments of the disk, and records of each.
const DISK: DiskConfig = DiskConfig { segments: 8, records: 3 };

/// A move that is under way.
struct Copying {
    what: Box<Move>,
    rest: VecDeque<Copied>,
    /// A load's block that was asked for.
    asked: Option<(Ticket, Copied)>,
    failed: bool,
}

/// What became of a ticket.
enum Answer {
    Fill(Buffer),
    Ready(Buffer, baton_kv_store::Block),
    No,
    /// There is no room for a block: none after it is offered.
    Busy,
}

/// What a thread has done.
pub(crate) enum Done {
    /// A load has ended. True: all of it is there.
    Loaded(Box<Move>, bool),
    Saved(SeqId),
}

/// A store, what its disk has to do, and what moves.
pub(crate) struct Kept {
    store: Store,
    shape: Shape,
    random: Random,
    buffers: Vec<Vec<u8>>,
    disk: BTreeMap<(u32, u32), Vec<u8>>,
    work: Vec<Effect>,
    answers: BTreeMap<Ticket, Answer>,
    next: Ticket,
    moves: VecDeque<Copying>,
    /// Blocks that the process before this one had written to disk, and this one has not saved.
    inherited: BTreeSet<BlockName>,
    /// The checker's record: blocks that loads write to, and that saves read.
    pub written: BTreeMap<SeqId, Vec<(usize, BlockId)>>,
    pub read: BTreeMap<SeqId, Vec<(usize, BlockId)>>,
    /// Its threads have been told to go on.
    pub awake: bool,
    /// What goes wrong, per mille of what the disk does and of blocks that are loaded; and how often something did.
    pub faults: u32,
    pub struck: u64,
    /// Nothing is verified while it is copied: a rule that is broken on purpose.
    pub careless: bool,
}

impl Kept {
    pub(crate) fn new(layout: &KvLayout, seed: u64) -> Kept {
        let shape = Shape::new(layout).expect("a simulated layout");
        let config = StoreConfig::new(shape.clone(), Identity::default(), BUFFERS, Some(DISK));
        let (buffers, store) = (vec![vec![0; shape.stride()]; BUFFERS as usize], Store::new(config));
        let mut kept = Kept {
            store: store.expect("sizes that can work"),
            shape,
            random: Random(seed),
            buffers,
            disk: BTreeMap::new(),
            work: Vec::new(),
            answers: BTreeMap::new(),
            next: 0,
            moves: VecDeque::new(),
            inherited: BTreeSet::new(),
            written: BTreeMap::new(),
            read: BTreeMap::new(),
            awake: false,
            faults: 0,
            struck: 0,
            careless: false,
        };
        kept.feed(Input::Tick, Time(0));
        kept
    }

    /// What the next process at this place finds: what is on disk.
    pub(crate) fn again(self, layout: &KvLayout, seed: u64) -> Kept {
        let heads = self.disk.values().map(|record| Head::parse(&self.shape, &record[..self.shape.head_bytes()]));
        let inherited = heads.flatten().map(|head| head.block.key.name).collect();
        Kept { disk: self.disk, careless: self.careless, inherited, ..Kept::new(layout, seed) }
    }

    /// The layer groups of each leading block that is held.
    pub(crate) fn held(&self, names: &[BlockName]) -> Vec<u32> {
        self.store.held_groups(names).into_iter().map(|(_, groups)| groups).collect()
    }

    pub(crate) fn seen(&mut self, names: Vec<BlockName>, now: Time) {
        self.feed(Input::Seen(names), now);
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        self.store.check().map_err(|error| error.to_string())
    }

    /// Takes on a move. `loads`: into the pool.
    pub(crate) fn begin(&mut self, what: Box<Move>, loads: bool) {
        let copies = what.copies(self.shape.block_size()).into_iter().filter(|copy| copy.groups != 0);
        let rest: VecDeque<Copied> = copies.collect();
        let blocks = rest.iter().flat_map(|copy| copy.blocks.iter().copied().enumerate());
        let blocks = blocks.filter(|(_, block)| !baton_roles::tiers::is_hole(*block)).collect();
        if loads { &mut self.written } else { &mut self.read }.insert(what.seq, blocks);
        self.moves.push_back(Copying { what, rest, asked: None, failed: false });
    }

    pub(crate) fn give_up(&mut self, seq: SeqId) {
        self.moves.iter_mut().filter(|moving| moving.what.seq == seq).for_each(|moving| moving.failed = true);
    }

    /// Whether some of what a load has brought was written by the process before this one.
    pub(crate) fn has_inherited(&self, what: &Move) -> bool {
        let copies = what.copies(self.shape.block_size()).into_iter().filter(|copy| copy.groups != 0);
        { copies }.any(|copy| self.inherited.contains(&copy.name))
    }

    /// Whether its threads touch a sequence's blocks.
    pub(crate) fn moves(&self, seq: SeqId) -> bool {
        self.written.contains_key(&seq) || self.read.contains_key(&seq)
    }

    /// Whether its threads have nothing to do.
    pub(crate) fn idle(&self) -> bool {
        self.moves.is_empty() && self.work.is_empty()
    }

    fn feed(&mut self, input: Input, now: Time) {
        self.store.feed(input, now);
        while let Some(effect) = self.store.next_effect() {
            let (ticket, answer) = match effect {
                Effect::Fill(ticket, buffer) => (ticket, Answer::Fill(buffer)),
                Effect::Ready(ticket, buffer, block, _) => (ticket, Answer::Ready(buffer, block)),
                Effect::Declined(ticket, Decline::Busy) => (ticket, Answer::Busy),
                Effect::Declined(ticket, _) | Effect::Missed(ticket, _) => (ticket, Answer::No),
                Effect::Scan(_) | Effect::Read { .. } | Effect::Write { .. } => {
                    self.work.push(effect);
                    continue;
                }
                _ => continue,
            };
            self.answers.insert(ticket, answer);
        }
    }

    fn strikes(&mut self) -> bool {
        let strikes = self.faults > 0 && self.random.chance(self.faults);
        self.struck += u64::from(strikes);
        strikes
    }

    /// The threads go on: the disk does one thing, and the oldest move goes on by a block.
    pub(crate) fn go_on(&mut self, pool: &Bytes, geometry: &PoolGeometry, now: Time) -> Option<Done> {
        self.feed(Input::Tick, now);
        if !self.work.is_empty() && self.random.chance(700) {
            // In any order.
            let at = self.random.below(self.work.len() as u64) as usize;
            let work = self.work.swap_remove(at);
            let strikes = self.strikes();
            self.carry_out(work, strikes, now);
        }
        let mut moving = self.moves.pop_front()?;
        let seq = moving.what.seq;
        let loads = self.written.contains_key(&seq);
        let goes_on = if loads {
            self.load_some(&mut moving, pool, geometry, now)
        } else {
            self.save_some(&mut moving, pool, geometry, now)
        };
        if goes_on {
            self.moves.push_front(moving);
            return None;
        }
        self.read.remove(&seq);
        self.written.remove(&seq);
        Some(if loads { Done::Loaded(moving.what, !moving.failed) } else { Done::Saved(seq) })
    }

    fn carry_out(&mut self, work: Effect, strikes: bool, now: Time) {
        let answer = match work {
            Effect::Scan(segment) => {
                let blank = vec![0; self.shape.head_bytes()];
                let record =
                    |index| self.disk.get(&(segment, index)).map_or(&blank[..], |record| &record[..blank.len()]);
                let heads = (0..DISK.records).map(|index| Head::parse(&self.shape, record(index))).collect();
                Input::Scanned(segment, (!strikes).then_some(heads))
            }
            Effect::Read { job, place, into, expect } => {
                let buffer = &mut self.buffers[into.0 as usize];
                if let Some(record) = self.disk.get(&(place.segment, place.index)) {
                    buffer.copy_from_slice(record);
                }
                let wrong = strikes && self.random.chance(500);
                if wrong {
                    self.random.flip(&mut buffer[..self.shape.head_bytes() + self.shape.data_bytes()]);
                }
                let read = check_record(&self.shape, buffer, &expect).map_err(ReadError::Mismatch);
                Input::Read(job, if strikes && !wrong { Err(ReadError::Io) } else { read })
            }
            Effect::Write { job, place, from, head } => {
                let buffer = &mut self.buffers[from.0 as usize];
                buffer[..head.len()].copy_from_slice(&head);
                // What is said to have failed may be there all the same.
                if !strikes || self.random.chance(500) {
                    self.disk.insert((place.segment, place.index), buffer.clone());
                }
                Input::Written(job, !strikes)
            }
            _ => return,
        };
        self.feed(answer, now);
    }

    fn ticket(&mut self) -> Ticket {
        self.next += 1;
        self.next
    }

    /// Loads a block, or looks whether the disk has read one. False: the load is over.
    fn load_some(&mut self, moving: &mut Copying, pool: &Bytes, geometry: &PoolGeometry, now: Time) -> bool {
        if moving.asked.is_none() {
            let Some(copy) = moving.rest.pop_front().filter(|_| !moving.failed) else { return false };
            let ticket = self.ticket();
            self.feed(Input::Get(ticket, key(&copy)), now);
            moving.asked = Some((ticket, copy));
        }
        let Some((ticket, copy)) = moving.asked.take() else { return false };
        match self.answers.remove(&ticket) {
            Some(Answer::Ready(buffer, block)) => {
                if self.strikes() {
                    let data = &mut self.buffers[buffer.0 as usize][self.shape.head_bytes()..];
                    self.random.flip(&mut data[..self.shape.data_bytes()]);
                }
                let right = self.copy_in(&copy, &block, buffer, pool, geometry);
                self.feed(Input::Done(ticket, right), now);
                moving.failed |= !right;
            }
            Some(_) => moving.failed = true,
            None if moving.failed => self.feed(Input::Cancel(ticket), now),
            None => {
                moving.asked = Some((ticket, copy));
                return true;
            }
        }
        !moving.failed && !moving.rest.is_empty()
    }

    /// Copies a block into the pool. False: it is not as it was stored (I2).
    fn copy_in(
        &self,
        copy: &Copied,
        block: &baton_kv_store::Block,
        buffer: Buffer,
        pool: &Bytes,
        geometry: &PoolGeometry,
    ) -> bool {
        let data = &self.buffers[buffer.0 as usize][self.shape.head_bytes()..];
        let parts = self.shape.parts(block.key.groups).zip(block.digests.iter());
        let wanted = parts.filter(|(part, _)| copy.groups >> part.group & 1 == 1);
        { wanted }.all(|(part, digest)| {
            let (bytes, mut pool) = (&data[part.range.clone()], pool.clone());
            pool.store(geometry.block_range(part.group, part.layer, copy.blocks[part.group]).start, bytes);
            self.careless || digest_block(bytes, part.first_lane) == *digest
        })
    }

    /// Saves a block. False: the save is over.
    fn save_some(&mut self, moving: &mut Copying, pool: &Bytes, geometry: &PoolGeometry, now: Time) -> bool {
        let Some(copy) = moving.rest.pop_front() else { return false };
        let ticket = self.ticket();
        self.feed(Input::Put(ticket, key(&copy)), now);
        let buffer = match self.answers.remove(&ticket) {
            Some(Answer::Fill(buffer)) => buffer,
            Some(Answer::Busy) => return false,
            _ => return true,
        };
        let begin = self.shape.head_bytes();
        for part in self.shape.parts(copy.groups) {
            let to = &mut self.buffers[buffer.0 as usize][begin + part.range.start..begin + part.range.end];
            pool.load(geometry.block_range(part.group, part.layer, copy.blocks[part.group]).start, to);
        }
        let digests = self.shape.digests(copy.groups, &self.buffers[buffer.0 as usize][begin..]);
        self.inherited.remove(&copy.name);
        self.feed(Input::Filled(ticket, Some(digests)), now);
        true
    }
}

fn key(copy: &Copied) -> BlockKey {
    let Copied { name, parent, ref tokens, groups, .. } = *copy;
    BlockKey { name, parent, tokens: tokens.as_slice().into(), groups }
}
