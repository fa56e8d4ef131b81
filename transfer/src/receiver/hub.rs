//! What the decode end's threads share: the reservations, the events they cause, the sessions that can be told to fence.
//!
//! Every step of a reservation goes through here, so that its action, its event and the word to its session happen in
//! one order for everybody.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use baton_types::{BlockId, Epoch, WorkerId};

use super::table::{Blocks, SessionId, Stepped, Table};
use super::{FenceState, OnEvent, ReceiverEvent, ReceiverStats};
use crate::error::TransferError;
use crate::options::{ReceiverOptions, TransportKind};
use crate::state::{Action, Input, State};
use crate::threads::lock;
use crate::wake::Wake;

/// How other threads reach a session's.
pub(crate) struct Mail {
    pub wake: Wake,
    fences: Mutex<Vec<Epoch>>,
    superseded: AtomicBool,
}

impl Mail {
    pub(crate) fn new() -> Result<Mail, TransferError> {
        Ok(Mail { wake: Wake::new()?, fences: Mutex::default(), superseded: AtomicBool::new(false) })
    }

    fn fence(&self, epoch: Epoch) {
        lock(&self.fences).push(epoch);
        self.wake.ring();
    }

    /// Epochs to fence, each once. At most one per reservation.
    pub(crate) fn take_fences(&self) -> Vec<Epoch> {
        std::mem::take(&mut *lock(&self.fences))
    }

    /// Whether the same worker has started another session, so that it has ended this one.
    pub(crate) fn superseded(&self) -> bool {
        self.superseded.load(Ordering::Acquire)
    }
}

struct Member {
    mail: Arc<Mail>,
    worker: Option<WorkerId>,
}

#[derive(Default)]
struct Events {
    queue: VecDeque<ReceiverEvent>,
    delivering: bool,
}

#[derive(Default)]
struct Counters {
    verified: AtomicU64,
    failed: AtomicU64,
    verify_failures: AtomicU64,
    shm_bytes: AtomicU64,
    tcp_bytes: AtomicU64,
}

/// The shared part of a receiver.
pub(crate) struct Hub {
    pub options: ReceiverOptions,
    on_event: OnEvent,
    table: Mutex<Table>,
    events: Mutex<Events>,
    sessions: Mutex<HashMap<SessionId, Member>>,
    stopped: AtomicBool,
    counters: Counters,
    /// Wakes the thread that accepts peers and watches leases.
    pub wake: Wake,
}

impl Hub {
    pub(crate) fn new(options: ReceiverOptions, on_event: OnEvent) -> Result<Hub, TransferError> {
        Ok(Hub {
            table: Mutex::new(Table::new(&options.geometry, options.limits.clone())),
            options,
            on_event,
            events: Mutex::default(),
            sessions: Mutex::default(),
            stopped: AtomicBool::new(false),
            counters: Counters::default(),
            wake: Wake::new()?,
        })
    }

    /// Ends every thread soon.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake.ring();
        lock(&self.sessions).values().for_each(|member| member.mail.wake.ring());
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Sets blocks aside.
    pub(crate) fn reserve(
        &self,
        epoch: Epoch,
        key: u64,
        blocks: &[Vec<BlockId>],
        expires: Instant,
    ) -> Result<(), TransferError> {
        let first = {
            let mut table = lock(&self.table);
            table.reserve(epoch, key, blocks, expires)?;
            table.next_expiry() == Some(expires)
        };
        if first {
            self.wake.ring();
        }
        Ok(())
    }

    /// Takes a reservation back for its owner.
    pub(crate) fn fence(&self, epoch: Epoch) -> FenceState {
        match self.step(epoch, Input::Abort) {
            Some(stepped) if stepped.after != State::Released => FenceState::Pending,
            _ => FenceState::Clear,
        }
    }

    /// Ends a verified reservation's lease.
    pub(crate) fn release(&self, epoch: Epoch) {
        if let Some(stepped) = self.step(epoch, Input::Release)
            && stepped.action == Action::Refuse
        {
            tracing::error!(%epoch, state = ?stepped.before, "released before it was verified; the lease goes on");
        }
    }

    /// A step of the owner, without a failure of its own.
    fn step(&self, epoch: Epoch, input: Input) -> Option<Stepped> {
        let stepped = {
            let mut table = lock(&self.table);
            let stepped = table.step(epoch, input)?;
            self.carry_out(epoch, stepped, || TransferError::Closed);
            stepped
        };
        self.deliver();
        Some(stepped)
    }

    /// Lets a session write.
    pub(crate) fn grant(&self, epoch: Epoch, key: u64, session: SessionId) -> Result<Blocks, String> {
        lock(&self.table).grant(epoch, key, session)
    }

    /// Steps a reservation on behalf of a session. False when the session has no say in it or it has no place.
    pub(crate) fn step_as(
        &self,
        session: SessionId,
        epoch: Epoch,
        input: Input,
        error: impl FnOnce() -> TransferError,
    ) -> bool {
        let stepped = {
            let mut table = lock(&self.table);
            let stepped = table.step_as(session, epoch, input);
            if let Some(stepped) = stepped {
                self.carry_out(epoch, stepped, error);
            }
            stepped
        };
        self.deliver();
        stepped.is_some_and(|s| s.action != Action::Refuse)
    }

