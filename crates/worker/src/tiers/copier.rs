//! Copies blocks between a pool, in host memory or in a device's, and the worker's store.
//!
//! A load verifies each layer of each block while it is copied, and of what went to a device what came to be there (I2). Whatever comes of it,
//! nothing writes to the blocks any more once it is over (I3).

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_engine::Digest;
use baton_kv_store::{BlockKey, BlockName, Decline, Miss, Part, Tier};
use baton_roles::tiers::{Copied, Move, is_hole};
use baton_runtime::metrics as names;
use baton_store::{Filling, Got, KvStore, Pending, Reading};
use baton_transfer::{DEVICE_JOBS, DeviceError};
use baton_types::{BlockId, PoolGeometry};
use metrics::counter;

use super::courtesy::Courtesy;
use super::layered::{Layered, Turn};
use super::loading::Loading;
use super::memory::{Memory, Written, fill, read, verify};
use super::pace::Paces;

/// How long a block is waited for before a load looks whether it was given up.
const LOOKS: Duration = Duration::from_millis(100);
/// A pause while the store has too much to read.
const BUSY: Duration = Duration::from_millis(2);
/// Bytes of a layer that a device is given at a time.
const STAGED: usize = 1 << 20;

/// A block in host memory, and its blocks in the pool, by group.
type Here = (Reading, Vec<BlockId>);

/// Copies blocks between the pool's memory and the store. For one thread.
pub(super) struct Copier {
    pub store: Arc<KvStore>,
    pub memory: Memory,
    pub geometry: PoolGeometry,
    /// Blocks of one load that are asked for at a time: each needs a slot of host memory.
    pub ahead: usize,
    /// Most blocks of a load that are copied layer by layer: all of them need a slot of host memory at a time.
    pub together: usize,
    /// Who copies layer by layer.
    pub layered: Arc<Layered>,
    /// Blocks that were not in a device's memory as they were stored.
    pub garbled: Arc<AtomicU64>,
    /// When it gives way.
    pub courtesy: Courtesy,
    /// What the blocks of the load under way are verified with.
    pub digests: Vec<Digest>,
}

impl Copier {
    /// The keys of a move's blocks, each with its blocks in the pool, by group.
    pub fn keys(&self, what: &Move) -> Vec<(BlockKey, Vec<BlockId>)> {
        let key = |Copied { name, parent, tokens, groups, blocks }| {
            (BlockKey { name, parent, tokens: tokens.into(), groups }, blocks)
        };
        what.copies(self.store.shape().block_size()).into_iter().map(key).collect()
    }

    /// Copies blocks into the pool, and returns the lowest tier that any came from. `None`: not all of them are there, and none may be used.
    /// Calls `streams` once all of them are in host memory, if they are copied layer by layer from then on.
    pub fn load(&mut self, what: &Move, loading: &Loading, streams: &dyn Fn(), paces: &Paces) -> Option<Tier> {
        if loading.is_given_up() {
            return None;
        }
        let (mut written, begun) = (Vec::new(), Instant::now());
        self.digests.clear();
        self.courtesy.load(loading.seconds);
        let keys: Vec<_> = self.keys(what).into_iter().filter(|(key, _)| key.groups != 0).collect();
        let bytes = keys.len() * self.store.shape().data_bytes();
        let few = !keys.is_empty() && keys.len() <= self.together;
        let turn = few.then(|| self.layered.begin()).flatten();
        let loads = AssertUnwindSafe(|| match turn {
            Some(turn) => {
                let (all, lowest) = self.together(keys, loading, paces)?;
                streams();
                self.load_layers(all, loading, paces, turn).then_some(lowest)
            }
            None => self.load_blocks(keys, loading, paces, &mut written),
        });
        // Also after a panic nothing may be on its way to the blocks.
        let lowest = catch_unwind(loads).unwrap_or(None);
        let there = self.settle(lowest.is_some(), &mut written);
        lowest.filter(|_| there).inspect(|lowest| {
            if matches!(self.memory, Memory::Device(_)) {
                // Writing and digesting go on after the last block was read. Where it came from several tiers, it was as slow as the lowest.
                paces.follow(*lowest, begun.elapsed(), bytes);
            }
        })
    }

