//! Blocks that come from a pool.

use std::sync::Arc;

use baton_kv_cache::BlockName;

use super::{Store, Waiting};
use crate::index::{HostCopy, Node, Usage};
use crate::{Block, BlockKey, Buffer, Decline, Effect, Ticket, Tier};

impl Store {
    pub(super) fn put(&mut self, ticket: Ticket, key: BlockKey) {
        match self.place_for(ticket, &key) {
            Ok(buffer) => {
                self.filling.insert(key.name, ticket);
                self.waiting.insert(ticket, Waiting::Fill { buffer, key });
                self.effects.push_back(Effect::Fill(ticket, buffer));
            }
            Err(why) => {
                self.counters.declined[why as usize] += 1;
                self.effects.push_back(Effect::Declined(ticket, why));
            }
        }
    }

    fn place_for(&mut self, ticket: Ticket, key: &BlockKey) -> Result<Buffer, Decline> {
        if self.waiting.contains_key(&ticket) || self.waiting.len() >= self.config.limits.tickets as usize {
            return Err(Decline::Busy);
        }
        if self.filling.contains_key(&key.name) || self.reading.contains_key(&key.name) {
            return Err(Decline::Held);
        }
        if let Some(node) = self.index.get(key.name) {
            if key.groups & !node.groups != 0 {
                // It has more layer groups than what is stored, which it replaces.
                if node.host.as_ref().is_some_and(|copy| copy.writing) {
                    return Err(Decline::Busy);
                }
                self.drop_all(key.name);
            } else if node.host.is_some() || key.groups != node.groups {
                // All copies of a block have the same groups: one with fewer does not stand before one with more.
                self.index.touch(key.name);
                return Err(Decline::Held);
            }
        }
        self.buffer().ok_or(Decline::Busy)
    }

    pub(super) fn filled(&mut self, ticket: Ticket, digests: Option<Arc<[u64]>>) {
        let Some(Waiting::Fill { buffer, key }) = self.waiting.get(&ticket) else { return };
        let (buffer, key) = (*buffer, key.clone());
        self.waiting.remove(&ticket);
        self.filling.remove(&key.name);
        let parts = self.config.shape.parts(key.groups).count();
        match digests.filter(|digests| digests.len() == parts) {
            Some(digests) => self.keep(Block { key, digests }, buffer),
            None => drop(self.buffers.release(buffer)),
        }
    }

    fn drop_all(&mut self, name: BlockName) {
        Tier::ALL.into_iter().for_each(|tier| self.drop_copy(name, tier));
    }

    /// Enters the block in this buffer into the index. The buffer's use becomes that of the index.
    pub(super) fn keep(&mut self, block: Block, buffer: Buffer) {
        let (name, parent, groups) = (block.key.name, block.key.parent, block.key.groups);
        if let Some(node) = self.index.get(name) {
            // While this one was filled or read, another may have come, or was found on disk or among the objects. Of two with the same layer
            // groups in host memory the later one is dropped: somebody may be reading the other. Else the one with more groups stays.
            let (more, writing) = (groups & !node.groups != 0, node.host.as_ref().is_some_and(|copy| copy.writing));
            let dropped = if more { writing } else { node.host.is_some() || groups != node.groups };
            if dropped {
                self.buffers.release(buffer);
                return;
            }
            if more {
                self.drop_all(name);
            }
        }
        let copy = HostCopy { buffer, block, busy: false, writing: false };
        self.index.change(
            name,
            || Node::new(parent, groups, Usage::default()),
            |node, ranking| {
                node.host = Some(copy);
                ranking.used(&mut node.usage);
            },
        );
        self.effects.push_back(Effect::Stored(name, Tier::Host));
        self.look_at(name);
        self.look_up(name);
    }
}
