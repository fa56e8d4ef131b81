//! TCP over several connections: the suite runs over them, too. The tests here are about what can go wrong only with several.

use std::cell::Cell;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::linux::net::SocketAddrExt as _;

use baton_handoff::{
    Descriptor, Frame, FrameLimits, Hello, JoinTicket, Over, PREFIX, WriteHead, parse_body, parse_prefix,
};
use baton_types::digest_block;

use super::*;
use crate::FenceState;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(1) };
}

/// Runs a test in which blocks over TCP use this many connections.
pub(super) fn with_connections(count: usize, test: impl FnOnce()) {
    struct Back;
    impl Drop for Back {
        fn drop(&mut self) {
            COUNT.set(1);
        }
    }
    let _back = Back;
    COUNT.set(count);
    test();
}

/// The number of connections for prefill ends of this thread's tests.
pub(super) fn connections() -> usize {
    COUNT.get()
}

/// A prefill worker that sends single frames, as worker 5 to worker 1.
struct Peer<'a> {
    decode: &'a Decode,
    own: TcpStream,
    ticket: JoinTicket,
}

impl Peer<'_> {
    fn new(decode: &Decode) -> Peer<'_> {
        let mut own = connect(decode);
        say(&mut own, &Frame::Identify { me: WorkerId(5), you: WorkerId(1), over: Over::Stream });
        let Frame::Welcome { ticket: Some(ticket), .. } = hear(&mut own) else { panic!("a welcome with a ticket") };
        Peer { decode, own, ticket }
    }

    /// Opens a further connection of its session.
    fn join(&self, stream: u8) -> TcpStream {
        let (joined, answer) = ask_to_join(self.decode, self.ticket, stream);
        assert_eq!(answer, Frame::Joined);
        joined
    }

    /// Reserves `count` blocks from `from` on, and is granted access to them.
    fn begin(&mut self, epoch: u64, from: u32, count: u32) {
        let blocks = [(from..from + count).map(BlockId).collect()];
        let target = self.decode.reserve(epoch, &blocks);
        let key = Descriptor::parse(&target, &self.decode.geometry.layout, false).unwrap().key;
        say(&mut self.own, &Frame::Begin { epoch: Epoch(epoch), key });
        while !matches!(hear(&mut self.own), Frame::Granted { epoch: of, .. } if of == Epoch(epoch)) {}
    }

    fn complete(&mut self, epoch: u64, after: Vec<u64>, fill: u8) {
        let layout = &self.decode.geometry.layout;
        let bytes = vec![fill; layout.block_bytes(0)];
        let layers = 0..layout.groups[0].layers.len();
        let digest = |layer| digest_block(&bytes, layout.first_lane(0, layer));
        let digests = vec![vec![layers.clone().fold(0, |sum: u64, layer| sum.wrapping_add(digest(layer)))]];
        let writes = layers.len() as u64;
        say(&mut self.own, &Frame::Complete { epoch: Epoch(epoch), after, writes, digests, tail: vec![] });
    }
}

fn connect(decode: &Decode) -> TcpStream {
    let mut stream = TcpStream::connect(decode.receiver.local_addr()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&Hello { fingerprint: decode.geometry.layout.fingerprint() }.encode()).unwrap();
    stream.read_exact(&mut [0; Hello::LEN]).unwrap();
    stream
}

/// Number of connections of a prefill worker's only session.
fn connections_of(prefill: &Prefill) -> usize {
    let paths = prefill.sender.paths().remove(0).1;
    paths.into_iter().find(|path| path.transport == TransportKind::Tcp).unwrap().connections
}

/// Asks to join a session; returns the connection and the answer.
fn ask_to_join(decode: &Decode, ticket: JoinTicket, stream: u8) -> (TcpStream, Frame) {
    let mut joined = connect(decode);
    say(&mut joined, &Frame::Join { ticket, stream });
    let answer = hear(&mut joined);
    (joined, answer)
}

fn say(stream: &mut TcpStream, frame: &Frame) {
    stream.write_all(&frame.encode()).unwrap();
}

fn hear(stream: &mut TcpStream) -> Frame {
    let mut prefix = [0; PREFIX];
    stream.read_exact(&mut prefix).unwrap();
    let head = parse_prefix(prefix, &FrameLimits::new(&patient(), 1)).unwrap();
    let mut body = vec![0; head.len];
    stream.read_exact(&mut body).unwrap();
    parse_body(&head, &body).unwrap()
}

