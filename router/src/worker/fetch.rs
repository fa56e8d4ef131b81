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
use futures::FutureExt;
use futures::future::Shared;
use metrics::counter;
use tokio::sync::{OwnedSemaphorePermit, oneshot};
use tokio::time::{Instant, timeout, timeout_at};
use tonic::{Code, Request, Status, Streaming};

use super::Workers;
use super::link::WorkerChannel;

/// How long a prompt is held back until its fetch has begun: two steps of the worker that takes it, which hears of neither meanwhile, and so long
/// at least and at most. It would be computed from its beginning if it came before, and what begins later is of no use for it.
const BEGINS: Duration = Duration::from_millis(100);
const MOST_BEGINS: Duration = Duration::from_secs(2);
const STEPS: f64 = 2.0;
/// From then on a fetch may take so many times longer than predicted, and so long at least: a prompt waits for it. The worker's steps come on top: it
/// says between two of them that the prefix is there.
const PATIENCE: f64 = 4.0;
const LEAST: Duration = Duration::from_millis(500);

/// Prefixes that may be moving at a time, as far as this router has asked for them (I5).
pub(super) const MOST: usize = 256;
/// How long the worker that gives may take to say that it failed, after the one that takes has said so.
const SECOND_WORD: Duration = Duration::from_millis(50);

/// Ends when a fetch has begun, or when it is clear that it does not.
pub(crate) type FetchBegins = Shared<oneshot::Receiver<()>>;

/// How long a fetch may take.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Allowed {
    /// Until the worker that takes the prefix has lent blocks for it.
    begins: Duration,
    /// In all.
    time: Duration,
    /// It is all that its request has left, and less than a fetch is given otherwise: that it is too little is no worker's doing.
    cut: bool,
}

impl Allowed {
    /// For a request that has so much time left.
    pub fn of(fetch: &Fetch, left: Duration) -> Allowed {
        let of = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let steps = of(fetch.step * STEPS).min(MOST_BEGINS);
        let begins = steps.max(BEGINS);
        let time = of(fetch.seconds * PATIENCE).max(LEAST).saturating_add(begins).saturating_add(steps);
        Allowed { begins: begins.min(left), time: time.min(left), cut: left < time }
    }
}

/// Waits for a fetch to begin.
pub(super) async fn fetch_begins(fetch: Option<FetchBegins>) {
    if let Some(begins) = fetch {
        // The other end is dropped, not used, when it does not begin in time.
        let _ = begins.await;
    }
}

/// Why a prefix did not come.
pub(super) enum Failed {
    /// The worker that takes it lent no blocks: nothing was sent.
    Refused(Status),
    /// The worker that holds it gave nothing.
    NotGiven(Status),
    /// Both were ready, and it did not get through.
    NotTaken(Status),
}

/// What is asked of two workers.
pub(super) struct Wish {
    pub fetch: Fetch,
    pub prefix: v1::Prefix,
    pub allowed: Allowed,
    /// Dropped when it is over.
    pub place: OwnedSemaphorePermit,
}

/// Asks both workers, in a task of its own: what a worker fetches is of use to others even if this request ends.
pub(super) fn begin(workers: Weak<Workers>, (to, from): (WorkerChannel, WorkerChannel), wish: Wish) -> FetchBegins {
    let (begun, begins) = oneshot::channel();
    let begins = begins.shared();
    let Wish { fetch, prefix, allowed, place } = wish;
    tokio::spawn(async move {
        let _place = place;
        let request_id = prefix.request_id.clone();
        let outcome = moves((to, from), prefix, (allowed.begins, Instant::now() + allowed.time), begun).await;
        let Fetch { to, from, .. } = fetch;
        let how = match &outcome {
            Ok(tokens) => {
                tracing::debug!(request_id, %from, %to, tokens, "prefix fetched");
                "fetched"
            }
            Err(Failed::Refused(status)) => {
                tracing::debug!(request_id, %from, %to, %status, "no blocks for a prefix");
                "refused"
            }
            Err(Failed::NotGiven(status) | Failed::NotTaken(status)) => {
                tracing::debug!(request_id, %from, %to, %status, "a prefix did not come");
                "failed"
            }
        };
        if !allowed.cut {
            workers.upgrade().iter().for_each(|workers| workers.apart(&outcome, to, from));
        }
        counter!(names::FETCHES, "outcome" => how).increment(1);
    });
    begins
}

