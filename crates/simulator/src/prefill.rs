//! A prefill worker: the real role and engine. This file adds the streams to routers, the handoffs and their sessions.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use baton_engine::{Engine, NewSequence, Start};
use baton_policy::PrefillWord;
use baton_roles::prefill::{Answer, Command, Effect};
use baton_roles::{Drain, Input, Prefill as Role, StepLaunch, Ticket, WorkerCore};
use baton_types::{ErrorKind, PoolGeometry, SeqId, WorkerId};

use crate::control::{Ask, Call, Down, Link, Up};
use crate::decode::{Caller, answered, refusal, sequence};
use crate::ends::{Receiver, Sender};
use crate::engine::{Host, Thread};
use crate::events::{Life, Place, Process};
use crate::exchange::Exchanging;
use crate::kept::Kept;
use crate::membership::Registration;
use crate::opening::Aim;
use crate::pool::{Blocks, Bytes, Memory};
use crate::stream::Micros;
use crate::world::World;
use crate::{Sabotage, Violation};

/// A request that came without a target.
struct Unaimed {
    aim: Aim,
    /// Its sequence, once it is accepted.
    seq: Option<SeqId>,
    /// Its target, if that came before.
    target: Option<Vec<u8>>,
}

/// One incarnation of a prefill worker.
pub(crate) struct Prefill {
    pub life: Life,
    pub id: WorkerId,
    pub alive: bool,
    pub thread: Option<Thread<Role>>,
    pub inbox: VecDeque<Input<Command>>,
    pub registration: Option<Registration>,
    tickets: BTreeMap<Ticket, (Caller, u64)>,
    pub callers: BTreeMap<SeqId, Caller>,
    /// Streams of requests that came without a target.
    unaimed: BTreeMap<Call, Unaimed>,
    pub exchanging: Exchanging,
    /// Its own store.
    pub kept: Option<Kept>,
    pub frozen: Option<(Micros, Micros)>,
    pub drain: Drain,
}

impl Prefill {
    /// A worker and its ends. `before`: the store of the process before it at this place.
    pub(crate) fn new(
        world: &World,
        life: Life,
        before: Option<Kept>,
    ) -> Result<(Prefill, Receiver, Sender), Violation> {
        let geometry = world.geometry.clone();
        let memory = Memory::new(geometry.clone());
        let mut engine = Engine::new(world.engine, &geometry).map_err(|e| world.violation("set-up", e.to_string()))?;
        engine.note_cache_changes();
        let layout = Arc::new(geometry.layout.clone());
        if world.stores {
            engine.note_ended();
        }
        let core = WorkerCore::new(engine, Role::new(layout.clone()), layout, world.lease, world.overlaps);
        let model = world.model(&memory.bytes);
        let prefill = Prefill {
            life,
            id: WorkerId(life),
            alive: true,
            thread: Some(Thread::new(core, model, geometry.layout.layers() as u32)),
            inbox: VecDeque::new(),
            registration: None,
            tickets: BTreeMap::new(),
            callers: BTreeMap::new(),
            unaimed: BTreeMap::new(),
            exchanging: Exchanging::default(),
            kept: world.store_for(life, before),
            frozen: None,
            drain: Drain::default(),
        };
        let receiver = Receiver::new(life, memory.shared(), world.limits.clone());
        Ok((prefill, receiver, Sender::new(life, memory)))
    }

    /// Whether no request is left and every block is free, cached or in quarantine.
    pub(crate) fn is_quiet(&self) -> bool {
        let Some(thread) = &self.thread else { return !self.alive };
        let snapshot = thread.core.snapshot();
        let aside = snapshot.blocks.quarantined + snapshot.blocks.free + snapshot.blocks.cached;
        self.inbox.is_empty() && snapshot.running + snapshot.waiting == 0 && aside == snapshot.blocks.total
    }

    /// I6 at the end of a run: nothing is held.
    pub(crate) fn check_free(&self, receiver: &Receiver, sender: &Sender) -> Result<(), String> {
        let Some(thread) = &self.thread else { return Ok(()) };
        let (snapshot, streams) = (thread.core.snapshot(), thread.core.role().streams());
        let held = (streams, sender.handoffs.len(), self.callers.len());
        let moved = (thread.core.exchange().streams(), self.exchanging.callers.len(), sender.jobs.len());
        let lent = (thread.core.exchange().epochs(), receiver.ledger.stats().reservations);
        match snapshot.idle && held == (0, 0, 0) && moved == (0, 0, 0) && lent == ((0, 0), 0) {
            true => Ok(()),
            false => Err(format!(
                "{}: {snapshot:?}; streams, handoffs, callers: {held:?}; prefixes, their callers, jobs: {moved:?}; epochs, reservations: {lent:?}",
                self.id
            )),
        }
    }
}

pub(crate) struct PrefillHost;

