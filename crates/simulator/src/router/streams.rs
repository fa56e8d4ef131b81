//! A router's streams to workers, one for each leg of a choice.

use baton_policy::{ChoiceInput, LegEnd, WorkerLease};
use baton_types::WorkerId;

use crate::Violation;
use crate::control::{Call, Down, Link, Up};
use crate::events::{Place, Process};
use crate::world::World;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Leg {
    Decode,
    Prefill,
}

/// A choice's stream to a worker.
pub(super) struct Stream {
    call: Call,
    link: Link,
    lease: WorkerLease,
}

impl World {
    pub(super) fn open_stream(
        &mut self,
        place: Place,
        request: u64,
        worker: WorkerId,
        leg: Leg,
        message: impl FnOnce(Call) -> Up,
    ) -> Result<(), LegEnd> {
        let now = self.clock_now(Process::Router(place));
        let router = &mut self.routers[place];
        let lease = router.fleet.lease(worker)?;
        if let Some(chosen) = router.choices.get(&request).and_then(|flight| flight.chosen) {
            router.fleet.opened(worker, chosen.number, now);
        }
        self.next_call += 1;
        let (call, link) = (self.next_call, (place, worker));
        router.calls.insert(call, (request, leg));
        let mut fetch = None;
        if let Some(flight) = router.choices.get_mut(&request) {
            flight.recovering = None;
            fetch = flight.fetch.take_if(|fetch| router.fetching.get(fetch).is_none_or(|of| of.is_taken_by(link)));
            let stream = Some(Stream { call, link, lease });
            match leg {
                Leg::Decode => flight.decode = stream,
                Leg::Prefill => flight.prefill = stream,
            }
        }
        self.send_after(place, fetch, (call, link), message(call));
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

    pub(super) fn drop_stream(&mut self, place: Place, request: u64, leg: Leg) {
        if let Some(Stream { call, link, .. }) = self.take_stream(place, request, leg) {
            self.drop_call(link, call);
        }
    }

    /// Cancels a call, if it is open.
    pub(super) fn drop_call(&mut self, link: Link, call: Call) {
        if self.links.get_mut(&link).is_some_and(|connection| connection.calls.remove(&call)) {
            self.send_up(link, Up::Cancel { call });
        }
    }

    /// Sends the target of a request whose prefill stream was opened without one.
    pub(super) fn send_target(&mut self, place: Place, request: u64, target: Vec<u8>) {
        let stream = self.routers[place].choices.get(&request).and_then(|flight| flight.prefill.as_ref());
        let Some((call, link)) = stream.map(|stream| (stream.call, stream.link)) else { return };
        if self.links.get(&link).is_some_and(|connection| connection.calls.contains(&call)) {
            self.send_up(link, Up::Target { call, target });
        }
    }

    /// Handles a worker's message.
    pub(crate) fn router_heard(&mut self, link: Link, message: Down) -> Result<(), Violation> {
        let place = link.0;
        let (call, input) = match message {
            Down::Probed => return self.probed(link, true),
            Down::DecodeSaid(call, word) => (call, Ok(ChoiceInput::DecodeSaid(word))),
            Down::PrefillSaid(call, word) => (call, Ok(ChoiceInput::PrefillSaid(word))),
            Down::Moved(call, answer) => return self.prefix_heard(place, call, Ok(answer)),
            Down::Ended(call, end) => (call, Err(end)),
        };
        if let Err(end) = &input
            && self.routers[place].fetch_calls.contains_key(&call)
        {
            return self.prefix_heard(place, call, Err(end.clone()));
        }
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
}
