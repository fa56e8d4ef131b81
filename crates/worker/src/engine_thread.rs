//! The dedicated thread that owns the engine and the model and runs steps; everything reaches it as commands.
//!
//! A model that computes on a device of its own has the next step launched behind the one that it computes, so that it never waits for
//! this thread: tokens are delivered, commands taken and the step after the next planned while it works.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use baton_engine::{BlockCounts, Engine, Event, ModelRunner, RunError, Step, SwapRates};
use baton_runtime::metrics as names;
use baton_types::TokenOut;
use metrics::{counter, gauge, histogram};
use tokio::sync::watch;

use crate::watchdog::{Call, Stall, Watchdog};
use crate::{Clock, WorkerError};

/// How long the thread sleeps when nothing can be computed but deadlines may pass.
const IDLE_TICK: Duration = Duration::from_millis(50);

/// What differs between a prefill and a decode worker. Called on the engine thread only; must not wait for the network.
pub trait Role: Send + 'static {
    /// What the services and the transfer threads tell it.
    type Command: Send + 'static;
    /// Handles a command. Events the engine returns go into `events`.
    fn command(&mut self, engine: &mut Engine, command: Self::Command, events: &mut Vec<Event>);
    /// Handles an event of the engine.
    fn event(&mut self, engine: &mut Engine, event: Event);
    /// A step is about to be launched.
    fn step_planned(&mut self, _engine: &Engine, _step: &Step) {}
    /// K and V of a layer are in the pool for all rows of the step, or will be before what is read from there from now on.
    fn layer_stored(&mut self, _layer: u32) {}
    /// All layers of the step were told of; its events follow, maybe after those of the step before it.
    fn step_done(&mut self, _engine: &mut Engine) {}
}

/// What the engine holds, after each step and command.
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
}

/// A way to the engine thread. The thread ends when nobody watches its snapshot any more, so when the last handle is gone, and when the
/// model can compute nothing any more.
///
/// The command queue itself has no limit: every command belongs to an open stream or an open handoff, and those are limited.
#[derive(Debug)]
pub struct EngineHandle<C> {
    commands: Commands<C>,
    snapshot: watch::Receiver<Snapshot>,
    stall: Stall,
}

/// Sends commands without keeping the thread alive: what the role itself and its callbacks hold.
#[derive(Debug)]
pub struct Commands<C>(Sender<C>);

impl<C> Clone for Commands<C> {
    fn clone(&self) -> Self {
        Commands(self.0.clone())
    }
}

impl<C> Commands<C> {
    /// Queues a command.
    ///
    /// # Errors
    /// When the thread is gone.
    pub fn send(&self, command: C) -> Result<(), WorkerError> {
        self.0.send(command).map_err(|_| WorkerError::EngineStopped)
    }
}

impl<C> Clone for EngineHandle<C> {
    fn clone(&self) -> Self {
        EngineHandle { commands: self.commands.clone(), snapshot: self.snapshot.clone(), stall: self.stall.clone() }
    }
}

impl<C> EngineHandle<C> {
    /// Queues a command.
    ///
    /// # Errors
    /// When the thread is gone.
    pub fn send(&self, command: C) -> Result<(), WorkerError> {
        self.commands.send(command)
    }

    /// What callbacks hold.
    pub fn commands(&self) -> Commands<C> {
        self.commands.clone()
    }

    /// Follows what the engine holds; closed when the thread is gone.
    pub fn snapshot(&self) -> watch::Receiver<Snapshot> {
        self.snapshot.clone()
    }

    /// Whether the thread waits for a device that stands still, and says nothing any more.
    pub(crate) fn stall(&self) -> &Stall {
        &self.stall
    }
}

