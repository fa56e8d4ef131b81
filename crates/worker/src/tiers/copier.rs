//! Copies blocks between a pool, in host memory or in a device's, and the worker's store.
//!
//! A load verifies each layer of each block while it is copied, and of what went to a device what came to be there (I2). Whatever comes of it,
//! nothing writes to the blocks any more once it is over (I3).

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use baton_kv_store::{BlockKey, BlockName, Decline, Part, Tier};
use baton_roles::tiers::{Copied, Move, is_hole};
use baton_store::{Got, KvStore, Pending, Reading};
use baton_transfer::{DEVICE_JOBS, DeviceError};
use baton_types::{BlockId, PoolGeometry};

use super::memory::{Memory, Written, fill, read, verify};
use super::pace::Paces;

/// How long a block is waited for before a load looks whether it was given up.
const LOOKS: Duration = Duration::from_millis(100);

/// Copies blocks between the pool's memory and the store. For one thread.
pub(super) struct Copier {
    pub store: Arc<KvStore>,
    pub memory: Memory,
    pub geometry: PoolGeometry,
    /// Blocks of one load that are asked for at a time: each needs a slot of host memory.
    pub ahead: usize,
    /// Blocks that were not in a device's memory as they were stored.
    pub garbled: Arc<AtomicU64>,
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
    pub fn load(&mut self, what: &Move, given_up: &AtomicBool, paces: &Paces) -> Option<Tier> {
        let (mut written, keys, begun) = (Vec::new(), self.keys(what), Instant::now());
        let loads = AssertUnwindSafe(|| self.load_all(keys, given_up, paces, &mut written));
        // Also after a panic nothing may be on its way to the blocks.
        let lowest = catch_unwind(loads).unwrap_or(None);
        let Memory::Device(device) = &mut self.memory else { return lowest };
        let there = device.queue().and_then(|queue| {
            queue.settle()?;
            if lowest.is_some() { verify(queue, &mut written) } else { Ok(None) }
        });
        match there {
            Ok(None) => {
                // Writing and digesting go on after the last block was read. Where it came from several tiers, it was as slow as the lowest.
                let bytes = written.iter().map(|written| written.bytes).sum();
                lowest.inspect(|lowest| paces.follow(*lowest, begun.elapsed(), bytes))
            }
            Ok(Some(name)) => {
                tracing::warn!(
                    name = format!("{:032x}", name.0),
                    "a block is not in the device's memory as it was stored; it is computed instead"
                );
                self.garbled.fetch_add(1, Ordering::Relaxed);
                None
            }
            Err(error) => {
                self.memory.give_up();
                cannot(&error);
                None
            }
        }
    }

    fn load_all(
        &mut self,
        keys: Vec<(BlockKey, Vec<BlockId>)>,
        given_up: &AtomicBool,
        paces: &Paces,
        written: &mut Vec<Written>,
    ) -> Option<Tier> {
        let mut lowest = Tier::Host;
        let mut keys = keys.into_iter().filter(|(key, _)| key.groups != 0);
        let mut asked: VecDeque<(BlockName, Got, Vec<BlockId>)> = VecDeque::new();
        let bytes = self.store.shape().data_bytes();
        loop {
            while asked.len() < self.ahead
                && let Some((key, blocks)) = keys.next()
            {
                asked.push_back((key.name, self.store.get(key), blocks));
            }
            let Some((name, got, blocks)) = asked.pop_front() else { return Some(lowest) };
            let begun = Instant::now();
            let reading = match got {
                Got::Ready(reading) => Some(reading),
                Got::Missed(_) => None,
                Got::Pending(pending) => wait_for(pending, given_up),
            };
            let Some(reading) = reading.filter(|_| !given_up.load(Ordering::Relaxed)) else {
                // Of what did not come in time is known that it is as slow as this.
                let late = self.store.held(&[name]).into_iter().filter(|_| given_up.load(Ordering::Relaxed));
                late.for_each(|tier| paces.waited(tier, begun.elapsed(), bytes));
                return None;
            };
            let tier = reading.tier();
            lowest = lowest.max(tier);
            if !self.copy_in(reading, &blocks, written) {
                return None;
            }
            if matches!(self.memory, Memory::Host(_)) {
                paces.follow(tier, begun.elapsed(), bytes);
            }
        }
    }

