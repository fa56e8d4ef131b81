//! What a completion waits for. Between a session's connections there is no order, so a completion says how many writes on the others
//! it comes after.

use crate::wire::Frame;

/// How many Write frames each connection beside a session's own was given.
#[derive(Clone, Debug, Default)]
pub struct Written(Vec<u64>);

impl Written {
    /// One more on the connection that the peer knows by this number; those on the session's own, 0, need no count.
    pub fn count(&mut self, number: usize) {
        let Some(at) = number.checked_sub(1) else { return };
        self.0.resize(self.0.len().max(number), 0);
        self.0[at] += 1;
    }

    /// A completion that leaves now waits at the peer for every write that was counted before it.
    pub fn stamp(&self, frame: &mut Frame) {
        if let Frame::Complete { after, .. } = frame {
            after.clone_from(&self.0);
        }
    }
}
