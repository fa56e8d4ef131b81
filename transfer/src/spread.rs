//! [`SpreadMemory`]: the pools of tensor-parallel ranks, each on a device of its own, as one pool.
//!
//! To sessions it is like the pool of a worker without ranks: every offset means the same, and [`Stripes`] says in which rank's memory
//! it lies. KV leaves and enters it through host memory, where the ranks' pieces are put together or taken apart. Other processes
//! cannot open it, and no network card can register it: workers use the other transports then. Knows nothing of what a device is.

use std::collections::{BTreeMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use baton_handoff::{Range, TransferError};
use baton_types::{PoolGeometry, RankPiece, Stripes};
use rustix::event::epoll;

use crate::device::{
    DEVICE_JOBS, DeviceError, DeviceMemory, DeviceQueue, JobDone, Moving, OpenedBy, PoolHandle, Registrable, Staged,
};

/// The error of every operation that would let others reach the pool's memory directly.
fn apart<T>() -> Result<T, DeviceError> {
    Err(DeviceError("the pool is spread over several GPUs, which is reached through host memory alone".to_owned()))
}

/// The ranks' pools, in the order of ranks, as one pool. Each holds its rank's heads.
pub struct SpreadMemory {
    stripes: Arc<Stripes>,
    ranks: Vec<Arc<dyn DeviceMemory>>,
}

impl SpreadMemory {
    /// Joins the pools of `ranks` to one of shape `whole`, which has all heads.
    ///
    /// # Errors
    /// When the ranks cannot share its heads, or a rank's pool is smaller than its part.
    pub fn new(whole: &PoolGeometry, ranks: Vec<Arc<dyn DeviceMemory>>) -> Result<SpreadMemory, TransferError> {
        let failed = |e: String| TransferError::argument("ranks", e);
        let count = ranks.len() as u32;
        let stripes = Stripes::new(whole, count)
            .ok_or_else(|| failed(format!("{count} of them cannot share the KV heads of a layer evenly")))?;
        let needed = whole.of_ranks(count).bytes();
        match ranks.iter().map(|rank| rank.bytes()).find(|bytes| *bytes < needed) {
            Some(bytes) => Err(failed(format!("one's pool has {bytes} bytes, {needed} are needed"))),
            None => Ok(SpreadMemory { stripes: Arc::new(stripes), ranks }),
        }
    }
}

impl DeviceMemory for SpreadMemory {
    fn bytes(&self) -> usize {
        self.stripes.bytes()
    }

    fn is_one(&self) -> bool {
        false
    }

    /// The latest of the ranks' marks. A rank may have set fewer, if it once left a step early. Its queue then waits for the last mark the
    /// rank has set by the time of the job, which is no earlier than the one it had set at this call.
    fn mark(&self) -> u64 {
        self.ranks.iter().map(|rank| rank.mark()).max().unwrap_or(0)
    }

    fn export(&self) -> Result<PoolHandle, DeviceError> {
        apart()
    }

    fn registrable(&self) -> Result<Registrable, DeviceError> {
        apart()
    }

    fn queue(&self) -> Result<Box<dyn DeviceQueue>, DeviceError> {
        let failed = |e: rustix::io::Errno| DeviceError(format!("wait for several devices: {e}"));
        let queues = self.ranks.iter().map(|rank| rank.queue()).collect::<Result<Vec<_>, _>>()?;
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for fd in queues.iter().filter_map(|queue| queue.fd()) {
            // Edge-triggered: a late ring from a rank that has nothing to do must not keep a session awake.
            epoll::add(&wake, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN | epoll::EventFlags::ET)
                .map_err(failed)?;
        }
        let ranks = queues.into_iter().map(|queue| Rank { queue, reading: 0, read: VecDeque::new() }).collect();
        Ok(Box::new(SpreadQueue {
            stripes: Arc::clone(&self.stripes),
            ranks,
            wake,
            jobs: VecDeque::new(),
            staged: Vec::new(),
        }))
    }
}

/// One rank's side of a queue.
struct Rank {
    queue: Box<dyn DeviceQueue>,
    /// Reads under way.
    reading: usize,
    /// What finished reads have read, oldest first.
    read: VecDeque<Staged>,
}

struct SpreadQueue {
    stripes: Arc<Stripes>,
    ranks: Vec<Rank>,
    /// Readable when one of the ranks' descriptors is.
    wake: OwnedFd,
    /// Reads under way, oldest first, each as its pieces.
    jobs: VecDeque<Vec<RankPiece>>,
    staged: Vec<u8>,
}

impl SpreadQueue {
    /// Splits ranges of the pool into the ranks' pieces, in order.
    fn pieces(&self, ranges: &[Range]) -> Result<Vec<RankPiece>, DeviceError> {
        let bytes = self.stripes.bytes();
        let inside = |&(offset, len): &Range| offset.checked_add(len).is_some_and(|end| end <= bytes);
        match ranges.iter().find(|range| !inside(range)) {
            Some((offset, len)) => Err(DeviceError(format!("{len} bytes at {offset} lie outside the pool of {bytes}"))),
            None => Ok(ranges.iter().flat_map(|&(offset, len)| self.stripes.pieces(offset..offset + len)).collect()),
        }
    }

    /// Takes what the ranks have read by now.
    fn gather(&mut self) -> Result<(), DeviceError> {
        // Clear the ring before asking the ranks: a read that is done later rings again. If this fails, nothing is lost.
        let mut rung = [MaybeUninit::uninit(); 8];
        let _ = epoll::wait(&self.wake, &mut rung[..], Some(&rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 }));
        for rank in &mut self.ranks {
            while rank.reading > 0 {
                match rank.queue.poll()? {
                    Some(JobDone::Read(staged)) => rank.read.push_back(staged),
                    Some(JobDone::Digests(_)) => return apart(),
                    None => break,
                }
                rank.reading -= 1;
            }
        }
        Ok(())
    }
}

