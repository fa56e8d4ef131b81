//! The registry, the workers that register with it and the routers that watch it. The store, the renewals and the followers are the
//! real ones; this file is the network between them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use baton_membership::{FollowAction, FollowInput, List, Member, Renewal, RenewalAction, RenewalInput, Role, Store};
use baton_types::WorkerId;

use crate::Violation;
use crate::events::{Event, Life, Place, Process};
use crate::stream::Micros;
use crate::world::World;

/// How long a registration lasts.
pub(crate) const TTL: Duration = Duration::from_secs(3);

/// The registry, in a process of its own.
pub(crate) struct Registry {
    pub store: Store,
    /// When the registry comes back; None while it is up.
    pub down_until: Option<Micros>,
    /// Until then, some workers may not have registered again after an outage.
    pub shaken_until: Micros,
    /// Open watches, by router.
    feeds: BTreeMap<Place, Feed>,
    /// Who has left of itself since the registry began.
    left: BTreeSet<WorkerId>,
    now: Micros,
}

impl Registry {
    pub(crate) fn new(now: Instant) -> Registry {
        let (feeds, left) = Default::default();
        Registry { store: Store::new(now), down_until: None, shaken_until: 0, feeds, left, now: 0 }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.down_until.is_none()
    }

    /// Whether the registry is down, or was until recently.
    pub(crate) fn in_outage(&self) -> bool {
        self.down_until.is_some() || self.now < self.shaken_until
    }
}

/// A router's open watch. Its lists arrive in order.
#[derive(Clone, Copy)]
struct Feed {
    life: Life,
    number: u64,
    last: Micros,
    /// A list is to be sent soon. It has all changes until then.
    due: bool,
}

/// A list on its way to a router.
#[derive(Clone, Debug)]
pub(crate) struct Sent {
    list: List,
    /// Who had left of itself by then.
    left: BTreeSet<WorkerId>,
}

/// How long the registry waits at times for further changes before it sends a list, as a busy process does.
const GATHERS: Micros = 5_000;

/// A worker's registration.
pub(crate) struct Registration {
    renewal: Renewal,
    /// Number of the request it waits for; answers to older requests are void.
    attempt: u64,
}

/// What a member asks of the registry.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Register(Member),
    Deregister(WorkerId),
}

impl World {
    pub(crate) fn member(&self, process: Process) -> Member {
        let (role, id) = match process {
            Process::Prefill(_) => (Role::Prefill, self.id_of(process)),
            Process::KvStore(_) => (Role::KvStore, self.id_of(process)),
            _ => (Role::Decode, self.id_of(process)),
        };
        Member {
            id: id.unwrap_or_default(),
            role,
            grpc: process.address(),
            admin: process.address(),
            model: "m".into(),
            layout: self.geometry.layout.family(),
            blocks: self.geometry.blocks.iter().copied().min().unwrap_or(0),
            block_size: self.geometry.layout.block_size,
            window_tokens: 0,
            max_running: 0,
            context_tokens: 4096,
            draining: false,
            late_targets: true,
            exchanges: match process {
                Process::KvStore(place) if self.kv_store_plan.other == Some(place) => 2,
                _ => 1,
            },
            kv_secret: 0,
        }
    }

    /// Starts a worker's registration.
    pub(crate) fn register(&mut self, process: Process) -> Result<(), Violation> {
        let (member, now) = (self.member(process), self.clock_now(process));
        let started = Renewal::start(member, TTL, now).map_err(|error| self.violation("I8", error.to_string()))?;
        let (renewal, first) = started;
        if let Some(registration) = self.registration(process) {
            *registration = Some(Registration { renewal, attempt: 0 });
        }
        self.do_renewal(process, Some(first));
        Ok(())
    }

    /// Feeds an input to a worker's renewal.
    pub(crate) fn renew(&mut self, process: Process, input: RenewalInput) {
        let now = self.clock_now(process);
        let Some(Some(registration)) = self.registration(process) else { return };
        let action = registration.renewal.step(input, now);
        self.do_renewal(process, action);
    }

    /// Handles the registry's answer to this attempt.
    pub(crate) fn answered(&mut self, process: Process, attempt: u64, input: RenewalInput) {
        if let Some(Some(registration)) = self.registration(process)
            && registration.attempt == attempt
        {
            self.renew(process, input);
        }
    }

