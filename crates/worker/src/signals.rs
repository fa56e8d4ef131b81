//! What an autoscaler wants to know of a worker, at `/load` of its admin endpoint.
//!
//! One number, `load`, is enough to scale a role: 1 is a worker at its limit. The others say what it comes from.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use baton_roles::{Load, Snapshot};
use serde::Serialize;
use tokio::sync::watch;

/// What a worker is to keep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Time to a first token.
    pub ttft: Duration,
    /// Time between two tokens of an answer.
    pub itl: Duration,
    /// Most sequences in the running batch.
    pub max_running: u32,
}

/// The signals of one worker.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Signals {
    /// The largest of five shares: `queue_seconds` / the target of the TTFT; `prefilling`; (ITL - fastest step) / (target of the ITL - fastest
    /// step); `kv_in_use`; and sequences, running and waiting / `max_running`. 0 while the worker drains: nothing has to replace it.
    pub load: f64,
    /// Prompt tokens that are to be computed here.
    pub queued_tokens: u64,
    /// How long they will take at the rate of the latest prompts.
    pub queue_seconds: f64,
    /// Mean time between two tokens of an answer, lately; 0: there were none.
    pub inter_token_seconds: f64,
    /// Share of the time in which prompts were computed, lately.
    pub prefilling: f64,
    /// Share of the pool's blocks that requests use; blocks that are only cached do not count.
    pub kv_in_use: f64,
    /// Sequences in the batch, receiving or held.
    pub running: u32,
    /// Sequences in the queue.
    pub waiting: u32,
}

impl Signals {
    pub(crate) fn new(snapshot: &Snapshot, load: &Load, limits: Limits) -> Signals {
        let Limits { ttft, itl, max_running } = limits;
        let blocks = snapshot.blocks;
        let busy = blocks.used + blocks.lent + blocks.quarantined;
        let kv_in_use = f64::from(busy) / f64::from(blocks.total).max(1.0);
        let queue_seconds = load.ahead.as_secs_f64();
        let shares = [
            queue_seconds / ttft.as_secs_f64(),
            load.prefilling,
            slowed(load.inter_token, load.fastest, itl),
            kv_in_use,
            f64::from(snapshot.running + snapshot.waiting) / f64::from(max_running),
        ];
        Signals {
            load: if snapshot.draining { 0.0 } else { shares.into_iter().fold(0.0, f64::max) },
            queued_tokens: load.queued_tokens,
            queue_seconds,
            inter_token_seconds: load.inter_token.as_secs_f64(),
            prefilling: load.prefilling,
            kv_in_use,
            running: snapshot.running,
            waiting: snapshot.waiting,
        }
    }
}

/// How much of the time that may be added to the fastest step is. 0 where even that step takes too long: no number of workers would help.
fn slowed(inter_token: Duration, fastest: Duration, itl: Duration) -> f64 {
    match itl.checked_sub(fastest) {
        Some(room) if !room.is_zero() => inter_token.saturating_sub(fastest).as_secs_f64() / room.as_secs_f64(),
        _ => 0.0,
    }
}

/// The route. Until the worker computes, it answers 503.
pub(crate) fn routes(signals: watch::Receiver<Option<Signals>>) -> Router {
    Router::new().route("/load", get(tell)).with_state(signals)
}

async fn tell(State(signals): State<watch::Receiver<Option<Signals>>>) -> Response {
    let now = *signals.borrow();
    match now {
        Some(signals) => Json(signals).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the model is being loaded\n").into_response(),
    }
}

/// Reports that nobody hears.
#[cfg(test)]
pub(crate) fn unheard() -> crate::report::Told {
    let second = Duration::from_secs(1);
    let limits = Limits { ttft: second, itl: second, max_running: 1 };
    crate::report::Told { signals: watch::Sender::new(None), limits, news: Default::default() }
}

#[cfg(test)]
mod tests {
    use baton_engine::BlockCounts;

    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    fn of(change: impl FnOnce(&mut Snapshot, &mut Load)) -> Signals {
        let blocks = BlockCounts { total: 100, free: 10, used: 20, cached: 60, lent: 6, quarantined: 4 };
        let mut snapshot = Snapshot { running: 2, waiting: 0, blocks, ..Snapshot::default() };
        let mut load = Load { queued_tokens: 7, ahead: MS(100), fastest: MS(10), inter_token: MS(20), prefilling: 0.1 };
        change(&mut snapshot, &mut load);
        Signals::new(&snapshot, &load, Limits { ttft: MS(2000), itl: MS(50), max_running: 10 })
    }

    #[test]
    fn the_load_is_the_largest_share() {
        let calm = of(|_, _| {});
        assert_eq!((calm.load, calm.kv_in_use, calm.queued_tokens, calm.running), (0.3, 0.3, 7, 2));
        assert_eq!((calm.inter_token_seconds, calm.queue_seconds, calm.prefilling), (0.02, 0.1, 0.1));
        assert_eq!(of(|_, load| load.ahead = MS(3000)).load, 1.5);
        assert_eq!(of(|_, load| load.inter_token = MS(70)).load, 1.5);
        assert_eq!(of(|_, load| load.prefilling = 0.75).load, 0.75);
        assert_eq!(of(|snapshot, _| snapshot.waiting = 13).load, 1.5);
    }

    #[test]
    fn nobody_comes_where_more_workers_would_not_help() {
        let slow = of(|_, load| (load.fastest, load.inter_token) = (MS(60), MS(90)));
        assert_eq!((slow.load, slow.inter_token_seconds), (0.3, 0.09), "the model is slower than the SLO when alone");
        assert_eq!(of(|snapshot, _| snapshot.draining = true).load, 0.0);
        let empty = Signals::new(&Snapshot::default(), &Load::default(), unheard().limits);
        assert_eq!(empty.load, 0.0, "a pool of no blocks is not used");
    }
}
