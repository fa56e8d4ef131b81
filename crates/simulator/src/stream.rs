//! One direction of a simulated connection: bytes that take their time, come in pieces, and may be harmed.
//!
//! Knows nothing of frames. A stream between sockets keeps order and loses nothing; that frames are dropped, doubled or
//! swapped is the doing of the outbox that fills it.

use std::collections::VecDeque;

use baton_types::testing::Random;

/// Virtual microseconds.
pub(crate) type Micros = u64;

/// The next time somebody wants to be woken without a cause; earlier ones replace later ones.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timer(Option<Micros>);

impl Timer {
    /// True when an event is to be planned for `at`.
    pub(crate) fn set(&mut self, at: Micros, now: Micros) -> bool {
        let earlier = self.0.is_none_or(|planned| planned <= now || at < planned);
        if earlier {
            self.0 = Some(at);
        }
        earlier
    }
}

#[derive(Debug)]
struct Chunk {
    at: Micros,
    bytes: Vec<u8>,
}

/// Bytes under way, oldest first.
#[derive(Debug)]
pub(crate) struct Stream {
    chunks: VecDeque<Chunk>,
    in_flight: usize,
    /// Bytes in flight at most.
    room: usize,
    /// Nothing arrives before.
    stalled_until: Micros,
    /// The writer has closed it, or the connection is cut: when the reader learns of it.
    ends_at: Option<Micros>,
}

impl Stream {
    pub(crate) fn new(room: usize) -> Stream {
        Stream { chunks: VecDeque::new(), in_flight: 0, room, stalled_until: 0, ends_at: None }
    }

    /// Whether neither end has ended it.
    pub(crate) fn is_open(&self) -> bool {
        self.ends_at.is_none()
    }

    /// Bytes it takes now.
    pub(crate) fn room(&self) -> usize {
        if self.ends_at.is_some() { 0 } else { self.room - self.in_flight.min(self.room) }
    }

    /// Sends, after everything sent before.
    pub(crate) fn send(&mut self, bytes: Vec<u8>, now: Micros, delay: Micros) -> Micros {
        let last = self.chunks.back().map_or(0, |chunk| chunk.at);
        let at = (now + delay).max(last).max(self.stalled_until);
        self.in_flight += bytes.len();
        self.chunks.push_back(Chunk { at, bytes });
        at
    }

    /// Holds back what is under way and what follows; answers when the last of it arrives.
    pub(crate) fn stall(&mut self, until: Micros) -> Option<Micros> {
        self.stalled_until = self.stalled_until.max(until);
        self.chunks.iter_mut().for_each(|chunk| chunk.at = chunk.at.max(until));
        self.chunks.back().map(|chunk| chunk.at)
    }

    /// Flips a bit of something under way.
    pub(crate) fn corrupt(&mut self, random: &mut Random) -> bool {
        if self.chunks.is_empty() {
            return false;
        }
        let at = random.below(self.chunks.len() as u64) as usize;
        random.flip(&mut self.chunks[at].bytes);
        true
    }

    /// Loses what has not arrived, and ends.
    pub(crate) fn cut(&mut self, now: Micros, noticed: Micros) {
        self.chunks.retain(|chunk| chunk.at <= now);
        self.in_flight = self.chunks.iter().map(|chunk| chunk.bytes.len()).sum();
        self.ends_at = Some(self.ends_at.unwrap_or(noticed).min(noticed));
    }

    /// The writer sends nothing more.
    pub(crate) fn finish(&mut self, now: Micros, delay: Micros) -> Micros {
        let last = self.chunks.back().map_or(0, |chunk| chunk.at);
        *self.ends_at.get_or_insert((now + delay).max(last))
    }

    /// The next bytes that are here, all of a chunk or none.
    pub(crate) fn receive(&mut self, now: Micros) -> Option<Vec<u8>> {
        if self.chunks.front()?.at > now {
            return None;
        }
        let chunk = self.chunks.pop_front()?;
        self.in_flight -= chunk.bytes.len();
        Some(chunk.bytes)
    }

    /// Whether nothing will ever come any more.
    pub(crate) fn has_ended(&self, now: Micros) -> bool {
        self.chunks.is_empty() && self.ends_at.is_some_and(|at| at <= now)
    }
}
