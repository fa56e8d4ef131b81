//! Blocks that go down from host memory to disk.

use baton_kv_cache::BlockName;

use super::Store;
use crate::{Buffer, Policy, Reason, Tier};

/// Most blocks that wait to be written ahead (I5).
pub(super) const MOST_AHEAD: usize = 1 << 16;

impl Store {
    /// Sees to it that a few buffers are free, so that a put never waits for the disk. Evicts what is on disk or not worth a write, and begins to
    /// write the rest.
    pub(super) fn demote_on(&mut self) {
        let limits = self.config.limits;
        let spare = (2 * limits.writes).min(self.config.buffers / 4);
        while self.may_write() {
            let writes = self.disk.as_ref().map_or(0, |disk| disk.writes);
            // Each write in flight frees a buffer when it ends.
            if self.buffers.free() + writes >= spare {
                return;
            }
            let Some(name) = self.victim(Tier::Host) else { return };
            if !self.worth_writing(name) {
                let lost = self.index.get(name).is_some_and(|node| node.disk.is_none());
                self.counters.not_admitted += u64::from(lost);
                self.evict(name, Tier::Host);
            } else if !self.demote(name) {
                return;
            }
        }
    }

    /// Notes a block in host memory that is worth a write: it is written while the disk has nothing else to write, so that it is there after a crash,
    /// too, and its slot is free the moment that it is needed.
    pub(super) fn look_at(&mut self, name: BlockName) {
        let worth = self.worth_writing(name);
        if let Some(disk) = self.disk.as_mut().filter(|disk| worth && disk.flush.len() < MOST_AHEAD) {
            disk.flush.push(name);
        }
    }

    /// Admission: whether a block in host memory should be on disk, and is not.
    pub(super) fn worth_writing(&self, name: BlockName) -> bool {
        let Some((disk, node)) = self.disk.as_ref().zip(self.index.get(name)) else { return false };
        let uses = self.sketch.count(name);
        // Once is what a block that is here was seen, whether or not anybody said so.
        if node.disk.is_some() || uses.max(1) < self.config.min_uses {
            return false;
        }
        // TinyLFU: it has to be worth more than the block it would replace.
        let full = disk.segments.used() >= disk.segments.capacity();
        let compares = full && self.config.policy == Policy::TinyLfu;
        let replaced = if compares { self.victim(Tier::Disk) } else { None };
        replaced.is_none_or(|replaced| uses > self.sketch.count(replaced))
    }

    /// Begins to write a block. False: there is no room on disk now.
    fn demote(&mut self, name: BlockName) -> bool {
        let Some(copy) = self.index.get(name).and_then(|node| node.host.as_ref()) else { return false };
        let (buffer, block) = (copy.buffer, copy.block.clone());
        while self.disk.as_ref().is_some_and(|disk| disk.segments.used() >= disk.segments.capacity()) {
            let Some(victim) = self.victim(Tier::Disk) else { return false };
            self.evict(victim, Tier::Disk);
        }
        let place = self.disk.as_mut().and_then(|disk| disk.segments.append(Reason::Demoted));
        let Some(place) = place else { return false };
        self.begin_writing(name, buffer);
        self.write(block, place, buffer, None);
        true
    }

    /// Notes all that is in host memory and not on disk.
    pub(super) fn flush(&mut self) {
        let Some(disk) = &mut self.disk else { return };
        let alone = self.index.all().filter(|(_, node)| node.disk.is_none());
        let mut alone: Vec<_> = alone.map(|(name, node)| (node.usage.last, name)).collect();
        alone.sort_unstable();
        disk.flush = alone.into_iter().map(|(_, name)| name).collect();
    }

    /// Writes what was noted, as far as writes allow. It stays in host memory.
    pub(super) fn flush_on(&mut self) {
        while self.may_write() {
            let Some(name) = self.disk.as_mut().and_then(|disk| disk.flush.pop()) else { return };
            let here = self.index.get(name).and_then(|node| node.host.as_ref()).is_some_and(|copy| !copy.writing);
            if here && self.worth_writing(name) && !self.demote(name) {
                // There will be room when a segment is reclaimed.
                self.disk.iter_mut().for_each(|disk| disk.flush.push(name));
                return;
            }
        }
    }

    /// Marks a block's buffer, which only one may write to disk at a time.
    pub(super) fn begin_writing(&mut self, name: BlockName, buffer: Buffer) {
        self.buffers.hold(buffer);
        self.index.update(name, |node| {
            if let Some(copy) = &mut node.host {
                copy.writing = true;
            }
        });
    }

    /// A write from a block's buffer has ended.
    pub(super) fn ends_writing(&mut self, name: BlockName, buffer: Buffer) {
        let busy = self.buffers.release(buffer) > 1;
        self.index.update(name, |node| {
            if let Some(copy) = node.host.as_mut().filter(|copy| copy.buffer == buffer) {
                (copy.writing, copy.busy) = (false, busy);
            }
        });
    }
}
