use std::io::Write as _;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use baton_handoff::{FrameLimits, WriteHead};
use baton_types::{BlockId, Epoch, WorkerId};

use super::*;
use crate::conformance::{Broken, memory_over};
use crate::link::Socket;
use crate::{Pool, ReceiverEvent, Segment};

fn link(hub: &Hub) -> (Link, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let limits = FrameLimits::new(&hub.options.limits, 1);
    (Link::new(Socket::Unix(ours), hub.options.pool.clone(), limits), theirs)
}

/// A further connection that cannot be told that it has joined, though it is not closed.
fn deaf(hub: &Hub) -> (Link, UnixStream) {
    let (mut link, theirs) = link(hub);
    theirs.shutdown(Shutdown::Read).unwrap();
    link.push(&Frame::Joined);
    (link, theirs)
}

#[test]
fn what_cannot_be_told_that_it_joined_is_let_go_of_unless_it_has_carried_something() {
    let hub = Arc::new(Hub::alone(9));
    let (mail, (own, _peer)) = (Arc::new(Mail::new().unwrap()), link(&hub));
    let welcomed = Welcomed { kind: TransportKind::Tcp, ucx: None, reach: hub.options.pool.reach().unwrap() };
    let geometry = hub.options.geometry.clone();
    let inbound = Inbound::new(1, WorkerId(5), TransportKind::Tcp, geometry, &hub.options.limits);
    let mut session = Session::new(hub.clone(), mail.clone(), own, inbound, welcomed);
    let ((unused, _a), (used, _b)) = (deaf(&hub), deaf(&hub));
    mail.join(2, unused);
    session.read_round().unwrap();
    assert_eq!(session.more.len(), 1);
    session.open_more().unwrap();
    assert!(session.more.is_empty(), "it has carried nothing, so nothing is missing");
    mail.join(3, used);
    session.read_round().unwrap();
    let head = WriteHead { epoch: Epoch(1), group: 0, layer: 0, payload: 64, indexes: vec![0] };
    session.take_in(3, Frame::Write(head)).unwrap();
    assert!(matches!(session.open_more(), Err(TransferError::PeerLost { .. })));
}

const EPOCH: Epoch = Epoch(1);

#[test]
fn a_session_gives_way_to_others_as_blocks_come() {
    let (mut session, mut around) = midway(true);
    let head = WriteHead { epoch: Epoch(9), group: 0, layer: 0, payload: 0, indexes: vec![0] };
    assert_eq!(session.courtesy.times(), 1, "what came so far, as the options have it");
    session.courtesy.nearly();
    around.arrive(&mut session, 1);
    assert_eq!(session.courtesy.times(), 2);
    session.courtesy.nearly();
    session.take_in(0, Frame::Write(head.clone())).unwrap();
    assert_eq!(session.courtesy.times(), 2, "the bytes come later");
    session.kind = TransportKind::Shm;
    session.take_in(0, Frame::Write(head)).unwrap();
    assert_eq!(session.courtesy.times(), 3, "the bytes are there");
}

/// What is around a session.
struct Around {
    hub: Arc<Hub>,
    /// The other ends of the session's own connection and of the one that blocks come over.
    peers: [UnixStream; 2],
    /// Memory of the session's pool, which stands for a device's, and an offset in it.
    segment: Arc<Segment>,
    at: usize,
    /// Events the owner was told, each with the byte at that offset at the time.
    told: Arc<Mutex<Vec<(ReceiverEvent, u8)>>>,
}

