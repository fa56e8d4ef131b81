//! The decode end's sessions: each one's peer, the earlier sessions it ends, and the further connections that may join it.
//!
//! Pure: no clock, no I/O, no threads. `M` is the caller's handle to a session's thread, its mail. The hub keeps [`Members`] under a lock;
//! a simulation calls it directly.

use std::collections::{BTreeMap, BTreeSet};

use baton_types::WorkerId;

use super::table::SessionId;
use crate::wire::JoinTicket;

struct Member<M> {
    mail: M,
    worker: Option<WorkerId>,
    /// Token by which further connections may join.
    token: Option<u64>,
    /// Numbers of the further connections that have joined.
    streams: BTreeSet<u8>,
}

/// All sessions, each with its mail.
pub struct Members<M> {
    members: BTreeMap<SessionId, Member<M>>,
    /// Most sessions; also the most further connections of all sessions together (I5).
    limit: usize,
}

impl<M> Members<M> {
    /// No sessions. `limit`: [`crate::TransferLimits::connections`].
    pub fn new(limit: usize) -> Members<M> {
        Members { members: BTreeMap::new(), limit }
    }

    /// Number of sessions.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there are no sessions.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// The mails of all sessions.
    pub fn mails(&self) -> impl Iterator<Item = &M> {
        self.members.values().map(|member| &member.mail)
    }

    /// A session's mail.
    pub fn mail(&self, session: SessionId) -> Option<&M> {
        self.members.get(&session).map(|member| &member.mail)
    }

    /// Adds a session; false when there are too many.
    pub fn admit(&mut self, session: SessionId, mail: M) -> bool {
        let room = self.members.len() < self.limit;
        if room {
            self.members.insert(session, Member { mail, worker: None, token: None, streams: BTreeSet::new() });
        }
        room
    }

    /// Records a session's peer and returns the mails of the sessions that this ends. A worker opens a new session only after its last one
    /// has stopped writing, so its earlier sessions are over. Its later ones are not: this session's thread may be late. `token`: further
    /// connections may join by it.
    pub fn introduce(&mut self, session: SessionId, worker: WorkerId, token: Option<u64>) -> Vec<&M> {
        if let Some(member) = self.members.get_mut(&session) {
            member.worker = Some(worker);
            member.token = token;
        }
        let earlier = self.members.range(..session).filter(|(_, member)| member.worker == Some(worker));
        earlier.map(|(_, member)| &member.mail).collect()
    }

    /// Adds a further connection to its session. Returns the session's mail, or why the connection is refused.
    pub fn join(&mut self, ticket: JoinTicket, stream: u8) -> Result<&M, &'static str> {
        let others: usize = self.members.values().map(|member| member.streams.len()).sum();
        let member = self.members.get_mut(&ticket.session).filter(|member| member.token == Some(ticket.token));
        let member = member.ok_or("there is no such session, or not by this token")?;
        if others >= self.limit {
            return Err("it has as many connections as it may have");
        }
        if !member.streams.insert(stream) {
            return Err("its session has a connection of this number");
        }
        Ok(&member.mail)
    }

    /// Removes a session that is over.
    pub fn dismiss(&mut self, session: SessionId) {
        self.members.remove(&session);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_who_has_its_ticket_joins_a_session_under_a_number_of_its_own_and_as_long_as_there_is_room() {
        let mut members = Members::new(2);
        assert!(members.admit(1, "a") && members.admit(2, "b") && !members.admit(3, "c"));
        let ticket = |session, token| JoinTicket { session, token };
        assert!(members.join(ticket(1, 0), 1).is_err(), "nobody has been told a token");
        members.introduce(1, WorkerId(7), Some(5));
        members.introduce(2, WorkerId(8), Some(6));
        for other in [ticket(1, 6), ticket(2, 5), ticket(3, 5)] {
            assert!(members.join(other, 1).unwrap_err().contains("no such session"), "{other:?}");
        }
        assert_eq!(members.join(ticket(1, 5), 1), Ok(&"a"));
        assert!(members.join(ticket(1, 5), 1).unwrap_err().contains("of this number"));
        assert_eq!(members.join(ticket(2, 6), 1), Ok(&"b"));
        // I5
        assert!(members.join(ticket(2, 6), 2).unwrap_err().contains("as many connections"));
        members.dismiss(1);
        assert_eq!(members.join(ticket(2, 6), 2), Ok(&"b"));
        assert!(members.join(ticket(1, 5), 3).unwrap_err().contains("no such session"));
    }

    #[test]
    fn a_session_ends_earlier_ones_of_its_worker_and_no_others() {
        let mut members = Members::new(9);
        for session in 1..=4 {
            assert!(members.admit(session, session));
        }
        assert!(members.introduce(1, WorkerId(7), None).is_empty());
        assert!(members.introduce(2, WorkerId(8), None).is_empty());
        // The thread of session 4 runs before that of session 3.
        assert_eq!(members.introduce(4, WorkerId(7), None), [&1]);
        assert_eq!(members.introduce(3, WorkerId(7), None), [&1]);
    }
}
