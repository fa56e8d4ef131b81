//! What one end of a connection still has to send, item by item: frames, and payload that is read from the pool only when it leaves.

use std::collections::VecDeque;

use baton_handoff::{Frame, Range};
use baton_types::Epoch;
use baton_types::testing::Random;

use crate::faults::Faults;
use crate::stream::{Micros, Stream};

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    /// Bytes of the pool, for the handoff of this epoch.
    Pool(Range, Epoch),
    Zeros(usize),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Pool((_, len), _) | Piece::Zeros(len) => *len,
        }
    }
}

/// A frame with its payload. Faults drop, double or swap it as a whole.
#[derive(Debug)]
struct Item {
    number: u64,
    pieces: VecDeque<Piece>,
    /// Its first byte has left.
    begun: bool,
    /// Faults leave it alone.
    safe: bool,
}

/// Items in order.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    items: VecDeque<Item>,
    /// Number of items ever queued.
    queued: u64,
}

impl Outbox {
    /// Queues bytes that faults leave alone.
    pub(crate) fn push_bytes(&mut self, bytes: Vec<u8>) {
        self.queue([Piece::Bytes(bytes)].into(), true);
    }

    pub(crate) fn push(&mut self, frame: &Frame) {
        self.queue([Piece::Bytes(frame.encode())].into(), false);
    }

    /// Queues a frame, followed by bytes of the pool for a handoff. Returns the item's number.
    pub(crate) fn push_blocks(&mut self, frame: &Frame, of: Epoch, blocks: impl Iterator<Item = Range>) -> u64 {
        let mut pieces = VecDeque::from([Piece::Bytes(frame.encode())]);
        pieces.extend(blocks.map(|range| Piece::Pool(range, of)));
        self.queue(pieces, false)
    }

    fn queue(&mut self, pieces: VecDeque<Piece>, safe: bool) -> u64 {
        self.queued += 1;
        self.items.push_back(Item { number: self.queued, pieces, begun: false, safe });
        self.queued
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Bytes that have not left yet.
    pub(crate) fn bytes(&self) -> usize {
        self.items.iter().flat_map(|item| &item.pieces).map(Piece::len).sum()
    }

    /// Whether some of the item of this number has not left yet.
    pub(crate) fn holds(&self, number: u64) -> bool {
        self.items.iter().any(|item| item.number == number)
    }

    /// Stops reading the pool for this handoff: zeros are sent instead.
    pub(crate) fn forget_pool(&mut self, epoch: Epoch) {
        for piece in self.items.iter_mut().flat_map(|item| &mut item.pieces) {
            if let Piece::Pool((_, len), of) = piece
                && *of == epoch
            {
                *piece = Piece::Zeros(*len);
            }
        }
    }

    /// Sends as much as the stream takes, in pieces of any size. `read` reads the pool. Returns when the last piece arrives.
    pub(crate) fn flush(
        &mut self,
        stream: &mut Stream,
        now: Micros,
        random: &mut Random,
        faults: &mut Faults,
        mut read: impl FnMut(Range) -> Vec<u8>,
    ) -> Option<Micros> {
        let mut last = None;
        while stream.room() > 0 && !self.items.is_empty() {
            if !self.items[0].begun && !self.items[0].safe && self.harm_front(random, faults, &mut read) {
                continue;
            }
            let item = &mut self.items[0];
            item.begun = true;
            let Some(piece) = item.pieces.front_mut() else {
                self.items.pop_front();
                continue;
            };
            let take = piece.len().min(stream.room());
            let take = if faults.short_writes { random.within(1, take as u64) as usize } else { take };
            let bytes = match piece {
                Piece::Bytes(bytes) => bytes.drain(..take).collect(),
                Piece::Pool((offset, len), _) => {
                    let range = (*offset, take);
                    (*offset, *len) = (*offset + take, *len - take);
                    read(range)
                }
                Piece::Zeros(len) => {
                    *len -= take;
                    vec![0; take]
                }
            };
            if piece.len() == 0 {
                item.pieces.pop_front();
            }
            last = Some(stream.send(bytes, now, faults.delay(random)));
            if self.items[0].pieces.is_empty() {
                self.items.pop_front();
            }
        }
        last
    }

    /// Drops, doubles or swaps the first item, at random. True when it was dropped.
    fn harm_front(
        &mut self,
        random: &mut Random,
        faults: &mut Faults,
        read: &mut impl FnMut(Range) -> Vec<u8>,
    ) -> bool {
        if faults.drops(random) {
            self.items.pop_front();
            return true;
        }
        if faults.doubles(random) {
            let bytes: Vec<u8> = self.items[0]
                .pieces
                .drain(..)
                .flat_map(|piece| match piece {
                    Piece::Bytes(bytes) => bytes,
                    Piece::Pool(range, _) => read(range),
                    Piece::Zeros(len) => vec![0; len],
                })
                .collect();
            self.items[0].pieces.push_back(Piece::Bytes(bytes.repeat(2)));
        } else if self.items.len() > 1 && !self.items[1].safe && faults.swaps(random) {
            self.items.swap(0, 1);
        }
        self.items[0].begun = true;
        false
    }
}
