//! The session protocol's bytes.
//!
//! A session starts with one [`Hello`] from each side, compared before anything else is read. After that come frames: a 16-byte prefix
//! (body length u32, kind u8, head check u24, body check u64) and a body of little-endian fields.
//!
//! The head check is a hash of kind and length, the body check a hash of kind and body. So a frame that changed on its way is never acted
//! upon (I2), and a changed length is never waited for.
//!
//! Over TCP a Write frame is followed by its payload: the blocks' bytes in the order of the frame's indexes. Over the other transports it
//! says that the blocks were copied.
//!
//! Over TCP a session may have further connections, which carry Write frames only. Each begins with a Hello too, and joins with the ticket
//! from the session's Welcome.
//!
//! Pure functions without I/O: every byte string yields a frame or an error that names the field.

mod encode;
mod parse;

use baton_types::{BlockId, Epoch, WorkerId, hash_bytes};

use crate::codec::{Fields, Malformed, Put};
pub use parse::{FrameHead, parse_body, parse_prefix};

/// Bytes of a frame's prefix.
pub const PREFIX: usize = 16;
/// The field that errors name when a frame changed on its way.
pub(crate) const CHECK: &str = "check";
/// Most connections of a session, its own included.
pub const MAX_STREAMS: usize = 16;
/// Most blocks of one Write frame.
pub(crate) const MAX_WRITE_BLOCKS: usize = 256;
/// Most bytes of a text in a frame.
const MAX_TEXT: usize = 1024;
/// Most bytes of an address, a key or a handle. UCX's have a few thousand on a machine with dozens of devices.
const MAX_OPAQUE: usize = 64 << 10;
const MAGIC: [u8; 8] = *b"baton-kv";

/// The first bytes of a session, in both directions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Hello {
    /// `KvLayout::fingerprint`, which covers the protocol's version.
    pub fingerprint: u64,
}

impl Hello {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Encodes it.
    pub fn encode(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.put_u64(self.fingerprint);
        bytes
    }

    /// Reads a peer's Hello.
    pub fn parse(bytes: &[u8]) -> Result<Hello, Malformed> {
        let mut fields = Fields::new(bytes);
        if fields.array::<8>("magic")? != MAGIC {
            return Err(Malformed::new("magic", "not a transfer session"));
        }
        let hello = Hello { fingerprint: fields.u64("fingerprint")? };
        fields.end()?;
        Ok(hello)
    }
}

/// What a further TCP connection joins a session with: the session's number, and a token that only its peer was told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct JoinTicket {
    /// The decode worker's number of the session.
    pub session: u64,
    /// Random, so that it cannot be guessed.
    pub token: u64,
}

/// The transport a caller wants for blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Over {
    /// The one the stream implies: shared memory for a unix socket, else TCP, the stream itself.
    Stream,
    /// UCX.
    Ucx,
    /// Copies from device to device.
    CudaIpc,
}

/// Why the decode side will not verify a handoff.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Refusal {
    /// There is no reservation to write to.
    NoReservation(String),
    /// A write outside the reservation, a block layer written twice, or a malformed completion.
    BadWrite(String),
    /// Completed before every block layer was written.
    Incomplete { written: u64, expected: u64 },
    /// A block's digest differs.
    Verify { group: u32, index: u32, block: BlockId, want: u64, got: u64 },
}