    /// All blocks of a load in host memory, and the lowest tier that any came from. `None`: not all of them are there.
    fn together(
        &mut self,
        keys: Vec<(BlockKey, Vec<BlockId>)>,
        loading: &Loading,
        paces: &Paces,
    ) -> Option<(Vec<Here>, Tier)> {
        let (mut all, on_host) = (Vec::with_capacity(keys.len()), matches!(self.memory, Memory::Host(_)));
        let bytes = self.store.shape().data_bytes();
        let lowest = self.gather(keys.into_iter(), loading, paces, |_, reading, blocks, begun| {
            let tier = reading.tier();
            if on_host && tier != Tier::Host {
                paces.follow(tier, begun.elapsed(), bytes);
            }
            all.push((reading, blocks));
            true
        })?;
        Some((all, lowest))
    }

    /// Has blocks in host memory, in their order, and gives each to `each`, with the time since when it was waited for. Returns the lowest tier that
    /// any came from. `None`: not all of them are there, or `each` says no.
    fn gather(
        &mut self,
        keys: impl Iterator<Item = (BlockKey, Vec<BlockId>)>,
        loading: &Loading,
        paces: &Paces,
        mut each: impl FnMut(&mut Self, Reading, Vec<BlockId>, Instant) -> bool,
    ) -> Option<Tier> {
        let (mut lowest, mut keys) = (Tier::Host, keys.peekable());
        let mut asked: VecDeque<(BlockName, Got, Vec<BlockId>)> = VecDeque::new();
        loop {
            while asked.len() < self.ahead
                && let Some((key, _)) = keys.peek()
            {
                let got = self.store.get(key.clone());
                if matches!(got, Got::Missed(Miss::Busy)) {
                    // Others read, too.
                    break;
                }
                asked.extend(keys.next().map(|(key, blocks)| (key.name, got, blocks)));
            }
            let Some((name, got, blocks)) = asked.pop_front() else {
                if keys.peek().is_none() {
                    return Some(lowest);
                }
                if loading.is_given_up() {
                    return None;
                }
                std::thread::sleep(BUSY);
                continue;
            };
            let begun = Instant::now();
            let reading = match got {
                Got::Ready(reading) => Some(reading),
                Got::Missed(_) => None,
                Got::Pending(pending) => wait_for(pending, loading),
            };
            let Some(reading) = reading.filter(|_| !loading.is_given_up()) else {
                // Of what did not come in time is known that it is as slow as this.
                let (late, bytes) = (self.store.held(&[name]), self.store.shape().data_bytes());
                let late = late.into_iter().filter(|_| loading.is_given_up());
                late.for_each(|tier| paces.waited(tier, begun.elapsed(), bytes));
                return None;
            };
            lowest = lowest.max(reading.tier());
            let (of, groups) = (&reading.block().digests, reading.block().key.groups);
            let sums = self.store.shape().group_digests(groups, of).into_iter();
            self.digests.extend(sums.map(|(group, of)| Digest { group, block: blocks[group], of }));
            if !each(self, reading, blocks, begun) {
                return None;
            }
        }
    }

    /// Copies each block as soon as it is in host memory.
    fn load_blocks(
        &mut self,
        keys: Vec<(BlockKey, Vec<BlockId>)>,
        loading: &Loading,
        paces: &Paces,
        written: &mut Vec<Written>,
    ) -> Option<Tier> {
        let bytes = self.store.shape().data_bytes();
        self.gather(keys.into_iter(), loading, paces, |copier, reading, blocks, begun| {
            let tier = reading.tier();
            let copied = copier.copy_in(&mut [(reading, blocks)], None, written);
            copier.courtesy.copied(bytes);
            if copied && matches!(copier.memory, Memory::Host(_)) {
                paces.follow(tier, begun.elapsed(), bytes);
            }
            copied
        })
    }

    /// Copies one layer of all blocks after the other, each verified before the next. False: it cannot be used.
    fn load_layers(&mut self, mut all: Vec<Here>, loading: &Loading, paces: &Paces, mut turn: Turn) -> bool {
        let (begun, bytes) = (Instant::now(), all.len() * self.store.shape().data_bytes());
        // Until it has succeeded.
        turn.fails = true;
        let mut written = Vec::new();
        for layer in 0..self.geometry.layout.layers() as u32 {
            let Some(at) = self.geometry.layout.locate(layer) else { return false };
            for some in all.chunks_mut((STAGED / self.geometry.layout.block_bytes(at.0)).max(1)) {
                if loading.is_given_up() {
                    turn.fails = false;
                    return false;
                }
                if !self.copy_in(some, Some(at), &mut written) {
                    return false;
                }
                self.courtesy.copied(some.len() * self.geometry.layout.block_bytes(at.0));
            }
            if !self.settle(true, &mut written) {
                return false;
            }
            written.clear();
            loading.reach(layer + 1);
        }
        turn.fails = false;
        if matches!(self.memory, Memory::Host(_)) {
            paces.follow(Tier::Host, begun.elapsed(), bytes);
        }
        true
    }

