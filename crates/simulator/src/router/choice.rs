//! A router's requests: the real choices, told what streams and clients say.

use std::collections::VecDeque;
use std::time::Duration;

use baton_policy::{
    BlockName, Choice, ChoiceInput, Chosen, Effect, NewRequest, Patience, Prefixes, RequestLimits, Sequence, Taken,
};
use baton_types::{Class, FinishReason, SamplingParams, TokenOut};

use super::streams::{Leg, Stream};
use crate::Violation;
use crate::client::End;
use crate::control::{Ask, Up};
use crate::events::{Event, Place, Process};
use crate::stream::Micros;
use crate::world::World;

/// Most attempts per request.
const ATTEMPTS: u32 = 4;
/// How long requests wait for a worker: less than the verdict on recoveries allows.
const WORKER_WAIT: Duration = Duration::from_millis(1_500);

/// A request in progress.
pub(crate) struct InFlight {
    pub choice: Choice,
    /// Where it was placed last.
    pub(super) chosen: Option<Chosen>,
    pub(super) decode: Option<Stream>,
    pub(super) prefill: Option<Stream>,
    /// The prefix that the next decode stream waits for.
    pub(super) fetch: Option<u64>,
    /// Inputs that came while the client was taking a token: from the prefill stream, then from the decode stream.
    pub(super) early: [VecDeque<ChoiceInput>; 2],
    /// The client is taking a token.
    pub(super) busy: bool,
    /// When a leg failed; None once a stream has been opened in its place.
    pub recovering: Option<Micros>,
}

impl InFlight {
    /// Whether a stream to a worker is open.
    pub(crate) fn has_streams(&self) -> bool {
        self.decode.is_some() || self.prefill.is_some()
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
        let block_size = self.geometry.layout.block_size;
        let root = BlockName::root(&client.salt.to_string(), block_size);
        let new = NewRequest {
            prompt: client.prompt.clone().into(),
            names: Prefixes::names(root, block_size, &[], &client.prompt).into(),
            block_size,
            root,
            scored: client.params.prompt_logprobs.is_some(),
            limits: RequestLimits {
                max_tokens: client.params.max_tokens,
                stop_token_ids: client.params.stop_token_ids.clone(),
                max_attempts: ATTEMPTS,
                worker_wait: WORKER_WAIT,
            },
            deadline: at + Duration::from_micros(client.deadline),
            patience,
            slo: Default::default(),
            class: Class::of(client.priority),
            handed_over: false,
            before: None,
        };
        self.note(|| format!("request {request} comes to router {place}: {:?} tokens", new.prompt.len()));
        let choice = Choice::start(new, at);
        let early = Default::default();
        let flight = InFlight {
            choice,
            chosen: None,
            decode: None,
            prefill: None,
            fetch: None,
            early,
            busy: false,
            recovering: None,
        };
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
    pub(super) fn tell(&mut self, place: Place, request: u64, input: ChoiceInput) -> Result<(), Violation> {
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
                let chosen = self.routers[place].place_held(&ask, request, now);
                self.placed(place, request, chosen.as_ref().ok().copied());
                self.note(|| {
                    let placed = chosen.as_ref().map(|chosen| (chosen.placed, chosen.reserve));
                    format!("router {place} places request {request}: {placed:?}")
                });
                if let Err(failure) = &chosen
                    && failure.message.contains("no decode worker")
                {
                    self.check_outage(place)?;
                }
                if let Ok(chosen) = &chosen {
                    self.fetch_for(place, request, chosen.placed);
                }
                Ok(Some(ChoiceInput::from(chosen)))
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
            Effect::SendTarget(target) => {
                self.send_target(place, request, target);
                Ok(None)
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
            Effect::Note { placed, names, tokens, answer } => {
                let now = self.clock_now(Process::Router(place));
                self.routers[place].fleet.note(placed, &names, answer, now);
                self.keep(place, request, names, &tokens);
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

    /// What was counted for the request's last placement is over. `chosen`: the next one.
    fn placed(&mut self, place: Place, request: u64, chosen: Option<Chosen>) {
        let router = &mut self.routers[place];
        let Some(flight) = router.choices.get_mut(&request) else { return };
        if let Some(before) = std::mem::replace(&mut flight.chosen, chosen) {
            router.fleet.begun(&before);
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
        self.placed(place, request, None);
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
}
