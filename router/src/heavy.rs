//! Work that takes long, such as reading a large body or tokenising it, on threads of its own, few at a time (I5): more at once would only take
//! the cores from the connections, and hold more memory. Who sends much of it waits for its own, not others for it.

use std::future::poll_fn;
use std::num::NonZero;
use std::pin::pin;
use std::sync::{Arc, LazyLock};
use std::task::Poll;
use std::thread::available_parallelism;

use baton_types::ErrorKind;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::block_in_place;

use crate::error::RequestError;

/// Pieces of work at a time. One core of this process is left to the connections, where there are several.
static CORES: LazyLock<usize> =
    LazyLock::new(|| available_parallelism().map_or(1, NonZero::get).saturating_sub(1).max(1));
/// The cores, which go to whoever has waited the longest.
static FREE: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(*CORES)));

/// Where one tenant's work waits before it waits for a core. At most as much of it as there are cores waits for one together with others' work,
/// so others' waits for about one piece of this tenant's, however much there is.
#[derive(Clone, Debug)]
pub(crate) struct Line(Arc<Semaphore>);

impl Default for Line {
    fn default() -> Line {
        Line(Arc::new(Semaphore::new(*CORES)))
    }
}

/// Runs `work` of a tenant once a core is free for it. It goes on if nobody waits for it any more, and keeps its core.
///
/// # Errors
/// That of the work, or Internal if it panicked.
pub(crate) async fn run<T: Send + 'static>(
    line: Option<&Line>,
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let core = core(line).await;
    let job = tokio::task::spawn_blocking(move || {
        let _core = core;
        work()
    });
    job.await.unwrap_or_else(|e| {
        Err(RequestError::new(ErrorKind::Internal, format!("the request was broken off inside the router: {e}")))
    })
}

/// Runs a tenant's future whose beginning takes long, once a core is free for it. Up to where it first waits, others' tasks leave this thread.
pub(crate) async fn beginning<F: Future>(line: Option<&Line>, work: F) -> F::Output {
    let mut core = Some(core(line).await);
    let mut work = pin!(work);
    poll_fn(|cx| {
        let Some(core) = core.take() else { return work.as_mut().poll(cx) };
        let polled: Poll<F::Output> = match Handle::current().runtime_flavor() {
            RuntimeFlavor::MultiThread => block_in_place(|| work.as_mut().poll(cx)),
            // There is no other thread that others' tasks could go to.
            _ => work.as_mut().poll(cx),
        };
        drop(core);
        polled
    })
    .await
}

/// A place in a tenant's line, and a core. Neither semaphore is ever closed.
async fn core(line: Option<&Line>) -> (Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>) {
    let place = match line {
        Some(Line(places)) => Arc::clone(places).acquire_owned().await.ok(),
        None => None,
    };
    (Arc::clone(&FREE).acquire_owned().await.ok(), place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    #[tokio::test]
    async fn few_run_at_a_time() {
        static RUNNING: AtomicUsize = AtomicUsize::new(0);
        let cores = available_parallelism().unwrap().get();
        let work = |_| {
            run(None, move || {
                let others = RUNNING.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(2));
                RUNNING.fetch_sub(1, Ordering::SeqCst);
                Ok(others)
            })
        };
        let all = futures::future::join_all((0..8 * cores).map(work)).await;
        let most = all.into_iter().map(Result::unwrap).max();
        assert!(most < Some((cores - 1).max(1)), "{most:?} others of {cores} cores");
    }

    #[tokio::test]
    async fn one_tenants_work_waits_for_about_one_piece_of_anothers() {
        let (many, few) = (Line::default(), Line::default());
        let done = Arc::new(AtomicUsize::new(0));
        let pieces: Vec<_> = (0..30 * *CORES)
            .map(|_| {
                let (line, done) = (many.clone(), Arc::clone(&done));
                let work = move || {
                    std::thread::sleep(Duration::from_millis(5));
                    done.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                tokio::spawn(async move { run(Some(&line), work).await })
            })
            .collect();
        // All of them wait now, in their order.
        while done.load(Ordering::SeqCst) == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let at = Arc::clone(&done);
        let before = done.load(Ordering::SeqCst);
        let between = run(Some(&few), move || Ok(at.load(Ordering::SeqCst))).await.unwrap() - before;
        // Those that run, and those that are next; other tests of this process may hold cores, too.
        assert!(between <= 4 * *CORES, "{between} pieces came first");
        for piece in pieces {
            piece.await.unwrap().unwrap();
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn others_run_beside_a_long_beginning() {
        let (tell, told) = std::sync::mpsc::channel();
        let others = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            tell.send(7).unwrap();
        });
        // On the runtime's thread, of which there is one.
        let waits = beginning(None, async move {
            let said = told.recv_timeout(Duration::from_secs(20));
            tokio::task::yield_now().await;
            said
        });
        assert_eq!(tokio::spawn(waits).await.unwrap(), Ok(7));
        others.await.unwrap();
    }
}
