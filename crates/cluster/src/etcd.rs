//! Membership in etcd: one key per member, each under its own lease.
//!
//! The key `/baton/<cluster>/members/<id>` (id: 16 hex digits) holds the member as JSON. [`hold`] keeps it there, [`feed`] lists and
//! watches all of them.

mod feed;
mod hold;

use std::time::Duration;

use baton_membership::Member;
use baton_runtime::Tls;
use baton_types::{ErrorKind, WorkerId};
use etcd_client::{Certificate, Client, ConnectOptions, Error, Identity, KeyValue, TlsOptions};
use futures::FutureExt;
use futures::future::BoxFuture;
use tonic::Code;
use tracing::warn;

use crate::error::ClusterError;
use crate::follow::Follower;
use crate::lease::RegistryLease;
use crate::{Registry, ViewReceiver};
use feed::EtcdFeed;
use hold::EtcdHold;

const CONNECT: Duration = Duration::from_secs(2);
/// Interval of a watcher's pings, and how long an answer may take. A server that vanished without closing is noticed after both. Members send
/// none: a renewal without an answer tells them sooner, and a thousand members would keep etcd busy with pings.
const PING: Duration = Duration::from_secs(10);
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// A client of etcd.
pub struct EtcdRegistry {
    etcd: Etcd,
    follower: Follower,
}

#[derive(Clone)]
struct Etcd {
    client: Client,
    endpoints: Vec<String>,
    tls: Option<ClientTls>,
    /// Whether the client sends pings.
    pings: bool,
    /// The registry's address, for messages.
    address: String,
    /// Prefix of the members' keys, with the final slash.
    prefix: String,
}

/// The certificates of a client.
#[derive(Clone)]
struct ClientTls {
    own: Tls,
    /// What they were when the client was made: it takes no others.
    pem: [Vec<u8>; 3],
    /// The client goes without TLS: this process also works with an etcd that has none, and the latest try with TLS failed.
    plain: bool,
}

impl EtcdRegistry {
    /// A client of the etcd with these `host:port` endpoints; they need not be up. Call inside a tokio runtime.
    /// With `tls`, this process shows its certificate, and etcd's must have the name it is reached by.
    pub async fn connect(endpoints: &[String], cluster: &str, tls: Option<&Tls>) -> Result<EtcdRegistry, ClusterError> {
        let scheme = if tls.is_some() { "etcds" } else { "etcd" };
        let address = format!("{scheme}://{}", endpoints.join(","));
        let tls = tls.map(|tls| ClientTls { own: tls.clone(), pem: tls.pem(), plain: false });
        let client = connect(endpoints, tls.as_ref(), true)
            .await
            .map_err(|e| ClusterError::Unavailable { registry: address.clone(), problem: e.to_string() })?;
        let (endpoints, prefix) = (endpoints.to_vec(), format!("/baton/{cluster}/members/"));
        let etcd = Etcd { client, endpoints, tls, pings: true, address, prefix };
        Ok(EtcdRegistry { etcd, follower: Follower::new() })
    }
}

/// A client; over TLS, with these certificates, if they are to be used.
async fn connect(endpoints: &[String], tls: Option<&ClientTls>, pings: bool) -> Result<Client, Error> {
    // A server cut off from its quorum ends its watches instead of staying silent.
    let mut options = ConnectOptions::new().with_connect_timeout(CONNECT).with_require_leader(true);
    if pings {
        options = options.with_keep_alive(PING, PING_TIMEOUT).with_keep_alive_while_idle(true);
    }
    let mut urls = endpoints.to_vec();
    if let Some(ClientTls { pem: [certificate, key, authority], .. }) = tls.filter(|tls| !tls.plain) {
        let identity = Identity::from_pem(certificate, key);
        let tls = TlsOptions::new().ca_certificate(Certificate::from_pem(authority)).identity(identity);
        options = options.with_tls(tls);
        urls.iter_mut().for_each(|url| url.insert_str(0, "https://"));
    }
    Client::connect(&urls, Some(options)).await
}

