//! Whether what computes still does: a GPU that stands still never answers, and neither does the driver's call that waits for it.
//!
//! The engine thread says before each call of its model what it will wait for, and after it that this is over. A thread beside it, which
//! asks the GPU nothing, looks at that now and then. [`WaitLimit`] is the pure part of it: how long the same call is borne. Who is told, and
//! what becomes of the worker, is not known here: see [`Stall`]'s users, the requests' streams and the node.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_runtime::config::format_duration;
use baton_types::{BatonError, ErrorKind};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// How long the process may take to end once its GPU stands still. Libraries clean up at a process's end, and may wait for the GPU, too.
const END: Duration = Duration::from_secs(10);

/// Looks in a limit, so that it is exceeded by little.
const LOOKS: u32 = 8;

/// What computes did not answer in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{device} stands still: {waited_for} is not over after {}, the longest that gpu_timeout allows",
    format_duration(*limit)
)]
pub struct Stalled {
    /// Its name.
    pub device: String,
    /// What was waited for.
    pub waited_for: String,
    /// How long.
    pub limit: Duration,
}

impl BatonError for Stalled {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unavailable
    }
}

/// Whether what computes stands still, for all that wait for it. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stall {
    what: Arc<OnceLock<Stalled>>,
    told: CancellationToken,
}

impl Stall {
    /// What stands still, if anything does.
    pub fn get(&self) -> Option<&Stalled> {
        self.what.get()
    }

    /// Completes when something stands still.
    pub fn told(&self) -> WaitForCancellationFutureOwned {
        self.told.clone().cancelled_owned()
    }

    fn tell(&self, stalled: Stalled) {
        // The first is what the others follow from.
        let _ = self.what.set(stalled);
        self.told.cancel();
    }
}

/// A call of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    /// A step of this number, of so many tokens, is queued.
    Launch(u64, u32),
    /// It is waited for.
    Collect(u64, u32),
    /// The model is asked whether it can go on.
    Lost,
}

impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Call::Launch(step, tokens) => write!(f, "the launch of step {step} ({tokens} tokens)"),
            Call::Collect(step, tokens) => write!(f, "step {step} ({tokens} tokens)"),
            Call::Lost => f.write_str("what was under way when a step failed"),
        }
    }
}

/// What the engine thread waits for, and which of its waits it is.
#[derive(Debug, Default)]
struct Waits {
    number: u64,
    call: Option<Call>,
}

/// How long one wait is borne. Counts time in which it looked: of one for which the whole process stood still, or the machine slept, the
/// GPU knows nothing.
#[derive(Debug)]
struct WaitLimit {
    limit: Duration,
    number: u64,
    borne: Duration,
}

impl WaitLimit {
    fn new(limit: Duration) -> Self {
        WaitLimit { limit, number: 0, borne: Duration::ZERO }
    }

    /// How long it sleeps between two looks.
    fn tick(&self) -> Duration {
        self.limit / LOOKS
    }

    /// Whether the wait of this number, if there is one, was borne for too long. `passed` since the last look.
    fn exceeded(&mut self, waiting: Option<u64>, passed: Duration) -> bool {
        match waiting {
            Some(number) if number == self.number => self.borne += passed.min(2 * self.tick()),
            Some(number) => (self.number, self.borne) = (number, Duration::ZERO),
            None => self.borne = Duration::ZERO,
        }
        self.borne >= self.limit
    }
}

/// Held by the engine thread; the thread that looks ends with it.
#[derive(Debug)]
pub(crate) struct Watchdog {
    waits: Arc<Mutex<Waits>>,
    _there: Option<Sender<()>>,
}

impl Watchdog {
    /// Watches what computes, a device of this name; nothing where the engine thread computes by itself and takes as long as it does.
    pub fn start(device: Option<String>, limit: Duration, stall: Stall) -> std::io::Result<Watchdog> {
        let waits = Arc::<Mutex<Waits>>::default();
        let Some(device) = device else { return Ok(Watchdog { waits, _there: None }) };
        let (there, gone) = channel();
        let looked_at = Arc::clone(&waits);
        let look = move || {
            watch(&looked_at, &gone, WaitLimit::new(limit), |waited_for| Stalled { device, waited_for, limit }, &stall)
        };
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(look)?;
        Ok(Watchdog { waits, _there: Some(there) })
    }

    /// A call that waits for what computes.
    pub fn during<R>(&self, call: Call, run: impl FnOnce() -> R) -> R {
        self.wait(Some(call));
        let result = run();
        self.wait(None);
        result
    }

    /// Something in the midst of a call that waits for others.
    pub fn aside<R>(&self, run: impl FnOnce() -> R) -> R {
        let call = self.wait(None);
        let result = run();
        self.wait(call);
        result
    }

    /// Waits for something else from here on; for what it was.
    fn wait(&self, call: Option<Call>) -> Option<Call> {
        let mut waits = lock(&self.waits);
        waits.number += 1;
        std::mem::replace(&mut waits.call, call)
    }
}

fn lock(waits: &Mutex<Waits>) -> MutexGuard<'_, Waits> {
    waits.lock().unwrap_or_else(PoisonError::into_inner)
}

fn watch(
    waits: &Mutex<Waits>,
    gone: &Receiver<()>,
    mut limit: WaitLimit,
    stalled: impl FnOnce(String) -> Stalled,
    stall: &Stall,
) {
    let sleep = |time| gone.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
    let mut looked = Instant::now();
    while sleep(limit.tick()) {
        let passed = looked.elapsed();
        looked += passed;
        let (number, call) = {
            let waits = lock(waits);
            (waits.number, waits.call)
        };
        let exceeded = limit.exceeded(call.map(|_| number), passed);
        let Some(call) = call.filter(|_| exceeded) else { continue };
        let stalled = stalled(call.to_string());
        tracing::error!(error = %stalled, "the worker ends");
        stall.tell(stalled);
        if sleep(END) {
            tracing::error!("the process does not end by itself");
            std::process::abort();
        }
        return;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks at these waits in turn, a second after each other; at which it was too long.
    fn exceeded(waits: &[Option<u64>]) -> Vec<usize> {
        let mut limit = WaitLimit::new(4 * SECOND);
        let at = |(at, waiting): (usize, &Option<u64>)| limit.exceeded(*waiting, SECOND).then_some(at);
        waits.iter().enumerate().filter_map(at).collect()
    }

    #[test]
    fn one_wait_is_borne_for_a_time_and_many_short_ones_for_ever() {
        assert_eq!(exceeded(&[Some(1); 6]), [4, 5]);
        assert_eq!(exceeded(&[Some(1), Some(1), Some(1), Some(1), Some(2), Some(2), Some(2), Some(2)]), [0; 0]);
        assert_eq!(exceeded(&[Some(1), Some(1), Some(1), Some(1), None, Some(1), Some(1)]), [0; 0]);
    }

    #[test]
    fn time_in_which_nobody_looked_is_not_the_devices() {
        let mut limit = WaitLimit::new(4 * SECOND);
        assert!(!limit.exceeded(Some(1), SECOND));
        assert!(!limit.exceeded(Some(1), 3600 * SECOND), "the machine slept");
    }
}
