//! The store: tiers, what is in flight between them, and who waits for it.

mod demote;
mod disk;
mod get;
mod objects;
mod put;
mod reclaim;
mod recover;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};

use baton_kv_cache::BlockName;
use baton_types::Time;

use crate::buffers::Buffers;
use crate::config::MOVING;
use crate::index::Index;
use crate::segments::Segments;
use crate::{
    Block, BlockKey, Buffer, Counters, Effect, Input, Job, ObjectName, Place, Policy, Reason, Sketch, StoreConfig,
    StoreError, Ticket, Tier,
};

use disk::Pause;
use objects::Objects;
use reclaim::Reclaim;
use recover::Recovery;

/// Of so many blocks that were least recently used, [`Policy::Sketch`] evicts the one that was asked for least often.
const OLDEST: usize = 16;

/// Who waits for what.
#[derive(Debug)]
enum Waiting {
    /// A buffer is being filled.
    Fill { buffer: Buffer, key: BlockKey },
    /// A read is in flight.
    Read { job: Job, wanted: BlockKey },
    /// A buffer is being read.
    Lease { buffer: Buffer, name: BlockName },
}

/// Where a block comes up from.
#[derive(Clone, Copy, Debug)]
enum Source {
    Disk(Place),
    Object(ObjectName),
}

/// What the disk and the object store are doing.
#[derive(Debug)]
enum Flight {
    /// A block comes up.
    Get { name: BlockName, from: Source, buffer: Buffer, tickets: Vec<Ticket> },
    /// A block that moves is read.
    Move { name: BlockName, place: Place, buffer: Buffer },
    /// A block is written; it moves from `old`, if it was on disk before.
    Write { block: Block, place: Place, buffer: Buffer, old: Option<Place> },
    /// An object is put.
    Upload { object: ObjectName, buffer: Buffer },
    /// An object is deleted.
    Remove { object: ObjectName },
}

/// The disk tier.
#[derive(Debug)]
struct Disk {
    segments: Segments,
    recovery: Recovery,
    reclaim: Option<Reclaim>,
    pause: Pause,
    /// Blocks that a flush has still to write, the least recently used first.
    flush: Vec<BlockName>,
    /// Buffers kept for blocks that move.
    moving: Vec<Buffer>,
    writes: u32,
}

/// The state of a store. See the crate's documentation.
#[derive(Debug)]
pub struct Store {
    config: StoreConfig,
    index: Index,
    buffers: Buffers,
    sketch: Sketch,
    disk: Option<Disk>,
    objects: Option<Objects>,
    waiting: BTreeMap<Ticket, Waiting>,
    /// Blocks being filled, and blocks being read from disk or fetched.
    filling: BTreeMap<BlockName, Ticket>,
    reading: BTreeMap<BlockName, Job>,
    flights: BTreeMap<Job, Flight>,
    next_job: Job,
    effects: VecDeque<Effect>,
    counters: Counters,
    now: Time,
}

impl Store {
    /// A store with nothing in host memory. Its first effects scan the disk; until all is scanned, nothing is written.
    pub fn new(config: StoreConfig) -> Result<Store, StoreError> {
        config.check()?;
        let mut buffers = Buffers::new(config.buffers);
        let disk = config.disk.map(|size| Disk {
            segments: Segments::new(size.segments, size.records),
            recovery: Recovery::new(size.segments),
            reclaim: None,
            pause: Pause::default(),
            flush: Vec::new(),
            moving: (0..MOVING).filter_map(|_| buffers.take()).collect(),
            writes: 0,
        });
        let records = config.disk.map_or(0, |disk| u64::from(disk.segments) * u64::from(disk.records));
        let objects = config.object.map_or(0, |object| object.most);
        let blocks = records + objects + u64::from(config.buffers);
        let mut store = Store {
            index: Index::new(config.policy),
            buffers,
            sketch: Sketch::new(config.sample.unwrap_or(10 * blocks)),
            disk,
            objects: config.object.map(Objects::new),
            waiting: BTreeMap::new(),
            filling: BTreeMap::new(),
            reading: BTreeMap::new(),
            flights: BTreeMap::new(),
            next_job: 0,
            effects: VecDeque::new(),
            counters: Counters::default(),
            now: Time::default(),
            config,
        };
        store.scan_on();
        store.objects_on();
        Ok(store)
    }