/// Starts the thread. `make` gets a way to send the role commands, for callbacks of the transfer engine. A device that the model computes
/// on may take `timeout` for a step.
pub fn start<R: Role>(
    name: &str,
    engine: Engine,
    runner: Box<dyn ModelRunner>,
    clock: Clock,
    timeout: Duration,
    make: impl FnOnce(Commands<R::Command>) -> Result<R, WorkerError>,
) -> Result<EngineHandle<R::Command>, WorkerError> {
    let (commands, inbox) = channel();
    let (publish, snapshot) = watch::channel(Snapshot::default());
    let stall = Stall::default();
    let handle = EngineHandle { commands: Commands(commands), snapshot, stall: stall.clone() };
    let role = make(handle.commands())?;
    let prefills = PrefillRate::default();
    let (events, out, flights, last_end, lost) = (Vec::new(), Vec::new(), VecDeque::new(), None, None);
    let watchdog = Watchdog::start(runner.device(), timeout, stall.clone())?;
    let thread = Thread {
        engine,
        runner,
        role,
        inbox,
        publish,
        prefills,
        lost,
        events,
        out,
        flights,
        last_end,
        watchdog,
        stall,
    };
    std::thread::Builder::new().name(name.to_owned()).spawn(move || thread.run(clock))?;
    Ok(handle)
}

/// Tokens a second of steps that mostly prefill, the latest tokens counting most.
#[derive(Debug, Default)]
struct PrefillRate {
    tokens: f64,
    seconds: f64,
}

impl PrefillRate {
    /// Tokens after which what was measured before counts for a third.
    const MEMORY: f64 = 4096.0;

    fn add(&mut self, tokens: u64, took: Duration) -> u64 {
        let kept = (-(tokens as f64) / Self::MEMORY).exp();
        self.tokens = self.tokens * kept + tokens as f64;
        self.seconds = self.seconds * kept + took.as_secs_f64();
        (self.tokens / self.seconds.max(1e-9)) as u64
    }
}

struct Thread<R: Role> {
    engine: Engine,
    runner: Box<dyn ModelRunner>,
    role: R,
    inbox: Receiver<R::Command>,
    publish: watch::Sender<Snapshot>,
    prefills: PrefillRate,
    /// Why the model can compute nothing any more.
    lost: Option<RunError>,
    events: Vec<Event>,
    out: Vec<TokenOut>,
    /// At most two.
    flights: VecDeque<Flight>,
    /// When a step was collected last.
    last_end: Option<Instant>,
    watchdog: Watchdog,
    stall: Stall,
}

/// A step that was launched, or could not be.
struct Flight {
    step: Step,
    started: Instant,
    failed: Option<RunError>,
}

impl<R: Role> Thread<R> {
    fn run(mut self, clock: Clock) {
        let mut stuck = false;
        self.report();
        // Ends when nobody watches any more: the role holds a sender of its own, so the inbox alone never closes.
        // Nor does anybody listen to one whose device has stood still and goes on.
        while !self.publish.is_closed() && self.stall.get().is_none() {
            self.take_commands(stuck);
            self.launch(&clock);
            stuck = self.flights.is_empty();
            if let Some(flight) = self.flights.pop_front() {
                self.collect(flight);
            }
            self.report();
            if let Some(error) = self.lost.as_ref().filter(|_| self.flights.is_empty()) {
                // Who serves requests must be one that can: whoever started this worker starts another.
                tracing::error!(%error, "nothing can be computed any more; the worker ends");
                return;
            }
        }
    }

    /// Launches steps, as many as may be in flight.
    fn launch(&mut self, clock: &Clock) {
        let most = if self.runner.overlaps() { 2 } else { 1 };
        // What follows a step that was not launched has nothing to follow.
        let sound =
            |thread: &Self| thread.lost.is_none() && thread.flights.iter().all(|flight| flight.failed.is_none());
        while self.flights.len() < most && sound(self) {
            let planned = self.engine.plan(clock.now(), &mut self.events);
            // What the plan said (reservations, expiries) comes before what the step will say.
            self.dispatch();
            let Some(step) = planned else { return };
            let Thread { engine, runner, role, watchdog, .. } = self;
            let started = Instant::now();
            role.step_planned(engine, &step);
            let call = Call::Launch(step.number(), step.tokens());
            // It may wait for a peer, which has bounds of its own.
            let mut on_layer = |layer| watchdog.aside(|| role.layer_stored(layer));
            let launched =
                engine.with_batch(&step, |batch| watchdog.during(call, || runner.launch(batch, &mut on_layer)));
            role.step_done(engine);
            self.flights.push_back(Flight { step, started, failed: launched.err() });
        }
    }

