//! Prefixes that move from one worker's cache to another's, or to and from a KV store: what the two do beside the real core
//! ([`baton_roles::exchange`]). Here are their streams to routers; `prefixes.rs` writes what is served.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_engine::{Exchange as Prefix, Time};
use baton_handoff::FenceState;
use baton_roles::exchange::{Answer, Command, Effect};
use baton_roles::{Input, Refused, RoleCore, Ticket, WorkerCore};
use baton_types::{RequestId, SeqId};

use crate::Violation;
use crate::control::{Call, Down, Link};
use crate::decode::{Caller, answered, named, refusal};
use crate::engine::Host;
use crate::events::Place;
use crate::stream::Micros;
use crate::world::World;

/// A prefix as a router names it to a worker.
#[derive(Clone, Debug)]
pub(crate) struct PrefixAsk {
    pub request: u64,
    pub tokens: Vec<u32>,
    pub salt: u64,
    pub priority: i32,
    pub time_left: Duration,
}

impl PrefixAsk {
    /// For the engine. `time`: how long it may take.
    fn prefix(self, block_size: u32, now: Time, time: Duration) -> Box<Prefix> {
        let prefix = named(self.salt, self.priority, block_size, now);
        let deadline = Time(now.0 + time.as_nanos() as u64);
        Box::new(Prefix { request_id: RequestId(self.request.to_string()), tokens: self.tokens, prefix, deadline })
    }
}

/// The streams of the prefixes that a worker moves.
#[derive(Default)]
pub(crate) struct Exchanging {
    next: u64,
    /// Neither accepted nor refused yet. What is served has a handoff.
    tickets: BTreeMap<Ticket, (Caller, Option<u64>)>,
    pub callers: BTreeMap<SeqId, Caller>,
}

impl Exchanging {
    fn ask(&mut self, caller: Caller, handoff: Option<u64>) -> Ticket {
        self.next += 1;
        self.tickets.insert(Ticket(self.next), (caller, handoff));
        Ticket(self.next)
    }
}

/// What an event of the receiving end is to the core: the worker's engine thread asks it.
pub(crate) fn addressed<R: RoleCore<Command = baton_roles::decode::Command>>(
    core: &WorkerCore<R>,
    input: Input<R::Command>,
) -> Input<R::Command> {
    match input {
        Input::Command(baton_roles::decode::Command::Received(event)) if core.exchange().knows(event.epoch()) => {
            Input::Exchange(Command::Received(event))
        }
        input => input,
    }
}

impl World {
    /// A router asks a worker to take a prefix.
    pub(crate) fn asked_to_fetch<H: Host>(
        &mut self,
        place: Place,
        (link, made): (Link, u64),
        call: Call,
        prefix: PrefixAsk,
    ) {
        let (size, now) = (self.geometry.layout.block_size, self.engine_now(H::process(place)));
        let time = prefix.time_left.min(self.lease);
        let prefix = prefix.prefix(size, now, time);
        // The checker's record: the tokens whose KV moves.
        let tokens = prefix.tokens[..prefix.moves(size) as usize].to_vec();
        let ticket = H::exchanging(self, place).ask(Caller { link, made, call, tokens, cancelled: false }, None);
        H::inbox(self, place).push_back(Input::Exchange(Command::Fetch { ticket, prefix }));
    }

    /// A router asks a worker to give a prefix.
    pub(crate) fn asked_to_serve<H: Host>(
        &mut self,
        place: Place,
        (link, made): (Link, u64),
        call: Call,
        prefix: PrefixAsk,
        target: &[u8],
    ) {
        let here = H::process(place);
        let (size, now) = (self.geometry.layout.block_size, self.engine_now(here));
        let time = prefix.time_left.min(self.lease);
        let prefix = prefix.prefix(size, now, time);
        // A prefix waits for those before it, and they last no longer than a lease.
        let mut aim = self.aim(here, time, prefix.moves(size) as usize);
        aim.ends += self.by_any_clock(self.lease.as_micros() as Micros);
        let (handoff, target) = match self.open_handoff(here, aim, target) {
            Ok(opened) => opened,
            Err((kind, message)) => return self.send_down(link, made, Down::Ended(call, answered(kind, message))),
        };
        let caller = Caller { link, made, call, tokens: Vec::new(), cancelled: false };
        let ticket = H::exchanging(self, place).ask(caller, Some(handoff));
        H::inbox(self, place).push_back(Input::Exchange(Command::Serve { ticket, prefix, target }));
    }

