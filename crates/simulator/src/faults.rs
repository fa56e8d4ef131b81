//! The faults of a run: which kinds, how often, and how many struck. The seed chooses them, so that most runs have several kinds
//! and some have none.

use std::collections::{BTreeMap, BTreeSet};

use baton_types::mix;
use baton_types::testing::Random;

use crate::stream::Micros;

/// A kind of fault, of processes or of the network between them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Fault {
    /// A frame between workers, with its payload, never left.
    Drop,
    /// A frame left twice.
    Double,
    /// A frame overtook another.
    Swap,
    /// A bit in flight between workers was flipped.
    Corrupt,
    /// A bit was flipped in the bytes that one worker copies into another's pool.
    Miscopy,
    /// Nothing arrived over a connection between workers for a while.
    Stall,
    /// A connection between workers ended.
    Cut,
    /// Somebody without a ticket tried to join a session.
    Stranger,
    /// A worker died; another took its place and address.
    Restart,
    /// A process stood still for a while.
    Freeze,
    /// Two processes could not reach each other for a while.
    Partition,
    /// The connection of a router to a worker ended.
    Break,
    /// A router died; another took its place.
    RouterRestart,
    /// The registry was down for a while.
    RegistryDown,
    /// The registry was down, and came back without members.
    RegistryEmptied,
    /// The model failed on a step.
    StepFails,
    /// A worker drained and left.
    Drain,
    /// A worker joined.
    Join,
    /// A process has a clock that shows another time and runs at another rate.
    Clocks,
    /// A worker drained and left before it was idle: its time was over, or it was told to hurry.
    DrainCut,
    /// The disk of a worker's store failed, or gave other bytes than were written.
    Store,
    /// A KV store died, drained, stood still or could not be reached.
    KvStore,
}

impl Fault {
    /// Every kind.
    pub const ALL: [Fault; 22] = [
        Fault::Drop,
        Fault::Double,
        Fault::Swap,
        Fault::Corrupt,
        Fault::Miscopy,
        Fault::Stall,
        Fault::Cut,
        Fault::Stranger,
        Fault::Restart,
        Fault::Freeze,
        Fault::Partition,
        Fault::Break,
        Fault::RouterRestart,
        Fault::RegistryDown,
        Fault::RegistryEmptied,
        Fault::StepFails,
        Fault::Drain,
        Fault::Join,
        Fault::Clocks,
        Fault::DrainCut,
        Fault::Store,
        Fault::KvStore,
    ];

    /// The kinds from `Corrupt` to `Join`. They strike at random times, except `Miscopy` and `StepFails`, which have rates.
    const STRIKING: &[Fault] = Fault::ALL.split_at(3).1.split_at(15).0;

    /// Whether no request may fail because of it.
    pub(crate) fn costs_nothing(self) -> bool {
        use Fault::*;
        matches!(self, RegistryDown | RegistryEmptied | Drain | Join | Clocks | Store | KvStore)
    }

    /// Whether a connection that stays open does not deliver each frame once and in order. No real connection does that.
    pub(crate) fn is_unreal(self) -> bool {
        matches!(self, Fault::Drop | Fault::Double | Fault::Swap)
    }
}

/// The faults of a run and their rates.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Faults {
    /// Frames between workers that are dropped, per mille.
    pub drop: u32,
    /// Frames between workers that are sent twice, per mille.
    pub double: u32,
    /// Frames between workers that are swapped with the next, per mille.
    pub swap: u32,
    /// Copies over shared memory in which a bit is flipped, per mille.
    pub miscopy: u32,
    /// Steps per mille that fail.
    pub step: u32,
    /// Reads and writes of workers' stores that go wrong, per mille.
    pub store: u32,
    /// Longest time from one fault of a KV store to the next, microseconds; 0: there are none.
    pub kv_store: u64,
    /// Kinds of faults that may strike at random times.
    pub strikes: Vec<Fault>,
    /// Longest time from one chance for a random fault to the next, microseconds.
    pub pause: u64,
    /// Longest delay of a message, or of a piece of one, microseconds.
    pub slowness: u64,
    /// Sockets may accept only a part of a write.
    pub short_writes: bool,
    /// Every process has a clock of its own.
    pub clocks: bool,
    /// Faults that struck, by kind.
    pub counts: BTreeMap<Fault, u64>,
}