    /// Waits for the first command when there is nothing else to do. The role holds a sender, so the inbox never closes.
    fn take_commands(&mut self, mut wait: bool) {
        loop {
            let next = if wait { self.inbox.recv_timeout(IDLE_TICK).ok() } else { self.inbox.try_recv().ok() };
            let Some(command) = next else { return };
            wait = false;
            self.role.command(&mut self.engine, command, &mut self.events);
            self.dispatch();
        }
    }

    fn dispatch(&mut self) {
        // A handler may abort sequences but adds no events.
        for event in self.events.drain(..) {
            self.role.event(&mut self.engine, event);
        }
    }

    fn collect(&mut self, Flight { step, started, failed }: Flight) {
        let Thread { engine, runner, out, events, prefills, lost, watchdog, .. } = self;
        out.clear();
        let call = Call::Collect(step.number(), step.tokens());
        let outcome = match failed {
            Some(error) => Err(error),
            None => engine.with_batch(&step, |batch| watchdog.during(call, || runner.collect(batch, out))),
        };
        // A row of one token that samples is a decode row, also when it is a prompt's last token.
        let decoded = step.rows().iter().filter(|row| row.samples && row.len == 1).count() as u64;
        let prefilled = u64::from(step.tokens()) - decoded;
        match outcome {
            Ok(()) => {
                engine.apply(step, out, events);
                counter!(names::PREFILL_TOKENS).increment(prefilled);
            }
            Err(error) => {
                tracing::error!(%error, "a step failed; its sequences end");
                engine.fail(step, error, events);
                *lost = watchdog.during(Call::Lost, || runner.lost());
            }
        }
        // It was computed behind the one before it.
        let ended = Instant::now();
        let took = ended - self.last_end.map_or(started, |last| last.max(started));
        self.last_end = Some(ended);
        // What computing again would cost: known once something was.
        if prefilled > decoded {
            let prefill_tokens_per_second = prefills.add(prefilled + decoded, took);
            let copy_bytes_per_second = engine.config().swap.rates.copy_bytes_per_second;
            engine.set_swap_rates(SwapRates { copy_bytes_per_second, prefill_tokens_per_second });
        }
        histogram!(names::STEP_SECONDS).record(took.as_secs_f64());
        self.dispatch();
    }

    fn report(&mut self) {
        let e = &self.engine;
        let blocks = e.counts();
        let running = e.running() + e.receiving() + e.held();
        let (waiting, kept) = (e.waiting(), e.kept_blocks());
        let now = Snapshot { running, waiting, blocks, kept, steps: e.steps(), idle: e.idle() };
        if *self.publish.borrow() == now {
            return;
        }
        gauge!(names::RUNNING).set(running as f64);
        gauge!(names::QUEUE_DEPTH).set(now.waiting as f64);
        gauge!(names::KEPT_BLOCKS).set(now.kept as f64);
        counter!(names::PREFIX_HIT_TOKENS).absolute(e.prefix_hit_tokens());
        counter!(names::CACHE_EVICTIONS).absolute(e.evictions());
        counter!(names::DECODE_TOKENS).absolute(e.decoded_tokens());
        counter!(names::DECODED_IN_VAIN).absolute(e.decoded_in_vain());
        counter!(names::PREEMPTIONS).absolute(e.preemptions());
        counter!(names::SWAPS).absolute(e.swaps());
        for (direction, blocks) in ["out", "in"].into_iter().zip(e.swapped_blocks()) {
            counter!(names::SWAPPED_BLOCKS, "direction" => direction).absolute(blocks);
        }
        let host = e.host_counts();
        for (state, count) in [("free", host.free), ("used", host.used)] {
            gauge!(names::SWAP_BLOCKS, "state" => state).set(count as f64);
        }
        for (state, count) in [
            ("free", blocks.free),
            ("used", blocks.used),
            ("cached", blocks.cached),
            ("lent", blocks.lent),
            ("quarantined", blocks.quarantined),
        ] {
            gauge!(names::KV_BLOCKS, "state" => state).set(count as f64);
        }
        // Last, so that whoever has seen it finds metrics no older.
        self.publish.send_replace(now);
    }
}

