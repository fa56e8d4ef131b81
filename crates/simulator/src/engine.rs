//! A worker's engine thread under virtual time: the core decides, the fake model computes, and time passes in between.
//!
//! Like a real one, the thread is busy while a step is launched or collected. Inputs that come meanwhile wait in its inbox.

use std::collections::VecDeque;

use baton_engine::fake::FakeModel;

use baton_engine::{CacheFeed, Engine, ModelRunner, NewSequence, RunError};
use baton_roles::{DrainInput, Effect, IDLE_TICK, Input, RoleCore, StepLaunch, WorkerCore};
use baton_types::{PoolGeometry, TokenOut};

use crate::Violation;
use crate::accounting::{Accounts, Held};
use crate::events::{Event, Place, Process};
use crate::exchange::Exchanging;
use crate::kept::Kept;
use crate::pool::{Blocks, Bytes};
use crate::stream::Micros;
use crate::world::World;

/// What the thread waits for.
enum Busy {
    /// The layers of a step are being stored, one after the other.
    Launching { launch: StepLaunch, layer: u32 },
    /// A step is being computed.
    Computing { step: u64, failed: Option<RunError> },
}

/// One worker's engine thread.
pub(crate) struct Thread<R: RoleCore> {
    pub core: WorkerCore<R>,
    model: FakeModel<Bytes>,
    layers: u32,
    busy: Option<Busy>,
    accounts: Accounts,
    /// What others are told of its prefix cache.
    pub feed: CacheFeed,
}

impl<R: RoleCore> Thread<R> {
    pub(crate) fn new(core: WorkerCore<R>, model: FakeModel<Bytes>, layers: u32) -> Thread<R> {
        Thread { core, model, layers, busy: None, accounts: Accounts::default(), feed: CacheFeed::default() }
    }
}

/// What prefill and decode workers do differently.
pub(crate) trait Host {
    type Role: RoleCore;
    fn process(place: Place) -> Process;
    fn thread(world: &mut World, place: Place) -> &mut Option<Thread<Self::Role>>;
    fn inbox(world: &mut World, place: Place) -> &mut VecDeque<Input<<Self::Role as RoleCore>::Command>>;
    /// Carries out an effect; returns its answer, if it has one.
    fn perform(
        world: &mut World,
        place: Place,
        effect: <Self::Role as RoleCore>::Effect,
    ) -> Result<Option<<Self::Role as RoleCore>::Command>, Violation>;
    /// Its own store.
    fn kept(world: &mut World, place: Place) -> &mut Option<Kept>;
    /// Its pool's bytes and shape.
    fn pool(world: &World, place: Place) -> (Bytes, PoolGeometry);
    /// Whether blocks of its pool hold the KV of these tokens ([`crate::pool::Memory::compare`]).
    fn compare(world: &World, place: Place, tokens: &[u32], first: &[u32], blocks: &Blocks) -> Result<(), String>;
    /// The sequence that a command brings, if it brings one.
    fn brings(command: &<Self::Role as RoleCore>::Command) -> Option<&NewSequence>;
    /// The streams of the prefixes that it moves.
    fn exchanging(world: &mut World, place: Place) -> &mut Exchanging;
    /// Tells whom an input is for, as the thread does when it takes one from its inbox.
    fn addressed(
        _: &WorkerCore<Self::Role>,
        input: Input<<Self::Role as RoleCore>::Command>,
    ) -> Input<<Self::Role as RoleCore>::Command> {
        input
    }
    /// Handles a stored layer. False while a write waits for room; it is then called again later.
    fn stored(world: &mut World, place: Place, launch: &mut StepLaunch, layer: u32) -> Result<bool, Violation>;
    /// Checks a step (I3) before it is launched.
    fn inspect(world: &mut World, place: Place, core: &mut WorkerCore<Self::Role>, step: u64) -> Result<(), Violation>;
}

impl World {
    /// Has a worker's engine thread look at its inbox soon.
    pub(crate) fn wake_engine(&mut self, process: Process) {
        let (at, life) = (self.soon(), self.life_of(process));
        self.events.plan(at, Event::EngineTurn { process, life });
    }