/// The frame that writes one layer of a reservation's only block, without the payload.
fn head(decode: &Decode, epoch: u64, layer: u16) -> Frame {
    let payload = decode.geometry.layout.block_bytes(0) as u32;
    Frame::Write(WriteHead { epoch: Epoch(epoch), group: 0, layer, payload, indexes: vec![0] })
}

fn layer_of(decode: &Decode, fill: u8) -> Vec<u8> {
    vec![fill; decode.geometry.layout.block_bytes(0)]
}

/// Writes layers of a reservation's only block.
fn write_block(stream: &mut TcpStream, decode: &Decode, epoch: u64, layers: std::ops::Range<u16>, fill: u8) {
    for layer in layers {
        say(stream, &head(decode, epoch, layer));
        stream.write_all(&layer_of(decode, fill)).unwrap();
    }
}

/// Waits until the byte at `at` of the pool has this value.
fn await_byte(decode: &Decode, at: usize, value: u8) {
    let (byte, start) = (decode.pool.at(at, 1).unwrap(), Instant::now());
    // SAFETY: inside the pool. The loop only asks whether the byte has arrived yet.
    while unsafe { byte.read_volatile() } != value {
        assert!(start.elapsed() < PATIENCE);
        std::thread::yield_now();
    }
}

#[test]
fn what_arrives_on_another_connection_after_a_fence_touches_nothing() {
    // I3: half of a layer has landed on each of two connections when its epoch is fenced. The rest, and further writes, come later.
    let decode = Decode::new(large(), 1);
    let mut peer = Peer::new(&decode);
    let mut others = [peer.join(1), peer.join(2)];
    peer.begin(1, 0, 1);
    let (bytes, layers) = (decode.geometry.layout.block_bytes(0), decode.geometry.layout.groups[0].layers.len() as u16);
    for (layer, other) in others.iter_mut().enumerate() {
        say(other, &head(&decode, 1, layer as u16));
        other.write_all(&vec![0xee; bytes / 2]).unwrap();
        let start = decode.geometry.block_range(0, layer, BlockId(0)).start;
        await_byte(&decode, start + bytes / 2 - 1, 0xee);
    }
    assert_eq!(decode.receiver.fence(Epoch(1)), FenceState::Pending);
    decode.expect_fenced(1);
    let fenced = block(&decode.pool, &decode.geometry, 0, BlockId(0));
    for other in &mut others {
        other.write_all(&vec![0xee; bytes - bytes / 2]).unwrap();
        write_block(other, &decode, 1, 2..4, 0xee);
    }
    // Later writes on the same connections arrive, so the fenced ones have been read.
    peer.begin(2, 1, 1);
    for (other, half) in others.iter_mut().zip([0..layers / 2, layers / 2..layers]) {
        write_block(other, &decode, 2, half, 0x22);
    }
    peer.complete(2, [3, 3].map(|writes| writes + u64::from(layers) / 2).to_vec(), 0x22);
    decode.expect_verified(2);
    assert!(block(&decode.pool, &decode.geometry, 0, BlockId(0)) == fenced);
    decode.receiver.release(Epoch(2));
    assert_eq!(decode.receiver.stats().reservations, 0);
}

#[test]
fn a_completion_waits_for_the_writes_it_comes_after() {
    // I2: the completion overtakes a write on another connection.
    let decode = Decode::new(large(), 1);
    let mut peer = Peer::new(&decode);
    let mut other = peer.join(2);
    let layers = decode.geometry.layout.groups[0].layers.len() as u16;
    peer.begin(1, 0, 1);
    write_block(&mut other, &decode, 1, 1..layers, 0x11);
    peer.complete(1, vec![0, u64::from(layers)], 0x11);
    // The completion has been read once the frame behind it is answered.
    peer.begin(2, 1, 1);
    assert!(decode.events.try_recv().is_err());
    write_block(&mut other, &decode, 1, 0..1, 0x11);
    decode.expect_verified(1);
    // A completion whose handoff was aborted meanwhile does not come back.
    peer.complete(2, vec![0, u64::from(layers) + 1], 0x11);
    say(&mut peer.own, &Frame::Abort { epoch: Epoch(2) });
    assert_eq!(decode.expect_failed(2), TransferError::Aborted { epoch: Epoch(2) });
    decode.expect_fenced(2);
    write_block(&mut other, &decode, 2, 0..1, 0x11);
    peer.begin(3, 2, 1);
    // Completing twice is refused.
    peer.complete(3, vec![9, 99], 0x11);
    peer.complete(3, vec![9, 99], 0x11);
    assert!(decode.expect_failed(3).to_string().contains("completed twice"));
    decode.expect_fenced(3);
}

