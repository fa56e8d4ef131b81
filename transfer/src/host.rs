//! Which machine, and which network on it, a worker runs on: what decides whether shared memory can be tried.

use std::fs;
use std::os::unix::fs::MetadataExt;

/// One running kernel and one network namespace in it. Abstract unix sockets are visible exactly within it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host {
    /// Random per boot; zeros when unknown.
    pub boot: [u8; 16],
    /// Inode of the network namespace.
    pub netns: u64,
}

impl Host {
    /// Of this process.
    pub(crate) fn current() -> Host {
        let unknown = Host { boot: [0; 16], netns: 0 };
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().and_then(|text| parse_uuid(&text));
        let netns = fs::metadata("/proc/self/ns/net").ok().map(|m| m.ino());
        match (boot, netns) {
            (Some(boot), Some(netns)) => Host { boot, netns },
            _ => unknown,
        }
    }

    /// Whether both are known and the same.
    pub(crate) fn same_as(&self, other: &Host) -> bool {
        self == other && self.boot != [0; 16]
    }
}

fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let digits: String = text.trim().chars().filter(|c| *c != '-').collect();
    if digits.len() != 32 {
        return None;
    }
    u128::from_str_radix(&digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_itself_and_unknown_hosts_are_nobody() {
        assert!(Host::current().same_as(&Host::current()));
        let unknown = Host { boot: [0; 16], netns: 0 };
        assert!(!unknown.same_as(&unknown));
        let boot = parse_uuid("00112233-4455-6677-8899-aabbccddeeff\n").unwrap();
        assert_eq!(boot[..4], [0x00, 0x11, 0x22, 0x33]);
        assert_eq!(parse_uuid("zz"), None);
    }
}
