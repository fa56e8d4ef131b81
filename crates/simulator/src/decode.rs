//! A decode worker: the real role, engine and ledger. This file adds the streams to routers and the sessions.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use baton_engine::{BlockName, Engine, NewSequence, Prefix, Share, Start, Time};
use baton_handoff::TransferError;
use baton_policy::{DecodeWord, LegEnd};
use baton_roles::decode::{Answer, Command, Effect};
use baton_roles::{Decode as Role, Drain, Input, Refused, StepLaunch, Ticket, WorkerCore};
use baton_types::{BatonError, ErrorKind, PoolGeometry, RequestId, SeqId, WorkerId, mix};

use crate::Violation;
use crate::client::VOCAB;
use crate::control::{Ask, Call, Down, Link, Up};
use crate::ends::{Receiver, Sender};
use crate::engine::{Host, Thread};
use crate::events::{Life, Place, Process};
use crate::exchange::{Exchanging, addressed};
use crate::kept::Kept;
use crate::membership::Registration;
use crate::pool::{Blocks, Bytes, Memory};
use crate::stream::Micros;
use crate::world::World;

/// A stream to a router.
#[derive(Clone, Debug)]
pub(crate) struct Caller {
    pub link: Link,
    pub made: u64,
    pub call: Call,
    /// The sequence's tokens.
    pub tokens: Vec<u32>,
    /// The router dropped the stream before the worker had accepted the request.
    pub cancelled: bool,
}

/// One incarnation of a decode worker.
pub(crate) struct Decode {
    pub life: Life,
    pub id: WorkerId,
    pub alive: bool,
    pub thread: Option<Thread<Role>>,
    pub inbox: VecDeque<Input<Command>>,
    pub registration: Option<Registration>,
    tickets: BTreeMap<Ticket, Caller>,
    pub callers: BTreeMap<SeqId, Caller>,
    pub exchanging: Exchanging,
    /// Its own store.
    pub kept: Option<Kept>,
    next_ticket: u64,
    pub frozen: Option<(Micros, Micros)>,
    pub drain: Drain,
}

impl Decode {
    /// A worker and its ends. `before`: the store of the process before it at this place.
    pub(crate) fn new(
        world: &World,
        life: Life,
        before: Option<Kept>,
    ) -> Result<(Decode, Receiver, Sender), Violation> {
        let geometry = world.geometry.clone();
        let memory = Memory::new(geometry.clone());
        let mut engine = Engine::new(world.engine, &geometry).map_err(|e| world.violation("set-up", e.to_string()))?;
        engine.note_cache_changes();
        if world.stores {
            engine.note_ended();
        }
        let role = Role::new(world.lease, VOCAB);
        let layout = geometry.layout.clone().into();
        let core = WorkerCore::new(engine, role, layout, world.lease, world.overlaps);
        let model = world.last_model(&memory.bytes);
        let layers = geometry.layout.layers() as u32;
        let decode = Decode {
            life,
            id: WorkerId(life),
            alive: true,
            thread: Some(Thread::new(core, model, layers)),
            inbox: VecDeque::new(),
            registration: None,
            tickets: BTreeMap::new(),
            callers: BTreeMap::new(),
            exchanging: Exchanging::default(),
            kept: world.store_for(life, before),
            next_ticket: 0,
            frozen: None,
            drain: Drain::default(),
        };
        let sender = Sender::new(life, memory.shared());
        Ok((decode, Receiver::new(life, memory, world.limits.clone()), sender))
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
        let (snapshot, role) = (thread.core.snapshot(), thread.core.role());
        let reservations = receiver.ledger.stats().reservations;
        let held = (role.streams(), role.epochs(), reservations, self.callers.len());
        let exchange = thread.core.exchange();
        let moved = (exchange.streams(), exchange.epochs(), self.exchanging.callers.len());
        match snapshot.idle && held == (0, (0, 0), 0, 0) && moved == (0, (0, 0), 0) && sender.is_free() {
            true => Ok(()),
            false => Err(format!(
                "{}: {snapshot:?}; streams, epochs, reservations, callers: {held:?}, {:?}; prefixes, their epochs, callers: {moved:?}",
                self.id, self.callers
            )),
        }
    }
}

/// Longest time for which workers keep prompts in their caches.
const MOST_KEPT: Duration = Duration::from_secs(1);

