//! A disk that keeps no promise: until a segment is synced, and even then if it lies, a crash may lose a write, tear it, or apply it after
//! later ones.

use std::collections::BTreeMap;

use baton_types::testing::Random;

/// What a disk writes at once, or not at all.
const SECTOR: usize = 512;

#[derive(Clone, Debug)]
struct Write {
    segment: u32,
    offset: usize,
    bytes: Vec<u8>,
}

#[derive(Clone, Debug, Default)]
pub struct FakeDisk {
    /// What reads see.
    pub now: BTreeMap<u32, Vec<u8>>,
    /// What a crash leaves for sure.
    durable: BTreeMap<u32, Vec<u8>>,
    /// What it may or may not leave.
    cached: Vec<Write>,
    /// Bytes of a segment.
    pub size: usize,
}

fn apply(to: &mut BTreeMap<u32, Vec<u8>>, size: usize, write: &Write, sectors: impl Fn(usize) -> bool) {
    let segment = to.entry(write.segment).or_insert_with(|| vec![0; size]);
    for (at, sector) in write.bytes.chunks(SECTOR).enumerate().filter(|(at, _)| sectors(*at)) {
        let from = write.offset + at * SECTOR;
        segment[from..from + sector.len()].copy_from_slice(sector);
    }
}

impl FakeDisk {
    pub fn of(size: usize) -> FakeDisk {
        FakeDisk { size, ..FakeDisk::default() }
    }

    pub fn write(&mut self, segment: u32, offset: usize, bytes: Vec<u8>) {
        assert!(offset + bytes.len() <= self.size, "a write beyond the segment's end");
        let write = Write { segment, offset, bytes };
        apply(&mut self.now, self.size, &write, |_| true);
        self.cached.push(write);
    }

    pub fn read(&self, segment: u32, offset: usize, length: usize) -> Vec<u8> {
        let segment = self.now.get(&segment);
        segment.and_then(|bytes| bytes.get(offset..offset + length)).map_or(vec![0; length], <[u8]>::to_vec)
    }

    /// Makes writes to a segment durable, unless the disk lies.
    pub fn sync(&mut self, segment: u32, random: &mut Random) {
        if random.chance(500) {
            let (synced, rest) =
                std::mem::take(&mut self.cached).into_iter().partition(|write| write.segment == segment);
            self.cached = rest;
            let synced: Vec<Write> = synced;
            synced.iter().for_each(|write| apply(&mut self.durable, self.size, write, |_| true));
        }
    }

    /// Everything is kept: what a process that is killed leaves behind.
    pub fn kill(&mut self) {
        self.durable = self.now.clone();
        self.cached.clear();
    }

    /// Power is lost.
    pub fn crash(&mut self, random: &mut Random) {
        let mut cached = std::mem::take(&mut self.cached);
        while !cached.is_empty() {
            let write = cached.swap_remove(random.index(cached.len()));
            let torn = random.bits();
            match random.below(4) {
                0 => {}
                1 => apply(&mut self.durable, self.size, &write, |_| true),
                // The beginning, and sectors here and there.
                2 => {
                    apply(&mut self.durable, self.size, &write, |at| at < torn as usize % (write.bytes.len() / SECTOR))
                }
                _ => apply(&mut self.durable, self.size, &write, |at| torn >> (at % 64) & 1 == 1),
            }
        }
        self.now = self.durable.clone();
    }
}
