//! A TCP peer that sends frames no sender of ours would.

use std::io::Write as _;
use std::net::TcpStream;

use super::*;
use crate::FenceState;
use baton_handoff::{Descriptor, Frame, Hello, WriteHead};

/// A TCP peer that speaks frame by frame, as worker 5 to worker 1.
fn call(decode: &Decode) -> TcpStream {
    let mut stream = TcpStream::connect(decode.receiver.local_addr()).unwrap();
    let fingerprint = decode.geometry.layout.fingerprint();
    stream.write_all(&Hello { fingerprint }.encode()).unwrap();
    stream
        .write_all(&Frame::Identify { me: WorkerId(5), you: WorkerId(1), over: baton_handoff::Over::Stream }.encode())
        .unwrap();
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
    // SAFETY: inside the pool. The loop only asks whether the byte has arrived yet.
    while unsafe { last.read_volatile() } != 0xee {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    decode.expect_fenced(1);
    let fenced = block(&decode.pool, &decode.geometry, 0, BlockId(0));
    peer.write_all(&junk[bytes / 2..]).unwrap();
    // A frame behind the rest on the same stream is answered, which shows that the rest was read.
    let key_2 = key(&decode, &decode.reserve(2, &[vec![BlockId(1)]]));
    peer.write_all(&Frame::Begin { epoch: Epoch(2), key: key_2 }.encode()).unwrap();
    peer.write_all(&Frame::Abort { epoch: Epoch(2) }.encode()).unwrap();
    assert_eq!(decode.expect_failed(2), TransferError::Aborted { epoch: Epoch(2) });
    assert!(block(&decode.pool, &decode.geometry, 0, BlockId(0)) == fenced);
}

/// None of these is anything a sender of ours would do.
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

    // A write under an epoch the peer was not let in for, then the same block twice. The connection goes on working.
    let mut peer = call();
    let key_1 = key(&decode.reserve(1, &first(2)));
    peer.write_all(&write(1, 0, block_bytes, vec![0])).unwrap();
    peer.write_all(&junk[..block_bytes as usize]).unwrap();
    peer.write_all(&Frame::Begin { epoch: Epoch(1), key: key_1 }.encode()).unwrap();
    peer.write_all(&write(1, 0, 2 * block_bytes, vec![1, 1])).unwrap();
    peer.write_all(&junk).unwrap();
    assert!(decode.expect_failed(1).to_string().contains("written twice"));
    decode.expect_fenced(1);

    // A payload length other than the blocks'.
    let key_2 = key(&decode.reserve(2, &first(2)));
    peer.write_all(&Frame::Begin { epoch: Epoch(2), key: key_2 }.encode()).unwrap();
    peer.write_all(&write(2, 0, 16, vec![0])).unwrap();
    peer.write_all(&junk[..16]).unwrap();
    assert!(decode.expect_failed(2).to_string().contains("16 bytes instead of"));
    decode.expect_fenced(2);

    // A frame cut short by the end of the connection, and bytes that are no frame.
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
    let untouched = pool(&decode.geometry, 1).into();
    for id in (0..64).map(BlockId) {
        assert!(block(&decode.pool, &decode.geometry, 0, id) == block(&untouched, &decode.geometry, 0, id), "{id}");
    }
    assert_eq!(decode.receiver.stats().reservations, 0);
    // Others have lost nothing.
    let prefill = Prefill::new(large(), 2, TransportChoice::Tcp);
    prefill.send(&decode.reserve(4, &first(2)), 0).wait().unwrap();
}
