//! How far the peer of a session that has ended still reaches.

/// What is known of the peer of a session that has ended. This end's connections, and whatever of this process applies the peer's writes, are
/// closed already.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PeerReach {
    /// The peer was given the pool and may write to it without this process's help, as over shared memory.
    pub has_pool: bool,
    /// Its process is gone.
    pub gone: bool,
    /// It has begun a new session, which it does only when it has left the old one.
    pub superseded: bool,
}

impl PeerReach {
    /// Whether the peer may still write (I3). Silence, a closed connection or a passed deadline prove nothing about a peer that has the pool.
    pub fn may_write(self) -> bool {
        self.has_pool && !self.gone && !self.superseded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_peer_with_the_pool_that_lives_and_has_not_come_back_may_write() {
        for bits in 0..8u8 {
            let [has_pool, gone, superseded] = [1, 2, 4].map(|bit| bits & bit != 0);
            assert_eq!(PeerReach { has_pool, gone, superseded }.may_write(), bits == 1, "{bits:03b}");
        }
    }
}