impl Faults {
    /// No faults, and little delay.
    pub fn none() -> Faults {
        Faults {
            drop: 0,
            double: 0,
            swap: 0,
            miscopy: 0,
            step: 0,
            store: 0,
            kv_store: 0,
            strikes: Vec::new(),
            pause: 50_000,
            slowness: 100,
            short_writes: false,
            clocks: false,
            counts: BTreeMap::new(),
        }
    }

    /// No faults, but perhaps longer delays.
    pub(crate) fn calm(random: &mut Random) -> Faults {
        let slowness = if random.chance(500) { 100 } else { 5_000 };
        Faults { slowness, ..Faults::none() }
    }

    pub(crate) fn random(random: &mut Random, without: &BTreeSet<Fault>) -> Faults {
        let mut rate = |fault: Fault, most: u64| {
            let rate = if random.chance(250) { random.within(1, most) as u32 } else { 0 };
            if without.contains(&fault) { 0 } else { rate }
        };
        let (mut drop, mut double, mut swap) = (rate(Fault::Drop, 20), rate(Fault::Double, 20), rate(Fault::Swap, 50));
        let (mut miscopy, mut step) = (rate(Fault::Miscopy, 20), rate(Fault::StepFails, 30));
        let strikes = Fault::STRIKING.iter().copied().filter(|fault| {
            let of_rates = matches!(fault, Fault::Miscopy | Fault::StepFails);
            random.chance(250) && !of_rates && !without.contains(fault)
        });
        let mut strikes: Vec<Fault> = strikes.collect();
        if random.chance(150) {
            // Only faults by which no request may fail.
            let mild = |fault: &Fault| fault.costs_nothing() && !without.contains(fault);
            (strikes, drop, double, swap, miscopy, step) = (Vec::new(), 0, 0, 0, 0, 0);
            strikes.extend(Fault::STRIKING.iter().copied().filter(mild).filter(|_| random.chance(500)));
        }
        let pause = [5_000, 50_000, 500_000][random.below(3) as usize];
        let slowness = [50, 500, 5_000, 30_000][random.below(4) as usize];
        let short_writes = random.chance(500);
        Faults { drop, double, swap, miscopy, step, strikes, pause, slowness, short_writes, ..Faults::none() }
    }

    /// Chooses whether clocks differ, without drawing from the seed's main sequence.
    pub(crate) fn with_clocks(self, seed: u64, without: &BTreeSet<Fault>) -> Faults {
        let clocks = Random(mix(seed)).chance(300) && !without.contains(&Fault::Clocks);
        Faults { clocks, ..self }
    }

    /// Chooses how often the disks of stores fail, without drawing from the seed's main sequence.
    pub(crate) fn with_stores(self, seed: u64, without: &BTreeSet<Fault>) -> Faults {
        let random = &mut Random(mix(seed ^ 41));
        let store =
            if random.chance(500) && !without.contains(&Fault::Store) { random.within(1, 200) as u32 } else { 0 };
        Faults { store, ..self }
    }

    /// Chooses how often faults strike KV stores, without drawing from the seed's main sequence.
    pub(crate) fn with_kv_stores(self, seed: u64, without: &BTreeSet<Fault>) -> Faults {
        let random = &mut Random(mix(seed ^ 59));
        let strikes = random.chance(700) && !without.contains(&Fault::KvStore);
        let kv_store = if strikes { [100_000, 500_000, 2_000_000][random.below(3) as usize] } else { 0 };
        Faults { kv_store, ..self }
    }

    pub(crate) fn delay(&self, random: &mut Random) -> Micros {
        random.within(1, self.slowness)
    }

    /// The fault that strikes now, if any.
    pub(crate) fn strike(&self, random: &mut Random) -> Option<Fault> {
        match self.strikes.is_empty() {
            true => None,
            false => Some(self.strikes[random.below(self.strikes.len() as u64) as usize]),
        }
    }

    /// Whether a new connection breaks when its work has hardly begun.
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

    pub(crate) fn strikes_step(&mut self, random: &mut Random) -> bool {
        self.chance(random, self.step, Fault::StepFails)
    }

    fn chance(&mut self, random: &mut Random, rate: u32, fault: Fault) -> bool {
        let happens = rate > 0 && random.chance(rate);
        if happens {
            self.count(fault);
        }
        happens
    }

    /// Whether drains may be cut off. Not if all faults of the run are such that no request may fail.
    pub(crate) fn may_cut_drains(&self) -> bool {
        !self.strikes.iter().all(|fault| fault.costs_nothing())
    }

    /// No more faults from now on.
    pub(crate) fn heal(&mut self) {
        *self = Faults { counts: std::mem::take(&mut self.counts), ..Faults::none() };
    }
}
