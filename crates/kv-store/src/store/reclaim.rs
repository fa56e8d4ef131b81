//! Segments that are reclaimed: what is alive in them moves.

use baton_kv_cache::BlockName;

use super::{Flight, Store};
use crate::{Block, Buffer, Place, Reason, Tier};

/// A segment that is being reclaimed.
#[derive(Debug)]
pub(super) struct Reclaim {
    segment: u32,
    /// Blocks that have not begun to move.
    left: Vec<BlockName>,
    /// Blocks that move now.
    moving: u32,
}

impl Store {
    /// Goes on reclaiming, as far as buffers and writes allow.
    pub(super) fn reclaim_on(&mut self) {
        loop {
            let Some(disk) = &mut self.disk else { return };
            if disk.reclaim.is_none() {
                let Some((segment, left)) = disk.segments.reclaim() else { return };
                disk.reclaim = Some(Reclaim { segment, left, moving: 0 });
            }
            while self.may_write() && self.move_next() {}
            let Some(disk) = &mut self.disk else { return };
            let Some(reclaim) = &disk.reclaim else { return };
            if !reclaim.left.is_empty() || reclaim.moving > 0 || !disk.segments.freed(reclaim.segment) {
                return;
            }
            disk.reclaim = None;
        }
    }

    /// Begins to move one more block. False: there is none, or no buffer is free.
    fn move_next(&mut self) -> bool {
        let Some(disk) = &mut self.disk else { return false };
        let Some(reclaim) = &mut disk.reclaim else { return false };
        let Some(name) = reclaim.left.pop() else { return false };
        let node = self.index.get(name);
        let Some((node, place)) = node.and_then(|node| Some((node, node.disk?))) else { return true };
        if place.segment != reclaim.segment {
            return true;
        }
        // From host memory, if it is there; else by way of a buffer that is kept for this.
        if let Some(copy) = &node.host {
            let (buffer, block) = (copy.buffer, copy.block.clone());
            reclaim.moving += 1;
            self.begin_writing(name, buffer);
            self.rewrite(block, place, buffer);
            return true;
        }
        let Some(buffer) = disk.moving.pop() else {
            reclaim.left.push(name);
            return false;
        };
        reclaim.moving += 1;
        let job = self.fly(Flight::Move { name, place, buffer });
        self.read_record(job, place, buffer, name);
        true
    }

    /// A block that moves was read, or could not be.
    pub(super) fn moved_up(&mut self, name: BlockName, place: Place, buffer: Buffer, block: Option<Block>) {
        let wanted = self.index.get(name).is_some_and(|node| node.disk == Some(place));
        match block.filter(|_| wanted) {
            Some(block) => self.rewrite(block, place, buffer),
            None => self.moved(name, place, buffer),
        }
    }

    fn rewrite(&mut self, block: Block, old: Place, from: Buffer) {
        match self.disk.as_mut().and_then(|disk| disk.segments.append(Reason::Moved)) {
            Some(place) => self.write(block, place, from, Some(old)),
            None => self.moved(block.key.name, old, from),
        }
    }

    /// A move has ended. A block that is still in the segment is given up, since the segment is needed.
    pub(super) fn moved(&mut self, name: BlockName, old: Place, buffer: Buffer) {
        if self.index.get(name).is_some_and(|node| node.disk == Some(old)) {
            self.evict(name, Tier::Disk);
        }
        let Some(disk) = &mut self.disk else { return };
        if let Some(reclaim) = &mut disk.reclaim {
            reclaim.moving -= 1;
        }
        // A buffer with one use is one of those kept for moves, unless its block has just left host memory.
        match disk.moving.len() < crate::config::MOVING as usize && self.buffers.uses(buffer) == 1 {
            true => disk.moving.push(buffer),
            false => self.ends_writing(name, buffer),
        }
    }
}
