//! Placement in turn, and to the worker with the fewest requests.

use baton_types::WorkerId;

use super::{Candidate, Chosen, Eligible, Placed, Placement, PlacementError, PlacementInput};

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
pub(super) const ROOM: u32 = 8;

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
) -> Result<Chosen, PlacementError> {
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
    let choices: Vec<_> = eligible.prefills().filter(|prefill| eligible.pair(prefill, decode)).collect();
    let prefill =
        nearest(&choices, request, |sent| sent.prefill).or_else(|| in_turn(&narrow(choices), &mut turns.prefill));
    Ok(Placed { decode: decode.id, prefill: prefill.map(|c| c.id) }.into())
}

/// Takes workers in turn, separately for each role.
#[derive(Clone, Debug, Default)]
pub struct RoundRobin {
    turns: Turns,
}

impl Placement for RoundRobin {
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Chosen, PlacementError> {
        place_in_turn(&mut self.turns, view, request, |choices| choices)
    }
}

/// Takes the worker with the fewest requests in flight. Equals take turns.
#[derive(Clone, Debug, Default)]
pub struct LeastLoaded {
    turns: Turns,
}

impl Placement for LeastLoaded {
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Chosen, PlacementError> {
        place_in_turn(&mut self.turns, view, request, |choices| {
            let least = choices.iter().map(|c| c.in_flight).min();
            choices.into_iter().filter(|c| Some(c.in_flight) == least).collect()
        })
    }
}