    pub(crate) fn engine_turn<H: Host>(&mut self, place: Place) -> Result<(), Violation> {
        let Some(mut thread) = H::thread(self, place).take() else { return Ok(()) };
        let turned = self.turn::<H>(place, &mut thread);
        let snapshot = thread.core.snapshot();
        if thread.busy.is_none() && !snapshot.idle {
            let (process, at) = (H::process(place), self.now + IDLE_TICK.as_micros() as Micros);
            self.events.plan(at, Event::EngineTurn { process, life: self.life_of(process) });
        }
        // What its disk has to do at its start, nobody else asks for.
        self.wake_store::<H>(place);
        // I6, at every step.
        self.look_at("I6");
        let checked = thread.core.engine().check().map_err(|error| self.violation("I6", error.to_string()));
        let Thread { core, accounts, busy, .. } = &mut thread;
        let stores = |seq| core.stores(seq);
        let held = Held::new(core.engine(), busy.is_some(), &stores);
        let counted = self.count(H::process(place), accounts, &held);
        let counted = counted.map_err(|what| self.violation("I6", format!("{}: {what}", H::process(place))));
        self.put_back::<H>(place, thread);
        turned.and(checked).and(counted)
    }

    /// Puts the thread back. If the core has ended the process meanwhile, another takes its place.
    fn put_back<H: Host>(&mut self, place: Place, thread: Thread<H::Role>) {
        if std::mem::take(&mut self.ended) {
            self.kill(H::process(place), true);
        } else {
            let held = thread.core.snapshot();
            *H::thread(self, place) = Some(thread);
            self.drain_on(H::process(place), DrainInput::Held(held));
        }
    }

    fn turn<H: Host>(&mut self, place: Place, thread: &mut Thread<H::Role>) -> Result<(), Violation> {
        loop {
            if thread.busy.is_some() {
                return Ok(());
            }
            while let Some(input) = H::inbox(self, place).pop_front() {
                let input = H::addressed(&thread.core, input);
                // What needs a prefix that is loaded comes after the load, and waits for it.
                if let Some(load) = self.load_for::<H>(place, &input) {
                    self.feed::<H>(place, thread, Input::Tiers(load))?;
                }
                self.feed::<H>(place, thread, input)?;
            }
            self.feed::<H>(place, thread, Input::Turn)?;
            if thread.busy.is_none() && H::inbox(self, place).is_empty() {
                return Ok(());
            }
        }
    }

    /// Feeds an input to the core and carries out what follows.
    fn feed<H: Host>(
        &mut self,
        place: Place,
        thread: &mut Thread<H::Role>,
        input: Input<<H::Role as RoleCore>::Command>,
    ) -> Result<(), Violation> {
        thread.core.feed(input, self.engine_now(H::process(place)));
        while let Some(effect) = thread.core.next_effect() {
            let answer = match effect {
                Effect::Role(effect) => H::perform(self, place, effect)?.map(Input::Command),
                Effect::Exchange(effect) => self.exchange_effect::<H>(place, effect)?.map(Input::Exchange),
                Effect::Tiers(effect) => self.tier_effect::<H>(place, effect)?.map(Input::Tiers),
                Effect::Launch(launch) => self.launch::<H>(place, thread, launch)?,
                Effect::Collect { step, tokens, failed } => {
                    let took = if failed.is_some() { 1 } else { self.pace.step(tokens, &mut self.random) };
                    thread.busy = Some(Busy::Computing { step, failed });
                    self.plan_engine_step::<H>(place, took);
                    None
                }
                Effect::Stepped(_) => None,
                Effect::Ended(_) => {
                    self.ended = true;
                    None
                }
            };
            if let Some(answer) = answer {
                thread.core.feed(answer, self.engine_now(H::process(place)));
            }
        }
        Ok(())
    }

    /// Launches a step. The model computes at once; its layers are reported one after the other.
    fn launch<H: Host>(
        &mut self,
        place: Place,
        thread: &mut Thread<H::Role>,
        launch: StepLaunch,
    ) -> Result<Option<Input<<H::Role as RoleCore>::Command>>, Violation> {
        let step = launch.step();
        let whole = launch.behind().map(|load| self.finish_load::<H>(place, load)).transpose()?;
        if whole == Some(false) {
            let outcome = Err(RunError("its prefix was damaged".into()));
            return Ok(Some(Input::Launched { launch, outcome }));
        }
        self.look_at("I3");
        H::inspect(self, place, &mut thread.core, step)?;
        self.inspect_store::<H>(place, &mut thread.core, step)?;
        if self.faults.strikes_step(&mut self.random) {
            let outcome = Err(RunError("simulated".into()));
            return Ok(Some(Input::Launched { launch, outcome }));
        }
        let Thread { core, model, .. } = thread;
        let launched = core.with_batch(step, |batch| {
            let follow = batch.rows.iter().filter(|row| row.follows.is_some()).count();
            let counts = [batch.copies.len(), follow];
            model.launch(batch, &mut |_| {}).map(|()| counts)
        });
        match launched {
            Some(Ok(counts)) => {
                let names = ["blocks copied", "rows of unknown tokens"];
                names.into_iter().zip(counts).for_each(|(name, count)| self.count_work(name, count as u64));
            }
            // The fake model rejects tables, positions and copies that cannot be right.
            Some(Err(error)) => return Err(self.violation("I1", format!("{}: {error}", H::process(place)))),
            None => return Err(self.violation("I1", format!("step {step} is launched and not planned"))),
        }
        thread.busy = Some(Busy::Launching { launch, layer: 0 });
        let took = self.pace.layer(&mut self.random);
        self.plan_engine_step::<H>(place, took);
        Ok(None)
    }

