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

/// The times that a worker is to keep.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slo {
    /// To a first token.
    pub ttft: Duration,
    /// Between two tokens of an answer.
    pub itl: Duration,
}

/// The signals of one worker.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct Signals {
    /// The largest of three shares: `queue_seconds` of the TTFT that is to be kept, `inter_token_seconds` of the ITL, and
    /// `kv_in_use`.
    pub load: f64,
    /// Prompt tokens that are to be computed here.
    pub queued_tokens: u64,
    /// How long they will take at the rate of the latest prompts.
    pub queue_seconds: f64,
    /// Mean time between two tokens of an answer, lately; 0: there were none.
    pub inter_token_seconds: f64,
    /// Share of the pool's blocks that requests use; blocks that are only cached do not count.
    pub kv_in_use: f64,
    /// Sequences in the batch, receiving or held.
    pub running: u32,
    /// Sequences in the queue.
    pub waiting: u32,
}

impl Signals {
    pub(crate) fn new(snapshot: &Snapshot, load: &Load, slo: Slo) -> Signals {
        let blocks = snapshot.blocks;
        let busy = blocks.used + blocks.lent + blocks.quarantined;
        let kv_in_use = f64::from(busy) / f64::from(blocks.total).max(1.0);
        let (queue_seconds, inter_token_seconds) = (load.ahead.as_secs_f64(), load.inter_token.as_secs_f64());
        let shares = [queue_seconds / slo.ttft.as_secs_f64(), inter_token_seconds / slo.itl.as_secs_f64(), kv_in_use];
        Signals {
            load: shares.into_iter().fold(0.0, f64::max),
            queued_tokens: load.queued_tokens,
            queue_seconds,
            inter_token_seconds,
            kv_in_use,
            running: snapshot.running,
            waiting: snapshot.waiting,
        }
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

/// Signals that nobody hears.
#[cfg(test)]
pub(crate) fn unheard() -> (Slo, watch::Sender<Option<Signals>>) {
    (Slo { ttft: Duration::from_secs(1), itl: Duration::from_secs(1) }, watch::Sender::new(None))
}

#[cfg(test)]
mod tests {
    use baton_engine::BlockCounts;

    use super::*;

    #[test]
    fn the_load_is_the_largest_share() {
        let slo = Slo { ttft: Duration::from_secs(2), itl: Duration::from_millis(50) };
        let blocks = BlockCounts { total: 100, free: 10, used: 20, cached: 60, lent: 6, quarantined: 4 };
        let snapshot = Snapshot { running: 3, waiting: 2, blocks, ..Snapshot::default() };
        let of = |ahead, itl| {
            let (ahead, inter_token) = (Duration::from_millis(ahead), Duration::from_millis(itl));
            Signals::new(&snapshot, &Load { queued_tokens: 7, ahead, inter_token }, slo)
        };
        let calm = of(100, 5);
        assert_eq!((calm.load, calm.kv_in_use, calm.queued_tokens), (0.3, 0.3, 7));
        assert_eq!((calm.running, calm.waiting), (3, 2));
        assert_eq!((of(3000, 5).load, of(3000, 5).queue_seconds), (1.5, 3.0));
        assert_eq!((of(100, 75).load, of(100, 75).inter_token_seconds), (1.5, 0.075));
        let empty = Signals::new(&Snapshot::default(), &Load::default(), slo);
        assert_eq!(empty.load, 0.0, "a pool of no blocks is not used");
    }
}
