//! A router: the real fleet and the real choices. This file adds its streams, its clients and its clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use baton_membership::Follow;
use baton_policy::{
    Choice, ChoiceInput, Effect, Fleet, LeastLoaded, LegEnd, NewRequest, Patience, Placement, Prefixes, Probe,
    RequestLimits, RoundRobin, Sequence, Taken, WorkerLease,
};
use baton_types::{FinishReason, SamplingParams, TokenOut, WorkerId};

use crate::Violation;
use crate::client::End;
use crate::control::{Ask, Call, Connection, Down, Link, Up};
use crate::events::{Event, Life, Place, Process};
use crate::stream::{Micros, Timer};
use crate::world::World;

/// Most attempts per request.
const ATTEMPTS: u32 = 4;

/// One incarnation of a router.
pub(crate) struct Router {
    pub life: Life,
    pub fleet: Fleet,
    pub follow: Follow,
    pub follower: Timer,
    pub follow_until: Option<Instant>,
    /// Number of the watch that is open or being opened.
    pub feed: u64,
    pub choices: BTreeMap<u64, InFlight>,
    calls: BTreeMap<Call, (u64, Leg)>,
    pub probes: BTreeMap<WorkerId, Probe>,
    /// Workers that the fleet has told it to connect to, and not yet to let go of.
    connected: BTreeSet<WorkerId>,
    pub frozen: Option<(Micros, Micros)>,
    /// Every worker it has ever known.
    pub knew: BTreeMap<WorkerId, Process>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Leg {
    Decode,
    Prefill,
}

/// A choice's stream to a worker.
struct Stream {
    call: Call,
    link: Link,
    lease: WorkerLease,
}

/// A request in progress.
pub(crate) struct InFlight {
    pub choice: Choice,
    decode: Option<Stream>,
    prefill: Option<Stream>,
    /// Inputs that came while the client was taking a token: from the prefill stream, then from the decode stream.
    early: [VecDeque<ChoiceInput>; 2],
    /// The client is taking a token.
    busy: bool,
    /// When a leg failed; None once a stream has been opened in its place.
    pub recovering: Option<Micros>,
}

impl InFlight {
    /// Whether a stream to a worker is open.
    pub(crate) fn has_streams(&self) -> bool {
        self.decode.is_some() || self.prefill.is_some()
    }
}

impl Router {
    pub(crate) fn new(world: &mut World, place: Place, life: Life) -> Router {
        let placement: Box<dyn Placement> =
            if life.is_multiple_of(2) { Box::<RoundRobin>::default() } else { Box::<LeastLoaded>::default() };
        let (follow, first) = Follow::start(life, world.clock_now(Process::Router(place)));
        let router = Router {
            life,
            fleet: Fleet::new("m", placement),
            follow,
            follower: Timer::default(),
            follow_until: None,
            feed: 0,
            choices: BTreeMap::new(),
            calls: BTreeMap::new(),
            probes: BTreeMap::new(),
            connected: BTreeSet::new(),
            frozen: None,
            knew: BTreeMap::new(),
        };
        world.events.plan(world.now, Event::Follow { router: place, life, action: first });
        router
    }
}

impl World {
    /// A request arrives.
    pub(crate) fn arrive(&mut self, request: u64) -> Result<(), Violation> {
        let place = self.random.below(self.routers.len() as u64) as Place;
        let (now, at) = (self.now, self.clock_now(Process::Router(place)));
        let patience = self.patience(request);
        let client = &mut self.clients[request as usize];
        (client.router, client.began) = (place, now);
        if let Some(leaves) = client.leaves {
            self.events.plan(now + leaves, Event::Leave { request });
        }
        let salt = client.salt.to_string();
        let new = NewRequest {
            prompt: client.prompt.clone().into(),
            names: Prefixes::names(&salt, &client.prompt).into(),
            cache_salt: salt,
            scored: client.params.prompt_logprobs.is_some(),
            limits: RequestLimits {
                max_tokens: client.params.max_tokens,
                stop_token_ids: client.params.stop_token_ids.clone(),
                max_attempts: ATTEMPTS,
            },
            deadline: at + Duration::from_micros(client.deadline),
            patience,
        };
        self.note(|| format!("request {request} comes to router {place}: {:?} tokens", new.prompt.len()));
        let choice = Choice::start(new, at);
        let early = Default::default();
        let flight = InFlight { choice, decode: None, prefill: None, early, busy: false, recovering: None };
        self.routers[place].choices.insert(request, flight);
        self.carry_out_choice(place, request)?;
        self.plan_wake(place, request);
        Ok(())
    }

