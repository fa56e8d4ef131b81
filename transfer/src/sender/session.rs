//! The prefill end's session with one decode worker, on its own thread. It moves frames and batches between the socket, a transport
//! and [`Outbound`], which knows what they mean.

use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_handoff::{
    Access, BATCH_BYTES, Effect, FAREWELL, Frame, Line, Malformed, Meter, Outbound, Parties, PoolMemory, Pools,
    TransferError, TransportKind, blames_path, tells_peer,
};
use baton_types::{Courtesy, PoolGeometry};

use super::connect::{Connected, Interrupt, Plan};
use super::dial::dial;
use super::queue::Queue;
use crate::convert::{Conversions, Converting};
use crate::cuda_ipc::CudaIpc;
use crate::device::{PoolHandle, Reach};
use crate::in_order::InOrder;
use crate::link::{Got, MAX_QUEUED};
use crate::links::Links;
use crate::load::Load;
use crate::shm::Shm;
use crate::staging::Staging;
use crate::tcp::Tcp;
use crate::threads::Thread;
use crate::transport::{DEVICE_BATCH_BYTES, PUT_BATCH_BYTES, Progress, Transport};
use crate::ucx::Ucx;
use crate::wake::{Interest, wait, wait_awake};

/// Batches copied between two looks at the socket. A look takes about a tenth of a batch's time.
const BATCHES: usize = 4;

/// Most reads in a turn. Then deadlines, aborts and copying have theirs, however much the peer sends (I5).
const READS: usize = 16;

/// Multiple of [`crate::TransferLimits::silence`] after which a session ends if no batch was applied, though the peer is heard of.
const STUCK: u32 = 2;

/// Waits until the previous session to the same worker has ended, connects, and serves until the connection or the sender ends. Then tells
/// the worker so, if it must.
pub(crate) fn run(plan: Plan, before: Option<Arc<Thread>>, queue: Arc<Queue>) {
    let plan = Arc::new(plan);
    let serves = AssertUnwindSafe(|| begin_and_serve(&plan, before.clone(), &queue));
    let error = catch_unwind(serves).unwrap_or_else(|_| panicked());
    // However this session ended: neither the next one nor an excuse may come before the previous one has unmapped (I3).
    before.into_iter().for_each(|before| before.wait());
    if plan.paths(|paths| queue.with(|line| tells_peer(&error, line, paths))) {
        plan.excuse(Interrupt { wake: &queue.wake, stopped: &|| queue.is_stopped() });
    }
}

fn panicked() -> TransferError {
    TransferError::os("serve a decode worker", "its thread panicked")
}

/// Returns why the session ended. By then its queue is closed.
fn begin_and_serve(plan: &Arc<Plan>, before: Option<Arc<Thread>>, queue: &Arc<Queue>) -> TransferError {
    let mut end = End { queue: queue.clone(), error: panicked(), idle: false };
    let mut outbound = outbound(plan);
    let connected = match dial(plan, before, queue, &mut outbound) {
        Ok(connected) => connected,
        Err(error) => {
            // The connecting thread may have begun a session that nobody serves.
            plan.paths(|paths| paths.over(false));
            end.error = error.clone();
            return error;
        }
    };
    let (near, kind) = (connected.links.own.is_unix(), connected.kind);
    let mut session = Session::new(plan.clone(), queue.clone(), connected, outbound);
    let idle = &mut end.idle;
    // The closure owns the session. So the session is dropped, and the peer's pool unmapped, even in a panic.
    let served = catch_unwind(AssertUnwindSafe(move || {
        let error = session.serve();
        let blames;
        (*idle, blames) = session.queue.with(|line| (line.idle(), blames_path(&error, line)));
        if blames {
            session.plan.failed(kind, &error);
        }
        session.wind_up(&error);
        error
    }));
    if let Ok(error) = served {
        end.error = error;
    }
    plan.paths(|paths| paths.over(near));
    end.error.clone()
}