    /// Every digest of a handoff matches: tells the owner, unless it has taken the blocks back meanwhile.
    pub(crate) fn verified(&self, session: SessionId, event: ReceiverEvent) -> bool {
        let ReceiverEvent::Verified { epoch, bytes, transport, .. } = event else { return false };
        let announced = {
            let mut table = lock(&self.table);
            let stepped = table.step_as(session, epoch, Input::Verify);
            let announced = stepped.is_some_and(|s| s.action == Action::Announce);
            if announced {
                lock(&self.events).queue.push_back(event);
            }
            announced
        };
        if announced {
            let moved = match transport {
                TransportKind::Shm => &self.counters.shm_bytes,
                TransportKind::Tcp => &self.counters.tcp_bytes,
            };
            moved.fetch_add(bytes, Ordering::Relaxed);
            self.counters.verified.fetch_add(1, Ordering::Relaxed);
        }
        self.deliver();
        announced
    }

    /// Does what a step asks for, under the table's lock, so that events keep the order of steps.
    fn carry_out(&self, epoch: Epoch, stepped: Stepped, error: impl FnOnce() -> TransferError) {
        let Stepped { before, action, session, .. } = stepped;
        if matches!(action, Action::FailAndFree | Action::FailAndFence) {
            let error = error();
            self.counters.failed.fetch_add(1, Ordering::Relaxed);
            if matches!(error, TransferError::Verify { .. }) {
                self.counters.verify_failures.fetch_add(1, Ordering::Relaxed);
            }
            match error.is_withdrawal() {
                true => tracing::debug!(%epoch, %error, "handoff withdrawn"),
                false => tracing::warn!(%epoch, %error, "handoff failed"),
            }
            lock(&self.events).queue.push_back(ReceiverEvent::Failed { epoch, error });
        }
        // Whoever takes back blocks that nobody could write to has been told so by the call itself.
        let was_pending = matches!(before, State::Aborted | State::Expired);
        if action == Action::FailAndFree || action == Action::Free && was_pending {
            lock(&self.events).queue.push_back(ReceiverEvent::Fenced { epoch });
        }
        if matches!(action, Action::Fence | Action::FailAndFence)
            && let Some(session) = session
            && let Some(member) = lock(&self.sessions).get(&session)
        {
            member.mail.fence(epoch);
        }
    }

    /// Hands events to the owner, one at a time and in order, by whichever thread comes first. No lock is held
    /// meanwhile, so the owner may call back.
    fn deliver(&self) {
        loop {
            let event = {
                let mut events = lock(&self.events);
                if events.delivering {
                    return;
                }
                let Some(event) = events.queue.pop_front() else { return };
                events.delivering = true;
                event
            };
            if catch_unwind(AssertUnwindSafe(|| (self.on_event)(event))).is_err() {
                tracing::error!("the receiver's event callback panicked");
            }
            lock(&self.events).delivering = false;
        }
    }

    /// Fails every reservation whose lease has run out; answers when to look again.
    pub(crate) fn expire(&self, now: Instant) -> Option<Instant> {
        let next = {
            let mut table = lock(&self.table);
            for epoch in table.expired(now) {
                if let Some(stepped) = table.step(epoch, Input::Expire) {
                    self.carry_out(epoch, stepped, || TransferError::Expired { epoch });
                }
            }
            table.next_expiry()
        };
        self.deliver();
        next
    }

    /// Epochs under which a session may write.
    pub(crate) fn held_by(&self, session: SessionId) -> Vec<Epoch> {
        lock(&self.table).held_by(session)
    }

    /// Counts a session in, or says that there are too many.
    pub(crate) fn admit(&self, session: SessionId, mail: Arc<Mail>) -> bool {
        let mut sessions = lock(&self.sessions);
        let room = sessions.len() < self.options.limits.connections;
        if room {
            sessions.insert(session, Member { mail, worker: None });
        }
        room
    }

    /// Names a session's peer. A worker opens a new session only after its last one has stopped writing, so earlier
    /// ones of the same worker are over.
    pub(crate) fn introduce(&self, session: SessionId, worker: WorkerId) {
        let mut sessions = lock(&self.sessions);
        for member in sessions.values().filter(|m| m.worker == Some(worker)) {
            member.mail.superseded.store(true, Ordering::Release);
            member.mail.wake.ring();
        }
        if let Some(member) = sessions.get_mut(&session) {
            member.worker = Some(worker);
        }
    }

    pub(crate) fn dismiss(&self, session: SessionId) {
        lock(&self.sessions).remove(&session);
    }

    pub(crate) fn stats(&self) -> ReceiverStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ReceiverStats {
            verified: read(&self.counters.verified),
            failed: read(&self.counters.failed),
            verify_failures: read(&self.counters.verify_failures),
            shm_bytes: read(&self.counters.shm_bytes),
            tcp_bytes: read(&self.counters.tcp_bytes),
            reservations: lock(&self.table).len(),
            sessions: lock(&self.sessions).len(),
        }
    }
}
