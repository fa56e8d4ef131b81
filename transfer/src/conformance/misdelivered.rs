//! Writes that arrive out of order, twice or in part. Only complete handoffs are accepted (I2).

use super::*;

for_each_transport![
    writes_arrive_in_any_order,
    a_batch_that_goes_twice_is_refused,
    a_batch_of_which_only_a_part_arrives_is_caught,
];

fn writes_arrive_in_any_order(choice: TransportChoice) {
    let turned = altered(|batch| {
        // Reverse every second batch, so that the order of blocks alternates.
        if batch.layer % 2 == 1 {
            batch.writes.reverse();
        }
    });
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, turned);
    prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap();
    assert_eq!(decode.expect_verified(1), b"tail");
    for index in 0..4 {
        let (there, here) = (BlockId(index), BlockId(8 + index));
        assert!(block(&decode.pool, &large(), 0, there) == block(&prefill.pool, &large(), 0, here), "block {index}");
    }
}

/// A transport that carries a batch twice.
struct Stutters {
    inner: Box<dyn Transport>,
    submitted: usize,
}

/// Number of the batch that is carried twice.
const TWICE: usize = 3;

impl Transport for Stutters {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn depth(&self) -> usize {
        self.inner.depth()
    }
    fn submit(&mut self, load: Load, links: &mut Links) -> Result<(), TransferError> {
        self.submitted += 1;
        if self.submitted == TWICE {
            self.inner.submit(load.clone(), links)?;
            // Not before the first copy is through: some transports take one batch at a time.
            while self.inner.poll(links)? != Progress::Flushed {
                links.flush().map_err(|error| TransferError::os("send a batch twice", error))?;
            }
            self.inner.take_digests();
        }
        self.inner.submit(load, links)
    }
    fn poll(&mut self, links: &mut Links) -> Result<Progress, TransferError> {
        self.inner.poll(links)
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
    fn cancel(&mut self, epoch: Epoch, links: &mut Links) -> Result<(), TransferError> {
        self.inner.cancel(epoch, links)
    }
}

fn a_batch_that_goes_twice_is_refused(choice: TransportChoice) {
    let stutter: Wrap = Arc::new(|inner| Box::new(Stutters { inner, submitted: 0 }));
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, stutter);
    let error = prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap_err();
    assert!(error.to_string().contains("written twice"), "{error}");
    assert!(decode.expect_failed(1).to_string().contains("written twice"));
    decode.expect_fenced(1);
}

fn a_batch_of_which_only_a_part_arrives_is_caught(choice: TransportChoice) {
    let short = altered(|batch| {
        if batch.layer == 6 {
            batch.source_len -= 8;
            batch.len -= 8;
        }
    });
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::faulty(large(), 2, choice, short);
    let error = prefill.send(&decode.reserve(1, &first(4)), 8).wait().unwrap_err();
    let caught = match kind(choice).is_one_sided() {
        true => matches!(error, TransferError::Verify { .. }),
        // The frame's head says how much is to come.
        false => matches!(error, TransferError::Refused { .. } | TransferError::Protocol { .. }),
    };
    assert!(caught, "{error}");
    decode.expect_failed(1);
    decode.expect_fenced(1);
}
