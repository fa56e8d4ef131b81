//! What each worker holds, in its pool or in its store below it, for placements and for those who follow the workers.
//!
//! There are two copies of each [`KvIndex`]. Placements read one, changes go to the other, and now and then they trade places (left-right:
//! Ramalhete and Correia, "A concurrency control algorithm with wait-free population oblivious reads", 2015). So no placement waits for a
//! change, and no change for a placement longer than one lookup takes. What takes long is done on a thread of its own ([`HeldBlocks::leave`]).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use baton_policy::{BlockName, Followed, Holder, KvChange, KvIndex};
use baton_runtime::metrics as names;
use baton_types::WorkerId;
use metrics::gauge;

/// Most blocks in an index (I5), 160 million tokens: half a gigabyte for the tables of both copies at most.
pub(super) const BLOCKS: usize = 10_000_000;
/// Most holders that a placement looks at: of pools, and of stores, which hold little in common but what pools hold, too.
pub(super) const IN_POOLS: usize = 32;
pub(super) const IN_STORES: usize = 16;
/// Changes that the copy of the placements may lack, in names of blocks.
const LACKING: usize = 1 << 16;
/// Most prompts that wait to be mentioned.
const MENTIONS: usize = 64;

/// What happens to the index.
enum Change {
    Cache(WorkerId, Arc<KvChange>),
    Left(WorkerId),
    Mentioned(Arc<[BlockName]>),
}

/// The index of what each worker holds.
pub(super) struct HeldBlocks {
    read: RwLock<Arc<KvIndex>>,
    write: Mutex<Writing>,
    /// The copy for changes is ahead of the other.
    ahead: AtomicBool,
    /// Prompts to mention with the next change. Some are left out when there are many.
    mentions: Mutex<Vec<Arc<[BlockName]>>>,
    /// What holds the blocks, for metrics.
    of: &'static str,
}

struct Writing {
    index: Arc<KvIndex>,
    /// Changes that `index` lacks, since the copies traded places.
    missed: Vec<Change>,
    /// Changes that the other copy lacks.
    ahead: Vec<Change>,
    /// Their size in names.
    names: usize,
}

impl HeldBlocks {
    /// Room for this many blocks of the workers' pools, or of their stores: `of`.
    pub fn new(most: usize, of: &'static str) -> HeldBlocks {
        let index = || Arc::new(KvIndex::new(most));
        let write = Writing { index: index(), missed: Vec::new(), ahead: Vec::new(), names: 0 };
        HeldBlocks {
            read: RwLock::new(index()),
            write: Mutex::new(write),
            ahead: AtomicBool::new(false),
            mentions: Mutex::default(),
            of,
        }
    }
}

impl HeldBlocks {
    /// The workers that hold most of a prompt with these blocks, `most` of them, the one with most first. `turn`: see [`KvIndex::find`].
    pub fn find(&self, names: &Arc<[BlockName]>, most: usize, turn: usize) -> Vec<Holder> {
        if self.ahead.load(Ordering::Relaxed)
            && let Ok(mut writing) = self.write.try_lock()
        {
            self.trade(&mut writing);
        }
        let index = Arc::clone(&self.read.read().unwrap_or_else(PoisonError::into_inner));
        let (found, fills) = (index.find(names, most, turn), index.fills());
        drop(index);
        if fills && !found.is_empty() {
            let mut mentions = self.mentions();
            if mentions.len() < MENTIONS {
                mentions.push(Arc::clone(names));
            }
        }
        found
    }

    /// Takes in what changed at a worker. Takes long where a change begins afresh at a worker that is known.
    pub fn follow(&self, worker: WorkerId, change: KvChange) -> Followed {
        let mut writing = self.writing();
        let afresh = change.afresh;
        let followed = self.change(&mut writing, Change::Cache(worker, Arc::new(change)));
        if afresh {
            self.both(&mut writing);
        }
        for names in std::mem::take(&mut *self.mentions()) {
            self.change(&mut writing, Change::Mentioned(names));
        }
        followed
    }

