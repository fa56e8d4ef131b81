//! Membership in etcd: one key per member, each under its own lease.
//!
//! The key `/baton/<cluster>/members/<id>` (id: 16 hex digits) holds the member as JSON. A watcher lists the prefix and
//! follows it from that revision. When the connection breaks or the revision has been compacted away, it lists again.

use std::collections::BTreeMap;
use std::time::Duration;

use baton_membership::{List, MAX_MEMBERS, Member};
use baton_runtime::Tls;
use baton_types::{ErrorKind, WorkerId};
use etcd_client::{
    Certificate, Client, Compare, CompareOp, ConnectOptions, Error, EventType, GetOptions, Identity, KeyValue,
    PutOptions, TlsOptions, Txn, TxnOp, WatchOptions, WatchStream,
};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use tonic::Code;
use tracing::warn;

use crate::error::ClusterError;
use crate::follow::{Feed, Follower, Lists};
use crate::lease::{Hold, RegistryLease};
use crate::{Registry, ViewReceiver};

const CONNECT: Duration = Duration::from_secs(2);
/// Interval and timeout of pings. A server that vanished without closing is noticed after two of these.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

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
        let client = connect(endpoints, tls.as_ref())
            .await
            .map_err(|e| ClusterError::Unavailable { registry: address.clone(), problem: e.to_string() })?;
        let (endpoints, prefix) = (endpoints.to_vec(), format!("/baton/{cluster}/members/"));
        let etcd = Etcd { client, endpoints, tls, address, prefix };
        Ok(EtcdRegistry { etcd, follower: Follower::new() })
    }
}

/// A client; over TLS, with these certificates, if they are to be used.
async fn connect(endpoints: &[String], tls: Option<&ClientTls>) -> Result<Client, Error> {
    let mut options = ConnectOptions::new()
        .with_connect_timeout(CONNECT)
        .with_keep_alive(KEEP_ALIVE, KEEP_ALIVE)
        .with_keep_alive_while_idle(true)
        // A server cut off from its quorum ends its watches instead of staying silent.
        .with_require_leader(true);
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
        let hold = EtcdHold { etcd: self.etcd.clone(), lease: None, ttl };
        RegistryLease::start(hold, member, ttl).boxed()
    }

    fn watch(&self) -> ViewReceiver {
        self.follower.watch(|| EtcdFeed(self.etcd.clone()))
    }
}

impl Etcd {
    /// Makes the client anew if the certificates have changed since it was made.
    async fn refresh(&mut self) -> Result<(), Error> {
        let Some(tls) = self.tls.as_ref() else { return Ok(()) };
        let pem = tls.own.pem();
        if tls.pem != pem {
            self.take_up(ClientTls { pem, ..tls.clone() }).await?;
        }
        Ok(())
    }

    /// After a failure: while the cluster goes over to TLS, another try is worth it without TLS, or with it again. False: it is not.
    async fn switch(&mut self) -> bool {
        let Some(tls) = self.tls.as_ref().filter(|tls| tls.own.is_permissive()) else { return false };
        self.take_up(ClientTls { plain: !tls.plain, ..tls.clone() }).await.is_ok()
    }

