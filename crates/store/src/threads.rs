//! The threads that carry out what the disk has to do.

use std::io::Result;
use std::sync::Arc;

use baton_kv_store::{Input, ReadError, check_record};
use baton_types::Courtesy;

use crate::OpenError;
use crate::queue::Work;
use crate::shared::Shared;

/// Starts the threads.
pub(crate) fn start(shared: &Arc<Shared>, count: usize, courtesy: &Courtesy) -> std::result::Result<(), OpenError> {
    for at in 0..count {
        let (ours, mut courtesy) = (shared.clone(), courtesy.clone().among(count));
        let body = move || {
            while let Some(work) = ours.queue.next() {
                let copied = matches!(work, Work::Read { .. } | Work::Write { .. });
                let wrote = matches!(work, Work::Write { .. } | Work::Sync);
                let answer = carry_out(&ours, work);
                ours.queue.done(wrote);
                if let Some(input) = answer {
                    ours.feed(input);
                }
                if copied {
                    courtesy.copied(ours.shape.data_bytes());
                }
            }
            let queue = ours.queue.clone();
            // Whoever waits for the threads may open the file again: it is closed before.
            drop(ours);
            queue.left();
        };
        if let Err(cause) = std::thread::Builder::new().name(format!("kv-disk-{at}")).spawn(body) {
            (at..count).for_each(|_| shared.queue.left());
            return Err(OpenError::Host { doing: "start a thread", cause });
        }
    }
    Ok(())
}

fn carry_out(shared: &Shared, work: Work) -> Option<Input> {
    let disk = shared.disk.as_deref()?;
    let stride = shared.shape.stride();
    Some(match work {
        Work::Scan(segment) => {
            let heads = disk.scan(segment);
            shared.note("disk", "scan", &heads);
            Input::Scanned(segment, heads.ok())
        }
        Work::Read { job, place, into, expect } => {
            // SAFETY: the buffer is this read's until the core hears of its end.
            let record = unsafe { shared.memory.write(into, 0, stride) };
            let read = shared.timed(false, || disk.read(place, record));
            shared.note("disk", "read", &read);
            let checked = match read {
                Ok(()) => check_record(&shared.shape, record, &expect).map_err(ReadError::Mismatch),
                Err(_) => Err(ReadError::Io),
            };
            Input::Read(job, checked)
        }
        Work::Write { job, place, from, head } => {
            let write = || -> Result<()> {
                // SAFETY: nobody but the one who writes a buffer to disk uses its head.
                let to = unsafe { shared.memory.write(from, 0, shared.shape.head_bytes()) };
                to.copy_from_slice(&head);
                // SAFETY: the data of a buffer that is being written do not change until the core hears of the write's end.
                disk.write(place, unsafe { shared.memory.read(from, 0, stride) })
            };
            let written = shared.timed(true, write);
            shared.note("disk", "write", &written);
            Input::Written(job, written.is_ok())
        }
        Work::Sync => {
            shared.note("disk", "sync", &disk.sync());
            return None;
        }
    })
}
