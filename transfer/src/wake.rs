//! Waiting: for a socket, for a ring from another thread, for a process to die, or until a time.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;

use baton_handoff::TransferError;

/// Lets one thread wake another out of [`wait`].
#[derive(Debug)]
pub(crate) struct Wake(OwnedFd);

impl Wake {
    pub(crate) fn new() -> Result<Wake, TransferError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        rustix::event::eventfd(0, flags).map(Wake).map_err(|e| TransferError::os("create an eventfd", e))
    }

    /// Wakes the thread that waits, now or at its next wait.
    pub(crate) fn ring(&self) {
        // The only possible failure is a full counter, which rings just as well.
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

/// What to wait for on a descriptor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Interest {
    Read,
    Write,
    ReadWrite,
}

/// Waits until `wake` rings, one of `fds` is ready (bit i of the answer), or `timeout` passes. Clears the ring.
pub(crate) fn wait(
    wake: &Wake,
    fds: &[(BorrowedFd<'_>, Interest)],
    timeout: Option<Duration>,
) -> Result<u32, TransferError> {
    look(wake, fds, timeout).map(Option::unwrap_or_default)
}

/// As [`wait`]; None after a timeout.
fn look(
    wake: &Wake,
    fds: &[(BorrowedFd<'_>, Interest)],
    timeout: Option<Duration>,
) -> Result<Option<u32>, TransferError> {
    let mut polled: Vec<PollFd> = fds
        .iter()
        .map(|(fd, interest)| match interest {
            Interest::Read => PollFd::from_borrowed_fd(*fd, PollFlags::IN),
            Interest::Write => PollFd::from_borrowed_fd(*fd, PollFlags::OUT),
            Interest::ReadWrite => PollFd::from_borrowed_fd(*fd, PollFlags::IN | PollFlags::OUT),
        })
        .collect();
    polled.push(PollFd::from_borrowed_fd(wake.0.as_fd(), PollFlags::IN));
    let timeout = timeout.map(timespec);
    match rustix::event::poll(&mut polled, timeout.as_ref()) {
        Ok(0) => return Ok(None),
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(Some(0)),
        Err(error) => return Err(TransferError::os("wait for sockets", error)),
    }
    if polled.last().is_some_and(|fd| !fd.revents().is_empty()) {
        wake.clear();
    }
    let ready = polled[..fds.len()].iter().enumerate().filter(|(_, fd)| !fd.revents().is_empty());
    Ok(Some(ready.fold(0, |bits, (i, _)| bits | 1 << i)))
}

/// How long [`wait_awake`] polls before it sleeps: about as long as waking a sleeping thread takes, so at worst that cost doubles.
const AWAKE: Duration = Duration::from_micros(50);

/// As [`wait`], for a thread that expects something at any moment. It polls for a short while before it sleeps, because whoever wakes
/// a sleeping thread loses more time than a batch takes. It yields the core between polls.
pub(crate) fn wait_awake(
    wake: &Wake,
    fds: &[(BorrowedFd<'_>, Interest)],
    timeout: Option<Duration>,
) -> Result<u32, TransferError> {
    let until = Instant::now() + timeout.map_or(AWAKE, |timeout| timeout.min(AWAKE));
    while Instant::now() < until {
        if let Some(ready) = look(wake, fds, Some(Duration::ZERO))? {
            return Ok(ready);
        }
        std::thread::yield_now();
    }
    wait(wake, fds, timeout)
}

/// Waits until `fd` is readable, or `at_most` has passed.
pub(crate) fn readable(fd: BorrowedFd<'_>, at_most: Duration) -> Result<(), TransferError> {
    let timeout = timespec(at_most);
    match rustix::event::poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(TransferError::os("wait for a descriptor", error)),
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos() as _ }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_is_kept_until_waited_for_and_then_gone() {
        let wake = Wake::new().unwrap();
        wake.ring();
        wake.ring();
        let (_ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        assert_eq!(wait(&wake, &[(theirs.as_fd(), Interest::Read)], None).unwrap(), 0);
        // Cleared: only the socket is ready now, for writing.
        assert_eq!(wait(&wake, &[(theirs.as_fd(), Interest::ReadWrite)], None).unwrap(), 1);
        assert_eq!(wait(&wake, &[], Some(Duration::ZERO)).unwrap(), 0);
    }
}
