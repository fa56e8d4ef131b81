//! When one member is registered, renewed and removed.
//!
//! The holder of the lease makes one call at a time, as [`RenewalAction`] says, and reports the result. This file decides
//! when to try, how long a try may take, and how long to wait after a failure. It knows no registry's protocol.

use std::time::{Duration, Instant};

use crate::backoff::Backoff;
use crate::error::MembershipError;
use crate::member::{Member, check_ttl};

/// Longest time between two renewals, and for one, however long the ttl. A registry that has lost its members, or comes back, hears of
/// each living one again before watchers forget it ([`crate::SETTLE`]).
const LONGEST: Duration = Duration::from_secs(3);
/// Longest time between two renewals where the holder is [told](RenewalInput::Lost) when the registry may have lost the member.
const LONGEST_TOLD: Duration = Duration::from_secs(10);

/// An event that the renewal reacts to.
#[derive(Clone, PartialEq, Debug)]
pub enum RenewalInput {
    /// The time given with the latest action may have come.
    Wake,
    /// The member has a new value, which [`Member::check_change`] allows.
    Changed(Member),
    /// The registry accepted the member.
    Renewed,
    /// The registry cannot be reached, or cannot answer now.
    Unavailable,
    /// The registry refused the call.
    Refused,
    /// The registry may have lost the member since the last renewal: the connection to it has ended.
    Lost,
    /// The member is to be removed.
    Revoke,
    /// The registry has removed the member.
    Revoked,
}

/// What to do until the next input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenewalAction {
    /// Register or renew [`Renewal::member`]. At `until`, give up and send [`RenewalInput::Wake`].
    Renew {
        /// True: the registry may not have this value of the member yet.
        changed: bool,
        /// The end of this try.
        until: Instant,
    },
    /// Do nothing. At `until`, send [`RenewalInput::Wake`].
    Wait {
        /// When the next try is due.
        until: Instant,
    },
    /// Remove the member. At `until`, give up and send [`RenewalInput::Wake`]; the end of its ttl then removes the member.
    Revoke {
        /// The end of this try.
        until: Instant,
    },
    /// Nothing more is to do.
    End,
}

/// An event worth a line in the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RenewalNews {
    /// The first try to register failed; more follow. Usual when processes start together.
    Waiting,
    /// No try to register has succeeded for a whole ttl.
    StillWaiting,
    /// Registered for the first time.
    Registered,
    /// A renewal failed.
    Lost,
    /// A renewal of a draining member failed. Usual when the registry stops first.
    LostInDrain,
    /// Registered again after failures.
    Again,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Trying { until: Instant },
    Waiting { until: Instant },
    Revoking { until: Instant },
    Ended,
}

/// One member's registration, from the first try to its end.
#[derive(Clone, Debug)]
pub struct Renewal {
    member: Member,
    ttl: Duration,
    phase: Phase,
    backoff: Backoff,
    /// Longest time between two renewals.
    longest: Duration,
    registered: bool,
    /// The registry may lack the member's current value: nothing was registered yet, or the last try failed.
    doubtful: bool,
    /// The member changed since the last try began.
    updated: bool,
    /// Time waited between tries before the first registration. None once [`RenewalNews::StillWaiting`] was reported.
    waited: Option<Duration>,
    news: Option<RenewalNews>,
}

impl Renewal {
    /// The renewal of a member that is not registered yet, and its first action.
    ///
    /// # Errors
    /// The member or the ttl is one that no registry accepts.
    pub fn start(member: Member, ttl: Duration, now: Instant) -> Result<(Renewal, RenewalAction), MembershipError> {
        member.validate()?;
        check_ttl(ttl)?;
        let mut renewal = Renewal {
            backoff: Backoff::new(member.id.0, ttl / 3),
            longest: LONGEST,
            member,
            ttl,
            phase: Phase::Ended,
            registered: false,
            doubtful: true,
            updated: false,
            waited: Some(Duration::ZERO),
            news: None,
        };
        let first = renewal.attempt(now);
        Ok((renewal, first))
    }