/// Closes the queue when dropped, even in a panic. By then the connection is closed and the peer's pool unmapped.
struct End {
    queue: Arc<Queue>,
    error: TransferError,
    /// Nothing was under way, as when a worker leaves the cluster.
    idle: bool,
}

impl Drop for End {
    fn drop(&mut self) {
        match &self.error {
            TransferError::Closed => {}
            error @ TransferError::Idle { .. } => tracing::debug!(%error, "transfer session ended"),
            error if self.idle => tracing::info!(%error, "transfer session ended"),
            error => tracing::warn!(%error, "transfer session ended"),
        }
        self.queue.close(self.error.clone());
    }
}

struct Session {
    plan: Arc<Plan>,
    queue: Arc<Queue>,
    links: Links,
    /// What blocks travel over.
    kind: TransportKind,
    /// Shape of the peer's pool.
    remote: PoolGeometry,
    /// None until the peer has handed out its pool; over TCP set from the start.
    transport: Option<Box<dyn Transport>>,
    outbound: Outbound,
    /// Bytes carried since a handoff was last verified, and the time that took.
    meter: Meter,
    /// More may be there to read.
    unread: bool,
    /// Why copying could not be stopped. The peer's pool may still change, so nothing more may be said to the peer (I3).
    stuck: Option<TransferError>,
    /// Outcomes reported only once the transport is dropped, since it may read their local blocks until then.
    held: Vec<Effect>,
    /// When this thread gives way.
    courtesy: Courtesy,
}

/// The handoffs' state before the session is connected: there is no pool to copy to yet.
pub(super) fn outbound(plan: &Plan) -> Outbound {
    let (parties, options) = (Parties { me: plan.me(), peer: plan.peer() }, &plan.config.options);
    Outbound::new(parties, Pools::alike(options.geometry.clone()), &options.limits)
}

impl Session {
    fn new(
        plan: Arc<Plan>,
        queue: Arc<Queue>,
        Connected { links, kind, remote }: Connected,
        mut outbound: Outbound,
    ) -> Session {
        let options = &plan.config.options;
        let (local, verify) = (options.geometry.clone(), options.verify);
        let batch_bytes = match kind {
            TransportKind::CudaIpc => DEVICE_BATCH_BYTES,
            TransportKind::Ucx if options.pool.is_device() || plan.target.device => PUT_BATCH_BYTES,
            _ => BATCH_BYTES,
        };
        outbound.reaches(Pools { local, remote: remote.clone(), batch_bytes, verify });
        let (meter, unread, stuck, held) = (Meter::default(), false, None, Vec::new());
        let (transport, courtesy) = (None, options.courtesy.clone());
        Session { plan, queue, links, kind, remote, transport, outbound, meter, unread, stuck, held, courtesy }
    }

    /// Sends blocks over `transport` from now on. Converts them to the peer's KV type, and takes them out of a device by [`Staging`].
    fn carry(&mut self, transport: Box<dyn Transport>) -> Result<(), TransferError> {
        let options = &self.plan.config.options;
        let (from, to) = (options.geometry.layout.clone(), self.remote.layout.clone());
        let convert = options.convert.clone().filter(|_| from.dtype != to.dtype);
        let convert = convert.map(|converter| Conversions { converter, from, to });
        let carried: Box<dyn Transport> = match (self.plan.pool().reach()?, convert) {
            (Reach::Host(_), None) => transport,
            (Reach::Host(_), Some(convert)) => Box::new(Converting::new(options.pool.clone(), transport, convert)),
            (Reach::Device(queue), convert) => {
                let queue = InOrder::new(queue, options.limits.grace());
                match (self.kind, convert) {
                    (TransportKind::Ucx, None) => Box::new(Staging::direct(options.pool.clone(), queue, transport)),
                    (_, convert) => Box::new(Staging::new(options.pool.clone(), queue, transport, convert)),
                }
            }
        };
        self.transport = Some(self.plan.wrap(carried));
        Ok(())
    }

