//! The dedicated thread that owns a worker's core and its model; everything reaches it as messages.
//!
//! What is done when is decided by the core ([`baton_roles::WorkerCore`]); here are the clock, the model's calls, and whoever
//! carries out what the role wants done ([`Shell`]).

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use baton_engine::{ModelRunner, RunError};
use baton_roles::{Effect, IDLE_TICK, Input, RoleCore, Snapshot, StepLaunch, WorkerCore, Write};
use baton_runtime::metrics as names;
use baton_transfer::TransferError;
use metrics::{counter, histogram};
use tokio::sync::watch;

use crate::report::report;
use crate::watchdog::{Call, Stall, Watchdog};
use crate::{Clock, WorkerError};

/// What surrounds a role's core: the requests' streams and the transfer engine. Called on the engine thread only; must not wait for
/// the network.
pub trait Shell: Send + 'static {
    /// The role that it serves.
    type Role: RoleCore<Command: Send, Effect: Send> + Send + 'static;
    /// What services, streams and transfer threads say.
    type Command: Send + 'static;
    /// Takes out what is the shell's own (streams, handoffs); what is left is for the core.
    fn command(&mut self, command: Self::Command) -> <Self::Role as RoleCore>::Command;
    /// Does what the core wants done; its answer, if it has one.
    fn perform(&mut self, effect: <Self::Role as RoleCore>::Effect) -> Option<<Self::Role as RoleCore>::Command>;
    /// Hands a layer of some blocks to a handoff.
    fn write(&mut self, write: Write<'_>) -> Result<(), TransferError>;
}

/// What reaches the thread.
#[derive(Debug)]
enum Message<C> {
    Command(C),
    /// No new requests are taken from here on.
    Drain,
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

/// Sends commands without keeping the thread alive: what the shell itself and its callbacks hold.
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
        self.0.send(Message::Command(command)).map_err(|_| WorkerError::EngineStopped)
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