    /// Forgets a worker that has left. Takes long: it looks at the whole index, twice.
    pub fn leave(&self, worker: WorkerId) {
        let mut writing = self.writing();
        self.change(&mut writing, Change::Left(worker));
        self.both(&mut writing);
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.write.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mentions(&self) -> MutexGuard<'_, Vec<Arc<[BlockName]>>> {
        self.mentions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the second copy take in now what the first one has.
    fn both(&self, writing: &mut Writing) {
        self.trade(writing);
        let _ = writing.caught_up();
    }

    fn change(&self, writing: &mut Writing, change: Change) -> Followed {
        if writing.names > LACKING {
            self.trade(writing);
        }
        let index = writing.caught_up();
        let before = index.blocks();
        let followed = apply(index, &change);
        // Of each model's index.
        gauge!(names::KV_INDEX_BLOCKS, "of" => self.of).increment(index.blocks() as f64 - before as f64);
        writing.names += change.names();
        writing.ahead.push(change);
        self.ahead.store(true, Ordering::Relaxed);
        followed
    }

    fn trade(&self, writing: &mut Writing) {
        // Another placement may have done it meanwhile. Twice would be once too often.
        if writing.ahead.is_empty() {
            return;
        }
        std::mem::swap(&mut writing.index, &mut self.read.write().unwrap_or_else(PoisonError::into_inner));
        writing.missed.append(&mut writing.ahead);
        writing.names = 0;
        self.ahead.store(false, Ordering::Relaxed);
    }
}

impl Writing {
    /// The copy for changes, once it lacks none.
    fn caught_up(&mut self) -> &mut KvIndex {
        // A placement may still be reading what it took before the copies traded places.
        while Arc::get_mut(&mut self.index).is_none() {
            std::thread::yield_now();
        }
        let index = Arc::make_mut(&mut self.index);
        for change in self.missed.drain(..) {
            // It was answered when it came.
            let _ = apply(index, &change);
        }
        index
    }
}

impl Change {
    fn names(&self) -> usize {
        match self {
            Change::Cache(_, change) => change.stored.len() + change.removed.len() + 1,
            Change::Left(_) => 1,
            Change::Mentioned(names) => names.len(),
        }
    }
}

fn apply(index: &mut KvIndex, change: &Change) -> Followed {
    match change {
        Change::Cache(worker, change) => return index.follow(*worker, change),
        Change::Left(worker) => index.leave(*worker),
        Change::Mentioned(names) => index.mention(names),
    }
    Followed::Yes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(count: u64) -> Vec<BlockName> {
        (1..=count).map(|name| BlockName(name.into())).collect()
    }

    fn change(number: u64, stored: std::ops::Range<u64>) -> KvChange {
        KvChange { number, afresh: number == 1, stored: stored.collect(), ..KvChange::default() }
    }

    #[test]
    fn both_copies_take_in_each_change_once() {
        let (held, worker) = (HeldBlocks::new(BLOCKS, "pools"), WorkerId(7));
        for number in 1..20 {
            let told = KvChange { tally: None, ..change(number, number..number + 1) };
            assert_eq!(held.follow(worker, told), Followed::Yes, "a copy that missed one would see a gap");
            let found = held.find(&names(50).into(), IN_POOLS, number as usize);
            assert_eq!(found, [Holder { worker, blocks: number as u32 }]);
        }
        assert_eq!(held.follow(worker, change(21, 0..0)), Followed::Gap);
        held.leave(worker);
        let prompt = names(50).into();
        assert_eq!((held.find(&prompt, IN_POOLS, 0), held.find(&prompt, IN_POOLS, 0)), (vec![], vec![]));
    }

    /// Two placements may both see that the copies should trade places.
    #[test]
    fn copies_that_were_just_traded_are_not_traded_back() {
        let (held, worker) = (HeldBlocks::new(100, "pools"), WorkerId(7));
        for number in 1..5 {
            assert_eq!(held.follow(worker, change(number, number..number + 1)), Followed::Yes);
            for _ in 0..2 {
                held.trade(&mut held.writing());
            }
            assert_eq!(held.find(&names(9).into(), IN_POOLS, 0), [Holder { worker, blocks: number as u32 }]);
        }
    }

    /// I5: without placements the copies still trade places.
    #[test]
    fn changes_that_nobody_reads_do_not_pile_up() {
        let held = HeldBlocks::new(BLOCKS, "pools");
        for number in 1..100 {
            held.follow(WorkerId(1), change(number, 5000 * number..5000 * number + 4096));
            assert!(held.write.lock().unwrap().names <= LACKING + 4097);
        }
        assert!(held.write.lock().unwrap().ahead.len() < 20);
    }

    #[test]
    fn what_prompts_begin_with_stays_when_the_index_is_full() {
        let (held, prompt) = (HeldBlocks::new(100, "pools"), names(20).into());
        held.follow(WorkerId(1), change(1, 1..21));
        for number in 2..40 {
            held.find(&prompt, IN_POOLS, 0);
            held.follow(WorkerId(1), change(number, 1000 * number..1000 * number + 10));
        }
        assert_eq!(held.find(&prompt, IN_POOLS, 0), [Holder { worker: WorkerId(1), blocks: 20 }]);
    }

    #[test]
    fn placements_and_changes_go_on_beside_each_other() {
        let held = HeldBlocks::new(BLOCKS, "pools");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 1..2000 {
                    assert_eq!(held.follow(WorkerId(1), change(number, number..number + 1)), Followed::Yes);
                }
            });
            for _ in 0..2 {
                scope.spawn(|| {
                    let (names, mut most) = (names(2000).into(), 0);
                    for turn in 0..2000 {
                        let blocks = held.find(&names, IN_POOLS, turn).first().map_or(0, |holder| holder.blocks);
                        assert!(blocks >= most, "a placement never sees less than an earlier one");
                        most = blocks;
                    }
                });
            }
        });
        assert_eq!(held.find(&names(2000).into(), IN_POOLS, 0)[0].blocks, 1999);
    }
}
