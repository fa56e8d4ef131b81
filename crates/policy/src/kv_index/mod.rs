//! Which worker holds which prefix, as the workers themselves say.
//!
//! Workers publish the names of blocks that enter and leave their prefix cache ([`KvChange`]). Every router follows every worker, and so all
//! know the same. A name stands for a block and all before it, so a worker that holds the name of a prompt's n-th block holds n blocks of it.
//!
//! - **Memory** is bounded (I5): [`KvIndex::new`] says how many blocks at most. Each takes 16 to 32 bytes in the table. A set of holders is
//!   stored once for all blocks that have it, and all sets together have no more members than the index may have blocks.
//! - **When it is full**, blocks are forgotten that no prompt and no second worker mentioned lately (clock, or second chance: Corbató, "A paging
//!   experiment with the Multics system", 1968). A forgotten block is not known again until its worker stores it anew or tells everything. Any
//!   block may go, and a prompt whose first block was forgotten is taken for held by nobody: an index that is too small loses hits.
//! - **A lookup** looks at few of a prompt's blocks. Holders become fewer from block to block, since a cache evicts the end of a prefix first;
//!   so where two blocks have as many holders, all between them have the same. Galloping search (Bentley and Yao, 1976) finds where the last
//!   holder ends, and from there where holders change. Where blocks were forgotten, or a list is half told, it may find less than there is.
//! - **Truth** is checked: count and sum of all names that a worker says it holds are compared with the worker's own ([`Tally`]).
//!
//! It is a hint for placement, nothing more: a worker looks itself, and compares tokens.

mod holders;
mod table;

use std::collections::HashMap;

use baton_kv_cache::{BlockName, Tally};
use baton_types::WorkerId;

use holders::{Holders, SetId, Slot};
use table::Table;

/// Marks a value in the table as mentioned since the clock's hand passed. The rest of the value is a [`SetId`].
const MENTIONED: u32 = 1 << 31;
/// Most workers (I5).
const MAX_WORKERS: usize = 1 << 16;

/// What changed in a worker's prefix cache.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvChange {
    /// Number of this change. The next one has the next number.
    pub number: u64,
    /// Everything from before is void: this begins a list of all that the worker holds.
    pub afresh: bool,
    /// Short names ([`BlockName::short`]) of blocks that entered the cache.
    pub stored: Vec<u64>,
    /// Short names of blocks that left it, after that.
    pub removed: Vec<u64>,
    /// What the worker holds after this change; `None`: it says nothing of it.
    pub tally: Option<Tally>,
}

/// What became of a [`KvChange`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Followed {
    /// It was taken in.
    Yes,
    /// Changes are missing before it. The worker has to tell everything afresh; what is known of it stays until then.
    Gap,
    /// What is known of the worker is not what it holds. It has to tell everything afresh.
    Differs,
}

/// How much of a prompt a worker holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holder {
    /// The worker.
    pub worker: WorkerId,
    /// Leading blocks of the prompt that it holds, 1 or more.
    pub blocks: u32,
}

/// The index.
#[derive(Clone, Debug)]
pub struct KvIndex {
    table: Table,
    holders: Holders,
    workers: Vec<Option<Tracked>>,
    slots: HashMap<WorkerId, Slot>,
    /// Most blocks, and most members of all sets of holders.
    most: usize,
    /// Place in the table where the search for a block to forget goes on.
    hand: usize,
}

/// What is known of a worker.
#[derive(Clone, Debug)]
struct Tracked {
    id: WorkerId,
    /// Blocks in the table.
    here: Tally,
    /// Blocks that it holds and the index has forgotten.
    forgotten: Tally,
    /// Number of the change that is expected next; `None`: any that begins afresh.
    next: Option<u64>,
}

impl KvIndex {
    /// An empty index of at most `most` blocks.
    pub fn new(most: usize) -> KvIndex {
        KvIndex {
            table: Table::new(),
            holders: Holders::default(),
            workers: Vec::new(),
            slots: HashMap::new(),
            most: most.max(1),
            hand: 0,
        }
    }

    /// Number of different blocks in it.
    pub fn blocks(&self) -> usize {
        self.table.len()
    }

    /// Whether blocks may soon have to be forgotten, so that it matters which ones prompts mention.
    pub fn fills(&self) -> bool {
        self.table.len() > self.most / 2
    }

    /// Bytes of memory that it takes, about.
    pub fn bytes(&self) -> usize {
        self.table.bytes() + self.holders.bytes()
    }