#[test]
fn a_strangers_connection_is_refused_and_disturbs_nothing() {
    let decode = Decode::new(large(), 1);
    let mut peer = Peer::new(&decode);
    let mut other = peer.join(1);
    peer.begin(1, 0, 1);
    let layers = decode.geometry.layout.groups[0].layers.len() as u16;
    write_block(&mut other, &decode, 1, 0..1, 0x11);
    let JoinTicket { session, token } = peer.ticket;
    for (ticket, stream, why) in [
        (JoinTicket { session, token: token ^ 1 }, 2, "no such session"),
        (JoinTicket { session: session + 1, token }, 2, "no such session"),
        (peer.ticket, 1, "has a connection of this number"),
    ] {
        let (mut stranger, answer) = ask_to_join(&decode, ticket, stream);
        assert!(matches!(&answer, Frame::Reject { reason } if reason.contains(why)), "{answer:?}");
        // The refused connection is closed, so writing to it may fail, too.
        let _ = stranger.write_all(&head(&decode, 1, 1).encode());
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
    }
    write_block(&mut other, &decode, 1, 1..layers, 0x11);
    peer.complete(1, vec![u64::from(layers)], 0x11);
    decode.expect_verified(1);
}

#[test]
fn a_connection_that_breaks_ends_its_session_once_it_has_carried_something() {
    let decode = Decode::new(large(), 1);
    let mut peer = Peer::new(&decode);
    let (unused, mut used) = (peer.join(1), peer.join(2));
    drop(unused);
    peer.begin(1, 0, 1);
    write_block(&mut used, &decode, 1, 0..1, 0x11);
    say(&mut used, &head(&decode, 1, 1));
    used.write_all(&layer_of(&decode, 0x11)[..100]).unwrap();
    drop(used);
    assert!(matches!(decode.expect_failed(1), TransferError::PeerLost { .. }));
    decode.expect_fenced(1);
    assert!(matches!(peer.own.read(&mut [0]), Ok(0) | Err(_)));
    assert_eq!(decode.receiver.stats().reservations, 0);
}

#[test]
fn only_blocks_come_over_further_connections() {
    for frame in [Frame::Beat, Frame::Abort { epoch: Epoch(1) }, Frame::Joined] {
        let decode = Decode::new(large(), 1);
        let mut peer = Peer::new(&decode);
        let mut other = peer.join(1);
        peer.begin(1, 0, 1);
        say(&mut other, &frame);
        let error = decode.expect_failed(1).to_string();
        assert!(error.contains("carries blocks only"), "{error}");
        decode.expect_fenced(1);
    }
}

#[test]
fn a_session_has_as_many_connections_as_are_asked_for_and_may_be() {
    let run = |limits: TransferLimits| {
        let decode = Decode::limited(large(), 1, "127.0.0.1:0", limits);
        let prefill = Prefill::new(large(), 2, TransportChoice::Tcp);
        let stats = prefill.send(&decode.reserve(1, &first(8)), 0).wait().unwrap();
        assert_eq!(stats.transport, TransportKind::Tcp);
        connections_of(&prefill)
    };
    assert_eq!(run(patient()), 1);
    with_connections(3, || assert_eq!(run(patient()), 3));
    with_connections(3, || with_tls(|| assert_eq!(run(patient()), 3)));
    // I5: the session goes on with fewer.
    with_connections(16, || assert_eq!(run(TransferLimits { connections: 1, ..patient() }), 1));
    for tcp_connections in [0, 17] {
        let options = SenderOptions {
            worker: WorkerId(2),
            geometry: large(),
            pool: pool(&large(), 2).into(),
            transport: TransportChoice::Tcp,
            ucx: UcxSettings::default(),
            tls: None,
            tcp_connections,
            sockets: None,
            cpus: Cpus::default(),
            courtesy: Courtesy::default(),
            limits: patient(),
            convert: None,
            verify: true,
            on_trouble: |_, _| {},
        };
        let error = Sender::new(options).map(drop).unwrap_err().to_string();
        assert!(error.contains("tcp_connections"), "{error}");
    }
}

