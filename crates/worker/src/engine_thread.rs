//! The thread that owns a worker's core and its model. Everything reaches it as messages.
//!
//! The core ([`baton_roles::WorkerCore`]) decides what is done and when. This module adds the clock, the calls of the model, and the
//! [`Shell`], which carries out the role's effects.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use baton_engine::{Batch, Exchange as Prefix, ModelRunner, NewSequence, RunError};
use baton_roles::{Effect, IDLE_TICK, Input, RoleCore, Snapshot, StepLaunch, WorkerCore, Write};
use baton_runtime::metrics as names;
use baton_transfer::{ReceiverEvent, TransferError};
use baton_types::Decoding;
use metrics::{counter, histogram};
use tokio::sync::{oneshot, watch};

use crate::achieved::Achieved;
use crate::behind::launch_behind;
use crate::columns::{Columns, Look};
use crate::exchange::{self, ExchangeShell};
use crate::report::{Reporter, Told};
use crate::tiers::{Loading, TiersShell};
use crate::watchdog::{Call, Stall, Watchdog};
use crate::{Clock, WorkerError};

/// The part around a role's core: the requests' streams and the transfer engine. Its methods are called only on the engine thread and
/// must not wait for the network.
pub trait Shell: Send + 'static {
    /// The role it serves.
    type Role: RoleCore<Command: Send, Effect: Send> + Send + 'static;
    /// Messages from services, streams and transfer threads.
    type Command: Send + 'static;
    /// Keeps the parts of a command that belong to the shell (streams, handoffs) and returns the rest for the core.
    fn command(&mut self, command: Self::Command) -> <Self::Role as RoleCore>::Command;
    /// Carries out an effect of the core; returns its answer, if it has one.
    fn perform(&mut self, effect: <Self::Role as RoleCore>::Effect) -> Option<<Self::Role as RoleCore>::Command>;
    /// The sequence that a command brings, if it brings one.
    fn brings(_command: &Self::Command) -> Option<&NewSequence> {
        None
    }
    /// Returns what the role makes of an event of the worker's receiving end, if it lends blocks.
    fn received(&mut self, _event: ReceiverEvent) -> Option<<Self::Role as RoleCore>::Command> {
        None
    }
    /// Gives one layer of some blocks to a handoff.
    fn write(&mut self, write: Write<'_>) -> Result<(), TransferError>;
}

/// A message to the thread.
pub(crate) enum Message<C> {
    Command(C),
    /// About prefixes that move between workers.
    Exchange(exchange::Message<C>),
    /// About blocks that move between the pool and the worker's store.
    Tiers(baton_roles::tiers::Command),
    /// From the receiving end of handoffs.
    Received(ReceiverEvent),
    /// A prefix that a prompt may need soon: it is loaded if only the worker's store has it. Whoever asks is told that it was heard.
    Recall(Box<Prefix>, oneshot::Sender<()>),
    /// Somebody wants to see KV.
    Look(Look),
    /// Accept no new requests from now on.
    Drain,
}

/// A handle of the engine thread. The thread ends when the last receiver of its snapshot is dropped (the last handle has one), or when
/// the model can compute nothing any more.
///
/// The command queue has no limit of its own: every command belongs to an open stream or an open handoff, and those are limited.
#[derive(Debug)]
pub struct EngineHandle<C> {
    commands: Commands<C>,
    snapshot: watch::Receiver<Snapshot>,
    stall: Stall,
}

/// Sends commands without keeping the thread alive. The shell and its callbacks hold this.
#[derive(Debug)]
pub struct Commands<C>(Sender<Message<C>>);

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
        self.post(Message::Command(command))
    }

    /// Queues a message.
    ///
    /// # Errors
    /// When the thread is gone.
    pub(crate) fn post(&self, message: Message<C>) -> Result<(), WorkerError> {
        self.0.send(message).map_err(|_| WorkerError::EngineStopped)
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

    /// Starts the drain. New requests are refused from the first snapshot with `draining` set.
    pub(crate) fn drain(&self) {
        // A thread that has ended accepts no requests anyway.
        let _ = self.commands.post(Message::Drain);
    }

    /// Queues a message.
    ///
    /// # Errors
    /// When the thread is gone.
    pub(crate) fn post(&self, message: Message<C>) -> Result<(), WorkerError> {
        self.commands.post(message)
    }

    /// A sender for callbacks.
    pub fn commands(&self) -> Commands<C> {
        self.commands.clone()
    }

    /// Snapshots of what the engine holds; the channel closes when the thread ends.
    pub fn snapshot(&self) -> watch::Receiver<Snapshot> {
        self.snapshot.clone()
    }

    /// Tells whether the thread is blocked on a device that stands still.
    pub(crate) fn stall(&self) -> &Stall {
        &self.stall
    }
}

