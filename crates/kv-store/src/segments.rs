//! The disk as a log of segments: where the next record goes, and which segment is reclaimed.
//!
//! A segment is a run of records of one length. It is written once from its beginning to its end, in the life that its generation names, and
//! reclaimed as a whole: the blocks in it that are still wanted are written again elsewhere (as in Rosenblum and Ousterhout, "The design and
//! implementation of a log-structured file system", 1992; greedy choice). Two segments are open: one for blocks that come down from host
//! memory, one for blocks that move, which were wanted for longer and will be.

use baton_kv_cache::BlockName;

use crate::StoreError;

/// Where a record is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Place {
    /// Which life of the segment. Generations rise with each segment that is opened.
    pub generation: u64,
    /// Number of the segment.
    pub segment: u32,
    /// The record's number inside it.
    pub index: u32,
}

impl Place {
    /// The place in the head of a block that is in no segment.
    pub const NOWHERE: Place = Place { generation: 0, segment: 0, index: 0 };
}

/// Why a record is written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reason {
    /// It came down from host memory.
    Demoted,
    /// It moved out of a segment that is reclaimed.
    Moved,
}

baton_types::words!(Reason { Demoted = "demoted", Moved = "moved" });

/// Fewest segments: two that are open, one into which blocks can move, and one to spare; and as many again that hold blocks.
pub const MIN_SEGMENTS: u32 = 8;
/// Of so many segments one stays without live blocks, so that reclaiming finds segments in which few are alive.
const SPARE: u32 = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Not scanned yet.
    Unknown,
    Free,
    Open,
    Full,
    Reclaimed,
}

#[derive(Clone, Debug)]
struct Segment {
    state: State,
    generation: u64,
    /// Next record of an open segment.
    next: u32,
    /// Live blocks, by record.
    names: Vec<Option<BlockName>>,
    live: u32,
    /// Writes and reads in flight.
    writing: u32,
    reading: u32,
}

/// All segments.
#[derive(Debug)]
pub(crate) struct Segments {
    all: Vec<Segment>,
    records: u32,
    open: [Option<u32>; 2],
    free: u32,
    unknown: u32,
    generation: u64,
    /// Live blocks, and writes in flight.
    used: u64,
}

impl Segments {
    /// Sizes are those that `StoreConfig::check` lets pass.
    pub fn new(segments: u32, records: u32) -> Segments {
        let names = vec![None; records as usize];
        let segment = Segment { state: State::Unknown, generation: 0, next: 0, names, live: 0, writing: 0, reading: 0 };
        let all = vec![segment; segments as usize];
        Segments { all, records, open: [None; 2], free: 0, unknown: segments, generation: 0, used: 0 }
    }

    /// Most blocks that may be alive.
    pub fn capacity(&self) -> u64 {
        let segments = self.all.len() as u32;
        u64::from(segments - 3 - segments.div_ceil(SPARE)) * u64::from(self.records)
    }

    /// Blocks that are alive or being written.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Whether all segments were scanned.
    pub fn known(&self) -> bool {
        self.unknown == 0
    }

    /// Takes in what a scan found: the generation of a segment's latest life, and whether anything is written there. Returns whether this was
    /// the last scan.
    pub fn scanned(&mut self, segment: u32, generation: Option<u64>) -> bool {
        let Some(of) = self.all.get_mut(segment as usize).filter(|of| of.state == State::Unknown) else { return false };
        of.generation = generation.unwrap_or(0);
        of.state = if generation.is_some() { State::Full } else { State::Free };
        self.free += u32::from(generation.is_none());
        self.generation = self.generation.max(of.generation);
        self.unknown -= 1;
        self.unknown == 0
    }

    /// Takes the next place for a record. None: there is no room now.
    pub fn append(&mut self, why: Reason) -> Option<Place> {
        if !self.known() {
            return None;
        }
        let at = match self.open[why as usize] {
            Some(at) => at,
            // The last free segment is for blocks that move; else nothing could ever be reclaimed.
            None if self.free > u32::from(why == Reason::Demoted) => self.open_segment(why)?,
            None => return None,
        };
        let segment = &mut self.all[at as usize];
        let place = Place { segment: at, index: segment.next, generation: segment.generation };
        (segment.next, segment.writing) = (segment.next + 1, segment.writing + 1);
        self.used += 1;
        if segment.next == self.records {
            segment.state = State::Full;
            self.open[why as usize] = None;
        }
        Some(place)
    }

    fn open_segment(&mut self, why: Reason) -> Option<u32> {
        let at = self.all.iter().position(|segment| segment.state == State::Free)?;
        self.generation += 1;
        self.free -= 1;
        let segment = &mut self.all[at];
        (segment.state, segment.generation, segment.next) = (State::Open, self.generation, 0);
        self.open[why as usize] = Some(at as u32);
        Some(at as u32)
    }

    /// A write ended. Returns whether the segment is now complete.
    pub fn written(&mut self, place: Place, block: Option<BlockName>) -> bool {
        let segment = &mut self.all[place.segment as usize];
        segment.writing -= 1;
        match block {
            Some(name) => {
                segment.names[place.index as usize] = Some(name);
                segment.live += 1;
            }
            None => self.used -= 1,
        }
        segment.state == State::Full && segment.writing == 0
    }

    /// A scan found a live block.
    pub fn found(&mut self, place: Place, name: BlockName) {
        let segment = &mut self.all[place.segment as usize];
        if segment.names[place.index as usize].replace(name).is_none() {
            segment.live += 1;
            self.used += 1;
        }
    }