#[test]
fn an_ipv6_address_is_reached_in_the_brackets_it_is_advertised_in() {
    if let Err(error) = TcpListener::bind("[::1]:0") {
        return println!("skipped, no IPv6 here: {error}");
    }
    for count in [1, 3] {
        with_connections(count, || {
            let decode = Decode::listening(large(), 1, "[::1]:0");
            let target = decode.reserve(1, &first(8));
            let address = Descriptor::parse(&target, &decode.geometry.layout, false).unwrap().address;
            assert_eq!(address, "[::1]");
            let prefill = Prefill::new(large(), 2, TransportChoice::Tcp);
            assert_eq!(prefill.send(&target, 0).wait().map(|stats| stats.transport), Ok(TransportKind::Tcp));
            decode.expect_verified(1);
        });
    }
}

/// A proxy between a prefill worker and the decode worker at `to`. It passes everything on, except what the prefill worker sends on
/// further connection 1.
fn pass_on(listener: &TcpListener, to: std::net::SocketAddr, connections: usize) {
    std::thread::scope(|scope| {
        for _ in 0..connections {
            let (mut near, _) = listener.accept().unwrap();
            scope.spawn(move || {
                let mut far = TcpStream::connect(to).unwrap();
                let (mut from_far, mut to_near) = (far.try_clone().unwrap(), near.try_clone().unwrap());
                let back = std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from_far, &mut to_near);
                    let _ = to_near.shutdown(Shutdown::Write);
                });
                let mut hello = [0; Hello::LEN];
                near.read_exact(&mut hello).unwrap();
                far.write_all(&hello).unwrap();
                let first = hear(&mut near);
                if matches!(first, Frame::Join { stream: 1, .. }) {
                    let _ = std::io::copy(&mut near, &mut std::io::sink());
                } else {
                    say(&mut far, &first);
                    let _ = std::io::copy(&mut near, &mut far);
                }
                let _ = far.shutdown(Shutdown::Both);
                back.join().unwrap();
            });
        }
    });
}

#[test]
fn a_connection_that_does_not_join_in_time_keeps_no_other_out_and_leaves_time_for_the_handoff() {
    // The decode end keeps waiting for that connection.
    let decode = Decode::limited(large(), 1, "127.0.0.1:0", TransferLimits { handshake: PATIENCE, ..patient() });
    let mut target = Descriptor::parse(&decode.reserve(1, &first(8)), &decode.geometry.layout, false).unwrap();
    let (listener, to) = (TcpListener::bind("127.0.0.1:0").unwrap(), decode.receiver.local_addr());
    target.port = listener.local_addr().unwrap().port();
    // A sender that waited for that connection for a whole handshake time would be too late.
    let limits = TransferLimits { handshake: Duration::from_secs(4), ..patient() };
    std::thread::scope(|scope| {
        scope.spawn(|| pass_on(&listener, to, 3));
        with_connections(3, || {
            let (faultless, deadline): (Wrap, _) = (Arc::new(|inner| inner), Instant::now() + limits.handshake);
            let prefill = Prefill::limited(large(), 2, TransportChoice::Tcp, faultless, limits);
            prefill.send_until(&target.encode(), 0, deadline).wait().unwrap();
            decode.expect_verified(1);
            assert_eq!(connections_of(&prefill), 2);
        });
    });
}

#[test]
fn a_path_on_which_nobody_answers_leaves_time_for_the_next() {
    let decode = Decode::new(large(), 1);
    let mut target = Descriptor::parse(&decode.reserve(1, &first(1)), &decode.geometry.layout, false).unwrap();
    target.unix = format!("baton-mute-{}", std::process::id()).into_bytes();
    let address = std::os::unix::net::SocketAddr::from_abstract_name(&target.unix).unwrap();
    let _mute = std::os::unix::net::UnixListener::bind_addr(&address).unwrap();
    let limits = TransferLimits { handshake: Duration::from_secs(4), ..patient() };
    let prefill = Prefill::limited(large(), 2, TransportChoice::Auto, Arc::new(|inner| inner), limits);
    assert_eq!(prefill.send(&target.encode(), 0).wait().map(|stats| stats.transport), Ok(TransportKind::Tcp));
    decode.expect_verified(1);
}
