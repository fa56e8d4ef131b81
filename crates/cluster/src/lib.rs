//! Who is in the cluster: members register under a lease, everybody watches one view.
//!
//! Stands beside the flow: workers register, the router places requests by the view. It knows nothing of requests, and
//! decides nothing about members: that is `baton-membership`, which this crate drives. The trait [`Registry`] has two implementations: the embedded registry, which the router
//! serves and workers reach over gRPC, and etcd. Losing either stops nobody: the view stays as it was, marked stale, and
//! leases are taken again when the registry is back (I7).

#![forbid(unsafe_code)]

mod embedded;
mod error;
mod etcd;
mod follow;
mod lease;
mod remote;
mod spec;
mod wire;

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::watch;

pub use baton_membership::{MAX_MEMBERS, MAX_TEXT, Member, MembershipError, Role, View};
pub use embedded::{EmbeddedRegistry, EmbeddedService};
pub use error::ClusterError;
pub use etcd::EtcdRegistry;
pub use lease::RegistryLease;
pub use remote::EmbeddedClient;
pub use spec::Spec;
pub use wire::{member_from_proto, member_to_proto};

/// Always holds the latest view; wait with `changed()`. Several changes may arrive as one.
pub type ViewReceiver = watch::Receiver<Arc<View>>;

/// Where members register and are seen.
pub trait Registry: Send + Sync + 'static {
    /// Registers a member and keeps it registered until the lease is dropped or revoked. A registry that cannot be reached
    /// is tried again until it can be, so the caller bounds the wait.
    ///
    /// `ttl`, between 1 s and 1 h: how long the member is seen after its process died.
    ///
    /// # Errors
    /// A member or ttl that the registry will never take; a registry that is none.
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<RegistryLease, ClusterError>>;

    /// The view, from the last known one on. It starts empty and stale. Call inside a tokio runtime.
    fn watch(&self) -> ViewReceiver;
}

/// The registry a [`Spec`] names. It need not be up. Call inside a tokio runtime.
///
/// # Errors
/// A specification that is neither `http://host:port` (a router) nor `etcd://host:port,…[/cluster]`.
pub async fn connect(spec: &str) -> Result<Arc<dyn Registry>, ClusterError> {
    Ok(match spec.parse()? {
        Spec::Embedded { endpoint } => Arc::new(EmbeddedClient::connect(&endpoint)?),
        Spec::Etcd { endpoints, cluster } => Arc::new(EtcdRegistry::connect(&endpoints, &cluster).await?),
    })
}