    /// A block is no longer wanted at this place.
    pub fn dead(&mut self, place: Place) {
        let segment = &mut self.all[place.segment as usize];
        if segment.generation == place.generation && segment.names[place.index as usize].take().is_some() {
            segment.live -= 1;
            self.used -= 1;
        }
    }

    /// A read of a segment begins. Until it ends, the segment is not written to.
    pub fn read_begins(&mut self, place: Place) {
        self.all[place.segment as usize].reading += 1;
    }

    /// A read of a segment has ended.
    pub fn read_ended(&mut self, place: Place) {
        self.all[place.segment as usize].reading -= 1;
    }

    /// Begins to reclaim the segment with the fewest live blocks, if segments are short. Returns its live blocks. A segment in which all are alive
    /// is never moved: that would gain nothing, and be done for ever.
    pub fn reclaim(&mut self) -> Option<(u32, Vec<BlockName>)> {
        if !self.known() || self.free > 1 {
            return None;
        }
        let gains = |of: &Segment| of.live < self.records;
        let full = |(_, of): &(usize, &Segment)| of.state == State::Full && of.writing == 0 && gains(of);
        let (at, _) = self.all.iter().enumerate().filter(full).min_by_key(|(_, of)| (of.live, of.generation))?;
        self.all[at].state = State::Reclaimed;
        Some((at as u32, self.all[at].names.iter().flatten().copied().collect()))
    }

    /// Frees a reclaimed segment, once nothing in it is alive or being read.
    pub fn freed(&mut self, segment: u32) -> bool {
        let of = &mut self.all[segment as usize];
        let free = of.state == State::Reclaimed && of.live == 0 && of.reading == 0;
        if free {
            of.state = State::Free;
            self.free += 1;
        }
        free
    }

    /// Checks the counters, and that exactly these blocks are alive (I6).
    pub fn check(&self, mut blocks: impl Iterator<Item = (BlockName, Place)>) -> Result<(), StoreError> {
        let broken = |what: String| Err(StoreError::Broken(what));
        let live = |of: &Segment| of.names.iter().flatten().count() as u32;
        if let Some(at) = self.all.iter().position(|of| live(of) != of.live) {
            return broken(format!(
                "segment {at} counts {} live blocks, has {}",
                self.all[at].live,
                live(&self.all[at])
            ));
        }
        let used: u64 = self.all.iter().map(|of| u64::from(of.live + of.writing)).sum();
        let count = |state| self.all.iter().filter(|of| of.state == state).count() as u32;
        if (used, count(State::Free), count(State::Unknown)) != (self.used, self.free, self.unknown) {
            return broken(format!("{} records in use, {used} found; {} free segments", self.used, self.free));
        }
        let dirty = |of: &Segment| of.state == State::Free && (of.live, of.writing, of.reading) != (0, 0, 0);
        if let Some(at) = self.all.iter().position(dirty) {
            return broken(format!("segment {at} is free and in use"));
        }
        let mut count = 0;
        let here = |place: Place| self.all[place.segment as usize].names[place.index as usize];
        if let Some((name, place)) = blocks.find(|(name, place)| {
            count += 1;
            here(*place) != Some(*name) || self.all[place.segment as usize].generation != place.generation
        }) {
            return broken(format!("{name:?} is not at {place:?}"));
        }
        match self.all.iter().map(|of| u64::from(of.live)).sum::<u64>() == count {
            true => Ok(()),
            false => broken(format!("more blocks are alive on disk than the {count} of the index")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn segments() -> Segments {
        let mut segments = Segments::new(MIN_SEGMENTS, 2);
        assert!(segments.append(Reason::Moved).is_none(), "nothing is written before all is known");
        (0..MIN_SEGMENTS).for_each(|at| assert_eq!(segments.scanned(at, None), at + 1 == MIN_SEGMENTS));
        segments
    }

    #[test]
    fn the_last_free_segment_is_for_blocks_that_move() {
        let mut segments = segments();
        let mut places = Vec::new();
        while let Some(place) = segments.append(Reason::Demoted) {
            segments.written(place, Some(BlockName(places.len() as u128)));
            places.push(place);
        }
        assert_eq!(places.len(), 14, "one of eight is left");
        assert!(segments.append(Reason::Moved).is_some());
    }

    #[test]
    fn segments_in_which_all_are_alive_are_left_alone() {
        let mut segments = segments();
        let places: Vec<Place> = std::iter::from_fn(|| segments.append(Reason::Demoted)).collect();
        for (at, place) in places.iter().enumerate() {
            segments.written(*place, Some(BlockName(at as u128)));
        }
        assert_eq!(segments.reclaim(), None);
        segments.dead(places[3]);
        assert_eq!(segments.reclaim(), Some((1, vec![BlockName(2)])));
    }

    #[test]
    fn the_emptiest_segment_is_reclaimed_when_nobody_reads_it() {
        let mut segments = segments();
        let places: Vec<Place> = std::iter::from_fn(|| segments.append(Reason::Demoted)).collect();
        for (at, place) in places.iter().enumerate() {
            assert_eq!(segments.written(*place, Some(BlockName(at as u128))), at % 2 == 1);
        }
        segments.dead(places[5]);
        segments.read_begins(places[4]);
        assert_eq!(segments.reclaim(), Some((2, vec![BlockName(4)])));
        segments.dead(places[4]);
        assert!(!segments.freed(2), "a read is in flight");
        segments.read_ended(places[4]);
        assert!(segments.freed(2));
        let again = segments.append(Reason::Moved).unwrap();
        assert!(again.generation > places[13].generation, "another life");
        segments.dead(Place { segment: again.segment, index: again.index, generation: 1 });
    }
}
