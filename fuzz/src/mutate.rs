//! Seeded mutations of byte strings.

use baton_types::testing::Random;

/// Makes inputs out of others.
#[derive(Clone, Debug)]
pub struct Mutator(Random);

/// Numbers at which code tends to go wrong.
const EDGES: [u64; 8] = [0, 1, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX];

impl Mutator {
    /// A mutator whose output depends only on the seed and the inputs.
    pub fn new(seed: u64) -> Mutator {
        Mutator(Random(seed))
    }

    /// The next random number.
    pub fn random(&mut self) -> u64 {
        self.0.bits()
    }

    /// A random number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.random() % n as u64) as usize }
    }

    /// An input like `input`, perhaps with parts of `other`, of at most `most` bytes.
    pub fn mutate(&mut self, input: &[u8], other: &[u8], most: usize) -> Vec<u8> {
        let mut bytes = input.to_vec();
        for _ in 0..1 + self.below(6) {
            self.step(&mut bytes, other);
        }
        bytes.truncate(most);
        bytes
    }

    fn step(&mut self, bytes: &mut Vec<u8>, other: &[u8]) {
        let at = self.below(bytes.len());
        let end = (at + 1 + self.below(16)).min(bytes.len());
        match self.below(8) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
            1 if !bytes.is_empty() => bytes[at] = self.random() as u8,
            2 => drop(bytes.drain(at..end)),
            3 => bytes.truncate(at),
            4 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            5 => {
                let from = self.below(other.len());
                let part = other[from..(from + 1 + self.below(64)).min(other.len())].to_vec();
                bytes.splice(at..at, part);
            }
            6 => {
                let width = [1, 2, 4, 8][self.below(4)];
                let edge = EDGES[self.below(EDGES.len())].to_le_bytes();
                let end = (at + width).min(bytes.len());
                bytes.splice(at..end, edge[..width].iter().copied());
            }
            _ => {
                let more = (0..1 + self.below(8)).map(|_| self.random() as u8).collect::<Vec<_>>();
                bytes.splice(at..at, more);
            }
        }
    }
}
