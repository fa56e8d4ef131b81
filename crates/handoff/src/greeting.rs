//! Who may open a session. Pure: what a handshake reads and sends is the shell's.

use baton_types::WorkerId;

use crate::wire::{Frame, Over};

/// Who calls and what for, by a session's first frame, or why they may not come in: they may mean whoever was at this address before
/// `me`.
pub fn visitor(first: &Frame, me: WorkerId) -> Result<(WorkerId, Over), String> {
    match first {
        Frame::Identify { me: worker, you, over } if *you == me => Ok((*worker, *over)),
        Frame::Identify { you, .. } => Err(format!("{you} is not here any more, this is {me}")),
        _ => Err("the first frame must say who calls".into()),
    }
}
