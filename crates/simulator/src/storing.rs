//! Blocks that move between a simulated worker's pool and its own store ([`baton_roles::tiers`]): which prefix is loaded for a prompt, and what must
//! hold meanwhile (I2, I3).

use baton_engine::{BlockName, HOLE, NewSequence, Prefix as CacheKey};
use baton_roles::tiers::{Command, Effect, first_lacking, usable};
use baton_roles::{Input, RoleCore, WorkerCore, exchange};
use baton_types::{BlockId, RequestId, SeqId, Time, mix};

use crate::engine::Host;
use crate::events::{Event, Place, Process};
use crate::faults::Fault;
use crate::fetched::forget;
use crate::kept::{Done, Kept};
use crate::pool::{Blocks, each};
use crate::world::World;
use crate::{Sabotage, Violation};

/// Turns of a store after which a load that goes on is not going to end.
const MOST_TURNS: u32 = 100_000;

impl World {
    /// The store of a worker that starts, in runs that have stores. `before`: that of the process before it at this place.
    pub(crate) fn store_for(&self, life: u64, before: Option<Kept>) -> Option<Kept> {
        self.tiers_for(self.stores, life, before)
    }

    /// The tiers below the pool of a process that starts, if it `has` some.
    pub(crate) fn tiers_for(&self, has: bool, life: u64, before: Option<Kept>) -> Option<Kept> {
        let seed = mix(self.seed ^ 43).wrapping_add(life);
        let layout = &self.geometry.layout;
        let kept = has.then(|| match before {
            Some(before) => before.again(layout, seed),
            None => Kept::new(layout, seed),
        });
        let careless = self.broken(Sabotage::SkipStored);
        kept.map(|mut kept| {
            kept.careless = careless;
            kept
        })
    }

    /// What to load before this input, if it is a prompt or a prefix that is to be served.
    pub(crate) fn load_for<H: Host>(
        &mut self,
        place: Place,
        input: &Input<<H::Role as RoleCore>::Command>,
    ) -> Option<Command> {
        let (request_id, prefix, tokens) = match input {
            Input::Command(command) => {
                let NewSequence { request_id, prefix, tokens, params, .. } = H::brings(command)?;
                (request_id, prefix.filter(|_| params.prompt_logprobs.is_none())?, tokens)
            }
            Input::Exchange(exchange::Command::Serve { prefix, .. }) => {
                (&prefix.request_id, prefix.prefix, &prefix.tokens)
            }
            _ => return None,
        };
        self.load::<H>(place, request_id.clone(), prefix, tokens)
    }

    fn load<H: Host>(
        &mut self,
        place: Place,
        request_id: RequestId,
        prefix: CacheKey,
        tokens: &[u32],
    ) -> Option<Command> {
        let (now, size) = (self.engine_now(H::process(place)), self.geometry.layout.block_size);
        let kept = H::kept(self, place).as_mut()?;
        let names: Vec<BlockName> = prefix.root.chain(tokens, size).collect();
        let held = kept.held(&names);
        kept.seen(names, now);
        let most = held.len().min(tokens.len().saturating_sub(1) / size as usize);
        let blocks = usable(&self.geometry.layout, &held[..most]);
        if blocks == 0 {
            return None;
        }
        let tokens = tokens[..blocks * size as usize + 1].to_vec();
        // Often less than it takes.
        let most = if self.random.chance(500) { 2_000 } else { 200_000 };
        let deadline = Time(now.0 + 1000 * self.random.within(1, most));
        let prefix = Box::new(baton_engine::Exchange { request_id, tokens, prefix, deadline });
        Some(Command::Load { prefix, seconds: 0.0 })
    }

    /// Carries out an effect; returns its answer, if it has one.
    pub(crate) fn tier_effect<H: Host>(&mut self, place: Place, effect: Effect) -> Result<Option<Command>, Violation> {
        let size = self.geometry.layout.block_size;
        let Some(kept) = H::kept(self, place).as_mut() else { return Ok(None) };
        match effect {
            Effect::Offer(prefix) => {
                let moves = prefix.moves(size);
                let names: Vec<BlockName> = prefix.prefix.root.chain(&prefix.tokens[..moves as usize], size).collect();
                let held = kept.held(&names);
                let first = first_lacking(&self.geometry.layout, names.len(), &held);
                return Ok(first.map(|first| Command::Save(prefix, first)));
            }
            Effect::Returns(prefix) => {
                return Ok(self.load::<H>(place, prefix.request_id.clone(), prefix.prefix, &prefix.tokens));
            }
            Effect::Load(what) => {
                let alone = what.blocks.iter().enumerate().all(|(group, list)| {
                    let of = |block: &BlockId| (group, *block);
                    let taken = |at| kept.written.values().chain(kept.read.values()).any(|list| list.contains(&at));
                    !list.iter().map(of).any(taken)
                });
                let seq = what.seq;
                kept.begin(what, true);
                self.look_at("I3");
                if !alone {
                    let what = format!("{} loads into a block that is being copied", H::process(place));
                    return Err(self.violation("I3", what));
                }
                self.wake_store::<H>(place);
                // Where nothing else is to be computed, it need not be waited for.
                return Ok(Some(Command::Streams(seq)));
            }
            Effect::Save(what) => kept.begin(what, false),
            Effect::Warm(..) => {}
            Effect::Abort(seq) => kept.give_up(seq),
            Effect::Loaded { tokens, .. } => self.summary.stored_tokens += u64::from(tokens),
        }
        self.wake_store::<H>(place);
        Ok(None)
    }