/// One message of a session, after the Hellos.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)]
pub enum Frame {
    /// Prefill: who calls, which worker it wants to reach, and the transport it wants for blocks.
    Identify { me: WorkerId, you: WorkerId, over: Over },
    /// Decode: accepts the session. `blocks`: the pool's blocks per group. `ticket`: for further connections, over TCP only.
    Welcome { blocks: Vec<u32>, ticket: Option<JoinTicket> },
    /// Decode: refuses the session or connection.
    Reject { reason: String },
    /// Prefill, instead of Identify: this connection joins a session, as its connection number `stream`, from 1 on.
    Join { ticket: JoinTicket, stream: u8 },
    /// Decode: the connection has joined.
    Joined,
    /// Prefill: asks for access under an epoch.
    Begin { epoch: Epoch, key: u64 },
    /// Decode, over UCX, before the first Granted: how to write to the pool.
    Access(Access),
    /// Decode, from device to device, before the first Granted: the pool's size, and the opaque handle that opens it.
    Handle { bytes: u64, handle: Vec<u8> },
    /// Decode: access granted to these blocks.
    Granted { epoch: Epoch, blocks: Vec<Vec<BlockId>> },
    /// Prefill: one layer of some blocks follows (tcp) or was copied (shm, ucx, cuda-ipc).
    Write(WriteHead),
    /// Prefill: everything is written. Each write precedes this frame on this connection, or is among the first `after[i]` Write frames of
    /// connection i + 1. `writes`: block layers written. `digests`: one per group and index.
    Complete { epoch: Epoch, after: Vec<u64>, writes: u64, digests: Vec<Vec<u64>>, tail: Vec<u8> },
    /// Either: a heartbeat.
    Beat,
    /// Prefill: has stopped writing and gives up.
    Abort { epoch: Epoch },
    /// Prefill: has stopped writing because it was fenced.
    FenceAck { epoch: Epoch },
    /// Decode: every digest matches.
    Verified { epoch: Epoch },
    /// Decode: the handoff failed.
    Failed { epoch: Epoch, refusal: Refusal },
    /// Decode: stop writing under this epoch and say so.
    Fence { epoch: Epoch },
}

/// How to write to a pool over UCX. `worker` and `key` are opaque.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Access {
    /// Address of the pool's first byte in the decode worker's process.
    pub base: u64,
    /// Bytes of the pool.
    pub bytes: u64,
    /// Address of the decode worker's UCX worker.
    pub worker: Vec<u8>,
    /// Remote key: the right to write to the pool.
    pub key: Vec<u8>,
}

/// The blocks of a Write frame.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WriteHead {
    /// The handoff.
    pub epoch: Epoch,
    /// Layer group.
    pub group: u16,
    /// Layer in the group.
    pub layer: u16,
    /// Payload bytes that follow the frame; 0 except over TCP.
    pub payload: u32,
    /// Positions in the reservation's list of the group.
    pub indexes: Vec<u32>,
}

const IDENTIFY: u8 = 1;
const BEGIN: u8 = 2;
const WRITE: u8 = 3;
const COMPLETE: u8 = 4;
const ABORT: u8 = 5;
const FENCE_ACK: u8 = 6;
const BEAT: u8 = 7;
const JOIN: u8 = 8;
const WELCOME: u8 = 17;
const REJECT: u8 = 18;
const GRANTED: u8 = 19;
const VERIFIED: u8 = 20;
const FAILED: u8 = 21;
const FENCE: u8 = 22;
const ACCESS: u8 = 23;
const HANDLE: u8 = 24;
const JOINED: u8 = 25;

/// The largest body of each kind of frame.
#[derive(Clone, Copy, Debug)]
pub struct FrameLimits {
    pub(crate) list: usize,
    pub(crate) complete: usize,
}

impl FrameLimits {
    fn body(&self, kind: u8) -> Option<usize> {
        match kind {
            IDENTIFY | JOIN => Some(17),
            BEGIN | ABORT | FENCE_ACK | VERIFIED | FENCE => Some(16),
            BEAT | JOINED => Some(0),
            WRITE => Some(32 + 4 * MAX_WRITE_BLOCKS),
            WELCOME | REJECT | FAILED => Some(64 + MAX_TEXT),
            GRANTED => Some(self.list),
            ACCESS => Some(32 + 2 * MAX_OPAQUE),
            HANDLE => Some(16 + MAX_OPAQUE),
            COMPLETE => Some(self.complete),
            _ => None,
        }
    }
}

/// A frame's body check: a hash of kind and body.
fn check_of(kind: u8, body: &[u8]) -> u64 {
    hash_bytes(u64::from(kind), body)
}

/// A prefix's head check: three bytes of a hash of kind and length.
fn head_check_of(kind: u8, len: [u8; 4]) -> [u8; 3] {
    let [a, b, c, ..] = hash_bytes(u64::from(kind), &len).to_le_bytes();
    [a, b, c]
}

#[cfg(test)]
mod tests;
