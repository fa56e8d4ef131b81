//! A worker's pool as the state machines of both ends see it: they ask for digests, and for nothing else.
//!
//! They ask only for bytes that nobody writes to at that time:
//! - at the decode end, block layers that have arrived and must not be written again;
//! - at the prefill end, blocks of a handoff whose outcome is not reported yet.
//!
//! Implementations over memory that others write to rely on this.

use baton_types::digest_block;

use crate::error::TransferError;

/// A pool that can digest its bytes.
pub trait PoolMemory {
    /// Digests `parts` of the pool with [`baton_types::digest_block`]. A part is (offset in bytes, first lane) and is `len` bytes long. The
    /// digests must be of the bytes that really are in the pool (I2).
    ///
    /// # Errors
    /// When a part lies outside the pool, or the pool's device fails.
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError>;
}

/// A pool that nobody else can write to, for simulations and tests.
impl PoolMemory for Vec<u8> {
    fn digests(&mut self, parts: &[(usize, u64)], len: usize) -> Result<Vec<u64>, TransferError> {
        let part = |&(offset, lane): &(usize, u64)| Some(digest_block(self.get(offset..)?.get(..len)?, lane));
        let outside = || TransferError::argument("blocks", "they lie outside the pool");
        parts.iter().map(part).collect::<Option<_>>().ok_or_else(outside)
    }
}
