//! What happens next: events in the order of their virtual times, and in the order they were planned where those are equal.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::stream::Micros;

/// Which of several workers of a role.
pub(crate) type Place = usize;
/// A worker's incarnation: events for one before it are void.
pub(crate) type Life = u64;
/// A connection. That of a session's own is also the session's number at the decode worker.
pub(crate) type Line = u64;

/// Something that happens at a time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// A request comes in.
    Submit { request: u64, tries: u32 },
    /// The router brings a target to a prefill worker.
    Run { prefill: Place, request: u64, target: Vec<u8>, deadline: Micros },
    /// A handoff's owner goes on.
    Compute { prefill: Place, life: Life, handoff: u64 },
    /// A handoff should have ended by now.
    MustHaveEnded { prefill: Place, life: Life, handoff: u64 },
    /// A reservation should have ended by now.
    MustHaveFailed { decode: Place, life: Life, epoch: u64 },
    /// A reservation's owner takes it back.
    Cancel { decode: Place, life: Life, epoch: u64 },
    /// A sequence that ran on verified KV is over.
    Finish { decode: Place, life: Life, epoch: u64 },
    /// A session at a decode worker looks what is new.
    DecodeTurn { line: Line },
    /// A session at a prefill worker looks what is new.
    PrefillTurn { prefill: Place, life: Life, peer: u64 },
    /// A decode worker looks for leases that have run out.
    Desk { decode: Place, life: Life },
    /// A decode worker learns that a prefill worker's process has ended.
    Died { line: Line },
    /// A connection breaks.
    Cut { line: Line },
    /// Perhaps a fault strikes.
    Strike,
}

/// Planned events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    heap: BinaryHeap<Reverse<(Micros, u64, Event)>>,
    planned: u64,
}

impl Events {
    pub(crate) fn plan(&mut self, at: Micros, event: Event) {
        self.planned += 1;
        self.heap.push(Reverse((at, self.planned, event)));
    }

    pub(crate) fn next(&mut self) -> Option<(Micros, Event)> {
        self.heap.pop().map(|Reverse((at, _, event))| (at, event))
    }
}
