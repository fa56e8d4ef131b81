//! The connection to one worker: how many requests use it, and whether it was lost.

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use baton_cluster::Member;
use baton_proto::v1::StatusRequest;
use baton_proto::v1::worker_client::WorkerClient;
use tokio::time::{sleep, timeout};
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

/// How often a silent connection is asked whether it still lives (I5).
const PING_EVERY: Duration = Duration::from_secs(1);
/// Bytes a worker may be ahead of a client that reads slowly (I5). All streams to a worker share one connection, whose
/// own window is large enough that slow clients do not hold up others.
const STREAM_WINDOW: u32 = 64 << 10;
const CONNECTION_WINDOW: u32 = 1 << 30;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);
/// How often a lost worker is asked whether it is back.
const PROBE_EVERY: Duration = Duration::from_millis(250);

/// The connection to one worker; it lives as long as the worker is in the view or a request uses it.
#[derive(Clone)]
pub(super) struct Link {
    channel: Channel,
    state: Arc<State>,
    worker_timeout: Duration,
}

#[derive(Default)]
struct State {
    in_flight: AtomicU32,
    lost: AtomicBool,
}

/// One request's use of one worker.
pub(crate) struct Lease(Link);

impl Link {
    /// Connects when it is first used.
    pub fn new(member: &Member, worker_timeout: Duration) -> Result<Link, tonic::transport::Error> {
        let endpoint = Endpoint::from_shared(member.grpc.clone())?
            .connect_timeout(CONNECT_TIMEOUT)
            .http2_keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(worker_timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .tcp_nodelay(true);
        Ok(Link { channel: endpoint.connect_lazy(), state: Arc::default(), worker_timeout })
    }

    /// Requests that use it.
    pub fn in_flight(&self) -> u32 {
        self.state.in_flight.load(Ordering::Relaxed)
    }

    /// True from a failure of the connection until the worker answers again.
    pub fn lost(&self) -> bool {
        self.state.lost.load(Ordering::Relaxed)
    }

    /// Counts a request until the lease is dropped.
    pub fn lease(&self) -> Lease {
        self.state.in_flight.fetch_add(1, Ordering::Relaxed);
        Lease(self.clone())
    }
}

impl Lease {
    /// What to call the worker over.
    pub fn channel(&self) -> Channel {
        self.0.channel.clone()
    }

    /// Takes note of how a call ended. When the connection itself failed, other requests need not find out for
    /// themselves: the view may go on naming a dead worker for as long as its registration lasts, or longer (I7).
    pub fn ended(&self, status: &Status) {
        if answered(status) || self.0.state.lost.swap(true, Ordering::Relaxed) {
            return;
        }
        let (channel, limit, state) = (self.channel(), self.0.worker_timeout, Arc::downgrade(&self.0.state));
        tokio::spawn(async move {
            loop {
                sleep(PROBE_EVERY).await;
                // It has left the view, and nobody uses it any more.
                let Some(state) = state.upgrade() else { return };
                let mut client = WorkerClient::new(channel.clone());
                let said = timeout(limit, client.status(StatusRequest {})).await;
                if said.is_ok_and(|said| said.as_ref().err().is_none_or(answered)) {
                    return state.lost.store(false, Ordering::Relaxed);
                }
            }
        });
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.state.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A status without a source is the worker's own word. One with a source was made on this side of the connection: the
/// worker said nothing, it is gone or silent.
pub(super) fn answered(status: &Status) -> bool {
    status.source().is_none()
}
