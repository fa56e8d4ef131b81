//! Keeps one member's key in etcd.
//!
//! A renewal is one message on a stream of the member's own, and one answer. etcd's leader notes it in memory: no transaction, nothing
//! written, no entry in its log. The stream's end tells that etcd is gone, so that a member with a long ttl need not ask often. Somebody may
//! delete the key while the lease lives: the member watches its own key, and puts it back at once. Now and then it also looks whether the key is
//! there, from any replica's own state.

use std::time::Duration;

use baton_membership::Member;
use etcd_client::{
    Error, GetOptions, LeaseKeepAliveStream, LeaseKeeper, PutOptions, WatchFilterType, WatchOptions, WatchStream,
};
use tonic::Code;

use super::Etcd;
use crate::error::ClusterError;
use crate::lease::Hold;

/// A look at the key comes with every so many renewals.
const LOOKS: u32 = 5;

pub(super) struct EtcdHold {
    etcd: Etcd,
    lease: Option<Lease>,
    ttl: Duration,
    /// Renewals since the key was last written or looked at.
    unseen: u32,
    /// Tells when the key is deleted.
    deletions: Option<WatchStream>,
    /// The last try was given up without an answer.
    unanswered: bool,
    /// etcd has the member as one that is draining.
    announced: bool,
}

/// A lease in etcd.
struct Lease {
    id: i64,
    /// The stream of its renewals. None after a failure.
    renewals: Option<Renewals>,
}

impl Hold for EtcdHold {
    const TELLS: bool = true;

    fn address(&self) -> &str {
        &self.etcd.address
    }

    async fn renew(&mut self, member: &Member, changed: bool) -> Result<(), ClusterError> {
        // Until there is an answer: the caller drops a try that takes too long.
        if std::mem::replace(&mut self.unanswered, true) {
            // A connection to a server that vanished without closing it would take in every later try, too.
            self.forget_streams();
            self.etcd.reconnect().await.map_err(|e| self.etcd.error(&e))?;
        }
        let mut renewed = self.try_renew(member, changed).await;
        if renewed.is_err() && self.etcd.switch().await {
            renewed = self.try_renew(member, changed).await;
        }
        self.unanswered = false;
        renewed.map_err(|e| self.etcd.error(&e))
    }

    async fn lost(&mut self) {
        let Some(lease) = &mut self.lease else { return std::future::pending().await };
        let Some((_, answers)) = &mut lease.renewals else { return std::future::pending().await };
        tokio::select! {
            // Nothing was asked, so nothing but the stream's end can come.
            _ = answers.message() => lease.renewals = None,
            watched = deleted(&mut self.deletions) => {
                self.unseen = LOOKS;
                // A stream that has ended is opened with the next renewal.
                if !watched {
                    self.deletions = None;
                }
            }
        }
    }

    async fn revoke(&mut self, member: &Member) -> Result<(), ClusterError> {
        let Some(Lease { id, .. }) = self.lease.take() else { return Ok(()) };
        let mut revoked = self.try_revoke(id, member).await;
        if revoked.is_err() && self.etcd.switch().await {
            revoked = self.try_revoke(id, member).await;
        }
        revoked.map_err(|e| self.etcd.error(&e))
    }
}

impl EtcdHold {
    /// A hold of a member that is not registered yet.
    pub(super) fn new(etcd: Etcd, ttl: Duration) -> EtcdHold {
        EtcdHold { etcd, lease: None, ttl, unseen: 0, deletions: None, unanswered: false, announced: false }
    }

    async fn try_renew(&mut self, member: &Member, changed: bool) -> Result<(), Error> {
        if self.etcd.refresh().await? {
            // The streams belong to the client before.
            self.forget_streams();
        }
        if self.deletions.is_none() {
            let options = WatchOptions::new().with_filters([WatchFilterType::NoPut]);
            self.deletions = Some(self.etcd.client.watch(self.etcd.key(member.id), Some(options)).await?);
            // What was deleted before is seen by looking.
            self.unseen = LOOKS;
        }
        let (lease, fresh) = match self.living_lease().await? {
            Some(lease) => (lease, false),
            None => (self.grant().await?, true),
        };
        if changed || fresh || !self.is_there(member).await? {
            self.put(member, lease).await?;
            self.unseen = 0;
        }
        Ok(())
    }