    /// Serves until the session ends; returns why.
    fn serve(&mut self) -> TransferError {
        if self.kind == TransportKind::Tcp
            && let Err(error) = self.carry(Box::new(Tcp::new(self.links.count())))
        {
            return error;
        }
        loop {
            if let Err(error) = self.turn() {
                return error;
            }
        }
    }

    /// Does everything that can be done now, then waits.
    fn turn(&mut self) -> Result<(), TransferError> {
        if let Some(error) = self.queue.is_over() {
            return Err(error);
        }
        let now = Instant::now();
        let peer = self.plan.peer();
        let next_stuck =
            self.stuck_at().map(|at| if at <= now { Err(self.lost("what is put arrives no more")) } else { Ok(at) });
        let next_stuck = next_stuck.transpose()?;
        let (next_deadline, next_idle) = self.with(|outbound, line| {
            line.take_aborts().into_iter().for_each(|(epoch, quiet)| outbound.abort(epoch, quiet, now, line));
            (outbound.expire(now, line), line.rest(peer, now))
        });
        self.stuck.clone().map_or(Ok(()), Err)?;
        // An op taken up below may have a deadline of its own, so only a turn without progress waits.
        let mut busy = false;
        for _ in 0..BATCHES {
            if !self.copy_some(now)? {
                break;
            }
            busy = true;
        }
        let may_say = !self.links.own.has_output();
        let next_beat = self.with(|outbound, _| outbound.beat(now, may_say));
        self.links.flush().map_err(|e| self.lost(e))?;
        if self.links.own.frames_queued() > MAX_QUEUED + 2 * self.plan.config.options.limits.handoffs {
            return Err(self.lost("it reads nothing of what it is sent"));
        }
        let also =
            self.transport.as_ref().filter(|_| self.outbound.in_flight() > 0).and_then(|transport| transport.fd());
        // Output that blocked the copying may just have been sent.
        let busy = busy || self.outbound.in_flight() > 0 && also.is_none() && !self.links.has_output();
        let reads = !self.is_full();
        let busy = busy || self.unread && reads;
        let timeout = match busy {
            true => Some(Duration::ZERO),
            false => {
                let next = [next_deadline, next_beat, next_stuck, next_idle].into_iter().flatten().min();
                next.map(|at| at.saturating_duration_since(now))
            }
        };
        let wait = if self.outbound.awaits_answer() || also.is_some() { wait_awake } else { wait };
        let mut fds = self.links.interests(reads);
        fds.extend(also.map(|fd| (fd, Interest::Read)));
        let ready = wait(&self.queue.wake, &fds, timeout)?;
        if ready & 1 != 0 || self.unread {
            self.read()?;
        }
        self.links.listen(ready >> 1).map_err(|problem| self.lost(problem))?;
        self.stuck.clone().map_or(Ok(()), Err)
    }

    /// When a batch under way must have been applied. Only for one-sided transports, where no frame shows that batches are applied.
    fn stuck_at(&self) -> Option<Instant> {
        let since = self.meter.since().filter(|_| self.kind.is_one_sided())?;
        Some(since + self.plan.config.options.limits.silence * STUCK)
    }

    /// Whether so many frames wait for the peer that nothing is read from it.
    fn is_full(&self) -> bool {
        self.links.own.frames_queued() >= MAX_QUEUED
    }

    /// Reads and handles some of what the peer sent.
    fn read(&mut self) -> Result<(), TransferError> {
        self.unread = true;
        for _ in 0..READS {
            while !self.is_full()
                && let Some(frame) = self.links.own.next_frame().map_err(|m| self.broken(m))?
            {
                self.handle(frame)?;
            }
            if self.is_full() {
                return Ok(());
            }
            match self.links.own.fill().map_err(|e| self.lost(e))? {
                Got::Bytes(_) => self.outbound.heard(Instant::now()),
                Got::Blocked => {
                    self.unread = false;
                    return Ok(());
                }
                Got::Ended => return Err(self.lost("it closed the connection")),
            }
        }
        Ok(())
    }

