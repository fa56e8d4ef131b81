//! The connection to one worker: its use by requests, and its probing after it was lost.
//!
//! Works out what a gRPC status says about the worker. The fleet decides what follows from that.

use std::error::Error;
use std::sync::{Arc, Weak};
use std::time::Duration;

use baton_cluster::{Member, Role};
use baton_policy::{Broken, LegEnd, Probe, WorkerLease};
use baton_proto::v1::StatusRequest;
use baton_proto::v1::worker_client::WorkerClient;
use baton_proto::{MeantFor, says_another_worker};
use baton_runtime::tls::{TlsRole, alpn};
use baton_runtime::{Tls, TlsClient};
use tokio::time::{Instant, sleep_until, timeout};
use tonic::Status;
use tonic::service::interceptor::InterceptedService;

use super::Workers;
use super::channel::Channel;

/// How to reach workers that have TLS.
#[derive(Clone)]
pub(crate) struct WorkerTls {
    pub prefill: TlsClient,
    pub decode: TlsClient,
}

impl WorkerTls {
    /// Each worker must have a certificate of its role.
    pub fn new(tls: &Tls) -> WorkerTls {
        let client = |role| tls.client([role], &[alpn::HTTP2]);
        WorkerTls { prefill: client(TlsRole::Prefill), decode: client(TlsRole::Decode) }
    }
}

/// One request's use of one worker.
pub(crate) struct WorkerLink {
    workers: Arc<Workers>,
    channel: WorkerChannel,
    lease: WorkerLease,
}

/// A connection whose calls say which worker they are meant for.
pub(super) type WorkerChannel = InterceptedService<Channel, MeantFor>;

/// A channel to the worker. It connects when it is first used.
///
/// # Errors
/// Its address is none, or it has TLS and this router has not.
pub(super) fn connect(
    member: &Member,
    worker_timeout: Duration,
    tls: Option<&WorkerTls>,
) -> Result<WorkerChannel, String> {
    let host = member.grpc.strip_prefix("https://");
    if host.is_some() && tls.is_none() {
        return Err("it has TLS, which this router is not set up for (tls_cert)".to_owned());
    }
    // With TLS whatever the worker says of itself: no prompt goes to one that shows no certificate of its role.
    let tls = tls.map(|tls| if member.role == Role::Prefill { &tls.prefill } else { &tls.decode });
    let address = host.or_else(|| member.grpc.strip_prefix("http://")).unwrap_or(&member.grpc);
    let authority = address.trim_end_matches('/').parse().map_err(|e| format!("{address:?} is no address: {e}"))?;
    Ok(InterceptedService::new(Channel::new(authority, tls.cloned(), worker_timeout), MeantFor::new(member.id)))
}

impl WorkerLink {
    pub(super) fn new(workers: Arc<Workers>, channel: WorkerChannel, lease: WorkerLease) -> WorkerLink {
        WorkerLink { workers, channel, lease }
    }

    /// The channel for calls to the worker.
    pub fn channel(&self) -> WorkerChannel {
        self.channel.clone()
    }

    /// Classifies the status that ended a call, and reports it to the fleet. Starts to probe the worker if the fleet says so.
    pub fn ended(&self, status: &Status) -> LegEnd {
        let end = leg_end(status);
        let probe = self.workers.fleet().ended(&self.lease, &end, Instant::now().into_std());
        if let Some(probe) = probe {
            let limit = self.workers.worker_timeout;
            tokio::spawn(ask_until_back(Arc::downgrade(&self.workers), self.channel(), limit, probe));
        }
        end
    }
}

/// Probes a lost worker until the fleet wants no further probe.
async fn ask_until_back(workers: Weak<Workers>, channel: WorkerChannel, limit: Duration, mut probe: Probe) {
    loop {
        sleep_until(probe.at().into()).await;
        let mut client = WorkerClient::new(channel.clone());
        let said = timeout(limit, client.status(StatusRequest {})).await;
        let answered = said.is_ok_and(|said| said.as_ref().err().is_none_or(answered));
        let Some(workers) = workers.upgrade() else { return };
        match workers.fleet().probed(probe, answered, Instant::now().into_std()) {
            Some(next) => probe = next,
            None => return,
        }
    }
}

/// True when the worker itself sent the status: such a status has no source. A status with a source was made on this side
/// of the connection, because the worker is gone or silent.
pub(super) fn answered(status: &Status) -> bool {
    status.source().is_none() && !says_another_worker(status)
}

fn leg_end(status: &Status) -> LegEnd {
    match status.source() {
        Some(source) => LegEnd::Lost { message: deepest(source).to_string(), broken: broken(source) },
        // As if nobody listened there.
        None if says_another_worker(status) => {
            LegEnd::Lost { message: status.message().to_owned(), broken: Broken::Refused }
        }
        None if baton_proto::says_draining(status) => LegEnd::Draining { message: status.message().to_owned() },
        None => LegEnd::answered(status.code().into(), status.message().to_owned()),
    }
}

fn broken(error: &(dyn Error + 'static)) -> Broken {
    use std::io::ErrorKind::{ConnectionRefused, TimedOut};
    let how = |e: &(dyn Error + 'static)| match e.downcast_ref::<std::io::Error>().map(std::io::Error::kind) {
        Some(TimedOut) => Some(Broken::TimedOut),
        Some(ConnectionRefused) => Some(Broken::Refused),
        _ => None,
    };
    std::iter::successors(Some(error), |e| (*e).source()).find_map(how).unwrap_or(Broken::Closed)
}

fn deepest(error: &dyn Error) -> &dyn Error {
    let mut deepest = error;
    while let Some(source) = deepest.source() {
        deepest = source;
    }
    deepest
}
