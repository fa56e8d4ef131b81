//! The workers as this router sees them: the view, a connection to each, what runs where, and who is next.
//!
//! Fed with views by whoever watches the registry; asked by the request driver. Knows nothing about requests.

mod legs;
mod link;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_cluster::{Member, Role, View};
use baton_policy::{Candidate, Failure, LeastLoaded, Placed, Placement, PlacementInput, Prefixes, RoundRobin};
use baton_types::{BatonError, ErrorKind, WorkerId};

use crate::config::PlacementKind;
use link::{Lease, Link};

pub(crate) use legs::{DecodeLeg, Leg, PrefillLeg, Said};

impl std::fmt::Debug for Workers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Workers({})", self.describe())
    }
}

/// Every worker in the view.
pub(crate) struct Workers {
    model: String,
    worker_timeout: Duration,
    known: Mutex<Known>,
    placing: Mutex<Placing>,
}

/// Who is next, and who has what.
struct Placing {
    placement: Box<dyn Placement>,
    prefixes: Prefixes,
}

/// Names of prefixes whose place is known at least (I5): those of a million tokens.
const PREFIXES: usize = 1 << 16;

#[derive(Default)]
struct Known {
    view: Arc<View>,
    links: HashMap<WorkerId, Link>,
}

/// What the workers of the model take: KV tokens that a decode worker can hold, and the longest sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Capacity {
    largest: u64,
    context: Option<u32>,
    /// What a sequence needs at once, however long it is.
    window: u64,
}

impl Capacity {
    /// Nothing is known; placement will say more.
    pub const UNKNOWN: Capacity = Capacity { largest: u64::MAX, context: None, window: u64::MAX };

    /// Tokens that one answer may have in the pool of a decode worker, prompt included. Several answers of a request share
    /// what they have in common, and those for which there is no room wait for it.
    pub fn pool(&self) -> u32 {
        if self.window <= self.largest { u32::MAX } else { self.largest.try_into().unwrap_or(u32::MAX) }
    }

    /// Longest sequence that every worker takes, tokens; a request may be placed on any of them. Shorter than the model's
    /// context when a worker is set so, longer when they keep sinks and a window.
    pub fn context(&self) -> Option<u32> {
        self.context
    }

    #[cfg(test)]
    pub fn of(largest: u64) -> Capacity {
        Capacity { largest, ..Capacity::UNKNOWN }
    }

    #[cfg(test)]
    pub fn with_window(self, window: u64) -> Capacity {
        Capacity { window, ..self }
    }
}