    pub(crate) fn wake_store<H: Host>(&mut self, place: Place) {
        let Some(kept) = H::kept(self, place).as_mut().filter(|kept| !kept.idle()) else { return };
        if !std::mem::replace(&mut kept.awake, true) {
            let (process, at) = (H::process(place), self.soon());
            self.events.plan(at, Event::StoreTurn { process, life: self.life_of(process) });
        }
    }

    /// The threads of a worker's store go on.
    pub(crate) fn store_turn<H: Host>(&mut self, place: Place) -> Result<(), Violation> {
        let done = self.store_goes_on::<H>(place)?;
        self.wake_store::<H>(place);
        done.map_or(Ok(()), |done| self.copied::<H>(place, done))
    }

    /// A step waits for the layers of a load, which goes on until it is over. Whether all was loaded.
    pub(crate) fn finish_load<H: Host>(&mut self, place: Place, load: SeqId) -> Result<bool, Violation> {
        self.milestone("streamed", H::process(place));
        for _ in 0..MOST_TURNS {
            let Some(done) = self.store_goes_on::<H>(place)? else { continue };
            let ended = match &done {
                Done::Loaded(what, whole) if what.seq == load => Some(*whole),
                _ => None,
            };
            self.copied::<H>(place, done)?;
            if let Some(whole) = ended {
                return Ok(whole);
            }
        }
        Err(self.violation("I5", format!("a step of {} waits for a load that does not end", H::process(place))))
    }

    /// The threads of a worker's store do the next thing.
    fn store_goes_on<H: Host>(&mut self, place: Place) -> Result<Option<Done>, Violation> {
        let (process, faults) = (H::process(place), self.faults.store);
        let now = self.engine_now(process);
        let (bytes, geometry) = H::pool(self, place);
        let Some(kept) = H::kept(self, place).as_mut() else { return Ok(None) };
        kept.awake = false;
        kept.faults = faults;
        let done = kept.go_on(&bytes, &geometry, now);
        let (checked, struck) = (kept.check(), std::mem::take(&mut kept.struck));
        (0..struck).for_each(|_| self.faults.count(Fault::Store));
        checked.map_err(|what| self.violation("I6", format!("the store of {process}: {what}")))?;
        Ok(done)
    }

    /// A move of a worker's store is over.
    fn copied<H: Host>(&mut self, place: Place, done: Done) -> Result<(), Violation> {
        let (process, mut written) = (H::process(place), Vec::new());
        let command = match done {
            Done::Saved(seq) => Command::Saved(seq, None),
            Done::Loaded(what, whole) => {
                written = each(&what.blocks).collect();
                if whole {
                    let count = what.blocks.first().map_or(0, Vec::len) + what.first as usize;
                    let tokens = &what.prefix.tokens[..count * self.geometry.layout.block_size as usize];
                    let here = |list: &Vec<BlockId>| list.iter().copied().filter(|block| *block != HOLE).collect();
                    let blocks: Blocks = what.blocks.iter().map(here).collect();
                    self.look_at("I2");
                    let first = vec![what.first; blocks.len()];
                    let right = H::compare(self, place, tokens, &first, &blocks);
                    right.map_err(|what| self.violation("I2", format!("{process} has loaded a prefix: {what}")))?;
                    self.summary.stored += 1;
                    let again = H::kept(self, place).as_ref().is_some_and(|kept| kept.has_inherited(&what));
                    if again && matches!(process, Process::KvStore(_)) {
                        self.milestone("found-again", process);
                    }
                }
                Command::Loaded(what.seq, whole.then(Vec::new))
            }
        };
        forget(&mut self.receivers[process].fetched, written.into_iter());
        H::inbox(self, place).push_back(Input::Tiers(command));
        self.wake_engine(process);
        Ok(())
    }

    /// I3: no step touches a block that a load writes to, or writes to one that a save reads.
    pub(crate) fn inspect_store<H: Host>(
        &mut self,
        place: Place,
        core: &mut WorkerCore<H::Role>,
        step: u64,
    ) -> Result<(), Violation> {
        let size = self.geometry.layout.block_size as usize;
        let Some(kept) = H::kept(self, place).as_ref() else { return Ok(()) };
        let among = |of: &std::collections::BTreeMap<_, Vec<(usize, BlockId)>>, at: (usize, BlockId)| {
            of.values().any(|list| list.contains(&at))
        };
        let touched = core.with_batch(step, |batch| {
            let mut writes: Vec<_> = batch.copies.iter().map(|copy| (copy.group, copy.to)).collect();
            let mut reads = Vec::new();
            for row in batch.rows {
                let (from, to) = (row.start as usize / size, (row.start as usize + row.tokens.len()).div_ceil(size));
                for (group, table) in row.tables.iter().enumerate() {
                    let blocks = table.blocks().iter().map(|block| (group, *block));
                    writes.extend(blocks.clone().take(to).skip(from));
                    reads.extend(blocks);
                }
            }
            reads.extend(batch.copies.iter().map(|copy| (copy.group, copy.from)));
            let used = reads.iter().chain(&writes).filter(|(_, block)| *block != HOLE);
            let loaded = { used }.find(|at| among(&kept.written, **at)).map(|at| (*at, "loaded"));
            loaded.or_else(|| writes.iter().find(|at| among(&kept.read, **at)).map(|at| (*at, "saved")))
        });
        match touched.flatten() {
            Some(((group, block), what)) => {
                let process: Process = H::process(place);
                let what = format!("a step of {process} touches {block} of group {group}, which is being {what}");
                Err(self.violation("I3", what))
            }
            None => Ok(()),
        }
    }
}
