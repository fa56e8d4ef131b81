//! Keeps one member registered until its lease is dropped or revoked.
//!
//! `baton-membership`'s [`Renewal`] decides; this file makes the calls and waits that it asks for.

use std::future::Future;
use std::time::Duration;

use baton_membership::{Member, Renewal, RenewalAction, RenewalInput, RenewalNews};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tracing::{debug, info, warn};

use crate::error::ClusterError;

/// One member's registration at one registry; the part that differs between registries.
pub(crate) trait Hold: Send + 'static {
    /// Whether [`Hold::lost`] ever returns.
    const TELLS: bool = false;

    /// The registry's address, for messages.
    fn address(&self) -> &str;

    /// Registers or renews. `changed`: the registry does not have this version of the member yet.
    fn renew(&mut self, member: &Member, changed: bool) -> impl Future<Output = Result<(), ClusterError>> + Send;

    /// Returns when the registry may have lost the member since the last renewal. May be dropped at any time.
    fn lost(&mut self) -> impl Future<Output = ()> + Send {
        std::future::pending()
    }

    /// Removes the member.
    fn revoke(&mut self, member: &Member) -> impl Future<Output = Result<(), ClusterError>> + Send;
}

/// A registered member. Dropping it stops the renewals, and the member disappears when its ttl has passed, as if the process
/// had died. [`RegistryLease::revoke`] removes the member at once.
#[derive(Debug)]
pub struct RegistryLease {
    member: watch::Sender<Member>,
    revoke: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl RegistryLease {
    /// Registers `member`, retrying until the registry answers, and starts the renewals.
    pub(crate) async fn start<H: Hold>(hold: H, member: Member, ttl: Duration) -> Result<RegistryLease, ClusterError> {
        let (mut renewal, action) = Renewal::start(member.clone(), ttl, now())?;
        if H::TELLS {
            renewal.is_told_of_losses();
        }
        let (member, members) = watch::channel(member);
        let (revoke, revoked) = oneshot::channel();
        let mut keeper = Keeper { hold, renewal, action, members, revoked };
        while !keeper.renewal.registered() {
            let error = keeper.step().await;
            if let (RenewalAction::End, Some(error)) = (keeper.action, error) {
                return Err(error);
            }
        }
        let task = tokio::spawn(async move {
            while keeper.action != RenewalAction::End {
                keeper.step().await;
            }
        });
        Ok(RegistryLease { member, revoke: Some(revoke), task })
    }

    /// The member as last set.
    pub fn member(&self) -> Member {
        self.member.borrow().clone()
    }

    /// Changes what is registered; the registry learns of it as soon as it can be reached.
    ///
    /// # Errors
    /// No registry takes this member, or it has another id.
    pub fn update(&self, member: Member) -> Result<(), ClusterError> {
        self.member.borrow().check_change(&member)?;
        self.member.send_replace(member);
        Ok(())
    }

    /// Marks the member as draining, so that it is sent no new requests.
    pub fn set_draining(&self) {
        self.member.send_modify(|member| member.draining = true);
    }

    /// Removes the member. If the registry does not answer within a third of the ttl (1 s to 3 s), the member disappears when its
    /// ttl has passed.
    pub async fn revoke(mut self) {
        if let Some(revoke) = self.revoke.take() {
            let _ = revoke.send(());
        }
        let _ = (&mut self.task).await;
    }
}

impl Drop for RegistryLease {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Performs the actions of its [`Renewal`].
struct Keeper<H> {
    hold: H,
    renewal: Renewal,
    action: RenewalAction,
    members: watch::Receiver<Member>,
    revoked: oneshot::Receiver<()>,
}

impl<H: Hold> Keeper<H> {
    /// Performs one action. Logs its error, if any, and returns it.
    async fn step(&mut self) -> Option<ClusterError> {
        let (input, error) = self.perform().await;
        if self.action_is_revoke() {
            self.log_revoked(error.as_ref());
        }
        if let Some(next) = self.renewal.step(input, now()) {
            self.action = next;
        }
        if let Some(news) = self.renewal.take_news() {
            self.log(news, error.as_ref());
        }
        error
    }

