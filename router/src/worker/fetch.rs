//! A prefix that one worker takes from another before it computes the rest of a prompt.
//!
//! The worker that takes it is asked first, and lends blocks. Then the prompt may be sent to it: there it waits for the prefix. Meanwhile the
//! worker that holds the prefix is asked to write it. Whatever fails, the prompt is computed: a worker that gives or takes nothing is no worse
//! for other requests, so nothing is held against it.

use std::sync::Weak;
use std::time::Duration;

use baton_policy::Fetch;
use baton_proto::v1;
use baton_proto::v1::exchange_client::ExchangeClient;
use baton_proto::v1::fetch_event::Event;
use baton_runtime::metrics as names;
use metrics::counter;
use tokio::sync::oneshot;
use tokio::time::timeout;
use tonic::{Code, Request, Status, Streaming};

use super::Workers;
use super::link::WorkerChannel;

/// How long a prompt is held back at most until its fetch has begun. It would be computed from its beginning if it came before.
const BEGINS: Duration = Duration::from_millis(100);
/// A fetch may take so many times longer than predicted, and so long at least: a prompt waits for it.
const PATIENCE: f64 = 4.0;
const LEAST: Duration = Duration::from_millis(500);

/// Ends when a fetch has begun, or when it is clear that it does not.
pub(crate) type FetchBegins = oneshot::Receiver<()>;

/// Milliseconds that a fetch may take, for a request that has so much time left. Never 0, which means no limit.
pub(crate) fn allowed(fetch: &Fetch, left: Duration) -> u64 {
    let patience = Duration::try_from_secs_f64(fetch.seconds * PATIENCE).unwrap_or(Duration::MAX);
    (patience.max(LEAST).min(left).as_millis() as u64).max(1)
}

/// Waits for a fetch to begin.
pub(super) async fn fetch_begins(fetch: Option<FetchBegins>) {
    if let Some(begins) = fetch {
        // The other end is dropped, not used, when it does not begin.
        let _ = timeout(BEGINS, begins).await;
    }
}

/// Asks both workers, in a task of its own: what a worker fetches is of use to others even if this request ends.
pub(super) fn begin(
    workers: Weak<Workers>,
    (to, from): (WorkerChannel, WorkerChannel),
    fetch: &Fetch,
    prefix: v1::Prefix,
) -> FetchBegins {
    let (begun, begins) = oneshot::channel();
    let (limit, between) = (Duration::from_millis(prefix.deadline_ms), (fetch.from, fetch.to));
    tokio::spawn(async move {
        let request_id = prefix.request_id.clone();
        let outcome = match timeout(limit, ask(to, prefix.clone())).await.unwrap_or_else(|_| late()) {
            Err(status) => Err(("refused", status)),
            Ok((target, fetches)) => {
                let _ = begun.send(());
                let moved = timeout(limit, moves(from, fetches, v1::ServeRequest { prefix: Some(prefix), target }));
                moved.await.unwrap_or_else(|_| late()).map_err(|status| ("failed", status))
            }
        };
        let (from, to) = between;
        match &outcome {
            Ok(tokens) => tracing::debug!(request_id, %from, %to, tokens, "prefix fetched"),
            Err((how, status)) => {
                tracing::debug!(request_id, %from, %to, %status, "no prefix fetched: {how}");
                if *how == "failed" && blocked(status) {
                    workers.upgrade().iter().for_each(|workers| workers.not_fetched(to));
                }
            }
        }
        counter!(names::FETCHES, "outcome" => outcome.map_or_else(|(how, _)| how, |_| "fetched")).increment(1);
    });
    begins
}

/// Whether KV does not get from the one worker to the other. Not where the one has it no more.
fn blocked(status: &Status) -> bool {
    !matches!(status.code(), Code::NotFound | Code::ResourceExhausted)
}

fn late<T>() -> Result<T, Status> {
    Err(Status::new(Code::DeadlineExceeded, "it took too long"))
}

type Fetches = Streaming<v1::FetchEvent>;

/// Has a worker lend blocks for a prefix: returns the target to write to.
async fn ask(to: WorkerChannel, prefix: v1::Prefix) -> Result<(Vec<u8>, Fetches), Status> {
    let request = Request::new(v1::FetchRequest { prefix: Some(prefix) });
    let mut fetches = ExchangeClient::new(to).fetch(request).await?.into_inner();
    match next(&mut fetches).await? {
        Event::Reserved(v1::Reserved { target }) => Ok((target, fetches)),
        Event::Fetched(_) => Err(Status::internal("the worker fetched what it was not sent")),
    }
}

/// Has a worker write a prefix, and waits until the other one has it. Returns its tokens.
async fn moves(from: WorkerChannel, mut fetches: Fetches, request: v1::ServeRequest) -> Result<u32, Status> {
    // Dropped with this future, which ends both.
    let mut serves = ExchangeClient::new(from).serve(Request::new(request)).await?.into_inner();
    let served = async {
        match serves.message().await {
            Err(status) => status,
            // The other worker says so itself.
            Ok(_) => std::future::pending().await,
        }
    };
    tokio::select! {
        biased;
        fetched = next(&mut fetches) => match fetched? {
            Event::Fetched(v1::Fetched { tokens }) => Ok(tokens),
            Event::Reserved(_) => Err(Status::internal("the worker lent blocks twice")),
        },
        status = served => Err(status),
    }
}

/// The next event of a kind that this version knows.
async fn next(fetches: &mut Fetches) -> Result<Event, Status> {
    loop {
        let event = fetches.message().await?.ok_or_else(|| Status::unavailable("the stream ended early"))?;
        if let Some(event) = event.event {
            return Ok(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use baton_types::WorkerId;

    use super::*;

    #[test]
    fn a_fetch_may_take_a_few_times_what_is_predicted_and_no_longer_than_its_request() {
        let fetch = |seconds| Fetch { to: WorkerId(1), from: WorkerId(2), tokens: 64, seconds };
        let of = |seconds, left| allowed(&fetch(seconds), Duration::from_millis(left));
        assert_eq!([of(0.01, 9000), of(1.0, 9000), of(1.0, 700), of(1.0, 0)], [500, 4000, 700, 1]);
        assert_eq!([of(f64::NAN, 700), of(1e300, 700)], [700, 700]);
    }
}