    /// Cancels the prefixes for whose streams `gone` holds.
    pub(crate) fn hang_up_exchanges<H: Host>(&mut self, place: Place, gone: impl Fn(&Caller) -> bool) {
        let exchanging = H::exchanging(self, place);
        let asked = exchanging.tickets.values_mut().filter(|(caller, _)| gone(caller));
        asked.for_each(|(caller, _)| caller.cancelled = true);
        let ended: Vec<SeqId> =
            exchanging.callers.iter().filter(|(_, caller)| gone(caller)).map(|(seq, _)| *seq).collect();
        ended.into_iter().for_each(|seq| self.drop_exchange::<H>(place, seq));
    }

    /// A stream has ended or was dropped: the real service then drops a guard, which cancels the sequence.
    fn drop_exchange<H: Host>(&mut self, place: Place, seq: SeqId) {
        H::exchanging(self, place).callers.remove(&seq);
        H::inbox(self, place).push_back(Input::Exchange(Command::Cancel(seq)));
    }

    /// Carries out an effect; returns its answer, if it has one.
    pub(crate) fn exchange_effect<H: Host>(
        &mut self,
        place: Place,
        effect: Effect,
    ) -> Result<Option<Command>, Violation> {
        let here = H::process(place);
        match effect {
            Effect::Accepted { ticket, outcome } => self.exchange_accepted::<H>(place, ticket, outcome)?,
            Effect::Say(seq, answer) => self.exchange_says::<H>(place, seq, answer),
            Effect::Lend(loan) => {
                let epoch = loan.epoch;
                self.receivers[here].fetches.insert(epoch);
                return Ok(Some(Command::Lent { epoch, outcome: self.lend_out(here, loan)? }));
            }
            Effect::Release(epoch) => self.release(here, epoch)?,
            Effect::Fence(epoch) => {
                let state: FenceState = self.fence(here, epoch)?;
                return Ok(Some(Command::FenceBegun { epoch, state }));
            }
            Effect::Send { seq, pairs, known } => self.send_prefix(here, seq, pairs, known),
            Effect::Abort(seq) => self.give_up_prefix(here, seq),
            Effect::Fetched { .. } | Effect::Served(_) | Effect::Failed { .. } => {}
        }
        Ok(None)
    }

    fn exchange_accepted<H: Host>(
        &mut self,
        place: Place,
        ticket: Ticket,
        outcome: Result<SeqId, Refused>,
    ) -> Result<(), Violation> {
        let here = H::process(place);
        let Some((caller, handoff)) = H::exchanging(self, place).tickets.remove(&ticket) else { return Ok(()) };
        match (outcome, handoff) {
            (Ok(seq), handoff) => {
                match handoff {
                    Some(id) => self.is_of_prefix(here, id, seq),
                    None => drop(self.receivers[here].sequences.insert(seq, caller.tokens.clone())),
                }
                match caller.cancelled {
                    true => H::inbox(self, place).push_back(Input::Exchange(Command::Cancel(seq))),
                    false => drop(H::exchanging(self, place).callers.insert(seq, caller)),
                }
            }
            (Err(refused), handoff) => {
                if let Some(id) = handoff {
                    // A handoff without a sequence is aborted.
                    self.abort_handoff(here, id, false);
                    self.reported(here)?;
                }
                self.send_down(caller.link, caller.made, Down::Ended(caller.call, refusal(&refused)));
            }
        }
        Ok(())
    }

    fn exchange_says<H: Host>(&mut self, place: Place, seq: SeqId, answer: Answer) {
        let Some(Caller { link, made, call, .. }) = H::exchanging(self, place).callers.get(&seq).cloned() else {
            return;
        };
        if answer.is_last() {
            self.drop_exchange::<H>(place, seq);
        }
        match answer {
            Answer::Failed(kind, message) => self.send_down(link, made, Down::Ended(call, answered(kind, message))),
            answer => self.send_down(link, made, Down::Moved(call, answer)),
        }
    }
}
