//! The registry inside the router: members in memory, served to workers over gRPC.
//!
//! Leases are lost when the router's process ends. After its restart, workers register again by themselves.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_membership::{Member, MembershipError, Role, Store, View};
use baton_proto::v1;
use baton_proto::v1::registry_server::RegistryServer;
use baton_runtime::tls::{TlsPeer, TlsRole, TlsRoles};
use baton_types::WorkerId;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{FutureExt, StreamExt};
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_stream::wrappers::WatchStream;
use tonic::{Request, Response, Status};
use tracing::info;

use crate::error::ClusterError;
use crate::lease::{Hold, RegistryLease};
use crate::wire::{member_from_proto, member_to_proto};
use crate::{Registry, ViewReceiver};

/// Maximum size of one request to the registry, bytes: a member's texts and some numbers.
const MAX_REQUEST: usize = 4096;

/// The registry itself. Clones share it; it ends with the last clone.
#[derive(Clone)]
pub struct EmbeddedRegistry(Arc<Running>);

struct Running {
    shared: Arc<Shared>,
    expiry: JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.expiry.abort();
    }
}

struct Shared {
    store: Mutex<Store>,
    views: watch::Sender<Arc<View>>,
    /// Signals that a lease was added or renewed, so the next expiry may have changed.
    leased: Notify,
    closed: watch::Sender<bool>,
}

impl EmbeddedRegistry {
    /// An empty registry. Call inside a tokio runtime.
    #[allow(clippy::new_without_default)] // It starts a task.
    pub fn new() -> EmbeddedRegistry {
        let store = Store::new(now());
        let shared = Arc::new(Shared {
            views: watch::Sender::new(Arc::new(store.view())),
            store: Mutex::new(store),
            leased: Notify::new(),
            closed: watch::Sender::new(false),
        });
        let expiry = tokio::spawn(expire(Arc::clone(&shared)));
        EmbeddedRegistry(Arc::new(Running { shared, expiry }))
    }

    /// The gRPC service, to be mounted in the router's server.
    pub fn service(&self) -> RegistryServer<EmbeddedService> {
        RegistryServer::new(EmbeddedService(self.clone())).max_decoding_message_size(MAX_REQUEST)
    }

    /// Ends all watches, so that a server that waits for its streams can stop.
    pub fn close(&self) {
        self.0.shared.closed.send_replace(true);
    }
}

impl Registry for EmbeddedRegistry {
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<RegistryLease, ClusterError>> {
        let hold = LocalHold { shared: Arc::clone(&self.0.shared), ttl };
        RegistryLease::start(hold, member, ttl).boxed()
    }

    fn watch(&self) -> ViewReceiver {
        self.0.shared.views.subscribe()
    }
}

impl Shared {
    /// Adds or renews a member.
    fn put(&self, member: Member, ttl: Duration) -> Result<(), MembershipError> {
        self.put_in(&mut self.lock(), member, ttl)
    }

    /// The same for a peer with these roles, as far as they are known.
    fn put_for(&self, peer: Option<TlsRoles>, member: Member, ttl: Duration) -> Result<(), Status> {
        let mut store = self.lock();
        // Nor may it replace a member of another role.
        store.role(member.id).into_iter().chain([member.role]).try_for_each(|role| may_be(peer, role))?;
        self.put_in(&mut store, member, ttl).map_err(|e| baton_proto::status_of(&e))
    }

    fn put_in(&self, store: &mut Store, member: Member, ttl: Duration) -> Result<(), MembershipError> {
        if store.put(member, ttl, now())? {
            self.publish(store);
        }
        self.leased.notify_one();
        Ok(())
    }

    fn remove(&self, id: WorkerId) {
        self.remove_from(&mut self.lock(), id);
    }

    /// The same for a peer with these roles, as far as they are known.
    fn remove_for(&self, peer: Option<TlsRoles>, id: WorkerId) -> Result<(), Status> {
        let mut store = self.lock();
        store.role(id).map_or(Ok(()), |role| may_be(peer, role))?;
        self.remove_from(&mut store, id);
        Ok(())
    }

    fn remove_from(&self, store: &mut Store, id: WorkerId) {
        if store.remove(id, now()) {
            self.publish(store);
        }
    }

    /// Publishes the store's view. Call under the store's lock, so that views come in the order of the changes.
    fn publish(&self, store: &Store) {
        self.views.send_replace(Arc::new(store.view()));
    }