/// The thread's end of its handle, before it runs.
pub(crate) struct Inbox<C> {
    messages: Receiver<Message<C>>,
    snapshot: watch::Sender<Snapshot>,
    stall: Stall,
}

/// A handle, and what the thread needs to hear of it.
pub(crate) fn channels<C>() -> (EngineHandle<C>, Inbox<C>) {
    let (commands, messages) = channel();
    let (publish, snapshot) = watch::channel(Snapshot::default());
    let stall = Stall::default();
    let inbox = Inbox { messages, snapshot: publish, stall: stall.clone() };
    (EngineHandle { commands: Commands(commands), snapshot, stall }, inbox)
}

/// The parts of a worker that carry out what its core asks for.
pub(crate) struct Shells<S: Shell> {
    /// For the role.
    pub role: S,
    /// For prefixes that move between workers. `None`: this worker has none, as in tests.
    pub exchange: Option<ExchangeShell<S::Command>>,
    /// For the worker's store, if it has one.
    pub tiers: Option<TiersShell>,
    /// For people who look at KV. `None`: nobody can.
    pub columns: Option<Columns>,
    /// Counts what steps achieve. `None`: nobody counts.
    pub achieved: Option<Achieved>,
    /// Where it says whether answers are decoded on the processors of this process.
    pub decoding: Decoding,
}

/// Starts the thread. `timeout` is the longest time that a step may take; by default what suits the model's device. Others hear of it through
/// `told`.
pub(crate) fn start<S: Shell>(
    core: WorkerCore<S::Role>,
    runner: Box<dyn ModelRunner>,
    clock: Clock,
    timeout: Option<Duration>,
    told: Told,
    inbox: Inbox<S::Command>,
    shells: Shells<S>,
) -> Result<(), WorkerError> {
    let Inbox { messages, snapshot, stall } = inbox;
    let watchdog = Watchdog::start(runner.device(), timeout, stall.clone())?;
    let reporter = Reporter { snapshot, told };
    let Shells { role: shell, exchange, tiers, columns, achieved, decoding } = shells;
    let thread = Thread {
        core,
        runner,
        shell,
        exchange,
        tiers,
        columns,
        achieved,
        decoding,
        inbox: messages,
        reporter,
        watchdog,
        stall,
        clock,
        ended: false,
    };
    std::thread::Builder::new().name("engine".to_owned()).spawn(move || thread.run())?;
    Ok(())
}

struct Thread<S: Shell> {
    core: WorkerCore<S::Role>,
    runner: Box<dyn ModelRunner>,
    shell: S,
    exchange: Option<ExchangeShell<S::Command>>,
    tiers: Option<TiersShell>,
    columns: Option<Columns>,
    achieved: Option<Achieved>,
    decoding: Decoding,
    inbox: Receiver<Message<S::Command>>,
    reporter: Reporter,
    watchdog: Watchdog,
    stall: Stall,
    clock: Clock,
    ended: bool,
}

type In<S> = Input<<<S as Shell>::Role as RoleCore>::Command>;
type Out<S> = Effect<<<S as Shell>::Role as RoleCore>::Effect>;

impl<S: Shell> Thread<S> {
    fn run(mut self) {
        self.reporter.report(&self.core);
        // The snapshot channel ends the loop: the shell holds a sender of its own, so the inbox alone never closes.
        // After a stall the loop ends too: the streams were already told, so nobody would hear of further steps.
        while !self.reporter.snapshot.is_closed() && self.stall.get().is_none() && !self.ended {
            self.take_messages();
            // Before the step, which may take long: a worker that has taken a request must not look idle meanwhile.
            self.reporter.report(&self.core);
            self.reporter.report_load(&self.core, self.clock.now());
            self.feed(Input::Turn);
            self.reporter.report(&self.core);
            self.reporter.report_cache(&mut self.core);
            self.tiers.iter_mut().for_each(TiersShell::count);
        }
    }

