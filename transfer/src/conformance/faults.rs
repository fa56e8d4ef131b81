//! Faults made inside one process: bytes changed, writes lost, handoffs given up and fenced in the middle.

use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;

use super::*;
use crate::FenceState;
use crate::descriptor::Descriptor;
use crate::wire::{Frame, Hello, PREFIX, WriteHead};

for_each_transport![
    a_changed_byte_is_caught,
    a_flipped_bit_is_caught_wherever_it_is,
    a_lost_write_is_caught,
    a_write_outside_the_reservation_is_refused,
    a_write_under_a_wrong_index_is_refused,
    a_copy_to_the_wrong_block_is_caught,
    a_bit_flipped_in_the_target_is_caught,
    an_abort_gives_the_blocks_back,
    after_a_fence_not_a_byte_changes,
    a_handoff_without_end_misses_its_deadline,
    a_crashed_session_is_over_once_it_has_unmapped,
    a_session_the_receiver_ends_gives_back,
    a_frame_that_changed_on_its_way_ends_the_session,
    a_dropped_sender_reports_and_gives_back,
];

fn first(count: u32) -> Vec<Vec<BlockId>> {
    vec![(0..count).map(BlockId).collect()]
}

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
    fn cancel(&mut self, link: &mut Link) -> Result<(), TransferError> {
        self.inner.cancel(link)
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

fn write_all(prefill: &Prefill, target: &[u8]) -> crate::Handoff {
    let mut handoff = prefill.sender.open(target, far()).unwrap();
    let pairs: Vec<_> = (0..handoff.block_counts()[0]).map(|i| (BlockId(i), i)).collect();
    for layer in 0..8 {
        handoff.write(0, layer, &pairs).unwrap();
    }
    handoff
}

fn an_abort_gives_the_blocks_back(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(3);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    let handoff = write_all(&prefill, &decode.reserve(1, &first(32)));
    is_reached.recv_timeout(PATIENCE).unwrap();
    let (quiet, is_quiet) = mpsc::channel();
    handoff.abort(Box::new(move || quiet.send(()).unwrap()));
    assert!(is_quiet.try_recv().is_err(), "a batch is being copied");
    go.send(()).unwrap();
    is_quiet.recv_timeout(PATIENCE).unwrap();
    assert_eq!(decode.expect_failed(1), TransferError::Aborted { epoch: Epoch(1) });
    decode.expect_fenced(1);
    // The session goes on, with the same blocks on both sides.
    prefill.send(&decode.reserve(2, &first(32)), 0).wait().unwrap();
    decode.expect_verified(2);
}

fn after_a_fence_not_a_byte_changes(choice: TransportChoice) {
    // I3
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(5);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    let handoff = write_all(&prefill, &decode.reserve(1, &first(48)));
    is_reached.recv_timeout(PATIENCE).unwrap();
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    match choice {
        // The receiver applies writes itself, so it does not need the peer's word.
        TransportChoice::Tcp => decode.expect_fenced(1),
        _ => assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending, "asking again changes nothing"),
    }
    let now: Vec<_> = (0..48).map(|id| block(&decode.pool, &decode.geometry, 0, BlockId(id))).collect();
    go.send(()).unwrap();
    let fenced = if kind(choice).is_one_sided() {
        decode.expect_fenced(1);
        (0..48).map(|id| block(&decode.pool, &decode.geometry, 0, BlockId(id))).collect()
    } else {
        now
    };
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Clear);
    let (tell, told) = mpsc::channel();
    handoff.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    let error = told.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(error, TransferError::Fenced { epoch: Epoch(1), .. }), "{error}");
    // Everything the peer still had to say has arrived once a later handoff of the same session is verified.
    let later = vec![(48..56).map(BlockId).collect()];
    prefill.send(&decode.reserve(2, &later), 0).wait().unwrap();
    decode.expect_verified(2);
    for (id, bytes) in fenced.iter().enumerate() {
        assert!(block(&decode.pool, &decode.geometry, 0, BlockId(id as u32)) == *bytes, "block {id} changed");
    }
}

