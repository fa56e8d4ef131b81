//! KV that changes its type on the way: for example, the prefill pool holds f16 and the decode pool q8.
//!
//! The prefill side converts a batch into memory of its own, in the decode pool's type. It sends and digests that, so the decode side
//! sees only its own type. How types round is up to the kernels, so the node passes in the function that converts.
//! - In host memory, [`Converting`] converts a batch; it wraps another transport.
//! - In a device's memory, `staging` converts a batch once it is read.

use std::collections::VecDeque;
use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use baton_handoff::{TransferError, TransportKind};
use baton_types::{Epoch, KvDtype, KvLayout};

use crate::device::{Pool, Staged};
use crate::links::Links;
use crate::load::Load;
use crate::transport::{Digests, Progress, Transport};

/// One layer of one block, with all its planes and heads, to be written in another type.
#[derive(Debug)]
pub struct Conversion<'a> {
    /// Type of `source`.
    pub from: KvDtype,
    /// Type of `target`.
    pub to: KvDtype,
    /// Token slots in a slice.
    pub block_size: usize,
    /// Elements of a row.
    pub head_dim: usize,
    /// Slices as they lie in a pool of type `from`, [`KvLayout::head_bytes`] bytes each. Slots without a token hold arbitrary bytes.
    pub source: &'a [u8],
    /// As many slices of type `to`. All of it must be written.
    pub target: &'a mut [u8],
}

/// Converts between any two types. Its output must equal what a pool of the target type would hold if the values of `source` were
/// stored in it (I1).
#[derive(Clone)]
pub struct Converter(Arc<dyn Fn(Conversion<'_>) + Send + Sync>);

impl Converter {
    /// Converts by the function `convert`, which is called on a session's thread and must not block.
    pub fn new(convert: impl Fn(Conversion<'_>) + Send + Sync + 'static) -> Converter {
        Converter(Arc::new(convert))
    }
}

impl fmt::Debug for Converter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Converter")
    }
}

/// How to convert KV from one layout's type to another's.
pub(crate) struct Conversions {
    pub converter: Converter,
    pub from: KvLayout,
    pub to: KvLayout,
}

impl Conversions {
    /// Turns a batch, in the pool or staged in the pool's type, into one that is staged in the other type. None when it lies outside its
    /// memory.
    pub(crate) fn stage(&self, mut load: Load, pool: &Pool) -> Option<Load> {
        let Conversions { converter, from, to } = self;
        // I5: only batches under way are staged. Each takes a batch's bytes, or those of one block if that is larger.
        let mut staged = vec![0; load.batch.bytes()];
        let (source_len, len) = (load.batch.source_len, load.batch.len);
        for (write, out) in load.batch.writes.iter().zip(staged.chunks_exact_mut(len.max(1))) {
            let start = load.at(pool, write.source, source_len)?;
            // SAFETY: inside the memory the batch is sent from; a local block stays unchanged until the handoff's end is reported.
            let bytes = unsafe { std::slice::from_raw_parts(start, source_len) };
            (converter.0)(Conversion {
                from: from.dtype,
                to: to.dtype,
                block_size: to.block_size as usize,
                head_dim: to.groups[load.batch.group].head_dim as usize,
                source: bytes,
                target: out,
            });
        }
        load.stand_in(Staged::new(staged), len);
        Some(load)
    }
}

/// Converts batches of a pool in host memory and passes them to the inner transport.
pub(crate) struct Converting {
    inner: Box<dyn Transport>,
    pool: Pool,
    conversions: Conversions,
    /// Batches at the inner transport: the handoff's epoch, and the digests if the inner transport makes none.
    sent: VecDeque<(Epoch, Option<Digests>)>,
    digests: Digests,
}

impl Converting {
    /// Around an inner transport that sends host memory.
    pub(crate) fn new(pool: Pool, inner: Box<dyn Transport>, conversions: Conversions) -> Converting {
        Converting { inner, pool, conversions, sent: VecDeque::new(), digests: Vec::new() }
    }
}

impl Transport for Converting {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }

    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn submit(&mut self, load: Load, links: &mut Links) -> Result<(), TransferError> {
        let load = self.conversions.stage(load, &self.pool);
        let load = load.ok_or_else(|| TransferError::argument("block", "it lies outside the pool"))?;
        let own = load.batch.digest && !self.inner.digests();
        self.sent.push_back((load.batch.epoch, own.then(|| load.digests(&self.pool).collect())));
        self.inner.submit(load, links)
    }

    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        let progress = self.inner.poll(links)?;
        if progress == Progress::Flushed
            && let Some((_, own)) = self.sent.pop_front()
        {
            self.digests = own.unwrap_or_else(|| self.inner.take_digests());
        }
        Ok(progress)
    }

    fn digests(&self) -> bool {
        true
    }

    fn take_digests(&mut self) -> Digests {
        std::mem::take(&mut self.digests)
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }

    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError> {
        self.sent.retain(|(of, _)| *of != epoch);
        self.inner.cancel(epoch, links)
    }
}
