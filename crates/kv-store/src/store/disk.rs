//! Writes to disk: how they begin and end, and when they rest.

use baton_kv_cache::BlockName;
use baton_types::Time;

use super::{Flight, Store};
use crate::{Block, Buffer, Effect, Head, Job, Place, Reason, StoreError, Tier};

/// How long writes rest after one has failed; twice as long after each further failure.
const FIRST_PAUSE_MS: u64 = 1000;
const LONGEST_PAUSE_MS: u64 = 60_000;

/// When writes, or calls of the object store, go on after a failure.
#[derive(Debug)]
pub(super) struct Pause {
    until: Time,
    next_ms: u64,
}

impl Default for Pause {
    fn default() -> Self {
        Pause { until: Time::default(), next_ms: FIRST_PAUSE_MS }
    }
}

impl Pause {
    pub fn over(&self, now: Time) -> bool {
        now >= self.until
    }

    pub fn failed(&mut self, now: Time) {
        // Writes that were in flight beside the one that failed say nothing new.
        if self.over(now) {
            self.until = now.after_ms(self.next_ms);
            self.next_ms = (2 * self.next_ms).min(LONGEST_PAUSE_MS);
        }
    }

    pub fn succeeded(&mut self) {
        self.next_ms = FIRST_PAUSE_MS;
    }
}

impl Store {
    /// Whether one more block may be written now.
    pub(super) fn may_write(&self) -> bool {
        let limit = self.config.limits.writes;
        self.disk.as_ref().is_some_and(|disk| disk.segments.known() && disk.writes < limit && disk.pause.over(self.now))
    }

    /// Writes the block in a buffer to a place that was taken for it. The write is one use of the buffer.
    pub(super) fn write(&mut self, block: Block, place: Place, from: Buffer, old: Option<Place>) {
        let head = Head { identity: self.config.identity, place, block: block.clone() }.encode(&self.config.shape);
        let job = self.fly(Flight::Write { block, place, buffer: from, old });
        if let Some(disk) = &mut self.disk {
            disk.writes += 1;
        }
        self.effects.push_back(Effect::Write { job, place, from, head });
    }

    pub(super) fn written(&mut self, job: Job, ok: bool) {
        if !matches!(self.flights.get(&job), Some(Flight::Write { .. })) {
            return;
        }
        let Some(Flight::Write { block, place, buffer, old }) = self.flights.remove(&job) else { return };
        let name = block.key.name;
        let wanted = self.wants_written(name, buffer, old);
        let now = self.now;
        if let Some(disk) = &mut self.disk {
            disk.writes -= 1;
            match ok {
                true => disk.pause.succeeded(),
                false => disk.pause.failed(now),
            }
            if disk.segments.written(place, (ok && wanted).then_some(name)) {
                self.effects.push_back(Effect::Sync(place.segment));
            }
        }
        match ok {
            true => self.count_written(if old.is_some() { Reason::Moved } else { Reason::Demoted }),
            false => self.counters.disk_errors += 1,
        }
        self.settle(name, place, old, ok && wanted);
        match old {
            Some(old) => self.moved(name, old, buffer),
            None => self.ends_writing(name, buffer),
        }
        if !ok {
            // What is in host memory is written once writes go on.
            self.look_at(name);
        }
    }

    /// Whether a write from this buffer, or of the block that was at `old`, is still of the block that the index has.
    fn wants_written(&self, name: BlockName, buffer: Buffer, old: Option<Place>) -> bool {
        self.index.get(name).is_some_and(|node| match old {
            Some(old) => node.disk == Some(old),
            None => node.host.as_ref().is_some_and(|copy| copy.buffer == buffer && copy.writing),
        })
    }

    /// Checks that what is being written will be what the index says of it.
    pub(super) fn check_writes(&self) -> Result<(), StoreError> {
        for flight in self.flights.values() {
            let Flight::Write { block, buffer, old, .. } = flight else { continue };
            let (name, groups) = (block.key.name, block.key.groups);
            let other = self.index.get(name).filter(|node| node.groups != groups);
            if let Some(node) = other.filter(|_| self.wants_written(name, *buffer, *old)) {
                let held = node.groups;
                return Err(StoreError::Broken(format!(
                    "{name:?} is written with {groups:#b}, by the index {held:#b}"
                )));
            }
        }
        Ok(())
    }

    /// Points the index to where the block is now.
    fn settle(&mut self, name: BlockName, place: Place, old: Option<Place>, there: bool) {
        if !there {
            return;
        }
        self.index.update(name, |node| node.disk = Some(place));
        match (old, &mut self.disk) {
            (Some(old), Some(disk)) => disk.segments.dead(old),
            _ => self.effects.push_back(Effect::Stored(name, Tier::Disk)),
        }
    }
}
