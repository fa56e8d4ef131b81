//! A session's turn, by itself: its peer is a socket that a test writes to.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;

use baton_types::{KvDtype, KvGroup, KvLayout, WorkerId};

use super::super::connect::Config;
use super::*;
use crate::cpus::Cpus;
use crate::descriptor::Descriptor;
use crate::heads::HeadSlice;
use crate::host::Host;
use crate::link::{Link, Socket};
use crate::options::{Limits, SenderOptions, TransportChoice, UcxSettings};
use crate::segment::Segment;
use crate::wire::FrameLimits;

/// A session over TCP's frames with worker 1, and the peer's end of it.
fn session() -> (Session, UnixStream) {
    let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
    let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F32, block_size: 4, groups: vec![group] };
    let geometry = PoolGeometry::uniform(layout.clone(), 4);
    let pool = Arc::new(Segment::create("test", geometry.bytes()).unwrap());
    let options = SenderOptions {
        worker: WorkerId(2),
        geometry: geometry.clone(),
        pool: pool.clone().into(),
        transport: TransportChoice::Tcp,
        ucx: UcxSettings::default(),
        tls: None,
        tcp_connections: 1,
        cpus: Cpus::default(),
        limits: Limits::default(),
        convert: None,
        verify: true,
        on_trouble: |_, _| {},
    };
    let target = Descriptor {
        worker: WorkerId(1),
        epoch: baton_types::Epoch(1),
        key: 7,
        tokens: 4,
        first: vec![0],
        counts: vec![1],
        heads: vec![HeadSlice::all(1)],
        layout,
        device: false,
        host: Host { boot: [1; 16], netns: 1 },
        unix: b"none".to_vec(),
        address: "127.0.0.1".into(),
        port: 1,
    };
    let (limits, ucx) = (options.limits.clone(), Err("it is not set up".to_owned()));
    let config = Config { options, host: Host { boot: [2; 16], netns: 1 }, ucx, paths: Mutex::default(), wrap: None };
    let plan = Arc::new(Plan { config: Arc::new(config), target, before: None });
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let own = Link::new(Socket::Unix(ours), pool.into(), FrameLimits::new(&limits, 1));
    let connected = Connected { links: Links::new(own, vec![]), kind: TransportKind::Tcp, remote: geometry };
    (Session::new(plan, Arc::new(Queue::new(limits).unwrap()), connected), theirs)
}

#[test]
fn however_much_a_peer_says_only_so_much_of_it_is_read_in_a_turn() {
    // I5: deadlines and aborts have their turn in between.
    let (mut session, mut peer) = session();
    let said = Frame::Beat.encode().repeat(4096);
    peer.write_all(&said).unwrap();
    let mut turns = 0;
    while turns == 0 || session.unread {
        session.read().unwrap();
        turns += 1;
    }
    // A read takes in a few kilobytes.
    let least = said.len() / (READS * (4 << 10));
    assert!(turns > least.max(1), "all of it in {turns} turns");
}