impl Workers {
    /// Nobody yet.
    pub fn new(model: &str, placement: PlacementKind, worker_timeout: Duration) -> Workers {
        let placement: Box<dyn Placement> = match placement {
            PlacementKind::RoundRobin => Box::<RoundRobin>::default(),
            PlacementKind::LeastLoaded => Box::<LeastLoaded>::default(),
        };
        let placing = Mutex::new(Placing { placement, prefixes: Prefixes::new(PREFIXES) });
        Workers { model: model.to_owned(), worker_timeout, known: Mutex::default(), placing }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes over a new view: connects to those who joined, lets go of those who left. Requests that run on a worker
    /// that left keep their connection; only the connection itself says that a worker is lost (I7).
    pub fn update(&self, view: Arc<View>) {
        let mut known = self.known();
        known.links.retain(|id, _| view.get(*id).is_some());
        for member in view.members.iter().filter(|m| matches!(m.role, Role::Prefill | Role::Decode)) {
            if known.links.contains_key(&member.id) {
                continue;
            }
            match Link::new(member, self.worker_timeout) {
                Ok(link) => drop(known.links.insert(member.id, link)),
                Err(error) => tracing::warn!(worker = %member.id, address = member.grpc, %error, "unusable address"),
            }
        }
        known.view = view;
    }

    /// The view for people and `baton status`.
    pub fn describe(&self) -> serde_json::Value {
        let known = self.known();
        let member = |m: &Member| {
            let in_flight = known.links.get(&m.id).map_or(0, Link::in_flight);
            serde_json::json!({
                "id": m.id.to_string(),
                "role": m.role.as_str(),
                "grpc": m.grpc,
                "admin": m.admin,
                "model": m.model,
                "layout": format!("{:016x}", m.layout),
                "blocks": m.blocks,
                "block_size": m.block_size,
                "context_tokens": m.context_tokens,
                "draining": m.draining,
                "lost": known.links.get(&m.id).is_some_and(Link::lost),
                "in_flight": in_flight,
            })
        };
        serde_json::json!({
            "model": self.model,
            "revision": known.view.revision,
            "stale": known.view.stale,
            "members": known.view.members.iter().map(member).collect::<Vec<_>>(),
        })
    }

    /// Why no request can be served now; None when one can.
    pub fn not_ready(&self) -> Option<String> {
        let usable = self.candidates(|_| true).iter().any(|c| self.decodes(c) && !c.draining);
        (!usable).then(|| format!("no decode worker for model {:?} yet", self.model))
    }

    fn decodes(&self, candidate: &Candidate) -> bool {
        candidate.role == baton_policy::Role::Decode && candidate.model == self.model
    }

    /// What the workers in the view take. A worker may be set to a shorter context than its model has.
    pub fn capacity(&self) -> Capacity {
        let known = self.known();
        let serving = || {
            let works = |m: &&Member| matches!(m.role, Role::Prefill | Role::Decode) && m.model == self.model;
            known.view.members.iter().filter(works)
        };
        let context = serving().map(|m| m.context_tokens).filter(|tokens| *tokens > 0).min();
        let tokens = |m: &Member| u64::from(m.blocks) * u64::from(m.block_size);
        let decoders = || serving().filter(|m| m.role == Role::Decode);
        let largest = decoders().map(tokens).max().unwrap_or(0);
        let window = decoders().map(|m| if m.window_tokens == 0 { u64::MAX } else { m.window_tokens.into() }).max();
        match (largest, window) {
            (1.., Some(window)) => Capacity { largest, context, window },
            _ => Capacity { context, ..Capacity::UNKNOWN },
        }
    }

    fn candidates(&self, which: impl Fn(&Link) -> bool) -> Vec<Candidate> {
        let known = self.known();
        let candidate = |m: &Member| {
            let role = match m.role {
                Role::Prefill => baton_policy::Role::Prefill,
                Role::Decode => baton_policy::Role::Decode,
                Role::Supervisor => return None,
            };
            let link = known.links.get(&m.id).filter(|link| which(link))?;
            Some(Candidate {
                id: m.id,
                role,
                model: m.model.clone(),
                layout: m.layout,
                draining: m.draining,
                in_flight: link.in_flight(),
            })
        };
        known.view.members.iter().filter_map(candidate).collect()
    }

    fn placing(&self) -> MutexGuard<'_, Placing> {
        self.placing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses workers for a request of the served model, whose prompt begins with what has these names. A decode worker that
    /// is lost is asked only when there is no other.
    pub fn place(
        &self,
        split: bool,
        decode: Option<WorkerId>,
        avoid: &[WorkerId],
        names: &[u64],
    ) -> Result<Placed, Failure> {
        let Placing { placement, prefixes } = &mut *self.placing();
        let input = PlacementInput { model: &self.model, split, decode, avoid, near: prefixes.find(names) };
        let well = placement.place(&self.candidates(|link| !link.lost()), &input);
        let placed = well.or_else(|_| placement.place(&self.candidates(|_| true), &input));
        let placed = placed.map_err(|e| Failure::new(e.kind(), e.to_string()))?;
        prefixes.note(names, placed);
        Ok(placed)
    }

    /// These workers have the KV of what has these names.
    pub fn have(&self, placed: Placed, names: &[u64]) {
        self.placing().prefixes.note(names, placed);
    }

    /// The connection to a worker, counted until it is dropped.
    pub fn lease(&self, worker: WorkerId) -> Result<Lease, Failure> {
        let lease = self.known().links.get(&worker).map(Link::lease);
        lease.ok_or_else(|| Failure::new(ErrorKind::Unavailable, format!("worker {worker} has left")))
    }
}
