//! The step loop of a worker, the same for both roles: commands, plan, launch, collect, deliver.
//!
//! A model that computes on a device of its own has the next step launched behind the one that it computes, so that it never waits
//! for its driver: tokens are delivered, commands taken and the step after the next planned while it works.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::{Batch, BlockCounts, Engine, Event, RunError, Step, SwapRates, Time};
use baton_handoff::TransferError;
use baton_types::{KvLayout, SeqId, TokenOut};

use crate::launch::{Outgoing, StepLaunch};
use crate::rate::PrefillRate;
use crate::submit::Desk;

/// How long a worker with nothing to compute may go without a turn: deadlines pass meanwhile.
pub const IDLE_TICK: Duration = Duration::from_millis(50);

/// What differs between a prefill and a decode worker.
pub trait RoleCore {
    /// What services and the transfer engine tell it.
    type Command;
    /// What it wants done.
    type Effect;
    /// Handles a command.
    fn command(&mut self, desk: Desk<'_>, command: Self::Command, out: &mut Vec<Self::Effect>);
    /// Handles an event of the engine. May end sequences; adds no events.
    fn event(&mut self, engine: &mut Engine, event: Event, out: &mut Vec<Self::Effect>);
    /// The blocks that travel with a step.
    fn outgoing(&self, _engine: &Engine, _step: &Step) -> Vec<Outgoing> {
        Vec::new()
    }
    /// A handoff refused a write of the step that was just launched.
    fn refused(&mut self, _engine: &mut Engine, _seq: SeqId, _error: TransferError, _out: &mut Vec<Self::Effect>) {}
}

/// What happens to a worker.
#[derive(Debug)]
pub enum Input<C> {
    /// Of its role.
    Command(C),
    /// From now on it takes no new requests.
    Drain,
    /// Nothing is left to carry out: it may begin the next step.
    Turn,
    /// Answer to [`Effect::Launch`].
    Launched {
        /// The effect's.
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
    /// Of its role.
    Role(E),
    /// Launch this step.
    Launch(StepLaunch),
    /// Wait for the step that was launched first of those not collected.
    Collect {
        /// Its number.
        step: u64,
        /// Tokens it computes.
        tokens: u32,
        /// It could not be launched, for this reason: there is nothing to wait for, and only the model is to be asked whether it is lost.
        failed: Option<RunError>,
    },
    /// For metrics: a step is over.
    Stepped(StepDone),
    /// Nothing can be computed any more; the last effect.
    Ended(RunError),
}

/// What a step came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepDone {
    /// From its launch, or the end of the step before it, to its end.
    pub took: Duration,
    /// Prompt tokens it computed; 0 of a step that failed.
    pub prefilled: u64,
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
    /// No sequence and no block in use.
    pub idle: bool,
    /// It takes no new requests.
    pub draining: bool,
}

/// A step that was launched, or could not be.
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
    layout: Arc<KvLayout>,
    /// Most steps in flight.
    depth: usize,
    /// The oldest first.
    in_flight: VecDeque<StepInFlight>,
    /// When a step was collected last.
    last_end: Option<Time>,
    prefills: PrefillRate,
    /// Why the model can compute nothing any more.
    lost: Option<RunError>,
    draining: bool,
    waits: bool,
    events: Vec<Event>,
    role_effects: Vec<R::Effect>,
}

impl<R: RoleCore> WorkerCore<R> {
    /// An idle worker. `overlaps`: the model takes a second step while it computes one ([`baton_engine::ModelRunner::overlaps`]).
    pub fn new(engine: Engine, role: R, layout: Arc<KvLayout>, overlaps: bool) -> Self {
        WorkerCore {
            engine,
            role,
            layout,
            depth: if overlaps { 2 } else { 1 },
            in_flight: VecDeque::new(),
            last_end: None,
            prefills: PrefillRate::default(),
            lost: None,
            draining: false,
            waits: false,
            events: Vec::new(),
            role_effects: Vec::new(),
        }
    }

