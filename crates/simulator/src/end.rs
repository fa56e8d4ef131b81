//! One end of a connection: what has come and is not taken in, and what has yet to leave. The same at both workers.

use baton_handoff::{Frame, FrameLimits, Hello, Malformed, PREFIX, parse_body, parse_prefix};

use crate::events::Line;
use crate::outbox::Outbox;

#[derive(Debug)]
pub(crate) struct End {
    pub line: Line,
    /// Its number in its session; the session's own is 0.
    pub stream: usize,
    pub inbox: Vec<u8>,
    pub outbox: Outbox,
}

impl End {
    pub(crate) fn new(line: Line, stream: usize) -> End {
        End { line, stream, inbox: Vec::new(), outbox: Outbox::default() }
    }

    /// The next frame, once all of it is here.
    pub(crate) fn next_frame(&mut self, limits: &FrameLimits) -> Result<Option<Frame>, String> {
        let Some((frame, bytes)) = self.peek(limits)? else { return Ok(None) };
        self.inbox.drain(..bytes);
        Ok(Some(frame))
    }

    /// Whether the next frame, or what is wrong with it, is here.
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

    /// A Hello of this fingerprint, once it is here.
    pub(crate) fn take_hello(&mut self, fingerprint: u64) -> Result<bool, String> {
        if self.inbox.len() < Hello::LEN {
            return Ok(false);
        }
        let hello = self.inbox.drain(..Hello::LEN).collect::<Vec<_>>();
        let hello = Hello::parse(&hello).map_err(|m| format!("{}: {}", m.field, m.problem))?;
        if hello.fingerprint == fingerprint { Ok(true) } else { Err("another layout".into()) }
    }
}
