//! Tokens of texts seen before, by chunk: prompts that begin alike are tokenised once, up to where they differ.
//!
//! A text is cut into chunks from its beginning on, so equal beginnings have equal chunks ([`super::cuts`]). A chunk is looked up by all of
//! its bytes, so the tokens are always those of the text.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::Tokenizer;
use crate::ModelFileError;

/// Parts of the cache, each with a lock of its own.
const SHARDS: usize = 16;
/// Longest chunk that is kept, bytes.
const LONGEST: usize = 4 << 10;
/// Bytes that an entry takes beside its text and tokens: two pointers with their lengths, a counter, and its place in the map.
const OVERHEAD: usize = 96;

/// Tokens of chunks of text, of one tokenizer.
#[derive(Debug)]
pub struct TokenCache {
    hasher: RandomState,
    shards: Vec<Mutex<Shard>>,
    /// Bytes of each half of a shard.
    half: usize,
}

/// When the young half is full, it becomes the old one, and what was old and not used since is dropped.
#[derive(Debug, Default)]
struct Shard {
    young: HashMap<Box<[u8]>, Tokens>,
    old: HashMap<Box<[u8]>, Tokens>,
    young_bytes: usize,
}

/// A text of which some chunks have their tokens.
#[derive(Debug)]
pub struct Lookup {
    text: String,
    add_special: bool,
    salt: u64,
    /// Where each chunk is, and its tokens if they were found.
    chunks: Vec<(Range<usize>, Option<Tokens>)>,
}

type Tokens = Arc<[u32]>;

impl Lookup {
    /// Bytes of text whose tokens were not found.
    pub fn missing(&self) -> usize {
        self.chunks.iter().filter(|(_, found)| found.is_none()).map(|(range, _)| range.len()).sum()
    }

    /// Bytes of text whose tokens were found.
    pub fn found(&self) -> usize {
        self.chunks.iter().filter(|(_, found)| found.is_some()).map(|(range, _)| range.len()).sum()
    }
}

impl TokenCache {
    /// A cache of at most about `bytes`; with 0 nothing is kept.
    pub fn new(bytes: u64) -> TokenCache {
        let half = usize::try_from(bytes).unwrap_or(usize::MAX) / SHARDS / 2;
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        TokenCache { hasher: RandomState::new(), shards, half }
    }

    /// Looks up a text that is to be tokenised as by [`Tokenizer::encode`]. Only texts with the same salt share what is kept.
    pub fn look_up(&self, tokenizer: &Tokenizer, text: String, add_special: bool, salt: &str) -> Lookup {
        let salt = self.hasher.hash_one(salt);
        let mut lookup = Lookup { text, add_special, salt, chunks: Vec::new() };
        let mut key = Vec::new();
        let mut begin = 0;
        for range in tokenizer.chunks(&lookup.text) {
            lookup.key(&range, &mut key);
            let found = if self.keeps(range.len()) { self.shard(&key).get(&key, self.half) } else { None };
            begin = range.end;
            lookup.chunks.push((range, found));
        }
        debug_assert_eq!(begin, lookup.text.len(), "chunks reach the text's end");
        lookup
    }

    /// Tokenises what is missing, keeps it, and returns the text's tokens.
    ///
    /// # Errors
    /// The tokenizer refuses the text.
    pub fn complete(&self, tokenizer: &Tokenizer, lookup: Lookup) -> Result<Vec<u32>, ModelFileError> {
        let mut ids = Vec::with_capacity(lookup.text.len() / 4);
        let mut key = Vec::new();
        for (range, found) in &lookup.chunks {
            if let Some(found) = found {
                ids.extend_from_slice(found);
                continue;
            }
            let special = lookup.add_special && range.start == 0;
            let computed = tokenizer.encode_chunk(&lookup.text[range.clone()], special)?;
            if self.keeps(range.len()) {
                lookup.key(range, &mut key);
                self.shard(&key).insert(&key, computed.as_slice().into(), self.half);
            }
            ids.extend(computed);
        }
        Ok(tokenizer.with_special(ids, lookup.add_special))
    }

    fn keeps(&self, length: usize) -> bool {
        self.half > 0 && length <= LONGEST
    }

    fn shard(&self, key: &[u8]) -> MutexGuard<'_, Shard> {
        let shard = self.hasher.hash_one(key) as usize % SHARDS;
        self.shards[shard].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lookup {
    /// What a chunk is kept under: the salt, whether special tokens are before it, and its text.
    fn key(&self, range: &Range<usize>, key: &mut Vec<u8>) {
        key.clear();
        key.extend(self.salt.to_le_bytes());
        key.push(u8::from(self.add_special && range.start == 0));
        key.extend_from_slice(self.text[range.clone()].as_bytes());
    }
}

impl Shard {
    fn get(&mut self, key: &[u8], half: usize) -> Option<Tokens> {
        if let Some(found) = self.young.get(key) {
            return Some(Arc::clone(found));
        }
        let (key, found) = self.old.remove_entry(key)?;
        self.put(key, Arc::clone(&found), half);
        Some(found)
    }

    fn insert(&mut self, key: &[u8], ids: Tokens, half: usize) {
        if !self.young.contains_key(key) {
            self.put(key.into(), ids, half);
        }
    }

    fn put(&mut self, key: Box<[u8]>, ids: Tokens, half: usize) {
        let bytes = OVERHEAD + key.len() + size_of_val(&*ids);
        if self.young_bytes + bytes > half {
            self.old = mem::take(&mut self.young);
            self.young_bytes = 0;
        }
        if bytes <= half {
            self.young_bytes += bytes;
            self.young.insert(key, ids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shard_bytes(shard: &Shard) -> usize {
        let all = shard.young.iter().chain(&shard.old);
        all.map(|(key, ids)| OVERHEAD + key.len() + size_of_val(&**ids)).sum()
    }

    #[test]
    fn a_shard_keeps_what_is_used_and_no_more_than_its_bytes() {
        let (mut shard, half) = (Shard::default(), 1000);
        let ids: Tokens = [1, 2, 3].into();
        shard.insert(b"kept", Arc::clone(&ids), half);
        for round in 0..1000u32 {
            shard.insert(&round.to_le_bytes(), Arc::clone(&ids), half);
            assert!(shard_bytes(&shard) <= 2 * half);
            assert_eq!(shard.get(b"kept", half), Some(Arc::clone(&ids)), "{round}");
        }
        assert!(shard.get(&0u32.to_le_bytes(), half).is_none());
        assert!(shard.get(&999u32.to_le_bytes(), half).is_some());
        let long = vec![0; half];
        shard.insert(&long, ids, half);
        assert!(shard.get(&long, half).is_none(), "it does not fit");
    }
}
