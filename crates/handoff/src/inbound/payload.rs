//! A write's payload on its way into the pool, or dropped. Pure: the reader of the bytes asks where they go, and says how many came.

use std::collections::VecDeque;

use crate::batch::Range;

/// Where the next bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PayloadTarget<'a> {
    /// To these ranges of the pool (offset, bytes), in order.
    Pool(&'a [Range]),
    /// Drop this many bytes.
    Nowhere(usize),
}

/// What is left of one write's payload.
#[derive(Debug)]
pub struct Payload {
    ranges: VecDeque<Range>,
    /// Bytes still to drop; 0 while there are ranges.
    discard: usize,
}

impl Payload {
    /// A payload to be written to these ranges of the pool.
    pub(crate) fn apply(ranges: VecDeque<Range>) -> Payload {
        Payload { ranges, discard: 0 }
    }

    /// A payload of `bytes` bytes to be dropped.
    pub(crate) fn discard(bytes: usize) -> Payload {
        Payload { ranges: VecDeque::new(), discard: bytes }
    }

    /// Drops the rest: from now on none of it reaches the pool.
    pub(crate) fn turn_to_discard(&mut self) {
        self.discard += self.ranges.drain(..).map(|r| r.1).sum::<usize>();
    }

    /// Whether all of it has arrived.
    pub fn is_done(&self) -> bool {
        self.ranges.is_empty() && self.discard == 0
    }

    /// Where the next bytes go.
    pub fn target(&mut self) -> PayloadTarget<'_> {
        match self.ranges.is_empty() {
            true => PayloadTarget::Nowhere(self.discard),
            false => PayloadTarget::Pool(self.ranges.make_contiguous()),
        }
    }

    /// Notes that `count` bytes went where [`Payload::target`] said. Bytes beyond those it named are ignored.
    pub fn advance(&mut self, mut count: usize) {
        if self.ranges.is_empty() {
            self.discard = self.discard.saturating_sub(count);
        }
        while let Some((offset, len)) = self.ranges.front_mut() {
            if count < *len {
                (*offset, *len) = (*offset + count, *len - count);
                return;
            }
            count -= *len;
            self.ranges.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_go_on_where_the_last_ones_ended_and_nowhere_once_it_is_turned() {
        let mut payload = Payload::apply([(100, 10), (50, 4), (0, 6)].into());
        payload.advance(12);
        assert_eq!(payload.target(), PayloadTarget::Pool(&[(52, 2), (0, 6)]));
        payload.turn_to_discard();
        assert_eq!(payload.target(), PayloadTarget::Nowhere(8));
        payload.advance(5);
        assert!(!payload.is_done());
        payload.advance(3);
        assert!(payload.is_done());
    }
}
