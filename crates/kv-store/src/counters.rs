//! What a store has done so far.

use crate::{Decline, Miss, Reason, Tier};

/// Counters since the store began. Arrays are by [`Tier`] (`Tier::ALL`), [`Miss`], [`Decline`] and [`Reason`], in their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Tokens handed out, by tier.
    pub hit_tokens: [u64; Tier::ALL.len()],
    /// Bytes of data handed out, by tier.
    pub hit_bytes: [u64; Tier::ALL.len()],
    /// Gets without a block.
    pub missed: [u64; Miss::ALL.len()],
    /// Puts that were not taken.
    pub declined: [u64; Decline::ALL.len()],
    /// Blocks whose bytes or head were not those that were stored, by tier (I2); of the disk's also those found at the beginning.
    pub verify_failures: [u64; Tier::ALL.len()],
    /// Reads, writes and scans of the disk that failed.
    pub disk_errors: u64,
    /// Calls of the object store that failed.
    pub object_errors: u64,
    /// Bytes uploaded to the object store.
    pub uploaded_bytes: u64,
    /// Bytes read from disk and from the object store.
    pub read_bytes: u64,
    /// Bytes written to disk, by reason. Their sum over those demoted is the write amplification.
    pub written_bytes: [u64; Reason::ALL.len()],
    /// Blocks evicted, by tier.
    pub evicted: [u64; Tier::ALL.len()],
    /// Blocks that left host memory and were not worth a write.
    pub not_admitted: u64,
    /// Blocks that left host memory and would have been written, but writes were too slow.
    pub overrun: u64,
    /// Blocks found on disk and in the object store at the beginning.
    pub recovered: u64,
    /// Records found then that were replaced by others, of an earlier life of their segment, or of another identity.
    pub outdated: u64,
    /// Heads found then that were damaged. They count as verify failures of the disk, too.
    pub damaged_heads: u64,
}

impl Counters {
    /// Bytes written to disk for each byte that came down from host memory; 1 before anything was written.
    pub fn write_amplification(&self) -> f64 {
        let [demoted, moved] = self.written_bytes;
        if demoted == 0 { 1.0 } else { (demoted + moved) as f64 / demoted as f64 }
    }
}
