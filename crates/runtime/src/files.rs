//! How many files and sockets a process may have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

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
    }
}