    /// What a worker holds, as far as it has said.
    pub fn tally(&self, worker: WorkerId) -> Option<Tally> {
        self.tracked(worker).map(|tracked| tracked.here.plus(tracked.forgotten))
    }

    /// Whether what this worker holds is known.
    pub fn follows(&self, worker: WorkerId) -> bool {
        self.tracked(worker).is_some_and(|tracked| tracked.next.is_some())
    }

    /// Takes in what changed at a worker.
    pub fn follow(&mut self, worker: WorkerId, change: &KvChange) -> Followed {
        let slot = match (self.slots.get(&worker).copied(), change.afresh) {
            (Some(slot), true) => {
                self.empty(slot);
                slot
            }
            (Some(slot), false) if self.of(slot).next == Some(change.number) => slot,
            (None, true) => match self.slot(worker) {
                Some(slot) => slot,
                None => return Followed::Yes,
            },
            (known, false) => {
                known.into_iter().for_each(|slot| self.of(slot).next = None);
                return Followed::Gap;
            }
        };
        self.of(slot).next = Some(change.number.wrapping_add(1));
        change.stored.iter().for_each(|name| self.store(slot, *name));
        change.removed.iter().for_each(|name| self.remove(slot, *name));
        match change.tally {
            Some(tally) if self.tally(worker) != Some(tally) => {
                self.of(slot).next = None;
                Followed::Differs
            }
            _ => Followed::Yes,
        }
    }

    /// Forgets a worker that has left.
    pub fn leave(&mut self, worker: WorkerId) {
        if let Some(slot) = self.slots.remove(&worker) {
            self.empty(slot);
            self.workers[usize::from(slot)] = None;
        }
    }

    /// Prompts with these blocks came: they are kept longer than others.
    pub fn mention(&mut self, names: &[BlockName]) {
        for name in names {
            let Some(place) = self.table.find(name.short()) else { return };
            if let Some((_, value)) = self.table.at(place) {
                self.table.set(place, value | MENTIONED);
            }
        }
    }

    /// The workers that hold most of a prompt with these blocks, those with most first, at most `most` of them. Of many equals it takes others
    /// for each `turn`, so that many routers and many prompts do not all see the same few.
    pub fn find(&self, names: &[BlockName], most: usize, turn: usize) -> Vec<Holder> {
        let mut found = Vec::new();
        // Blocks that have holders: `held` do, `names.len()` or what follows do not.
        let mut held = gallop(names.len(), |at| self.holders_of(names[at]).is_some());
        let mut taken: Option<SetId> = None;
        while held > 0 && found.len() < most {
            let Some(set) = self.holders_of(names[held - 1]) else { break };
            let members = self.holders.members(set);
            let step = stride(members.len());
            for at in 0..members.len() {
                let slot = members[(turn % members.len() + at * step) % members.len()];
                if found.len() == most {
                    break;
                }
                if taken.is_some_and(|taken| self.holders.contains(taken, slot)) {
                    continue;
                }
                if let Some(tracked) = &self.workers[usize::from(slot)] {
                    found.push(Holder { worker: tracked.id, blocks: held as u32 });
                }
            }
            taken = Some(set);
            // Where there are more holders than here, going back.
            let size = self.holders.size(set);
            let same = gallop(held, |back| {
                self.holders_of(names[held - 1 - back]).is_some_and(|set| self.holders.size(set) <= size)
            });
            held -= same;
        }
        found
    }

    fn holders_of(&self, name: BlockName) -> Option<SetId> {
        let (_, value) = self.table.at(self.table.find(name.short())?)?;
        Some(value & !MENTIONED)
    }

    fn store(&mut self, slot: Slot, name: u64) {
        let Some(place) = self.table.find(name) else {
            if self.table.len() >= self.most {
                self.forget_one();
            }
            self.table.insert(name, Holders::one(slot));
            return self.of(slot).here.add(name);
        };
        let Some((_, value)) = self.table.at(place) else { return };
        let set = value & !MENTIONED;
        if self.holders.contains(set, slot) {
            return;
        }
        if self.holders.stored() + self.holders.size(set) + 1 > self.most {
            // There is no room for another set of holders (I5).
            return self.of(slot).forgotten.add(name);
        }
        let set = self.holders.with(set, slot);
        self.table.set(place, set | MENTIONED);
        self.of(slot).here.add(name);
    }

