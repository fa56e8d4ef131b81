//! [`CopyQueue`]: one session's copies from and to a shared pool: to host memory and back, to another process's pool, and digests of
//! its blocks. Its stream and buffers ([`Kit`]) are kept for the next session.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use baton_types::{DEVICE_JOBS, DeviceError, DeviceQueue, JobDone, Moving, OpenedBy, PoolHandle, Staged};
use rustix::event::EventfdFlags;

use super::super::device::{Access, Address, Device, Event, Piece};
use super::super::memory::Memory;
use super::super::params::{MoveRuns, Moved};
use super::super::pinned::Pinned;
use super::super::queue::Queue;
use super::super::sharing::{Imported, SharingDevice};
use super::SharedPool;
use crate::KernelError;

/// Most runs of one job.
const MAX_RUNS: usize = 1024;
const RUN_BYTES: usize = size_of::<Moved>();
const SUM_BYTES: usize = size_of::<u64>();
/// Most staging buffers that are kept for reuse.
const KEPT_STAGING: usize = DEVICE_JOBS + 2;
/// Most kits that are kept for reuse. Their streams cannot be freed: they live as long as the device.
const KEPT_QUEUES: usize = 64;

fn refused(why: impl Into<String>) -> KernelError {
    KernelError::Device { operation: "transfer".to_owned(), why: why.into() }
}

/// A queue's stream, buffers and descriptor. It is kept when the queue is dropped.
pub(super) struct Kit<D: SharingDevice> {
    queue: Queue<D>,
    /// One slot for each job that may be under way.
    slots: Vec<Slot<D>>,
    /// Two host buffers that writes take in turn: the memory, the event after its last copy, and whether that copy may be under way.
    landings: [(Option<Pinned<D>>, Event, bool); 2],
    turn: usize,
    staging: Arc<Mutex<Vec<Pinned<D>>>>,
    wake: OwnedFd,
}

/// The list of one job's runs and their digests, on the host and on the device.
struct Slot<D: SharingDevice> {
    done: Event,
    runs: Memory<D>,
    sums: Memory<D>,
    /// The runs, then the digests.
    host: Pinned<D>,
}

impl<D: SharingDevice> Kit<D> {
    pub fn new(device: &Arc<D>) -> Result<Self, KernelError> {
        let queue = Queue::new(Arc::clone(device))?;
        let slot = |_| {
            let (runs, sums) = (queue.memory(MAX_RUNS * RUN_BYTES)?, queue.memory(MAX_RUNS * SUM_BYTES)?);
            let host = Pinned::new(device, MAX_RUNS * (RUN_BYTES + SUM_BYTES))?;
            Ok(Slot { done: device.event()?, runs, sums, host })
        };
        let slots = (0..DEVICE_JOBS).map(slot).collect::<Result<_, KernelError>>()?;
        let landings = [(None, device.event()?, false), (None, device.event()?, false)];
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let wake = rustix::event::eventfd(0, flags).map_err(|error| refused(format!("no eventfd: {error}")))?;
        Ok(Kit { queue, slots, landings, turn: 0, staging: Arc::default(), wake })
    }

    /// Waits until all its copies are done.
    fn settle(&mut self) -> Result<(), KernelError> {
        self.queue.synchronise()?;
        self.landings.iter_mut().for_each(|landing| landing.2 = false);
        Ok(())
    }

    /// Takes a free staging buffer of at least `bytes` bytes, or makes one.
    fn staging(&self, bytes: usize) -> Result<Pinned<D>, KernelError> {
        let mut kept = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        match kept.iter().position(|pinned| pinned.bytes() >= bytes) {
            Some(place) => Ok(kept.swap_remove(place)),
            None => Pinned::new(&self.queue.device, bytes.next_power_of_two()),
        }
    }
}

/// Bytes that were read, in a staging buffer. It goes back to its kit when dropped.
struct Staging<D: SharingDevice> {
    pinned: Option<Pinned<D>>,
    bytes: usize,
    home: Arc<Mutex<Vec<Pinned<D>>>>,
}

impl<D: SharingDevice> AsRef<[u8]> for Staging<D> {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: this value is made after the copy into the buffer is done, and no other copy begins before the buffer is given back.
        self.pinned.as_ref().map_or(&[], |pinned| unsafe { &pinned.get()[..self.bytes] })
    }
}

impl<D: SharingDevice> Drop for Staging<D> {
    fn drop(&mut self) {
        let mut kept = self.home.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_STAGING {
            kept.extend(self.pinned.take());
        }
    }
}

enum Job<D: SharingDevice> {
    Read(Pinned<D>, usize),
    Digest(usize),
}