    /// The holder will send [`RenewalInput::Lost`]. So a member with a long ttl need not be renewed as often.
    pub fn is_told_of_losses(&mut self) {
        self.longest = LONGEST_TOLD;
    }

    /// The member's current value.
    pub fn member(&self) -> &Member {
        &self.member
    }

    /// True once the registry has accepted the member.
    pub fn registered(&self) -> bool {
        self.registered
    }

    /// How long one try may take.
    pub fn patience(&self) -> Duration {
        (self.ttl / 3).clamp(Duration::from_secs(1), LONGEST)
    }

    /// Time between two renewals.
    fn interval(&self) -> Duration {
        (self.ttl / 3).min(self.longest)
    }

    /// The news of the latest step. Returns each only once.
    pub fn take_news(&mut self) -> Option<RenewalNews> {
        self.news.take()
    }

    /// Takes one input and returns the action that replaces the previous one. None: continue with the previous action.
    pub fn step(&mut self, input: RenewalInput, now: Instant) -> Option<RenewalAction> {
        if let RenewalInput::Changed(member) = &input {
            self.member = member.clone();
            self.updated = true;
        }
        match (self.phase, input) {
            (Phase::Ended, _) => None,
            (Phase::Revoking { until }, RenewalInput::Wake) if now < until => None,
            (Phase::Revoking { .. }, RenewalInput::Changed(_) | RenewalInput::Revoke) => None,
            (Phase::Revoking { .. }, _) => Some(self.end()),
            (_, RenewalInput::Revoke) => {
                let until = now + self.patience();
                self.phase = Phase::Revoking { until };
                Some(RenewalAction::Revoke { until })
            }
            (Phase::Waiting { until }, RenewalInput::Wake) if now >= until => Some(self.attempt(now)),
            (Phase::Waiting { .. }, RenewalInput::Changed(_)) => Some(self.attempt(now)),
            // Not at once: a registry that ends each connection would be asked without a pause.
            (Phase::Waiting { .. }, RenewalInput::Lost) => Some(self.failed(now)),
            (Phase::Trying { .. }, RenewalInput::Renewed) => Some(self.renewed(now)),
            (Phase::Trying { .. }, RenewalInput::Refused) if !self.registered => Some(self.end()),
            (Phase::Trying { .. }, RenewalInput::Refused | RenewalInput::Unavailable) => Some(self.failed(now)),
            (Phase::Trying { until }, RenewalInput::Wake) if now >= until => Some(self.failed(now)),
            _ => None,
        }
    }

    fn attempt(&mut self, now: Instant) -> RenewalAction {
        let until = now + self.patience();
        self.phase = Phase::Trying { until };
        let changed = std::mem::take(&mut self.updated) || self.doubtful;
        RenewalAction::Renew { changed, until }
    }

    fn renewed(&mut self, now: Instant) -> RenewalAction {
        self.news = match (self.registered, self.backoff.is_fresh()) {
            (false, _) => Some(RenewalNews::Registered),
            (true, false) => Some(RenewalNews::Again),
            (true, true) => None,
        };
        self.registered = true;
        self.doubtful = false;
        self.backoff.reset();
        self.wait(self.interval(), now)
    }

    /// Handles a failed try. The worker goes on working (I7); this only waits and tries again.
    fn failed(&mut self, now: Instant) -> RenewalAction {
        let first = self.backoff.is_fresh();
        let pause = self.backoff.next();
        self.doubtful = true;
        self.news = match self.registered {
            true if first && self.member.draining => Some(RenewalNews::LostInDrain),
            true if first => Some(RenewalNews::Lost),
            true => None,
            false if first => Some(RenewalNews::Waiting),
            false => self.waited.take_if(|waited| *waited >= self.ttl).map(|_| RenewalNews::StillWaiting),
        };
        if let Some(waited) = &mut self.waited {
            *waited += pause;
        }
        self.wait(pause, now)
    }

