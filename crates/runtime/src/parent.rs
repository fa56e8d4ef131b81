//! Processes that must not outlive the one that started them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the child get SIGTERM when its parent dies, however it dies (`kill -9` included), so that it drains, removes its
/// files and ends. When the parent is gone before the child could ask for that, the child does not start.
///
/// The kernel ties this to the thread that starts the child: start it from one that lives as long as the process, such as
/// the main thread or a worker of the multi-threaded runtime, not from `spawn_blocking`.
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let in_child = move || -> io::Result<()> {
        set_parent_process_death_signal(Some(Signal::TERM))?;
        match getppid() {
            Some(now) if now == parent => Ok(()),
            _ => Err(Errno::SRCH.into()),
        }
    };
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe work is sound: it makes two system
    // calls on a copied pid, takes no lock and allocates nothing (an OS error code is stored inline).
    unsafe {
        command.pre_exec(in_child);
    }
}
