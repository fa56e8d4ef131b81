//! Where a worker's unix socket can be reached. This decides whether shared memory can be tried.

/// One running kernel, and a place in it where unix sockets are found: a network namespace, or a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Host {
    /// Boot id, random per boot; all zeros when unknown.
    pub boot: [u8; 16],
    /// Number of the place.
    pub place: u64,
}

impl Host {
    /// An unknown host. It is the same as no other.
    pub const UNKNOWN: Host = Host { boot: [0; 16], place: 0 };

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
        let host = Host { boot: [1; 16], place: 2 };
        assert!(host.same_as(&host) && !host.same_as(&Host { place: 3, ..host }));
        assert!(!Host::UNKNOWN.same_as(&Host::UNKNOWN));
    }
}
