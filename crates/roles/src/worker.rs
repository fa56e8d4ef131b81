//! The step loop of a worker, the same for both roles: take commands, plan, launch, collect, deliver.
//!
//! If the model computes on a device of its own, the next step is launched behind the one being computed, so that the
//! device never waits for its driver. While the device works, tokens are delivered, commands are taken, and the step
//! after the next is planned.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::{Batch, BlockCounts, Cached, Engine, Event, RunError, Step, Time};
use baton_handoff::TransferError;
use baton_latency::{Backlog, StepModel, StepWork};
use baton_types::{KvLayout, SeqId, TokenOut};

use crate::exchange::{self, Exchange, MOST_EXCHANGES};
use crate::launch::{Outgoing, StepLaunch};
use crate::load::{Load, Recent, backlog, work};
use crate::rate::PrefillRate;
use crate::submit::Desk;
use crate::tiers::{self, Tiers};
use crate::todo::Todo;

/// Longest time between two turns of a worker with nothing to compute: deadlines pass meanwhile.
pub const IDLE_TICK: Duration = Duration::from_millis(50);

/// What differs between a prefill and a decode worker.
pub trait RoleCore {
    /// Commands from services and the transfer engine.
    type Command;
    /// What the role wants done.
    type Effect;
    /// Handles a command.
    fn command(&mut self, desk: Desk<'_>, command: Self::Command, out: &mut Vec<Self::Effect>);
    /// Handles an event of the engine. May end sequences; adds no events.
    fn event(&mut self, engine: &mut Engine, event: Event, out: &mut Vec<Self::Effect>);
    /// The blocks that travel to peers as the step stores them.
    fn outgoing(&self, _engine: &Engine, _step: &Step) -> Vec<Outgoing> {
        Vec::new()
    }
    /// A handoff refused a write of the step that was just launched.
    fn refused(&mut self, _engine: &mut Engine, _seq: SeqId, _error: TransferError, _out: &mut Vec<Self::Effect>) {}
}

/// Input to a worker.
#[derive(Debug)]
pub enum Input<C> {
    /// A command to its role.
    Command(C),
    /// A command about prefixes that move between workers.
    Exchange(exchange::Command),
    /// A command about blocks that move between the pool and the worker's store.
    Tiers(tiers::Command),
    /// From now on it takes no new requests.
    Drain,
    /// The worker may begin the next step.
    Turn,
    /// Answer to [`Effect::Launch`].
    Launched {
        /// The launch that the effect carried.
        launch: StepLaunch,
        /// What the model said.
        outcome: Result<(), RunError>,
    },
    /// Answer to [`Effect::Collect`].
    Collected {
        /// The step's tokens, or why there are none.
        outcome: Result<Vec<TokenOut>, RunError>,
        /// With an error: why the model can compute nothing any more.
        lost: Option<RunError>,
    },
}

/// What a worker wants done.
#[derive(Debug)]
pub enum Effect<E> {
    /// An effect of its role.
    Role(E),
    /// An effect of prefixes that move between workers.
    Exchange(exchange::Effect),
    /// An effect of blocks that move between the pool and the worker's store.
    Tiers(tiers::Effect),
    /// Launch this step.
    Launch(StepLaunch),
    /// Wait for the oldest step that was launched and not collected.
    Collect {
        /// Its number.
        step: u64,
        /// Tokens it computes.
        tokens: u32,
        /// Why it could not be launched, if so. There is nothing to wait for then; only ask the model whether it is
        /// lost.
        failed: Option<RunError>,
    },
    /// For metrics: a step is over.
    Stepped(StepDone),
    /// Nothing can be computed any more; the last effect.
    Ended(RunError),
}

/// Result of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepDone {
    /// From its launch, or from the end of the previous step if that is later, to its end.
    pub took: Duration,
    /// Prompt tokens it computed; 0 if it failed.
    pub prefilled: u64,
    /// What it computed; nothing if it failed.
    pub work: StepWork,
    /// Tokens whose logits it computed.
    pub sampled: u64,
}

/// What the engine holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Snapshot {
    /// Sequences in the batch, receiving or held.
    pub running: u32,
    /// Sequences in the queue.
    pub waiting: u32,
    /// Blocks by state.
    pub blocks: BlockCounts,
    /// Blocks of tokens that the prefix cache was asked to keep.
    pub kept: u32,
    /// Steps so far.
    pub steps: u64,
    /// No sequence is here and no block is in use.
    pub idle: bool,
    /// It takes no new requests.
    pub draining: bool,
}

