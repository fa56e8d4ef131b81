//! The session to one decode worker at the prefill end, on its own thread: asks for access, digests and copies what
//! handoffs queue, completes them, and stops at once when fenced.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_types::{BlockId, Epoch, PoolGeometry, digest_block};

use super::active::{Active, Writing};
use super::connect::{Connected, Plan};
use super::queue::{Op, Queue};
use crate::codec::Malformed;
use crate::error::TransferError;
use crate::link::{Got, Link};
use crate::options::TransportKind;
use crate::shm::Shm;
use crate::state::{Action, Input, State};
use crate::tcp::Tcp;
use crate::transport::{Progress, Transport};
use crate::wake::{Interest, wait};
use crate::wire::{Frame, Refusal};

/// How long a session that ends goes on trying to say so.
const FAREWELL: Duration = Duration::from_millis(500);

/// Connects and serves until the connection or the sender ends.
pub(crate) fn run(plan: Plan, queue: Arc<Queue>) {
    let panicked = TransferError::os("serve a decode worker", "its thread panicked");
    let mut end = End { queue: queue.clone(), error: panicked, idle: false };
    let plan = Arc::new(plan);
    let connected = match plan.connect(&queue) {
        Ok(connected) => connected,
        Err(error) => return end.error = error,
    };
    let over_shm = connected.link.kind() == TransportKind::Shm;
    let mut session = Session::new(plan.clone(), queue.clone(), connected);
    let idle = &mut end.idle;
    // The session goes in there, so that it is dropped, and with it the mapping of the peer's pool, also in a panic.
    let served = catch_unwind(AssertUnwindSafe(move || {
        let error = session.serve();
        *idle = session.queue.idle();
        session.wind_up(&error);
        error
    }));
    if let Ok(error) = served {
        end.error = error;
    }
    if over_shm
        && end.error != TransferError::Closed
        && let Err(error) = plan.excuse(&queue)
    {
        tracing::debug!(%error, "the decode worker is gone, or learns by the next session that this one has unmapped");
    }
}

/// Closes the queue as the very last thing, also in a panic: when the connection is closed and the peer's pool unmapped.
/// Only then may another session be opened to the same worker, which takes that as this one's end.
struct End {
    queue: Arc<Queue>,
    error: TransferError,
    /// Nothing was under way: a worker that leaves the cluster looks like this.
    idle: bool,
}

impl Drop for End {
    fn drop(&mut self) {
        match &self.error {
            TransferError::Closed => {}
            error if self.idle => tracing::info!(%error, "transfer session ended"),
            error => tracing::warn!(%error, "transfer session ended"),
        }
        self.queue.close(self.error.clone());
    }
}

struct Session {
    plan: Arc<Plan>,
    queue: Arc<Queue>,
    link: Link,
    /// Shape of the peer's pool.
    remote: PoolGeometry,
    /// None over shared memory until the pool was handed out.
    transport: Option<Box<dyn Transport>>,
    active: HashMap<Epoch, Active>,
    /// The write being copied.
    writing: Option<Writing>,
    /// Whether the transport holds a batch that is not flushed.
    copying: bool,
}

impl Session {
    fn new(plan: Arc<Plan>, queue: Arc<Queue>, Connected { link, remote }: Connected) -> Session {
        let mut session = Session {
            plan,
            queue,
            link,
            remote,
            transport: None,
            active: HashMap::new(),
            writing: None,
            copying: false,
        };
        if session.link.kind() == TransportKind::Tcp {
            session.transport = Some(session.plan.wrap(Box::new(Tcp)));
        }
        session
    }

    /// Serves until the session ends; answers why.
    fn serve(&mut self) -> TransferError {
        loop {
            if let Err(error) = self.turn() {
                return error;
            }
        }
    }

    /// Everything that can be done now, then a wait.
    fn turn(&mut self) -> Result<(), TransferError> {
        if self.queue.stopped() {
            return Err(TransferError::Closed);
        }
        for (epoch, quiet) in self.queue.take_aborts() {
            self.end(epoch, Input::Abort, TransferError::Aborted { epoch });
            self.bury(epoch);
            drop(quiet);
        }
        let next_deadline = self.expire(Instant::now());
        let busy = self.copy_some()?;
        self.link.flush().map_err(|e| self.lost(e))?;
        // What blocked the copying may just have left.
        let busy = busy || self.copying && !self.link.has_output();
        let timeout = match busy {
            true => Some(Duration::ZERO),
            false => next_deadline.map(|at| at.saturating_duration_since(Instant::now())),
        };
        let interest = if self.link.has_output() { Interest::ReadWrite } else { Interest::Read };
        if wait(&self.queue.wake, &[(self.link.as_fd(), interest)], timeout)? != 0 {
            self.read()?;
        }
        Ok(())
    }