    /// Feeds all queued messages to the core. With nothing else to do, waits up to [`IDLE_TICK`] for the first.
    fn take_messages(&mut self) {
        let mut wait = self.core.waits();
        if wait {
            self.decoding.set(false);
        }
        loop {
            let next = if wait { self.inbox.recv_timeout(IDLE_TICK).ok() } else { self.inbox.try_recv().ok() };
            let Some(message) = next else { return };
            wait = false;
            // What needs a prefix that is loaded comes after the load, and waits for it.
            if let Some(load) = self.tiers.as_ref().and_then(|tiers| load_for::<S>(tiers, &message)) {
                self.feed(Input::Tiers(load));
            }
            if let Some(input) = self.input(message) {
                self.feed(input);
            }
        }
    }

    /// What a message means to the core.
    fn input(&mut self, message: Message<S::Command>) -> Option<In<S>> {
        match message {
            Message::Command(command) => Some(Input::Command(self.shell.command(command))),
            Message::Exchange(message) => Some(Input::Exchange(self.exchange.as_mut()?.command(message))),
            Message::Tiers(command) => {
                let tiers = self.tiers.as_mut()?;
                match command {
                    baton_roles::tiers::Command::Loaded(seq, _) => tiers.loaded(seq),
                    baton_roles::tiers::Command::Saved(seq, _) => tiers.saved(seq),
                    _ => {}
                }
                Some(Input::Tiers(command))
            }
            Message::Received(event) => self.received(event),
            Message::Look(look) => {
                if let Some(columns) = &self.columns {
                    columns.answer(look, self.core.engine());
                }
                None
            }
            // What there is to load was begun before ([`load_for`]).
            Message::Recall(_, heard) => {
                let _ = heard.send(());
                None
            }
            Message::Drain => Some(Input::Drain),
        }
    }

    /// What the core makes of an event of the receiving end.
    fn received(&mut self, event: ReceiverEvent) -> Option<In<S>> {
        self.exchange.iter().for_each(ExchangeShell::count);
        match event {
            event if self.core.exchange().knows(event.epoch()) => {
                Some(Input::Exchange(baton_roles::exchange::Command::Received(event)))
            }
            event => self.shell.received(event).map(Input::Command),
        }
    }

    /// Feeds an input to the core and carries out what follows.
    fn feed(&mut self, input: In<S>) {
        self.core.feed(input, self.clock.now());
        while let Some(effect) = self.core.next_effect() {
            if let Some(answer) = self.perform(effect) {
                self.core.feed(answer, self.clock.now());
            }
        }
    }

    fn perform(&mut self, effect: Out<S>) -> Option<In<S>> {
        match effect {
            Effect::Role(effect) => return self.shell.perform(effect).map(Input::Command),
            Effect::Exchange(effect) => return self.exchange.as_mut()?.perform(effect).map(Input::Exchange),
            Effect::Tiers(effect) => return self.tiers.as_mut()?.perform(effect).map(Input::Tiers),
            Effect::Launch(launch) => return Some(self.launch(launch)),
            Effect::Collect { step, tokens, failed } => return Some(self.collect(step, tokens, failed)),
            Effect::Stepped(stepped) => {
                counter!(names::PREFILL_TOKENS).increment(stepped.prefilled);
                histogram!(names::STEP_SECONDS).record(stepped.took.as_secs_f64());
                self.achieved.iter().for_each(|achieved| achieved.step(&stepped));
            }
            Effect::Ended(error) => {
                // This worker can serve no more requests. Whoever started it starts another.
                tracing::error!(%error, "nothing can be computed any more; the worker ends");
                self.ended = true;
            }
        }
        None
    }

