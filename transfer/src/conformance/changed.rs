//! Bytes that change on their way, and writes that are lost or go astray: none is ever taken for what was sent (I2).

use super::*;

for_each_transport![
    a_changed_byte_is_caught,
    a_flipped_bit_is_caught_wherever_it_is,
    a_lost_write_is_caught,
    a_write_outside_the_reservation_is_refused,
    a_write_under_a_wrong_index_is_refused,
    a_copy_to_the_wrong_block_is_caught,
    a_bit_flipped_in_the_target_is_caught,
];

fn a_changed_byte_is_caught(choice: TransportChoice) {
    // I2: the 3rd batch ever takes its second block from one byte further on.
    let shift = |inner| {
        let mut batches = 0;
        let alter = move |batch: &mut Batch| {
            batches += 1;
            if batches == 3 {
                batch.writes[1].source += 1;
            }
        };
        Altered { inner, alter }
    };
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, wrapped(shift));
    let seen = prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap_err();
    let TransferError::Verify { epoch, peer, group, index, block: id, want, got } = decode.expect_failed(1) else {
        panic!("not a verification failure")
    };
    assert_eq!((epoch, peer, group, index, id), (Epoch(1), WorkerId(2), 0, 1, BlockId(1)));
    assert_eq!(seen, TransferError::Verify { epoch, peer, group, index, block: id, want, got });
    decode.expect_fenced(1);
    assert_eq!(decode.receiver.stats().verify_failures, 1);
    // Transfer again, to the same blocks.
    prefill.send(&decode.reserve(2, &first(4)), 8).wait().unwrap();
    decode.expect_verified(2);
}

/// Which bit of which batch is flipped on its way.
#[derive(Default)]
struct Flip {
    pool: std::sync::OnceLock<Arc<Segment>>,
    batches_before: std::sync::atomic::AtomicU64,
    bit: std::sync::atomic::AtomicU64,
}

impl Flip {
    fn at(&self, batch: &Batch) {
        use std::sync::atomic::Ordering::Relaxed;
        if self.batches_before.fetch_sub(1, Relaxed) == 0 {
            let bit = self.bit.load(Relaxed) as usize;
            let run = batch.runs().nth(bit % batch.writes.len()).unwrap();
            let byte = run.source + (bit / 64) % run.len;
            let pool = self.pool.get().unwrap();
            // SAFETY: this session's thread alone uses the block until the handoff has ended.
            unsafe { pool.write(byte, &[pool.read(byte, 1)[0] ^ 1 << (bit % 8)]) };
        }
    }
}

fn a_flipped_bit_is_caught_wherever_it_is(choice: TransportChoice) {
    // I2
    use std::sync::atomic::Ordering::Relaxed;
    let decode = Decode::new(large(), 1);
    let flip = Arc::new(Flip::default());
    let in_wrap = flip.clone();
    let wrap = wrapped(move |inner| {
        let flip = in_wrap.clone();
        // Their digest was taken before.
        Altered { inner, alter: move |batch: &mut Batch| flip.at(batch) }
    });
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    assert!(flip.pool.set(prefill.pool.clone()).is_ok());
    for round in 0..24u64 {
        flip.batches_before.store(round % 8, Relaxed);
        flip.bit.store(round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8, Relaxed);
        let seen = prefill.send(&decode.reserve(1 + round, &first(4)), 0).wait().unwrap_err();
        assert!(matches!(seen, TransferError::Verify { .. }), "round {round}: {seen}");
        decode.expect_failed(1 + round);
        decode.expect_fenced(1 + round);
    }
    assert_eq!(decode.receiver.stats().verify_failures, 24);
    // Transferred again, the same blocks are what they are now.
    flip.batches_before.store(u64::MAX, Relaxed);
    prefill.send(&decode.reserve(99, &first(4)), 0).wait().unwrap();
    decode.expect_verified(99);
}

fn a_lost_write_is_caught(choice: TransportChoice) {
    let lose = |inner| {
        let alter = |batch: &mut Batch| {
            if batch.layer == 5 {
                batch.writes.pop();
            }
        };
        Altered { inner, alter }
    };
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, wrapped(lose));
    let seen = prefill.send(&decode.reserve(1, &first(4)), 0).wait().unwrap_err();
    let error = decode.expect_failed(1);
    assert_eq!(error, TransferError::Incomplete { epoch: Epoch(1), peer: WorkerId(2), written: 31, expected: 32 });
    assert_eq!(seen, error);
    decode.expect_fenced(1);
}