    /// From the snapshot on that says so, no new requests are taken.
    pub(crate) fn drain(&self) {
        // A thread that is gone takes none.
        let _ = self.commands.0.send(Message::Drain);
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

/// Starts the thread. `make` gets a way to send commands, for callbacks of the transfer engine. A device that the model computes
/// on may take `timeout` for a step.
pub fn start<S: Shell>(
    name: &str,
    core: WorkerCore<S::Role>,
    runner: Box<dyn ModelRunner>,
    clock: Clock,
    timeout: Duration,
    make: impl FnOnce(Commands<S::Command>) -> Result<S, WorkerError>,
) -> Result<EngineHandle<S::Command>, WorkerError> {
    let (messages, inbox) = channel();
    let (publish, snapshot) = watch::channel(Snapshot::default());
    let stall = Stall::default();
    let handle = EngineHandle { commands: Commands(messages), snapshot, stall: stall.clone() };
    let shell = make(handle.commands())?;
    let watchdog = Watchdog::start(runner.device(), timeout, stall.clone())?;
    let thread = Thread { core, runner, shell, inbox, publish, watchdog, stall, clock, ended: false };
    std::thread::Builder::new().name(name.to_owned()).spawn(move || thread.run())?;
    Ok(handle)
}

struct Thread<S: Shell> {
    core: WorkerCore<S::Role>,
    runner: Box<dyn ModelRunner>,
    shell: S,
    inbox: Receiver<Message<S::Command>>,
    publish: watch::Sender<Snapshot>,
    watchdog: Watchdog,
    stall: Stall,
    clock: Clock,
    ended: bool,
}

type In<S> = Input<<<S as Shell>::Role as RoleCore>::Command>;
type Out<S> = Effect<<<S as Shell>::Role as RoleCore>::Effect>;

impl<S: Shell> Thread<S> {
    fn run(mut self) {
        report(&self.core, &self.publish);
        // Ends when nobody watches any more: the shell holds a sender of its own, so the inbox alone never closes.
        // Nor does anybody listen to one whose device has stood still and goes on.
        while !self.publish.is_closed() && self.stall.get().is_none() && !self.ended {
            self.take_messages();
            self.feed(Input::Turn);
            report(&self.core, &self.publish);
        }
    }

    /// Waits for the first message when there is nothing else to do.
    fn take_messages(&mut self) {
        let mut wait = self.core.waits();
        loop {
            let next = if wait { self.inbox.recv_timeout(IDLE_TICK).ok() } else { self.inbox.try_recv().ok() };
            let Some(message) = next else { return };
            wait = false;
            let input = match message {
                Message::Command(command) => Input::Command(self.shell.command(command)),
                Message::Drain => Input::Drain,
            };
            self.feed(input);
        }
    }

    /// Gives the core an input and carries out what follows from it. An effect's answer goes in before the next effect is looked at.
    fn feed(&mut self, input: In<S>) {
        let mut todo = VecDeque::new();
        self.step(input, &mut todo);
        while let Some(effect) = todo.pop_front() {
            if let Some(answer) = self.perform(effect) {
                let mut first = VecDeque::new();
                self.step(answer, &mut first);
                first.append(&mut todo);
                todo = first;
            }
        }
    }

    fn step(&mut self, input: In<S>, todo: &mut VecDeque<Out<S>>) {
        let mut effects = Vec::new();
        self.core.step(input, self.clock.now(), &mut effects);
        todo.extend(effects);
    }

    fn perform(&mut self, effect: Out<S>) -> Option<In<S>> {
        match effect {
            Effect::Role(effect) => return self.shell.perform(effect).map(Input::Command),
            Effect::Launch(launch) => return Some(self.launch(launch)),
            Effect::Collect { step, tokens, failed } => return Some(self.collect(step, tokens, failed)),
            Effect::Stepped(stepped) => {
                counter!(names::PREFILL_TOKENS).increment(stepped.prefilled);
                histogram!(names::STEP_SECONDS).record(stepped.took.as_secs_f64());
            }
            Effect::Ended(error) => {
                // Who serves requests must be one that can: whoever started this worker starts another.
                tracing::error!(%error, "nothing can be computed any more; the worker ends");
                self.ended = true;
            }
        }
        None
    }

    fn launch(&mut self, mut launch: StepLaunch) -> In<S> {
        let Thread { core, runner, shell, watchdog, .. } = self;
        let (step, call) = (launch.step(), Call::Launch(launch.step(), launch.tokens()));
        // A write may wait for a peer, which has bounds of its own.
        let mut on_layer = |layer| watchdog.aside(|| launch.stored(layer, |write| shell.write(write)));
        let launched = core.with_batch(step, |batch| watchdog.during(call, || runner.launch(batch, &mut on_layer)));
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

/// A defect: the core asks only for steps that it has.
fn unplanned(step: u64) -> RunError {
    RunError(format!("step {step} is not in flight"))
}

#[cfg(test)]
mod tests {
    use baton_engine::fake::tiny_layout;
    use baton_engine::{Batch, CacheConfig, Engine, EngineConfig, NewSequence, Order, Start, SwapConfig};
    use baton_roles::{Decode, Ticket, decode};
    use baton_types::{ErrorKind, PoolGeometry, RequestId, SamplingParams, TokenOut};

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

    /// Tells of every effect.
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

    #[test]
    fn a_failed_step_ends_its_sequences_and_one_that_cannot_be_followed_the_thread() {
        let limits = EngineConfig {
            token_budget: 16,
            chunk: 16,
            pack_tokens: 16,
            max_running: 2,
            max_waiting: 2,
            context_tokens: 64,
            local_prefill_tokens: 0,
            order: Order::Priority,
            overtakes: 2,
            cache: CacheConfig::default(),
            swap: SwapConfig::default(),
        };
        let geometry = PoolGeometry::uniform(tiny_layout(4), 30);
        let engine = Engine::new(limits, &geometry).unwrap();
        let core = WorkerCore::new(engine, Decode::new(IDLE_TICK, 50), geometry.layout.into(), false);
        let (tell, failed) = channel();
        let clock = Clock::start();
        let handle = start("engine", core, Box::new(Failing(2)), clock, IDLE_TICK, |_| Ok(Telling(tell))).unwrap();
        for name in ["first", "second"] {
            let new = NewSequence {
                request_id: RequestId(name.to_owned()),
                tokens: vec![1, 2, 3],
                prompt_tokens: 3,
                params: SamplingParams { max_tokens: 1, ..SamplingParams::default() },
                start: Start::Compute,
                deadline: None,
                prefix: None,
                priority: 0,
            };
            handle.send(decode::Command::Generate { ticket: Ticket(7), new: Box::new(new) }).unwrap();
            assert!(matches!(failed.recv().unwrap(), decode::Effect::Accepted { outcome: Ok(_), .. }));
            let told = failed.recv().unwrap();
            let decode::Effect::Say(_, decode::Answer::Failed(kind, _)) = &told else { panic!("{name}: {told:?}") };
            assert_eq!(*kind, ErrorKind::Internal, "whoever asked is told");
        }
        assert!(failed.recv().is_err(), "the role is gone, though the handle is there");
        // Whoever watches is told; this ends.
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut snapshot = handle.snapshot();
        runtime.block_on(async { while snapshot.changed().await.is_ok() {} });
    }
}
