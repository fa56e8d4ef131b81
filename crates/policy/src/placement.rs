//! Which workers a request runs on.
//!
//! The router's [`crate::Fleet`] turns its view of the cluster into [`Candidate`]s and asks a [`Placement`]. [`Eligible`]
//! alone decides which workers may run a request. Implementations only choose among those.

use baton_membership::Role;
use baton_types::{BatonError, ErrorKind, WorkerId};

use crate::kv_index::Holder;
use crate::prefixes::Sent;

/// One worker, as placement sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Candidate<'a> {
    /// Which worker.
    pub id: WorkerId,
    /// Its role: [`Role::Prefill`] or [`Role::Decode`].
    pub role: Role,
    /// The model it serves.
    pub model: &'a str,
    /// Fingerprint of its KV layout without the data type. Handoffs are possible only between workers with equal fingerprints.
    pub layout: u64,
    /// It takes no new requests.
    pub draining: bool,
    /// Requests this router has running on it.
    pub in_flight: u32,
}

/// The request to place.
#[derive(Clone, Copy, Debug)]
pub struct PlacementInput<'a> {
    /// The model asked for.
    pub model: &'a str,
    /// False: the decode worker prefills, even if prefill workers are alive.
    pub split: bool,
    /// Keep this decode worker; only a prefill worker is wanted.
    pub decode: Option<WorkerId>,
    /// Workers that failed this request.
    pub avoid: &'a [WorkerId],
    /// Prefill and decode workers between which no handoff is to be placed.
    pub apart: &'a [(WorkerId, WorkerId)],
    /// Workers that hold most of the prompt, as they say. Preferred while they have room.
    pub held: Held<'a>,
    /// Where the prompt's beginning was sent lately ([`crate::Prefixes`]): these workers may not say yet that they hold it.
    pub sent: Option<Sent>,
}

/// Who holds how much of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held<'a> {
    /// Blocks of the prompt.
    pub blocks: usize,
    /// Those that hold most of them, the one with most first.
    pub by: &'a [Holder],
}

impl Held<'_> {
    /// Workers that hold more than half of the prompt, the one with most first, and `sent` in its place among them. Less is not worth
    /// deviating from placement in turn.
    fn mostly(&self, sent: Option<(WorkerId, u32)>) -> Vec<WorkerId> {
        let most = |holder: &&Holder| holder.blocks as usize * 2 > self.blocks;
        let mut by: Vec<(WorkerId, u32)> = self.by.iter().take_while(most).map(|h| (h.worker, h.blocks)).collect();
        if let Some(sent) = sent {
            by.insert(by.partition_point(|(_, blocks)| *blocks >= sent.1), sent);
        }
        by.into_iter().map(|(worker, _)| worker).collect()
    }
}

/// Where a request runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Placed {
    /// The decode worker.
    pub decode: WorkerId,
    /// The prefill worker; None: the decode worker prefills locally.
    pub prefill: Option<WorkerId>,
}

/// No worker can take the request.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PlacementError {
    /// No decode worker serves the model now.
    #[error("no decode worker for model {model:?} is available ({draining} draining); start one, or retry later")]
    NoDecodeWorker {
        /// The model asked for.
        model: String,
        /// Decode workers of the model that are draining.
        draining: usize,
    },
    /// There are decode workers, but each of them has failed this request.
    #[error("all {failed} decode workers for model {model:?} failed this request")]
    AllFailed {
        /// The model asked for.
        model: String,
        /// Decode workers left out for that reason.
        failed: usize,
    },
}

impl BatonError for PlacementError {
    fn kind(&self) -> ErrorKind {
        ErrorKind::Unavailable
    }
}

/// A policy that chooses workers. Deterministic: the same calls in the same order give the same answers.
pub trait Placement: Send {
    /// Chooses a decode worker. If the request is to be split and a prefill worker of the same layout is alive, chooses that
    /// too. Never chooses workers that are draining, serve another model or are in `request.avoid`. A pinned decode worker
    /// (`request.decode`) is kept even if it is draining or in `request.avoid`.
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Placed, PlacementError>;
}

/// The workers that may run a request.
struct Eligible<'a> {
    view: &'a [Candidate<'a>],
    request: &'a PlacementInput<'a>,
}

impl<'a> Eligible<'a> {
    fn serving(&self, role: Role) -> impl Iterator<Item = &'a Candidate<'a>> {
        let model = self.request.model;
        self.view.iter().filter(move |c| c.role == role && c.model == model)
    }

