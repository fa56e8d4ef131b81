//! The threads of all ranks but the first: they run what the first is given, at the same time, and say how it ended.
//!
//! A step's batch is borrowed from the engine, so whoever hands it out waits for the crew before letting go of it. Knows nothing of what
//! the ranks compute.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use baton_engine::{Batch, RunError};
use baton_kernels::Backend;

use crate::Decoder;

/// A step's batch, whose lifetime [`Crew::begin`] guards.
#[derive(Clone, Copy)]
struct Job(*const Batch<'static>);

// SAFETY: a batch is shared references to values that are Sync (see `shared`), and the pointer is followed only while `Running` lives.
unsafe impl Send for Job {}

/// What crosses threads behind a [`Job`].
const fn shared<T: Sync>() {}
const _: () = shared::<Batch<'static>>();

#[derive(Default)]
struct Orders {
    /// Counts steps, so that a thread takes each once.
    step: u64,
    job: Option<Job>,
    /// Threads still in the step.
    busy: usize,
    /// Of the first that failed in it.
    failed: Option<RunError>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    orders: Mutex<Orders>,
    begin: Condvar,
    done: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Orders> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ranks on threads of their own, each with its decoder.
#[derive(Default)]
pub(super) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// A step under way. Dropping it waits for the crew, so the batch outlives their work also when the first rank panics.
pub(super) struct Running<'a> {
    shared: &'a Shared,
}

impl Crew {
    pub fn start<B: Backend + 'static>(ranks: Vec<Decoder<B>>) -> std::io::Result<Crew> {
        let mut crew = Crew::default();
        for (rank, mut decoder) in (1..).zip(ranks) {
            let shared = Arc::clone(&crew.shared);
            let thread = std::thread::Builder::new().name(format!("rank-{rank}"));
            crew.threads.push(thread.spawn(move || work(&shared, &mut decoder))?);
        }
        Ok(crew)
    }

    /// Whether the first rank is alone.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Sets all to work on a batch.
    pub fn begin<'a>(&'a mut self, batch: &'a Batch<'_>) -> Running<'a> {
        let mut orders = self.shared.lock();
        orders.step += 1;
        orders.busy = self.threads.len();
        orders.failed = None;
        orders.job = Some(Job(std::ptr::from_ref(batch).cast()));
        self.shared.begin.notify_all();
        Running { shared: &self.shared }
    }
}

impl Running<'_> {
    /// Waits until all are done; the error of one that failed.
    pub fn finish(self) -> Result<(), RunError> {
        self.wait().failed.take().map_or(Ok(()), Err)
    }

    fn wait(&self) -> MutexGuard<'_, Orders> {
        let mut orders = self.shared.lock();
        while orders.busy > 0 {
            orders = self.shared.done.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
        orders.job = None;
        orders
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        drop(self.wait());
    }
}

/// Takes steps until told to stop.
fn work<B: Backend>(shared: &Shared, decoder: &mut Decoder<B>) {
    let mut seen = 0;
    loop {
        let mut orders = shared.lock();
        while orders.step == seen && !orders.stop {
            orders = shared.begin.wait(orders).unwrap_or_else(PoisonError::into_inner);
        }
        if orders.stop {
            return;
        }
        seen = orders.step;
        let job = orders.job;
        drop(orders);
        let outcome = job.map_or(Ok(()), |Job(batch)| {
            // SAFETY: `Running`, which borrows the batch, is not gone before `busy` is zero, and this thread still counts.
            let batch: &Batch<'_> = unsafe { &*batch };
            guarded(decoder, |decoder| decoder.run_logits(batch, &mut |_| (), &mut |_, _, _| ()))
        });
        let mut orders = shared.lock();
        if let Err(error) = outcome {
            orders.failed.get_or_insert(error);
        }
        orders.busy -= 1;
        if orders.busy == 0 {
            shared.done.notify_all();
        }
    }
}

/// Runs one rank's part of a step. When it fails, by an error or a panic, the other ranks are told, so that none waits for it (I5).
pub(super) fn guarded<B: Backend>(
    decoder: &mut Decoder<B>,
    step: impl FnOnce(&mut Decoder<B>) -> Result<(), RunError>,
) -> Result<(), RunError> {
    // What a panic leaves behind is overwritten by the next step: buffers, and KV of sequences that end with this one.
    let outcome = catch_unwind(AssertUnwindSafe(|| step(decoder))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(RunError(format!("rank {} panicked: {}", decoder.rank(), text.unwrap_or("no message"))))
    });
    if let Err(error) = &outcome {
        decoder.abort(error);
        // What the others wait for on their devices is over by that, too.
        decoder.drain();
    }
    outcome
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.begin.notify_all();
        for thread in self.threads.drain(..) {
            // It can only end by returning: panics of a step are caught.
            let _ = thread.join();
        }
    }
}
