//! Which workers a request runs on.
//!
//! The router's [`crate::Fleet`] turns its view of the cluster into [`Candidate`]s and asks a [`Placement`]. [`Eligible`]
//! alone decides which workers may run a request. Implementations only choose among those.

mod fetching;
mod links;
mod loading;
mod predicted;
mod slo;
mod turns;

use std::time::Duration;

use baton_latency::Backlog;
use baton_membership::Role;
use baton_types::{BatonError, ErrorKind, WorkerId};

use crate::kv_index::Holder;
use crate::prefixes::Sent;

pub use links::Links;
pub use loading::Load;
pub use predicted::Predicted;
pub use slo::{Missed, Slo};
pub use turns::{LeastLoaded, RoundRobin};

/// One worker, as placement sees it.
#[derive(Clone, Copy, PartialEq, Debug)]
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
    /// What it has to do, as it says, and what was sent to it since; `None`: it says nothing.
    pub load: Option<Backlog>,
    /// How fast KV leaves it, as it says.
    pub links: &'a Links,
    /// Workers with equal ones exchange prefixes; 0: it exchanges none.
    pub exchanges: u64,
}

/// The request to place.
#[derive(Clone, Copy, Debug)]
pub struct PlacementInput<'a> {
    /// The model asked for.
    pub model: &'a str,
    /// False: the decode worker prefills, even if prefill workers are alive.
    pub split: bool,
    /// A prefill worker is to compute the prompt, where there is one, however short it is.
    pub handed_over: bool,
    /// Keep this decode worker; only a prefill worker is wanted.
    pub decode: Option<WorkerId>,
    /// Workers that failed this request.
    pub avoid: &'a [WorkerId],
    /// Prefill and decode workers between which no handoff is to be placed.
    pub apart: &'a [(WorkerId, WorkerId)],
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Tokens that the answer is expected to have.
    pub answer: u32,
    /// Tokens of a block.
    pub block_size: u32,
    /// When its tokens have to come, where that is predicted.
    pub slo: Slo,
    /// Decode blocks are reserved while a prompt waits where it has to wait for at least so long, in seconds.
    pub late: f64,
    /// What predictions leave out.
    pub delays: Delays,
    /// Workers that hold most of the prompt, as they say. Preferred while they have room.
    pub held: Held<'a>,
    /// Where the prompt's beginning was sent lately ([`crate::Prefixes`]): these workers may not say yet that they hold it.
    pub sent: Option<Sent>,
    /// A number that decides among equals, another one for each placement and each router.
    pub turn: u64,
}

/// Seconds that predictions leave out, as was learned from what came of earlier ones.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Delays {
    /// Of the first token.
    pub first_token: f64,
    /// Of [`Terms::token`].
    pub token: f64,
    /// Of [`Terms::expected`].
    pub expected: f64,
}

impl PlacementInput<'_> {
    /// Leading tokens of the prompt that a worker need not compute: it says that it holds them, or computes them already. Never the last one,
    /// and nothing of what a decode worker waits for.
    pub(crate) fn cached(&self, worker: WorkerId) -> u32 {
        let told = self.held.by.iter().find(|holder| holder.worker == worker).map_or(0, |holder| holder.blocks);
        let there = |to: Placed| to.prefill.unwrap_or(to.decode) == worker;
        let sent = self.sent.filter(|sent| sent.lately && there(sent.to)).map_or(0, |sent| sent.blocks);
        told.max(sent).saturating_mul(self.block_size).min(self.tokens.saturating_sub(1))
    }

    /// Leading blocks of the prompt that a worker says it has in its own store.
    fn stored(&self, worker: WorkerId) -> u32 {
        self.held.stored.iter().find(|holder| holder.worker == worker).map_or(0, |holder| holder.blocks)
    }
}

/// Who holds how much of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct Held<'a> {
    /// Blocks of the prompt.
    pub blocks: usize,
    /// Those that hold most of them in their pools, the one with most first.
    pub by: &'a [Holder],
    /// Those that hold most of them in their own stores, the one with most first.
    pub stored: &'a [Holder],
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

/// A prefix that a worker is to take from another one before it computes the rest of the prompt.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fetch {
    /// The worker that computes the rest.
    pub to: WorkerId,
    /// The worker that holds the prefix.
    pub from: WorkerId,
    /// Tokens of the prefix.
    pub tokens: u32,
    /// How long that takes, as predicted, in seconds.
    pub seconds: f64,
    /// How long a step takes of the worker that computes the rest, in seconds: it hears and says nothing meanwhile.
    pub step: f64,
}

/// When decode blocks are reserved for a prompt that a prefill worker computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reserve {
    /// Before the prefill worker is asked: it is told where the KV goes with the prompt. For workers that know nothing else.
    First,
    /// While the prefill worker takes the prompt in, which is told where the KV goes as soon as that is known. Each of both answers between two
    /// of its steps: so a prompt waits for the longer of two steps, and not for one after the other.
    Meanwhile,
    /// When the prompt's turn is near at the prefill worker, because it has to wait there ([`crate::Fleet::reserve_late`]).
    Late,
}

