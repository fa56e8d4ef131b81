//! What a handoff's owner has yet to write, and whether the handoff may be completed.
//!
//! Pure: checks the owner's calls and turns them into ops for its session's [`Line`]. Waiting for room there is up to the caller.

use std::sync::Arc;
use std::time::Instant;

use baton_types::{BlockId, PoolGeometry, WorkerId};

use super::core::Core;
use super::line::Line;
use super::op::Op;
use crate::descriptor::Descriptor;
use crate::error::TransferError;
use crate::limits::TransferLimits;

/// Most blocks of one queued write. Small, so that room comes free steadily even when a long prefix is written at once.
const WRITE_BLOCKS: usize = 256;

/// One layer group of a reservation.
struct Group {
    layers: usize,
    /// Blocks of the group in the local pool.
    blocks: u32,
    /// Per layer and index: whether the block layer has yet to be written.
    unwritten: Vec<bool>,
}

/// One handoff, as its owner at the prefill end writes it.
pub struct Writes {
    core: Arc<Core>,
    me: WorkerId,
    tokens: u32,
    first: Vec<u32>,
    groups: Vec<Group>,
    tail_bytes: usize,
    /// Block layers that were queued.
    written: u64,
}

impl Writes {
    /// The writes of a handoff to the reservation that `target` describes, from worker `me`, whose pool has the shape `local`. The handoff
    /// must be over by `deadline`.
    ///
    /// # Errors
    /// [`TransferError::Limit`] when the reservation is larger than a handoff may be.
    pub fn new(
        target: &Descriptor,
        me: WorkerId,
        local: &PoolGeometry,
        limits: &TransferLimits,
        deadline: Instant,
    ) -> Result<Writes, TransferError> {
        let asked: u64 = target.counts.iter().map(|n| u64::from(*n)).sum();
        let limit = limits.blocks_per_handoff as u64;
        if asked > limit {
            return Err(TransferError::Limit { what: "blocks of a reservation", limit, asked });
        }
        let shapes = local.layout.groups.iter().zip(&local.blocks).zip(&target.counts);
        let group = |((group, &blocks), &count): ((&baton_types::KvGroup, &u32), &u32)| {
            let layers = group.layers.len();
            Group { layers, blocks, unwritten: vec![true; count as usize * layers] }
        };
        Ok(Writes {
            core: Arc::new(Core::new(target, deadline)),
            me,
            tokens: target.tokens,
            first: target.first.clone(),
            groups: shapes.map(group).collect(),
            tail_bytes: limits.tail_bytes,
            written: 0,
        })
    }

    /// The part of the handoff that its session knows too.
    pub fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Tokens of the sequence whose KV the reservation wants.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Per group: index, in the sequence, of the reservation's first block. Earlier blocks are not sent.
    pub fn first_blocks(&self) -> &[u32] {
        &self.first
    }

    /// Why the handoff has failed, once it has.
    pub fn failure(&self, line: &Line) -> Option<TransferError> {
        line.has_room(&self.core, 0).err()
    }

    /// Checks a write of one layer of some blocks and returns it as ops, in order. Call [`Writes::queued`] for each op once it is in the
    /// line. After an error the handoff can only end.
    /// - `pairs`: (block of the local pool, index in the reservation's list of the group).
    /// - `after`: the local pool's mark, as in [`Op::Write`].
    pub fn write(
        &mut self,
        group: usize,
        layer: usize,
        pairs: &[(BlockId, u32)],
        after: u64,
    ) -> Result<Vec<Op>, TransferError> {
        self.check(group, layer, pairs)?;
        let epoch = self.core.epoch;
        let op = |pairs: &[(BlockId, u32)]| Op::Write { epoch, group, layer, pairs: pairs.to_vec(), after };
        Ok(pairs.chunks(WRITE_BLOCKS).map(op).collect())
    }

    /// Notes that an op of `blocks` blocks is in the line.
    pub fn queued(&mut self, blocks: usize) {
        self.written += blocks as u64;
    }