    fn handle(&mut self, frame: Frame) -> Result<(), TransferError> {
        match &frame {
            Frame::Access(access) => return self.reach_pool(access),
            Frame::Handle { bytes, handle } => return self.open_pool(*bytes, handle),
            _ => {}
        }
        if matches!(frame, Frame::Granted { .. }) && self.transport.is_none() {
            self.map_pool()?;
        }
        let kind = self.transport.as_ref().map_or(self.kind, |transport| transport.kind());
        self.with(|outbound, line| outbound.frame(frame, kind, Instant::now(), line))
    }

    /// Maps the peer's pool, whose descriptor came with the first grant.
    fn map_pool(&mut self) -> Result<(), TransferError> {
        let fd = self.links.own.take_fd().filter(|_| self.kind == TransportKind::Shm);
        let fd = fd.ok_or_else(|| self.broken(Malformed::new("pool", "its descriptor is missing")))?;
        let shm = Shm::map(self.plan.peer(), self.plan.pool().clone(), fd, &self.remote)?;
        self.carry(Box::new(shm))
    }

    /// Opens the peer's pool in device memory. Its handle comes before the first grant, and a descriptor of the pool with it.
    fn open_pool(&mut self, bytes: u64, handle: &[u8]) -> Result<(), TransferError> {
        let wanted = self.kind == TransportKind::CudaIpc && self.transport.is_none();
        let Some(local) = self.plan.pool().host().err().filter(|_| wanted) else {
            return Err(self.broken(Malformed::new("handle", "not asked for")));
        };
        if bytes < self.remote.bytes() as u64 {
            let problem = format!("{bytes} bytes, its geometry needs {}", self.remote.bytes());
            return Err(self.broken(Malformed::new("handle", problem)));
        }
        let grace = self.plan.config.options.limits.grace();
        let handle = PoolHandle { bytes: handle.to_vec(), descriptor: self.links.own.take_fd() };
        let (copies, by) = CudaIpc::open(self.plan.peer(), &**local, handle, &self.remote, grace)?;
        tracing::debug!(peer = %self.plan.peer(), %by, "the peer's pool is open");
        self.plan.paths(|paths| paths.opened(by));
        self.transport = Some(self.plan.wrap(Box::new(copies)));
        Ok(())
    }

    /// Connects to the peer's pool over UCX. Its key comes before the first grant.
    fn reach_pool(&mut self, access: &Access) -> Result<(), TransferError> {
        let (plan, wanted) = (&self.plan, self.kind == TransportKind::Ucx && self.transport.is_none());
        let Some(engine) = plan.config.ucx.as_ref().ok().filter(|_| wanted) else {
            return Err(self.broken(Malformed::new("access", "not asked for")));
        };
        let ucx = Ucx::connect(engine, plan.peer(), &self.remote, access, self.links.own.is_unix())?;
        self.carry(Box::new(ucx))
    }

    /// Runs `act` on the handoffs, then carries out the effects.
    fn with<T>(&mut self, act: impl FnOnce(&mut Outbound, &mut Line) -> T) -> T {
        let outbound = &mut self.outbound;
        let answer = self.queue.with(|line| act(outbound, line));
        for effect in self.outbound.take_effects() {
            match effect {
                Effect::Cancel(epoch) => {
                    // Copies that cannot be stopped are waited for only once: the peer hears nothing meanwhile.
                    let transport = self.transport.as_mut().filter(|_| self.stuck.is_none());
                    let cancelled = transport.map_or(Ok(()), |transport| transport.cancel(epoch, &mut self.links));
                    self.stuck = self.stuck.take().or(cancelled.err());
                    self.meter.cancelled(epoch, Instant::now());
                }
                Effect::Send(_) if self.stuck.is_some() => {}
                // Their local blocks may still be read.
                Effect::Report(..) | Effect::Hush(_) if self.stuck.is_some() => self.held.push(effect),
                Effect::Send(frame) => self.links.send(frame),
                Effect::Report(done, outcome) => {
                    self.plan.ended(self.kind, &outcome, &mut self.meter);
                    done.report(outcome);
                }
                Effect::Hush(quiet) => drop(quiet),
            }
        }
        let awaits = self.outbound.awaits_outcome();
        if awaits != self.meter.awaits() {
            self.meter.set_awaits(awaits, Instant::now());
        }
        answer
    }