impl Host for PrefillHost {
    type Role = Role;

    fn process(place: Place) -> Process {
        Process::Prefill(place)
    }

    fn thread(world: &mut World, place: Place) -> &mut Option<Thread<Role>> {
        &mut world.prefills[place].thread
    }

    fn inbox(world: &mut World, place: Place) -> &mut VecDeque<Input<Command>> {
        &mut world.prefills[place].inbox
    }

    fn perform(world: &mut World, place: Place, effect: Effect) -> Result<Option<Command>, Violation> {
        world.prefill_effect(place, effect)
    }

    fn kept(world: &mut World, place: Place) -> &mut Option<Kept> {
        &mut world.prefills[place].kept
    }

    fn pool(world: &World, place: Place) -> (Bytes, PoolGeometry) {
        let memory = &world.senders[Process::Prefill(place)].memory;
        (memory.bytes.clone(), memory.geometry.clone())
    }

    fn compare(world: &World, place: Place, tokens: &[u32], first: &[u32], blocks: &Blocks) -> Result<(), String> {
        world.senders[Process::Prefill(place)].memory.compare(tokens, first, blocks)
    }

    fn brings(command: &Command) -> Option<&NewSequence> {
        match command {
            Command::Run { new, .. } => Some(new),
            _ => None,
        }
    }

    fn exchanging(world: &mut World, place: Place) -> &mut Exchanging {
        &mut world.prefills[place].exchanging
    }

    fn stored(world: &mut World, place: Place, launch: &mut StepLaunch, layer: u32) -> Result<bool, Violation> {
        world.layer_stored(Process::Prefill(place), launch, layer)
    }

    /// I3: no step touches a block that a peer may write to, or writes to one that a handoff reads.
    fn inspect(world: &mut World, place: Place, core: &mut WorkerCore<Role>, step: u64) -> Result<(), Violation> {
        let here = Process::Prefill(place);
        world.touches_nothing_lent(here, core, step)?;
        world.count_fetched(here, core, step);
        world.writes_nothing_read(here, core, step)
    }
}

impl World {
    /// Handles a router's message.
    pub(crate) fn prefill_asked(
        &mut self,
        place: Place,
        (link, made): (Link, u64),
        message: Up,
    ) -> Result<(), Violation> {
        match message {
            Up::Prefill { call, ask, target } => {
                let caller = Caller { link, made, call, tokens: Vec::new(), cancelled: false };
                if let Err(error) = self.run(place, caller, &ask, target.as_deref()) {
                    self.send_down(link, made, Down::Ended(call, answered(error.0, error.1)));
                }
            }
            Up::Target { call, target } => self.aimed(place, call, target),
            Up::Cancel { call } => {
                self.prefills[place].unaimed.remove(&call);
                self.hang_up_prefill(place, |caller| caller.call == call);
            }
            Up::Decode { call, .. } => {
                let end = answered(ErrorKind::InvalidArgument, "not a decode worker".into());
                self.send_down(link, made, Down::Ended(call, end));
            }
            Up::Serve { call, prefix, target } => {
                self.asked_to_serve::<PrefillHost>(place, (link, made), call, prefix, &target);
            }
            Up::Fetch { call, prefix } => self.asked_to_fetch::<PrefillHost>(place, (link, made), call, prefix),
            Up::Probe => {}
        }
        self.wake_engine(Process::Prefill(place));
        Ok(())
    }

    /// Opens a handoff, if it has a target, and passes it to the engine thread with the request, as the real service does.
    fn run(
        &mut self,
        place: Place,
        caller: Caller,
        ask: &Ask,
        target: Option<&[u8]>,
    ) -> Result<(), (ErrorKind, String)> {
        let clock = if self.broken(Sabotage::ForeignDeadline) {
            Process::Router(caller.link.0)
        } else {
            Process::Prefill(place)
        };
        let here = Process::Prefill(place);
        let mut aim = self.aim(here, ask.time_left, ask.tokens.len());
        aim.deadline = self.clock_now(clock) + ask.time_left;
        let opened = target.map(|target| self.open_handoff(here, aim, target)).transpose()?;
        let (size, now) = (self.geometry.layout.block_size, self.engine_now(here));
        let new = sequence(ask, size, Start::ComputeAndHold, now);
        let prefill = &mut self.prefills[place];
        let (id, target) = match opened {
            Some((id, target)) => (id, Some(target)),
            None => {
                let sender = &mut self.senders[here];
                sender.next += 1;
                prefill.unaimed.insert(caller.call, Unaimed { aim, seq: None, target: None });
                (sender.next, None)
            }
        };
        let ticket = Ticket(id);
        prefill.tickets.insert(ticket, (caller, id));
        prefill.inbox.push_back(Input::Command(Command::Run { ticket, new, target }));
        Ok(())
    }

