//! KV that changes its type on the way: the prefill pool may hold f16 and the decode pool q8.
//!
//! The prefill side converts a batch into memory of its own, in the decode pool's type, and sends that, digests and all: the
//! decode side sees nothing but its own type. How types round is the kernels' business, so the node hands in a function.

use std::fmt;
use std::sync::Arc;

use baton_types::{KvDtype, KvLayout};

use crate::device::{Pool, Staged};
use crate::transport::Batch;

/// One layer of one block, all planes and heads of it, to be written in another type.
#[derive(Debug)]
pub struct Conversion<'a> {
    /// Type of `source`.
    pub from: KvDtype,
    /// Type of `target`.
    pub to: KvDtype,
    /// Slots of a slice.
    pub block_size: usize,
    /// Elements of a row.
    pub head_dim: usize,
    /// Slices as they lie in a pool of type `from`, [`KvLayout::head_bytes`] each. Slots without a token hold anything.
    pub source: &'a [u8],
    /// As many slices of type `to`; all of it is to be written.
    pub target: &'a mut [u8],
}

/// Converts between any two types. What it writes must be what storing the same values, as `source` holds them, would give
/// in a pool of the target's type (I1).
#[derive(Clone)]
pub struct Converter(Arc<dyn Fn(Conversion<'_>) + Send + Sync>);

impl Converter {
    /// By this function. Called on a session's thread; must not block.
    pub fn new(convert: impl Fn(Conversion<'_>) + Send + Sync + 'static) -> Converter {
        Converter(Arc::new(convert))
    }

    /// Turns a batch of the pool, or one that is staged as the pool has it, into one that is staged in the type of `target`. None when it
    /// lies outside.
    pub(crate) fn stage(&self, mut batch: Batch, pool: &Pool, source: &KvLayout, target: &KvLayout) -> Option<Batch> {
        // I5: as many batches are staged as are under way; this is a batch's bytes, or one block's.
        let mut staged = vec![0; batch.bytes()];
        let (from, to) = (batch.source_len, batch.len);
        for (write, out) in batch.writes.iter().zip(staged.chunks_exact_mut(to.max(1))) {
            let start = batch.at(pool, write.source, from)?;
            // SAFETY: inside the memory it is sent from; a local block stays unchanged until the handoff's end is reported.
            let bytes = unsafe { std::slice::from_raw_parts(start, from) };
            (self.0)(Conversion {
                from: source.dtype,
                to: target.dtype,
                block_size: target.block_size as usize,
                head_dim: target.groups[batch.group].head_dim as usize,
                source: bytes,
                target: out,
            });
        }
        batch.stand_in(Staged::new(staged), to);
        Some(batch)
    }
}

impl fmt::Debug for Converter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Converter")
    }
}
