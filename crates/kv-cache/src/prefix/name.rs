//! Names of blocks, by which processes speak of prefixes without sending their tokens.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher13};

/// Name of a block: a hash of its tokens, of all tokens before it, and of the salt under which they are cached. So whoever holds the block
/// with the name of a prompt's n-th block holds n blocks of the prompt.
///
/// SipHash-1-3 with 128 bits (Aumasson and Bernstein, "SipHash: a fast short-input PRF", 2012). A name is for placement and for hints. It never
/// decides alone who gets KV: whoever hands out KV compares tokens.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct BlockName(pub u128);

impl BlockName {
    /// What comes before the first block of prompts with this salt. Names of blocks of another size differ, too.
    pub fn root(salt: &str, block_size: u32) -> BlockName {
        BlockName::of(|hash| {
            hash.write(&block_size.to_le_bytes());
            hash.write(salt.as_bytes());
        })
    }

    /// The name of the block of these tokens that follows this one.
    #[must_use]
    pub fn then(self, tokens: &[u32]) -> BlockName {
        BlockName::of(|hash| {
            hash.write(&self.0.to_le_bytes());
            tokens.iter().for_each(|token| hash.write(&token.to_le_bytes()));
        })
    }

    /// The names of the full blocks of `tokens`, which follow this one.
    pub fn chain(self, tokens: &[u32], block_size: u32) -> impl Iterator<Item = BlockName> {
        tokens.chunks_exact(block_size as usize).scan(self, |name, block| {
            *name = name.then(block);
            Some(*name)
        })
    }

    /// Half of the name, where a wrong guess costs little.
    pub fn short(self) -> u64 {
        self.0 as u64
    }

    fn of(write: impl FnOnce(&mut SipHasher13)) -> BlockName {
        let mut hash = SipHasher13::new_with_keys(0x6261_746f_6e20_6b76, 0x626c_6f63_6b20_3031);
        write(&mut hash);
        BlockName(hash.finish128().as_u128())
    }
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
        assert_eq!(base[1], base[0].then(&[4, 5, 6]), "a chain can be continued");
    }

    /// Processes of different versions speak of the same blocks, so names never change.
    #[test]
    fn names_are_the_same_in_every_version() {
        let name = BlockName::root("tenant", 4).then(&[1, 2, 3, 4]);
        assert_eq!(format!("{:032x}", name.0), "cb6ea57f4a5059f1b1c26d7ca168ca3a");
    }
}