    /// The target of a request that came without has arrived.
    fn aimed(&mut self, place: Place, call: Call, target: Vec<u8>) {
        if let Some(unaimed) = self.prefills[place].unaimed.get_mut(&call) {
            unaimed.target = Some(target);
            self.take_aim(place, call);
        }
    }

    /// Passes a target to the engine thread once its request is accepted, as the real service does, which reads it only then.
    fn take_aim(&mut self, place: Place, call: Call) {
        let Some(Unaimed { aim, seq: Some(seq), target: Some(target) }) = self.prefills[place].unaimed.get(&call)
        else {
            return;
        };
        let (aim, seq, target) = (*aim, *seq, target.clone());
        self.prefills[place].unaimed.remove(&call);
        let here = Process::Prefill(place);
        let target = self.open_handoff(here, aim, &target).map(|(id, target)| {
            if let Some(handoff) = self.senders[here].handoffs.get_mut(&id) {
                handoff.seq = Some(seq);
            }
            target
        });
        self.prefills[place].inbox.push_back(Input::Command(Command::Target { seq, target }));
    }

    pub(crate) fn hang_up_prefill(&mut self, place: Place, gone: impl Fn(&Caller) -> bool) {
        let prefill = &mut self.prefills[place];
        prefill.tickets.values_mut().filter(|(caller, _)| gone(caller)).for_each(|(caller, _)| caller.cancelled = true);
        let ended = prefill.callers.iter().filter(|(_, caller)| gone(caller)).map(|(seq, _)| *seq);
        for seq in ended.collect::<Vec<_>>() {
            prefill.callers.remove(&seq);
            prefill.inbox.push_back(Input::Command(Command::Cancel(seq)));
        }
        self.hang_up_exchanges::<PrefillHost>(place, gone);
        self.wake_engine(Process::Prefill(place));
    }

    fn prefill_effect(&mut self, place: Place, effect: Effect) -> Result<Option<Command>, Violation> {
        let here = Process::Prefill(place);
        match effect {
            Effect::Accepted { ticket, outcome } => {
                let prefill = &mut self.prefills[place];
                let Some((caller, id)) = prefill.tickets.remove(&ticket) else { return Ok(None) };
                match outcome {
                    Ok(seq) => {
                        if let Some(handoff) = self.senders[here].handoffs.get_mut(&id) {
                            handoff.seq = Some(seq);
                        }
                        let call = caller.call;
                        if let Some(unaimed) = prefill.unaimed.get_mut(&call) {
                            unaimed.seq = Some(seq);
                        }
                        match caller.cancelled {
                            true => prefill.inbox.push_back(Input::Command(Command::Cancel(seq))),
                            false => drop(prefill.callers.insert(seq, caller)),
                        }
                        self.take_aim(place, call);
                    }
                    Err(refused) => {
                        // A handoff without a sequence is aborted.
                        self.abort_handoff(here, id, false);
                        let end = refusal(&refused);
                        self.send_down(caller.link, caller.made, Down::Ended(caller.call, end));
                    }
                }
            }
            Effect::Say(seq, answer) => self.prefill_says(place, seq, answer),
            Effect::Complete { seq, tail } => self.complete_handoff(here, seq, tail),
            Effect::Abort { seq, quarantined } => {
                if let Some(id) = self.senders[here].of(seq) {
                    self.abort_handoff(here, id, quarantined);
                }
            }
            Effect::Moved(_) | Effect::HandoffFailed { .. } | Effect::WriteRefused { .. } => {}
        }
        self.reported(here)?;
        Ok(None)
    }

    fn prefill_says(&mut self, place: Place, seq: SeqId, answer: Answer) {
        let is_last = answer.is_last();
        let Some(Caller { link, made, call, .. }) = self.prefills[place].callers.get(&seq).cloned() else { return };
        let word = match answer {
            Answer::FirstToken { token, finish, cached_tokens } => {
                self.milestone("first-token", Process::Prefill(place));
                Ok(PrefillWord::FirstToken { token, finish, cached_tokens })
            }
            Answer::Due => {
                self.milestone("due", Process::Prefill(place));
                Ok(PrefillWord::Due)
            }
            Answer::Scored(tokens) => Ok(PrefillWord::Scored(tokens)),
            Answer::Transferred(_) => Ok(PrefillWord::Transferred),
            Answer::Failed(kind, message) => Err(answered(kind, message)),
        };
        if is_last {
            // The stream has ended: the real service then drops a guard, which cancels the sequence.
            self.prefills[place].callers.remove(&seq);
            self.prefills[place].inbox.push_back(Input::Command(Command::Cancel(seq)));
        }
        match word {
            Ok(word) => self.send_down(link, made, Down::PrefillSaid(call, word)),
            Err(end) => self.send_down(link, made, Down::Ended(call, end)),
        }
    }
}