fn late<T>() -> Result<T, Status> {
    Err(Status::new(Code::DeadlineExceeded, "it took too long"))
}

/// Milliseconds until then. Never 0, which means no limit.
fn left(until: Instant) -> u64 {
    (until.saturating_duration_since(Instant::now()).as_millis() as u64).max(1)
}

type Fetches = Streaming<v1::FetchEvent>;

/// Has the one worker lend blocks for a prefix within so long, then the other one write it, and waits `until` the first one has it. Returns its
/// tokens.
pub(super) async fn moves(
    (to, from): (WorkerChannel, WorkerChannel),
    prefix: v1::Prefix,
    (lends, until): (Duration, Instant),
    begun: oneshot::Sender<()>,
) -> Result<u32, Failed> {
    let asked = v1::Prefix { deadline_ms: left(until), ..prefix.clone() };
    let begins = timeout(lends, lend(to, asked)).await.unwrap_or_else(|_| late());
    let (target, mut fetches) = begins.map_err(Failed::Refused)?;
    let _ = begun.send(());
    let prefix = Some(v1::Prefix { deadline_ms: left(until), ..prefix });
    let mut giver = ExchangeClient::new(from);
    let asked = giver.serve(Request::new(v1::ServeRequest { prefix, target }));
    // Dropped with this future, which ends both.
    let asked = timeout_at(until, asked).await.unwrap_or_else(|_| late());
    let mut serves = asked.map_err(Failed::NotGiven)?.into_inner();
    let served = async {
        match serves.message().await {
            Err(status) => status,
            // The other worker says so itself.
            Ok(_) => std::future::pending().await,
        }
    };
    tokio::pin!(served);
    tokio::select! {
        biased;
        fetched = timeout_at(until, next(&mut fetches)) => match fetched.unwrap_or_else(|_| late()) {
            Ok(Event::Fetched(v1::Fetched { tokens })) => Ok(tokens),
            Ok(Event::Reserved(_)) => Err(Failed::NotTaken(Status::internal("the worker lent blocks twice"))),
            // A worker that gives and dies is seen by the one that takes first.
            Err(status) => Err(match timeout(SECOND_WORD, &mut served).await {
                Ok(status) => Failed::NotGiven(status),
                Err(_) => Failed::NotTaken(status),
            }),
        },
        status = &mut served => Err(Failed::NotGiven(status)),
    }
}

/// Has a worker lend blocks for a prefix: returns the target to write to.
async fn lend(to: WorkerChannel, prefix: v1::Prefix) -> Result<(Vec<u8>, Fetches), Status> {
    let request = Request::new(v1::FetchRequest { prefix: Some(prefix) });
    let mut fetches = ExchangeClient::new(to).fetch(request).await?.into_inner();
    match next(&mut fetches).await? {
        Event::Reserved(v1::Reserved { target }) => Ok((target, fetches)),
        Event::Fetched(_) => Err(Status::internal("the worker fetched what it was not sent")),
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
        let of = |seconds, step, left| {
            let fetch = Fetch { to: WorkerId(1), from: WorkerId(2), tokens: 64, seconds, step };
            let Allowed { begins, time, cut } = Allowed::of(&fetch, Duration::from_millis(left));
            (begins.as_millis(), time.as_millis(), cut)
        };
        let idle = [of(0.01, 0.0, 9000), of(1.0, 0.0, 9000), of(1.0, 0.0, 700)];
        assert_eq!(idle, [(100, 600, false), (100, 4100, false), (100, 700, true)]);
        // In a step of 0.3 s, or of a minute, a worker does not hear of it.
        assert_eq!([of(0.01, 0.3, 9000), of(0.01, 60.0, 9000)], [(600, 1700, false), (2000, 4500, false)]);
        assert_eq!([of(f64::NAN, 0.0, 700), of(1e300, f64::NAN, 700)], [(100, 700, true), (700, 700, true)]);
        assert_eq!(left(Instant::now()), 1, "0 would be no limit");
    }
}