/// A session that has received half of a block, which is staged.
fn midway(verify: bool) -> (Session, Around) {
    let mut options = Hub::alone(9).options;
    let bytes = options.geometry.layout.block_bytes(0);
    let segment = Arc::new(Segment::create("test", options.geometry.bytes()).unwrap());
    (options.pool, options.verify) = (Pool::Device(memory_over(&segment)), verify);
    options.courtesy.nearly();
    let at = options.geometry.block_range(0, 0, BlockId(1)).start + bytes / 2 - 1;
    let told = Arc::<Mutex<Vec<_>>>::default();
    let (tell, pool) = (told.clone(), segment.clone());
    // SAFETY: nobody writes to the pool but this thread.
    let on_event = move |event| tell.lock().unwrap().push((event, unsafe { pool.read(at, 1) }[0]));
    let hub = Arc::new(Hub::new(options, Box::new(on_event)).unwrap());
    let far = Instant::now() + Duration::from_secs(60);
    hub.with(|ledger| ledger.reserve(EPOCH, 7, &[vec![BlockId(1)]], far)).unwrap();

    let (mail, (own, own_peer), (joined, peer)) = (Arc::new(Mail::new().unwrap()), link(&hub), link(&hub));
    assert!(hub.admit(1, mail.clone()));
    let welcomed = Welcomed { kind: TransportKind::Tcp, ucx: None, reach: hub.options.pool.reach().unwrap() };
    let inbound = Inbound::new(1, WorkerId(5), TransportKind::Tcp, hub.options.geometry.clone(), &hub.options.limits);
    let inbound = if verify { inbound } else { inbound.unverified() };
    let mut session = Session::new(hub.clone(), mail, own, inbound, welcomed);
    session.more.push((2, joined));
    session.take_in(0, Frame::Begin { epoch: EPOCH, key: 7 }).unwrap();
    let head = WriteHead { epoch: EPOCH, group: 0, layer: 0, payload: bytes as u32, indexes: vec![0] };
    session.take_in(2, Frame::Write(head)).unwrap();
    let mut around = Around { hub, peers: [own_peer, peer], segment, at, told };
    around.arrive(&mut session, bytes / 2);
    (session, around)
}

impl Around {
    /// Lets `bytes` more bytes arrive. They stay staged and do not reach the pool yet.
    fn arrive(&mut self, session: &mut Session, bytes: usize) {
        self.peers[1].write_all(&vec![0xee; bytes]).unwrap();
        assert!(session.read_some(Some(0)).unwrap());
        // SAFETY: nobody writes to the pool but this thread.
        assert_eq!(unsafe { self.segment.read(self.at, 1) }, [0], "what is staged has not landed");
    }

    /// Takes the events. Each must have come after what had arrived was in the pool.
    #[track_caller]
    fn told(&self) -> Vec<ReceiverEvent> {
        let told = std::mem::take(&mut *self.told.lock().unwrap());
        assert!(told.iter().all(|(_, byte)| *byte == 0xee), "the pool changes after {told:?}");
        told.into_iter().map(|(event, _)| event).collect()
    }
}

/// I3: otherwise the rest of this handoff would land in the next owner's block.
#[test]
fn blocks_are_given_back_once_nothing_is_on_its_way_into_a_device() {
    use ReceiverEvent::{Failed, Fenced};

    let (mut session, around) = midway(true);
    around.hub.with(|ledger| ledger.fence(EPOCH));
    session.obey_fences().unwrap();
    assert!(matches!(around.told()[..], [Fenced { epoch: EPOCH }]));

    let (mut session, around) = midway(true);
    session.take_in(0, Frame::Abort { epoch: EPOCH }).unwrap();
    assert!(matches!(around.told()[..], [Failed { .. }, Fenced { epoch: EPOCH }]));

    let (session, around) = midway(true);
    let end = session.lost("it closed the connection");
    session.wind_up(None, end);
    assert!(matches!(around.told()[..], [Failed { .. }, Fenced { epoch: EPOCH }]));
}

/// I3: nobody knows whether the copy is over.
#[test]
fn blocks_stay_aside_when_a_device_fails_in_the_midst_of_them() {
    let (mut session, around) = midway(true);
    let settling = std::mem::replace(&mut session.reach, Reach::Device(Box::new(Broken { bytes: 0 })));
    let error = session.take_in(0, Frame::Abort { epoch: EPOCH }).unwrap_err();
    assert!(error.to_string().contains("it is broken"), "{error}");
    drop(settling);
    session.wind_up(None, error);
    assert!(matches!(around.told()[..], [ReceiverEvent::Failed { .. }]), "not that they are free");
    assert_eq!(around.hub.with(|ledger| ledger.fence(EPOCH)), crate::FenceState::Pending);
}

/// I2: digests wait for the blocks they are made of. Where no digests are made, something else must wait.
#[test]
fn what_is_not_verified_is_announced_once_it_is_there() {
    let (mut session, mut around) = midway(false);
    let bytes = around.hub.options.geometry.layout.block_bytes(0);
    around.arrive(&mut session, bytes / 2);
    let complete = Frame::Complete { epoch: EPOCH, after: vec![0, 1], writes: 1, digests: vec![vec![0]], tail: vec![] };
    session.take_in(0, complete).unwrap();
    assert!(matches!(around.told()[..], [ReceiverEvent::Verified { epoch: EPOCH, .. }]));
}
