//! Who may open a session. Pure: the caller reads and sends the handshake's frames.

use baton_types::WorkerId;

use crate::wire::{Frame, Over};

/// Checks a session's first frame. Returns the prefill worker that calls and the transport it wants, or why it is refused. It may want an
/// earlier worker at this address instead of `me`.
pub fn visitor(first: &Frame, me: WorkerId) -> Result<(WorkerId, Over), String> {
    match first {
        Frame::Identify { me: worker, you, over } if *you == me => Ok((*worker, *over)),
        Frame::Identify { you, .. } => Err(format!("{you} is not here any more, this is {me}")),
        _ => Err("the first frame must say who calls".into()),
    }
}
