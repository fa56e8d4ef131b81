//! A small pool of threads that run the tasks of one operation together.
//!
//! An operation is a few microseconds, so workers spin briefly for the next one before they sleep; with `spin` 0 they
//! sleep at once, which is kinder to other processes on the same cores. Threads that are pinned keep a CPU each, which helps where
//! this process has its CPUs to itself, and hurts where it shares them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// How often a waiting thread looks before it sleeps; about ten microseconds.
const SPIN: usize = 2_000;

type Task = dyn Fn(usize) + Sync;

/// One operation: a borrowed closure whose lifetime [`Threads::run`] guards.
#[derive(Clone, Copy)]
struct Job {
    task: *const Task,
    count: usize,
}

// SAFETY: the pointer is dereferenced only while `run` keeps the closure alive (it returns after every worker is done).
unsafe impl Send for Job {}

struct Shared {
    /// Incremented for each operation, under `job`'s lock.
    generation: AtomicUsize,
    job: Mutex<Option<Job>>,
    wake: Condvar,
    next: AtomicUsize,
    /// Workers still inside the present operation.
    busy: AtomicUsize,
    panicked: AtomicBool,
    stop: AtomicBool,
}

/// A fixed set of threads; the caller's thread takes part.
pub struct Threads {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Where the caller's thread is pinned once it runs something.
    pin_caller: Option<usize>,
}

/// CPUs that this process may use, ascending.
fn cpus() -> std::io::Result<Vec<usize>> {
    let allowed = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu)).collect())
}

/// Keeps this thread on a CPU. Should that have been taken from the process since it was asked, the thread stays where it may.
fn pin(cpu: usize) {
    let mut one = CpuSet::new();
    one.set(cpu);
    let _ = sched_setaffinity(None, &one);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic is carried by `panicked`; the data under the lock is a plain value.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Threads {
    /// A pool that runs operations on `threads` threads in all, at least one; pinned ones keep a CPU each of those that the
    /// process may use.
    pub fn new(threads: usize, pinned: bool) -> std::io::Result<Self> {
        let cpus = if pinned { cpus()? } else { Vec::new() };
        let cpu = |i: usize| (!cpus.is_empty()).then(|| cpus[i % cpus.len()]);
        let shared = Arc::new(Shared {
            generation: AtomicUsize::new(0),
            job: Mutex::new(None),
            wake: Condvar::new(),
            next: AtomicUsize::new(0),
            busy: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .map(|i| {
                let (shared, cpu) = (shared.clone(), cpu(i));
                std::thread::Builder::new().name(format!("kernel-{i}")).spawn(move || {
                    cpu.into_iter().for_each(pin);
                    work(&shared);
                })
            })
            .collect::<Result<_, _>>()?;
        Ok(Threads { shared, workers, pin_caller: cpu(0) })
    }

    /// Threads that take part in an operation.
    pub fn count(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0) … task(count - 1)`, each once, on any thread, and returns when all are done.
    ///
    /// # Panics
    /// When a task panicked.
    pub fn run(&mut self, count: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pin_caller.take().into_iter().for_each(pin);
        if count <= 1 || self.workers.is_empty() {
            (0..count).for_each(task);
            return;
        }
        let shared = &*self.shared;
        // SAFETY: only the lifetime is erased; the loop below returns after the last worker has let go of the closure.
        let task_ptr: *const Task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), *const Task>(task) };
        {
            let mut job = lock(&shared.job);
            shared.next.store(0, Ordering::Relaxed);
            shared.busy.store(self.workers.len(), Ordering::Relaxed);
            *job = Some(Job { task: task_ptr, count });
            shared.generation.fetch_add(1, Ordering::Release);
        }
        shared.wake.notify_all();
        drain(shared, task, count);
        let mut looks = 0usize;
        while shared.busy.load(Ordering::Acquire) > 0 {
            looks += 1;
            if looks < SPIN { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        assert!(!shared.panicked.load(Ordering::Relaxed), "a kernel task panicked");
    }
}

/// Takes tasks until none is left. A panic is noted, and the rest still runs, so that nobody waits for ever.
fn drain(shared: &Shared, task: &(dyn Fn(usize) + Sync), count: usize) {
    loop {
        let i = shared.next.fetch_add(1, Ordering::Relaxed);
        if i >= count {
            return;
        }
        if catch_unwind(AssertUnwindSafe(|| task(i))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
    }
}

fn work(shared: &Shared) {
    let mut seen = 0;
    loop {
        let mut looks = 0;
        while shared.generation.load(Ordering::Acquire) == seen && looks < SPIN {
            std::hint::spin_loop();
            looks += 1;
        }
        let mut job = lock(&shared.job);
        while shared.generation.load(Ordering::Acquire) == seen && !shared.stop.load(Ordering::Acquire) {
            job = shared.wake.wait(job).unwrap_or_else(PoisonError::into_inner);
        }
        if shared.stop.load(Ordering::Acquire) {
            return;
        }
        seen = shared.generation.load(Ordering::Acquire);
        let present = *job;
        drop(job);
        if let Some(Job { task, count }) = present {
            // SAFETY: `run` waits for `busy` to reach zero before the closure can go away.
            drain(shared, unsafe { &*task }, count);
        }
        shared.busy.fetch_sub(1, Ordering::Release);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        {
            let _job = lock(&self.shared.job);
            self.shared.stop.store(true, Ordering::Release);
        }
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker can only end by returning: panics of tasks are caught.
            let _ = worker.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_on_any_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let mut pool = Threads::new(threads, false).unwrap();
            for count in [0, 1, 2, 7, 100] {
                let hits: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.run(count, &|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn pinned_threads_keep_a_cpu_each() {
        let allowed = cpus().unwrap();
        // On a thread of its own, since the caller's is pinned too.
        let seen = std::thread::spawn(move || {
            let mut pool = Threads::new(allowed.len() + 1, true).unwrap();
            let seen = Mutex::new(Vec::new());
            let barrier = std::sync::Barrier::new(allowed.len() + 1);
            pool.run(allowed.len() + 1, &|_| {
                let mine = cpus().unwrap();
                lock(&seen).push(mine);
                // One task a thread.
                barrier.wait();
            });
            (seen.into_inner().unwrap(), allowed)
        });
        let (mut seen, allowed) = seen.join().unwrap();
        seen.sort();
        let mut expected: Vec<Vec<usize>> = allowed.iter().map(|&cpu| vec![cpu]).collect();
        // One thread more than CPUs: it shares the first.
        expected.insert(0, vec![allowed[0]]);
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_nobody_hangs() {
        let mut pool = Threads::new(3, false).unwrap();
        let outcome = catch_unwind(AssertUnwindSafe(|| pool.run(10, &|i| assert_ne!(i, 5))));
        assert!(outcome.is_err());
    }
}
