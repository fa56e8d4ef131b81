//! The connection to one worker, as requests use it and as it is probed when it was lost.
//!
//! Says what a gRPC status means for the worker that did or did not send it. What follows from that, the fleet decides.

use std::error::Error;
use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_cluster::Member;
use baton_policy::{LegEnd, Probe, WorkerLease};
use baton_proto::v1::StatusRequest;
use baton_proto::v1::worker_client::WorkerClient;
use baton_types::ErrorKind;
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::Workers;

/// How often a silent connection is asked whether it still lives (I5).
const PING_EVERY: Duration = Duration::from_secs(1);
/// Bytes a worker may be ahead of a client that reads slowly (I5). All streams to a worker share one connection, whose
/// own window is large enough that slow clients do not hold up others.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 30;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// One request's use of one worker.
pub(crate) struct WorkerLink {
    workers: Arc<Workers>,
    channel: Channel,
    /// Until it is dropped.
    lease: Option<WorkerLease>,
}

/// Connects when it is first used.
pub(super) fn connect(member: &Member, worker_timeout: Duration) -> Result<Channel, tonic::transport::Error> {
    let endpoint = Endpoint::from_shared(member.grpc.clone())?
        .connect_timeout(CONNECT_TIMEOUT)
        .http2_keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(worker_timeout)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .tcp_nodelay(true);
    Ok(endpoint.connect_lazy())
}

impl WorkerLink {
    pub(super) fn new(workers: Arc<Workers>, channel: Channel, lease: WorkerLease) -> WorkerLink {
        WorkerLink { workers, channel, lease: Some(lease) }
    }

    /// What to call the worker over.
    pub fn channel(&self) -> Channel {
        self.channel.clone()
    }

    /// What the end of a call says, also to the fleet.
    pub fn ended(&self, status: &Status) -> LegEnd {
        let end = leg_end(status);
        if let Some(lease) = &self.lease {
            let probe = self.workers.state().fleet.ended(lease, &end, Instant::now().into_std());
            if let Some(probe) = probe {
                let limit = self.workers.worker_timeout;
                tokio::spawn(ask_until_back(Arc::downgrade(&self.workers), self.channel(), limit, probe));
            }
        }
        end
    }
}

impl Drop for WorkerLink {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            self.workers.release(lease);
        }
    }
}

/// Probes a lost worker for as long as the fleet wants it.
async fn ask_until_back(workers: Weak<Workers>, channel: Channel, limit: Duration, mut probe: Probe) {
    loop {
        sleep_until(probe.at().into()).await;
        let mut client = WorkerClient::new(channel.clone());
        let said = timeout(limit, client.status(StatusRequest {})).await;
        let answered = said.is_ok_and(|said| said.as_ref().err().is_none_or(answered));
        let Some(workers) = workers.upgrade() else { return };
        match workers.state().fleet.probed(probe, answered, Instant::now().into_std()) {
            Some(next) => probe = next,
            None => return,
        }
    }
}

/// A status without a source is the worker's own word. One with a source was made on this side of the connection: the
/// worker said nothing, it is gone or silent.
fn answered(status: &Status) -> bool {
    status.source().is_none()
}

fn leg_end(status: &Status) -> LegEnd {
    match status.source() {
        Some(source) => LegEnd::Lost { message: deepest(source).to_string(), silent: hangs_or_is_gone(source) },
        None if baton_proto::says_draining(status) => LegEnd::Draining { message: status.message().to_owned() },
        None => LegEnd::Answered {
            kind: ErrorKind::from_grpc_code(status.code().into()),
            message: status.message().to_owned(),
        },
    }
}

/// True when a connection was given up because nothing came over it (no answer to a ping, or to a connect), and when
/// nobody listens at its end: whoever does so later is another process, and another worker.
fn hangs_or_is_gone(error: &(dyn Error + 'static)) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, TimedOut};
    std::iter::successors(Some(error), |e| (*e).source()).any(|e| {
        let connect = e.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        matches!(connect, Some(TimedOut | ConnectionRefused)) || e.downcast_ref().is_some_and(hyper::Error::is_timeout)
    })
}

fn deepest(error: &dyn Error) -> &dyn Error {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}
