//! The recorder's knowledge of each allocation and each stream, and the checks that follow from it.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use super::Recorded;
use crate::KernelError;
use crate::cuda::device::{Access, Address, Event, Graph, Piece, Stream};

/// Vector clock of a stream, an event or the host: for each stream, the number of its last work that is ordered before.
pub(super) type Clock = HashMap<Stream, u64>;

pub(super) struct Touch {
    pub bytes: Range<u64>,
    pub writes: bool,
    pub stream: Stream,
    /// Number of the work in its stream.
    pub work: u64,
    pub what: &'static str,
}

pub(super) struct Allocation {
    pub bytes: u64,
    pub touches: Vec<Touch>,
    /// Number of the allocation, which tells it from a later one at the same address.
    pub number: u64,
}

/// One piece of memory that captured work touches.
#[derive(Clone, Copy)]
pub(super) struct Captured {
    pub what: &'static str,
    pub at: Address,
    pub bytes: usize,
    pub writes: bool,
    /// Number of its allocation.
    pub number: u64,
}

/// What happens to the host's waits.
#[derive(Default)]
pub(super) enum Waits {
    #[default]
    End,
    Fail,
    /// So many more waits return; later ones block for ever.
    Left(u64),
}

#[derive(Default)]
pub(super) struct State {
    pub log: Vec<Recorded>,
    pub problems: Vec<String>,
    pub allocations: BTreeMap<Address, Allocation>,
    /// Address and size in bytes of freed memory that was not allocated again.
    pub freed: BTreeMap<Address, u64>,
    pub streams: HashMap<Stream, Clock>,
    pub events: HashMap<Event, Clock>,
    pub host: Clock,
    /// Exported memory, by handle.
    pub exports: HashMap<Vec<u8>, Address>,
    /// Imported memory, and the exported memory behind it if that is known.
    pub imports: HashMap<Address, Option<Address>>,
    pub refused: Option<&'static str>,
    /// The kernel whose captured launches fail.
    pub refused_captured: Option<&'static str>,
    pub waits: Waits,
    pub allocated: u64,
    pub captures: HashMap<Stream, Vec<Captured>>,
    pub graphs: HashMap<Graph, Vec<Captured>>,
}

pub(super) fn join(into: &mut Clock, other: &Clock) {
    for (&stream, &work) in other {
        let known = into.entry(stream).or_default();
        *known = (*known).max(work);
    }
}

impl State {
    /// Number of the stream's next work. It is ordered after all that the host has waited for.
    pub(super) fn work(&mut self, stream: Stream) -> u64 {
        let clock = self.streams.entry(stream).or_default();
        join(clock, &self.host);
        let own = clock.entry(stream).or_default();
        *own += 1;
        *own
    }

    /// Notes a new allocation.
    pub(super) fn note(&mut self, call: Recorded, at: Address, bytes: usize) {
        let end = at.0 + bytes as u64;
        self.freed.retain(|freed, size| freed.0 + *size <= at.0 || freed.0 >= end);
        self.allocated += 1;
        let (bytes, number) = (bytes as u64, self.allocated);
        self.allocations.insert(at, Allocation { bytes, touches: Vec::new(), number });
        self.log.push(call);
    }

    /// Notes that memory is freed; returns whether it was allocated.
    pub(super) fn forget(&mut self, call: Recorded, at: Address) -> bool {
        self.log.push(call);
        let Some(allocation) = self.allocations.remove(&at) else {
            self.problems.push("free: memory that is not allocated".to_owned());
            return false;
        };
        self.freed.insert(at, allocation.bytes);
        true
    }

    pub(super) fn problem(&mut self, why: String) -> KernelError {
        self.problems.push(why.clone());
        KernelError::Device { operation: "recorded call".to_owned(), why }
    }

    /// The allocation that contains all of a piece.
    pub(super) fn allocation(&mut self, what: &'static str, piece: &Piece<'_>) -> Result<Address, KernelError> {
        let (first, end) = (piece.at(), piece.at().0 + piece.bytes() as u64);
        let before = self.allocations.range(..=first).next_back();
        if let Some((&at, found)) = before.filter(|(at, found)| first.0 < at.0 + found.bytes.max(1)) {
            if end <= at.0 + found.bytes {
                return Ok(at);
            }
            let (from, bytes) = (first.0 - at.0, found.bytes);
            return Err(self.problem(format!("{what}: {} bytes from {from} on, of {bytes}", piece.bytes())));
        }
        let freed = self.freed.range(..=first).next_back().is_some_and(|(at, bytes)| first.0 < at.0 + bytes);
        let why = if freed { "after it was freed" } else { "that nobody allocated" };
        Err(self.problem(format!("{what}: memory {why}")))
    }

    pub(super) fn touch(
        &mut self,
        what: &'static str,
        stream: Stream,
        accesses: &[Access<'_>],
    ) -> Result<(), KernelError> {
        if self.captures.contains_key(&stream) {
            return self.capture(what, stream, accesses);
        }
        let work = self.work(stream);
        let clock = self.streams.get(&stream).cloned().unwrap_or_default();
        for access in accesses {
            let (piece, writes) = match access {
                Access::Read(piece) => (piece, false),
                Access::Write(piece) => (piece, true),
            };
            let at = self.allocation(what, piece)?;
            let bytes = piece.at().0..piece.at().0 + piece.bytes() as u64;
            let Some(allocation) = self.allocations.get_mut(&at) else { continue };
            let unordered = allocation.touches.iter().find(|touch| {
                let meet = touch.bytes.start < bytes.end && bytes.start < touch.bytes.end && (touch.writes || writes);
                meet && clock.get(&touch.stream).copied().unwrap_or(0) < touch.work
            });
            let missing = unordered
                .map(|touch| format!("{what} in {stream:?} does not wait for {} in {:?}", touch.what, touch.stream));
            // Earlier touches of the same stream that this one covers can be forgotten: work ordered after this one is ordered after them.
            allocation.touches.retain(|touch| {
                let inside = bytes.start <= touch.bytes.start && touch.bytes.end <= bytes.end;
                !(inside && touch.stream == stream && (writes || !touch.writes))
            });
            allocation.touches.push(Touch { bytes, writes, stream, work, what });
            if let Some(missing) = missing {
                self.problems.push(missing);
            }
        }
        Ok(())
    }

    pub(super) fn wait_on_host(&mut self, stream: Stream) {
        let known = self.streams.get(&stream).cloned().unwrap_or_default();
        join(&mut self.host, &known);
    }
}