impl Registry for EtcdRegistry {
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<RegistryLease, ClusterError>> {
        async move {
            let mut etcd = Etcd { pings: false, ..self.etcd.clone() };
            etcd.reconnect().await.map_err(|e| etcd.error(&e))?;
            RegistryLease::start(EtcdHold::new(etcd, ttl), member, ttl).await
        }
        .boxed()
    }

    fn watch(&self) -> ViewReceiver {
        self.follower.watch(|| EtcdFeed::new(self.etcd.clone()))
    }
}

impl Etcd {
    /// Makes the client anew if the certificates have changed since it was made. Whether it has.
    async fn refresh(&mut self) -> Result<bool, Error> {
        let Some(tls) = self.tls.as_ref() else { return Ok(false) };
        let pem = tls.own.pem();
        let changed = tls.pem != pem;
        if changed {
            self.take_up(ClientTls { pem, ..tls.clone() }).await?;
        }
        Ok(changed)
    }

    /// After a failure: while the cluster goes over to TLS, another try is worth it without TLS, or with it again. False: it is not.
    async fn switch(&mut self) -> bool {
        let Some(tls) = self.tls.as_ref().filter(|tls| tls.own.is_permissive()) else { return false };
        self.take_up(ClientTls { plain: !tls.plain, ..tls.clone() }).await.is_ok()
    }

    /// Replaces the client by one with connections of its own.
    async fn reconnect(&mut self) -> Result<(), Error> {
        self.client = connect(&self.endpoints, self.tls.as_ref(), self.pings).await?;
        Ok(())
    }

    /// Replaces the client by one that uses these certificates.
    async fn take_up(&mut self, tls: ClientTls) -> Result<(), Error> {
        self.client = connect(&self.endpoints, Some(&tls), self.pings).await?;
        self.tls = Some(tls);
        Ok(())
    }

    fn key(&self, id: WorkerId) -> String {
        format!("{}{:016x}", self.prefix, id.0)
    }

    fn id(&self, key: &[u8]) -> Option<WorkerId> {
        let digits = std::str::from_utf8(key).ok()?.strip_prefix(&self.prefix)?;
        u64::from_str_radix(digits, 16).ok().map(WorkerId)
    }

    /// Turns an error of the client into ours: etcd either will never do this, or cannot be reached.
    fn error(&self, error: &Error) -> ClusterError {
        let (registry, problem) = (self.address.clone(), error.to_string());
        match error {
            Error::GRpcStatus(status) => match status.code() {
                Code::Unimplemented | Code::Unauthenticated | Code::PermissionDenied => {
                    // The address belongs to something else, or the credentials are wrong.
                    ClusterError::Refused { registry, kind: ErrorKind::InvalidArgument, problem }
                }
                _ => ClusterError::Unavailable { registry, problem },
            },
            _ => ClusterError::Unavailable { registry, problem },
        }
    }

    /// The member in a key; `None`, with a warning, if it is invalid. Anything may have been written there (I8).
    fn member(&self, kv: &KeyValue) -> Option<Member> {
        let member = serde_json::from_slice::<Member>(kv.value());
        let problem = match member {
            Ok(member) if Some(member.id) != self.id(kv.key()) => "the id is not the key's".to_owned(),
            Ok(member) => match member.validate() {
                Ok(()) => return Some(member),
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        warn!(key = %String::from_utf8_lossy(kv.key()), problem, "ignoring a member that cannot be read");
        None
    }
}

#[cfg(test)]
mod tests {
    use baton_membership::Member;
    use baton_membership::testing::member;

    #[test]
    fn a_member_of_an_older_version_is_read() {
        let mut old = serde_json::to_value(member(1)).expect("JSON");
        for unsaid in ["late_targets", "exchanges", "kv_secret", "max_running"] {
            old.as_object_mut().expect("an object").remove(unsaid).expect("a field");
            let unknown = Member { max_running: 0, ..member(1) };
            let expected = if unsaid == "max_running" { unknown } else { member(1) };
            assert_eq!(serde_json::from_value::<Member>(old.clone()).expect("an old member"), expected, "{unsaid}");
        }
    }
}