    /// Replaces the client by one that uses these certificates.
    async fn take_up(&mut self, tls: ClientTls) -> Result<(), Error> {
        self.client = connect(&self.endpoints, Some(&tls)).await?;
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

struct EtcdHold {
    etcd: Etcd,
    lease: Option<i64>,
    ttl: Duration,
}

impl Hold for EtcdHold {
    fn address(&self) -> &str {
        &self.etcd.address
    }

    async fn renew(&mut self, member: &Member, changed: bool) -> Result<(), ClusterError> {
        let mut renewed = self.try_renew(member, changed).await;
        if renewed.is_err() && self.etcd.switch().await {
            renewed = self.try_renew(member, changed).await;
        }
        renewed.map_err(|e| self.etcd.error(&e))
    }

    async fn revoke(&mut self, _: &Member) -> Result<(), ClusterError> {
        let Some(id) = self.lease.take() else { return Ok(()) };
        let mut revoked = self.try_revoke(id).await;
        if revoked.is_err() && self.etcd.switch().await {
            revoked = self.try_revoke(id).await;
        }
        revoked.map_err(|e| self.etcd.error(&e))
    }
}

impl EtcdHold {
    async fn try_renew(&mut self, member: &Member, changed: bool) -> Result<(), Error> {
        self.etcd.refresh().await?;
        let (lease, fresh) = match self.living_lease().await? {
            Some(lease) => (lease, false),
            None => (self.grant().await?, true),
        };
        let key = self.etcd.key(member.id);
        let json = serde_json::to_vec(member).map_err(|e| Error::Internal(e.to_string()))?;
        let put = PutOptions::new().with_lease(lease);
        if changed || fresh {
            self.etcd.client.put(key, json, Some(put)).await?;
        } else {
            // Writes the key again if somebody deleted it while the lease lived.
            let absent = Compare::version(key.clone(), CompareOp::Equal, 0);
            let txn = Txn::new().when([absent]).and_then([TxnOp::put(key, json, Some(put))]);
            self.etcd.client.txn(txn).await?;
        }
        Ok(())
    }

    async fn try_revoke(&mut self, lease: i64) -> Result<(), Error> {
        self.etcd.refresh().await?;
        self.etcd.client.lease_revoke(lease).await.map(drop)
    }

    /// Renews the current lease and returns it; `None` if there is none any more.
    async fn living_lease(&mut self) -> Result<Option<i64>, Error> {
        let Some(id) = self.lease else { return Ok(None) };
        match self.etcd.client.lease_keep_alive(id).await {
            Ok(_) => Ok(Some(id)),
            Err(Error::LeaseKeepAliveError(_)) => {
                self.lease = None;
                Ok(None)
            }
            Err(Error::GRpcStatus(status)) if status.code() == Code::NotFound => {
                self.lease = None;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    async fn grant(&mut self) -> Result<i64, Error> {
        let seconds = self.ttl.as_secs() + u64::from(self.ttl.subsec_nanos() > 0);
        let granted = self.etcd.client.lease_grant(i64::try_from(seconds).unwrap_or(i64::MAX), None).await?;
        self.lease = Some(granted.id());
        Ok(granted.id())
    }
}

struct EtcdFeed(Etcd);

/// The members as of the last event, and the stream of further events.
struct Following {
    etcd: Etcd,
    members: BTreeMap<WorkerId, Member>,
    events: WatchStream,
    listed: bool,
}

impl Feed for EtcdFeed {
    fn address(&self) -> &str {
        &self.0.address
    }

    async fn open(&mut self) -> Result<Lists, ClusterError> {
        let mut listed = self.list_and_watch().await;
        if listed.is_err() && self.0.switch().await {
            listed = self.list_and_watch().await;
        }
        let following = listed.map_err(|e| self.0.error(&e))?;
        let lists = futures::stream::unfold(Some(following), |following| async move {
            let mut following = following?;
            match following.next().await {
                Ok(list) => Some((Ok(list), Some(following))),
                Err(error) => Some((Err(error), None)),
            }
        });
        Ok(lists.boxed())
    }
}

impl EtcdFeed {
    async fn list_and_watch(&mut self) -> Result<Following, Error> {
        self.0.refresh().await?;
        let Etcd { client, prefix, .. } = &mut self.0;
        let limit = i64::try_from(MAX_MEMBERS).unwrap_or(i64::MAX);
        let options = GetOptions::new().with_prefix().with_limit(limit);
        let listed = client.get(prefix.as_str(), Some(options)).await?;
        let revision = listed.header().map_or(0, |h| h.revision());
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let events = client.watch(prefix.as_str(), Some(options)).await?;
        let members = listed.kvs().iter().filter_map(|kv| self.0.member(kv)).map(|m| (m.id, m)).collect();
        Ok(Following { etcd: self.0.clone(), members, events, listed: false })
    }
}

impl Following {
    /// The first call returns the listed members; later calls wait for a change and return the members after it.
    async fn next(&mut self) -> Result<List, ClusterError> {
        let mut left = Vec::new();
        let broken = |problem: String| ClusterError::Unavailable { registry: self.etcd.address.clone(), problem };
        while self.listed {
            let response = match self.events.message().await {
                Ok(Some(response)) => response,
                Ok(None) => return Err(broken("the watch ended".to_owned())),
                Err(error) => return Err(broken(error.to_string())),
            };
            // The revision was compacted away, or there is no leader: the caller lists again.
            if response.canceled() {
                return Err(broken(format!("the watch was cancelled: {}", response.cancel_reason())));
            }
            if !response.events().is_empty() {
                for event in response.events() {
                    left.extend(apply(&self.etcd, &mut self.members, event));
                }
                break;
            }
        }
        self.listed = true;
        Ok(List { members: self.members.values().cloned().collect(), left })
    }
}

/// Applies an event; returns the member that has left by it, having announced that before.
fn apply(etcd: &Etcd, members: &mut BTreeMap<WorkerId, Member>, event: &etcd_client::Event) -> Option<WorkerId> {
    let kv = event.kv()?;
    let id = etcd.id(kv.key())?;
    let member = match event.event_type() {
        EventType::Put => etcd.member(kv),
        EventType::Delete => None,
    };
    match member {
        Some(member) if members.len() < MAX_MEMBERS || members.contains_key(&id) => {
            members.insert(id, member);
        }
        Some(_) => warn!(%id, "ignoring a member beyond the {MAX_MEMBERS} of a cluster"),
        None => return members.remove(&id).filter(|member| member.draining).map(|_| id),
    }
    None
}

#[cfg(test)]
mod tests {
    use baton_membership::Member;
    use baton_membership::testing::member;

    #[test]
    fn a_member_of_the_version_before_is_read() {
        let mut old = serde_json::to_value(member(1)).expect("JSON");
        for unsaid in ["late_targets", "exchanges"] {
            old.as_object_mut().expect("an object").remove(unsaid).expect("a field");
        }
        assert_eq!(serde_json::from_value::<Member>(old).expect("an old member"), member(1));
    }
}