fn a_handoff_without_end_misses_its_deadline(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let prefill = Prefill::new(large(), 2, choice);
    let deadline = Instant::now() + Duration::from_millis(100);
    let mut handoff = prefill.sender.open(&decode.reserve(1, &first(2)), deadline).unwrap();
    let _ = handoff.write(0, 0, &[(BlockId(0), 0)]);
    // Its owner does nothing more; the decode side is told when the time is over.
    assert_eq!(decode.expect_failed(1), TransferError::Aborted { epoch: Epoch(1) });
    decode.expect_fenced(1);
    let error = handoff.write(0, 1, &[(BlockId(0), 0)]).unwrap_err();
    assert!(matches!(error, TransferError::Deadline { epoch: Epoch(1), .. }), "{error}");
}

/// Panics at its second batch, and waits to be told before it lets go of the peer's pool.
struct Crashing {
    inner: Box<dyn Transport>,
    batches: usize,
    may_go: Arc<std::sync::Mutex<mpsc::Receiver<()>>>,
}

impl Transport for Crashing {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn submit(&mut self, batch: Batch, link: &mut Link) -> Result<(), TransferError> {
        self.batches += 1;
        assert_ne!(self.batches, 2, "a defect in a transport");
        self.inner.submit(batch, link)
    }
    fn poll(&mut self, link: &mut Link) -> Result<Progress, TransferError> {
        self.inner.poll(link)
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }
    fn cancel(&mut self, link: &mut Link) -> Result<(), TransferError> {
        self.inner.cancel(link)
    }
}

impl Drop for Crashing {
    fn drop(&mut self) {
        let _ = self.may_go.lock().unwrap().recv_timeout(PATIENCE);
    }
}

fn a_crashed_session_is_over_once_it_has_unmapped(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let (go, may_go) = mpsc::channel();
    let may_go = Arc::new(std::sync::Mutex::new(may_go));
    let crash = wrapped(move |inner| Crashing { inner, batches: 0, may_go: may_go.clone() });
    let prefill = Prefill::faulty(large(), 2, choice, crash);
    let outcome = prefill.send(&decode.reserve(1, &first(8)), 0);
    assert!(matches!(decode.expect_failed(1), TransferError::PeerLost { .. }));
    if kind(choice).is_one_sided() {
        // I3: the connection is gone, but the mapping is not.
        assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    }
    go.send(()).unwrap();
    // Without another handoff, and while the process lives on.
    decode.expect_fenced(1);
    let error = outcome.wait().unwrap_err();
    assert!(matches!(error, TransferError::Closed | TransferError::Os { .. }), "{error}");
}

/// Says something else at its third batch.
struct Babbling {
    inner: Box<dyn Transport>,
    batches: usize,
    words: Vec<u8>,
}

impl Transport for Babbling {
    fn kind(&self) -> TransportKind {
        self.inner.kind()
    }
    fn submit(&mut self, batch: Batch, link: &mut Link) -> Result<(), TransferError> {
        self.batches += 1;
        if self.batches == 3 {
            link.push_bytes(self.words.clone());
        }
        self.inner.submit(batch, link)
    }
    fn poll(&mut self, link: &mut Link) -> Result<Progress, TransferError> {
        self.inner.poll(link)
    }
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.fd()
    }
    fn cancel(&mut self, link: &mut Link) -> Result<(), TransferError> {
        self.inner.cancel(link)
    }
}

/// What the receiver makes of it when a sender says this.
fn babble(choice: TransportChoice, words: Vec<u8>) -> (TransferError, Decode) {
    let decode = Decode::new(large(), 1);
    let babble = wrapped(move |inner| Babbling { inner, batches: 0, words: words.clone() });
    let prefill = Prefill::faulty(large(), 2, choice, babble);
    let outcome = prefill.send(&decode.reserve(1, &first(8)), 0);
    let error = decode.expect_failed(1);
    // The sender's process lives on and has nothing more to send; its blocks come back all the same.
    decode.expect_fenced(1);
    assert!(matches!(outcome.wait(), Err(TransferError::PeerLost { .. })));
    (error, decode)
}