    fn do_renewal(&mut self, process: Process, action: Option<RenewalAction>) {
        let life = self.life_of(process);
        let Some(Some(registration)) = self.registration(process) else { return };
        let Some(action) = action else { return };
        registration.attempt += 1;
        let (attempt, member) = (registration.attempt, registration.renewal.member().clone());
        let (until, request) = match action {
            RenewalAction::Renew { until, .. } => (until, Some(Request::Register(member))),
            RenewalAction::Revoke { until } => (until, Some(Request::Deregister(member.id))),
            RenewalAction::Wait { until } => (until, None),
            RenewalAction::End => {
                self.deregistered(process);
                return;
            }
        };
        let at = self.micros(process, until).max(self.now + 1);
        self.events.plan(at, Event::Renewal { process, life });
        if let Some(request) = request {
            let at = self.now + self.faults.delay(&mut self.random);
            self.events.plan(at, Event::ToRegistry { process, life, attempt, request });
        }
    }

    /// Handles a request to the registry. A registry that is down refuses the connection; one that is cut off does not answer.
    pub(crate) fn asked(&mut self, process: Process, life: Life, attempt: u64, request: Request) {
        if self.apart(process, Process::Registry).is_some() {
            return;
        }
        let answer = match (self.registry.is_up(), request) {
            (false, _) => RenewalInput::Unavailable,
            (true, Request::Register(member)) => {
                let now = self.clock_now(Process::Registry);
                match self.registry.store.put(member, TTL, now) {
                    Ok(changed) => {
                        if changed {
                            self.publish();
                        }
                        self.plan_expiry();
                        RenewalInput::Renewed
                    }
                    Err(_) => RenewalInput::Refused,
                }
            }
            (true, Request::Deregister(id)) => {
                let now = self.clock_now(Process::Registry);
                self.registry.left.insert(id);
                if self.registry.store.remove(id, now) {
                    self.publish();
                }
                RenewalInput::Revoked
            }
        };
        let at = self.now + self.faults.delay(&mut self.random);
        self.events.plan(at, Event::FromRegistry { process, life, attempt, answer });
    }

    fn plan_expiry(&mut self) {
        if let Some(at) = self.registry.store.next_expiry() {
            let at = self.micros(Process::Registry, at).max(self.now + 1);
            self.events.plan(at, Event::Expiry);
        }
    }

    pub(crate) fn expiry(&mut self) {
        self.registry.now = self.now;
        if !self.registry.is_up() {
            return;
        }
        let now = self.clock_now(Process::Registry);
        if !self.registry.store.expire(now).is_empty() {
            self.milestone("member-expired", Process::Registry);
            self.publish();
            self.plan_expiry();
        }
    }

    /// Sends the list of members to every router that watches.
    fn publish(&mut self) {
        for router in self.registry.feeds.keys().copied().collect::<Vec<_>>() {
            let gathers = self.now.is_multiple_of(2);
            let Some(feed) = self.registry.feeds.get_mut(&router) else { continue };
            if gathers && !feed.due {
                feed.due = true;
                self.events.plan(self.now + GATHERS, Event::ListDue { router, feed: feed.number });
            } else if !feed.due {
                self.send_list(router);
            }
        }
    }

    /// Sends the list that was to be sent soon.
    pub(crate) fn list_due(&mut self, router: Place, number: u64) {
        let feed = self.registry.feeds.get_mut(&router).filter(|feed| feed.number == number);
        if feed.is_some_and(|feed| std::mem::take(&mut feed.due)) {
            self.send_list(router);
        }
    }

    fn send_list(&mut self, router: Place) {
        let at = self.now + self.faults.delay(&mut self.random);
        let at = self.apart(Process::Router(router), Process::Registry).map_or(at, |until| until + 1);
        let view = self.registry.store.view();
        let list = List { members: view.members, left: view.left };
        let sent = Some(Sent { list, left: self.registry.left.clone() });
        let Some(feed) = self.registry.feeds.get_mut(&router) else { return };
        feed.last = feed.last.max(at);
        let Feed { life, number, last, .. } = *feed;
        self.events.plan(last, Event::Listed { router, life, feed: number, sent });
    }

