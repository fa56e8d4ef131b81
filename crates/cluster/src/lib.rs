//! Cluster membership: members register under a lease, and everybody watches one view.
//!
//! Workers register; the router places requests by the view. This crate knows nothing of requests. `baton-membership` decides
//! everything about members, and this crate carries it out.
//!
//! The trait [`Registry`] has two implementations: the embedded registry, which the router serves and workers reach over
//! gRPC, and etcd. Losing the registry stops nobody: the view stays as it was, marked stale, and members register again when
//! the registry is back (I7).

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

use baton_runtime::Tls;
use futures::future::BoxFuture;
use tokio::sync::watch;

pub use baton_membership::{MAX_MEMBERS, MAX_TEXT, Member, MembershipError, Restored, Role, View};
pub use embedded::{EmbeddedRegistry, EmbeddedService};
pub use error::ClusterError;
pub use etcd::EtcdRegistry;
pub use lease::RegistryLease;
pub use remote::{EmbeddedClient, channel};
pub use spec::Spec;
pub use wire::{member_from_proto, member_to_proto};

/// Holds the latest view; wait for the next with `changed()`. Several changes may arrive as one.
pub type ViewReceiver = watch::Receiver<Arc<View>>;

/// Where members register, and where the view comes from.
pub trait Registry: Send + Sync + 'static {
    /// Registers a member and keeps it registered until the lease is dropped or revoked. Retries while the registry cannot be
    /// reached, so the caller must bound the wait.
    ///
    /// `ttl`, between 1 s and 1 h: how long the member stays in the view after its process died.
    ///
    /// # Errors
    /// The registry will never take this member or ttl, or the address is not that of a registry.
    fn register(&self, member: Member, ttl: Duration) -> BoxFuture<'_, Result<RegistryLease, ClusterError>>;

    /// The view, beginning with the last known one. The first view of all is empty and stale. Call inside a tokio runtime.
    fn watch(&self) -> ViewReceiver;
}

/// The registry that a [`Spec`] names. It need not be up. With certificates, a router is always reached with TLS. Call inside a tokio runtime.
///
/// # Errors
/// A specification that is neither `http://host:port` (a router) nor `etcd://host:port,…[/cluster]`, nor one of these with TLS; or one with
/// TLS, and no certificates.
pub async fn connect(spec: &str, tls: Option<&Tls>) -> Result<Arc<dyn Registry>, ClusterError> {
    let parsed: Spec = spec.parse()?;
    let (Spec::Embedded { tls: wanted, .. } | Spec::Etcd { tls: wanted, .. }) = parsed;
    if wanted && tls.is_none() {
        return Err(ClusterError::Tls { spec: spec.to_owned() });
    }
    Ok(match parsed {
        Spec::Embedded { endpoint, .. } => Arc::new(EmbeddedClient::connect(&endpoint, tls)?),
        Spec::Etcd { endpoints, cluster, tls: wanted } => {
            // Whoever can write to an etcd without TLS can announce false workers, but they have no certificates.
            let tls = tls.filter(|_| wanted);
            Arc::new(EtcdRegistry::connect(&endpoints, &cluster, tls).await?)
        }
    })
}
