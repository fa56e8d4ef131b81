//! When threads that copy KV give way to others. Knows no thread and no clock: who asks gives way.

/// Bytes after which a thread gives way: some hundred microseconds of copying.
const PIECE: usize = 1 << 20;

/// When a thread that copies KV gives way to others. Where a step is computed on the same processors, the step goes on first: whoever is being answered
/// waits for the next token, while what copies can use the step's pauses. A processor that has nothing else to do loses nothing by it.
#[derive(Clone, Debug, Default)]
pub struct Courtesy {
    /// Bytes since it last was to give way.
    copied: usize,
    times: u64,
}

impl Courtesy {
    /// So many bytes were copied. True after each MiB: the thread is to give way now.
    pub fn is_due(&mut self, bytes: usize) -> bool {
        self.copied += bytes;
        let due = self.copied >= PIECE;
        if due {
            self.copied = 0;
            self.times += 1;
        }
        due
    }

    /// For tests: the next byte makes it due.
    #[cfg(feature = "testing")]
    pub fn nearly(&mut self) {
        self.copied = PIECE - 1;
    }

    /// How often it was to give way.
    pub fn times(&self) -> u64 {
        self.times
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_due_after_each_piece() {
        let mut courtesy = Courtesy::default();
        let due: Vec<_> = (0..6).map(|_| courtesy.is_due(PIECE / 2)).collect();
        assert_eq!((due, courtesy.times()), (vec![false, true, false, true, false, true], 3));
    }
}
