//! The queue in front of the workers: of all requests where clients need a key, else of batch work. The core in `baton-policy` decides whose turn it is.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_policy::{Asks, Begun, Slo, Ticket};
use baton_runtime::metrics as names;
use baton_types::{Class, ErrorKind};
use metrics::gauge;
use tokio::sync::oneshot;

use crate::error::RequestError;
use crate::standing::Standing;
use crate::worker::Workers;

type Core = baton_policy::Gate<u64, oneshot::Sender<Turn>>;

/// The requests that wait, and what those that have begun hold at the workers.
pub(crate) struct Gate {
    /// Locked only briefly, never across an await.
    core: Mutex<Core>,
    /// How many of those that wait are in the gauge, which has those of all models.
    shown: AtomicUsize,
    workers: Arc<Workers>,
}

/// A choice that waits. Dropping it gives it up.
pub(crate) struct InLine {
    gate: Arc<Gate>,
    tenant: u64,
    class: Class,
    ticket: Ticket,
    turn: oneshot::Receiver<Turn>,
}

/// A choice's wait for its turn, and what that says of the time until its first token.
#[derive(Clone, Copy, Default)]
pub(crate) struct Waited {
    so_long: Duration,
    before: Option<u64>,
}

/// A choice's room at the workers. Dropping it gives the room back.
pub(crate) struct Turn {
    gate: Arc<Gate>,
    begun: Option<Begun<u64>>,
}

impl Gate {
    /// A gate at which nobody waits.
    pub fn new(workers: Arc<Workers>) -> Arc<Gate> {
        Arc::new(Gate { core: Mutex::default(), shown: AtomicUsize::new(0), workers })
    }

    fn core(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a choice of a tenant in line; 0: of nobody in particular.
    pub fn line_up(self: &Arc<Gate>, tenant: u64, asks: Asks) -> InLine {
        let (sender, turn) = oneshot::channel();
        let ticket = self.core().push(tenant, asks, sender);
        let in_line = InLine { gate: Arc::clone(self), tenant, class: asks.class, ticket, turn };
        self.open();
        in_line
    }

    /// Lets in whoever has room now. Called when there may be more.
    pub fn open(self: &Arc<Gate>) {
        let room = self.workers.gate_room();
        loop {
            let begins = {
                let mut core = self.core();
                let begins = core.begin(&room);
                let shown = self.shown.swap(core.waiting(), Ordering::Relaxed);
                gauge!(names::WAITING).increment(core.waiting() as f64 - shown as f64);
                begins
            };
            let Some((sender, begun)) = begins else { return };
            // If the choice was given up meanwhile, its turn ends here, and the room is there for the next one.
            let _ = sender.send(Turn { gate: Arc::clone(self), begun: Some(begun) });
        }
    }

    /// Turns away so many waiting choices, batch ones or those of tenants that have more of them for their weight; all or none. False: none.
    pub fn make_room(&self, standing: &Standing, count: u32) -> bool {
        // Dropped after the lock: that tells them.
        let out = self.core().make_room(standing.class, &standing.tenant, standing.weight, count);
        !out.is_empty()
    }

    /// Whether somebody waits who may be turned away for a request of this class.
    pub fn may_make_room(&self, class: Class) -> bool {
        self.core().may_make_room(class)
    }
}

impl InLine {
    /// Completes when it is the choice's turn; None: it was turned away.
    pub async fn turn(&mut self) -> Option<Turn> {
        (&mut self.turn).await.ok()
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        let removed = self.gate.core().remove(self.class, &self.tenant, self.ticket);
        if removed.is_some() {
            // It may have stood before one that fits.
            self.gate.open();
        }
    }
}

impl Waited {
    /// A choice whose turn it is after so long.
    pub fn of(so_long: Duration, turn: &Turn, standing: &Standing) -> Waited {
        // Workers go by shares in interactive work; a later priority comes after all of it.
        let shares = !standing.class.is_batch() && standing.priority <= 0;
        Waited { so_long, before: turn.before().filter(|_| shares) }
    }

    /// About so many tokens of prompts each worker computes before the choice's own; `None`: all that are there.
    pub fn before(&self) -> Option<u64> {
        self.before
    }

    /// The SLO of a choice that waited so long.
    pub fn of_slo(&self, slo: Slo) -> Slo {
        Slo { waited: self.so_long, ..slo }
    }

    /// The error of a choice that waited for its turn as long as its first token may take.
    pub fn too_long(limit: Duration) -> RequestError {
        let message = format!(
            "the request waited for its turn as long as its first token may take ({:.1} s, reject_ttft): more is asked for than the workers \
             can do, and tenants share; retry later, ask for less at a time, or allow more time",
            limit.as_secs_f64()
        );
        let error = RequestError::new(ErrorKind::ResourceExhausted, message).code("slo_missed");
        RequestError { retry_after: Some(limit), ..error }
    }
}

impl Turn {
    /// About so many tokens of prompts workers compute before this choice's, where they go by tenants' shares.
    fn before(&self) -> Option<u64> {
        self.begun.as_ref().and_then(Begun::before)
    }

    /// The choice has this many tokens more. With the first, its prompt is computed.
    pub fn answered(&mut self, tokens: u32) {
        let Some(begun) = &mut self.begun else { return };
        // Tokens that one tenant gets change who may pass whom.
        let opens = {
            let mut core = self.gate.core();
            core.answered(begun, tokens);
            core.computed(begun) || core.waiting() > 0
        };
        if opens {
            self.gate.open();
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(begun) = self.begun.take() {
            self.gate.core().ended(begun);
            self.gate.open();
        }
    }
}