    fn launch(&mut self, mut launch: StepLaunch) -> In<S> {
        let Thread { core, runner, shell, tiers, watchdog, decoding, .. } = self;
        let (step, call) = (launch.step(), Call::Launch(launch.step(), launch.tokens()));
        let of = |load| tiers.as_ref().and_then(|tiers| tiers.loading(load)).unwrap_or_else(Loading::none);
        let loading = launch.behind().map(of);
        // A write may wait for a peer. That wait has its own bound, so the watchdog does not count it.
        let mut stored = |layer| watchdog.aside(|| launch.stored(layer, |write| shell.write(write)));
        // A device computes without the processors.
        let on_processors = runner.device().is_none();
        let mut run = |batch: &Batch<'_>| {
            decoding.set(on_processors && batch.decodes());
            launch_behind(&mut **runner, batch, loading.as_deref(), &mut stored)
        };
        let launched = core.with_batch(step, |batch| watchdog.during(call, || run(batch)));
        let outcome = launched.unwrap_or_else(|| Err(unplanned(step)));
        Input::Launched { launch, outcome }
    }

    fn collect(&mut self, step: u64, tokens: u32, failed: Option<RunError>) -> In<S> {
        let Thread { core, runner, watchdog, .. } = self;
        let mut out = Vec::new();
        let call = Call::Collect(step, tokens);
        let outcome = match failed {
            Some(error) => Err(error),
            None => core
                .with_batch(step, |batch| watchdog.during(call, || runner.collect(batch, &mut out)))
                .unwrap_or_else(|| Err(unplanned(step))),
        };
        let lost = if outcome.is_err() { watchdog.during(Call::Lost, || runner.lost()) } else { None };
        Input::Collected { outcome: outcome.map(|()| out), lost }
    }
}

/// The error for a step the core does not have: a defect, because the core asks only for steps in flight.
fn unplanned(step: u64) -> RunError {
    RunError(format!("step {step} is not in flight"))
}