    /// Takes one input; appends what is to be done.
    pub fn step(&mut self, input: Input<R::Command>, now: Time, out: &mut Vec<Effect<R::Effect>>) {
        match input {
            Input::Command(command) => {
                let WorkerCore { engine, role, events, role_effects, draining, .. } = self;
                role.command(Desk { engine, events, draining: *draining }, command, role_effects);
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

    /// What it computes on: the batch of a step in flight, by its number. `None` when there is no such step.
    pub fn with_batch<T>(&mut self, step: u64, compute: impl FnOnce(&Batch<'_>) -> T) -> Option<T> {
        let launched = self.in_flight.iter().find(|launched| launched.step.number() == step)?;
        Some(self.engine.with_batch(&launched.step, compute))
    }

    /// The last turn found nothing to do: the next one is due after the next command, or after [`IDLE_TICK`].
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// The engine, for those who look.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The role, for those who look.
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

    /// Launches another step, where one more may be in flight and there is one; else waits for the first in flight.
    fn go_on(&mut self, now: Time, out: &mut Vec<Effect<R::Effect>>) {
        // What follows a step that was not launched has nothing to follow.
        self.waits = false;
        let sound = self.lost.is_none() && self.in_flight.iter().all(|launched| launched.failed.is_none());
        if sound && self.in_flight.len() < self.depth {
            let planned = self.engine.plan(now, &mut self.events);
            // What the plan said (reservations, expiries) comes before what the step will say.
            self.deliver(out);
            if let Some(step) = planned {
                return self.launch(step, now, out);
            }
        }
        let Some(launched) = self.in_flight.front() else {
            self.waits = true;
            return;
        };
        let (step, tokens) = (launched.step.number(), launched.step.tokens());
        out.push(Effect::Collect { step, tokens, failed: launched.failed.clone() });
    }

    fn launch(&mut self, step: Step, now: Time, out: &mut Vec<Effect<R::Effect>>) {
        let outgoing = self.role.outgoing(&self.engine, &step);
        let (layout, refused) = (Arc::clone(&self.layout), Vec::new());
        out.push(Effect::Launch(StepLaunch { step: step.number(), tokens: step.tokens(), layout, outgoing, refused }));
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
        // It was computed behind the one before it.
        let since = self.last_end.map_or(started, |last| last.max(started));
        let took = Duration::from_nanos(now.0.saturating_sub(since.0));
        self.last_end = Some(now);
        let failed = outcome.is_err();
        match outcome {
            Ok(mut tokens) => self.engine.apply(step, &mut tokens, &mut self.events),
            Err(error) => {
                tracing::error!(%error, "a step failed; its sequences end");
                self.engine.fail(step, error, &mut self.events);
                self.lost = lost;
            }
        }
        self.learn(prefilled, decoded, took);
        out.push(Effect::Stepped(StepDone { took, prefilled: if failed { 0 } else { prefilled } }));
        self.deliver(out);
        if let Some(error) = self.lost.clone().filter(|_| self.in_flight.is_empty()) {
            out.push(Effect::Ended(error));
        }
    }

    /// What computing again would cost: known once something was computed.
    fn learn(&mut self, prefilled: u64, decoded: u64, took: Duration) {
        if prefilled > decoded {
            let prefill_tokens_per_second = self.prefills.add(prefilled + decoded, took);
            let copy_bytes_per_second = self.engine.config().swap.rates.copy_bytes_per_second;
            self.engine.set_swap_rates(SwapRates { copy_bytes_per_second, prefill_tokens_per_second });
        }
    }

    /// Has the role handle the engine's events, and passes on what it wants done.
    fn deliver(&mut self, out: &mut Vec<Effect<R::Effect>>) {
        for event in self.events.drain(..) {
            self.role.event(&mut self.engine, event, &mut self.role_effects);
        }
        out.extend(self.role_effects.drain(..).map(Effect::Role));
    }
}
