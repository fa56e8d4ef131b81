//! A record: a block on disk. Its head says what the data are; the data follow at the next multiple of [`crate::ALIGNMENT`].
//!
//! Little-endian. All records of a store are of one length, so each head is found without its neighbours.
//!
//! | offset | bytes | |
//! | --- | --- | --- |
//! | 0 | 8 | magic |
//! | 8 | 4 | version |
//! | 12 | 4 | groups |
//! | 16 | 8 | layout fingerprint |
//! | 24 | 8 | numerics |
//! | 32 | 8 | generation of the segment |
//! | 40 | 4 | segment |
//! | 44 | 4 | place in the segment |
//! | 48 | 16 | name |
//! | 64 | 16 | name of the block before it |
//! | 80 | 4 | number of tokens |
//! | 84 | 4 | number of digests |
//! | 88 | 8 | bytes of the data |
//! | 96 | 4 each | tokens |
//! | | 8 each | digests, by group and layer |
//! | | 8 | checksum of all before it |

use std::sync::Arc;

use baton_kv_cache::BlockName;
use baton_types::hash_bytes;

use crate::{Block, BlockKey, Identity, Place, Shape};

const MAGIC: [u8; 8] = *b"baton-kv";
/// Version of the format.
pub(crate) const VERSION: u32 = 1;
/// Bytes before the tokens.
const FIXED: usize = 96;
/// Seed of the checksum.
const SEED: u64 = 0x6b76_2068_6561_6401;

/// Why a record is not the block that was wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Mismatch {
    /// Nothing was ever written there.
    #[error("nothing is written there")]
    Blank,
    /// The head is torn or changed.
    #[error("the head is damaged")]
    Head,
    /// Written by a version that is not understood.
    #[error("the head has version {0}; this process reads {VERSION}")]
    Version(u32),
    /// KV of another model, layout or numerics.
    #[error("the KV is of another model, layout or numerics")]
    Identity,
    /// Another record, or another life of the segment.
    #[error("the record belongs elsewhere")]
    Place,
    /// Another block.
    #[error("the block has another name")]
    Name,
    /// Other tokens under the same name.
    #[error("the block has other tokens under the same name")]
    Tokens,
    /// A layer group that is wanted is not there.
    #[error("the block lacks a layer group")]
    Groups,
    /// The data are not those the digest was made of.
    #[error("the data of layer {layer} of group {group} do not match their digest")]
    Digest {
        /// Layer group.
        group: usize,
        /// Layer's index inside its group.
        layer: usize,
    },
}

/// What a read must find.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Expect {
    /// Whose KV.
    pub identity: Identity,
    /// Where.
    pub place: Place,
    /// Which block.
    pub name: BlockName,
}

/// The head of a record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Head {
    /// Whose KV.
    pub identity: Identity,
    /// Where it was written.
    pub place: Place,
    /// The block.
    pub block: Block,
}

/// Bytes of a head with so many tokens and digests.
pub(crate) fn head_bytes(tokens: usize, digests: usize) -> usize {
    FIXED + 4 * tokens + 8 * digests + 8
}

impl Head {
    /// The head's bytes, [`Shape::head_bytes`] of them.
    pub fn encode(&self, shape: &Shape) -> Vec<u8> {
        let (key, digests) = (&self.block.key, &self.block.digests);
        let mut out = Vec::with_capacity(shape.head_bytes());
        out.extend_from_slice(&MAGIC);
        [VERSION, key.groups].iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
        let longs = [self.identity.layout, self.identity.numerics, self.place.generation];
        longs.iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
        [self.place.segment, self.place.index].iter().for_each(|value| out.extend_from_slice(&value.to_le_bytes()));
        [key.name, key.parent].iter().for_each(|name| out.extend_from_slice(&name.0.to_le_bytes()));
        let counts = [key.tokens.len(), digests.len()];
        counts.iter().for_each(|count| out.extend_from_slice(&(*count as u32).to_le_bytes()));
        out.extend_from_slice(&(shape.data_bytes() as u64).to_le_bytes());
        key.tokens.iter().for_each(|token| out.extend_from_slice(&token.to_le_bytes()));
        digests.iter().for_each(|digest| out.extend_from_slice(&digest.to_le_bytes()));
        out.extend_from_slice(&hash_bytes(SEED, &out).to_le_bytes());
        out.resize(shape.head_bytes(), 0);
        out
    }