    async fn perform(&mut self) -> (RenewalInput, Option<ClusterError>) {
        let member = self.renewal.member().clone();
        match self.action {
            RenewalAction::Renew { changed, until } => {
                let tried = tokio::select! {
                    biased;
                    _ = &mut self.revoked => return (RenewalInput::Revoke, None),
                    result = self.hold.renew(&member, changed) => Some(result),
                    () = sleep_until(until.into()) => None,
                };
                match tried {
                    Some(Ok(())) => (RenewalInput::Renewed, None),
                    Some(Err(error @ ClusterError::Unavailable { .. })) => (RenewalInput::Unavailable, Some(error)),
                    Some(Err(error)) => (RenewalInput::Refused, Some(error)),
                    None => (RenewalInput::Wake, Some(self.no_answer())),
                }
            }
            RenewalAction::Wait { until } => tokio::select! {
                biased;
                _ = &mut self.revoked => (RenewalInput::Revoke, None),
                Ok(()) = self.members.changed() => {
                    (RenewalInput::Changed(self.members.borrow_and_update().clone()), None)
                }
                () = self.hold.lost() => (RenewalInput::Lost, Some(self.cut_off())),
                () = sleep_until(until.into()) => (RenewalInput::Wake, None),
            },
            RenewalAction::Revoke { until } => {
                let member = self.members.borrow().clone();
                tokio::select! {
                    result = self.hold.revoke(&member) => match result {
                        Ok(()) => (RenewalInput::Revoked, None),
                        Err(error) => (RenewalInput::Unavailable, Some(error)),
                    },
                    () = sleep_until(until.into()) => (RenewalInput::Wake, Some(self.no_answer())),
                }
            }
            RenewalAction::End => std::future::pending().await,
        }
    }

    fn action_is_revoke(&self) -> bool {
        matches!(self.action, RenewalAction::Revoke { .. })
    }

    fn cut_off(&self) -> ClusterError {
        let problem = "it has ended the connection, or lost the member".to_owned();
        ClusterError::Unavailable { registry: self.hold.address().to_owned(), problem }
    }

    fn no_answer(&self) -> ClusterError {
        let problem = format!("no answer within {:?}", self.renewal.patience());
        ClusterError::Unavailable { registry: self.hold.address().to_owned(), problem }
    }

    fn log(&self, news: RenewalNews, error: Option<&ClusterError>) {
        let member = self.renewal.member();
        let (id, role, registry) = (member.id, member.role.as_str(), self.hold.address());
        let error = error.map(ToString::to_string).unwrap_or_default();
        match news {
            // A process that starts before the registry has to wait for it; only a long wait deserves a warning.
            RenewalNews::Waiting => info!(registry, "waiting for the registry"),
            RenewalNews::StillWaiting => warn!(error, "cannot register yet, trying again"),
            RenewalNews::Registered => info!(%id, role, "registered"),
            RenewalNews::Again => info!(%id, "registered again"),
            RenewalNews::LostInDrain => info!(error, %id, "cannot announce the drain"),
            RenewalNews::Lost => warn!(error, %id, "cannot renew the registration, trying again"),
        }
    }

    fn log_revoked(&self, error: Option<&ClusterError>) {
        match error {
            None => debug!(id = %self.renewal.member().id, "deregistered"),
            // Expected when the registry stops together with everything else.
            Some(error) => info!(%error, "cannot deregister; the ttl will"),
        }
    }
}

/// The current time of the runtime's clock.
fn now() -> std::time::Instant {
    Instant::now().into_std()
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_membership::testing::member;
    use tokio::sync::mpsc;

    const TTL: Duration = Duration::from_secs(9);

    /// Reports each call. Renewals fail while `down`.
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
        let lease = RegistryLease::start(hold, member(1), TTL).await.unwrap();
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
        let starting = tokio::spawn(RegistryLease::start(hold, member(1), TTL));
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
        drop(RegistryLease::start(hold, member(1), TTL).await.unwrap());
        assert_eq!(calls.recv().await, Some(("renewed", true)));
        assert_eq!(calls.recv().await, None);
    }
}