/// Where a request runs, and why there.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Chosen {
    /// Where.
    pub placed: Placed,
    /// `None`: nothing was predicted.
    pub why: Option<Why>,
    /// Number of the placement, which [`crate::Fleet::place`] gives it.
    pub number: u64,
    /// When its decode blocks are to be reserved, if a prefill worker computes the prompt.
    pub reserve: Reserve,
    /// What the worker that computes takes from another one first. It helps; where it fails, all is computed.
    pub fetch: Option<Fetch>,
    /// What the worker that computes is expected to take from its own store first. It decides so itself.
    pub load: Option<Load>,
}

/// Why a request was placed where it was.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Why {
    /// What is predicted there.
    pub terms: Terms,
    /// The best of the other options.
    pub next: Option<(Placed, Terms)>,
    /// Number of options.
    pub considered: u32,
}

/// What is predicted for a request, in seconds.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Terms {
    /// Until the decode worker has blocks for it.
    pub room: f64,
    /// Until the prompts before it are computed.
    pub queue: f64,
    /// Computing what is not cached of its prompt.
    pub compute: f64,
    /// The part of the handoff that nothing hides.
    pub handoff: f64,
    /// From when it is placed to its first token: room, queue, compute, and what such predictions left out before.
    pub first_token: f64,
    /// A step of the decode worker, with this answer in it.
    pub step: f64,
    /// From one token of the answer to the next, by that and by what such predictions left out before. An SLO is compared with this: the answers
    /// that are there now may be as many when this one begins.
    pub token: f64,
    /// The same on average over the answer: answers that are there now end, and others begin.
    pub later: f64,
    /// The most likely time from one token to the next, by that and by what such predictions left out before.
    pub expected: f64,
    /// The expected tokens of the answer.
    pub answer: f64,
    /// What others wait longer for it, all together.
    pub others: f64,
}

impl Terms {
    /// What is least where the request is placed.
    pub fn sum(&self) -> f64 {
        self.waits() + self.handoff + self.answer + self.others
    }

    fn waits(&self) -> f64 {
        self.room + self.queue + self.compute
    }

    /// With what the times to the first token, and from token to token, leave out.
    fn delayed(self, delays: Delays) -> Terms {
        let Delays { first_token, token, expected } = delays;
        Terms {
            first_token: self.waits() + first_token,
            token: self.step + token,
            expected: (self.later + expected).max(0.0),
            ..self
        }
    }
}

impl From<Placed> for Chosen {
    fn from(placed: Placed) -> Chosen {
        Chosen { placed, why: None, number: 0, reserve: Reserve::First, fetch: None, load: None }
    }
}

/// No worker can take the request.
#[derive(Clone, PartialEq, Debug, thiserror::Error)]
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
    /// There are workers, and its tokens would come too late from each.
    #[error(transparent)]
    Late(Box<Missed>),
}

impl PlacementError {
    /// When the same request would be taken; `None`: nothing says.
    pub fn retry_after(&self) -> Option<Duration> {
        match self {
            PlacementError::Late(missed) => missed.retry_after(),
            PlacementError::NoDecodeWorker { .. } | PlacementError::AllFailed { .. } => None,
        }
    }
}

impl BatonError for PlacementError {
    fn kind(&self) -> ErrorKind {
        match self {
            PlacementError::NoDecodeWorker { .. } | PlacementError::AllFailed { .. } => ErrorKind::Unavailable,
            PlacementError::Late(_) => ErrorKind::ResourceExhausted,
        }
    }
}

/// A policy that chooses workers. Deterministic: the same calls in the same order give the same answers.
pub trait Placement: Send {
    /// Chooses a decode worker. If the request is to be split and a prefill worker of the same layout is alive, chooses that
    /// too. Never chooses workers that are draining, serve another model or are in `request.avoid`. A pinned decode worker
    /// (`request.decode`) is kept even if it is draining or in `request.avoid`.
    fn place(&mut self, view: &[Candidate<'_>], request: &PlacementInput<'_>) -> Result<Chosen, PlacementError>;

    /// So many workers of each role are enough to choose from, beside those that hold the prompt.
    fn looks_at(&self) -> usize {
        usize::MAX
    }
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

    /// Prefill workers to choose from. None when the request is not to be split.
    fn prefills(&self) -> impl Iterator<Item = &'a Candidate<'a>> {
        self.usable(Role::Prefill).filter(|_| self.request.split)
    }

    /// Whether a prefill worker may hand KV over to a decode worker.
    fn pair(&self, prefill: &Candidate<'_>, decode: &Candidate<'_>) -> bool {
        prefill.layout == decode.layout && !self.request.apart.contains(&(prefill.id, decode.id))
    }
}

#[cfg(test)]
mod tests;
