//! One handoff as it arrives: which block layers have arrived, and whether they are what was sent (I2).

use std::collections::VecDeque;
use std::time::Instant;

use baton_types::PoolGeometry;

use super::table::Blocks;
use crate::batch::Range;
use crate::error::TransferError;
use crate::memory::PoolMemory;
use crate::wire::{Refusal, WriteHead};

/// Coverage and digests of one handoff.
pub(crate) struct Incoming {
    /// The blocks lent to the peer.
    blocks: Blocks,
    /// Per group, one bit per layer and index: whether a write of it was accepted.
    covered: Vec<Vec<bool>>,
    /// Per group and index: sum of the digests of the layers that arrived.
    sums: Vec<Vec<u64>>,
    written: u64,
    digest: bool,
    pub began: Instant,
}

impl Incoming {
    pub(crate) fn new(geometry: &PoolGeometry, blocks: Blocks, digest: bool, began: Instant) -> Incoming {
        let layers = |group: usize| geometry.layout.groups[group].layers.len();
        let covered = blocks.iter().enumerate().map(|(g, list)| vec![false; list.len() * layers(g)]).collect();
        let sums = blocks.iter().map(|list| vec![0; list.len()]).collect();
        Incoming { blocks, covered, sums, written: 0, digest, began }
    }

    /// Block layers the reservation holds.
    fn expected(&self) -> u64 {
        self.covered.iter().map(|bits| bits.len() as u64).sum()
    }

    /// Block layers that have arrived, and block layers that the reservation holds.
    pub(crate) fn progress(&self) -> (u64, u64) {
        (self.written, self.expected())
    }

    /// KV bytes of the whole reservation.
    pub(crate) fn bytes(&self, geometry: &PoolGeometry) -> u64 {
        let each = |group: usize| geometry.layout.block_bytes(group) * geometry.layout.groups[group].layers.len();
        self.blocks.iter().enumerate().map(|(group, list)| (list.len() * each(group)) as u64).sum()
    }

    /// The pool's ranges that a write goes to, or went to over a one-sided transport. Checks every field but the payload's length before
    /// any memory is touched.
    pub(crate) fn accept(&mut self, geometry: &PoolGeometry, head: &WriteHead) -> Result<VecDeque<Range>, String> {
        let (group, layer) = (head.group as usize, head.layer as usize);
        let groups = self.blocks.len();
        let list = self.blocks.get(group).ok_or_else(|| format!("group {group} of {groups}"))?;
        let layers = geometry.layout.groups[group].layers.len();
        if layer >= layers {
            return Err(format!("layer {layer} of {layers} in group {group}"));
        }
        let mut ranges: VecDeque<Range> = VecDeque::with_capacity(head.indexes.len());
        for &index in &head.indexes {
            let Some(block) = list.get(index as usize) else {
                return Err(format!("index {index} of {} in group {group}", list.len()));
            };
            let bit = &mut self.covered[group][layer * list.len() + index as usize];
            if std::mem::replace(bit, true) {
                return Err(format!("index {index} of group {group} is written twice in layer {layer}"));
            }
            let range = geometry.block_range(group, layer, *block);
            match ranges.back_mut() {
                Some((from, len)) if *from + *len == range.start => *len += range.len(),
                _ => ranges.push_back((range.start, range.len())),
            }
        }
        Ok(ranges)
    }

    /// Adds the digests of an accepted write that is in the pool. Nobody writes to its block layers any more.
    pub(crate) fn landed(
        &mut self,
        geometry: &PoolGeometry,
        pool: &mut dyn PoolMemory,
        head: &WriteHead,
    ) -> Result<(), TransferError> {
        self.written += head.indexes.len() as u64;
        if !self.digest {
            return Ok(());
        }
        let (group, layer) = (head.group as usize, head.layer as usize);
        let lane = geometry.layout.first_lane(group, layer);
        let start = |&index: &u32| geometry.block_range(group, layer, self.blocks[group][index as usize]).start;
        let parts: Vec<_> = head.indexes.iter().map(|index| (start(index), lane)).collect();
        let digests = pool.digests(&parts, geometry.layout.block_bytes(group))?;
        for (&index, digest) in head.indexes.iter().zip(digests) {
            let sum = &mut self.sums[group][index as usize];
            *sum = sum.wrapping_add(digest);
        }
        Ok(())
    }

    /// Per group and index: the digest of what arrived. Empty where nothing is digested.
    pub(crate) fn into_digests(self) -> Vec<Vec<u64>> {
        if self.digest { self.sums } else { Vec::new() }
    }

