//! What the kernel knows of a cluster's processes, read from `/proc`.
//!
//! All processes of one cluster inherit one `TMPDIR`, which nobody else has: that is how they are found, also after their
//! parent is gone.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Process {
    /// Its id.
    pub pid: u32,
    /// The subcommand it runs: up, router, prefill or decode.
    pub role: String,
}

/// The processes with this `TMPDIR`, in the order of their ids. Zombies have no environment and do not count.
pub fn of(tmp: &Path) -> Vec<Process> {
    let mark = [b"TMPDIR=", tmp.as_os_str().as_encoded_bytes()].concat();
    let mut found: Vec<Process> = fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .filter(|pid| fields(*pid, "environ").contains(&mark))
        .map(|pid| Process { pid, role: role(pid) })
        .collect();
    found.sort_unstable_by_key(|p| p.pid);
    found
}

/// A file of NUL-terminated texts; empty when the process is gone.
fn fields(pid: u32, name: &str) -> Vec<Vec<u8>> {
    let bytes = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    bytes.split(|&b| b == 0).map(<[u8]>::to_vec).collect()
}

fn role(pid: u32) -> String {
    fields(pid, "cmdline").get(1).map(|arg| String::from_utf8_lossy(arg).into_owned()).unwrap_or_default()
}

/// Memory in bytes that is a process's own: neither files nor the KV pool, which fills up once; None when it is gone.
pub fn own_bytes(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? * 1024)
}

/// Whether a process was stopped by a signal and has not gone on.
pub fn stands_still(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
}

/// Inodes of a process's sockets.
fn sockets(pid: u32) -> BTreeSet<String> {
    let links = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let targets = links.filter_map(|link| fs::read_link(link.path()).ok()?.to_str().map(str::to_owned));
    targets.filter_map(|t| Some(t.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())).collect()
}

/// TCP ports a process listens on (IPv4).
pub fn listening_ports(pid: u32) -> Vec<u16> {
    const LISTEN: &str = "0A";
    let own = sockets(pid);
    let table = fs::read_to_string(format!("/proc/{pid}/net/tcp")).unwrap_or_default();
    let port = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (local, state, inode) = (words.get(1)?, words.get(3)?, words.get(9)?);
        let port = u16::from_str_radix(local.rsplit_once(':')?.1, 16).ok()?;
        (*state == LISTEN && own.contains(*inode)).then_some(port)
    };
    table.lines().filter_map(port).collect()
}

/// Names of abstract unix sockets that begin like this, the `@` included.
pub fn abstract_sockets_like(prefix: &str) -> Vec<String> {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let names = table.lines().filter_map(|line| line.split_whitespace().nth(7));
    names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
}

/// Flips a bit in each place of a process's private memory, outside of files, where these bytes are. Returns how many there were.
pub fn flip_private(pid: u32, bytes: &[u8]) -> std::io::Result<usize> {
    let memory = OpenOptions::new().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
    let mut flipped = 0;
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let mut fields = line.split_whitespace();
        let (Some(range), Some("rw-p"), None) = (fields.next(), fields.next(), fields.nth(3)) else { continue };
        let ends = range.split_once('-').and_then(|(first, last)| {
            Some((u64::from_str_radix(first, 16).ok()?, u64::from_str_radix(last, 16).ok()?))
        });
        let Some((first, last)) = ends else { continue };
        let mut there = vec![0; (last - first) as usize];
        // It may have been given back meanwhile.
        if memory.read_exact_at(&mut there, first).is_err() {
            continue;
        }
        for at in there.windows(bytes.len()).enumerate().filter(|(_, window)| *window == bytes).map(|(at, _)| at) {
            memory.write_all_at(&[there[at] ^ 4], first + at as u64)?;
            flipped += 1;
        }
    }
    Ok(flipped)
}
