//! Named background tasks. The process waits for them at its end.
//!
//! A task that panics is a defect that nobody would notice otherwise, so it starts the drain. The hook of `telemetry.rs`
//! logs the panic itself.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio_util::task::TaskTracker;

use crate::shutdown::{Outcome, Shutdown};

/// How long aborted tasks have to reach their next await.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// The tasks of one process. Clones share them.
#[derive(Clone, Debug)]
pub struct Tasks(Arc<State>);

#[derive(Debug)]
struct State {
    shutdown: Shutdown,
    tracker: TaskTracker,
    running: Mutex<Running>,
}

#[derive(Debug, Default)]
struct Running {
    next: u64,
    tasks: BTreeMap<u64, (String, Option<AbortHandle>)>,
}

impl Tasks {
    /// A set without tasks. Tasks end with `shutdown`.
    pub fn new(shutdown: Shutdown) -> Tasks {
        Tasks(Arc::new(State { shutdown, tracker: TaskTracker::new(), running: Mutex::default() }))
    }

    /// Runs `future` until it finishes or the drain is cut short. Call inside a tokio runtime.
    pub fn spawn(&self, name: impl Into<String>, future: impl Future<Output = ()> + Send + 'static) {
        let id = {
            let mut running = self.0.running();
            running.next += 1;
            let id = running.next;
            running.tasks.insert(id, (name.into(), None));
            id
        };
        let ended = Ended { tasks: Arc::clone(&self.0), id };
        let handle = self.0.tracker.spawn(async move {
            let _ended = ended;
            future.await;
        });
        if let Some((_, abort)) = self.0.running().tasks.get_mut(&id) {
            *abort = Some(handle.abort_handle());
        }
    }

    /// Waits for the drain to start, then for every task, at most until the drain's deadline. Tasks that still run then are
    /// stopped and named in the outcome.
    pub async fn join(&self) -> Outcome {
        let shutdown = &self.0.shutdown;
        shutdown.draining().await;
        self.0.tracker.close();
        let deadline = async {
            match shutdown.deadline() {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.0.tracker.wait() => return Outcome::Clean,
            () = shutdown.forced() => {}
            () = deadline => shutdown.force("the drain timeout passed"),
        }
        let cut = self.0.running().tasks.values().map(|(name, _)| name.clone()).collect();
        for (_, abort) in self.0.running().tasks.values() {
            if let Some(abort) = abort {
                abort.abort();
            }
        }
        // A task that blocks its thread cannot be stopped; only the process's exit ends it.
        let _ = tokio::time::timeout(ABORT_GRACE, self.0.tracker.wait()).await;
        Outcome::Cut(cut)
    }
}

impl State {
    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Owned by a task's future. Its drop sees how the task ends.
struct Ended {
    tasks: Arc<State>,
    id: u64,
}

impl Drop for Ended {
    fn drop(&mut self) {
        let task = self.tasks.running().tasks.remove(&self.id);
        if let (true, Some((name, _))) = (std::thread::panicking(), task) {
            self.tasks.shutdown.start(format!("task {name} panicked"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::oneshot;

    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn a_drain_waits_for_tasks() {
        let shutdown = Shutdown::new(LONG);
        let tasks = Tasks::new(shutdown.clone());
        let (done, is_done) = oneshot::channel();
        let watch = shutdown.clone();
        tasks.spawn("worker", async move {
            watch.draining().await;
            done.send(()).unwrap();
        });
        shutdown.start("test");
        assert_eq!(tasks.join().await, Outcome::Clean);
        is_done.await.unwrap();
        assert_eq!(shutdown.reason(), Some("test"));
    }

    #[tokio::test]
    async fn a_panic_in_a_task_starts_the_drain() {
        let shutdown = Shutdown::new(LONG);
        let tasks = Tasks::new(shutdown.clone());
        tasks.spawn("broken", async { panic!("on purpose") });
        assert_eq!(tasks.join().await, Outcome::Clean);
        assert_eq!(shutdown.reason(), Some("task broken panicked"));
    }

    #[tokio::test]
    async fn a_forced_drain_stops_and_names_what_runs() {
        let shutdown = Shutdown::new(LONG);
        let tasks = Tasks::new(shutdown.clone());
        let (alive, gone) = oneshot::channel::<()>();
        tasks.spawn("stuck", async move {
            std::future::pending::<()>().await;
            drop(alive);
        });
        shutdown.force("second signal");
        assert_eq!(tasks.join().await, Outcome::Cut(vec!["stuck".to_owned()]));
        gone.await.expect_err("the task's future is dropped");
    }

    #[tokio::test(start_paused = true)]
    async fn a_drain_ends_at_its_deadline() {
        let shutdown = Shutdown::new(Duration::from_secs(30));
        let tasks = Tasks::new(shutdown.clone());
        tasks.spawn("stuck", std::future::pending());
        let start = tokio::time::Instant::now();
        shutdown.start("test");
        assert_eq!(tasks.join().await, Outcome::Cut(vec!["stuck".to_owned()]));
        // Virtual time: exact.
        assert_eq!(start.elapsed(), Duration::from_secs(30));
        shutdown.forced().await;
    }
}