    /// Takes in what happened. Answers to what nobody waits for are ignored.
    pub fn feed(&mut self, input: Input, now: Time) {
        self.now = self.now.max(now);
        match input {
            Input::Seen(names) => names.into_iter().for_each(|name| {
                self.sketch.add(name);
                self.look_at(name);
                self.look_up(name);
            }),
            Input::Put(ticket, key) => self.put(ticket, key),
            Input::Filled(ticket, digests) => self.filled(ticket, digests),
            Input::Get(ticket, wanted) => self.get(ticket, wanted),
            Input::Done(ticket, verified) => self.done(ticket, verified),
            Input::Cancel(ticket) => self.cancel(ticket),
            Input::Pin(name) => self.pin(name, true),
            Input::Unpin(name) => self.pin(name, false),
            Input::Read(job, result) => self.read(job, result),
            Input::Written(job, ok) => self.written(job, ok),
            Input::Scanned(segment, heads) => self.scanned(segment, heads),
            Input::Listed(found) => self.listed(found),
            Input::Uploaded(job, ok) => self.uploaded(job, ok),
            Input::Deleted(job, ok) => self.removed(job, ok),
            Input::Flush => {
                self.flush();
                self.flush_objects();
            }
            Input::Tick => {}
        }
        self.reclaim_on();
        self.demote_on();
        self.flush_on();
        self.objects_on();
    }

    /// The next thing to be done.
    pub fn next_effect(&mut self) -> Option<Effect> {
        self.effects.pop_front()
    }

    /// The fastest tier that has a block; not the object store while fetches rest. Whether its tokens are those that are wanted shows when it is read.
    pub fn tier(&self, name: BlockName) -> Option<Tier> {
        let node = self.index.get(name)?;
        let has = [node.host.is_some(), node.disk.is_some(), node.object && self.reachable()];
        Tier::ALL.into_iter().find(|tier| has[*tier as usize])
    }

    /// How many leading blocks of a prompt are held, and in which tier each is.
    pub fn held(&self, prompt: &[BlockName]) -> Vec<Tier> {
        prompt.iter().map_while(|name| self.tier(*name)).collect()
    }

    /// The same, and which layer groups of each block are held.
    pub fn held_groups(&self, prompt: &[BlockName]) -> Vec<(Tier, u32)> {
        let held = |name: &BlockName| Some((self.tier(*name)?, self.index.get(*name)?.groups));
        prompt.iter().map_while(held).collect()
    }

    /// Every block in every tier: what somebody who has missed events has to know.
    pub fn snapshot(&self) -> impl Iterator<Item = (BlockName, Tier)> {
        self.index.all().flat_map(|(name, node)| {
            let has = [node.host.is_some(), node.disk.is_some(), node.object];
            Tier::ALL.into_iter().filter(move |tier| has[*tier as usize]).map(move |tier| (name, tier))
        })
    }

    /// Number of blocks in a tier.
    pub fn blocks(&self, tier: Tier) -> u64 {
        self.index.held(tier)
    }

    /// What was done so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The settings.
    pub fn config(&self) -> &StoreConfig {
        &self.config
    }

    /// Whether the whole disk was scanned.
    pub fn recovered(&self) -> bool {
        self.disk.as_ref().is_none_or(|disk| disk.segments.known())
    }

    /// Whether the disk and the object store have nothing to do.
    pub fn idle(&self) -> bool {
        let listing = self.objects.as_ref().is_some_and(Objects::asked);
        self.recovered() && self.flights.is_empty() && !listing
    }

