//! How a session begins. A second thread waits for the previous session to end, and connects. Meanwhile the session's own thread ends
//! waiting handoffs that are late or aborted (I5).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::time::Instant;

use super::connect::{Connected, Interrupt, Plan};
use super::queue::Queue;
use crate::threads::{self, Thread};
use crate::wake::{Wake, wait};
use baton_handoff::{Effect, Outbound, TransferError};

/// What both threads know of the attempt.
struct Attempt {
    wake: Wake,
    stopped: AtomicBool,
}

impl Attempt {
    fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake.ring();
    }
}

/// Wakes the session's thread when the connecting thread ends, even in a panic.
struct Bell(Arc<Queue>);

impl Drop for Bell {
    fn drop(&mut self) {
        self.0.wake.ring();
    }
}

/// Connects once the session `before` has ended. Handoffs in `queue` begin after that; until then `outbound` ends late and aborted ones.
pub(crate) fn dial(
    plan: &Arc<Plan>,
    before: Option<Arc<Thread>>,
    queue: &Arc<Queue>,
    outbound: &mut Outbound,
) -> Result<Connected, TransferError> {
    let attempt = Arc::new(Attempt { wake: Wake::new()?, stopped: AtomicBool::new(false) });
    let (tell, told) = mpsc::channel();
    let (caller, theirs, bell) = (plan.clone(), attempt.clone(), Bell(queue.clone()));
    let connect = move || {
        // Dropped in reverse order: the session's thread is woken when the answer is there.
        let (_bell, tell) = (bell, tell);
        before.into_iter().for_each(|before| before.wait());
        let stopped = || theirs.stopped.load(Ordering::Acquire);
        let _ = tell.send(caller.connect(Interrupt { wake: &theirs.wake, stopped: &stopped }));
    };
    let thread = threads::spawn(format!("kv-dial-{}", plan.peer()), &plan.config.options.cpus, connect)?;
    let dialler = Dialler { attempt: attempt.clone(), thread: Thread::new(thread) };
    loop {
        let next = tend(queue, outbound);
        match told.try_recv() {
            Ok(connected) => break connected,
            Err(TryRecvError::Disconnected) => break Err(TransferError::os("connect", "its thread panicked")),
            Err(TryRecvError::Empty) => {}
        }
        if queue.is_stopped() {
            dialler.attempt.stop();
        }
        let left = next.map(|at| at.saturating_duration_since(Instant::now()));
        if let Err(error) = wait(&queue.wake, &[], left) {
            break Err(error);
        }
    }
}

/// The connecting thread. The session's thread ends after it, even in a panic: the next session waits for both by waiting for one.
struct Dialler {
    attempt: Arc<Attempt>,
    thread: Thread,
}

impl Drop for Dialler {
    fn drop(&mut self) {
        self.attempt.stop();
        self.thread.wait();
    }
}

/// Ends handoffs that are late or aborted; returns the next deadline.
fn tend(queue: &Queue, outbound: &mut Outbound) -> Option<Instant> {
    let next = queue.with(|line| outbound.wait_for_session(Instant::now(), line));
    for effect in outbound.take_effects() {
        match effect {
            Effect::Report(done, outcome) => done.report(outcome),
            Effect::Hush(quiet) => drop(quiet),
            // There is no peer to tell, and nothing is being copied.
            Effect::Send(_) | Effect::Cancel(_) => {}
        }
    }
    next
}

#[cfg(test)]
mod tests;
