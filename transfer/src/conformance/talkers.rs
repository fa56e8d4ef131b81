//! A decode worker that sends frames without end. It must not keep a sender from its deadlines, or make it buffer without bound (I5).

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};

use super::*;
use baton_handoff::{Descriptor, Frame, Hello};

/// How long the handoff has. Any time will do: the question is whether it ends while the peer keeps talking.
const DEADLINE: Duration = Duration::from_secs(2);

/// More bytes than the sockets between two ends hold unread.
const BUFFERED: usize = 16 << 20;

/// Lets a prefill worker in as worker 1, and sends `frame` again and again until told to stop. Returns how many bytes were taken.
fn talk(listener: &TcpListener, geometry: &PoolGeometry, frame: &Frame, stop: &AtomicBool) -> usize {
    let (mut stream, _) = listener.accept().unwrap();
    let mut hello = [0; Hello::LEN];
    stream.read_exact(&mut hello).unwrap();
    stream.write_all(&Hello { fingerprint: geometry.layout.fingerprint() }.encode()).unwrap();
    stream.write_all(&Frame::Welcome { blocks: geometry.blocks.clone(), ticket: None }.encode()).unwrap();
    stream.set_nonblocking(true).unwrap();
    let words = frame.encode().repeat(4096);
    let mut taken = 0;
    while !stop.load(Ordering::Relaxed) {
        match said(&mut stream, &words[taken % words.len()..]) {
            Some(0) => std::thread::yield_now(),
            Some(bytes) => taken += bytes,
            None => break,
        }
    }
    taken
}

/// Bytes that the peer took; None when it has gone.
fn said(stream: &mut TcpStream, words: &[u8]) -> Option<usize> {
    match stream.write(words) {
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => Some(0),
        Err(_) => None,
    }
}

/// Bytes that a sender takes from a talking peer while a handoff to it runs out of time.
fn deadline_beside(frame: Frame) -> usize {
    let decode = Decode::new(large(), 1);
    let mut target = Descriptor::parse(&decode.reserve(1, &first(1)), &decode.geometry.layout, false).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    target.port = listener.local_addr().unwrap().port();
    let prefill = Prefill::new(large(), 2, TransportChoice::Tcp);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let talker = scope.spawn(|| talk(&listener, &decode.geometry, &frame, &stop));
        let outcome = prefill.send_until(&target.encode(), 0, Instant::now() + DEADLINE).wait();
        stop.store(true, Ordering::Relaxed);
        let error = outcome.unwrap_err();
        let late = matches!(error, TransferError::Deadline { .. } | TransferError::PeerLost { .. });
        assert!(late, "{error}");
        talker.join().unwrap()
    })
}

#[test]
fn a_peer_that_only_beats_does_not_hold_up_a_deadline() {
    let taken = deadline_beside(Frame::Beat);
    assert!(taken > BUFFERED, "nothing needs to be answered, yet only {taken} bytes were taken");
}

/// Each fence must be answered, and the peer reads no answer.
#[test]
fn a_peer_that_only_asks_is_not_listened_to_for_ever() {
    let taken = deadline_beside(Frame::Fence { epoch: Epoch(77) });
    assert!(taken <= BUFFERED, "{taken} bytes were taken");
}
