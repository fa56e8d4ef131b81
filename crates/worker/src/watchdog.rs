//! Detects a device that stands still. A GPU then never answers, and neither does the driver call that waits for it; on the CPU, threads
//! wait for each other, or for a disk or memory that never comes.
//!
//! The engine thread records each call of its model before and after. A watchdog thread looks at the record now and then; it never
//! calls the device. [`WaitLimit`] is the pure part: it decides when one call has lasted too long. This module does not know who is told
//! or what becomes of the worker: see the users of [`Stall`], the requests' streams and the node.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use baton_runtime::config::format_duration;
use baton_types::{BatonError, ErrorKind};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Longest time for a step on a GPU, and on the CPU, where a full step of a large model takes minutes.
const STEP: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(600));
/// How long the process may take to end after its device stood still. Libraries clean up when a process ends and may wait for a GPU too.
const END: Duration = Duration::from_secs(10);

/// Number of looks within one limit. More looks detect a stall closer to the limit.
const LOOKS: u32 = 8;

/// The device did not answer in time.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{device} stands still: {waited_for} is not over after {}, the longest that step_timeout allows",
    format_duration(*limit)
)]
pub struct Stalled {
    /// Name of the device.
    pub device: String,
    /// The call that was waited for.
    pub waited_for: String,
    /// The time limit it exceeded.
    pub limit: Duration,
}

impl BatonError for Stalled {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unavailable
    }
}

/// Tells all who wait whether the device stands still. Clones share the state.
#[derive(Clone, Debug, Default)]
pub(crate) struct Stall {
    what: Arc<OnceLock<Stalled>>,
    told: CancellationToken,
}

impl Stall {
    /// The stall, if there was one.
    pub fn get(&self) -> Option<&Stalled> {
        self.what.get()
    }

    /// Completes when the device stands still.
    pub fn told(&self) -> WaitForCancellationFutureOwned {
        self.told.clone().cancelled_owned()
    }

    fn tell(&self, stalled: Stalled) {
        // The first stall is the cause of later ones.
        let _ = self.what.set(stalled);
        self.told.cancel();
    }
}

/// A call of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Call {
    /// The launch of a step: its number and its tokens.
    Launch(u64, u32),
    /// The wait for a step: its number and its tokens.
    Collect(u64, u32),
    /// The question to the model whether it can go on after a failure.
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

/// The engine thread's current call, if any, and the number of this wait.
#[derive(Debug, Default)]
struct Waits {
    number: u64,
    call: Option<Call>,
}

/// Measures how long one wait has lasted. Each look adds at most two ticks: if the whole process was stopped, or the machine slept, that
/// time says nothing about the device.
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

    /// Time to sleep between two looks.
    fn tick(&self) -> Duration {
        self.limit / LOOKS
    }

    /// Whether the current wait, given by its number, has lasted too long. `passed` is the time since the last look.
    fn exceeded(&mut self, waiting: Option<u64>, passed: Duration) -> bool {
        match waiting {
            Some(number) if number == self.number => self.borne += passed.min(2 * self.tick()),
            Some(number) => (self.number, self.borne) = (number, Duration::ZERO),
            None => self.borne = Duration::ZERO,
        }
        self.borne >= self.limit
    }
}

/// The engine thread's end of the watchdog. Dropping it ends the watchdog thread.
#[derive(Debug)]
pub(crate) struct Watchdog {
    waits: Arc<Mutex<Waits>>,
    _there: Sender<()>,
}

impl Watchdog {
    /// Watches the GPU of this name, or else the CPU. Without a limit, a usual one is chosen.
    pub fn start(gpu: Option<String>, limit: Option<Duration>, stall: Stall) -> std::io::Result<Watchdog> {
        let waits = Arc::<Mutex<Waits>>::default();
        let limit = limit.unwrap_or(if gpu.is_some() { STEP.0 } else { STEP.1 });
        let device = gpu.unwrap_or_else(|| "the CPU".to_owned());
        let (there, gone) = channel();
        let looked_at = Arc::clone(&waits);
        let look = move || {
            watch(&looked_at, &gone, WaitLimit::new(limit), |waited_for| Stalled { device, waited_for, limit }, &stall)
        };
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(look)?;
        Ok(Watchdog { waits, _there: there })
    }

    /// Runs a call that waits for the device.
    pub fn during<R>(&self, call: Call, run: impl FnOnce() -> R) -> R {
        self.wait(Some(call));
        let result = run();
        self.wait(None);
        result
    }

    /// Runs something inside a call that waits for others than the device; this time does not count.
    pub fn aside<R>(&self, run: impl FnOnce() -> R) -> R {
        let call = self.wait(None);
        let result = run();
        self.wait(call);
        result
    }

    /// Sets the current call and returns the previous one.
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
            baton_runtime::flush_logs();
            std::process::abort();
        }
        return;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// Looks at these waits, one second apart, and returns the looks that found a wait too long.
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