/// Whether a job has a piece of this rank.
fn is_of(job: &[RankPiece], rank: usize) -> bool {
    job.iter().any(|piece| piece.rank == rank)
}

/// This rank's pieces, as ranges of its pool.
fn ranges_of(pieces: &[RankPiece], rank: usize) -> Vec<Range> {
    pieces.iter().filter(|piece| piece.rank == rank).map(|piece| (piece.offset, piece.len)).collect()
}

impl DeviceQueue for SpreadQueue {
    fn open(&mut self, _: PoolHandle, _: usize) -> Result<OpenedBy, DeviceError> {
        apart()
    }

    fn read(&mut self, after: u64, ranges: &[Range]) -> Result<(), DeviceError> {
        if self.jobs.len() == DEVICE_JOBS {
            return Err(DeviceError(format!("more than {DEVICE_JOBS} jobs at once")));
        }
        let job = self.pieces(ranges)?;
        for (number, rank) in self.ranks.iter_mut().enumerate().filter(|(number, _)| is_of(&job, *number)) {
            rank.queue.read(after, &ranges_of(&job, number))?;
            rank.reading += 1;
        }
        self.jobs.push_back(job);
        Ok(())
    }

    fn copy(&mut self, _: u64, _: &[Moving], _: usize) -> Result<(), DeviceError> {
        apart()
    }

    fn digest(&mut self, _: u64, _: &[(usize, u64)], _: usize) -> Result<(), DeviceError> {
        apart()
    }