/// One thread's copies from and to a pool, which finish in their order. Dropping the queue waits for those under way.
pub(super) struct CopyQueue<D: SharingDevice> {
    pool: SharedPool<D>,
    peer: Option<Imported<D>>,
    /// Jobs under way, oldest first. Job n has slot n mod [`DEVICE_JOBS`].
    jobs: VecDeque<Job<D>>,
    /// Number of jobs begun so far, which is the number of the next one.
    given: usize,
    /// None only during the drop.
    kit: Option<Kit<D>>,
}

impl<D: SharingDevice> CopyQueue<D> {
    pub fn over(pool: SharedPool<D>, kit: Kit<D>) -> Self {
        CopyQueue { pool, peer: None, jobs: VecDeque::new(), given: 0, kit: Some(kit) }
    }

    fn kit(&mut self) -> Result<&mut Kit<D>, KernelError> {
        self.kit.as_mut().ok_or_else(|| refused("the queue is closed"))
    }

    fn move_runs(
        &mut self,
        after: u64,
        runs: &[Moving],
        bytes: usize,
        peer: Option<&Imported<D>>,
    ) -> Result<(), KernelError> {
        let (place, memory) = (self.begin()?, Arc::clone(&self.pool.memory));
        let Kit { queue, slots, .. } = self.kit()?;
        let mut touches = sources(&memory.memory, runs, bytes)?;
        if let Some(peer) = peer {
            let target = |run: &Moving| {
                let piece = peer.piece(run.target, bytes);
                piece.ok_or_else(|| refused(format!("{bytes} bytes at {} lie outside the peer's pool", run.target)))
            };
            for run in runs {
                touches.push(Access::Write(target(run)?));
            }
        }
        memory.wait(queue, after)?;
        let slot = &mut slots[place];
        let target = peer.map_or(Address::default(), |peer| peer.whole().at());
        slot.launch(queue, (memory.memory.piece(0, 0).at(), target), touches, runs, bytes)?;
        let (sums, room) = (slot.sums.piece(0, runs.len() * SUM_BYTES), runs.len() * SUM_BYTES);
        // SAFETY: the slot owns the memory, and nobody reads it before its job is done.
        unsafe { queue.device.read_later(queue.stream(), sums, slot.host.at(MAX_RUNS * RUN_BYTES, room)) }?;
        self.finish(place, Job::Digest(runs.len()))
    }

    /// Index of the next job's slot.
    fn begin(&mut self) -> Result<usize, KernelError> {
        if self.jobs.len() == DEVICE_JOBS {
            return Err(refused(format!("more than {DEVICE_JOBS} jobs at once")));
        }
        Ok(self.given % DEVICE_JOBS)
    }

    fn finish(&mut self, place: usize, job: Job<D>) -> Result<(), KernelError> {
        self.given += 1;
        self.jobs.push_back(job);
        let kit = self.kit()?;
        let Queue { device, .. } = &kit.queue;
        device.record(kit.slots[place].done, kit.queue.stream())?;
        // SAFETY: the descriptor is closed when the kit is dropped, which comes after waiting for its stream.
        unsafe { device.notify(kit.queue.stream(), kit.wake.as_fd()) }
    }
}

impl<D: SharingDevice> DeviceQueue for CopyQueue<D> {
    fn open(&mut self, handle: PoolHandle, bytes: usize) -> Result<OpenedBy, DeviceError> {
        let (peer, by) = Imported::open(&self.pool.device, handle, bytes)?;
        self.peer = Some(peer);
        Ok(by)
    }

    fn read(&mut self, after: u64, ranges: &[(usize, usize)]) -> Result<(), DeviceError> {
        let total: usize = ranges.iter().map(|(_, bytes)| bytes).sum();
        let (place, memory) = (self.begin()?, Arc::clone(&self.pool.memory));
        let kit = self.kit()?;
        let pinned = kit.staging(total.max(1))?;
        memory.wait(&kit.queue, after)?;
        let mut filled = 0;
        // All ranges are checked before the first copy begins.
        let pieces = joined(ranges).into_iter().map(|(offset, bytes)| inside(&memory.memory, offset, bytes));
        for from in pieces.collect::<Result<Vec<_>, _>>()? {
            let to = pinned.at(filled, from.bytes());
            // SAFETY: nobody else gets this pinned memory before the job is done or the stream was waited for.
            let begun = unsafe { kit.queue.device.read_later(kit.queue.stream(), from, to) };
            filled += from.bytes();
            if let Err(error) = begun {
                // If this fails too, the device is broken and does no work any more.
                let _ = kit.settle();
                return Err(error.into());
            }
        }
        Ok(self.finish(place, Job::Read(pinned, total))?)
    }