/// How a prompt of these clients is named in prefix caches.
pub(crate) fn named(salt: u64, priority: i32, block_size: u32, now: Time) -> Prefix {
    // Some ask for their prompts to be kept.
    let wanted = if priority > 0 { 2 * MOST_KEPT } else { Duration::ZERO };
    let root = BlockName::root(&salt.to_string(), block_size);
    Prefix { seed: mix(salt), root, ..Prefix::default() }.kept_for(wanted, MOST_KEPT, priority, now)
}

/// A router's request as a new sequence for the engine.
pub(crate) fn sequence(ask: &Ask, block_size: u32, start: Start, now: Time) -> Box<NewSequence> {
    let nanos = ask.time_left.as_nanos() as u64;
    Box::new(NewSequence {
        request_id: RequestId(ask.request.to_string()),
        tokens: ask.tokens.clone(),
        prompt_tokens: ask.prompt_tokens,
        params: ask.params.clone(),
        start,
        deadline: Some(Time(now.0 + nanos)),
        prefix: Some(named(ask.salt, ask.priority, block_size, now)),
        priority: ask.priority,
        // Who shares KV is one tenant.
        share: Share { tenant: ask.salt, weight: 1 + (ask.salt % 3) as u32 },
        parked: false,
    })
}

/// A worker's error as the router receives it: its kind goes through a gRPC status code.
pub(crate) fn answered(kind: ErrorKind, message: String) -> LegEnd {
    LegEnd::answered(kind.grpc_code(), message)
}

/// A refusal as the router receives it.
pub(crate) fn refusal(refused: &Refused) -> LegEnd {
    match refused {
        Refused::Draining => LegEnd::Draining { message: refused.to_string() },
        Refused::Exchanges { .. } => answered(refused.kind(), refused.to_string()),
        Refused::Engine(error) => answered(error.kind(), error.to_string()),
    }
}

pub(crate) struct DecodeHost;

impl Host for DecodeHost {
    type Role = Role;

    fn process(place: Place) -> Process {
        Process::Decode(place)
    }

    fn thread(world: &mut World, place: Place) -> &mut Option<Thread<Role>> {
        &mut world.decodes[place].thread
    }

    fn inbox(world: &mut World, place: Place) -> &mut VecDeque<Input<Command>> {
        &mut world.decodes[place].inbox
    }

    fn perform(world: &mut World, place: Place, effect: Effect) -> Result<Option<Command>, Violation> {
        world.decode_effect(place, effect)
    }

    fn kept(world: &mut World, place: Place) -> &mut Option<Kept> {
        &mut world.decodes[place].kept
    }

    fn pool(world: &World, place: Place) -> (Bytes, PoolGeometry) {
        let memory = &world.receivers[Process::Decode(place)].memory;
        (memory.bytes.clone(), memory.geometry.clone())
    }

    fn compare(world: &World, place: Place, tokens: &[u32], first: &[u32], blocks: &Blocks) -> Result<(), String> {
        world.receivers[Process::Decode(place)].memory.compare(tokens, first, blocks)
    }

    fn brings(command: &Command) -> Option<&NewSequence> {
        match command {
            Command::Generate { new, .. } => Some(new),
            _ => None,
        }
    }

    fn exchanging(world: &mut World, place: Place) -> &mut Exchanging {
        &mut world.decodes[place].exchanging
    }

    fn addressed(core: &WorkerCore<Role>, input: Input<Command>) -> Input<Command> {
        addressed(core, input)
    }

    fn stored(_: &mut World, _: Place, launch: &mut StepLaunch, layer: u32) -> Result<bool, Violation> {
        launch.stored(layer, |_| Err(TransferError::Closed));
        Ok(true)
    }

    /// I3: no step touches a block that a peer may write to, or writes to one that a handoff reads.
    fn inspect(world: &mut World, place: Place, core: &mut WorkerCore<Role>, step: u64) -> Result<(), Violation> {
        let here = Process::Decode(place);
        world.touches_nothing_lent(here, core, step)?;
        world.count_fetched(here, core, step);
        world.writes_nothing_read(here, core, step)
    }
}

