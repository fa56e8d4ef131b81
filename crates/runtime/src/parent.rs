//! Child processes that must not outlive their parent.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the child get SIGTERM when its parent dies, however the parent dies (`kill -9` included). So the child drains,
/// removes its files and ends. If the parent dies before the child could ask for the signal, the child does not start.
///
/// The kernel ties this to the thread that starts the child. Use a thread that lives as long as the process, such as the
/// main thread or a worker of the multi-threaded runtime, not `spawn_blocking`.
pub fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    // SAFETY: the closure runs between fork and exec, where only async-signal-safe work is sound: it makes two system
    // calls on a copied pid, takes no lock and allocates nothing (an OS error code is stored inline).
    unsafe {
        command.pre_exec(move || ask(parent));
    }
}

/// Runs in the child: asks for the signal, then checks that the parent still lives.
fn ask(parent: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::TERM))?;
    match getppid() {
        Some(now) if now == parent => Ok(()),
        _ => Err(Errno::SRCH.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_whose_parent_is_already_gone_does_not_start() {
        let mut command = Command::new("true");
        let other = Pid::INIT;
        // SAFETY: as above.
        unsafe {
            command.pre_exec(move || ask(other));
        }
        assert_eq!(command.spawn().unwrap_err().raw_os_error(), Some(Errno::SRCH.raw_os_error()));
    }
}
