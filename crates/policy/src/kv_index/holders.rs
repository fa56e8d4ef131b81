//! Sets of workers, each stored once, however many blocks have it.
//!
//! A block mostly has one holder. The blocks of a prompt that many conversations begin with have many, and all the same ones, which is why a
//! block names a set by a number. A number below [`SINGLE`] is the set of that one worker.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;

/// A worker's place in the index.
pub(super) type Slot = u16;
/// A set.
pub(super) type SetId = u32;

/// Numbers below it are sets of one worker.
const SINGLE: SetId = 1 << 16;

/// The sets of two or more workers that blocks have.
#[derive(Clone, Debug, Default)]
pub(super) struct Holders {
    sets: Vec<Set>,
    vacant: Vec<SetId>,
    known: HashMap<Arc<[Slot]>, SetId>,
    /// Sum of the sizes of all sets.
    members: usize,
    /// The latest change of a set: workers tell blocks of one prompt one after the other, and these change in the same way.
    latest: Option<(Change, SetId)>,
}

#[derive(Clone, Debug, Default)]
struct Set {
    /// In ascending order.
    members: Arc<[Slot]>,
    /// Blocks that have it; 0: the set is vacant.
    blocks: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Change {
    from: SetId,
    slot: Slot,
}

/// The members of a set, in ascending order.
#[derive(Debug)]
pub(super) enum Members<'a> {
    One([Slot; 1]),
    Many(&'a [Slot]),
}

impl Deref for Members<'_> {
    type Target = [Slot];

    fn deref(&self) -> &[Slot] {
        match self {
            Members::One(one) => one,
            Members::Many(many) => many,
        }
    }
}

impl Holders {
    /// The set of one worker. Nothing has to be given back for it.
    pub(super) fn one(slot: Slot) -> SetId {
        slot.into()
    }

    pub(super) fn members(&self, id: SetId) -> Members<'_> {
        match self.set(id) {
            Some(set) => Members::Many(&set.members),
            None => Members::One([id as Slot]),
        }
    }

    /// Number of members.
    pub(super) fn size(&self, id: SetId) -> usize {
        self.set(id).map_or(1, |set| set.members.len())
    }

    pub(super) fn contains(&self, id: SetId, slot: Slot) -> bool {
        self.members(id).binary_search(&slot).is_ok()
    }

    /// Sum of the sizes of all sets of two or more.
    pub(super) fn stored(&self) -> usize {
        self.members
    }

    /// Bytes of memory, about.
    pub(super) fn bytes(&self) -> usize {
        let a_set = size_of::<Set>() + size_of::<(Arc<[Slot]>, SetId)>() + 2 * size_of::<usize>();
        self.sets.len() * a_set + self.members * size_of::<Slot>()
    }

    /// One block's set with `slot` added to it. `slot` is not in it yet.
    pub(super) fn with(&mut self, from: SetId, slot: Slot) -> SetId {
        let change = Change { from, slot };
        self.changed(change, |members| {
            let mut all = Vec::with_capacity(members.len() + 1);
            let at = members.partition_point(|member| *member < slot);
            all.extend_from_slice(&members[..at]);
            all.push(slot);
            all.extend_from_slice(&members[at..]);
            all
        })
    }

    /// One block's set without `slot`, which is in it. `None`: nobody is left.
    pub(super) fn without(&mut self, from: SetId, slot: Slot) -> Option<SetId> {
        if from < SINGLE {
            return None;
        }
        let change = Change { from, slot };
        Some(self.changed(change, |members| members.iter().copied().filter(|member| *member != slot).collect()))
    }

    /// One block no longer has this set.
    pub(super) fn give_back(&mut self, id: SetId) {
        let Some(at) = id.checked_sub(SINGLE).map(|at| at as usize) else { return };
        let set = &mut self.sets[at];
        set.blocks -= 1;
        if set.blocks > 0 {
            return;
        }
        let Set { members, .. } = std::mem::take(set);
        self.members -= members.len();
        self.known.remove(&members);
        self.vacant.push(id);
        self.latest = self.latest.take_if(|(change, to)| change.from != id && *to != id);
    }

    /// One block changes from a set to another one. Whether the slot is added or removed follows from the set.
    fn changed(&mut self, change: Change, members: impl FnOnce(&[Slot]) -> Vec<Slot>) -> SetId {
        let to = match self.latest {
            Some((latest, to)) if latest == change => to,
            _ => {
                let members = members(&self.members(change.from));
                self.number(&members)
            }
        };
        self.take(to);
        self.latest = Some((change, to));
        self.give_back(change.from);
        to
    }

    /// The number of a set.
    fn number(&mut self, members: &[Slot]) -> SetId {
        if let [one] = members {
            return Holders::one(*one);
        }
        if let Some(id) = self.known.get(members) {
            return *id;
        }
        let id = self.vacant.pop().unwrap_or_else(|| {
            self.sets.push(Set::default());
            SINGLE + self.sets.len() as SetId - 1
        });
        let members: Arc<[Slot]> = members.into();
        self.members += members.len();
        self.known.insert(Arc::clone(&members), id);
        self.sets[(id - SINGLE) as usize].members = members;
        id
    }

    fn take(&mut self, id: SetId) {
        if let Some(at) = id.checked_sub(SINGLE) {
            self.sets[at as usize].blocks += 1;
        }
    }

    fn set(&self, id: SetId) -> Option<&Set> {
        self.sets.get(id.checked_sub(SINGLE)? as usize)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Blocks of any sets: each set is stored once, and none that no block has.
        #[test]
        fn each_block_has_its_set(changes in prop::collection::vec((0usize..6, 0u16..5), 1..300)) {
            let mut holders = Holders::default();
            let mut blocks: Vec<Option<(SetId, BTreeSet<Slot>)>> = vec![None; 6];
            for (block, slot) in changes {
                blocks[block] = match blocks[block].take() {
                    None => Some((Holders::one(slot), BTreeSet::from([slot]))),
                    Some((id, mut truth)) => {
                        prop_assert_eq!(holders.contains(id, slot), truth.contains(&slot));
                        if truth.remove(&slot) {
                            holders.without(id, slot).map(|id| (id, truth))
                        } else {
                            truth.insert(slot);
                            Some((holders.with(id, slot), truth))
                        }
                    }
                };
                let mut all = BTreeSet::new();
                for (id, truth) in blocks.iter().flatten() {
                    prop_assert!(holders.members(*id).iter().eq(truth));
                    prop_assert_eq!(holders.size(*id), truth.len());
                    if truth.len() > 1 { all.insert(truth.clone()); }
                }
                prop_assert_eq!(holders.known.len(), all.len());
                prop_assert_eq!(holders.stored(), all.iter().map(BTreeSet::len).sum::<usize>());
            }
            for (id, _) in blocks.into_iter().flatten() {
                holders.give_back(id);
            }
            prop_assert_eq!((holders.stored(), holders.known.len()), (0, 0));
        }
    }
}
