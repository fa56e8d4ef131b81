//! The disk at the beginning: what an earlier process has left there.
//!
//! The head of each record is read, so a scan takes as many reads as there are records. Nothing was promised by a disk, so nothing is assumed:
//! a head that is damaged, elsewhere, of an earlier life of its segment or of another identity is no block. Data are not read; they are
//! checked when somebody wants them.

use super::Store;
use crate::index::Node;
use crate::{Block, Effect, Head, Mismatch, Place, Tier};

/// How far the scan is.
#[derive(Debug)]
pub(super) struct Recovery {
    next: u32,
    segments: u32,
    scanning: u32,
}

impl Recovery {
    pub fn new(segments: u32) -> Recovery {
        Recovery { next: 0, segments, scanning: 0 }
    }
}

impl Store {
    /// Begins to scan more segments.
    pub(super) fn scan_on(&mut self) {
        let Some(Recovery { next, segments, scanning }) = self.disk.as_mut().map(|disk| &mut disk.recovery) else {
            return;
        };
        while *next < *segments && *scanning < self.config.limits.scans {
            self.effects.push_back(Effect::Scan(*next));
            (*next, *scanning) = (*next + 1, *scanning + 1);
        }
    }

    pub(super) fn scanned(&mut self, segment: u32, heads: Option<Vec<Result<Head, Mismatch>>>) {
        let identity = self.config.identity;
        let Some(size) = self.config.disk else { return };
        self.counters.disk_errors += u64::from(heads.is_none());
        let (mut found, mut damaged) = (Vec::<(Place, Block)>::new(), 0);
        for (at, head) in heads.unwrap_or_default().into_iter().take(size.records as usize).enumerate() {
            match head {
                Ok(head) if head.identity != identity => self.counters.outdated += 1,
                Ok(head) if (head.place.segment, head.place.index as usize) != (segment, at) => damaged += 1,
                Ok(head) => found.push((head.place, head.block)),
                Err(Mismatch::Blank) => {}
                // Of another shape, or of a version to come: nothing is damaged.
                Err(Mismatch::Identity | Mismatch::Version(_)) => self.counters.outdated += 1,
                Err(_) => damaged += 1,
            }
        }
        self.counters.damaged_heads += damaged;
        self.counters.verify_failures[Tier::Disk as usize] += damaged;
        let Some(disk) = &mut self.disk else { return };
        let latest = found.iter().map(|(place, _)| place.generation).max();
        let last = disk.segments.scanned(segment, latest);
        disk.recovery.scanning -= 1;
        for (place, block) in found {
            match Some(place.generation) == latest {
                true => self.enter(place, block, size.records),
                false => self.counters.outdated += 1,
            }
        }
        if last {
            self.trim();
        }
        self.scan_on();
    }

    /// Enters a block that was found into the index. Of two records of a block the later one counts.
    fn enter(&mut self, place: Place, block: Block, records: u32) {
        let (name, parent, groups) = (block.key.name, block.key.parent, block.key.groups);
        let known = self.index.get(name);
        let other = known.and_then(|node| node.disk);
        // It has a copy elsewhere, which may have come since; all copies have the same layer groups.
        let elsewhere = known.is_some_and(|node| node.host.is_some() || node.object);
        let differs = known.is_some_and(|node| (node.parent, node.groups) != (parent, groups));
        if other.is_some_and(|other| other > place) || (differs && elsewhere) {
            self.counters.outdated += 1;
            return;
        }
        if other.is_some() {
            self.counters.outdated += 1;
            self.drop_copy(name, Tier::Disk);
        }
        let tick = place.generation.saturating_mul(u64::from(records)).saturating_add(u64::from(place.index));
        let usage = self.index.ranking.before(tick);
        self.index.change(name, || Node::new(parent, groups, usage), |node, _| node.disk = Some(place));
        if let Some(disk) = &mut self.disk {
            disk.segments.found(place, name);
        }
        self.counters.recovered += 1;
        self.effects.push_back(Effect::Stored(name, Tier::Disk));
    }

    /// Evicts what is too much: records of blocks that had been evicted are found again.
    fn trim(&mut self) {
        while self.disk.as_ref().is_some_and(|disk| disk.segments.used() > disk.segments.capacity()) {
            let Some(name) = self.victim(Tier::Disk) else { return };
            self.evict(name, Tier::Disk);
        }
    }
}
