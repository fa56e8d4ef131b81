//! Work that takes long, such as reading a large body or tokenising it, on threads of its own, few at a time (I5): more at once would only take
//! the cores from the connections, and hold more memory.

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

/// One core of this process is left to the connections, where there are several.
static CORES: LazyLock<Arc<Semaphore>> = LazyLock::new(|| {
    let cores = available_parallelism().map_or(1, NonZero::get);
    Arc::new(Semaphore::new(cores.saturating_sub(1).max(1)))
});

/// Runs `work` once a core is free for it. It goes on if nobody waits for it any more, and keeps its core.
///
/// # Errors
/// That of the work, or Internal if it panicked.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    let core = core().await;
    let job = tokio::task::spawn_blocking(move || {
        let _core = core;
        work()
    });
    job.await.unwrap_or_else(|e| {
        Err(RequestError::new(ErrorKind::Internal, format!("the request was broken off inside the router: {e}")))
    })
}

/// Runs a future whose beginning takes long, once a core is free for it. Up to where it first waits, others' tasks leave this thread.
pub(crate) async fn beginning<F: Future>(work: F) -> F::Output {
    let mut core = core().await;
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

async fn core() -> Option<OwnedSemaphorePermit> {
    // The semaphore is never closed.
    Arc::clone(&CORES).acquire_owned().await.ok()
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
            run(move || {
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

    #[tokio::test(flavor = "multi_thread", worker_threads = 1)]
    async fn others_run_beside_a_long_beginning() {
        let (tell, told) = std::sync::mpsc::channel();
        let others = tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(50)).await;
            tell.send(7).unwrap();
        });
        // On the runtime's thread, of which there is one.
        let waits = beginning(async move {
            let said = told.recv_timeout(Duration::from_secs(20));
            tokio::task::yield_now().await;
            said
        });
        assert_eq!(tokio::spawn(waits).await.unwrap(), Ok(7));
        others.await.unwrap();
    }
}