    fn lock(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The current time of the runtime's clock.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

async fn expire(shared: Arc<Shared>) {
    loop {
        let next = shared.lock().next_expiry();
        let due = async {
            match next {
                Some(at) => sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = due => {}
            () = shared.leased.notified() => {}
        }
        let mut store = shared.lock();
        let gone = store.expire(now());
        if !gone.is_empty() {
            shared.publish(&store);
        }
        drop(store);
        for member in gone {
            info!(id = %member.id, role = member.role.as_str(), grpc = member.grpc, "lease over, member removed");
        }
    }
}

/// The registration of a member in the registry's own process.
struct LocalHold {
    shared: Arc<Shared>,
    ttl: Duration,
}

impl Hold for LocalHold {
    fn address(&self) -> &str {
        "this process"
    }
    async fn renew(&mut self, member: &Member, _changed: bool) -> Result<(), ClusterError> {
        Ok(self.shared.put(member.clone(), self.ttl)?)
    }
    async fn revoke(&mut self, member: &Member) -> Result<(), ClusterError> {
        self.shared.remove(member.id);
        Ok(())
    }
}

/// Refuses a peer whose certificate does not give it the role of a member. Without TLS nobody knows.
fn may_be(peer: Option<TlsRoles>, role: Role) -> Result<(), Status> {
    let needed = match role {
        Role::Prefill => TlsRole::Prefill,
        // A KV store takes and gives the same KV as a decode worker.
        Role::Decode | Role::KvStore => TlsRole::Decode,
        Role::Supervisor => TlsRole::Operator,
    };
    match peer {
        Some(roles) if !roles.has(needed) => {
            let (has, needed) = (roles, needed.name());
            Err(Status::permission_denied(format!("the certificate has the role {has}; this member needs {needed}")))
        }
        _ => Ok(()),
    }
}

/// The gRPC side of [`EmbeddedRegistry`].
pub struct EmbeddedService(EmbeddedRegistry);

#[tonic::async_trait]
impl v1::registry_server::Registry for EmbeddedService {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterResponse>, Status> {
        let peer = request.extensions().get::<TlsPeer>().and_then(TlsPeer::roles);
        let request = request.into_inner();
        let missing = || MembershipError::Member { field: "member", problem: "is missing".to_owned() };
        let ttl = Duration::from_millis(request.ttl_ms);
        request
            .member
            .ok_or_else(missing)
            .and_then(member_from_proto)
            .map_err(|e| baton_proto::status_of(&e))
            .and_then(|member| self.0.0.shared.put_for(peer, member, ttl))?;
        Ok(Response::new(v1::RegisterResponse {}))
    }

    async fn deregister(
        &self,
        request: Request<v1::DeregisterRequest>,
    ) -> Result<Response<v1::DeregisterResponse>, Status> {
        let peer = request.extensions().get::<TlsPeer>().and_then(TlsPeer::roles);
        let id = WorkerId(request.into_inner().id);
        self.0.0.shared.remove_for(peer, id)?;
        Ok(Response::new(v1::DeregisterResponse {}))
    }

    type WatchStream = BoxStream<'static, Result<v1::View, Status>>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let shared = &self.0.0.shared;
        let mut closed = shared.closed.subscribe();
        let stores = request.into_inner().kv_stores;
        let views = WatchStream::new(shared.views.subscribe()).map(move |view| {
            let known = view.members.iter().filter(|member| stores || member.role != Role::KvStore);
            let members = known.cloned().map(member_to_proto).collect();
            let left = view.left.iter().map(|id| id.0).collect();
            Ok(v1::View { revision: view.revision, members, left })
        });
        let end = async move {
            // An error means that the registry is gone, which ends the watch as well.
            let _ = closed.wait_for(|closed| *closed).await;
        };
        Ok(Response::new(views.take_until(end.boxed()).boxed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_of_one_role_registers_the_members_of_that_role_alone() {
        let members = [Role::Prefill, Role::Decode, Role::KvStore, Role::Supervisor];
        for (has, may) in [
            (TlsRole::Router, [false; 4]),
            (TlsRole::Prefill, [true, false, false, false]),
            (TlsRole::Decode, [false, true, true, false]),
            (TlsRole::Operator, [false, false, false, true]),
        ] {
            let peer = Some([has].into_iter().collect());
            assert_eq!(members.map(|role| may_be(peer, role).is_ok()), may, "{}", has.name());
        }
        assert!(members.into_iter().all(|role| may_be(None, role).is_ok()), "without TLS");
    }
}