    fn remove(&mut self, slot: Slot, name: u64) {
        let place = self.table.find(name);
        let entry = place.and_then(|place| Some((place, self.table.at(place)?.1)));
        match entry.filter(|(_, value)| self.holders.contains(value & !MENTIONED, slot)) {
            Some((place, value)) => {
                self.of(slot).here.remove(name);
                self.take_out(slot, place, value);
            }
            None => self.of(slot).forgotten.remove(name),
        }
    }

    /// Takes a holder out of the entry at a place. Returns whether the entry is still there.
    fn take_out(&mut self, slot: Slot, place: usize, value: u32) -> bool {
        let size = self.holders.size(value & !MENTIONED);
        if size > 2 && self.holders.stored() + size - 1 > self.most {
            // There is no room for the set of the others (I5): this block is forgotten.
            self.forget(place, Some(slot));
            return false;
        }
        match self.holders.without(value & !MENTIONED, slot) {
            Some(set) => self.table.set(place, set | value & MENTIONED),
            None => {
                self.table.remove(place);
                return false;
            }
        }
        true
    }

    /// Forgets the block at a place, for all holders but one that no longer holds it.
    fn forget(&mut self, place: usize, but: Option<Slot>) {
        let Some((name, value)) = self.table.at(place) else { return };
        let set = value & !MENTIONED;
        for slot in self.holders.members(set).iter().filter(|slot| Some(**slot) != but) {
            if let Some(tracked) = &mut self.workers[usize::from(*slot)] {
                tracked.here.remove(name);
                tracked.forgotten.add(name);
            }
        }
        self.holders.give_back(set);
        self.table.remove(place);
    }

    /// Forgets a block that was not mentioned lately.
    fn forget_one(&mut self) {
        // After one turn no block is marked.
        for _ in 0..=2 * self.table.places() {
            self.hand = (self.hand + 1) & (self.table.places() - 1);
            let Some((_, value)) = self.table.at(self.hand) else { continue };
            if value & MENTIONED == 0 {
                return self.forget(self.hand, None);
            }
            self.table.set(self.hand, value & !MENTIONED);
        }
    }

    /// Takes a worker out of all entries.
    fn empty(&mut self, slot: Slot) {
        let mut place = 0;
        while self.of(slot).here.blocks > 0 && place < self.table.places() {
            match self.table.at(place).filter(|(_, value)| self.holders.contains(value & !MENTIONED, slot)) {
                Some((name, value)) => {
                    self.of(slot).here.remove(name);
                    // Another entry may have come to this place.
                    place += usize::from(self.take_out(slot, place, value));
                }
                None => place += 1,
            }
        }
        let tracked = self.of(slot);
        (tracked.here, tracked.forgotten) = (Tally::default(), Tally::default());
    }

    fn tracked(&self, worker: WorkerId) -> Option<&Tracked> {
        self.workers[usize::from(*self.slots.get(&worker)?)].as_ref()
    }

    /// What is known of the worker in a slot that [`KvIndex::slot`] gave.
    fn of(&mut self, slot: Slot) -> &mut Tracked {
        let empty = Tracked { id: WorkerId(0), here: Tally::default(), forgotten: Tally::default(), next: None };
        self.workers[usize::from(slot)].get_or_insert(empty)
    }

    /// A vacant slot for a new worker. `None`: there are too many workers, and this one is not followed.
    fn slot(&mut self, worker: WorkerId) -> Option<Slot> {
        let at = self.workers.iter().position(Option::is_none).unwrap_or(self.workers.len());
        let slot = Slot::try_from(at).ok().filter(|_| self.slots.len() < MAX_WORKERS)?;
        if at == self.workers.len() {
            self.workers.push(None);
        }
        self.of(slot).id = worker;
        self.slots.insert(worker, slot);
        Some(slot)
    }
}

/// A step with which each of so many members comes once, and neighbours far apart: in the order of joining, workers of a role stand together.
fn stride(members: usize) -> usize {
    let common = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (1..=members * 5 / 8).rev().find(|step| common(*step, members) == 1).unwrap_or(1)
}

/// How many of the numbers from 0 to `end` (not included) are so, when all that are so come first. Looks at 2 log₂ of the answer.
fn gallop(end: usize, is_so: impl Fn(usize) -> bool) -> usize {
    // The answer is at least `low`, and below `high`, or `end`.
    let (mut low, mut step) = (0, 1);
    while low + step <= end && is_so(low + step - 1) {
        (low, step) = (low + step, step * 2);
    }
    let mut high = end.min(low + step - 1);
    while low < high {
        let middle = low + (high - low) / 2;
        if is_so(middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests;
