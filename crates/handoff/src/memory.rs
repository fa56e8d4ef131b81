//! A worker's pool, as the two ends' state machines reach it: they ask for digests, and for nothing else.
//!
//! What they ask for is what nobody writes to at that time: at the decode end blocks whose layer has arrived and is not to be written
//! again; at the prefill end blocks of a handoff whose end is not reported. Whoever implements this over memory that others write to
//! relies on that.

use baton_types::digest_block;

use crate::error::TransferError;

/// A pool's bytes.
pub trait PoolMemory {
    /// The values of [`baton_types::digest_block`] of parts of `len` bytes each, as (offset, first lane), of what really is in the pool
    /// (I2).
    ///
    /// # Errors
    /// When a part lies outside, or the pool's device fails.
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError>;
}

/// Bytes that nobody else has: the pool of a simulation or a test.
impl PoolMemory for Vec<u8> {
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError> {
        let part = |&(offset, lane): &(usize, u64)| Some(digest_block(self.get(offset..)?.get(..len)?, lane));
        let outside = || TransferError::argument("blocks", "they lie outside the pool");
        parts.iter().map(part).collect::<Option<_>>().ok_or_else(outside)
    }
}
