//! The decode end's sessions: whose each is, what it ended by coming, and who may join it with another connection.
//!
//! Pure: no clock, no I/O, no threads. How a session's thread is reached is the caller's; the hub keeps it under a lock, a
//! simulation drives it bare.

use std::collections::{BTreeMap, BTreeSet};

use baton_types::WorkerId;

use super::table::SessionId;
use crate::wire::JoinTicket;

struct Member<M> {
    mail: M,
    worker: Option<WorkerId>,
    /// By what further connections join it.
    token: Option<u64>,
    /// Numbers that they have taken.
    streams: BTreeSet<u8>,
}

/// Every session, and how each is reached.
pub struct Members<M> {
    members: BTreeMap<SessionId, Member<M>>,
    /// Sessions at most, and so many further connections of all of them together (I5).
    limit: usize,
}

impl<M> Members<M> {
    /// Nobody has come. `limit`: [`crate::TransferLimits::connections`].
    pub fn new(limit: usize) -> Members<M> {
        Members { members: BTreeMap::new(), limit }
    }

    /// How many sessions there are.
    pub fn len(&self) -> usize {
        self.members.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// How they are reached.
    pub fn mails(&self) -> impl Iterator<Item = &M> {
        self.members.values().map(|member| &member.mail)
    }

    /// How a session is reached.
    pub fn mail(&self, session: SessionId) -> Option<&M> {
        self.members.get(&session).map(|member| &member.mail)
    }

    /// Counts a session in; false when there are too many.
    pub fn admit(&mut self, session: SessionId, mail: M) -> bool {
        let room = self.members.len() < self.limit;
        if room {
            self.members.insert(session, Member { mail, worker: None, token: None, streams: BTreeSet::new() });
        }
        room
    }

    /// Names a session's peer; answers which sessions that ends. A worker opens a new session only after its last one has stopped
    /// writing, so earlier ones of the same worker are over; not those that came later, should this one's thread be late.
    /// `token`: further connections may join by it.
    pub fn introduce(&mut self, session: SessionId, worker: WorkerId, token: Option<u64>) -> Vec<&M> {
        if let Some(member) = self.members.get_mut(&session) {
            member.worker = Some(worker);
            member.token = token;
        }
        let earlier = self.members.range(..session).filter(|(_, member)| member.worker == Some(worker));
        earlier.map(|(_, member)| &member.mail).collect()
    }

    /// Counts a further connection in to its session; answers how to reach that, or why it may not come in.
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

    /// A session is over.
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
        // The fourth's thread comes first.
        assert_eq!(members.introduce(4, WorkerId(7), None), [&1]);
        assert_eq!(members.introduce(3, WorkerId(7), None), [&1]);
    }
}