fn a_session_the_receiver_ends_gives_back(choice: TransportChoice) {
    let (error, decode) = babble(choice, Frame::Welcome { blocks: vec![] }.encode());
    assert!(matches!(error, TransferError::Protocol { .. }), "{error}");
    assert_eq!(decode.receiver.stats().verify_failures, 0);
}

fn a_frame_that_changed_on_its_way_ends_the_session(choice: TransportChoice) {
    // I2: in the length, in the kind, in the check, in the body.
    for at in [0, 2, 4, 8, PREFIX] {
        let mut words = Frame::Abort { epoch: Epoch(7) }.encode();
        words[at] ^= 1;
        let (error, decode) = babble(choice, words);
        assert!(matches!(error, TransferError::Corrupt { .. }), "byte {at}: {error}");
        assert_eq!(decode.receiver.stats().verify_failures, 1);
    }
}

fn a_dropped_sender_reports_and_gives_back(choice: TransportChoice) {
    let decode = Decode::new(large(), 1);
    let (wrap, is_reached, go) = held(2);
    let prefill = Prefill::faulty(large(), 2, choice, wrap);
    let writing = write_all(&prefill, &decode.reserve(1, &first(32)));
    is_reached.recv_timeout(PATIENCE).unwrap();
    let waiting = prefill.sender.open(&decode.reserve(2, &[(32..34).map(BlockId).collect()]), far()).unwrap();
    let dropped = std::thread::spawn(move || drop(prefill));
    go.send(()).unwrap();
    dropped.join().unwrap();
    decode.expect_failed(1);
    decode.expect_fenced(1);
    let (tell, told) = mpsc::channel();
    writing.complete(vec![], Box::new(move |outcome| tell.send(outcome).unwrap()));
    assert_eq!(told.recv_timeout(PATIENCE).unwrap(), Err(TransferError::Closed));
    let (quiet, is_quiet) = mpsc::channel();
    waiting.abort(Box::new(move || quiet.send(()).unwrap()));
    is_quiet.recv_timeout(PATIENCE).unwrap();
}

/// A TCP peer that speaks frame by frame, as worker 5 to worker 1.
fn call(decode: &Decode) -> TcpStream {
    let mut stream = TcpStream::connect(decode.receiver.local_addr()).unwrap();
    let fingerprint = decode.geometry.layout.fingerprint();
    stream.write_all(&Hello { fingerprint }.encode()).unwrap();
    stream.write_all(&Frame::Identify { me: WorkerId(5), you: WorkerId(1), ucx: false }.encode()).unwrap();
    stream
}

fn key(decode: &Decode, target: &[u8]) -> u64 {
    Descriptor::parse(target, &decode.geometry.layout, false).unwrap().key
}

