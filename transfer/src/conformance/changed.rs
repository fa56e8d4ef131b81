//! Bytes that change on their way, and writes that are lost or go astray. None is ever taken for what was sent (I2).

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

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

/// Whether the transport itself digests what it sends.
fn digests_what_it_reads(choice: TransportChoice) -> bool {
    match kind(choice) {
        TransportKind::Shm | TransportKind::CudaIpc => true,
        TransportKind::Ucx => devices().prefill,
        TransportKind::Tcp => false,
    }
}

/// Flips a bit on its way.
struct Flip {
    choice: TransportChoice,
    /// Whether to flip it in the target pool, else in the source pool.
    there: bool,
    source: OnceLock<Pool>,
    target: Pool,
    /// Number of batches that pass unchanged first.
    after: AtomicU64,
    bit: AtomicU64,
}

impl Flip {
    fn new(choice: TransportChoice, decode: &Decode) -> Arc<Flip> {
        let (source, target) = (OnceLock::new(), decode.pool.clone());
        let there = digests_what_it_reads(choice);
        Arc::new(Flip { choice, there, source, target, after: AtomicU64::new(u64::MAX), bit: AtomicU64::new(0) })
    }

    /// A sender whose batches it hits.
    fn prefill(self: &Arc<Flip>) -> Prefill {
        let flip = self.clone();
        let wrap = match self.there {
            // The transport digests what it reads, so the bit flips in what it has written.
            true => after_each(move |_, batch| flip.at(batch)),
            // The digest was made before, so the bit flips in what is to be sent.
            false => before_each(move || {
                let flip = flip.clone();
                move |_: usize, batch: &mut WriteBatch, _: &mut Link| flip.at(batch)
            }),
        };
        let prefill = Prefill::faulty(large(), 2, self.choice, wrap);
        assert!(self.source.set(prefill.pool.clone()).is_ok());
        prefill
    }

    /// Flips the bit `bit` after `after` further batches.
    fn arm(&self, after: u64, bit: u64) {
        self.bit.store(bit, Relaxed);
        self.after.store(after, Relaxed);
    }

    fn at(&self, batch: &WriteBatch) {
        if self.after.fetch_sub(1, Relaxed) == 0 {
            let bit = self.bit.load(Relaxed) as usize;
            let run = batch.runs().nth(bit % batch.writes.len()).unwrap();
            let (pool, start) = match self.there {
                true => (&self.target, run.target),
                false => (self.source.get().unwrap(), run.source),
            };
            let byte = start + (bit / 64) % run.len;
            // This is the session's thread. The block is lent to it, or is its own until the handoff has ended.
            write(pool, byte, &[read(pool, &[(byte, 1)])[0] ^ 1 << (bit % 8)]);
        }
    }
}

/// Whether flipping the source has no effect: over TCP, a device's blocks are digested and sent from a copy.
fn leaves_as_a_copy(choice: TransportChoice) -> bool {
    devices().prefill && choice == TransportChoice::Tcp
}

fn a_changed_byte_is_caught(choice: TransportChoice) {
    if leaves_as_a_copy(choice) {
        return;
    }
    // I2: the bit is in the second block of the third batch.
    let decode = Decode::new(large(), 1);
    let flip = Flip::new(choice, &decode);
    let prefill = flip.prefill();
    flip.arm(2, 1);
    let seen = prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap_err();
    let TransferError::Verify { epoch, peer, group, index, block: id, want, got } = decode.expect_failed(1) else {
        panic!("not a verification failure")
    };
    assert_eq!((epoch, peer, group, index, id), (Epoch(1), WorkerId(2), 0, 1, BlockId(1)));
    assert_eq!(seen, TransferError::Verify { epoch, peer, group, index, block: id, want, got });
    decode.expect_fenced(1);
    assert_eq!(decode.receiver.stats().verify_failures, 1);
    // The transfer is made again, to the same blocks.
    prefill.send(&decode.reserve(2, &first(4)), 8).wait().unwrap();
    decode.expect_verified(2);
}

