//! A pool's memory, as a thread reaches it that copies blocks: by its address, or by a queue of its device.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use baton_kv_store::BlockName;
use baton_store::Filling;
use baton_transfer::{DeviceError, DeviceMemory, DeviceQueue, JobDone, Pool, Segment, Staged, TransferError};

/// How long a device's job is waited for at a time.
const JOB: Duration = Duration::from_micros(100);
/// Most runs that a device digests at once.
const RUNS: usize = 1024;

/// The pool's memory, as one thread reaches it.
pub(crate) enum Memory {
    Host(Arc<Segment>),
    Device(Device),
}

impl Memory {
    pub fn of(pool: &Pool) -> Result<Memory, TransferError> {
        let failed = |DeviceError(cause)| TransferError::Device { what: "open a queue", cause };
        Ok(match pool {
            Pool::Host(segment) => Memory::Host(Arc::clone(segment)),
            Pool::Device(memory) => {
                let queue = Some(memory.queue().map_err(failed)?);
                Memory::Device(Device { memory: Arc::clone(memory), queue })
            }
        })
    }

    /// Ends what a copy that failed has left under way: the next one must not take it for its own. Waits for it.
    pub fn give_up(&mut self) {
        if let Memory::Device(device) = self {
            device.queue = None;
        }
    }
}

/// A device's memory with a queue to it.
pub(crate) struct Device {
    pub memory: Arc<dyn DeviceMemory>,
    /// `None` after a failure, until a new one can be opened.
    pub queue: Option<Box<dyn DeviceQueue>>,
}

impl Device {
    pub fn queue(&mut self) -> Result<&mut dyn DeviceQueue, DeviceError> {
        if self.queue.is_none() {
            self.queue = Some(self.memory.queue()?);
        }
        self.queue.as_deref_mut().ok_or_else(|| DeviceError("it has no queue".into())).map(|queue| queue as _)
    }
}

/// What was written to a device, and what its digest must be there.
#[derive(Debug)]
pub(crate) struct Written {
    pub name: BlockName,
    pub bytes: usize,
    pub offset: usize,
    pub lane: u64,
    pub digest: u64,
}

/// The first block that is not in the device's memory as it was to be written there.
pub(crate) fn verify(queue: &mut dyn DeviceQueue, written: &mut [Written]) -> Result<Option<BlockName>, DeviceError> {
    written.sort_by_key(|written| written.bytes);
    for alike in written.chunk_by(|one, other| one.bytes == other.bytes) {
        for some in alike.chunks(RUNS) {
            let runs: Vec<_> = some.iter().map(|written| (written.offset, written.lane)).collect();
            let digests = queue.digests(&runs, some[0].bytes)?;
            let differs = some.iter().zip(&digests).find(|(written, digest)| written.digest != **digest);
            if let Some((written, _)) = differs {
                return Ok(Some(written.name));
            }
        }
    }
    Ok(None)
}

/// Waits for the oldest read.
pub(crate) fn read(queue: &mut dyn DeviceQueue) -> Result<Staged, DeviceError> {
    loop {
        match queue.poll()? {
            Some(JobDone::Read(staged)) => return Ok(staged),
            Some(JobDone::Digests(_)) => return Err(DeviceError("a job that nobody asked for is done".into())),
            None => std::thread::sleep(JOB),
        }
    }
}

/// Gives the store a block whose parts follow each other. `known`, and the error: see [`Filling::copy_known`].
pub(crate) fn fill(filling: Filling, known: &BTreeMap<usize, u64>, staged: &Staged) -> Result<(), usize> {
    let rest = Cell::new(staged.bytes());
    filling.copy_known(known, |part| {
        let (own, others) = rest.get().split_at(part.range.len());
        rest.set(others);
        own
    })
}