#[test]
fn a_fence_in_the_middle_of_a_block_stops_the_rest_of_it() {
    // I3: half of a block has landed when its epoch is fenced; the other half arrives later.
    let decode = Decode::new(large(), 1);
    let mut peer = call(&decode);
    let key_1 = key(&decode, &decode.reserve(1, &first(1)));
    let bytes = decode.geometry.layout.block_bytes(0);
    let head = WriteHead { epoch: Epoch(1), group: 0, layer: 0, payload: bytes as u32, indexes: vec![0] };
    let junk = vec![0xee; bytes];
    peer.write_all(&Frame::Begin { epoch: Epoch(1), key: key_1 }.encode()).unwrap();
    peer.write_all(&Frame::Write(head).encode()).unwrap();
    peer.write_all(&junk[..bytes / 2]).unwrap();
    let last = decode.pool.at(bytes / 2 - 1, 1).unwrap();
    let start = Instant::now();
    // SAFETY: inside the pool; whether the byte is there yet is just what is asked.
    while unsafe { last.read_volatile() } != 0xee {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    decode.expect_fenced(1);
    let fenced = block(&decode.pool, &decode.geometry, 0, BlockId(0));
    peer.write_all(&junk[bytes / 2..]).unwrap();
    // What comes behind the rest on the same stream is answered, which shows that the rest was read.
    let key_2 = key(&decode, &decode.reserve(2, &[vec![BlockId(1)]]));
    peer.write_all(&Frame::Begin { epoch: Epoch(2), key: key_2 }.encode()).unwrap();
    peer.write_all(&Frame::Abort { epoch: Epoch(2) }.encode()).unwrap();
    assert_eq!(decode.expect_failed(2), TransferError::Aborted { epoch: Epoch(2) });
    assert!(block(&decode.pool, &decode.geometry, 0, BlockId(0)) == fenced);
}

/// What no sender of ours would do.
#[test]
fn a_peer_that_writes_nonsense_touches_nothing() {
    let decode = Decode::new(large(), 1);
    let key = |target: &[u8]| key(&decode, target);
    let call = || call(&decode);
    let write = |epoch: u64, layer: u16, payload: u32, indexes: Vec<u32>| {
        Frame::Write(WriteHead { epoch: Epoch(epoch), group: 0, layer, payload, indexes }).encode()
    };
    let block_bytes = decode.geometry.layout.block_bytes(0) as u32;
    let junk = vec![0xee; 2 * block_bytes as usize];

    // Under an epoch it was not let in for, then twice the same block, on one connection that goes on working.
    let mut peer = call();
    let key_1 = key(&decode.reserve(1, &first(2)));
    peer.write_all(&write(1, 0, block_bytes, vec![0])).unwrap();
    peer.write_all(&junk[..block_bytes as usize]).unwrap();
    peer.write_all(&Frame::Begin { epoch: Epoch(1), key: key_1 }.encode()).unwrap();
    peer.write_all(&write(1, 0, 2 * block_bytes, vec![1, 1])).unwrap();
    peer.write_all(&junk).unwrap();
    assert!(decode.expect_failed(1).to_string().contains("written twice"));
    decode.expect_fenced(1);

    // A length that is not the blocks'.
    let key_2 = key(&decode.reserve(2, &first(2)));
    peer.write_all(&Frame::Begin { epoch: Epoch(2), key: key_2 }.encode()).unwrap();
    peer.write_all(&write(2, 0, 16, vec![0])).unwrap();
    peer.write_all(&junk[..16]).unwrap();
    assert!(decode.expect_failed(2).to_string().contains("16 bytes instead of"));
    decode.expect_fenced(2);

    // A frame cut short by the end of the connection, and one that is none.
    for rest in [&junk[..100], &[]] {
        let mut peer = call();
        let key_3 = key(&decode.reserve(3, &first(2)));
        peer.write_all(&Frame::Begin { epoch: Epoch(3), key: key_3 }.encode()).unwrap();
        if rest.is_empty() {
            peer.write_all(&[0xff; 64]).unwrap();
        } else {
            peer.write_all(&write(3, 8, block_bytes, vec![0])).unwrap();
            peer.write_all(rest).unwrap();
        }
        drop(peer);
        decode.expect_failed(3);
        decode.expect_fenced(3);
    }
    let untouched = pool(&decode.geometry, 1);
    for id in (0..64).map(BlockId) {
        assert!(block(&decode.pool, &decode.geometry, 0, id) == block(&untouched, &decode.geometry, 0, id), "{id}");
    }
    assert_eq!(decode.receiver.stats().reservations, 0);
    // Nothing lost for others.
    let prefill = Prefill::new(large(), 2, TransportChoice::Tcp);
    prefill.send(&decode.reserve(4, &first(2)), 0).wait().unwrap();
}