    /// Waits for `pause`, unless the member changed during the last try. A change is sent at once.
    fn wait(&mut self, pause: Duration, now: Instant) -> RenewalAction {
        if self.updated {
            return self.attempt(now);
        }
        let until = now + pause;
        self.phase = Phase::Waiting { until };
        RenewalAction::Wait { until }
    }

    fn end(&mut self) -> RenewalAction {
        self.phase = Phase::Ended;
        RenewalAction::End
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::member;

    const TTL: Duration = Duration::from_secs(9);
    const THIRD: Duration = Duration::from_secs(3);

    fn start() -> (Renewal, Instant) {
        let now = Instant::now();
        let (renewal, first) = Renewal::start(member(1), TTL, now).unwrap();
        assert_eq!(first, RenewalAction::Renew { changed: true, until: now + THIRD });
        (renewal, now)
    }

    fn started() -> (Renewal, Instant) {
        let (mut renewal, now) = start();
        assert_eq!(renewal.step(RenewalInput::Renewed, now), Some(RenewalAction::Wait { until: now + THIRD }));
        assert_eq!(renewal.take_news(), Some(RenewalNews::Registered));
        (renewal, now)
    }

    fn draining() -> RenewalInput {
        RenewalInput::Changed(Member { draining: true, ..member(1) })
    }

    /// Who is told of a loss renews a long ttl seldom, and the member is written again soon after the loss.
    #[test]
    fn a_loss_that_is_told_of_is_made_good_before_the_next_renewal_is_due() {
        let (now, minute) = (Instant::now(), Duration::from_secs(60));
        let renewed = |told: bool| {
            let (mut renewal, first) = Renewal::start(member(1), minute, now).unwrap();
            assert_eq!(first, RenewalAction::Renew { changed: true, until: now + LONGEST }, "for a try as before");
            if told {
                renewal.is_told_of_losses();
            }
            let next = renewal.step(RenewalInput::Renewed, now);
            (renewal, next)
        };
        assert_eq!(renewed(false).1, Some(RenewalAction::Wait { until: now + LONGEST }));
        let (mut renewal, next) = renewed(true);
        assert_eq!(next, Some(RenewalAction::Wait { until: now + LONGEST_TOLD }));
        let Some(RenewalAction::Wait { until }) = renewal.step(RenewalInput::Lost, now) else { panic!("a pause") };
        assert!(until > now && until <= now + Duration::from_secs(2));
        let again = renewal.step(RenewalInput::Wake, until);
        assert_eq!(again, Some(RenewalAction::Renew { changed: true, until: until + LONGEST }));
        assert_eq!(renewal.step(RenewalInput::Lost, until), None, "the try finds out by itself");
    }

    #[test]
    fn a_third_of_the_ttl_later_it_is_renewed() {
        let (mut renewal, now) = started();
        assert_eq!(renewal.step(RenewalInput::Wake, now + THIRD / 2), None, "not yet");
        let due = now + THIRD;
        let renew = RenewalAction::Renew { changed: false, until: due + THIRD };
        assert_eq!(renewal.step(RenewalInput::Wake, due), Some(renew));
        let wait = RenewalAction::Wait { until: due + THIRD };
        assert_eq!(renewal.step(RenewalInput::Renewed, due), Some(wait));
        assert_eq!(renewal.take_news(), None);
    }

    #[test]
    fn a_registry_that_forgot_a_member_hears_of_it_before_watchers_forget_it() {
        // I7: whatever the ttl, a renewal that gets no answer included.
        let now = Instant::now();
        for ttl in [1, 9, 60, 3600].map(Duration::from_secs) {
            let (mut renewal, _) = Renewal::start(member(1), ttl, now).unwrap();
            let wait = renewal.step(RenewalInput::Renewed, now);
            let Some(RenewalAction::Wait { until }) = wait else { panic!("no wait: {wait:?}") };
            let Some(RenewalAction::Renew { until, .. }) = renewal.step(RenewalInput::Wake, until) else {
                panic!("no try")
            };
            let Some(RenewalAction::Wait { until }) = renewal.step(RenewalInput::Wake, until) else {
                panic!("no wait")
            };
            assert!(until - now < crate::SETTLE, "{ttl:?}: {:?}", until - now);
        }
    }

    #[test]
    fn an_outage_is_waited_out_and_the_member_is_written_again() {
        // I7
        let (mut renewal, mut now) = started();
        now += THIRD;
        renewal.step(RenewalInput::Wake, now);
        let mut waits = Vec::new();
        for input in [RenewalInput::Unavailable, RenewalInput::Refused, RenewalInput::Wake] {
            now += if input == RenewalInput::Wake { THIRD } else { Duration::ZERO };
            let Some(RenewalAction::Wait { until }) = renewal.step(input, now) else { panic!("no wait") };
            waits.push(renewal.take_news());
            assert!(until - now <= THIRD);
            now = until;
            let again = renewal.step(RenewalInput::Wake, now);
            assert!(matches!(again, Some(RenewalAction::Renew { changed: true, .. })), "{again:?}");
        }
        assert_eq!(waits, [Some(RenewalNews::Lost), None, None]);
        assert_eq!(renewal.step(RenewalInput::Renewed, now), Some(RenewalAction::Wait { until: now + THIRD }));
        assert_eq!(renewal.take_news(), Some(RenewalNews::Again));
    }

    #[test]
    fn a_change_is_written_at_once_and_one_during_a_try_right_after_it() {
        let (mut renewal, now) = started();
        let renew = Some(RenewalAction::Renew { changed: true, until: now + THIRD });
        assert_eq!(renewal.step(draining(), now), renew);
        assert_eq!(renewal.step(RenewalInput::Changed(member(1)), now), None, "one try at a time");
        assert_eq!(renewal.step(RenewalInput::Renewed, now), renew);
        assert!(!renewal.member().draining);
        assert!(matches!(renewal.step(RenewalInput::Renewed, now), Some(RenewalAction::Wait { .. })));
    }

    #[test]
    fn a_drain_that_cannot_be_announced_is_no_alarm() {
        let (mut renewal, now) = started();
        renewal.step(draining(), now);
        renewal.step(RenewalInput::Unavailable, now);
        assert_eq!(renewal.take_news(), Some(RenewalNews::LostInDrain));
    }

    #[test]
    fn the_first_registration_waits_for_the_registry_and_ends_where_it_is_refused() {
        let (mut renewal, mut now) = start();
        let mut news = Vec::new();
        let begun = now;
        while now < begun + TTL * 2 {
            let Some(RenewalAction::Wait { until }) = renewal.step(RenewalInput::Unavailable, now) else {
                panic!("no wait")
            };
            news.extend(renewal.take_news());
            now = until;
            renewal.step(RenewalInput::Wake, now);
        }
        assert_eq!(news, [RenewalNews::Waiting, RenewalNews::StillWaiting]);
        assert!(!renewal.registered());
        assert_eq!(renewal.step(RenewalInput::Refused, now), Some(RenewalAction::End));
    }

    #[test]
    fn a_revoked_member_is_removed_once_and_not_for_ever() {
        for trying in [false, true] {
            for last in [RenewalInput::Revoked, RenewalInput::Unavailable, RenewalInput::Wake] {
                let (mut renewal, now) = started();
                if trying {
                    renewal.step(draining(), now);
                }
                let until = now + THIRD;
                assert_eq!(renewal.step(RenewalInput::Revoke, now), Some(RenewalAction::Revoke { until }));
                assert_eq!(renewal.step(RenewalInput::Wake, now), None);
                assert_eq!(renewal.step(last, until), Some(RenewalAction::End));
                assert_eq!(renewal.step(RenewalInput::Renewed, until), None, "ended");
            }
        }
    }
}