#[cfg(test)]
mod tests {
    use baton_engine::fake::tiny_layout;
    use baton_engine::{Batch, CacheConfig, EngineConfig, NewSequence, Order, Start, SwapConfig};
    use baton_types::{PoolGeometry, RequestId, SamplingParams};

    use super::*;

    /// Fails every step, and after so many for good.
    struct Failing(u32);

    impl ModelRunner for Failing {
        fn launch(&mut self, _: &Batch<'_>, _: &mut dyn FnMut(u32)) -> Result<(), RunError> {
            self.0 -= 1;
            Err(RunError("an illegal address".to_owned()))
        }

        fn collect(&mut self, _: &Batch<'_>, _: &mut Vec<TokenOut>) -> Result<(), RunError> {
            Ok(())
        }

        fn lost(&mut self) -> Option<RunError> {
            (self.0 == 0).then(|| RunError("an illegal address".to_owned()))
        }
    }

    /// Takes sequences and tells of those that failed.
    struct Telling(Sender<RequestId>);

    impl Role for Telling {
        type Command = NewSequence;

        fn command(&mut self, engine: &mut Engine, new: NewSequence, _: &mut Vec<Event>) {
            engine.submit(new).unwrap();
        }

        fn event(&mut self, _: &mut Engine, event: Event) {
            if let Event::Failed { request, .. } = event {
                self.0.send(request).unwrap();
            }
        }
    }

    #[test]
    fn a_failed_step_ends_its_sequences_and_one_that_cannot_be_followed_the_thread() {
        let limits = EngineConfig {
            token_budget: 16,
            chunk: 16,
            pack_tokens: 16,
            max_running: 2,
            max_waiting: 2,
            context_tokens: 64,
            local_tokens: 0,
            order: Order::Priority { overtakes: 2 },
            cache: CacheConfig::default(),
            swap: SwapConfig::default(),
        };
        let engine = Engine::new(limits, &PoolGeometry::uniform(tiny_layout(4), 30)).unwrap();
        let (tell, failed) = channel();
        let clock = Clock::start();
        let handle = start("engine", engine, Box::new(Failing(2)), clock, IDLE_TICK, |_| Ok(Telling(tell))).unwrap();
        for name in ["first", "second"] {
            let new = NewSequence {
                request: RequestId(name.to_owned()),
                tokens: vec![1, 2, 3],
                prompt_tokens: 3,
                params: SamplingParams { max_tokens: 1, ..SamplingParams::default() },
                start: Start::Compute,
                deadline: None,
                prefix: None,
                priority: 0,
            };
            handle.send(new).unwrap();
            assert_eq!(failed.recv().unwrap().0, name, "whoever asked is told");
        }
        assert!(failed.recv().is_err(), "the role is gone, though the handle is there");
        // Whoever watches is told; this ends.
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut snapshot = handle.snapshot();
        runtime.block_on(async { while snapshot.changed().await.is_ok() {} });
    }

    #[test]
    fn the_rate_of_prefills_follows_the_latest_tokens() {
        let (mut rate, second) = (PrefillRate::default(), Duration::from_secs(1));
        assert_eq!(rate.add(100, second), 100);
        // One step does not undo thousands of tokens, thousands of tokens do.
        assert_eq!([0; 10].map(|_| rate.add(1000, second))[9] / 100, 9);
        assert!((900..1000).contains(&rate.add(1, Duration::from_millis(100))));
        assert!([0; 40].map(|_| rate.add(1000, 10 * second))[39] <= 101);
        assert_eq!(PrefillRate::default().add(0, Duration::ZERO), 0);
    }
}
