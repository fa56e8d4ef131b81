//! Unix sockets between the workers of one machine. A socket has an abstract name, which exists in one network namespace; or it is a file in a
//! folder that workers share, as pods do by a volume of their node, since each pod has a network namespace of its own.

use std::fs;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use baton_handoff::{Host, TransferError};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// What the names of all sockets begin with.
pub(crate) const PREFIX: &str = "baton-";
/// A socket's file that nobody listens at is left alone this long: its worker may be about to listen.
const NEW: Duration = Duration::from_secs(60);

/// A listening socket. Its file, if it has one, is removed when this is dropped.
pub(crate) struct Door {
    pub listener: UnixListener,
    file: Option<PathBuf>,
}

impl Drop for Door {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            // An error means that somebody has removed it before.
            let _ = fs::remove_file(file);
        }
    }
}

/// Where sockets with an abstract name are found that this process can reach.
pub(crate) fn this_namespace() -> Host {
    host(fs::metadata("/proc/self/ns/net").ok().map(|about| about.ino()))
}

/// Where sockets in a folder are found.
///
/// # Errors
/// There is no such folder.
pub(crate) fn this_folder(folder: &Path) -> Result<Host, TransferError> {
    let about = fs::metadata(folder).and_then(|about| match about.is_dir() {
        true => Ok(about),
        false => Err(std::io::ErrorKind::NotADirectory.into()),
    });
    let about = about.map_err(|e| unusable(folder, e))?;
    // The same for all who see the folder, whatever they call it, and no number of a namespace.
    Ok(host(Some((about.dev().rotate_left(32) ^ about.ino()) | 1 << 63)))
}

fn unusable(folder: &Path, cause: std::io::Error) -> TransferError {
    TransferError::argument("transfer_sockets", format!("{}: {cause}", folder.display()))
}

fn host(place: Option<u64>) -> Host {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().and_then(|text| parse_uuid(&text));
    match (boot, place) {
        (Some(boot), Some(place)) => Host { boot, place },
        _ => Host::UNKNOWN,
    }
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

/// Listens at a name that is this worker's alone.
///
/// # Errors
/// The folder cannot be written to; the name is taken.
pub(crate) fn listen(name: &str, folder: Option<&Path>) -> Result<Door, TransferError> {
    let Some(folder) = folder else {
        let bound = SocketAddr::from_abstract_name(name).and_then(|address| UnixListener::bind_addr(&address));
        let listener = bound.and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
        let listener = listener.map_err(|e| TransferError::os("listen on a unix socket", e))?;
        return Ok(Door { listener, file: None });
    };
    forget_dead(folder);
    let file = folder.join(name);
    let listener = UnixListener::bind(&file).map_err(|e| unusable(folder, e))?;
    let door = Door { listener, file: Some(file) };
    door.listener.set_nonblocking(true).map_err(|e| unusable(folder, e))?;
    Ok(door)
}

/// Removes the files of workers that were killed.
fn forget_dead(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(PREFIX)) {
        let old = entry.metadata().is_ok_and(|about| {
            let age = about.modified().ok().and_then(|made| made.elapsed().ok());
            about.file_type().is_socket() && age.is_some_and(|age| age > NEW)
        });
        if old && connect(entry.file_name().as_encoded_bytes(), Some(folder)).err() == Some(Errno::CONNREFUSED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Connects without ever blocking: a full backlog is an error like any other.
///
/// # Errors
/// `CONNREFUSED` or `NOENT`: the worker is gone.
pub(crate) fn connect(name: &[u8], folder: Option<&Path>) -> Result<UnixStream, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    let address = match folder {
        None => SocketAddrUnix::new_abstract_name(name)?,
        // A name from the wire must not lead out of the folder.
        Some(_) if name.contains(&b'/') => return Err(Errno::INVAL),
        Some(folder) => SocketAddrUnix::new(folder.join(String::from_utf8_lossy(name).as_ref()))?,
    };
    rustix::net::connect(socket.as_fd(), &address)?;
    Ok(UnixStream::from(socket))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_on_its_own_host() {
        assert!(this_namespace().same_as(&this_namespace()));
        let boot = parse_uuid("00112233-4455-6677-8899-aabbccddeeff\n").unwrap();
        assert_eq!(boot[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(parse_uuid("zz"), None);
    }

    #[test]
    fn a_folder_is_the_same_under_another_name() {
        let folder = tempfile::tempdir().unwrap();
        let (real, other) = (folder.path().join("real"), folder.path().join("other"));
        fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &other).unwrap();
        let here = this_folder(&real).unwrap();
        assert!(here.same_as(&this_folder(&other).unwrap()));
        assert!(!here.same_as(&this_folder(folder.path()).unwrap()) && !here.same_as(&this_namespace()));
        let error = this_folder(&folder.path().join("none")).unwrap_err().to_string();
        assert!(error.contains("transfer_sockets") && error.contains("none"), "{error}");
    }

    #[test]
    fn a_socket_in_a_folder_is_reached_there_and_leaves_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let at = Some(folder.path());
        let door = listen("baton-a", at).unwrap();
        connect(b"baton-a", at).unwrap();
        assert_eq!(connect(b"baton-a", None).unwrap_err(), Errno::CONNREFUSED);
        assert_eq!(connect(b"../baton-a", at).unwrap_err(), Errno::INVAL);
        drop(door);
        assert_eq!(connect(b"baton-a", at).unwrap_err(), Errno::NOENT);
    }

    #[test]
    fn files_of_killed_workers_are_removed_and_no_others() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let made = |name: &str, age: u64| {
            let door = UnixListener::bind(at(name)).unwrap();
            let when = std::time::SystemTime::now() - Duration::from_secs(age);
            let times =
                [rustix::fs::UTIME_OMIT, 0].map(|nsec| rustix::fs::Timespec { tv_sec: seconds(when), tv_nsec: nsec });
            let times = rustix::fs::Timestamps { last_access: times[0], last_modification: times[1] };
            rustix::fs::utimensat(rustix::fs::CWD, at(name), &times, rustix::fs::AtFlags::empty()).unwrap();
            door
        };
        let alive = made("baton-alive", 900);
        drop((made("baton-killed", 900), made("baton-new", 1), made("other", 900)));
        let _door = listen("baton-me", Some(folder.path())).unwrap();
        let left = |name| at(name).exists();
        assert!(!left("baton-killed") && left("baton-alive") && left("baton-new") && left("other") && left("baton-me"));
        drop(alive);
    }

    fn seconds(time: std::time::SystemTime) -> i64 {
        time.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs() as i64
    }
}
