//! A client of the registry inside a router, for other processes.

use std::time::Duration;

use baton_membership::{List, MAX_VIEW, Member, MembershipError};
use baton_proto::v1;
use baton_proto::v1::registry_client::RegistryClient;
use baton_runtime::Tls;
use baton_runtime::tls::{TlsRole, alpn, dial};
use baton_types::{ErrorKind, WorkerId};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt};
use hyper_util::rt::TokioIo;
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use crate::error::ClusterError;
use crate::follow::{Feed, Follower, Lists};
use crate::lease::{Hold, RegistryLease};
use crate::wire::{member_from_proto, member_to_proto};
use crate::{Registry, ViewReceiver};

const CONNECT: Duration = Duration::from_secs(2);
/// Interval and timeout of pings. A router that vanished without closing is noticed after two of these.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// A client of the registry inside a router.
pub struct EmbeddedClient {
    client: RouterClient,
    follower: Follower,
}

#[derive(Clone)]
struct RouterClient {
    grpc: RegistryClient<Channel>,
    address: String,
}

impl EmbeddedClient {
    /// A client of the router whose internal address is `endpoint` (`http://host:port`). The router need not be up. Call
    /// inside a tokio runtime.
    pub fn connect(endpoint: &str, tls: Option<&Tls>) -> Result<EmbeddedClient, ClusterError> {
        let channel = channel(endpoint, tls.map(|tls| (tls, TlsRole::Router)))?;
        let client = RouterClient {
            grpc: RegistryClient::new(channel).max_decoding_message_size(MAX_VIEW),
            address: endpoint.to_owned(),
        };
        Ok(EmbeddedClient { client, follower: Follower::new() })
    }
}

/// A channel to a process of the cluster at `http://host:port`. It connects when it is first used.
///
/// `tls`: with TLS, whatever the scheme, to a peer that has a certificate with this role.
///
/// # Errors
/// The address is none.
pub fn channel(address: &str, tls: Option<(&Tls, TlsRole)>) -> Result<Channel, ClusterError> {
    // The connector has TLS, so the endpoint must not ask for it.
    let plain = address.strip_prefix("https://").map_or_else(|| address.to_owned(), |host| format!("http://{host}"));
    let bad = |_| ClusterError::Spec { spec: address.to_owned(), problem: "it is not an address" };
    let tls = tls.map(|(tls, role)| tls.client([role], &[alpn::HTTP2]));
    let connector = tower::service_fn(move |uri: Uri| {
        let tls = tls.clone();
        async move {
            let (host, port) = (uri.host().unwrap_or_default(), uri.port_u16().unwrap_or(80));
            dial(host, port, tls.as_ref()).await.map(TokioIo::new)
        }
    });
    let endpoint = Endpoint::from_shared(plain).map_err(bad)?;
    let endpoint = endpoint
        .connect_timeout(CONNECT)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true);
    Ok(endpoint.connect_with_connector_lazy(connector))
}

impl Registry for EmbeddedClient {
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<RegistryLease, ClusterError>> {
        let hold = RemoteHold { client: self.client.clone(), ttl };
        RegistryLease::start(hold, member, ttl).boxed()
    }

    fn watch(&self) -> ViewReceiver {
        self.follower.watch(|| RemoteFeed(self.client.clone()))
    }
}

impl RouterClient {
    /// Turns a status into an error: the router either will never do this, or cannot be reached.
    fn error(&self, status: &Status) -> ClusterError {
        let (registry, problem) = (self.address.clone(), status.message().to_owned());
        match status.code() {
            code @ (Code::InvalidArgument | Code::ResourceExhausted | Code::PermissionDenied) => {
                ClusterError::Refused { registry, kind: ErrorKind::from_grpc_code(code.into()), problem }
            }
            Code::Unimplemented => ClusterError::Refused {
                registry,
                kind: ErrorKind::InvalidArgument,
                problem:
                    "it is no registry; use the router's internal address, port 8002 unless --internal says otherwise"
                        .to_owned(),
            },
            _ => ClusterError::Unavailable { registry, problem },
        }
    }
}

struct RemoteHold {
    client: RouterClient,
    ttl: Duration,
}

impl Hold for RemoteHold {
    fn address(&self) -> &str {
        &self.client.address
    }

    async fn renew(&mut self, member: &Member, _changed: bool) -> Result<(), ClusterError> {
        let ttl_ms = u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX);
        let request = v1::RegisterRequest { member: Some(member_to_proto(member.clone())), ttl_ms };
        self.client.grpc.register(request).await.map(drop).map_err(|s| self.client.error(&s))
    }

    async fn revoke(&mut self, member: &Member) -> Result<(), ClusterError> {
        let request = v1::DeregisterRequest { id: member.id.0 };
        self.client.grpc.deregister(request).await.map(drop).map_err(|s| self.client.error(&s))
    }
}

struct RemoteFeed(RouterClient);

impl Feed for RemoteFeed {
    fn address(&self) -> &str {
        &self.0.address
    }

    async fn open(&mut self) -> Result<Lists, ClusterError> {
        let client = self.0.clone();
        let views =
            self.0.grpc.watch(v1::WatchRequest { kv_stores: true }).await.map_err(|s| client.error(&s))?.into_inner();
        let lists = views.map(move |view| match view {
            Ok(view) => Ok(list(view)?),
            Err(status) => Err(client.error(&status)),
        });
        Ok(lists.boxed())
    }
}

/// The list in a view. Members whose role only later versions know are left out.
fn list(view: v1::View) -> Result<List, MembershipError> {
    let v1::View { members, left, .. } = view;
    let known = members.into_iter().filter(|member| v1::Role::try_from(member.role).is_ok());
    let members = known.map(member_from_proto).collect::<Result<Vec<Member>, _>>()?;
    Ok(List { members, left: left.into_iter().map(WorkerId).collect() })
}

#[cfg(test)]
mod tests {
    use baton_types::BatonError;

    use super::*;

    #[test]
    fn a_role_that_only_later_versions_know_hides_nobody_else() {
        let member = |id| member_to_proto(baton_membership::testing::member(id));
        let later = v1::Member { role: 99, ..member(2) };
        let view = |members| v1::View { members, left: vec![7], ..v1::View::default() };
        let read = list(view(vec![member(1), later, member(3)])).unwrap();
        assert_eq!(read.members.iter().map(|member| member.id.0).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(read.left, [WorkerId(7)]);
        let bad = v1::Member { id: 0, ..member(2) };
        assert!(list(view(vec![member(1), bad])).is_err(), "a role that is known, and another field that is wrong");
    }

    #[tokio::test]
    async fn what_a_router_will_never_do_is_told_from_what_it_cannot_do_now() {
        let EmbeddedClient { client, .. } = EmbeddedClient::connect("http://127.0.0.1:1", None).unwrap();
        for (code, refused, kind) in [
            (Code::InvalidArgument, true, ErrorKind::InvalidArgument),
            (Code::ResourceExhausted, true, ErrorKind::ResourceExhausted),
            (Code::Unimplemented, true, ErrorKind::InvalidArgument),
            (Code::Unavailable, false, ErrorKind::Unavailable),
            (Code::Internal, false, ErrorKind::Unavailable),
        ] {
            let error = client.error(&Status::new(code, "why"));
            assert_eq!((matches!(error, ClusterError::Refused { .. }), error.kind()), (refused, kind), "{code:?}");
        }
    }
}
