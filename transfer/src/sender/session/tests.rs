//! Tests of a single session's turns. Its peer is a socket that the test writes to.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use baton_handoff::testing::{self, core};
use baton_handoff::{FrameLimits, Host, Op, Quiet, TransferLimits};
use baton_types::{BlockId, Epoch, WorkerId};

use super::super::connect::SenderConfig;
use super::*;
use crate::cpus::Cpus;
use crate::link::{Link, Socket};
use crate::options::{SenderOptions, TransportChoice, UcxSettings};
use crate::segment::Segment;

/// A plan to reach worker 1 over TCP, at a port where nobody listens.
pub(crate) fn plan() -> Arc<Plan> {
    let geometry = testing::geometry();
    let pool = Arc::new(Segment::create("test", geometry.bytes()).unwrap());
    let options = SenderOptions {
        worker: WorkerId(2),
        geometry,
        pool: pool.into(),
        transport: TransportChoice::Tcp,
        ucx: UcxSettings::default(),
        tls: None,
        tcp_connections: 1,
        sockets: None,
        cpus: Cpus::default(),
        courtesy: Courtesy::default(),
        limits: TransferLimits::default(),
        convert: None,
        verify: true,
        on_trouble: |_, _| {},
    };
    let target = testing::target(1);
    let ucx = Err("it is not set up".to_owned());
    let config = SenderConfig {
        options,
        namespace: Host { boot: [2; 16], place: 1 },
        folder: None,
        ucx,
        paths: Mutex::default(),
        wrap: None,
    };
    Arc::new(Plan { config: Arc::new(config), target })
}

/// A session with worker 1 as over TCP, and the peer's end of its socket.
fn session() -> (Session, UnixStream) {
    let plan = plan();
    let options = &plan.config.options;
    let (limits, remote) = (options.limits.clone(), options.geometry.clone());
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let own = Link::new(Socket::Unix(ours), options.pool.clone(), FrameLimits::new(&limits, 1));
    let connected = Connected { links: Links::new(own, vec![]), kind: TransportKind::Tcp, remote };
    let outbound = outbound(&plan);
    (Session::new(plan, Arc::new(Queue::new(limits).unwrap()), connected, outbound), theirs)
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
    // One read takes a few kilobytes.
    let least = said.len() / (READS * (4 << 10));
    assert!(turns > least.max(1), "all of it in {turns} turns");
}

/// A transport that carries nothing and cannot be stopped.
struct Unstoppable {
    cancelled: Arc<AtomicUsize>,
    gone: Arc<AtomicBool>,
}

impl Drop for Unstoppable {
    fn drop(&mut self) {
        self.gone.store(true, Ordering::Relaxed);
    }
}

impl Transport for Unstoppable {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }
    fn submit(&mut self, _: Load, _: &mut Links) -> Result<(), TransferError> {
        Ok(())
    }
    fn poll(&mut self, _: &mut Links) -> Result<Progress, TransferError> {
        Ok(Progress::Blocked)
    }
    fn cancel(&mut self, _: Epoch, _: &mut Links) -> Result<(), TransferError> {
        self.cancelled.fetch_add(1, Ordering::Relaxed);
        Err(TransferError::os("stop a copy", "it does not stop"))
    }
}

#[test]
fn a_session_gives_way_to_others_as_it_copies() {
    let (mut session, _peer) = session();
    session.transport = Some(Box::new(Unstoppable { cancelled: Arc::default(), gone: Arc::default() }));
    write(&mut session, &core(Epoch(1), Instant::now() + Duration::from_secs(60)));
    session.courtesy.nearly();
    assert!(session.copy_some(Instant::now()).unwrap());
    assert_eq!(session.courtesy.times(), 1);
}

/// Takes up a handoff whose peer grants it a block, and a write to that.
fn write(session: &mut Session, core: &Arc<baton_handoff::Core>) {
    let epoch = core.epoch;
    session.queue.begin(core.clone()).unwrap();
    session.with(|outbound, line| outbound.expire(Instant::now(), line));
    let granted = Frame::Granted { epoch, blocks: vec![vec![BlockId(0)]] };
    session.with(|outbound, line| outbound.frame(granted, TransportKind::Tcp, Instant::now(), line)).unwrap();
    let op = Op::Write { epoch, group: 0, layer: 0, pairs: vec![(BlockId(0), 0)], after: 0 };
    session.queue.write(core, op, Instant::now()).unwrap();
    session.with(|outbound, line| outbound.next_op(Instant::now(), line));
}

#[test]
fn what_may_still_be_read_is_not_said_to_be_quiet() {
    let (mut session, _peer) = session();
    let (cancelled, gone) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    session.transport = Some(Box::new(Unstoppable { cancelled: cancelled.clone(), gone: gone.clone() }));
    // Two handoffs, with a batch of each under way.
    let cores = [1, 2].map(|epoch| core(Epoch(epoch), Instant::now() + Duration::from_secs(60)));
    for core in &cores {
        write(&mut session, core);
        session.outbound.next_batch(None, Instant::now()).unwrap().expect("a batch");
    }
    let (tell, told) = std::sync::mpsc::channel();
    for core in &cores {
        let (tell, gone) = (tell.clone(), gone.clone());
        let quiet = move || tell.send(gone.load(Ordering::Relaxed)).unwrap_or_default();
        session.queue.abort(core.epoch, Quiet(Some(Box::new(quiet))));
    }
    let error = session.turn().unwrap_err();
    assert_eq!(error, TransferError::os("stop a copy", "it does not stop"));
    assert!(told.try_recv().is_err(), "its copy is still under way");
    assert_eq!(cancelled.load(Ordering::Relaxed), 1, "the peer hears nothing while it is waited for");
    session.wind_up(&error);
    assert_eq!([told.recv(), told.recv()], [Ok(true), Ok(true)], "once the transport is gone");
}