    /// Checks that there is one digest for each block.
    pub(crate) fn check_shape(&self, digests: &[Vec<u64>]) -> Result<(), Refusal> {
        let shape = |lists: &[Vec<u64>]| lists.iter().map(Vec::len).collect::<Vec<_>>();
        match shape(digests) == shape(&self.sums) {
            true => Ok(()),
            false => Err(Refusal::BadWrite(format!("{:?} digests for {:?} blocks", shape(digests), shape(&self.sums)))),
        }
    }

    /// Compares what arrived with what the sender says it sent.
    pub(crate) fn verify(&self, writes: u64, digests: &[Vec<u64>]) -> Result<(), Refusal> {
        let expected = self.expected();
        if self.written != expected || writes != expected {
            return Err(Refusal::Incomplete { written: self.written.min(writes), expected });
        }
        if !self.digest {
            return Ok(());
        }
        self.check_shape(digests)?;
        for (group, (want, got)) in digests.iter().zip(&self.sums).enumerate() {
            if let Some(index) = (0..want.len()).find(|i| want[*i] != got[*i]) {
                let block = self.blocks[group][index];
                let (group, want, got) = (group as u32, want[index], got[index]);
                return Err(Refusal::Verify { group, index: index as u32, block, want, got });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use baton_types::{BlockId, Epoch, KvDtype, KvGroup, KvLayout};

    use super::*;

    fn geometry() -> PoolGeometry {
        let group = KvGroup { layers: vec![0, 1], planes: 2, kv_heads: 1, head_dim: 4, window: None, sinks: 0 };
        let layout = KvLayout { version: 1, model: 1, dtype: KvDtype::F16, block_size: 2, groups: vec![group] };
        PoolGeometry::uniform(layout, 8)
    }

    fn head(layer: u16, indexes: &[u32]) -> WriteHead {
        WriteHead { epoch: Epoch(1), group: 0, layer, payload: 0, indexes: indexes.to_vec() }
    }

    fn incoming() -> Incoming {
        let blocks = Arc::new(vec![vec![BlockId(5), BlockId(6), BlockId(2)]]);
        Incoming::new(&geometry(), blocks, true, Instant::now())
    }

    #[test]
    fn accepted_writes_go_to_the_reserved_blocks_only() {
        let mut incoming = incoming();
        assert_eq!(incoming.accept(&geometry(), &head(0, &[0, 1, 2])).unwrap(), [(5 * 32, 64), (2 * 32, 32)]);
        assert_eq!(incoming.accept(&geometry(), &head(1, &[2])).unwrap(), [(8 * 32 + 2 * 32, 32)]);
        let mut refused = |head: WriteHead| incoming.accept(&geometry(), &head).unwrap_err();
        assert!(refused(head(1, &[2])).contains("twice"));
        assert!(refused(head(1, &[0, 0])).contains("twice"));
        assert!(refused(head(1, &[3])).contains("index 3 of 3"));
        assert!(refused(head(2, &[0])).contains("layer 2 of 2"));
        assert!(refused(WriteHead { group: 1, ..head(0, &[0]) }).contains("group 1 of 1"));
    }

    #[test]
    fn only_whole_and_equal_handoffs_verify() {
        let geometry = geometry();
        let mut pool: Vec<u8> = (0..geometry.bytes()).map(|i| i as u8).collect();
        let mut land = |incoming: &mut Incoming, head: WriteHead| {
            incoming.accept(&geometry, &head).unwrap();
            incoming.landed(&geometry, &mut pool, &head).unwrap();
        };
        let mut whole = incoming();
        land(&mut whole, head(1, &[0, 1, 2]));
        land(&mut whole, head(0, &[0, 1, 2]));
        let sums = whole.sums.clone();
        assert_eq!(whole.verify(6, &sums), Ok(()));
        assert_eq!(whole.bytes(&geometry), 6 * 32);

        let mut partial = incoming();
        land(&mut partial, head(0, &[2, 0, 1]));
        land(&mut partial, head(1, &[1]));
        land(&mut partial, head(1, &[0]));
        assert_eq!(partial.verify(6, &sums), Err(Refusal::Incomplete { written: 5, expected: 6 }));
        land(&mut partial, head(1, &[2]));
        assert_eq!(partial.verify(6, &sums), Ok(()));

        let mut other = sums.clone();
        other[0][1] ^= 1;
        let refusal = partial.verify(6, &other).unwrap_err();
        assert!(matches!(refusal, Refusal::Verify { group: 0, index: 1, block: BlockId(6), .. }), "{refusal:?}");
        assert!(matches!(partial.verify(6, &[]), Err(Refusal::BadWrite(_))));
    }
}