    /// Goes on copying, by one batch at most. True when more can be done without waiting.
    fn copy_some(&mut self, now: Instant) -> Result<bool, TransferError> {
        let mut busy = false;
        if let Some(transport) = self.transport.as_mut().filter(|_| self.outbound.in_flight() > 0) {
            let progress = transport.poll(&mut self.links)?;
            busy = progress == Progress::Runnable;
            if progress == Progress::Flushed {
                self.outbound.flushed(transport.take_digests());
                self.meter.flushed(Instant::now());
                // The next batch may be flushed, too.
                busy = self.outbound.in_flight() > 0;
            } else if self.outbound.in_flight() >= transport.depth() {
                return Ok(busy);
            }
        }
        if let Some(transport) = &mut self.transport {
            // SAFETY: local blocks stay unchanged until their handoff's end is reported.
            let mut memory = self.plan.pool().host().ok().map(|segment| unsafe { segment.still() });
            let memory = memory.as_mut().map(|memory| memory as &mut dyn PoolMemory).filter(|_| !transport.digests());
            if let Some(batch) = self.outbound.next_batch(memory, now)? {
                self.courtesy.copied(batch.bytes());
                self.meter.submitted(batch.epoch, batch.bytes() as u64, Instant::now());
                transport.submit(Load::new(batch), &mut self.links)?;
                return Ok(true);
            }
        }
        Ok(self.with(|outbound, line| outbound.next_op(now, line)) || busy)
    }

    /// Ends every handoff. Those whose copying could not be stopped are reported after the transport is dropped.
    fn wind_up(mut self, error: &TransferError) {
        self.take_leave(error);
        let Session { transport, held, .. } = self;
        drop(transport);
        for effect in held {
            if let Effect::Report(done, outcome) = effect {
                done.report(outcome);
            }
        }
    }

    /// Ends every handoff and tells the peer, as far as it still reads. Waits a moment until the peer has read that: a stream closed
    /// before may lose the rest.
    fn take_leave(&mut self, error: &TransferError) {
        self.with(|outbound, line| outbound.end_all(error, Instant::now(), line));
        // The queue closes first, so a failed handoff that is opened again gets a new session. That session begins only when this thread
        // has ended, so the peer may take it as this session's end. If a copy could not be stopped, the queue closes later, since the copy
        // may read local blocks until then.
        if self.stuck.is_none() {
            self.queue.close(error.clone());
        }
        let until = Instant::now() + FAREWELL;
        // The further connections close with this session, after the last frames on its own.
        while self.links.own.flush().is_ok() && self.links.own.has_output() && self.wait_until(until, Interest::Write) {
        }
        if self.links.own.has_output() || self.links.own.finish().is_err() {
            return;
        }
        loop {
            match self.links.own.discard_payload(usize::MAX) {
                // I5: bounded in time, however much the peer sends.
                Ok(Got::Bytes(_)) if Instant::now() < until => {}
                Ok(Got::Blocked) if self.wait_until(until, Interest::Read) => {}
                _ => return,
            }
        }
    }

    /// Waits until the socket is ready or the queue rings. False once `until` has passed.
    fn wait_until(&self, until: Instant, interest: Interest) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        !left.is_zero() && wait(&self.queue.wake, &[(self.links.own.as_fd(), interest)], Some(left)).is_ok()
    }

    fn lost(&self, cause: impl ToString) -> TransferError {
        TransferError::PeerLost { peer: self.plan.peer(), cause: cause.to_string() }
    }

    fn broken(&self, malformed: Malformed) -> TransferError {
        TransferError::broken(self.plan.peer(), malformed)
    }
}

#[cfg(test)]
pub(super) mod tests;
