//! What one end of a connection has yet to send, item by item: frames, and payload that is read from its pool when it
//! leaves.

use std::collections::VecDeque;

use baton_transfer::protocol::{Frame, Range};

use crate::faults::Faults;
use crate::random::Random;
use crate::stream::{Micros, Stream};

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    Pool(Range),
    Zeros(usize),
}

impl Piece {
    fn len(&self) -> usize {
        match self {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Pool((_, len)) | Piece::Zeros(len) => *len,
        }
    }
}

/// A frame with its payload: what is dropped, doubled or swapped as a whole.
#[derive(Debug)]
struct Item {
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
}

impl Outbox {
    /// Queues bytes that faults leave alone.
    pub(crate) fn push_bytes(&mut self, bytes: Vec<u8>) {
        self.items.push_back(Item { pieces: [Piece::Bytes(bytes)].into(), begun: false, safe: true });
    }

    pub(crate) fn push(&mut self, frame: &Frame) {
        self.push_with(frame, []);
    }

    /// Queues a frame and the pool's bytes behind it.
    pub(crate) fn push_with(&mut self, frame: &Frame, payload: impl IntoIterator<Item = Range>) {
        let mut pieces = VecDeque::from([Piece::Bytes(frame.encode())]);
        pieces.extend(payload.into_iter().map(Piece::Pool));
        self.items.push_back(Item { pieces, begun: false, safe: false });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Whether the pool has yet to be read.
    pub(crate) fn reads_pool(&self) -> bool {
        self.items.iter().flat_map(|item| &item.pieces).any(|piece| matches!(piece, Piece::Pool(_)))
    }

    /// From now on the pool is not read: zeros go in its place.
    pub(crate) fn forget_pool(&mut self) {
        for piece in self.items.iter_mut().flat_map(|item| &mut item.pieces) {
            if let Piece::Pool((_, len)) = piece {
                *piece = Piece::Zeros(*len);
            }
        }
    }

    /// Sends what the stream takes, in pieces of any size. `read` reads the pool. Answers when the last of it arrives.
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
                Piece::Pool((offset, len)) => {
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

    /// Drops, doubles or swaps the first item, if so decided. True when it is another one now.
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
                    Piece::Pool(range) => read(range),
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