fn a_write_outside_the_reservation_is_refused(choice: TransportChoice) {
    let stray = |inner| {
        let alter = |batch: &mut Batch| {
            batch.writes[0].index = 4000;
            batch.writes[0].target = usize::MAX / 2;
        };
        Altered { inner, alter }
    };
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, wrapped(stray));
    let error = prefill.send(&decode.reserve(1, &first(1)), 0).wait().unwrap_err();
    assert!(matches!(error, TransferError::Refused { .. } | TransferError::Protocol { .. }), "{error}");
    decode.expect_failed(1);
    decode.expect_fenced(1);
    let untouched = pool(&decode.geometry, 1);
    for id in (0..64).map(BlockId) {
        assert!(block(&decode.pool, &decode.geometry, 0, id) == block(&untouched, &decode.geometry, 0, id), "{id}");
    }
}

fn a_write_under_a_wrong_index_is_refused(choice: TransportChoice) {
    let repeat = |inner| {
        let alter = |batch: &mut Batch| batch.writes[1].index = 0;
        Altered { inner, alter }
    };
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, wrapped(repeat));
    let error = prefill.send(&decode.reserve(1, &first(2)), 0).wait().unwrap_err();
    assert!(error.to_string().contains("written twice"), "{error}");
    assert!(decode.expect_failed(1).to_string().contains("written twice"));
    // I3: where the sender writes by itself, only after its word; it may be copying the next layer.
    decode.expect_fenced(1);
    assert_eq!(decode.receiver.stats().reservations, 0);
}

fn a_copy_to_the_wrong_block_is_caught(choice: TransportChoice) {
    if !kind(choice).is_one_sided() {
        // The receiver applies writes itself: the sender has no say in where they go.
        return;
    }
    let stray = |inner| {
        let alter = |batch: &mut Batch| {
            if batch.layer == 7 {
                batch.writes.swap(0, 1);
                let [a, b, ..] = &mut batch.writes[..] else { panic!("two blocks") };
                std::mem::swap(&mut a.target, &mut b.target);
            }
        };
        Altered { inner, alter }
    };
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, wrapped(stray));
    prefill.send(&decode.reserve(1, &first(2)), 0).wait().unwrap_err();
    let error = decode.expect_failed(1);
    assert!(matches!(error, TransferError::Verify { index: 0, .. }), "{error}");
    decode.expect_fenced(1);
}

/// Flips a bit of what the third batch has written, before the peer is told of it. Digests stay the transport's own.
struct Flipping {
    inner: Box<dyn Transport>,
    target: Arc<Segment>,
    batches: usize,
    at: usize,
}

impl Transport for Flipping {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn submit(&mut self, batch: Batch, link: &mut Link) -> Result<(), TransferError> {
        self.batches += 1;
        self.at = batch.runs().last().map_or(0, |run| run.target + run.len - 1);
        self.inner.submit(batch, link)
    }
    fn poll(&mut self, link: &mut Link) -> Result<Progress, TransferError> {
        let progress = self.inner.poll(link)?;
        if self.batches == 3 && progress == Progress::Flushed {
            // SAFETY: the block is lent to this session, whose thread this is.
            unsafe { *self.target.at(self.at, 1).unwrap() ^= 0x10 };
            self.batches += 1;
        }
        Ok(progress)
    }
    fn digests(&self) -> bool {
        self.inner.digests()
    }
    fn take_digests(&mut self) -> Vec<(u32, u64)> {
        self.inner.take_digests()
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }
    fn cancel(&mut self, epoch: Epoch, link: &mut Link) -> Result<(), TransferError> {
        self.inner.cancel(epoch, link)
    }
}

/// What the sender digests is what it read, not what lies in the target.
fn a_bit_flipped_in_the_target_is_caught(choice: TransportChoice) {
    if !kind(choice).is_one_sided() {
        // What has left is not yet in the target.
        return;
    }
    let decode = Decode::new(large(), 1);
    let target = decode.pool.clone();
    let flip = wrapped(move |inner| Flipping { inner, target: target.clone(), batches: 0, at: 0 });
    let prefill = Prefill::faulty(large(), 2, choice, flip);
    prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap_err();
    let error = decode.expect_failed(1);
    assert!(matches!(error, TransferError::Verify { index: 3, block: BlockId(3), .. }), "{error}");
    decode.expect_fenced(1);
}
