//! What goes into a store and what comes out of it.

use baton_kv_cache::BlockName;

use crate::{Block, BlockKey, Expect, Head, Mismatch, ObjectName, Place, Tier};

/// A buffer of host memory: room for a head and for a block's data.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Buffer(pub u32);

/// Number that the caller gives to a put or a get, and by which it is told what came of it. Used once.
pub type Ticket = u64;

/// Number of a read or a write of the disk, or of a call of the object store.
pub type Job = u64;

/// Why a read failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadError {
    /// The disk or the object store gave an error, or fewer bytes.
    Io,
    /// There is no such object.
    Absent,
    /// What was read is not what was written, or not what was asked for.
    Mismatch(Mismatch),
}

/// Something happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Input {
    /// A prompt has these blocks, held or not.
    Seen(Vec<BlockName>),
    /// A block is offered. Answer: [`Effect::Fill`] or [`Effect::Declined`].
    Put(Ticket, BlockKey),
    /// The buffer of a put holds the block's data, and these are the digests of its parts. None: the put is given up.
    Filled(Ticket, Option<std::sync::Arc<[u64]>>),
    /// A block is wanted. Answer, now or when the disk has answered: [`Effect::Ready`] or [`Effect::Missed`].
    Get(Ticket, BlockKey),
    /// Who got [`Effect::Ready`] reads the buffer no longer. False: what it read did not match the digests.
    Done(Ticket, bool),
    /// Who waits for a get waits no longer. There is no answer.
    Cancel(Ticket),
    /// A block stays until it is unpinned, if it is held and few enough are pinned.
    Pin(BlockName),
    /// The block may be evicted again.
    Unpin(BlockName),
    /// A read or a fetch has ended.
    Read(Job, Result<Block, ReadError>),
    /// A write has ended. False: it failed, or may have.
    Written(Job, bool),
    /// A segment was scanned: what is at the beginning of each of its records. Empty: it is not there. None: it could not be read.
    Scanned(u32, Option<Vec<Result<Head, Mismatch>>>),
    /// What objects there are, the oldest first. None: the object store did not say.
    Listed(Option<Vec<ObjectName>>),
    /// An upload has ended. False: it failed, or may have.
    Uploaded(Job, bool),
    /// A removal has ended, also if there was no such object. False: it failed, or may have.
    Deleted(Job, bool),
    /// Whatever in host memory is worth a write is to be on disk and in the object store, too: the process will end.
    Flush,
    /// Time has passed.
    Tick,
}

/// Something is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Effect {
    /// Read the head of each record of a segment. Answer: [`Input::Scanned`].
    Scan(u32),
    /// Read a record into a buffer and check it ([`crate::check_record`]). Answer: [`Input::Read`].
    Read {
        /// Its number.
        job: Job,
        /// From where.
        place: Place,
        /// Where to.
        into: Buffer,
        /// What must be found there.
        expect: Expect,
    },
    /// Put the head at the beginning of the buffer and write the buffer as a record. Answer: [`Input::Written`].
    Write {
        /// Its number.
        job: Job,
        /// Where to.
        place: Place,
        /// From where.
        from: Buffer,
        /// The head's bytes.
        head: Vec<u8>,
    },
    /// A segment is complete and may be brought to safety. Nothing waits for it, and correctness does not depend on it.
    Sync(u32),
    /// List the objects of this identity, up to so many. Answer: [`Input::Listed`].
    List {
        /// Most objects.
        most: u64,
    },
    /// Get an object into a buffer and check it ([`crate::check_record`]). Answer: [`Input::Read`].
    Fetch {
        /// Its number.
        job: Job,
        /// Which one.
        object: ObjectName,
        /// Where to.
        into: Buffer,
        /// What must be found there.
        expect: Expect,
    },
    /// Put an object: this head, and the data of the buffer. Answer: [`Input::Uploaded`].
    Upload {
        /// Its number.
        job: Job,
        /// Which one.
        object: ObjectName,
        /// From where.
        from: Buffer,
        /// The head's bytes.
        head: Vec<u8>,
    },
    /// Delete an object. Answer: [`Input::Deleted`].
    Remove {
        /// Its number.
        job: Job,
        /// Which one.
        object: ObjectName,
    },
    /// Copy the block's data into this buffer. Answer: [`Input::Filled`].
    Fill(Ticket, Buffer),
    /// The block is not taken.
    Declined(Ticket, Decline),
    /// The block is in this buffer, and stays there until [`Input::Done`]. Whoever copies the data out compares the digests.
    Ready(Ticket, Buffer, Block, Tier),
    /// The block cannot be had.
    Missed(Ticket, Miss),
    /// A block came to a tier.
    Stored(BlockName, Tier),
    /// A block left a tier.
    Removed(BlockName, Tier),
}

/// Why a block was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Decline {
    /// It is in host memory or being filled, or it is elsewhere with more layer groups.
    Held,
    /// Every buffer is in use, or too many tickets are.
    Busy,
}

baton_types::words!(Decline { Held = "held", Busy = "busy" });

/// Why a block could not be had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Miss {
    /// It is not stored.
    Absent,
    /// A block of this name has other tokens, or lacks a layer group.
    Differs,
    /// Too much is in flight.
    Busy,
    /// The disk or the object store failed.
    Failed,
    /// What was read is not what was written (I2).
    Damaged,
}

baton_types::words!(Miss { Absent = "absent", Differs = "differs", Busy = "busy", Failed = "failed", Damaged = "damaged" });