    /// Whether a request gives workers up that are only slow, so that it may fail though nothing is wrong.
    pub(crate) fn is_impatient(&self, request: u64) -> bool {
        !self.options.calm && self.options.faults.is_none() && !request.is_multiple_of(2)
    }

    /// How long the router lets a worker send nothing to a request.
    fn patience(&self, request: u64) -> Patience {
        let token = Duration::from_millis(if self.is_impatient(request) { 10 << (request % 7) } else { 3_600_000 });
        Patience { first_token: 4 * token, token }
    }

    /// Feeds an input to a choice. While the client is taking a token, the router waits for that, for the deadline and for the client
    /// to leave; inputs from streams are queued.
    fn tell(&mut self, place: Place, request: u64, input: ChoiceInput) -> Result<(), Violation> {
        let at = self.clock_now(Process::Router(place));
        let Some(flight) = self.routers[place].choices.get_mut(&request) else { return Ok(()) };
        let of_prefill = matches!(input, ChoiceInput::PrefillSaid(_) | ChoiceInput::PrefillEnded(_));
        let of_decode = matches!(input, ChoiceInput::DecodeSaid(_) | ChoiceInput::DecodeEnded(_));
        if flight.busy {
            if of_prefill || of_decode {
                flight.early[usize::from(of_decode)].push_back(input);
                return Ok(());
            }
            if matches!(input, ChoiceInput::Wake) && at < flight.choice.deadline() {
                return Ok(());
            }
            flight.busy = false;
        }
        flight.choice.feed(input, at);
        self.carry_out_choice(place, request)?;
        self.check_streams(place, request)?;
        self.plan_wake(place, request);
        Ok(())
    }

    fn plan_wake(&mut self, place: Place, request: u64) {
        let life = self.routers[place].life;
        let Some(flight) = self.routers[place].choices.get(&request) else { return };
        if let Some(at) = flight.choice.next_wake() {
            let at = self.micros(Process::Router(place), at).max(self.now + 1);
            self.events.plan(at, Event::Wake { router: place, life, request });
        }
    }

    pub(crate) fn wake(&mut self, place: Place, request: u64) -> Result<(), Violation> {
        self.tell(place, request, ChoiceInput::Wake)
    }

    /// The client has taken a token: feeds the inputs that came meanwhile, the prefill stream's first.
    pub(crate) fn taken(&mut self, place: Place, request: u64) -> Result<(), Violation> {
        let Some(flight) = self.routers[place].choices.get_mut(&request) else { return Ok(()) };
        flight.busy = false;
        let gone = self.clients[request as usize].end.is_some();
        let taken = if gone { Taken::ClientGone } else { Taken::Sent };
        self.tell(place, request, ChoiceInput::Taken(taken))?;
        loop {
            let Some(flight) = self.routers[place].choices.get_mut(&request) else { return Ok(()) };
            if flight.busy {
                return Ok(());
            }
            let Some(input) = flight.early.iter_mut().find_map(VecDeque::pop_front) else { return Ok(()) };
            self.tell(place, request, input)?;
        }
    }

    pub(crate) fn leave(&mut self, request: u64) -> Result<(), Violation> {
        let client = &mut self.clients[request as usize];
        if client.end.is_some() {
            return Ok(());
        }
        client.end = Some(End::Left);
        let place = client.router;
        self.tell(place, request, ChoiceInput::ClientGone)
    }

    fn carry_out_choice(&mut self, place: Place, request: u64) -> Result<(), Violation> {
        while let Some(flight) = self.routers[place].choices.get_mut(&request)
            && !flight.busy
            && let Some(effect) = flight.choice.next_effect()
        {
            let Some(input) = self.perform(place, request, effect)? else { continue };
            let at = self.clock_now(Process::Router(place));
            if let Some(flight) = self.routers[place].choices.get_mut(&request) {
                flight.choice.feed(input, at);
            }
        }
        Ok(())
    }