    fn usable(&self, role: Role) -> impl Iterator<Item = &'a Candidate<'a>> {
        let avoid = self.request.avoid;
        self.serving(role).filter(move |c| !c.draining && !avoid.contains(&c.id))
    }

    /// Decode workers to choose from, never empty. A pinned worker is the only choice, even if it is draining by now, because
    /// it has already taken the request.
    fn decode(&self) -> Result<Vec<&'a Candidate<'a>>, PlacementError> {
        let found: Vec<_> = match self.request.decode {
            Some(pinned) => self.serving(Role::Decode).filter(|c| c.id == pinned).collect(),
            None => self.usable(Role::Decode).collect(),
        };
        if !found.is_empty() {
            return Ok(found);
        }
        let model = self.request.model.to_owned();
        let failed = self.serving(Role::Decode).filter(|c| !c.draining && self.request.avoid.contains(&c.id)).count();
        if failed > 0 {
            return Err(PlacementError::AllFailed { model, failed });
        }
        Err(PlacementError::NoDecodeWorker {
            model,
            draining: self.serving(Role::Decode).filter(|c| c.draining).count(),
        })
    }

    /// Prefill workers that may hand KV over to `decode`. Empty when the request is not to be split.
    fn prefill(&self, decode: &Candidate<'_>) -> Vec<&'a Candidate<'a>> {
        if !self.request.split {
            return Vec::new();
        }
        let apart = |c: &Candidate<'_>| self.request.apart.contains(&(c.id, decode.id));
        self.usable(Role::Prefill).filter(|c| c.layout == decode.layout && !apart(c)).collect()
    }
}

/// The worker that had the last turn, for each role.
#[derive(Clone, Debug, Default)]
struct Turns {
    decode: Option<WorkerId>,
    prefill: Option<WorkerId>,
}

/// The worker with the next id after `last`. Ids, unlike positions, keep the turns intact when the view changes.
fn in_turn<'a>(choices: &[&'a Candidate<'a>], last: &mut Option<WorkerId>) -> Option<&'a Candidate<'a>> {
    let after = |id: WorkerId| last.is_none_or(|l| id > l);
    let lowest = |choices: &mut dyn Iterator<Item = &'a Candidate<'a>>| choices.min_by_key(|c| c.id);
    let chosen = lowest(&mut choices.iter().copied().filter(|c| after(c.id)))
        .or_else(|| lowest(&mut choices.iter().copied()))?;
    *last = Some(chosen.id);
    Some(chosen)
}

/// Extra requests, compared with the idlest worker of its role, that a worker may have and still be preferred for its KV.
/// Another worker would have to prefill and hand over KV that this one already has. One more answer in this worker's batch
/// costs only a share of its bandwidth.
const ROOM: u32 = 8;

/// The worker that has room ([`ROOM`]) and most of the prompt: it says that it holds it, or it is the one of `sent`.
fn nearest<'a>(
    choices: &[&'a Candidate<'a>],
    request: &PlacementInput<'_>,
    sent: impl Fn(Placed) -> Option<WorkerId>,
) -> Option<&'a Candidate<'a>> {
    let sent = request.sent.and_then(|beginning| Some((sent(beginning.to)?, beginning.blocks)));
    let mut ranked: Vec<(WorkerId, usize)> = request.held.mostly(sent).into_iter().zip(0..).collect();
    ranked.sort_unstable();
    let least = choices.iter().map(|c| c.in_flight).min()?;
    let with_room = choices.iter().copied().filter(|c| c.in_flight <= least.saturating_add(ROOM));
    let rank = |c: &Candidate<'_>| {
        let at = ranked.partition_point(|(id, _)| *id < c.id);
        ranked.get(at).filter(|(id, _)| *id == c.id).map(|(_, rank)| *rank)
    };
    with_room.filter_map(|c| Some((rank(c)?, c))).min_by_key(|(rank, _)| *rank).map(|(_, c)| c)
}

type Narrow = for<'a> fn(Vec<&'a Candidate<'a>>) -> Vec<&'a Candidate<'a>>;

