//! How many files and sockets a process may have open.

use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors that the process's table has room for from the start: 512 KiB.
const ROOM: u64 = 1 << 16;

/// Lets this process have as many open as the system allows it at all. The usual limit of 1,024 is for programs that use `select`; a router has
/// a socket for each client and each worker, and with no number left it could not even close those that are idle.
pub(crate) fn allow_all() {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        Ok(()) => tracing::debug!(?current, ?maximum, "limit of open files raised"),
        Err(error) => tracing::warn!(?current, ?maximum, %error, "the limit of open files cannot be raised"),
    }
}

/// Makes room in the process's table of descriptors. Linux doubles a table that is full, which starts at 64. In a process with several threads it then
/// waits until no processor uses the old one (`expand_fdtable`), 10 ms and more, in which the thread that accepts a connection serves nobody.
pub(crate) fn make_room() {
    let Rlimit { current, .. } = getrlimit(Resource::Nofile);
    let highest = current.map_or(ROOM, |most| most.min(ROOM)).saturating_sub(1) as i32;
    // The table grows for the highest number, and stays as it is when that is closed.
    if let Err(error) = fcntl_dupfd_cloexec(std::io::stderr(), highest) {
        tracing::debug!(%error, "no room was made for descriptors");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_may_have_as_many_files_open_as_the_system_allows() {
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        let few = maximum.map_or(1024, |most| most.min(1024));
        setrlimit(Resource::Nofile, Rlimit { current: Some(few), maximum }).unwrap();
        allow_all();
        assert_eq!(getrlimit(Resource::Nofile), Rlimit { current: maximum, maximum });

        // And its table has room for many of them.
        make_room();
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let size = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap().trim();
        let most = maximum.map_or(ROOM, |most| most.min(ROOM));
        assert!(size.parse::<u64>().unwrap() >= most, "{size} of {most}");
    }
}
