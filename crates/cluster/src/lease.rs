//! Keeps one member registered: renews in time, comes back after an outage, until dropped or revoked.

use std::future::Future;
use std::time::Duration;

use baton_membership::{Backoff, Member, MembershipError, check_ttl};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use crate::error::ClusterError;

/// One member's registration at one registry; the part that differs between registries.
pub(crate) trait Hold: Send + 'static {
    /// The registry, for messages.
    fn address(&self) -> &str;

    /// Registers or renews. `changed`: the registry does not have this value of the member yet.
    fn renew(&mut self, member: &Member, changed: bool) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Removes the member.
    fn revoke(&mut self, member: &Member) -> impl Future<Output = Result<(), ClusterError>> + Send;
}

/// A registered member. Dropping it stops the renewals, and the member is gone when its ttl has passed, as if the process
/// had died; [`Lease::revoke`] removes it at once.
#[derive(Debug)]
pub struct Lease {
    member: watch::Sender<Member>,
    revoke: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Lease {
    /// Registers `member`, trying until the registry answers, and starts the renewals.
    pub(crate) async fn start<H: Hold>(mut hold: H, member: Member, ttl: Duration) -> Result<Lease, ClusterError> {
        member.validate()?;
        check_ttl(ttl)?;
        let mut backoff = Backoff::new(member.id.0, ttl / 3);
        let (mut waited, mut warned) = (Duration::ZERO, false);
        while let Err(error) = attempt(&mut hold, &member, true, ttl).await {
            if !matches!(error, ClusterError::Unavailable { .. }) {
                return Err(error);
            }
            // Whoever starts first waits for the others; only a long wait is worth somebody's attention.
            if backoff.is_fresh() {
                info!(registry = hold.address(), "waiting for the registry");
            } else if waited >= ttl && !warned {
                warn!(%error, "cannot register yet, trying again");
                warned = true;
            }
            let pause = backoff.next();
            waited += pause;
            sleep(pause).await;
        }
        info!(id = %member.id, role = member.role.as_str(), "registered");
        let (member, members) = watch::channel(member);
        let (revoke, revoked) = oneshot::channel();
        let task = tokio::spawn(keep(hold, members, revoked, ttl));
        Ok(Lease { member, revoke: Some(revoke), task })
    }

    /// The member as last set.
    pub fn member(&self) -> Member {
        self.member.borrow().clone()
    }

    /// Changes what is registered; the registry learns of it as soon as it can be reached.
    ///
    /// # Errors
    /// A member that no registry takes, or one with another id.
    pub fn update(&self, member: Member) -> Result<(), ClusterError> {
        member.validate()?;
        let id = self.member.borrow().id;
        if member.id != id {
            let problem = format!("is {}, but this lease is for {id}; register the other member", member.id);
            return Err(MembershipError::Member { field: "id", problem }.into());
        }
        self.member.send_replace(member);
        Ok(())
    }

    /// Tells everybody to send no new requests here.
    pub fn set_draining(&self) {
        self.member.send_modify(|member| member.draining = true);
    }

    /// Removes the member. When the registry does not answer within a third of the ttl (or 1 s), the ttl does it.
    pub async fn revoke(mut self) {
        if let Some(revoke) = self.revoke.take() {
            let _ = revoke.send(());
        }
        let _ = (&mut self.task).await;
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// How long one try may take.
fn patience(ttl: Duration) -> Duration {
    (ttl / 3).max(Duration::from_secs(1))
}

/// One bounded try.
async fn attempt<H: Hold>(hold: &mut H, member: &Member, changed: bool, ttl: Duration) -> Result<(), ClusterError> {
    let limit = patience(ttl);
    match timeout(limit, hold.renew(member, changed)).await {
        Ok(result) => result,
        Err(_) => Err(ClusterError::Unavailable {
            registry: hold.address().to_owned(),
            problem: format!("no answer within {limit:?}"),
        }),
    }
}

async fn keep<H: Hold>(
    mut hold: H,
    mut members: watch::Receiver<Member>,
    mut revoked: oneshot::Receiver<()>,
    ttl: Duration,
) {
    let mut backoff = Backoff::new(members.borrow().id.0, ttl / 3);
    let mut changed = false;
    let mut wait = ttl / 3;
    loop {
        tokio::select! {
            biased;
            _ = &mut revoked => break,
            Ok(()) = members.changed() => changed = true,
            () = sleep(wait) => {}
        }
        let member = members.borrow_and_update().clone();
        let renewal = tokio::select! {
            biased;
            _ = &mut revoked => break,
            result = attempt(&mut hold, &member, changed, ttl) => result,
        };
        wait = match renewal {
            Ok(()) => {
                if !backoff.is_fresh() {
                    info!(id = %member.id, "registered again");
                }
                backoff.reset();
                changed = false;
                ttl / 3
            }
            Err(error) => {
                // I7: work goes on; this only logs and tries again. A member that leaves may outlive its registry.
                if backoff.is_fresh() && member.draining {
                    info!(%error, id = %member.id, "cannot announce the drain");
                } else if backoff.is_fresh() {
                    warn!(%error, id = %member.id, "cannot renew the registration, trying again");
                }
                changed = true;
                backoff.next()
            }
        };
    }
    let member = members.borrow().clone();
    match timeout(patience(ttl), hold.revoke(&member)).await {
        Ok(Ok(())) => debug!(id = %member.id, "deregistered"),
        // Expected where the registry stops with everything else.
        Ok(Err(error)) => info!(%error, "cannot deregister; the ttl will"),
        Err(_) => info!("cannot deregister in time; the ttl will"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::tests::member;
    use tokio::sync::mpsc;

    const TTL: Duration = Duration::from_secs(9);

    /// Reports each call; fails while `down`.
    struct Fake {
        calls: mpsc::UnboundedSender<(&'static str, bool)>,
        down: watch::Receiver<bool>,
    }

    impl Hold for Fake {
        fn address(&self) -> &str {
            "fake"
        }
        async fn renew(&mut self, member: &Member, changed: bool) -> Result<(), ClusterError> {
            if *self.down.borrow() {
                let _ = self.calls.send(("failed", changed));
                return Err(ClusterError::Unavailable { registry: "fake".to_owned(), problem: "down".to_owned() });
            }
            let _ = self.calls.send((if member.draining { "draining" } else { "renewed" }, changed));
            Ok(())
        }
        async fn revoke(&mut self, _: &Member) -> Result<(), ClusterError> {
            let _ = self.calls.send(("revoked", true));
            Ok(())
        }
    }

    fn fake() -> (Fake, mpsc::UnboundedReceiver<(&'static str, bool)>, watch::Sender<bool>) {
        let (calls, seen) = mpsc::unbounded_channel();
        let (down, is_down) = watch::channel(false);
        (Fake { calls, down: is_down }, seen, down)
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_is_renewed_updated_and_revoked() {
        let (hold, mut calls, _down) = fake();
        let lease = Lease::start(hold, member(1), TTL).await.unwrap();
        assert_eq!(calls.recv().await, Some(("renewed", true)));
        assert_eq!(calls.recv().await, Some(("renewed", false)));
        lease.set_draining();
        assert_eq!(calls.recv().await, Some(("draining", true)));
        assert!(lease.update(member(2)).is_err(), "another id");
        assert_eq!(calls.recv().await, Some(("draining", false)));
        lease.revoke().await;
        assert_eq!(calls.recv().await, Some(("revoked", true)));
        assert_eq!(calls.recv().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_is_waited_out_and_the_member_is_written_again() {
        // I7
        let (hold, mut calls, down) = fake();
        down.send_replace(true);
        let starting = tokio::spawn(Lease::start(hold, member(1), TTL));
        assert_eq!(calls.recv().await, Some(("failed", true)));
        down.send_replace(false);
        assert_eq!(calls.recv().await, Some(("renewed", true)));
        let _lease = starting.await.unwrap().unwrap();
        down.send_replace(true);
        assert_eq!(calls.recv().await, Some(("failed", false)));
        assert_eq!(calls.recv().await, Some(("failed", true)));
        down.send_replace(false);
        while calls.recv().await == Some(("failed", true)) {}
        assert_eq!(calls.recv().await, Some(("renewed", false)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_dropped_lease_stops_without_revoking() {
        let (hold, mut calls, _down) = fake();
        drop(Lease::start(hold, member(1), TTL).await.unwrap());
        assert_eq!(calls.recv().await, Some(("renewed", true)));
        assert_eq!(calls.recv().await, None);
    }
}
