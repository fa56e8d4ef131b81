//! The lock of a directory: one process at a time has it. It is flock's, so it ends with the process, however that ends.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::Path;

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::OpenError;
use crate::files::options;

/// The file whose lock says that the directory is in use. Its text is the id of the process that locked it last.
const LOCK: &str = "lock";

/// The lock, as long as this lives.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Locks a directory, or says who has it.
    pub fn take(directory: &Path) -> Result<Lock, OpenError> {
        let path = directory.join(LOCK);
        let failed = |doing| {
            let path = path.clone();
            move |cause| OpenError::Directory { doing, path, cause }
        };
        let mut file = options().open(&path).map_err(failed("open"))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(OpenError::InUse { path: directory.to_owned(), process: said(directory) });
            }
            Err(error) => return Err(failed("lock")(error.into())),
        }
        // A full disk must not keep a store from opening: the name of the process is a help, no more.
        let told = file.set_len(0).and_then(|()| write!(file, "{}", std::process::id()));
        if let Err(error) = told {
            tracing::debug!(%error, "the lock does not name this process");
        }
        Ok(Lock { _file: file })
    }

    /// Whether a process has the directory; the inner one is the process it says it is. To find out, a shared lock is held for a moment.
    pub fn held(directory: &Path) -> Result<Option<Option<u32>>, OpenError> {
        let path = directory.join(LOCK);
        let failed = |cause| OpenError::Directory { doing: "look at", path: path.clone(), cause };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockShared) {
            Ok(()) => Ok(None),
            Err(Errno::WOULDBLOCK) => Ok(Some(said(directory))),
            Err(error) => Err(failed(error.into())),
        }
    }
}

fn said(directory: &Path) -> Option<u32> {
    std::fs::read_to_string(directory.join(LOCK)).ok()?.trim().parse().ok()
}
