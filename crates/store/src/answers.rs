//! What users of the store hold: a buffer to fill, a block to read, or a block that is on its way.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_kv_store::{Block, Buffer, Input, Mismatch, Miss, Part, Ticket, Tier};
use baton_types::{digest_copy, order_copies};

use crate::shared::{Answer, Shared};

/// A buffer to copy a block's data into. Dropped, it is given back unused.
pub struct Filling {
    shared: Arc<Shared>,
    ticket: Ticket,
    buffer: Buffer,
    groups: u32,
    done: bool,
}

impl Filling {
    pub(crate) fn new(shared: Arc<Shared>, ticket: Ticket, buffer: Buffer, groups: u32) -> Filling {
        Filling { shared, ticket, buffer, groups, done: false }
    }

    /// The block's data, laid out as [`baton_kv_store::Shape::parts`] says. What was in the buffer before is still there.
    pub fn data(&mut self) -> &mut [u8] {
        let shape = &self.shared.shape;
        // SAFETY: the buffer is this value's until the core hears that it is filled.
        unsafe { self.shared.memory.write(self.buffer, shape.head_bytes(), shape.data_bytes()) }
    }

    /// The block is complete, and these are the digests of its parts.
    pub fn done(mut self, digests: Arc<[u64]>) {
        self.done = true;
        self.shared.feed(Input::Filled(self.ticket, Some(digests)));
    }

    /// Copies the block's data, part by part as `source` has them, and makes the digests on the way.
    ///
    /// # Panics
    /// When a part's bytes are not as many as the part has.
    pub fn copy_from<'a>(mut self, source: impl Fn(&Part) -> &'a [u8]) {
        let digests = self.copy(source);
        self.done(digests);
    }

    /// As [`Filling::copy_from`], of a block that was verified when it came. `known`: by layer group, what the digests of its parts add up to; of other
    /// groups it is not known.
    ///
    /// # Errors
    /// The layer group of which other bytes were copied. The block is not stored then.
    pub fn copy_known<'a>(
        mut self,
        known: &BTreeMap<usize, u64>,
        source: impl Fn(&Part) -> &'a [u8],
    ) -> Result<(), usize> {
        let digests = self.copy(source);
        let sums = self.shared.shape.group_digests(self.groups, &digests);
        let differs =
            |(group, sum): (usize, u64)| known.get(&group).is_some_and(|known| *known != sum).then_some(group);
        sums.into_iter().find_map(differs).map_or(Ok(()), Err)?;
        self.done(digests);
        Ok(())
    }

    fn copy<'a>(&mut self, source: impl Fn(&Part) -> &'a [u8]) -> Arc<[u64]> {
        let parts: Vec<Part> = self.shared.shape.parts(self.groups).collect();
        let data = self.data();
        let digests = parts.iter().map(|part| {
            let (from, to) = (source(part), &mut data[part.range.clone()]);
            copy(from, to, part.first_lane)
        });
        let digests = digests.collect();
        order_copies();
        digests
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        if !self.done {
            self.shared.cancel(self.ticket);
        }
    }
}

/// A block in host memory. It stays there until this is dropped.
pub struct Reading {
    shared: Arc<Shared>,
    ticket: Ticket,
    buffer: Buffer,
    block: Block,
    tier: Tier,
    damaged: bool,
}

impl Reading {
    pub(crate) fn new(shared: Arc<Shared>, ticket: Ticket, buffer: Buffer, block: Block, tier: Tier) -> Reading {
        Reading { shared, ticket, buffer, block, tier, damaged: false }
    }

    /// The block and the digests of its parts.
    pub fn block(&self) -> &Block {
        &self.block
    }

    /// Where it was found.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// The block's data. They are not verified: whoever takes them compares the digests (I2), as [`Reading::copy_to`] does.
    pub fn data(&self) -> &[u8] {
        let shape = &self.shared.shape;
        // SAFETY: nobody writes the data of a buffer that is being read.
        unsafe { self.shared.memory.read(self.buffer, shape.head_bytes(), shape.data_bytes()) }
    }

