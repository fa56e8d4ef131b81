//! When threads that copy KV give way to those that compute. Knows no thread and no clock: it is given what asks for both.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Bytes after which a thread gives way: some ten to some hundred microseconds of copying.
const PIECE: usize = 256 << 10;
/// The longest rest.
const LONGEST: Duration = Duration::from_millis(20);

/// Whether answers are being decoded on the processors of this process. Whoever computes says so; whoever copies sees it.
#[derive(Clone, Debug, Default)]
pub struct Decoding(Arc<AtomicBool>);

impl Decoding {
    /// Steps decode answers from now on, or they do not.
    pub fn set(&self, decoding: bool) {
        self.0.store(decoding, Ordering::Relaxed);
    }

    /// Whether steps decode answers.
    pub fn is_on(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a thread asks of its processor.
#[derive(Clone, Copy, Debug)]
pub struct Processor {
    /// How long the thread that asks has run so far, in processor time.
    pub ran: fn() -> Duration,
    /// Has the thread that asks rest for so long. Zero: those who wait for its processor go first.
    pub rest: fn(Duration),
}

/// When a thread that copies KV gives way to others. Where a step is computed on the same processors, the step goes on first: whoever is being answered
/// waits for the next token. As long as answers are decoded, the thread uses a part of a processor's time only, in small pieces; otherwise it lets
/// others go first now and then, by which it loses nothing where nobody else has anything to do.
///
/// Each thread has its own, cloned from one that was given to all.
#[derive(Clone, Debug, Default)]
pub struct Courtesy {
    /// None: it never gives way.
    beside: Option<Beside>,
    /// Bytes since it last gave way.
    copied: usize,
    /// How long the thread had run by then.
    ran: Duration,
    times: u64,
}

#[derive(Clone, Debug)]
struct Beside {
    decoding: Decoding,
    /// How long to rest, as a multiple of the time it ran.
    rests: f64,
    processor: Processor,
}

impl Courtesy {
    /// Beside steps that may decode answers. Meanwhile, a thread uses this share of a processor's time, more than 0 and at most 1.
    pub fn beside(decoding: Decoding, share: f64, processor: Processor) -> Courtesy {
        let beside = Beside { decoding, rests: 1.0 / share.clamp(0.01, 1.0) - 1.0, processor };
        Courtesy { beside: Some(beside), ..Courtesy::default() }
    }

    /// One of so many threads that have its share together.
    pub fn among(mut self, threads: usize) -> Courtesy {
        if let Some(beside) = &mut self.beside {
            beside.rests = (beside.rests + 1.0) * threads.max(1) as f64 - 1.0;
        }
        self
    }

    /// So many bytes were copied, or are about to be. Gives way after each 256 KiB, for at most 20 ms.
    pub fn copied(&mut self, bytes: usize) {
        self.copied += bytes;
        if self.copied < PIECE {
            return;
        }
        (self.copied, self.times) = (0, self.times + 1);
        let Some(Beside { decoding, rests, processor }) = &self.beside else { return };
        let ran = (processor.ran)();
        let since = ran.saturating_sub(std::mem::replace(&mut self.ran, ran)).min(LONGEST);
        (processor.rest)(if decoding.is_on() { since.mul_f64(*rests).min(LONGEST) } else { Duration::ZERO });
    }

    /// For tests: the next byte makes it give way.
    #[cfg(feature = "testing")]
    pub fn nearly(&mut self) {
        self.copied = PIECE - 1;
    }

    /// For tests: how often it gave way.
    #[cfg(feature = "testing")]
    pub fn times(&self) -> u64 {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};

    use super::*;

    thread_local! {
        static RAN: Cell<Duration> = const { Cell::new(Duration::ZERO) };
        static RESTS: RefCell<Vec<Duration>> = const { RefCell::new(Vec::new()) };
    }

    /// Each piece takes a millisecond.
    const PROCESSOR: Processor = Processor {
        ran: || RAN.with(|ran| ran.replace(ran.get() + Duration::from_millis(1))),
        rest: |time| RESTS.with(|rests| rests.borrow_mut().push(time)),
    };

    /// Rests, in ms, after this many halves of a piece.
    fn rests(courtesy: &mut Courtesy, halves: usize) -> Vec<u128> {
        (0..halves).for_each(|_| courtesy.copied(PIECE / 2));
        RESTS.with(|rests| rests.take().iter().map(Duration::as_millis).collect())
    }

    #[test]
    fn it_rests_for_its_share_while_answers_are_decoded() {
        let decoding = Decoding::default();
        let mut courtesy = Courtesy::beside(decoding.clone(), 0.125, PROCESSOR);
        assert_eq!(rests(&mut courtesy, 5), [0, 0], "others go first");
        decoding.set(true);
        assert_eq!(rests(&mut courtesy, 4), [7, 7]);
        RAN.with(|ran| ran.set(ran.get() + Duration::from_secs(60)));
        assert_eq!(rests(&mut courtesy, 4), [20, 7], "it ran for something else before");
        decoding.set(false);
        assert_eq!(rests(&mut courtesy, 3), [0, 0]);
        assert_eq!(courtesy.times(), 8);
        decoding.set(true);
        let whole = Courtesy::beside(decoding, 1.0, PROCESSOR);
        assert_eq!(rests(&mut whole.clone(), 4), [0, 0], "a processor of its own");
        assert_eq!(rests(&mut whole.among(4), 4), [20, 3], "a quarter of it, which it does not know to have used");
    }

    #[test]
    fn without_steps_beside_it_gives_way_to_nobody() {
        assert_eq!(rests(&mut Courtesy::default(), 4), []);
    }
}