    fn plan_engine_step<H: Host>(&mut self, place: Place, after: Micros) {
        let process = H::process(place);
        let event = Event::EngineStep { process, life: self.life_of(process) };
        self.events.plan(self.now + after.max(1), event);
    }

    /// Continues a busy engine thread: what it waited for has happened.
    pub(crate) fn engine_step<H: Host>(&mut self, place: Place) -> Result<(), Violation> {
        let Some(mut thread) = H::thread(self, place).take() else { return Ok(()) };
        let done = self.step_on::<H>(place, &mut thread);
        let idle = thread.busy.is_none();
        self.put_back::<H>(place, thread);
        done?;
        if idle { self.engine_turn::<H>(place) } else { Ok(()) }
    }

    fn step_on<H: Host>(&mut self, place: Place, thread: &mut Thread<H::Role>) -> Result<(), Violation> {
        match thread.busy.take() {
            Some(Busy::Launching { mut launch, layer }) if layer < thread.layers => {
                let stored = H::stored(self, place, &mut launch, layer)?;
                let layer = layer + u32::from(stored);
                thread.busy = Some(Busy::Launching { launch, layer });
                let took = self.pace.layer(&mut self.random);
                self.plan_engine_step::<H>(place, took);
                Ok(())
            }
            Some(Busy::Launching { launch, .. }) => {
                self.feed::<H>(place, thread, Input::Launched { launch, outcome: Ok(()) })
            }
            Some(Busy::Computing { step, failed }) => {
                let input = self.collect(thread, step, failed)?;
                self.feed::<H>(place, thread, input)
            }
            None => Ok(()),
        }
    }

    fn count_work(&mut self, what: &'static str, count: u64) {
        *self.summary.engines.entry(what).or_default() += count;
    }

    /// Counts the work of the engines that are still alive.
    pub(crate) fn count_engines(&mut self) {
        let of = |engine: &Engine| {
            let hits = engine.prefix_hit_tokens();
            [engine.preemptions(), engine.evictions(), hits, engine.decoded_wasted()]
        };
        let engines = self.workers().filter_map(|process| Some(of(self.engine_of(process)?)));
        for counts in engines.collect::<Vec<_>>() {
            let names = ["preemptions", "evictions", "tokens found cached", "rows decoded for nothing"];
            names.into_iter().zip(counts).for_each(|(name, count)| self.count_work(name, count));
        }
    }

    fn collect<R: RoleCore>(
        &mut self,
        thread: &mut Thread<R>,
        step: u64,
        failed: Option<RunError>,
    ) -> Result<Input<R::Command>, Violation> {
        let lost = |world: &mut World| {
            let lost = world.random.chance(200);
            lost.then(|| RunError("simulated, for good".into()))
        };
        if let Some(error) = failed {
            return Ok(Input::Collected { outcome: Err(error), lost: lost(self) });
        }
        let (mut out, Thread { core, model, .. }) = (Vec::<TokenOut>::new(), thread);
        match core.with_batch(step, |batch| model.collect(batch, &mut out)) {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(self.violation("I1", error.to_string())),
            None => return Err(self.violation("I1", format!("step {step} is collected and not planned"))),
        }
        if self.faults.strikes_step(&mut self.random) {
            // The step fails, or a token is missing from it, which is as bad.
            if self.random.chance(300) && out.pop().is_some() {
                return Ok(Input::Collected { outcome: Ok(out), lost: None });
            }
            let error = RunError("simulated".into());
            return Ok(Input::Collected { outcome: Err(error), lost: lost(self) });
        }
        Ok(Input::Collected { outcome: Ok(out), lost: None })
    }
}
