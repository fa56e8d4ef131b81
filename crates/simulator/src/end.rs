//! One end of a connection, the same at both workers: bytes received and not yet read, and items not yet sent.

use baton_handoff::{Frame, FrameLimits, Hello, Malformed, PREFIX, parse_body, parse_prefix};

use crate::events::Line;
use crate::outbox::Outbox;

#[derive(Debug)]
pub(crate) struct End {
    pub line: Line,
    /// The connection's number in its session; the session's own connection is 0.
    pub stream: usize,
    pub inbox: Vec<u8>,
    pub outbox: Outbox,
}

impl End {
    pub(crate) fn new(line: Line, stream: usize) -> End {
        End { line, stream, inbox: Vec::new(), outbox: Outbox::default() }
    }

    /// Takes the next frame, once all of it has arrived.
    pub(crate) fn next_frame(&mut self, limits: &FrameLimits) -> Result<Option<Frame>, String> {
        let Some((frame, bytes)) = self.peek(limits)? else { return Ok(None) };
        self.inbox.drain(..bytes);
        Ok(Some(frame))
    }

    /// Whether the next frame has arrived, or is already known to be malformed.
    pub(crate) fn has_frame(&self, limits: &FrameLimits) -> bool {
        !matches!(self.peek(limits), Ok(None))
    }

    fn peek(&self, limits: &FrameLimits) -> Result<Option<(Frame, usize)>, String> {
        let Some(prefix) = self.inbox.first_chunk::<PREFIX>() else { return Ok(None) };
        let told = |m: Malformed| format!("{}: {}", m.field, m.problem);
        let head = parse_prefix(*prefix, limits).map_err(told)?;
        let Some(body) = self.inbox.get(PREFIX..PREFIX + head.len) else { return Ok(None) };
        let frame = parse_body(&head, body).map_err(told)?;
        Ok(Some((frame, PREFIX + head.len)))
    }

    /// Takes a Hello with this fingerprint. False until it has arrived.
    pub(crate) fn take_hello(&mut self, fingerprint: u64) -> Result<bool, String> {
        if self.inbox.len() < Hello::LEN {
            return Ok(false);
        }
        let hello = self.inbox.drain(..Hello::LEN).collect::<Vec<_>>();
        let hello = Hello::parse(&hello).map_err(|m| format!("{}: {}", m.field, m.problem))?;
        if hello.fingerprint == fingerprint { Ok(true) } else { Err("another layout".into()) }
    }
}