    fn read(&mut self) -> Result<(), TransferError> {
        loop {
            while let Some(frame) = self.link.next_frame().map_err(|m| self.broken(m))? {
                self.handle(frame)?;
            }
            match self.link.fill().map_err(|e| self.lost(e))? {
                Got::Bytes(_) => {}
                Got::Blocked => return Ok(()),
                Got::Ended => return Err(self.lost("it closed the connection")),
            }
        }
    }

    fn handle(&mut self, frame: Frame) -> Result<(), TransferError> {
        match frame {
            Frame::Granted { epoch, blocks } => self.granted(epoch, blocks),
            Frame::Verified { epoch } => self.verified(epoch),
            Frame::Failed { epoch, refusal } => {
                let error = self.refused(epoch, refusal);
                self.end(epoch, Input::Refute, error);
                Ok(())
            }
            Frame::Fence { epoch } => {
                let peer = self.plan.peer();
                self.end(epoch, Input::Fenced, TransferError::Fenced { epoch, peer });
                // I3: from here on nothing is copied under this epoch, known or not.
                self.link.push(&Frame::FenceAck { epoch });
                Ok(())
            }
            other => Err(self.broken(Malformed::new("kind", format!("{other:?} is not for a prefill worker")))),
        }
    }

    fn granted(&mut self, epoch: Epoch, blocks: Vec<Vec<BlockId>>) -> Result<(), TransferError> {
        if self.transport.is_none() {
            let fd = self.link.take_fd();
            let fd = fd.ok_or_else(|| self.broken(Malformed::new("pool", "its descriptor is missing")))?;
            let local = self.plan.segment();
            let shm = Shm::map(self.plan.peer(), local, fd, self.remote.clone());
            let shm = shm.inspect_err(|_| self.plan.avoid_shm())?;
            self.transport = Some(self.plan.wrap(Box::new(shm)));
        }
        // A handoff given up meanwhile has said so; the peer knows by now or will.
        let Some(active) = self.active.get_mut(&epoch) else { return Ok(()) };
        if !blocks.iter().map(Vec::len).eq(active.core.counts.iter().map(|n| *n as usize)) {
            return Err(self.broken(Malformed::new("blocks", "not as many as the target descriptor says")));
        }
        if active.step(Input::Grant) == Action::Begin {
            active.targets = blocks;
        }
        Ok(())
    }

    fn verified(&mut self, epoch: Epoch) -> Result<(), TransferError> {
        let Some(active) = self.active.get_mut(&epoch) else { return Ok(()) };
        let Some(done) = active.done.take() else {
            return Err(self.broken(Malformed::new("epoch", "verified before it was completed")));
        };
        let kind = self.transport.as_ref().map_or(self.link.kind(), |transport| transport.kind());
        let announced = active.step(Input::Verify) == Action::Announce;
        let stats = active.stats(kind);
        active.step(Input::Release);
        self.bury(epoch);
        if announced {
            done.report(Ok(stats));
        }
        Ok(())
    }

    /// Ends a handoff that will not be verified: stops copying, tells the peer if it does not know, reports.
    fn end(&mut self, epoch: Epoch, input: Input, error: TransferError) {
        let Some(active) = self.active.get_mut(&epoch) else { return };
        let before = active.state;
        active.step(input);
        if before == State::Released {
            return;
        }
        if self.writing.take_if(|w| w.epoch == epoch).is_some()
            && std::mem::take(&mut self.copying)
            && let Some(transport) = &mut self.transport
        {
            transport.cancel(&mut self.link);
        }
        if matches!(input, Input::Abort | Input::Expire) {
            self.link.push(&Frame::Abort { epoch });
        }
        // Stopped, and said so.
        active.step(Input::Fenced);
        let queued = self.queue.forget(epoch);
        // The handoff's owner learns of it at its next call, or now when it has made its last.
        let _ = active.core.failure.set(error.clone());
        if let Some(done) = active.done.take().or(queued) {
            self.bury(epoch);
            done.report(Err(error));
        }
    }

    fn bury(&mut self, epoch: Epoch) {
        self.active.remove(&epoch);
        self.queue.retire(epoch);
    }

    /// Ends handoffs whose time is over; answers when the next one's is.
    fn expire(&mut self, now: Instant) -> Option<Instant> {
        let grant = self.plan.config.options.limits.handshake;
        let running = |active: &&Active| active.state != State::Released;
        let late = self.active.values().filter(running).filter(|a| a.due(grant) <= now);
        for (epoch, error) in late.map(|a| (a.core.epoch, a.late(now, grant))).collect::<Vec<_>>() {
            self.end(epoch, Input::Expire, error);
        }
        self.active.values().filter(running).map(|a| a.due(grant)).min()
    }