    fn perform(&mut self, place: Place, request: u64, effect: Effect) -> Result<Option<ChoiceInput>, Violation> {
        match effect {
            Effect::Place(ask) => {
                let now = self.clock_now(Process::Router(place));
                let placed = self.routers[place].fleet.place(&ask, now);
                self.note(|| format!("router {place} places request {request}: {placed:?}"));
                if let Err(failure) = &placed
                    && failure.message.contains("no decode worker")
                {
                    self.check_outage(place)?;
                }
                Ok(Some(ChoiceInput::Placed(placed)))
            }
            Effect::OpenDecode { worker, local, sequence } => {
                self.drop_stream(place, request, Leg::Decode);
                let ask = self.ask(request, &sequence);
                let opened =
                    self.open_stream(place, request, worker, Leg::Decode, |call| Up::Decode { call, ask, local });
                Ok(opened.err().map(ChoiceInput::DecodeEnded))
            }
            Effect::OpenPrefill { worker, target, sequence } => {
                self.drop_stream(place, request, Leg::Prefill);
                let ask = self.ask(request, &sequence);
                let opened =
                    self.open_stream(place, request, worker, Leg::Prefill, |call| Up::Prefill { call, ask, target });
                Ok(opened.err().map(ChoiceInput::PrefillEnded))
            }
            Effect::DropDecode => {
                self.drop_stream(place, request, Leg::Decode);
                Ok(None)
            }
            Effect::DropPrefill => {
                self.drop_stream(place, request, Leg::Prefill);
                Ok(None)
            }
            Effect::EmitScored(tokens) => self.emit_scored(request, tokens),
            Effect::Emit(token) => self.emit(place, request, token.index, token.id),
            Effect::Recovering { leg, cause } => {
                *self.summary.recoveries.entry(leg.as_str()).or_default() += 1;
                self.note(|| format!("request {request} recovers from its {}: {}", leg.as_str(), cause.message));
                let now = self.now;
                if let Some(flight) = self.routers[place].choices.get_mut(&request) {
                    flight.recovering.get_or_insert(now);
                }
                Ok(None)
            }
            Effect::Judge(verdict) => {
                let now = self.clock_now(Process::Router(place));
                if let Some(judgement) = self.routers[place].fleet.judge(verdict, now) {
                    self.note(|| format!("router {place}: {judgement:?}"));
                }
                Ok(None)
            }
            Effect::Note { placed, names } => {
                self.routers[place].fleet.note(placed, &names);
                Ok(None)
            }
            Effect::Finish { reason, .. } => self.end_choice(place, request, End::Finished(reason)),
            Effect::Fail(failure) => self.end_choice(place, request, End::Failed(failure.kind, failure.message)),
        }
    }

    fn ask(&self, request: u64, sequence: &Sequence) -> Box<Ask> {
        let client = &self.clients[request as usize];
        Box::new(Ask {
            request,
            tokens: sequence.tokens.to_vec(),
            prompt_tokens: sequence.prompt_tokens,
            params: SamplingParams {
                prompt_logprobs: client.params.prompt_logprobs.filter(|_| sequence.scored),
                ..client.params.clone()
            },
            time_left: sequence.time_left.max(Duration::from_millis(1)),
            salt: client.salt,
            priority: client.priority,
        })
    }

    fn open_stream(
        &mut self,
        place: Place,
        request: u64,
        worker: WorkerId,
        leg: Leg,
        message: impl FnOnce(Call) -> Up,
    ) -> Result<(), LegEnd> {
        let router = &mut self.routers[place];
        let lease = router.fleet.lease(worker)?;
        self.next_call += 1;
        let (call, link) = (self.next_call, (place, worker));
        router.calls.insert(call, (request, leg));
        if let Some(flight) = router.choices.get_mut(&request) {
            flight.recovering = None;
            let stream = Some(Stream { call, link, lease });
            match leg {
                Leg::Decode => flight.decode = stream,
                Leg::Prefill => flight.prefill = stream,
            }
        }
        self.send_up(link, message(call));
        Ok(())
    }

    fn take_stream(&mut self, place: Place, request: u64, leg: Leg) -> Option<Stream> {
        let flight = self.routers[place].choices.get_mut(&request)?;
        // Its queued inputs are dropped with it.
        flight.early[usize::from(leg == Leg::Decode)].clear();
        let stream = match leg {
            Leg::Decode => flight.decode.take(),
            Leg::Prefill => flight.prefill.take(),
        }?;
        self.routers[place].calls.remove(&stream.call);
        Some(stream)
    }