    fn copy(&mut self, after: u64, runs: &[Moving], bytes: usize) -> Result<(), DeviceError> {
        let peer = self.peer.take().ok_or_else(|| refused("no peer's pool is open"))?;
        let begun = self.move_runs(after, runs, bytes, Some(&peer));
        self.peer = Some(peer);
        Ok(begun?)
    }

    fn digest(&mut self, after: u64, runs: &[(usize, u64)], bytes: usize) -> Result<(), DeviceError> {
        Ok(self.move_runs(after, &runs.iter().map(in_place).collect::<Vec<_>>(), bytes, None)?)
    }

    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
        let Some(place) = self.given.checked_sub(self.jobs.len()).filter(|_| !self.jobs.is_empty()) else {
            return Ok(None);
        };
        let kit = self.kit.as_mut().ok_or_else(|| refused("the queue is closed"))?;
        // The counter is cleared before the event is queried: a job that is done after the query makes it readable again.
        let _ = rustix::io::read(&kit.wake, &mut [0; 8]);
        let slot = &kit.slots[place % DEVICE_JOBS];
        if !kit.queue.device.is_done(slot.done)? {
            return Ok(None);
        }
        Ok(self.jobs.pop_front().map(|job| match job {
            Job::Read(pinned, bytes) => {
                let staging = Staging { pinned: Some(pinned), bytes, home: Arc::clone(&kit.staging) };
                JobDone::Read(Staged::new(staging))
            }
            // SAFETY: the job is done, and so is its copy of the digests.
            Job::Digest(count) => JobDone::Digests(unsafe { slot.sums_of(count) }),
        }))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.kit.as_ref().map(|kit| kit.wake.as_fd())
    }

    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        let kit = self.kit()?;
        let turn = kit.turn;
        if kit.landings[turn].2 && !kit.queue.device.is_done(kit.landings[turn].1)? {
            kit.settle()?;
        }
        let (pinned, _, busy) = &mut kit.landings[turn];
        *busy = false;
        if pinned.as_ref().is_none_or(|pinned| pinned.bytes() < bytes) {
            *pinned = Some(Pinned::new(&kit.queue.device, bytes.next_power_of_two())?);
        }
        let Some(pinned) = pinned else { return Err(refused("no staging memory").into()) };
        // SAFETY: the last copy out of this memory is done.
        Ok(unsafe { pinned.get_mut() })
    }

    fn write(&mut self, ranges: &[(usize, usize)]) -> Result<(), DeviceError> {
        let memory = Arc::clone(&self.pool.memory);
        let kit = self.kit()?;
        let stream = kit.queue.stream();
        let (pinned, event, busy) = &mut kit.landings[kit.turn];
        let Some(pinned) = pinned else { return Err(refused("nothing is staged").into()) };
        let mut taken = 0;
        *busy = true;
        for (offset, bytes) in joined(ranges) {
            let to = inside(&memory.memory, offset, bytes)?;
            // SAFETY: this pinned memory is not handed out again before the event below is done or the stream was waited for.
            unsafe { kit.queue.device.write_later(stream, to, pinned.at(taken, bytes)) }?;
            taken += bytes;
        }
        kit.queue.device.record(*event, stream)?;
        kit.turn = 1 - kit.turn;
        Ok(())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        Ok(self.kit()?.settle()?)
    }

    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError> {
        if !self.jobs.is_empty() {
            return Err(refused("digests while jobs are under way").into());
        }
        let memory = Arc::clone(&self.pool.memory);
        let kit = self.kit()?;
        kit.queue.device.see_foreign_writes()?;
        let mut sums = Vec::with_capacity(runs.len());
        for part in runs.chunks(MAX_RUNS) {
            let part: Vec<Moving> = part.iter().map(in_place).collect();
            let Kit { queue, slots, .. } = &mut *kit;
            let slot = &mut slots[0];
            let touches = sources(&memory.memory, &part, bytes)?;
            slot.launch(queue, (memory.memory.piece(0, 0).at(), Address::default()), touches, &part, bytes)?;
            let mut read = vec![0; part.len() * SUM_BYTES];
            queue.read(slot.sums.piece(0, part.len() * SUM_BYTES), &mut read)?;
            sums.extend(read.as_chunks().0.iter().map(|bytes| u64::from_ne_bytes(*bytes)));
        }
        kit.landings.iter_mut().for_each(|landing| landing.2 = false);
        Ok(sums)
    }
}