fn a_flipped_bit_is_caught_wherever_it_is(choice: TransportChoice) {
    if leaves_as_a_copy(choice) {
        return;
    }
    // I2
    let decode = Decode::new(large(), 1);
    let flip = Flip::new(choice, &decode);
    let prefill = flip.prefill();
    // After three failures handoffs would go over TCP, where this flips nothing.
    let rounds: u64 = if flip.there && choice == TransportChoice::Ucx { 3 } else { 24 };
    for round in 0..rounds {
        flip.arm(round % 8, round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 8);
        let seen = prefill.send(&decode.reserve(1 + round, &first(4)), 0).wait().unwrap_err();
        assert!(matches!(seen, TransferError::Verify { .. }), "round {round}: {seen}");
        decode.expect_failed(1 + round);
        decode.expect_fenced(1 + round);
    }
    assert_eq!(decode.receiver.stats().verify_failures, rounds);
    // A further transfer carries the blocks as they are now.
    flip.arm(u64::MAX, 0);
    prefill.send(&decode.reserve(99, &first(4)), 0).wait().unwrap();
    decode.expect_verified(99);
}

fn a_lost_write_is_caught(choice: TransportChoice) {
    let lose = altered(|batch| {
        if batch.layer == 5 {
            batch.writes.pop();
        }
    });
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, lose);
    let seen = prefill.send(&decode.reserve(1, &first(4)), 0).wait().unwrap_err();
    let error = decode.expect_failed(1);
    assert_eq!(error, TransferError::Incomplete { epoch: Epoch(1), peer: WorkerId(2), written: 31, expected: 32 });
    assert_eq!(seen, error);
    decode.expect_fenced(1);
}

fn a_write_outside_the_reservation_is_refused(choice: TransportChoice) {
    let stray = altered(|batch| {
        batch.writes[0].index = 4000;
        batch.writes[0].target = usize::MAX / 2;
    });
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, stray);
    let error = prefill.send(&decode.reserve(1, &first(1)), 0).wait().unwrap_err();
    assert!(matches!(error, TransferError::Refused { .. } | TransferError::Protocol { .. }), "{error}");
    decode.expect_failed(1);
    decode.expect_fenced(1);
    let untouched = pool(&decode.geometry, 1).into();
    for id in (0..64).map(BlockId) {
        assert!(block(&decode.pool, &decode.geometry, 0, id) == block(&untouched, &decode.geometry, 0, id), "{id}");
    }
}

fn a_write_under_a_wrong_index_is_refused(choice: TransportChoice) {
    let repeat = altered(|batch| batch.writes[1].index = 0);
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, repeat);
    let error = prefill.send(&decode.reserve(1, &first(2)), 0).wait().unwrap_err();
    assert!(error.to_string().contains("written twice"), "{error}");
    assert!(decode.expect_failed(1).to_string().contains("written twice"));
    // I3: a one-sided sender may still be copying the next layer, so the blocks come back only after its acknowledgement.
    decode.expect_fenced(1);
    assert_eq!(decode.receiver.stats().reservations, 0);
}

fn a_copy_to_the_wrong_block_is_caught(choice: TransportChoice) {
    if !kind(choice).is_one_sided() {
        // The receiver applies writes itself: the sender has no say in where they go.
        return;
    }
    let stray = altered(|batch| {
        if batch.layer == 7 {
            batch.writes.swap(0, 1);
            let [a, b, ..] = &mut batch.writes[..] else { panic!("two blocks") };
            std::mem::swap(&mut a.target, &mut b.target);
        }
    });
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, stray);
    prefill.send(&decode.reserve(1, &first(2)), 0).wait().unwrap_err();
    let error = decode.expect_failed(1);
    assert!(matches!(error, TransferError::Verify { index: 0, .. }), "{error}");
    decode.expect_fenced(1);
}

/// The sender digests what it has read, not what lies in the target.
fn a_bit_flipped_in_the_target_is_caught(choice: TransportChoice) {
    if !kind(choice).is_one_sided() {
        // Bytes that have left are not yet in the target.
        return;
    }
    let decode = Decode::new(large(), 1);
    let target = decode.pool.clone();
    let flip = after_each(move |number, batch| {
        if number == 3 {
            let at = batch.runs().last().map_or(0, |run| run.target + run.len - 1);
            // The block is lent to this session, and this is its thread.
            write(&target, at, &[read(&target, &[(at, 1)])[0] ^ 0x10]);
        }
    });
    let prefill = Prefill::faulty(large(), 2, choice, flip);
    prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap_err();
    let error = decode.expect_failed(1);
    assert!(matches!(error, TransferError::Verify { index: 3, block: BlockId(3), .. }), "{error}");
    decode.expect_fenced(1);
}