    /// Checks all accounts (I6), in time linear in the blocks.
    pub fn check(&self) -> Result<(), StoreError> {
        self.index.check()?;
        let held = self.index.all().filter_map(|(_, node)| Some(node.host.as_ref()?.buffer));
        let waiting = self.waiting.values().filter_map(|waiting| match waiting {
            Waiting::Fill { buffer, .. } | Waiting::Lease { buffer, .. } => Some(*buffer),
            Waiting::Read { .. } => None,
        });
        self.check_objects()?;
        let flights = self.flights.values().filter_map(|flight| match flight {
            Flight::Get { buffer, .. }
            | Flight::Move { buffer, .. }
            | Flight::Write { buffer, .. }
            | Flight::Upload { buffer, .. } => Some(*buffer),
            Flight::Remove { .. } => None,
        });
        let moving = self.disk.iter().flat_map(|disk| disk.moving.iter().copied());
        self.buffers.check(held.chain(waiting).chain(flights).chain(moving))?;
        self.check_writes()?;
        let Some(disk) = &self.disk else { return Ok(()) };
        disk.segments.check(self.index.all().filter_map(|(name, node)| Some((name, node.disk?))))
    }

    fn pin(&mut self, name: BlockName, pinned: bool) {
        if !pinned || self.index.pinned < self.config.limits.pinned {
            self.index.update(name, |node| node.pinned = pinned);
        }
    }

    fn fly(&mut self, flight: Flight) -> Job {
        self.next_job += 1;
        self.flights.insert(self.next_job, flight);
        self.next_job
    }

    /// A buffer for a new block. Evicts a block if none is free.
    fn buffer(&mut self) -> Option<Buffer> {
        while self.buffers.free() == 0 {
            let name = self.victim(Tier::Host)?;
            self.counters.overrun += u64::from(self.worth_writing(name));
            self.evict(name, Tier::Host);
        }
        self.buffers.take()
    }

    /// The block that a tier evicts next.
    fn victim(&self, tier: Tier) -> Option<BlockName> {
        let mut oldest = self.index.victims(tier);
        match self.config.policy {
            Policy::Sketch => oldest.take(OLDEST).min_by_key(|name| self.sketch.count(*name)),
            Policy::Lru | Policy::Lfu | Policy::TinyLfu => oldest.next(),
        }
    }

    /// Evicts a block that [`Store::victim`] has named.
    fn evict(&mut self, name: BlockName, tier: Tier) {
        if let Some(node) = self.index.get(name) {
            let usage = node.usage;
            self.index.ranking.evicted(&usage);
        }
        self.counters.evicted[tier as usize] += 1;
        self.drop_copy(name, tier);
    }

    /// Drops a block's copy in a tier. Its buffer is free when nobody uses it any more.
    fn drop_copy(&mut self, name: BlockName, tier: Tier) {
        let (mut buffer, mut place, mut object) = (None, None, None);
        self.index.update(name, |node| match tier {
            Tier::Host => buffer = node.host.take().map(|copy| copy.buffer),
            Tier::Disk => place = node.disk.take(),
            Tier::Object => {
                let (parent, groups) = (node.parent, node.groups);
                object = std::mem::take(&mut node.object).then_some(ObjectName { name, parent, groups });
            }
        });
        if let Some(buffer) = buffer {
            self.buffers.release(buffer);
        }
        if let (Some(place), Some(disk)) = (place, &mut self.disk) {
            disk.segments.dead(place);
        }
        if let Some(object) = object {
            self.doom(object);
        }
        if buffer.is_some() || place.is_some() || object.is_some() {
            self.effects.push_back(Effect::Removed(name, tier));
        }
    }

    fn count_written(&mut self, why: Reason) {
        self.counters.written_bytes[why as usize] += self.config.shape.stride() as u64;
    }
}
