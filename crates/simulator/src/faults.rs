//! Which faults a run has, how often, and how many there were. Chosen by the seed, so that most runs have several kinds and
//! some have none.

use std::collections::BTreeMap;

use crate::random::Random;
use crate::stream::Micros;

/// What can happen to connections and workers.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// A frame, with its payload, never left.
    Drop,
    /// A frame left twice.
    Double,
    /// A frame overtook another.
    Swap,
    /// A bit under way between sockets was flipped.
    Corrupt,
    /// A bit was flipped in what one worker copies into another's pool.
    Miscopy,
    /// Nothing arrived for a while.
    Stall,
    /// The connection ended.
    Cut,
    /// A worker died; another took its place and address.
    Restart,
    /// A worker stood still for a while.
    Freeze,
    /// Somebody who was told no ticket tried to join a session.
    Stranger,
}

/// Rates per mille.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    drop: u32,
    double: u32,
    swap: u32,
    miscopy: u32,
    /// What may strike at random times.
    strikes: Vec<Fault>,
    /// Longest delay of a piece.
    slowness: Micros,
    pub short_writes: bool,
    pub counts: BTreeMap<Fault, u64>,
}

impl Faults {
    pub(crate) fn none() -> Faults {
        let (strikes, counts) = (Vec::new(), BTreeMap::new());
        Faults { drop: 0, double: 0, swap: 0, miscopy: 0, strikes, slowness: 100, short_writes: false, counts }
    }

    /// Nothing goes wrong, but slowly.
    pub(crate) fn calm(random: &mut Random) -> Faults {
        let slowness = if random.chance(500) { 100 } else { 5_000 };
        Faults { slowness, ..Faults::none() }
    }

    pub(crate) fn random(random: &mut Random) -> Faults {
        let mut rate = |most: u64| if random.chance(300) { random.within(1, most) as u32 } else { 0 };
        let (drop, double, swap, miscopy) = (rate(20), rate(20), rate(50), rate(20));
        let kinds = [Fault::Corrupt, Fault::Stall, Fault::Cut, Fault::Restart, Fault::Freeze, Fault::Stranger];
        let strikes = kinds.into_iter().filter(|_| random.chance(400)).collect();
        let slowness = *[50, 500, 5_000, 30_000].get(random.below(4) as usize).unwrap_or(&50);
        let (short_writes, counts) = (random.chance(500), BTreeMap::new());
        Faults { drop, double, swap, miscopy, strikes, slowness, short_writes, counts }
    }

    pub(crate) fn delay(&self, random: &mut Random) -> Micros {
        random.within(1, self.slowness)
    }

    /// Strikes now, if anything.
    pub(crate) fn strike(&self, random: &mut Random) -> Option<Fault> {
        if self.strikes.is_empty() {
            None
        } else {
            Some(self.strikes[random.below(self.strikes.len() as u64) as usize])
        }
    }

    /// Whether a connection breaks so early that what it was made for has hardly begun.
    pub(crate) fn nips(&mut self, random: &mut Random) -> bool {
        let happens = self.strikes.contains(&Fault::Cut) && random.chance(100);
        if happens {
            self.count(Fault::Cut);
        }
        happens
    }

    pub(crate) fn count(&mut self, fault: Fault) {
        *self.counts.entry(fault).or_default() += 1;
    }

    pub(crate) fn drops(&mut self, random: &mut Random) -> bool {
        self.chance(random, self.drop, Fault::Drop)
    }

    pub(crate) fn doubles(&mut self, random: &mut Random) -> bool {
        self.chance(random, self.double, Fault::Double)
    }

    pub(crate) fn swaps(&mut self, random: &mut Random) -> bool {
        self.chance(random, self.swap, Fault::Swap)
    }

    pub(crate) fn miscopies(&mut self, random: &mut Random) -> bool {
        self.chance(random, self.miscopy, Fault::Miscopy)
    }

    fn chance(&mut self, random: &mut Random, rate: u32, fault: Fault) -> bool {
        let happens = rate > 0 && random.chance(rate);
        if happens {
            self.count(fault);
        }
        happens
    }

    /// No more faults from now on.
    pub(crate) fn heal(&mut self) {
        *self = Faults { counts: std::mem::take(&mut self.counts), ..Faults::none() };
    }
}