/// A step that was launched, or whose launch failed.
#[derive(Debug)]
struct StepInFlight {
    step: Step,
    started: Time,
    failed: Option<RunError>,
}

/// A worker without its model, its sockets and its clock. See the crate's documentation for the order of calls.
#[derive(Debug)]
pub struct WorkerCore<R: RoleCore> {
    engine: Engine,
    role: R,
    exchange: Exchange,
    tiers: Tiers,
    /// Prefixes to serve once these loads have brought them.
    loading: Vec<(SeqId, exchange::Command)>,
    layout: Arc<KvLayout>,
    /// Most steps in flight.
    depth: usize,
    /// The oldest first.
    in_flight: VecDeque<StepInFlight>,
    /// When the latest step was collected.
    last_end: Option<Time>,
    prefills: PrefillRate,
    /// What steps cost.
    steps: StepModel,
    recent: Recent,
    /// Why the model can compute nothing any more.
    lost: Option<RunError>,
    draining: bool,
    waits: bool,
    events: Vec<Event>,
    role_effects: Vec<R::Effect>,
    exchange_effects: Vec<exchange::Effect>,
    tier_effects: Vec<tiers::Effect>,
    todo: Todo<Effect<R::Effect>>,
}

impl<R: RoleCore> WorkerCore<R> {
    /// An idle worker that lends blocks to peers for `lease` at most. `overlaps`: the model takes a second step while it computes one ([`baton_engine::ModelRunner::overlaps`]).
    pub fn new(engine: Engine, role: R, layout: Arc<KvLayout>, lease: Duration, overlaps: bool) -> Self {
        WorkerCore {
            engine,
            role,
            exchange: Exchange::new(lease),
            tiers: Tiers::default(),
            loading: Vec::new(),
            layout,
            depth: if overlaps { 2 } else { 1 },
            in_flight: VecDeque::new(),
            last_end: None,
            prefills: PrefillRate::default(),
            steps: StepModel::default(),
            recent: Recent::default(),
            lost: None,
            draining: false,
            waits: false,
            events: Vec::new(),
            role_effects: Vec::new(),
            exchange_effects: Vec::new(),
            tier_effects: Vec::new(),
            todo: Todo::new(),
        }
    }

    /// Tells of the model how large the share of a token's operations is that it does for a pair of tokens: what steps cost is learned with it.
    #[must_use]
    pub fn with_pair_share(mut self, share: f64) -> Self {
        self.steps = StepModel::of(share);
        self
    }

    /// Takes one input. Its effects come before those that [`Self::next_effect`] has not returned yet: an input that comes
    /// while some are left is the answer of the latest one.
    pub fn feed(&mut self, input: Input<R::Command>, now: Time) {
        let mut effects = self.todo.buffer();
        self.step(input, now, &mut effects);
        self.todo.put_first(effects);
    }

    /// The next effect to carry out. Its answer, if it has one, is fed before this is called again.
    pub fn next_effect(&mut self) -> Option<Effect<R::Effect>> {
        self.todo.next()
    }

    /// Handles one input and appends the effects that follow from it.
    fn step(&mut self, input: Input<R::Command>, now: Time, out: &mut Vec<Effect<R::Effect>>) {
        match input {
            Input::Command(command) => {
                let WorkerCore { engine, role, events, role_effects, draining, .. } = self;
                role.command(Desk { engine, events, draining: *draining }, command, role_effects);
                self.deliver(out);
            }
            Input::Exchange(command) => {
                if let Some(load) = self.load_before(&command) {
                    // It must be found as soon as its load has ended.
                    self.engine.streams_no_more(load);
                    self.loading.push((load, command));
                    return;
                }
                self.exchange_command(command);
                self.deliver(out);
            }
            Input::Tiers(command) => {
                let (cost, step) = (self.steps.cost(), self.engine.config().token_budget);
                let computes = |from: u32, to: u32| {
                    cost.prompts(&StepWork::default().with_prompt(from.into(), to.into()), step.into())
                };
                let WorkerCore { engine, tiers, loading, events, tier_effects, draining, .. } = self;
                if let tiers::Command::Streams(load) = command
                    && loading.iter().any(|(awaited, _)| *awaited == load)
                {
                    return;
                }
                tiers.command(Desk { engine, events, draining: *draining }, command, computes, now, tier_effects);
                self.deliver(out);
            }
            Input::Drain => self.draining = true,
            Input::Turn => self.go_on(now, out),
            Input::Launched { launch, outcome } => {
                for (seq, error) in launch.refused {
                    self.role.refused(&mut self.engine, seq, error, &mut self.role_effects);
                }
                self.deliver(out);
                if let Some(launched) = self.in_flight.back_mut() {
                    launched.failed = outcome.err();
                }
                self.go_on(now, out);
            }
            Input::Collected { outcome, lost } => self.collected(outcome, lost, now, out),
        }
    }