    fn poll(&mut self) -> Result<Option<JobDone>, DeviceError> {
        self.gather()?;
        let there = |job: &Vec<RankPiece>| {
            self.ranks.iter().enumerate().all(|(number, rank)| !rank.read.is_empty() || !is_of(job, number))
        };
        if !self.jobs.front().is_some_and(there) {
            return Ok(None);
        }
        let Some(job) = self.jobs.pop_front() else { return Ok(None) };
        let ranks = self.ranks.iter_mut().enumerate();
        let read: Vec<Option<Staged>> =
            ranks.map(|(number, rank)| is_of(&job, number).then(|| rank.read.pop_front()).flatten()).collect();
        joined(&job, &read).map(|bytes| Some(JobDone::Read(Staged::new(bytes))))
    }

    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.wake.as_fd())
    }

    fn stage(&mut self, bytes: usize) -> Result<&mut [u8], DeviceError> {
        if self.staged.len() < bytes {
            self.staged.resize(bytes, 0);
        }
        Ok(&mut self.staged)
    }

    fn write(&mut self, ranges: &[Range]) -> Result<(), DeviceError> {
        let pieces = self.pieces(ranges)?;
        if pieces.iter().map(|piece| piece.len).sum::<usize>() > self.staged.len() {
            return Err(DeviceError("more is written than was staged".to_owned()));
        }
        for (number, rank) in self.ranks.iter_mut().enumerate().filter(|(number, _)| is_of(&pieces, *number)) {
            let ranges = ranges_of(&pieces, number);
            let mut rest = rank.queue.stage(ranges.iter().map(|(_, len)| len).sum())?;
            let mut staged = &self.staged[..];
            for piece in &pieces {
                let bytes = staged.split_off(..piece.len).unwrap_or_default();
                if piece.rank == number
                    && let Some(to) = rest.split_off_mut(..piece.len)
                {
                    to.copy_from_slice(bytes);
                }
            }
            rank.queue.write(&ranges)?;
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), DeviceError> {
        // Settle all of them, even after one has failed.
        let settled: Vec<_> = self.ranks.iter_mut().map(|rank| rank.queue.settle()).collect();
        settled.into_iter().collect()
    }

    /// Digests are sums over lanes, so the digests of a run's pieces add up to the run's digest.
    fn digests(&mut self, runs: &[(usize, u64)], bytes: usize) -> Result<Vec<u64>, DeviceError> {
        let mut parts: BTreeMap<(usize, usize), Parts> = BTreeMap::new();
        for (number, &(offset, first)) in runs.iter().enumerate() {
            let mut before = 0usize;
            for RankPiece { rank, offset, len } in self.pieces(&[(offset, bytes)])? {
                if !before.is_multiple_of(8) {
                    return Err(DeviceError("a rank's part of a block begins within a lane".to_owned()));
                }
                let parts = parts.entry((rank, len)).or_default();
                parts.of.push(number);
                parts.asked.push((offset, first + before as u64 / 8));
                before += len;
            }
        }
        let mut sums = vec![0u64; runs.len()];
        for ((rank, len), Parts { of, asked }) in parts {
            let digests = self.ranks[rank].queue.digests(&asked, len)?;
            of.iter().zip(digests).for_each(|(run, digest)| sums[*run] = sums[*run].wrapping_add(digest));
        }
        Ok(sums)
    }
}

/// Pieces of runs, all of one length and in one rank's pool.
#[derive(Default)]
struct Parts {
    /// Number of the run each is of.
    of: Vec<usize>,
    /// Offset and first lane of each.
    asked: Vec<(usize, u64)>,
}

/// Puts together what the ranks have read for a job.
fn joined(job: &[RankPiece], read: &[Option<Staged>]) -> Result<Vec<u8>, DeviceError> {
    let mut rest: Vec<&[u8]> = read.iter().map(|read| read.as_ref().map_or(&[][..], Staged::bytes)).collect();
    let mut bytes = Vec::with_capacity(job.iter().map(|piece| piece.len).sum());
    for piece in job {
        let part = rest[piece.rank].split_off(..piece.len);
        bytes.extend_from_slice(part.ok_or_else(|| DeviceError("a rank has read less than was asked for".to_owned()))?);
    }
    Ok(bytes)
}