    async fn put(&mut self, member: &Member, lease: i64) -> Result<(), Error> {
        let json = serde_json::to_vec(member).map_err(|e| Error::Internal(e.to_string()))?;
        let put = PutOptions::new().with_lease(lease);
        self.etcd.client.put(self.etcd.key(member.id), json, Some(put)).await?;
        self.announced = member.draining;
        Ok(())
    }

    fn forget_streams(&mut self) {
        self.lease.iter_mut().for_each(|lease| lease.renewals = None);
        self.deletions = None;
    }

    /// Whether the key is there, as far as was looked.
    async fn is_there(&mut self, member: &Member) -> Result<bool, Error> {
        self.unseen += 1;
        if self.unseen < LOOKS {
            return Ok(true);
        }
        let options = GetOptions::new().with_count_only().with_serializable();
        let found = self.etcd.client.get(self.etcd.key(member.id), Some(options)).await?;
        self.unseen = 0;
        Ok(found.count() > 0)
    }

    /// Watchers keep a member whose key goes without a word, since it may be alive. So this one announces first that it leaves, unless it has: a
    /// worker with nothing to do drains faster than a change is written.
    async fn try_revoke(&mut self, lease: i64, member: &Member) -> Result<(), Error> {
        self.etcd.refresh().await?;
        if !self.announced {
            self.put(&Member { draining: true, ..member.clone() }, lease).await?;
        }
        self.etcd.client.lease_revoke(lease).await.map(drop)
    }

    /// Renews the current lease and returns it; `None` if there is none any more.
    async fn living_lease(&mut self) -> Result<Option<i64>, Error> {
        let Some(lease) = &mut self.lease else { return Ok(None) };
        let id = lease.id;
        // A renewal that fails, or that the caller gives up, leaves no stream with an answer on its way that the next one would take for its
        // own.
        let renewed = match lease.renewals.take() {
            Some(renewals) => go_on(renewals).await,
            // Opening it renews the lease.
            None => self.etcd.client.lease_keep_alive(id).await.map(Some),
        };
        match renewed {
            Ok(Some(renewals)) => {
                lease.renewals = Some(renewals);
                Ok(Some(id))
            }
            Ok(None) | Err(Error::LeaseKeepAliveError(_)) => {
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
        let id = granted.id();
        self.lease = Some(Lease { id, renewals: None });
        // Its end tells that etcd is gone, long before the first renewal is due.
        let renewals = self.etcd.client.lease_keep_alive(id).await?;
        self.lease = Some(Lease { id, renewals: Some(renewals) });
        Ok(id)
    }
}

/// Waits until the watched key is deleted; false: the stream has ended.
async fn deleted(deletions: &mut Option<WatchStream>) -> bool {
    let Some(stream) = deletions else { return std::future::pending().await };
    loop {
        match stream.message().await {
            Ok(Some(answer)) if answer.canceled() => return false,
            Ok(Some(answer)) if answer.events().is_empty() => {}
            Ok(Some(_)) => return true,
            Ok(None) | Err(_) => return false,
        }
    }
}

type Renewals = (LeaseKeeper, LeaseKeepAliveStream);

/// Renews on an open stream; `None` if the lease has ended.
async fn go_on((mut keeper, mut answers): Renewals) -> Result<Option<Renewals>, Error> {
    let ended = || Error::WatchError("the stream of renewals ended".to_owned());
    keeper.keep_alive().await.map_err(|_| ended())?;
    let answer = answers.message().await?.ok_or_else(ended)?;
    Ok((answer.ttl() > 0).then_some((keeper, answers)))
}