/// What to load before a message's prompt, before the prefix that another worker is to be served, or ahead of need.
fn load_for<S: Shell>(tiers: &TiersShell, message: &Message<S::Command>) -> Option<baton_roles::tiers::Command> {
    match message {
        Message::Command(command) => tiers.sees(S::brings(command)?),
        Message::Exchange(exchange::Message::Serve { prefix, .. }) => tiers.sees_prefix(prefix),
        Message::Recall(prefix, _) => tiers.sees_prefix(prefix),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use baton_engine::fake::{FakeModel, tiny_layout};
    use baton_engine::{CacheConfig, Engine, EngineConfig, NewSequence, Order, Share, Start};
    use baton_roles::{Decode, Ticket, decode};
    use baton_types::{ErrorKind, PoolGeometry, RequestId, SamplingParams, TokenOut};

    use super::*;
    use crate::signals::unheard;

    /// Fails every step; after this many failures it is lost for good.
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

    /// Sends every effect to the test.
    struct Telling(Sender<decode::Effect>);

    impl Shell for Telling {
        type Role = Decode;
        type Command = decode::Command;

        fn command(&mut self, command: decode::Command) -> decode::Command {
            command
        }

        fn perform(&mut self, effect: decode::Effect) -> Option<decode::Command> {
            self.0.send(effect).unwrap();
            None
        }

        fn write(&mut self, _: Write<'_>) -> Result<(), TransferError> {
            Ok(())
        }
    }

    type Handle = EngineHandle<decode::Command>;

    /// A decode worker's engine thread over this runner, and the effects of its role.
    fn started(runner: impl ModelRunner + 'static) -> (Handle, Receiver<decode::Effect>) {
        started_beside(runner, Decoding::default())
    }

    /// The same; it says in `decoding` when it decodes.
    fn started_beside(runner: impl ModelRunner + 'static, decoding: Decoding) -> (Handle, Receiver<decode::Effect>) {
        let limits = EngineConfig {
            token_budget: 16,
            chunk: 16,
            pack_tokens: 16,
            max_running: 2,
            max_waiting: 2,
            context_tokens: 64,
            local_prefill_tokens: 0,
            reserve_ahead: 16,
            order: Order::Priority,
            overtakes: 2,
            cache: CacheConfig::default(),
        };
        let geometry = PoolGeometry::uniform(tiny_layout(4), 30);
        let engine = Engine::new(limits, &geometry).unwrap();
        let core = WorkerCore::new(engine, Decode::new(IDLE_TICK, 50), geometry.layout.into(), IDLE_TICK, false);
        let (tell, effects) = channel();
        let (handle, inbox) = channels();
        let shells =
            Shells { role: Telling(tell), exchange: None, tiers: None, columns: None, achieved: None, decoding };
        start(core, Box::new(runner), Clock::start(), None, unheard(), inbox, shells).unwrap();
        (handle, effects)
    }

    fn generate(handle: &Handle, name: &str) {
        generate_tokens(handle, name, 1);
    }

    fn generate_tokens(handle: &Handle, name: &str, max_tokens: u32) {
        let new = NewSequence {
            request_id: RequestId(name.to_owned()),
            tokens: vec![1, 2, 3],
            prompt_tokens: 3,
            params: SamplingParams { max_tokens, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: None,
            priority: 0,
            share: Share::default(),
            parked: false,
        };
        handle.send(decode::Command::Generate { ticket: Ticket(7), new: Box::new(new) }).unwrap();
    }

    #[test]
    fn a_failed_step_ends_its_sequences_and_one_that_cannot_be_followed_the_thread() {
        let (handle, effects) = started(Failing(2));
        for name in ["first", "second"] {
            generate(&handle, name);
            assert!(matches!(effects.recv().unwrap(), decode::Effect::Accepted { outcome: Ok(_), .. }));
            let told = effects.recv().unwrap();
            let decode::Effect::Say(_, decode::Answer::Failed(kind, _)) = &told else { panic!("{name}: {told:?}") };
            assert_eq!(*kind, ErrorKind::Internal, "whoever asked is told");
        }
        assert!(effects.recv().is_err(), "the role is gone, though the handle is there");
        // The snapshot channel closes, so this loop ends.
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut snapshot = handle.snapshot();
        runtime.block_on(async { while snapshot.changed().await.is_ok() {} });
    }

    /// Looks at the worker's snapshot while a step is launched, and fails the step.
    struct Looking {
        snapshot: Receiver<watch::Receiver<Snapshot>>,
        seen: Sender<bool>,
    }

    impl ModelRunner for Looking {
        fn launch(&mut self, _: &Batch<'_>, _: &mut dyn FnMut(u32)) -> Result<(), RunError> {
            let snapshot = self.snapshot.recv().unwrap();
            self.seen.send(snapshot.borrow().idle).unwrap();
            Err(RunError("seen".to_owned()))
        }

        fn collect(&mut self, _: &Batch<'_>, _: &mut Vec<TokenOut>) -> Result<(), RunError> {
            Ok(())
        }
    }

    /// Tells what each step finds: whether it is said that answers are decoded.
    struct Hearing {
        model: FakeModel,
        decoding: Decoding,
        heard: Sender<bool>,
        device: Option<String>,
    }

    impl ModelRunner for Hearing {
        fn launch(&mut self, batch: &Batch<'_>, on_layer: &mut dyn FnMut(u32)) -> Result<(), RunError> {
            self.heard.send(self.decoding.is_on()).unwrap();
            self.model.launch(batch, on_layer)
        }

        fn collect(&mut self, batch: &Batch<'_>, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
            self.model.collect(batch, out)
        }

        fn device(&self) -> Option<String> {
            self.device.clone()
        }
    }

    #[test]
    fn it_says_when_it_decodes_on_processors() {
        for (device, expected) in [(None, [false, true, true]), (Some("device".to_owned()), [false; 3])] {
            let ((heard, hears), decoding) = (channel(), Decoding::default());
            let model = FakeModel::new(PoolGeometry::uniform(tiny_layout(4), 30), 50);
            let runner = Hearing { model, decoding: decoding.clone(), heard, device };
            let (handle, effects) = started_beside(runner, decoding.clone());
            generate_tokens(&handle, "first", 3);
            assert_eq!(expected, [(); 3].map(|()| hears.recv().unwrap()));
            // It says so until it has nothing more to do.
            while decoding.is_on() {
                std::thread::yield_now();
            }
            drop(handle);
            effects.iter().for_each(drop);
        }
    }

    #[test]
    fn a_worker_does_not_look_idle_while_it_computes_its_first_step() {
        let ((give, snapshot), (seen, idle)) = (channel(), channel());
        let (handle, _effects) = started(Looking { snapshot, seen });
        generate(&handle, "first");
        give.send(handle.snapshot()).unwrap();
        assert!(!idle.recv().unwrap());
    }
}
