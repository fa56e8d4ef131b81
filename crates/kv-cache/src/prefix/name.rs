//! Names of blocks, by which processes speak of prefixes without sending their tokens.

use std::fmt;
use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Name of a block: a hash of its tokens, of all tokens before it, and of the salt under which they are cached. So whoever holds the block
/// with the name of a prompt's n-th block holds n blocks of the prompt.
///
/// SipHash-1-3 with 128 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). A name is for placement and for hints. It never
/// decides alone who gets KV: whoever hands out KV compares tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BlockName(pub u128);

/// Tokens that are hashed together.
const TOGETHER: usize = 16;

/// A secret of a cluster, from which all its names follow: who sees names and has no secret cannot tell whether they are those of a prompt that he
/// guesses. Default: none.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct NameSecret([u64; 2]);

impl NameSecret {
    /// The secret that these bytes are, however many.
    pub fn of(bytes: &[u8]) -> NameSecret {
        let BlockName(hash) = keyed(NameSecret::default(), |hash| hash.write(bytes));
        NameSecret([hash as u64, (hash >> 64) as u64])
    }

    /// What comes before the first block of prompts with this salt. Names of blocks of another size differ, too.
    pub fn root(self, salt: &str, block_size: u32) -> NameChain {
        let name = keyed(self, |hash| {
            hash.write(&block_size.to_le_bytes());
            hash.write(salt.as_bytes());
        });
        NameChain { secret: self, name }
    }

    /// Tells apart processes with unlike secrets, and says nothing of these. 0: there is none.
    pub fn mark(self) -> u64 {
        if self == NameSecret::default() { 0 } else { self.root("mark", 0).name().short() | 1 }
    }
}

impl fmt::Debug for NameSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == NameSecret::default() { "none" } else { "…" })
    }
}

impl BlockName {
    /// What comes before the first block of prompts with this salt, where there is no secret.
    pub fn root(salt: &str, block_size: u32) -> NameChain {
        NameSecret::default().root(salt, block_size)
    }

    /// Half of the name, where a wrong guess costs little.
    pub fn short(self) -> u64 {
        self.0 as u64
    }
}

/// A place in the names of a prompt's blocks: what the next name follows from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NameChain {
    secret: NameSecret,
    name: BlockName,
}

impl NameChain {
    /// The name of the last block, or what comes before the first one.
    pub fn name(self) -> BlockName {
        self.name
    }

    /// The place after the block with this name, of a prompt that begins where this does.
    #[must_use]
    pub fn after(self, name: BlockName) -> NameChain {
        NameChain { name, ..self }
    }

    /// The place after the next block, which has these tokens.
    #[must_use]
    pub fn then(self, tokens: &[u32]) -> NameChain {
        let name = keyed(self.secret, |hash| {
            hash.write(&self.name.0.to_le_bytes());
            // What is written together is hashed faster, to the same name.
            for tokens in tokens.chunks(TOGETHER) {
                let mut bytes = [0; 4 * TOGETHER];
                let words = bytes.as_chunks_mut::<4>().0;
                words.iter_mut().zip(tokens).for_each(|(word, token)| *word = token.to_le_bytes());
                hash.write(&bytes[..4 * tokens.len()]);
            }
        });
        NameChain { name, ..self }
    }

    /// The names of the full blocks of `tokens`, which follow here.
    pub fn chain(self, tokens: &[u32], block_size: u32) -> impl Iterator<Item = BlockName> {
        tokens.chunks_exact(block_size as usize).scan(self, |at, block| {
            *at = at.then(block);
            Some(at.name)
        })
    }
}

/// A hash under this secret, and under a key that everybody knows.
fn keyed(NameSecret([first, second]): NameSecret, write: impl FnOnce(&mut SipHasher13)) -> BlockName {
    let mut hash = SipHasher13::new_with_keys(0x6261_746f_6e20_6b76 ^ first, 0x626c_6f63_6b20_3031 ^ second);
    write(&mut hash);
    BlockName(hash.finish128().as_u128())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_named_by_all_before_it_and_by_its_salt() {
        let names = |salt, tokens: &[u32]| BlockName::root(salt, 3).chain(tokens, 3).collect::<Vec<_>>();
        let base = names("", &[1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(base.len(), 2, "full blocks only");
        assert_eq!(base[..1], names("", &[1, 2, 3, 9, 9, 9])[..1]);
        assert_ne!(base[1], names("", &[1, 2, 3, 9, 9, 9])[1]);
        assert_ne!(base[1], names("", &[9, 2, 3, 4, 5, 6])[1]);
        assert_ne!(base, names("a", &[1, 2, 3, 4, 5, 6]));
        assert_ne!(BlockName::root("", 3), BlockName::root("", 16));
        assert_eq!(base[1], BlockName::root("", 3).after(base[0]).then(&[4, 5, 6]).name(), "a chain can be continued");
    }

    /// Processes of different versions speak of the same blocks, so names never change.
    #[test]
    fn names_are_the_same_in_every_version() {
        let name = BlockName::root("tenant", 4).then(&[1, 2, 3, 4]).name();
        assert_eq!(format!("{:032x}", name.0), "cb6ea57f4a5059f1b1c26d7ca168ca3a");
        let name = NameSecret::of(b"a secret").root("tenant", 4).then(&[1, 2, 3, 4]).name();
        assert_eq!(format!("{:032x}", name.0), "05ea80d0004909b2fad12cbdbbbcadf5");
    }

    #[test]
    fn a_name_does_not_depend_on_what_is_hashed_together() {
        let root = BlockName::root("tenant", 16);
        for size in [0, 1, 15, 16, 17, 48, 50] {
            let tokens: Vec<u32> = (0..size).map(|at| at * 0x0101_0101).collect();
            let one_by_one = keyed(NameSecret::default(), |hash| {
                hash.write(&root.name().0.to_le_bytes());
                tokens.iter().for_each(|token| hash.write(&token.to_le_bytes()));
            });
            assert_eq!(root.then(&tokens).name(), one_by_one, "{size} tokens");
        }
    }

    #[test]
    fn clusters_of_unlike_secrets_have_no_name_in_common() {
        let secrets = [NameSecret::default(), NameSecret::of(b"one"), NameSecret::of(b"two"), NameSecret::of(b"")];
        let names = secrets.map(|secret| secret.root("", 3).then(&[1, 2, 3]).name());
        let next = secrets.map(|secret| secret.root("", 3).after(names[0]).then(&[4, 5, 6]).name());
        let marks = secrets.map(NameSecret::mark);
        for (one, other) in (0..4).flat_map(|one| (0..one).map(move |other| (one, other))) {
            assert_ne!(names[one], names[other]);
            assert_ne!(next[one], next[other], "who knows the name before cannot tell the next one");
            assert_ne!(marks[one], marks[other]);
        }
        assert_eq!((marks[0], NameSecret::of(b"one")), (0, secrets[1]));
        assert_eq!(format!("{:?} {:?}", secrets[0], secrets[1]), "none …");
    }
}
