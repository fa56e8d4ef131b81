//! Which writes a completion waits for. There is no order between a session's connections, so a completion says how many Write frames were
//! sent before it on each further connection.

use crate::wire::Frame;

/// Write frames sent on each further connection of a session; connection 1 comes first.
#[derive(Clone, Debug, Default)]
pub struct Written(Vec<u64>);

impl Written {
    /// Counts a Write frame on connection `number`. Those on the session's own connection, 0, need no count.
    pub fn count(&mut self, number: usize) {
        let Some(at) = number.checked_sub(1) else { return };
        self.0.resize(self.0.len().max(number), 0);
        self.0[at] += 1;
    }

    /// Makes a completion that leaves now wait at the peer for every write counted so far. Other frames stay as they are.
    pub fn stamp(&self, frame: &mut Frame) {
        if let Frame::Complete { after, .. } = frame {
            after.clone_from(&self.0);
        }
    }
}
