//! What the decode end's threads share: the ledger under its lock, the owner's callback, and how to reach each session.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use baton_handoff::{JoinTicket, Ledger, Members, SessionId, TransferError};
use baton_types::{Epoch, WorkerId};

use super::{OnEvent, ReceiverStats};
use crate::link::Link;
use crate::options::ReceiverOptions;
use crate::threads::lock;
use crate::ucx::UcxEngine;
use crate::wake::Wake;

/// How other threads reach a session's thread.
pub(crate) struct Mail {
    pub wake: Wake,
    fences: Mutex<Vec<Epoch>>,
    joined: Mutex<Vec<(u8, Link)>>,
    superseded: AtomicBool,
}

impl Mail {
    pub(crate) fn new() -> Result<Mail, TransferError> {
        Ok(Mail {
            wake: Wake::new()?,
            fences: Mutex::default(),
            joined: Mutex::default(),
            superseded: AtomicBool::new(false),
        })
    }

    fn fence(&self, epoch: Epoch) {
        lock(&self.fences).push(epoch);
        self.wake.ring();
    }

    /// Takes the epochs to fence. Each is given once; at most one per reservation.
    pub(crate) fn take_fences(&self) -> Vec<Epoch> {
        std::mem::take(&mut *lock(&self.fences))
    }

    /// Hands a further connection to the session.
    pub(crate) fn join(&self, stream: u8, link: Link) {
        lock(&self.joined).push((stream, link));
        self.wake.ring();
    }

    /// Takes the further connections that have joined, with their numbers.
    pub(crate) fn take_joined(&self) -> Vec<(u8, Link)> {
        std::mem::take(&mut *lock(&self.joined))
    }

    /// Whether the same worker has started another session, which ends this one.
    pub(crate) fn superseded(&self) -> bool {
        self.superseded.load(Ordering::Acquire)
    }
}

struct Books {
    ledger: Ledger,
    /// Whether a thread is handing events to the owner.
    delivering: bool,
}

/// The shared part of a receiver.
pub(crate) struct Hub {
    pub options: ReceiverOptions,
    on_event: OnEvent,
    books: Mutex<Books>,
    sessions: Mutex<Members<Arc<Mail>>>,
    stopped: AtomicBool,
    /// The pool registered with UCX, once that was needed.
    ucx: Mutex<Option<Arc<UcxEngine>>>,
    /// Wakes the thread that accepts peers and watches leases.
    pub wake: Wake,
}

impl Hub {
    pub(crate) fn new(options: ReceiverOptions, on_event: OnEvent) -> Result<Hub, TransferError> {
        let ledger = Ledger::new(&options.geometry, options.limits.clone());
        Ok(Hub {
            books: Mutex::new(Books { ledger, delivering: false }),
            on_event,
            sessions: Mutex::new(Members::new(options.limits.connections)),
            options,
            stopped: AtomicBool::new(false),
            ucx: Mutex::default(),
            wake: Wake::new()?,
        })
    }

    /// The pool registered with UCX. The first call that succeeds registers it, which may pin every page of it.
    pub(crate) fn ucx(&self) -> Result<Arc<UcxEngine>, TransferError> {
        let mut ucx = lock(&self.ucx);
        if let Some(engine) = &*ucx {
            return Ok(engine.clone());
        }
        let engine = Arc::new(UcxEngine::open(&self.options.ucx, self.options.pool.clone())?);
        Ok(ucx.insert(engine).clone())
    }

    /// Asks every thread to end.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake.ring();
        lock(&self.sessions).mails().for_each(|mail| mail.wake.ring());
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Runs `act` on the ledger, then passes on the fences and events it caused.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Ledger) -> T) -> T {
        let answer = {
            let mut books = lock(&self.books);
            let before = books.ledger.next_expiry();
            let answer = act(&mut books.ledger);
            let next = books.ledger.next_expiry();
            if next.is_some_and(|next| before.is_none_or(|before| next < before)) {
                self.wake.ring();
            }
            let fences = books.ledger.take_fences();
            if !fences.is_empty() {
                let sessions = lock(&self.sessions);
                for (session, epoch) in fences {
                    sessions.mail(session).into_iter().for_each(|mail| mail.fence(epoch));
                }
            }
            answer
        };
        self.deliver();
        answer
    }

    /// Hands events to the owner, one at a time and in order, on whichever thread gets here first. No lock is held meanwhile, so the owner
    /// may call back.
    fn deliver(&self) {
        loop {
            let event = {
                let mut books = lock(&self.books);
                if books.delivering {
                    return;
                }
                let Some(event) = books.ledger.next_event() else { return };
                books.delivering = true;
                event
            };
            if catch_unwind(AssertUnwindSafe(|| (self.on_event)(event))).is_err() {
                tracing::error!("the receiver's event callback panicked");
            }
            lock(&self.books).delivering = false;
        }
    }

    /// Adds a session; false when there are too many.
    pub(crate) fn admit(&self, session: SessionId, mail: Arc<Mail>) -> bool {
        lock(&self.sessions).admit(session, mail)
    }

    /// Names a session's peer, and ends the earlier sessions of the same worker. `token`: lets further connections join.
    pub(crate) fn introduce(&self, session: SessionId, worker: WorkerId, token: Option<u64>) {
        for mail in lock(&self.sessions).introduce(session, worker, token) {
            mail.superseded.store(true, Ordering::Release);
            mail.wake.ring();
        }
    }

    /// Adds a further connection to its session. Returns how to reach the session, or why the connection is refused.
    pub(crate) fn join(&self, ticket: JoinTicket, stream: u8) -> Result<Arc<Mail>, &'static str> {
        lock(&self.sessions).join(ticket, stream).cloned()
    }

    pub(crate) fn dismiss(&self, session: SessionId) {
        lock(&self.sessions).dismiss(session);
    }

    pub(crate) fn stats(&self) -> ReceiverStats {
        let sessions = lock(&self.sessions).len();
        ReceiverStats { sessions, ..lock(&self.books).ledger.stats() }
    }
}

#[cfg(test)]
impl Hub {
    /// A hub with a small pool, room for this many sessions, and an owner that ignores events.
    pub(crate) fn alone(connections: usize) -> Hub {
        use baton_types::{Courtesy, KvDtype, KvGroup, KvLayout, PoolGeometry};
        let group = KvGroup { layers: vec![0], planes: 2, kv_heads: 1, head_dim: 8, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F32, block_size: 4, groups: vec![group] };
        let geometry = PoolGeometry::uniform(layout, 4);
        let pool = crate::Segment::create("test", geometry.bytes()).expect("memory");
        let options = ReceiverOptions {
            worker: WorkerId(1),
            tcp: ([127, 0, 0, 1], 0).into(),
            advertise: None,
            geometry,
            pool: Arc::new(pool).into(),
            ucx: crate::UcxSettings::default(),
            tls: None,
            sockets: None,
            cpus: crate::Cpus::default(),
            courtesy: Courtesy::default(),
            limits: crate::TransferLimits { connections, ..crate::TransferLimits::default() },
            verify: true,
        };
        Hub::new(options, Box::new(drop)).expect("a hub")
    }
}