    /// Waits until nothing is on its way to the blocks, and verifies what was written to a device, if it is to be used.
    fn settle(&mut self, used: bool, written: &mut [Written]) -> bool {
        let Memory::Device(device) = &mut self.memory else { return true };
        let there = device.queue().and_then(|queue| {
            queue.settle()?;
            if used { verify(queue, written) } else { Ok(None) }
        });
        match there {
            Ok(None) => true,
            Ok(Some(name)) => {
                tracing::warn!(
                    name = format!("{:032x}", name.0),
                    "a block is not in the device's memory as it was stored; it is computed instead"
                );
                self.garbled.fetch_add(1, Ordering::Relaxed);
                false
            }
            Err(error) => {
                self.memory.give_up();
                cannot(&error)
            }
        }
    }

    /// Copies blocks into the pool, or on their way there; of one layer, given by its group and its place there, or of all. False: one is damaged, or
    /// the device does not take them.
    fn copy_in(&mut self, all: &mut [Here], layer: Option<(usize, usize)>, written: &mut Vec<Written>) -> bool {
        let geometry = &self.geometry;
        let target = |part: &Part, blocks: &[BlockId]| {
            // Of a block that a window has passed by now, the store may have more than is wanted.
            let wanted = !is_hole(blocks[part.group]) && layer.is_none_or(|at| at == (part.group, part.layer));
            wanted.then(|| geometry.block_range(part.group, part.layer, blocks[part.group]))
        };
        let damaged = |error| tracing::warn!(%error, "a stored block is damaged; it is computed instead");
        let device = match &mut self.memory {
            Memory::Host(segment) => {
                return all.iter_mut().all(|(reading, blocks)| {
                    let copied = reading.copy_to(|part| {
                        let range = target(part, blocks)?;
                        assert!(range.end <= segment.len(), "a block outside the pool");
                        // SAFETY: the range lies in the segment, the block is lent to this load alone until it says that it is over (I3), or this
                        // layer of it until it says that it is loaded; and parts do not overlap.
                        Some(unsafe { std::slice::from_raw_parts_mut(segment.as_ptr().add(range.start), range.len()) })
                    });
                    copied.map_err(damaged).is_ok()
                });
            }
            Memory::Device(device) => device,
        };
        let mut ranges = Vec::new();
        for (reading, blocks) in all.iter() {
            let block = reading.block();
            let parts = self.store.shape().parts(block.key.groups);
            for (part, digest) in parts.zip(block.digests.iter()) {
                let Some(range) = target(&part, blocks) else { continue };
                ranges.push((range.start, range.len()));
                let (name, bytes, offset, lane) = (block.key.name, range.len(), range.start, part.first_lane);
                written.push(Written { name, bytes, offset, lane, digest: *digest });
            }
        }
        let bytes = ranges.iter().map(|(_, bytes)| bytes).sum();
        let queue = match device.queue() {
            Ok(queue) => queue,
            Err(error) => return cannot(&error),
        };
        let mut staged = match queue.stage(bytes) {
            Ok(staged) => &mut staged[..bytes],
            Err(error) => return cannot(&error),
        };
        for (reading, blocks) in all {
            let copied = reading.copy_to(|part| {
                let bytes = target(part, blocks)?.len();
                let (own, rest) = std::mem::take(&mut staged).split_at_mut(bytes);
                staged = rest;
                Some(own)
            });
            if copied.map_err(damaged).is_err() {
                return false;
            }
        }
        queue.write(&ranges).map_or_else(|error| cannot(&error), |()| true)
    }

    /// Copies blocks out of the pool, as far as the store takes them. Returns the first that is not what it was when it came (I2), with its layer group:
    /// neither that nor what continues it is stored.
    pub fn save(&mut self, what: &Move) -> Option<(usize, BlockId)> {
        self.courtesy.save();
        let keys: Vec<_> = self.keys(what).into_iter().filter(|(key, _)| key.groups != 0).collect();
        match catch_unwind(AssertUnwindSafe(|| self.save_all(keys, &what.known))) {
            Ok(Ok(None)) => return None,
            Ok(Ok(Some((group, block)))) => {
                tracing::warn!(%block, group, "a block is not what it was when it came here; it is not stored");
                counter!(names::TIER_VERIFY_FAILURES, "tier" => "pool").increment(1);
                return Some((group, block));
            }
            Ok(Err(error)) => tracing::warn!(%error, "blocks could not be copied from the device; they are not stored"),
            // Its hook has said so.
            Err(_) => {}
        }
        self.memory.give_up();
        None
    }

