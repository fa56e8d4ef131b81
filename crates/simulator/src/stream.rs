//! One direction of a simulated connection: bytes are delayed, arrive in pieces, and may be corrupted.
//!
//! It knows nothing of frames. Like a socket, it keeps order and loses nothing while it is open. The outbox that fills it drops,
//! doubles and swaps frames.

use std::collections::VecDeque;

use baton_types::testing::Random;

/// Virtual microseconds.
pub(crate) type Micros = u64;

/// The next planned wake-up; an earlier one replaces a later one.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Timer(Option<Micros>);

impl Timer {
    /// Asks for a wake-up at `at`. True when an event must be planned for it.
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

/// Bytes in flight, oldest first.
#[derive(Debug)]
pub(crate) struct Stream {
    chunks: VecDeque<Chunk>,
    in_flight: usize,
    /// Most bytes in flight.
    room: usize,
    /// Nothing arrives before this time.
    stalled_until: Micros,
    /// When the reader learns that the writer has closed the stream or the connection was cut; None while it is open.
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

    /// Bytes it accepts now.
    pub(crate) fn room(&self) -> usize {
        if self.ends_at.is_some() { 0 } else { self.room - self.in_flight.min(self.room) }
    }

    /// Sends bytes, after everything sent before. Returns when they arrive.
    pub(crate) fn send(&mut self, bytes: Vec<u8>, now: Micros, delay: Micros) -> Micros {
        let last = self.chunks.back().map_or(0, |chunk| chunk.at);
        let at = (now + delay).max(last).max(self.stalled_until);
        self.in_flight += bytes.len();
        self.chunks.push_back(Chunk { at, bytes });
        at
    }

    /// Delays all bytes in flight, and all that follow, to `until` at least. Returns when the last bytes in flight arrive.
    pub(crate) fn stall(&mut self, until: Micros) -> Option<Micros> {
        self.stalled_until = self.stalled_until.max(until);
        self.chunks.iter_mut().for_each(|chunk| chunk.at = chunk.at.max(until));
        self.chunks.back().map(|chunk| chunk.at)
    }

    /// Flips a bit in flight. False when nothing is in flight.
    pub(crate) fn corrupt(&mut self, random: &mut Random) -> bool {
        if self.chunks.is_empty() {
            return false;
        }
        let at = random.below(self.chunks.len() as u64) as usize;
        random.flip(&mut self.chunks[at].bytes);
        true
    }

    /// Loses what has not arrived, and ends. The reader learns of it at `noticed`.
    pub(crate) fn cut(&mut self, now: Micros, noticed: Micros) {
        self.chunks.retain(|chunk| chunk.at <= now);
        self.in_flight = self.chunks.iter().map(|chunk| chunk.bytes.len()).sum();
        self.ends_at = Some(self.ends_at.unwrap_or(noticed).min(noticed));
    }

    /// The writer closes the stream. Returns when the reader learns of it.
    pub(crate) fn finish(&mut self, now: Micros, delay: Micros) -> Micros {
        let last = self.chunks.back().map_or(0, |chunk| chunk.at);
        *self.ends_at.get_or_insert((now + delay).max(last))
    }

    /// Takes the next chunk, if it has arrived.
    pub(crate) fn receive(&mut self, now: Micros) -> Option<Vec<u8>> {
        if self.chunks.front()?.at > now {
            return None;
        }
        let chunk = self.chunks.pop_front()?;
        self.in_flight -= chunk.bytes.len();
        Some(chunk.bytes)
    }

    /// Whether everything has been received and the reader knows of the end.
    pub(crate) fn has_ended(&self, now: Micros) -> bool {
        self.chunks.is_empty() && self.ends_at.is_some_and(|at| at <= now)
    }
}