impl<D: SharingDevice> Slot<D> {
    /// Queues a copy of the list of runs to the device.
    fn list(&mut self, queue: &Queue<D>, runs: &[Moving]) -> Result<(), KernelError> {
        if runs.len() > MAX_RUNS {
            return Err(refused(format!("{} runs at once, at most {MAX_RUNS}", runs.len())));
        }
        // SAFETY: the slot's last job is done, so no copy uses the memory.
        let host = unsafe { self.host.get_mut() };
        for (run, bytes) in runs.iter().zip(host.as_chunks_mut::<RUN_BYTES>().0) {
            let Moved { source, target, lane } = run.into();
            bytes.copy_from_slice([source, target, lane].map(u64::to_ne_bytes).as_flattened());
        }
        let to = self.runs.piece(0, runs.len() * RUN_BYTES);
        // SAFETY: the memory is pinned, and nobody writes to it before the job is done.
        unsafe { queue.device.write_later(queue.stream(), to, self.host.at(0, runs.len() * RUN_BYTES)) }
    }

    /// Launches the kernel that digests runs of a source, and copies them to the target if it is not null. The caller has checked that all
    /// of `touches` is inside the pools.
    fn launch(
        &mut self,
        queue: &Queue<D>,
        (source, target): (Address, Address),
        touches: Vec<Access<'_>>,
        runs: &[Moving],
        bytes: usize,
    ) -> Result<(), KernelError> {
        self.list(queue, runs)?;
        let (list, sums) = (self.runs.piece(0, runs.len() * RUN_BYTES), self.sums.piece(0, runs.len() * SUM_BYTES));
        let own = [Access::Read(list), Access::Write(sums)];
        let touches: Vec<Access<'_>> = touches.into_iter().chain(own).collect();
        queue.fill(sums, 0)?;
        let (runs, digests, count) = (list.at(), sums.at(), runs.len() as u32);
        let params = MoveRuns { source, target, runs, digests, bytes: bytes as u64, count };
        queue.launch("baton_move_runs", &params, &touches)
    }

    /// # Safety
    /// The copy of the sums to the host is done.
    unsafe fn sums_of(&self, count: usize) -> Vec<u64> {
        // SAFETY: the caller vouches for it.
        let host = unsafe { self.host.get() };
        let (sums, _) = host[MAX_RUNS * RUN_BYTES..].as_chunks();
        sums[..count].iter().map(|bytes| u64::from_ne_bytes(*bytes)).collect()
    }
}

/// A run that is only digested, given as (offset, number of its first lane).
fn in_place(&(source, lane): &(usize, u64)) -> Moving {
    Moving { source, target: 0, lane }
}

/// The parts of the source pool that the runs read. An error if one is outside of the pool or not a multiple of 8 bytes.
fn sources<'a, D: Device>(pool: &'a Memory<D>, runs: &[Moving], bytes: usize) -> Result<Vec<Access<'a>>, KernelError> {
    let source = |run: &Moving| {
        if !(run.source | run.target | bytes).is_multiple_of(8) {
            return Err(refused(format!("{bytes} bytes at {} to {}; they move 8 at a time", run.source, run.target)));
        }
        Ok(Access::Read(inside(pool, run.source, bytes)?))
    };
    runs.iter().map(source).collect()
}

fn inside<D: Device>(memory: &Memory<D>, offset: usize, bytes: usize) -> Result<Piece<'_>, KernelError> {
    match offset.checked_add(bytes) {
        Some(end) if end <= memory.bytes() => Ok(memory.piece(offset, bytes)),
        _ => Err(refused(format!("{bytes} bytes at {offset} lie outside the pool of {}", memory.bytes()))),
    }
}

/// The ranges, with adjacent ones joined and empty ones left out.
fn joined(ranges: &[(usize, usize)]) -> Vec<(usize, usize)> {
    let mut all: Vec<(usize, usize)> = Vec::new();
    for &(offset, bytes) in ranges.iter().filter(|(_, bytes)| *bytes > 0) {
        match all.last_mut() {
            Some((start, so_far)) if *start + *so_far == offset => *so_far += bytes,
            _ => all.push((offset, bytes)),
        }
    }
    all
}

impl<D: SharingDevice> Drop for CopyQueue<D> {
    /// (I3) Waits for all copies under way, and only then closes the peer's pool.
    fn drop(&mut self) {
        let Some(mut kit) = self.kit.take() else { return };
        let settled = kit.settle();
        self.jobs.clear();
        self.peer = None;
        let mut idle = self.pool.idle();
        if settled.is_ok() && idle.len() < KEPT_QUEUES {
            idle.push(kit);
        }
    }
}