    /// Goes on copying, a batch at most. True when there is more to do without waiting.
    fn copy_some(&mut self) -> Result<bool, TransferError> {
        if let Some(transport) = self.transport.as_mut().filter(|_| self.copying) {
            match transport.poll(&mut self.link)? {
                Progress::Blocked => return Ok(false),
                Progress::Runnable => return Ok(true),
                Progress::Flushed => self.copying = false,
            }
        }
        if self.writing.as_ref().is_some_and(Writing::is_done) {
            self.writing = None;
        }
        if self.writing.is_some() {
            self.submit()?;
            return Ok(true);
        }
        let active = &self.active;
        // In order; an op whose handoff waits for access holds back the rest, since all wait for the same peer.
        let ready = |op: &Op| active.get(&op.epoch()).is_none_or(|active| active.state != State::Reserved);
        let Some(op) = self.queue.next_if(ready) else { return Ok(false) };
        self.carry_out(op);
        Ok(true)
    }

    fn carry_out(&mut self, op: Op) {
        match op {
            Op::Begin(core) => {
                let (epoch, key) = (core.epoch, core.key);
                self.active.insert(epoch, Active::new(core));
                self.link.push(&Frame::Begin { epoch, key });
            }
            Op::Write { epoch, group, layer, pairs } => {
                // A failed handoff's writes are dropped; its owner learns of the failure by its next call.
                if self.active.get(&epoch).is_some_and(|active| active.state == State::Transferring) {
                    self.writing = Some(Writing { epoch, group, layer, pairs, next: 0 });
                }
            }
            Op::Complete { epoch, tail, done } => {
                let Some(active) = self.active.get_mut(&epoch) else { return drop(done) };
                if let Some(error) = active.core.failure.get().cloned() {
                    self.bury(epoch);
                    return done.report(Err(error));
                }
                active.done = Some(done);
                let (writes, digests) = (active.writes, active.sums.clone());
                self.link.push(&Frame::Complete { epoch, writes, digests, tail });
            }
        }
    }

    /// Digests the next part of the write under way and hands it to the transport.
    fn submit(&mut self) -> Result<(), TransferError> {
        let (Some(writing), Some(transport)) = (&mut self.writing, &mut self.transport) else { return Ok(()) };
        let Some(active) = self.active.get_mut(&writing.epoch) else { return Ok(()) };
        if active.step(Input::Write) != Action::Apply {
            self.writing = None;
            return Ok(());
        }
        let geometry = self.plan.geometry();
        let pool = self.plan.segment();
        let batch = writing.next_batch(geometry, &active.targets)?;
        let first_lane = geometry.layout.first_lane(batch.group, batch.layer);
        for write in &batch.writes {
            let (offset, len) = write.source;
            let Some(start) = pool.at(offset, len) else { continue };
            // SAFETY: inside the mapping; the block stays unchanged until the handoff's end is reported.
            let bytes = unsafe { std::slice::from_raw_parts(start, len) };
            let sum = &mut active.sums[batch.group][write.index as usize];
            *sum = sum.wrapping_add(digest_block(bytes, first_lane));
            active.bytes += len as u64;
        }
        active.writes += batch.writes.len() as u64;
        self.copying = true;
        transport.submit(batch, &mut self.link)
    }

    /// Ends every handoff, telling the peer as far as it still listens. Waits a moment until it has read that: closed
    /// before, a stream may lose the rest.
    fn wind_up(mut self, error: &TransferError) {
        for epoch in self.active.keys().copied().collect::<Vec<_>>() {
            self.end(epoch, Input::Abort, error.clone());
        }
        let until = Instant::now() + FAREWELL;
        while self.link.flush().is_ok() && self.link.has_output() && self.wait_until(until, Interest::Write) {}
        if self.link.has_output() || self.link.finish().is_err() {
            return;
        }
        loop {
            match self.link.discard_payload(usize::MAX) {
                Ok(Got::Bytes(_)) => {}
                Ok(Got::Blocked) if self.wait_until(until, Interest::Read) => {}
                _ => return,
            }
        }
    }

    /// False when the time is over.
    fn wait_until(&self, until: Instant, interest: Interest) -> bool {
        let left = until.saturating_duration_since(Instant::now());
        !left.is_zero() && wait(&self.queue.wake, &[(self.link.as_fd(), interest)], Some(left)).is_ok()
    }

    fn refused(&self, epoch: Epoch, refusal: Refusal) -> TransferError {
        let peer = self.plan.peer();
        let refused = |reason| TransferError::Refused { epoch, peer, reason };
        match refusal {
            Refusal::NoReservation(reason) => refused(reason),
            Refusal::BadWrite(problem) => refused(format!("bad write: {problem}")),
            Refusal::Incomplete { written, expected } => {
                TransferError::Incomplete { epoch, peer: self.plan.me(), written, expected }
            }
            Refusal::Verify { group, index, block, want, got } => {
                TransferError::Verify { epoch, peer: self.plan.me(), group, index, block, want, got }
            }
        }
    }

    fn lost(&self, cause: impl ToString) -> TransferError {
        TransferError::PeerLost { peer: self.plan.peer(), cause: cause.to_string() }
    }

    fn broken(&self, Malformed { field, problem }: Malformed) -> TransferError {
        TransferError::Protocol { peer: self.plan.peer(), field, problem }
    }
}