    /// Copies a block into the pool, or on its way there. False: it is damaged, or the device does not take it.
    fn copy_in(&mut self, mut reading: Reading, blocks: &[BlockId], written: &mut Vec<Written>) -> bool {
        let geometry = &self.geometry;
        let target = |part: &Part| {
            // Of a block that a window has passed by now, the store may have more than is wanted.
            let block = Some(blocks[part.group]).filter(|block| !is_hole(*block))?;
            Some(geometry.block_range(part.group, part.layer, block))
        };
        let copied = match &mut self.memory {
            Memory::Host(segment) => reading.copy_to(|part| {
                let range = target(part)?;
                assert!(range.end <= segment.len(), "a block outside the pool");
                // SAFETY: the range lies in the segment, the block is lent to this load alone until it says that it is over (I3), and parts do
                // not overlap.
                Some(unsafe { std::slice::from_raw_parts_mut(segment.as_ptr().add(range.start), range.len()) })
            }),
            Memory::Device(device) => {
                let queue = match device.queue() {
                    Ok(queue) => queue,
                    Err(error) => return cannot(&error),
                };
                let name = reading.block().key.name;
                let parts: Vec<Part> = self.store.shape().parts(reading.block().key.groups).collect();
                let wanted = parts.iter().zip(reading.block().digests.iter());
                let wanted = wanted.filter_map(|(part, digest)| Some((part, *digest, target(part)?)));
                let (mut ranges, mut bytes) = (Vec::new(), 0);
                for (part, digest, range) in wanted {
                    bytes += range.len();
                    ranges.push((range.start, range.len()));
                    let (bytes, offset, lane) = (range.len(), range.start, part.first_lane);
                    written.push(Written { name, bytes, offset, lane, digest });
                }
                let mut staged = match queue.stage(bytes) {
                    Ok(staged) => &mut staged[..bytes],
                    Err(error) => return cannot(&error),
                };
                let copied = reading.copy_to(|part| {
                    let bytes = target(part)?.len();
                    let (own, rest) = std::mem::take(&mut staged).split_at_mut(bytes);
                    staged = rest;
                    Some(own)
                });
                if copied.is_ok()
                    && let Err(error) = queue.write(&ranges)
                {
                    return cannot(&error);
                }
                copied
            }
        };
        copied.map_err(|error| tracing::warn!(%error, "a stored block is damaged; it is computed instead")).is_ok()
    }

    /// Copies blocks out of the pool, as far as the store takes them.
    pub fn save(&mut self, what: &Move) {
        let keys: Vec<_> = self.keys(what).into_iter().filter(|(key, _)| key.groups != 0).collect();
        match catch_unwind(AssertUnwindSafe(|| self.save_all(keys))) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => tracing::warn!(%error, "blocks could not be copied from the device; they are not stored"),
            // Its hook has said so.
            Err(_) => {}
        }
        self.memory.give_up();
    }

    fn save_all(&mut self, keys: Vec<(BlockKey, Vec<BlockId>)>) -> Result<(), DeviceError> {
        let geometry = &self.geometry;
        let at = |part: &Part, blocks: &[BlockId]| geometry.block_range(part.group, part.layer, blocks[part.group]);
        let device = match &mut self.memory {
            Memory::Host(segment) => {
                for (filling, _, blocks) in taken(keys, |key| self.store.put(key)) {
                    filling.copy_from(|part| {
                        let range = at(part, &blocks);
                        assert!(range.end <= segment.len(), "a block outside the pool");
                        // SAFETY: the range lies in the segment, and the block is in the prefix cache and held by this save, so that nobody
                        // writes to it.
                        unsafe { std::slice::from_raw_parts(segment.as_ptr().add(range.start), range.len()) }
                    });
                }
                return Ok(());
            }
            Memory::Device(device) => device,
        };
        let (after, mut reads) = (device.memory.mark(), VecDeque::new());
        let queue = device.queue()?;
        for (filling, groups, blocks) in taken(keys, |key| self.store.put(key)) {
            if reads.len() >= DEVICE_JOBS
                && let Some(filling) = reads.pop_front()
            {
                fill(filling, &read(queue)?);
            }
            let ranges = self.store.shape().parts(groups).map(|part| at(&part, &blocks));
            let ranges: Vec<_> = ranges.map(|range| (range.start, range.len())).collect();
            queue.read(after, &ranges)?;
            reads.push_back(filling);
        }
        for filling in reads {
            fill(filling, &read(queue)?);
        }
        Ok(())
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
fn wait_for(mut pending: Pending, given_up: &AtomicBool) -> Option<Reading> {
    loop {
        match pending.wait(LOOKS) {
            Some(read) => return read.ok(),
            None if given_up.load(Ordering::Relaxed) => return None,
            None => {}
        }
    }
}