    /// Reads a head. Nothing in it is believed before its checksum is right.
    pub fn parse(shape: &Shape, bytes: &[u8]) -> Result<Head, Mismatch> {
        let mut fields = Fields(bytes);
        let magic: [u8; 8] = fields.take()?;
        if magic == [0; 8] {
            return Err(Mismatch::Blank);
        }
        if magic != MAGIC {
            return Err(Mismatch::Head);
        }
        let (version, groups) = (fields.u32()?, fields.u32()?);
        if version != VERSION {
            return Err(Mismatch::Version(version));
        }
        let identity = Identity { layout: fields.u64()?, numerics: fields.u64()? };
        let generation = fields.u64()?;
        let place = Place { segment: fields.u32()?, index: fields.u32()?, generation };
        let (name, parent) =
            (BlockName(u128::from_le_bytes(fields.take()?)), BlockName(u128::from_le_bytes(fields.take()?)));
        let (tokens, digests, data) = (fields.u32()? as usize, fields.u32()? as usize, fields.u64()?);
        let checked =
            tokens.checked_mul(4).zip(digests.checked_mul(8)).and_then(|(a, b)| FIXED.checked_add(a)?.checked_add(b));
        let checked = checked.and_then(|end| bytes.get(..end)).ok_or(Mismatch::Head)?;
        let tokens: Arc<[u32]> = (0..tokens).map(|_| fields.u32()).collect::<Result<_, _>>()?;
        let digests: Arc<[u64]> = (0..digests).map(|_| fields.u64()).collect::<Result<_, _>>()?;
        if fields.u64()? != hash_bytes(SEED, checked) {
            return Err(Mismatch::Head);
        }
        let fits = tokens.len() == shape.block_size() as usize && groups & !shape.all_groups() == 0;
        if !fits || digests.len() != shape.parts(groups).count() || data != shape.data_bytes() as u64 {
            return Err(Mismatch::Identity);
        }
        Ok(Head { identity, place, block: Block { key: BlockKey { name, parent, tokens, groups }, digests } })
    }
}

/// The block in a record's bytes, once it is verified (I2): head, identity, place, name, and the digest of each part. Its tokens are compared by
/// [`Store::feed`](crate::Store::feed) with those that each reader wants.
pub fn check_record(shape: &Shape, bytes: &[u8], expect: &Expect) -> Result<Block, Mismatch> {
    let (head, data) = bytes.split_at_checked(shape.head_bytes()).ok_or(Mismatch::Head)?;
    let data = data.get(..shape.data_bytes()).ok_or(Mismatch::Head)?;
    let head = Head::parse(shape, head)?;
    if head.identity != expect.identity {
        return Err(Mismatch::Identity);
    }
    if head.place != expect.place {
        return Err(Mismatch::Place);
    }
    if head.block.key.name != expect.name {
        return Err(Mismatch::Name);
    }
    shape.verify(&head.block, data)?;
    Ok(head.block)
}

struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Mismatch> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or(Mismatch::Head)?;
        self.0 = rest;
        Ok(*first)
    }

    fn u32(&mut self) -> Result<u32, Mismatch> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Mismatch> {
        self.take().map(u64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use baton_types::testing::Random;

    use super::*;
    use crate::testing::{block, data, shape};

    fn record() -> (Shape, Vec<u8>, Expect) {
        let (shape, place) = (shape(), Place { segment: 3, index: 1, generation: 9 });
        let (block, identity) = (block(&shape, 5), Identity { layout: 1, numerics: 2 });
        let expect = Expect { identity, place, name: block.key.name };
        let mut bytes = Head { identity, place, block }.encode(&shape);
        bytes.extend(data(&shape, 5));
        bytes.resize(shape.stride(), 0);
        (shape, bytes, expect)
    }

    #[test]
    fn a_record_is_read_as_it_was_written() {
        let (shape, bytes, expect) = record();
        assert_eq!(check_record(&shape, &bytes, &expect), Ok(block(&shape, 5)));
        assert_eq!(Head::parse(&shape, &[0; 4096]), Err(Mismatch::Blank));
    }

    #[test]
    fn no_flipped_bit_goes_unnoticed() {
        let (shape, bytes, expect) = record();
        let used = head_bytes(shape.block_size() as usize, block(&shape, 5).digests.len());
        for at in (0..used).chain(shape.head_bytes()..shape.head_bytes() + shape.data_bytes()) {
            for bit in [0, 3, 7] {
                let mut flipped = bytes.clone();
                flipped[at] ^= 1 << bit;
                assert!(check_record(&shape, &flipped, &expect).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn what_is_not_a_head_is_refused() {
        let (shape, bytes, _) = record();
        let mut random = Random(1);
        for length in 0..bytes.len().min(shape.head_bytes()) {
            let _ = Head::parse(&shape, &bytes[..length]);
        }
        for _ in 0..2000 {
            let mut noise = random.bytes(4096);
            noise[..12].copy_from_slice(&bytes[..12]);
            assert!(Head::parse(&shape, &noise).is_err());
        }
    }

    #[test]
    fn each_part_of_what_was_expected_is_compared() {
        let (shape, bytes, expect) = record();
        let found = |expect: Expect| check_record(&shape, &bytes, &expect).unwrap_err();
        assert_eq!(
            found(Expect { identity: Identity { layout: 1, numerics: 3 }, ..expect.clone() }),
            Mismatch::Identity
        );
        assert_eq!(found(Expect { place: Place { generation: 8, ..expect.place }, ..expect.clone() }), Mismatch::Place);
        assert_eq!(found(Expect { name: BlockName(1), ..expect.clone() }), Mismatch::Name);
    }
}
