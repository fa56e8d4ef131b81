//! The machine and network namespace a worker runs on. They decide whether shared memory can be tried.

/// One running kernel and one network namespace in it. An abstract unix socket is visible exactly within one such pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host {
    /// Boot id, random per boot; all zeros when unknown.
    pub boot: [u8; 16],
    /// Inode of the network namespace.
    pub netns: u64,
}

impl Host {
    /// An unknown host. It is the same as no other.
    pub const UNKNOWN: Host = Host { boot: [0; 16], netns: 0 };

    /// Whether both are known and the same.
    pub fn same_as(&self, other: &Host) -> bool {
        self == other && self.boot != [0; 16]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_itself_and_unknown_hosts_are_nobody() {
        let host = Host { boot: [1; 16], netns: 2 };
        assert!(host.same_as(&host) && !host.same_as(&Host { netns: 3, ..host }));
        assert!(!Host::UNKNOWN.same_as(&Host::UNKNOWN));
    }
}