    fn save_all(
        &mut self,
        keys: Vec<(BlockKey, Vec<BlockId>)>,
        known: &[Digest],
    ) -> Result<Option<(usize, BlockId)>, DeviceError> {
        let known: BTreeMap<_, _> = known.iter().map(|known| ((known.group, known.block), known.of)).collect();
        let known = |blocks: &[BlockId]| -> BTreeMap<usize, u64> {
            let of = |(group, block): (usize, &BlockId)| Some((group, *known.get(&(group, *block))?));
            blocks.iter().enumerate().filter_map(of).collect()
        };
        let geometry = &self.geometry;
        let at = |part: &Part, blocks: &[BlockId]| geometry.block_range(part.group, part.layer, blocks[part.group]);
        let device = match &mut self.memory {
            Memory::Host(segment) => {
                for (filling, _, blocks) in taken(keys, |key| self.store.put(key)) {
                    let copied = filling.copy_known(&known(&blocks), |part| {
                        let range = at(part, &blocks);
                        assert!(range.end <= segment.len(), "a block outside the pool");
                        // SAFETY: the range lies in the segment, and the block is in the prefix cache and held by this save, so that nobody
                        // writes to it.
                        unsafe { std::slice::from_raw_parts(segment.as_ptr().add(range.start), range.len()) }
                    });
                    if let Err(group) = copied {
                        return Ok(Some((group, blocks[group])));
                    }
                    self.courtesy.copied(self.store.shape().data_bytes());
                }
                return Ok(None);
            }
            Memory::Device(device) => device,
        };
        let (after, mut changed) = (device.memory.mark(), None);
        let mut reads = VecDeque::<(Filling, Vec<BlockId>)>::new();
        let queue = device.queue()?;
        for (filling, groups, blocks) in taken(keys, |key| self.store.put(key)) {
            if reads.len() >= DEVICE_JOBS
                && let Some((filling, blocks)) = reads.pop_front()
                && let Err(group) = fill(filling, &known(&blocks), &read(queue)?)
            {
                changed = changed.or(Some((group, blocks[group])));
            }
            if changed.is_some() {
                break;
            }
            let ranges = self.store.shape().parts(groups).map(|part| at(&part, &blocks));
            let ranges: Vec<_> = ranges.map(|range| (range.start, range.len())).collect();
            queue.read(after, &ranges)?;
            reads.push_back((filling, blocks));
        }
        // What continues a block that has changed is not stored. It is read all the same: it is on its way.
        for (filling, blocks) in reads {
            let staged = read(queue)?;
            if changed.is_none()
                && let Err(group) = fill(filling, &known(&blocks), &staged)
            {
                changed = Some((group, blocks[group]));
            }
        }
        Ok(changed)
    }
}

/// Of these blocks those that the store takes when it is offered them, each with its layer groups. None after one that it has no room for: nobody
/// would find what comes after a gap.
pub(super) fn taken<T>(
    keys: Vec<(BlockKey, Vec<BlockId>)>,
    offer: impl Fn(BlockKey) -> Result<T, Decline>,
) -> impl Iterator<Item = (T, u32, Vec<BlockId>)> {
    let offered = keys.into_iter().map(move |(key, blocks)| (key.groups, offer(key), blocks));
    let offered = offered.take_while(|(_, taken, _)| !matches!(taken, Err(Decline::Busy)));
    offered.filter_map(|(groups, taken, blocks)| Some((taken.ok()?, groups, blocks)))
}

fn cannot(error: &DeviceError) -> bool {
    tracing::warn!(%error, "a stored block could not be copied to the device; it is computed instead");
    false
}

/// Waits for the disk, or for the object store. `None`: the block cannot be had, or the load was given up.
fn wait_for(mut pending: Pending, loading: &Loading) -> Option<Reading> {
    loop {
        match pending.wait(LOOKS) {
            Some(read) => return read.ok(),
            None if loading.is_given_up() => return None,
            None => {}
        }
    }
}
