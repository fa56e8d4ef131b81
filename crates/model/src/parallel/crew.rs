//! The threads of all ranks except rank 0. They run the batches that rank 0 runs, at the same time, and report errors.
//!
//! A step's batch is borrowed from the engine, so rank 0 waits for the crew before it lets go of the batch. This module knows nothing of
//! what the ranks compute.

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

/// Compiles only if the type behind a [`Job`] may be shared between threads.
const fn shared<T: Sync>() {}
const _: () = shared::<Batch<'static>>();

#[derive(Default)]
struct Orders {
    /// Number of the current step, by which a thread takes each step once.
    step: u64,
    job: Option<Job>,
    /// Threads still in the step.
    busy: usize,
    /// The first error in the step.
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

/// Ranks on threads of their own, each with a decoder.
#[derive(Default)]
pub(super) struct Crew {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

/// A step under way. Dropping it waits for the crew, so the batch outlives the crew's work even when rank 0 panics.
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

    /// Whether rank 0 is the only rank.
    pub fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// Starts all threads on a batch.
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
    /// Waits until all threads are done; returns the first error.
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
            // SAFETY: `Running` borrows the batch and does not end before `busy` is zero; this thread is still counted in `busy`.
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

/// Runs one rank's part of a step. When it fails, by an error or a panic, it tells the other ranks, so that none waits for it (I5).
pub(super) fn guarded<B: Backend>(
    decoder: &mut Decoder<B>,
    step: impl FnOnce(&mut Decoder<B>) -> Result<(), RunError>,
) -> Result<(), RunError> {
    // A panic leaves no bad state behind: the next step overwrites the buffers, and the sequences of this step's KV end with it.
    let outcome = catch_unwind(AssertUnwindSafe(|| step(decoder))).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
        Err(RunError(format!("rank {} panicked: {}", decoder.rank(), text.unwrap_or("no message"))))
    });
    if let Err(error) = &outcome {
        decoder.abort(error);
        // The abort also ends the other ranks' waits on their devices, so this returns.
        decoder.drain();
    }
    outcome
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.begin.notify_all();
        for thread in self.threads.drain(..) {
            // The thread ends only by returning, because panics of a step are caught.
            let _ = thread.join();
        }
    }
}