    /// Carries out an action of a router's follower.
    pub(crate) fn follow(&mut self, router: Place, life: Life, action: FollowAction) {
        match action {
            FollowAction::Open { until } => {
                self.routers[router].feed += 1;
                let feed = self.routers[router].feed;
                let at = self.now + self.faults.delay(&mut self.random);
                self.events.plan(at, Event::Watch { router, life, feed });
                self.wake_follower(router, life, Some(until));
            }
            FollowAction::Listen { until } => self.wake_follower(router, life, until),
            FollowAction::Wait { until } => {
                self.routers[router].feed += 1;
                self.wake_follower(router, life, Some(until));
            }
        }
    }

    fn wake_follower(&mut self, router: Place, life: Life, until: Option<Instant>) {
        self.routers[router].follow_until = until;
        let Some(until) = until else { return };
        let at = self.micros(Process::Router(router), until).max(self.now + 1);
        if self.routers[router].follower.set(at, self.now) {
            self.events.plan(at, Event::FollowWake { router, life });
        }
    }

    /// A router's request to watch reaches the registry.
    pub(crate) fn watch(&mut self, router: Place, life: Life, feed: u64) {
        if self.apart(Process::Router(router), Process::Registry).is_some() {
            return;
        }
        if self.registry.is_up() {
            self.registry.feeds.insert(router, Feed { life, number: feed, last: self.now, due: false });
            return self.send_list(router);
        }
        let at = self.now + self.faults.delay(&mut self.random);
        self.events.plan(at, Event::Listed { router, life, feed, sent: None });
    }

    /// A router receives a list, or learns that its watch has ended (None).
    pub(crate) fn listed(&mut self, router: Place, feed: u64, sent: Option<Sent>) -> Result<(), Violation> {
        if self.routers[router].feed != feed {
            return Ok(());
        }
        let Some(Sent { list, left }) = sent else {
            self.follow_on(router, FollowInput::Lost);
            return Ok(());
        };
        let listed: Vec<WorkerId> = list.members.iter().map(|member| member.id).collect();
        self.follow_on(router, FollowInput::Listed(list));
        let view = self.routers[router].follow.view();
        let mut kept = view.members.iter().map(|member| member.id).filter(|id| !listed.contains(id)).peekable();
        if kept.peek().is_some() {
            self.milestone("member-kept", Process::Router(router));
        }
        match kept.find(|id| left.contains(id)) {
            Some(id) => Err(self.violation("I7", format!("router {router} keeps {id}, which has left"))),
            None => Ok(()),
        }
    }

    pub(crate) fn follow_on(&mut self, router: Place, input: FollowInput) {
        let (now, life) = (self.clock_now(Process::Router(router)), self.routers[router].life);
        match self.routers[router].follow.step(input, now) {
            Some(action) => self.follow(router, life, action),
            // Woken too early: what the follower waits for is still to come.
            None => self.wake_follower(router, life, self.routers[router].follow_until),
        }
        self.viewed(router);
        let view = self.routers[router].follow.view();
        self.note(|| {
            let ids: Vec<String> = view.members.iter().map(|member| member.id.to_string()).collect();
            format!("router {router} sees {} (revision {}, stale: {})", ids.join(" "), view.revision, view.stale)
        });
    }

    /// Takes the registry down for a while. `emptied`: it comes back without members.
    pub(crate) fn lose_registry(&mut self, until: Micros, emptied: bool) {
        self.note(|| format!("the registry is away until {until}{}", if emptied { ", and forgets all" } else { "" }));
        self.registry.now = self.now;
        self.registry.down_until = Some(self.registry.down_until.unwrap_or(0).max(until));
        // Every live worker registers again within this time.
        self.registry.shaken_until = until + 10_000_000;
        if emptied {
            self.registry.store = Store::new(self.clock_now(Process::Registry));
            self.registry.left.clear();
        }
        for (router, Feed { life, number, last, .. }) in std::mem::take(&mut self.registry.feeds) {
            let at = (self.now + self.faults.delay(&mut self.random)).max(last);
            self.events.plan(at, Event::Listed { router, life, feed: number, sent: None });
        }
        self.events.plan(until, Event::RegistryBack);
    }

    pub(crate) fn registry_back(&mut self) {
        if self.registry.down_until.is_some_and(|until| until <= self.now) {
            self.note(|| "the registry is back".into());
            self.registry.down_until = None;
            self.registry.now = self.now;
            // Registrations may have expired meanwhile.
            self.expiry();
        }
    }
}