impl World {
    /// Handles a router's message.
    pub(crate) fn decode_asked(
        &mut self,
        place: Place,
        (link, made): (Link, u64),
        message: Up,
    ) -> Result<(), Violation> {
        let now = self.engine_now(Process::Decode(place));
        let decode = &mut self.decodes[place];
        match message {
            Up::Decode { call, ask, local } => {
                let start = if local { Start::Compute } else { Start::Receive };
                let new = sequence(&ask, self.geometry.layout.block_size, start, now);
                let ticket = Ticket(decode.next_ticket);
                decode.next_ticket += 1;
                let caller = Caller { link, made, call, tokens: ask.tokens, cancelled: false };
                decode.tickets.insert(ticket, caller);
                decode.inbox.push_back(Input::Command(Command::Generate { ticket, new }));
            }
            Up::Cancel { call } => self.hang_up_decode(place, |caller| caller.call == call),
            Up::Prefill { call, .. } => {
                let end = answered(ErrorKind::InvalidArgument, "not a prefill worker".into());
                self.send_down(link, made, Down::Ended(call, end));
            }
            Up::Fetch { call, prefix } => self.asked_to_fetch::<DecodeHost>(place, (link, made), call, prefix),
            Up::Serve { call, prefix, target } => {
                self.asked_to_serve::<DecodeHost>(place, (link, made), call, prefix, &target);
            }
            Up::Probe | Up::Target { .. } => {}
        }
        self.wake_engine(Process::Decode(place));
        Ok(())
    }

    /// Cancels the streams for which `gone` holds: their router dropped them, or their connection ended.
    pub(crate) fn hang_up_decode(&mut self, place: Place, gone: impl Fn(&Caller) -> bool) {
        let decode = &mut self.decodes[place];
        decode.tickets.values_mut().filter(|caller| gone(caller)).for_each(|caller| caller.cancelled = true);
        let ended = decode.callers.iter().filter(|(_, caller)| gone(caller)).map(|(seq, _)| *seq);
        for seq in ended.collect::<Vec<_>>() {
            decode.callers.remove(&seq);
            decode.inbox.push_back(Input::Command(Command::Cancel(seq)));
        }
        self.hang_up_exchanges::<DecodeHost>(place, gone);
        self.wake_engine(Process::Decode(place));
    }

    fn decode_effect(&mut self, place: Place, effect: Effect) -> Result<Option<Command>, Violation> {
        match effect {
            Effect::Accepted { ticket, outcome } => {
                let decode = &mut self.decodes[place];
                let Some(caller) = decode.tickets.remove(&ticket) else { return Ok(None) };
                if let Ok(seq) = outcome {
                    self.receivers[Process::Decode(place)].sequences.insert(seq, caller.tokens.clone());
                }
                match outcome {
                    Ok(seq) if caller.cancelled => decode.inbox.push_back(Input::Command(Command::Cancel(seq))),
                    Ok(seq) => drop(decode.callers.insert(seq, caller)),
                    Err(refused) => {
                        let end = refusal(&refused);
                        self.send_down(caller.link, caller.made, Down::Ended(caller.call, end));
                    }
                }
            }
            Effect::Say(seq, answer) => self.decode_says(place, seq, answer),
            Effect::Lend(loan) => {
                let epoch = loan.epoch;
                return Ok(Some(Command::Lent { epoch, outcome: self.lend_out(Process::Decode(place), loan)? }));
            }
            Effect::Release(epoch) => self.release(Process::Decode(place), epoch)?,
            Effect::Fence(epoch) => {
                let state = self.fence(Process::Decode(place), epoch)?;
                return Ok(Some(Command::FenceBegun { epoch, state }));
            }
            Effect::Arrived { .. } | Effect::HandoffFailed { .. } => {}
        }
        Ok(None)
    }

    fn decode_says(&mut self, place: Place, seq: SeqId, answer: Answer) {
        let is_last = answer.is_last();
        let Some(Caller { link, made, call, .. }) = self.decodes[place].callers.get(&seq).cloned() else { return };
        let word = match answer {
            Answer::Reserved(target) => DecodeWord::Reserved { target },
            Answer::Scored(tokens) => DecodeWord::Scored(tokens),
            Answer::Started(cached_tokens) => DecodeWord::Started { cached_tokens },
            // Said to people who look; the router's core does not hear it.
            Answer::Arrived(..) => return,
            Answer::Token(token) => {
                self.milestone("token", Process::Decode(place));
                DecodeWord::Token(token)
            }
            Answer::Finished(reason) => DecodeWord::Finished(reason),
            Answer::Failed(kind, message) => {
                let end = answered(kind, message);
                self.decodes[place].callers.remove(&seq);
                self.decodes[place].inbox.push_back(Input::Command(Command::Cancel(seq)));
                return self.send_down(link, made, Down::Ended(call, end));
            }
        };
        if is_last {
            // The stream has ended: the real service then drops a guard, which cancels the sequence.
            self.decodes[place].callers.remove(&seq);
            self.decodes[place].inbox.push_back(Input::Command(Command::Cancel(seq)));
        }
        self.send_down(link, made, Down::DecodeSaid(call, word));
    }
}