    fn exchange_command(&mut self, command: exchange::Command) {
        let WorkerCore { engine, exchange, layout, events, exchange_effects, draining, .. } = self;
        exchange.command(Desk { engine, events, draining: *draining }, layout, command, exchange_effects);
    }

    /// The load that has to end before a prefix can be served, if not all of it is here, and not too many wait already (I5).
    fn load_before(&self, command: &exchange::Command) -> Option<SeqId> {
        let exchange::Command::Serve { prefix, .. } = command else { return None };
        let size = self.engine.block_size();
        let waits = self.engine.here(&prefix.prefix, &prefix.tokens) < prefix.moves(size);
        self.tiers.brings(prefix, size).filter(|_| waits && self.loading.len() < MOST_EXCHANGES)
    }

    /// Serves what waited for loads that have ended, however they ended.
    fn go_on_serving(&mut self) {
        let tiers = &self.tiers;
        let ended: Vec<_> = self.loading.extract_if(.., |(load, _)| !tiers.owns(*load)).collect();
        ended.into_iter().for_each(|(_, command)| self.exchange_command(command));
    }

    /// Passes to `compute` the batch of the step in flight with this number. `None` when there is no such step.
    pub fn with_batch<T>(&mut self, step: u64, compute: impl FnOnce(&Batch<'_>) -> T) -> Option<T> {
        let launched = self.in_flight.iter().find(|launched| launched.step.number() == step)?;
        Some(self.engine.with_batch(&launched.step, compute))
    }

    /// Whether the last turn found nothing to do. The next one is then due after the next command, or after
    /// [`IDLE_TICK`].
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// The engine, to look at.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Passes on, in order, which blocks entered and left the prefix cache since the last call.
    pub fn take_cache_changes(&mut self) -> impl Iterator<Item = Cached> {
        self.engine.take_cache_changes()
    }

    /// Prefixes that move between workers, to look at.
    pub fn exchange(&self) -> &Exchange {
        &self.exchange
    }

    /// Whether this is a sequence whose blocks move between the pool and the worker's store.
    pub fn stores(&self, seq: SeqId) -> bool {
        self.tiers.owns(seq)
    }

    /// The role, to look at.
    pub fn role(&self) -> &R {
        &self.role
    }

    /// What the engine holds now.
    pub fn snapshot(&self) -> Snapshot {
        let e = &self.engine;
        Snapshot {
            running: e.running() + e.receiving() + e.held(),
            waiting: e.waiting(),
            blocks: e.counts(),
            kept: e.kept_blocks(),
            steps: e.steps(),
            idle: e.idle(),
            draining: self.draining,
        }
    }

    /// What steps cost, and how well that predicts them.
    pub fn steps(&self) -> &StepModel {
        &self.steps
    }

    /// What it has to do now.
    pub fn load(&self, now: Time) -> Load {
        let (queued_tokens, rate) = (self.engine.queued_tokens(), self.prefills.get());
        let ahead = if rate == 0 { 0.0 } else { queued_tokens as f64 / rate as f64 };
        let ahead = Duration::from_secs_f64(ahead);
        let mut load = Load { queued_tokens, ahead, ..Load::default() };
        self.recent.measure(&mut load, now);
        load
    }

    /// What it has to do, and what that costs, for who chooses workers.
    pub fn backlog(&self) -> Backlog {
        backlog(&self.engine, self.steps.cost())
    }

    /// Launches another step if one more may be in flight and one can be planned. Otherwise waits for the oldest in
    /// flight.
    fn go_on(&mut self, now: Time, out: &mut Vec<Effect<R::Effect>>) {
        // Nothing is launched behind a step whose launch failed: there would be nothing to follow.
        self.waits = false;
        let mut asked = false;
        let sound = self.lost.is_none() && self.in_flight.iter().all(|launched| launched.failed.is_none());
        if sound && self.in_flight.len() < self.depth {
            self.engine.set_pairs_per_token(self.steps.cost().pairs_per_token());
            let planned = self.engine.plan(now, &mut self.events);
            asked = self.engine.is_asking();
            // Events of the plan (reservations, expiries) are delivered before those of the step.
            self.deliver(out);
            if let Some(step) = planned {
                return self.launch(step, now, out);
            }
        }
        let Some(launched) = self.in_flight.front() else {
            self.waits = !asked;
            return;
        };
        let (step, tokens) = (launched.step.number(), launched.step.tokens());
        out.push(Effect::Collect { step, tokens, failed: launched.failed.clone() });
    }

    fn launch(&mut self, step: Step, now: Time, out: &mut Vec<Effect<R::Effect>>) {
        let outgoing = self.role.outgoing(&self.engine, &step);
        let (layout, refused, behind) = (Arc::clone(&self.layout), Vec::new(), step.behind());
        behind.into_iter().for_each(|load| self.tiers.joined(load, self.engine.block_size()));
        let (number, tokens) = (step.number(), step.tokens());
        out.push(Effect::Launch(StepLaunch { step: number, tokens, behind, layout, outgoing, refused }));
        self.in_flight.push_back(StepInFlight { step, started: now, failed: None });
    }

    fn collected(
        &mut self,
        outcome: Result<Vec<TokenOut>, RunError>,
        lost: Option<RunError>,
        now: Time,
        out: &mut Vec<Effect<R::Effect>>,
    ) {
        let Some(StepInFlight { step, started, .. }) = self.in_flight.pop_front() else { return };
        // A row of one token that samples is a decode row, also when it is a prompt's last token.
        let decoded = step.rows().iter().filter(|row| row.samples && row.len == 1).count() as u64;
        let prefilled = u64::from(step.tokens()) - decoded;
        // The first token of an answer follows from a prompt.
        let answered = step.rows().iter().filter(|row| row.samples && row.index > 0).count() as u64;
        // The step was computed behind the previous one, so its time begins no earlier than that one's end.
        let since = self.last_end.map_or(started, |last| last.max(started));
        let took = Duration::from_nanos(now.0.saturating_sub(since.0));
        self.last_end = Some(now);
        let (failed, behind) = (outcome.is_err(), step.behind().is_some());
        let done = match failed {
            true => StepDone { took, ..StepDone::default() },
            false => {
                let sampled = step.rows().iter().filter(|row| row.samples).count() as u64;
                let work = work(&step);
                match step.behind() {
                    // It has waited for other than its work.
                    Some(_) => StepDone { took, prefilled, ..StepDone::default() },
                    None => {
                        self.steps.add(&work, took);
                        StepDone { took, prefilled, work, sampled }
                    }
                }
            }
        };
        match outcome {
            Ok(mut tokens) => self.engine.apply(step, &mut tokens, &mut self.events),
            Err(error) => {
                match step.behind().filter(|_| lost.is_none()) {
                    Some(_) => tracing::warn!(%error, "a step behind a load failed; its sequence ends"),
                    None => tracing::error!(%error, "a step failed; its sequences end"),
                }
                self.engine.fail(step, error, &mut self.events);
                self.lost = lost;
            }
        }
        if prefilled > decoded && !behind {
            self.prefills.add(prefilled + decoded, took);
        }
        self.recent.add(answered, prefilled > 0, took, now);
        out.push(Effect::Stepped(done));
        self.deliver(out);
        if let Some(error) = self.lost.clone().filter(|_| self.in_flight.is_empty()) {
            out.push(Effect::Ended(error));
        }
    }

    /// Has the role handle the engine's events, and passes on the role's effects.
    fn deliver(&mut self, out: &mut Vec<Effect<R::Effect>>) {
        for event in self.events.drain(..) {
            if self.exchange.owns(event.seq()) {
                self.exchange.event(&mut self.engine, event, &mut self.exchange_effects);
            } else if self.tiers.owns(event.seq()) {
                self.tiers.event(&mut self.engine, event, &mut self.tier_effects);
            } else {
                self.role.event(&mut self.engine, event, &mut self.role_effects);
            }
        }
        self.go_on_serving();
        out.extend(self.tier_effects.drain(..).map(Effect::Tiers));
        out.extend(self.exchange_effects.drain(..).map(Effect::Exchange));
        out.extend(self.role_effects.drain(..).map(Effect::Role));
        let returning = self.engine.take_returning().into_iter();
        out.extend(returning.map(|wanted| Effect::Tiers(tiers::Effect::Returns(Box::new(wanted)))));
        // After what the end of a sequence leads to.
        out.extend(
            self.engine.take_ended().into_iter().map(|ended| Effect::Tiers(tiers::Effect::Offer(Box::new(ended)))),
        );
    }
}
