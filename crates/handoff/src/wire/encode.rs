//! Frames to bytes: a prefix and a body.

use super::*;
use crate::codec::Put;

/// Fills in the prefix of a frame whose body is in place.
pub(super) fn seal(kind: u8, frame: &mut [u8]) {
    let len = ((frame.len() - PREFIX) as u32).to_le_bytes();
    let check = check_of(kind, &frame[PREFIX..]);
    frame[..4].copy_from_slice(&len);
    frame[4] = kind;
    frame[5..8].copy_from_slice(&head_check_of(kind, len));
    frame[8..PREFIX].copy_from_slice(&check.to_le_bytes());
}

impl Frame {
    /// Encodes the frame: prefix and body.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; PREFIX];
        let kind = self.encode_body(&mut out);
        seal(kind, &mut out);
        out
    }

    fn encode_body(&self, out: &mut Vec<u8>) -> u8 {
        match self {
            Frame::Identify { me, you, over } => {
                out.put_u64(me.0);
                out.put_u64(you.0);
                out.put_u8(match over {
                    Over::Stream => 0,
                    Over::Ucx => 1,
                    Over::CudaIpc => 2,
                });
                IDENTIFY
            }
            Frame::Welcome { blocks, ticket } => {
                out.put_u32s(blocks.iter().copied());
                out.put_u8(u8::from(ticket.is_some()));
                ticket.iter().for_each(|ticket| put_ticket(out, ticket));
                WELCOME
            }
            Frame::Reject { reason } => {
                out.put_blob(cut(reason).as_bytes());
                REJECT
            }
            Frame::Join { ticket, stream } => {
                put_ticket(out, ticket);
                out.put_u8(*stream);
                JOIN
            }
            Frame::Joined => JOINED,
            Frame::Begin { epoch, key } => {
                out.put_u64(epoch.0);
                out.put_u64(*key);
                BEGIN
            }
            Frame::Access(Access { base, bytes, worker, key }) => {
                out.put_u64(*base);
                out.put_u64(*bytes);
                out.put_blob(worker);
                out.put_blob(key);
                ACCESS
            }
            Frame::Handle { bytes, handle } => {
                out.put_u64(*bytes);
                out.put_blob(handle);
                HANDLE
            }
            Frame::Granted { epoch, blocks } => {
                out.put_u64(epoch.0);
                out.put_u16(blocks.len() as u16);
                blocks.iter().for_each(|group| out.put_u32s(group.iter().map(|b| b.0)));
                GRANTED
            }
            Frame::Write(head) => {
                out.put_u64(head.epoch.0);
                out.put_u16(head.group);
                out.put_u16(head.layer);
                out.put_u32(head.payload);
                out.put_u32s(head.indexes.iter().copied());
                WRITE
            }
            Frame::Complete { epoch, after, writes, digests, tail } => {
                out.put_u64(epoch.0);
                out.put_u64s(after);
                out.put_u64(*writes);
                out.put_u16(digests.len() as u16);
                digests.iter().for_each(|group| out.put_u64s(group));
                out.put_blob(tail);
                COMPLETE
            }
            Frame::Failed { epoch, refusal } => {
                out.put_u64(epoch.0);
                encode_refusal(refusal, out);
                FAILED
            }
            Frame::Beat => BEAT,
            Frame::Abort { epoch } => only_epoch(out, *epoch, ABORT),
            Frame::FenceAck { epoch } => only_epoch(out, *epoch, FENCE_ACK),
            Frame::Verified { epoch } => only_epoch(out, *epoch, VERIFIED),
            Frame::Fence { epoch } => only_epoch(out, *epoch, FENCE),
        }
    }
}

fn only_epoch(out: &mut Vec<u8>, epoch: Epoch, kind: u8) -> u8 {
    out.put_u64(epoch.0);
    kind
}

fn put_ticket(out: &mut Vec<u8>, ticket: &JoinTicket) {
    out.put_u64(ticket.session);
    out.put_u64(ticket.token);
}

fn encode_refusal(refusal: &Refusal, out: &mut Vec<u8>) {
    match refusal {
        Refusal::NoReservation(reason) => {
            out.put_u8(0);
            out.put_blob(cut(reason).as_bytes());
        }
        Refusal::BadWrite(reason) => {
            out.put_u8(1);
            out.put_blob(cut(reason).as_bytes());
        }
        Refusal::Incomplete { written, expected } => {
            out.put_u8(2);
            out.put_u64(*written);
            out.put_u64(*expected);
        }
        Refusal::Verify { group, index, block, want, got } => {
            out.put_u8(3);
            out.put_u32(*group);
            out.put_u32(*index);
            out.put_u32(block.0);
            out.put_u64(*want);
            out.put_u64(*got);
        }
    }
}

/// The first [`MAX_TEXT`] bytes of a text or fewer, cut between characters.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MAX_TEXT)).rev().find(|at| text.is_char_boundary(*at));
    &text[..end.unwrap_or(0)]
}