    fn drop_stream(&mut self, place: Place, request: u64, leg: Leg) {
        let Some(Stream { call, link, .. }) = self.take_stream(place, request, leg) else { return };
        if self.links.get_mut(&link).is_some_and(|connection| connection.calls.remove(&call)) {
            self.send_up(link, Up::Cancel { call });
        }
    }

    /// Handles a worker's message.
    pub(crate) fn router_heard(&mut self, link: Link, message: Down) -> Result<(), Violation> {
        let place = link.0;
        let (call, input) = match message {
            Down::Probed => return self.probed(link, true),
            Down::DecodeSaid(call, word) => (call, Ok(ChoiceInput::DecodeSaid(word))),
            Down::PrefillSaid(call, word) => (call, Ok(ChoiceInput::PrefillSaid(word))),
            Down::Ended(call, end) => (call, Err(end)),
        };
        let Some((request, leg)) = self.routers[place].calls.get(&call).copied() else { return Ok(()) };
        let input = match input {
            Ok(input) => {
                if matches!(&input, ChoiceInput::PrefillSaid(word) if word.is_last()) {
                    self.prefill_over(place, request);
                }
                input
            }
            Err(end) => {
                self.leg_ended(place, request, leg, &end);
                match leg {
                    Leg::Decode => ChoiceInput::DecodeEnded(end),
                    Leg::Prefill => ChoiceInput::PrefillEnded(end),
                }
            }
        };
        self.tell(place, request, input)
    }

    /// The prefill stream has ended with its last word: releases its lease. Nothing is left to cancel.
    fn prefill_over(&mut self, place: Place, request: u64) {
        let Some(stream) = self.routers[place].choices.get_mut(&request).and_then(|flight| flight.prefill.take())
        else {
            return;
        };
        self.routers[place].calls.remove(&stream.call);
        if let Some(connection) = self.links.get_mut(&stream.link) {
            connection.calls.remove(&stream.call);
        }
    }

    /// A stream has ended: releases its lease, and probes the worker if it is lost.
    fn leg_ended(&mut self, place: Place, request: u64, leg: Leg, end: &LegEnd) {
        let at = self.clock_now(Process::Router(place));
        let router = &mut self.routers[place];
        let Some(flight) = router.choices.get_mut(&request) else { return };
        let stream = if leg == Leg::Decode { flight.decode.take() } else { flight.prefill.take() };
        let Some(Stream { call, lease, .. }) = stream else { return };
        router.calls.remove(&call);
        let probe = router.fleet.ended(&lease, end, at);
        drop(lease);
        if let Some(probe) = probe {
            if router.fleet.members().any(|worker| worker.member.id == probe.worker() && !worker.lost) {
                let what = format!("router {place} asks {} whether it is back, and goes on using it", probe.worker());
                let violation = self.violation("I5", what);
                self.broken_by.get_or_insert(violation);
            }
            self.plan_probe(place, probe);
        }
    }

    fn plan_probe(&mut self, place: Place, probe: Probe) {
        let (life, worker, at) =
            (self.routers[place].life, probe.worker(), self.micros(Process::Router(place), probe.at()));
        self.routers[place].probes.insert(worker, probe);
        self.events.plan(at.max(self.now + 1), Event::Probe { router: place, life, worker });
    }

    /// Asks a lost worker whether it is back. A probe that is not answered within a second has failed.
    pub(crate) fn probe(&mut self, place: Place, worker: WorkerId) -> Result<(), Violation> {
        if self.routers[place].probes.contains_key(&worker) {
            self.send_up((place, worker), Up::Probe);
            let (life, at) = (self.routers[place].life, self.now + 1_000_000);
            self.events.plan(at, Event::ProbeOver { router: place, life, worker });
        }
        Ok(())
    }

    pub(crate) fn probed(&mut self, link: Link, answered: bool) -> Result<(), Violation> {
        let (place, worker) = link;
        let at = self.clock_now(Process::Router(place));
        let Some(probe) = self.routers[place].probes.remove(&worker) else { return Ok(()) };
        match self.routers[place].fleet.probed(probe, answered, at) {
            Some(_) if answered => {
                Err(self.violation("I5", format!("router {place} is answered by {worker}, which stays lost")))
            }
            Some(next) => {
                self.plan_probe(place, next);
                Ok(())
            }
            None => Ok(()),
        }
    }