    fn check(&mut self, group: usize, layer: usize, pairs: &[(BlockId, u32)]) -> Result<(), TransferError> {
        let groups = self.groups.len();
        let Some(Group { layers, blocks, unwritten }) = self.groups.get_mut(group) else {
            return Err(TransferError::argument("group", format!("{group} of {groups}")));
        };
        if layer >= *layers {
            return Err(TransferError::argument("layer_in_group", format!("{layer} of {layers} in group {group}")));
        }
        let count = self.core.counts[group];
        for (block, index) in pairs {
            if block.0 >= *blocks {
                let problem = format!("{block}, the pool has {blocks} in group {group}");
                return Err(TransferError::argument("pairs.block", problem));
            }
            if *index >= count {
                return Err(TransferError::argument("pairs.index", format!("{index} of {count} in group {group}")));
            }
            let bit = &mut unwritten[layer * count as usize + *index as usize];
            if !std::mem::take(bit) {
                let problem = format!("{index} of group {group} is written twice in layer {layer}");
                return Err(TransferError::argument("pairs.index", problem));
            }
        }
        Ok(())
    }

    /// Checks that everything is queued and a completion with this tail may follow.
    pub fn completable(&self, line: &Line, tail: &[u8]) -> Result<(), TransferError> {
        if let Some(error) = self.failure(line) {
            return Err(error);
        }
        if tail.len() > self.tail_bytes {
            let (limit, asked) = (self.tail_bytes as u64, tail.len() as u64);
            return Err(TransferError::Limit { what: "bytes of a completion's tail", limit, asked });
        }
        let expected: u64 = self.groups.iter().map(|group| group.unwritten.len() as u64).sum();
        if self.written != expected {
            let (epoch, peer, written) = (self.core.epoch, self.me, self.written);
            return Err(TransferError::Incomplete { epoch, peer, written, expected });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::testing;

    fn writes() -> (Writes, Line) {
        let (target, local, limits) = (testing::target(2), testing::geometry(), TransferLimits::default());
        let deadline = Instant::now() + Duration::from_secs(60);
        (Writes::new(&target, WorkerId(2), &local, &limits, deadline).unwrap(), Line::new(limits))
    }

    #[test]
    fn each_layer_of_each_block_is_written_once_and_then_it_may_be_completed() {
        let (mut writes, line) = writes();
        let layers = testing::geometry().layout.groups[0].layers.len();
        let pairs = [(BlockId(3), 0), (BlockId(1), 1)];
        for layer in 0..layers {
            assert!(matches!(writes.completable(&line, &[]), Err(TransferError::Incomplete { .. })));
            let ops = writes.write(0, layer, &pairs, 0).unwrap();
            ops.iter().for_each(|op| writes.queued(op.blocks()));
        }
        assert_eq!(writes.completable(&line, &[]), Ok(()));
        let long = vec![0; TransferLimits::default().tail_bytes + 1];
        assert!(matches!(writes.completable(&line, &long), Err(TransferError::Limit { .. })));
        assert!(writes.write(0, 0, &pairs[..1], 0).err().unwrap().to_string().contains("written twice"));
    }

    #[test]
    fn what_lies_outside_is_named() {
        let (mut writes, _) = writes();
        let mut refused = |group, layer, pair| writes.write(group, layer, &[pair], 0).err().unwrap().to_string();
        assert_eq!(refused(1, 0, (BlockId(0), 0)), "group: 1 of 1");
        assert!(refused(0, 9, (BlockId(0), 0)).starts_with("layer_in_group: 9 of"));
        assert!(refused(0, 0, (BlockId(9), 0)).starts_with("pairs.block: b9, the pool has 4"));
        assert_eq!(refused(0, 0, (BlockId(0), 2)), "pairs.index: 2 of 2 in group 0");
    }

    #[test]
    fn a_long_write_is_queued_in_parts_and_what_was_not_queued_is_missing() {
        let (mut target, mut local) = (testing::target(1), testing::geometry());
        (target.counts, local.blocks) = (vec![600], vec![600]);
        let (limits, deadline) = (TransferLimits::default(), Instant::now());
        let mut writes = Writes::new(&target, WorkerId(2), &local, &limits, deadline).unwrap();
        let pairs: Vec<_> = (0..600).map(|i| (BlockId(i), i)).collect();
        let ops = writes.write(0, 0, &pairs, 0).unwrap();
        assert_eq!(ops.iter().map(Op::blocks).collect::<Vec<_>>(), [256, 256, 88]);
        writes.queued(256);
        let error = writes.completable(&Line::new(limits.clone()), &[]).unwrap_err();
        assert!(matches!(error, TransferError::Incomplete { written: 256, .. }), "{error}");
        let small = TransferLimits { blocks_per_handoff: 599, ..limits };
        assert!(Writes::new(&target, WorkerId(2), &local, &small, deadline).is_err());
    }
}