fn place_in_turn(
    turns: &mut Turns,
    view: &[Candidate<'_>],
    request: &PlacementInput<'_>,
    narrow: Narrow,
) -> Result<Placed, PlacementError> {
    let eligible = Eligible { view, request };
    let choices = eligible.decode()?;
    // A worker that the request has already, or that is preferred for its KV, does not use up a turn.
    let pinned = choices.first().copied().filter(|_| request.decode.is_some());
    let decode = match pinned.or_else(|| nearest(&choices, request, |sent| Some(sent.decode))) {
        Some(decode) => decode,
        None => {
            let choices = narrow(choices);
            in_turn(&choices, &mut turns.decode).unwrap_or(choices[0])
        }
    };
    let choices = eligible.prefill(decode);
    let prefill =
        nearest(&choices, request, |sent| sent.prefill).or_else(|| in_turn(&narrow(choices), &mut turns.prefill));
    Ok(Placed { decode: decode.id, prefill: prefill.map(|c| c.id) })
}

/// Takes workers in turn, separately for each role.
#[derive(Clone, Debug, Default)]
pub struct RoundRobin {
    turns: Turns,
}

impl Placement for RoundRobin {
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Placed, PlacementError> {
        place_in_turn(&mut self.turns, view, request, |choices| choices)
    }
}

/// Takes the worker with the fewest requests in flight. Equals take turns.
#[derive(Clone, Debug, Default)]
pub struct LeastLoaded {
    turns: Turns,
}

impl Placement for LeastLoaded {
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Placed, PlacementError> {
        place_in_turn(&mut self.turns, view, request, |choices| {
            let least = choices.iter().map(|c| c.in_flight).min();
            choices.into_iter().filter(|c| Some(c.in_flight) == least).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(id: u64, role: Role) -> Candidate<'static> {
        Candidate { id: WorkerId(id), role, model: "m", layout: 1, draining: false, in_flight: 0 }
    }

    fn view() -> Vec<Candidate<'static>> {
        vec![
            worker(1, Role::Prefill),
            worker(2, Role::Prefill),
            worker(11, Role::Decode),
            worker(12, Role::Decode),
            worker(13, Role::Decode),
        ]
    }

    const ASK: PlacementInput<'static> = PlacementInput {
        model: "m",
        split: true,
        decode: None,
        avoid: &[],
        sent: None,
        held: Held { blocks: 0, by: &[] },
        apart: &[],
    };

    /// Every implementation, for tests of their common behaviour.
    fn all() -> Vec<Box<dyn Placement>> {
        vec![Box::<RoundRobin>::default(), Box::<LeastLoaded>::default()]
    }

    fn ids(placed: Placed) -> (u64, Option<u64>) {
        (placed.decode.0, placed.prefill.map(|p| p.0))
    }

    #[test]
    fn round_robin_gives_each_worker_its_turn_whatever_the_order_of_the_view() {
        let mut policy = RoundRobin::default();
        let mut view = view();
        let mut seen = Vec::new();
        for _ in 0..6 {
            seen.push(ids(policy.place(&view, &ASK).unwrap()));
            view.rotate_left(1);
        }
        assert_eq!(seen, [(11, Some(1)), (12, Some(2)), (13, Some(1)), (11, Some(2)), (12, Some(1)), (13, Some(2))]);
    }

    #[test]
    fn a_worker_that_leaves_does_not_upset_the_turn() {
        let mut policy = RoundRobin::default();
        let mut view = view();
        assert_eq!(policy.place(&view, &ASK).unwrap().decode.0, 11);
        view.retain(|c| c.id.0 != 11);
        assert_eq!(policy.place(&view, &ASK).unwrap().decode.0, 12);
        assert_eq!(policy.place(&view, &ASK).unwrap().decode.0, 13);
    }

    #[test]
    fn least_loaded_takes_the_idlest_of_each_role() {
        let mut policy = LeastLoaded::default();
        let mut view = view();
        for (at, load) in [(0, 4), (1, 1), (2, 3), (3, 2), (4, 2)] {
            view[at].in_flight = load;
        }
        assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (12, Some(2)));
        assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (13, Some(2)), "in turn among equals");
    }

    #[test]
    fn draining_failed_and_foreign_workers_are_never_chosen() {
        for mut policy in all() {
            let mut view = view();
            view[2].draining = true;
            view[3].model = "other";
            view[0].layout = 2;
            for _ in 0..4 {
                assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (13, Some(2)));
            }
            let avoid = [WorkerId(2)];
            let placed = policy.place(&view, &PlacementInput { avoid: &avoid, ..ASK }).unwrap();
            assert_eq!(ids(placed), (13, None), "no prefill worker of its layout left: decode prefills");
        }
    }

    #[test]
    fn a_pinned_decode_worker_stays_and_only_prefill_is_chosen() {
        for mut policy in all() {
            let mut view = view();
            view[3].draining = true;
            view[3].in_flight = 9;
            let avoid = [WorkerId(1)];
            let ask = PlacementInput { decode: Some(WorkerId(12)), avoid: &avoid, ..ASK };
            assert_eq!(ids(policy.place(&view, &ask).unwrap()), (12, Some(2)));
        }
    }

    /// The choices of one request, and the next turn of a conversation, go to the workers that have their KV.
    #[test]
    fn workers_that_have_the_prefix_are_taken_where_they_have_room() {
        for mut policy in all() {
            let mut view = view();
            let sent = Some(Sent { to: Placed { decode: WorkerId(12), prefill: Some(WorkerId(2)) }, blocks: 1 });
            for _ in 0..3 {
                assert_eq!(ids(policy.place(&view, &PlacementInput { sent, ..ASK }).unwrap()), (12, Some(2)));
            }
            assert_eq!(ids(policy.place(&view, &ASK).unwrap()), (11, Some(1)), "they took no turn");
            (view[1].in_flight, view[3].in_flight) = (ROOM, ROOM);
            assert_eq!(ids(policy.place(&view, &PlacementInput { sent, ..ASK }).unwrap()), (12, Some(2)));
            view[3].in_flight += 1;
            let more = [(); 3].map(|()| ids(policy.place(&view, &PlacementInput { sent, ..ASK }).unwrap()));
            assert!(
                more.iter().any(|placed| placed.0 != 12) && more.iter().all(|placed| placed.1 == Some(2)),
                "{more:?}"
            );
            let avoid = [WorkerId(2)];
            let ask = PlacementInput { decode: Some(WorkerId(13)), avoid: &avoid, sent, ..ASK };
            assert_eq!(ids(policy.place(&view, &ask).unwrap()), (13, Some(1)), "nearness is no must");
        }
    }

    /// What workers say that they hold counts for more than where prompts were sent.
    #[test]
    fn the_worker_that_holds_most_is_taken_where_it_has_room() {
        for mut policy in all() {
            let mut view = view();
            let holder = |id, blocks| Holder { worker: WorkerId(id), blocks };
            let by = [holder(13, 9), holder(2, 8), holder(12, 6), holder(11, 5)];
            let to = Placed { decode: WorkerId(11), prefill: Some(WorkerId(1)) };
            let (held, sent) = (Held { blocks: 10, by: &by }, Some(Sent { to, blocks: 6 }));
            let ask = PlacementInput { held, sent, ..ASK };
            assert_eq!(ids(policy.place(&view, &ask).unwrap()), (13, Some(2)));
            view[4].in_flight = ROOM + 1;
            view[1].draining = true;
            assert_eq!(
                ids(policy.place(&view, &ask).unwrap()),
                (12, Some(1)),
                "the next that holds most; where it was sent"
            );
            view[3].draining = true;
            assert_eq!(policy.place(&view, &ask).unwrap().decode.0, 11, "half is not enough, but it was sent there");
            let whole = Some(Sent { to, blocks: 10 });
            view[4].in_flight = 0;
            assert_eq!(
                policy.place(&view, &PlacementInput { sent: whole, ..ask }).unwrap().decode.0,
                11,
                "it computes all of it"
            );
            view[4].in_flight = ROOM + 1;
            let ask = PlacementInput { sent: None, ..ask };
            let placed = [(); 2].map(|()| policy.place(&view, &ask).unwrap().decode.0);
            assert!(placed.contains(&11), "in turn: {placed:?}");
        }
    }

    #[test]
    fn aggregated_requests_get_no_prefill_worker() {
        for mut policy in all() {
            let placed = policy.place(&view(), &PlacementInput { split: false, ..ASK }).unwrap();
            assert_eq!(placed.prefill, None);
        }
    }

    #[test]
    fn an_error_says_why_nobody_can() {
        for mut policy in all() {
            let none = PlacementError::NoDecodeWorker { model: "m".into(), draining: 0 };
            assert_eq!(policy.place(&view()[..2], &ASK), Err(none));
            let avoid = [WorkerId(11), WorkerId(12), WorkerId(13)];
            let all_failed = PlacementError::AllFailed { model: "m".into(), failed: 3 };
            assert_eq!(policy.place(&view(), &PlacementInput { avoid: &avoid, ..ASK }), Err(all_failed));
            let mut draining = view();
            draining.iter_mut().for_each(|c| c.draining = true);
            let text = policy.place(&draining, &ASK).unwrap_err().to_string();
            assert!(text.contains("3 draining"), "{text}");
        }
    }
}