    fn emit_scored(&mut self, request: u64, tokens: Vec<TokenOut>) -> Result<Option<ChoiceInput>, Violation> {
        let client = &mut self.clients[request as usize];
        if client.end.is_some() {
            return Ok(Some(ChoiceInput::Taken(Taken::ClientGone)));
        }
        if let Err(wrong) = client.take_scores(tokens) {
            return Err(self.violation("I4", format!("request {request}: {wrong}")));
        }
        Ok(Some(ChoiceInput::Taken(Taken::Sent)))
    }

    fn emit(&mut self, place: Place, request: u64, index: u32, id: u32) -> Result<Option<ChoiceInput>, Violation> {
        let client = &mut self.clients[request as usize];
        if client.end.is_some() {
            return Ok(Some(ChoiceInput::Taken(Taken::ClientGone)));
        }
        if client.stopped {
            return Ok(Some(ChoiceInput::Taken(Taken::Sent)));
        }
        let (stops, reads) = (client.stops_at == Some(index), client.reads);
        let wrong = client.take(index, id).err();
        if let Some(wrong) = wrong {
            return Err(self.violation("I4", format!("request {request}: {wrong}")));
        }
        self.look_at("I4");
        self.summary.tokens += 1;
        if stops {
            self.clients[request as usize].stopped = true;
            return Ok(Some(ChoiceInput::Taken(Taken::StopMatched)));
        }
        if reads == 0 {
            return Ok(Some(ChoiceInput::Taken(Taken::Sent)));
        }
        let until = self.now + reads;
        let life = self.routers[place].life;
        if let Some(flight) = self.routers[place].choices.get_mut(&request) {
            flight.busy = true;
        }
        self.events.plan(until, Event::Taken { router: place, life, request });
        Ok(None)
    }

    fn end_choice(&mut self, place: Place, request: u64, end: End) -> Result<Option<ChoiceInput>, Violation> {
        self.drop_stream(place, request, Leg::Decode);
        self.drop_stream(place, request, Leg::Prefill);
        self.routers[place].choices.remove(&request);
        self.note(|| format!("request {request} ends: {end:?}"));
        let client = &mut self.clients[request as usize];
        match client.end {
            None if client.stopped && matches!(end, End::Finished(_)) => {
                client.end = Some(End::Finished(FinishReason::Stop));
            }
            None => client.end = Some(end),
            Some(End::Left) => {}
            Some(_) => return Err(self.violation("I4", format!("request {request} ends twice"))),
        }
        self.check_end(request)?;
        Ok(None)
    }

    /// Passes the router's view to its fleet, and adds a connection for each new worker.
    pub(crate) fn viewed(&mut self, place: Place) {
        let view = Arc::new(self.routers[place].follow.view());
        for member in &view.members {
            if let Some(process) = self.process_at(&member.grpc) {
                self.routers[place].knew.insert(member.id, process);
            }
        }
        let changes = self.routers[place].fleet.update(Arc::clone(&view));
        let connected = &mut self.routers[place].connected;
        connected.extend(changes.joined.iter().map(|member| member.id));
        connected.retain(|worker| !changes.left.contains(worker));
        // I5: only with workers in the view, so that connections are bounded.
        let gone = connected.iter().find(|worker| view.get(**worker).is_none()).copied();
        if let Some(worker) = gone {
            let violation = self.violation("I5", format!("router {place} stays connected to {worker}, which has left"));
            self.broken_by.get_or_insert(violation);
        }
        for member in changes.joined {
            if let Some(process) = self.process_at(&member.grpc) {
                self.links.entry((place, member.id)).or_insert_with(|| Connection::new(process));
            }
        }
    }

    /// Ends the requests of a router that has died.
    pub(crate) fn orphans(&mut self, place: Place) -> Result<(), Violation> {
        for request in self.routers[place].choices.keys().copied().collect::<Vec<_>>() {
            let client = &mut self.clients[request as usize];
            client.end.get_or_insert(End::Broken);
            self.check_end(request)?;
        }
        Ok(())
    }
}
