//! How a session begins: one thread waits for the session before it and connects, and the session's own meanwhile ends what is late or
//! given up of what waits for it (I5).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, TryRecvError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::connect::{Connected, Interrupt, Plan};
use super::queue::Queue;
use crate::threads;
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

/// Rings the session's thread when the other one is over, also in a panic.
struct Bell(Arc<Queue>);

impl Drop for Bell {
    fn drop(&mut self) {
        self.0.wake.ring();
    }
}

/// Connects once the session `before` has ended. What `queue` has for `outbound` begins with the session.
pub(crate) fn dial(
    plan: &Arc<Plan>,
    before: Option<JoinHandle<()>>,
    queue: &Arc<Queue>,
    outbound: &mut Outbound,
) -> Result<Connected, TransferError> {
    let attempt = Arc::new(Attempt { wake: Wake::new()?, stopped: AtomicBool::new(false) });
    let (tell, told) = mpsc::channel();
    let (caller, theirs, bell) = (plan.clone(), attempt.clone(), Bell(queue.clone()));
    let connect = move || {
        // The other thread is rung when the answer is there.
        let (_bell, tell) = (bell, tell);
        before.into_iter().for_each(|before| drop(before.join()));
        let stopped = || theirs.stopped.load(Ordering::Acquire);
        let _ = tell.send(caller.connect(Interrupt { wake: &theirs.wake, stopped: &stopped }));
    };
    let thread = threads::spawn(format!("kv-dial-{}", plan.peer()), &plan.config.options.cpus, connect)?;
    let connected = loop {
        let next = tend(queue, outbound);
        match told.try_recv() {
            Ok(connected) => break connected,
            Err(TryRecvError::Disconnected) => break Err(TransferError::os("connect", "its thread panicked")),
            Err(TryRecvError::Empty) => {}
        }
        if queue.stopped() {
            attempt.stop();
        }
        let left = next.map(|at| at.saturating_duration_since(Instant::now()));
        if let Err(error) = wait(&queue.wake, &[], left) {
            attempt.stop();
            break Err(error);
        }
    };
    // Whoever comes next waits for this thread, and so for that one.
    drop(thread.join());
    connected
}

/// Ends what is late or given up; answers when the next one will be late.
fn tend(queue: &Queue, outbound: &mut Outbound) -> Option<Instant> {
    let next = queue.with(|line| outbound.wait_for_session(Instant::now(), line));
    for effect in outbound.take_effects() {
        match effect {
            Effect::Report(done, outcome) => done.report(outcome),
            Effect::Hush(quiet) => drop(quiet),
            // Nobody is there to be told, and nothing is copied.
            Effect::Send(_) | Effect::Cancel(_) => {}
        }
    }
    next
}

#[cfg(test)]
mod tests;