    /// Copies one part, number `at` of [`baton_kv_store::Shape::parts`] of the block's groups, and verifies it on the way. What was copied must
    /// not be used on error.
    ///
    /// # Panics
    /// When `to` has not as many bytes as the part.
    pub fn copy_part(&mut self, at: usize, to: &mut [u8]) -> Result<(), Mismatch> {
        let part = self.shared.shape.parts(self.block.key.groups).nth(at).ok_or(Mismatch::Groups)?;
        self.copy_checked(&part, at, to)
    }

    /// Copies the block, part by part to where `target` says, and verifies it on the way. Parts without a target are left out: the block may have
    /// more layer groups than are wanted.
    ///
    /// # Panics
    /// When a target has not as many bytes as its part.
    pub fn copy_to<'a>(&mut self, mut target: impl FnMut(&Part) -> Option<&'a mut [u8]>) -> Result<(), Mismatch> {
        let parts: Vec<Part> = self.shared.shape.parts(self.block.key.groups).collect();
        let wanted = parts.iter().enumerate().filter_map(|(at, part)| Some((at, part, target(part)?)));
        { wanted }.try_for_each(|(at, part, to)| self.copy_checked(part, at, to))
    }

    fn copy_checked(&mut self, part: &Part, at: usize, to: &mut [u8]) -> Result<(), Mismatch> {
        let digest = copy(&self.data()[part.range.clone()], to, part.first_lane);
        order_copies();
        if self.block.digests.get(at) == Some(&digest) {
            return Ok(());
        }
        self.damaged = true;
        Err(Mismatch::Digest { group: part.group, layer: part.layer })
    }

    /// Says that somebody who copied the data by other means found them damaged.
    pub fn damaged(mut self) {
        self.damaged = true;
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.shared.feed(Input::Done(self.ticket, !self.damaged));
    }
}

/// A block that is being read from disk. Dropped, nobody waits for it; it comes to host memory all the same.
pub struct Pending {
    shared: Arc<Shared>,
    ticket: Ticket,
    answered: bool,
}

impl Pending {
    pub(crate) fn new(shared: Arc<Shared>, ticket: Ticket) -> Pending {
        Pending { shared, ticket, answered: false }
    }

    /// The block, if it has come, or why it cannot be had. None: it is still on its way, or was taken before.
    pub fn take(&mut self) -> Option<Result<Reading, Miss>> {
        self.answer(None)
    }

    /// The same, but waits for it up to `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<Result<Reading, Miss>> {
        self.answer(Some(Instant::now() + limit))
    }

    fn answer(&mut self, until: Option<Instant>) -> Option<Result<Reading, Miss>> {
        if self.answered {
            return None;
        }
        let answer = self.shared.answer(self.ticket, until)?;
        self.answered = true;
        match answer {
            Answer::Ready(buffer, block, tier) => {
                Some(Ok(Reading::new(self.shared.clone(), self.ticket, buffer, block, tier)))
            }
            Answer::Missed(why) => Some(Err(why)),
            Answer::Fill(_) | Answer::Declined(_) => Some(Err(Miss::Busy)),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.answered {
            self.shared.cancel(self.ticket);
        }
    }
}

/// Copies and returns the digest of what was read.
fn copy(from: &[u8], to: &mut [u8], first_lane: u64) -> u64 {
    assert_eq!(from.len(), to.len(), "bytes of a part");
    // SAFETY: `to` is as long, and borrowed exclusively.
    unsafe { digest_copy(from, to.as_mut_ptr(), first_lane, from.as_ptr_range().end) }
}

impl std::fmt::Debug for Filling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Filling").field("buffer", &self.buffer).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Reading").field("name", &self.block.key.name).field("tier", &self.tier).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Pending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending").field("ticket", &self.ticket).finish_non_exhaustive()
    }
}
