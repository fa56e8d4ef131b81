//! Workers tell routers which blocks they hold and what they have to do, and each router's real index takes it in. News is late, and some is lost; connections break.
//!
//! The random numbers are of their own, so that faults elsewhere strike as they would without this.

use std::collections::BTreeMap;

use baton_engine::CacheChange;
use baton_policy::{Backlog, Followed, KvChange, Tally};
use baton_roles::RoleCore;
use baton_types::testing::Random;

use crate::Violation;
use crate::control::Link;
use crate::engine::Thread;
use crate::events::{Event, Life, Place, Process};
use crate::stream::Micros;
use crate::world::World;

/// Chance in a thousand that news is lost while there are faults.
const LOST: u64 = 30;

/// Who follows whom.
#[derive(Debug)]
pub(crate) struct Follows {
    random: Random,
    open: BTreeMap<Link, Following>,
}

/// A router that follows a worker.
#[derive(Debug)]
struct Following {
    /// Incarnations of the router and of the worker.
    lives: (Life, Life),
    /// Number of the latest news.
    number: u64,
    /// When it arrives.
    arrives: Micros,
    /// It was lost. Something follows soon, so that the gap shows.
    lost: bool,
}

impl Follows {
    pub(crate) fn new(seed: u64) -> Follows {
        Follows { random: Random(seed ^ 0x6e65_7773), open: BTreeMap::new() }
    }

    /// The worker has left the router's view. If it comes back, it is followed anew.
    pub(crate) fn end(&mut self, link: Link) {
        self.open.remove(&link);
    }
}

impl World {
    /// Workers tell what has changed, and routers follow those they do not follow yet. Looked at again and again.
    pub(crate) fn tell_news(&mut self) {
        self.end_follows();
        for process in self.workers().collect::<Vec<_>>() {
            if !self.is_alive(process) || self.frozen_until(process).is_some() {
                continue;
            }
            let Some(change) = self.change_at(process) else { continue };
            let id = self.id_of(process);
            let due = |(link, following): (&Link, &Following)| {
                (Some(link.1) == id && (following.lost || !change.is_empty())).then_some(*link)
            };
            let links: Vec<Link> = self.follows.open.iter().filter_map(due).collect();
            links.into_iter().for_each(|link| self.send_news(link, &change, false));
        }
        for link in self.wanted() {
            let Some(process) = self.links.get(&link).map(|connection| connection.to) else { continue };
            let Some(all) = self.all_at(process) else { continue };
            let lives = (self.life_of(Process::Router(link.0)), self.life_of(process));
            self.follows.open.insert(link, Following { lives, number: 0, arrives: self.now, lost: false });
            self.send_news(link, &all, true);
        }
    }

    /// News reaches a router.
    pub(crate) fn news(&mut self, link: Link, change: &KvChange, load: Backlog) {
        let (now, routers) = (self.clock_now(Process::Router(link.0)), self.routers.len() as u32);
        let router = &mut self.routers[link.0];
        if !router.connected.contains(&link.1) {
            return;
        }
        router.fleet.told(link.1, load, routers, now);
        let followed = router.index.follow(link.1, change);
        if followed != Followed::Yes {
            self.follows.open.remove(&link);
        }
        self.milestone(if followed == Followed::Yes { "news" } else { "news-missed" }, Process::Router(link.0));
    }

    /// At the end each router knows what each worker holds that it is connected to.
    pub(crate) fn check_indexes(&self) -> Result<(), Violation> {
        for (place, router) in self.routers.iter().enumerate() {
            for worker in &router.connected {
                let Some(process) = self.listens((place, *worker)) else { continue };
                let Some(held) = self.held_at(process) else { continue };
                let known = router.index.tally(*worker);
                if known != Some(held) {
                    let what =
                        format!("router {place} believes of {process} that it holds {known:?}; it holds {held:?}");
                    return Err(self.violation("I5", what));
                }
            }
        }
        Ok(())
    }

    fn send_news(&mut self, link: Link, change: &CacheChange, afresh: bool) {
        let lost = !self.healed && self.follows.random.below(1000) < LOST;
        let at = self.now + self.faults.delay(&mut self.follows.random);
        let Some(following) = self.follows.open.get_mut(&link) else { return };
        following.number += 1;
        (following.arrives, following.lost) = (following.arrives.max(at), lost);
        let short = |names: &[baton_engine::BlockName]| names.iter().map(|name| name.short()).collect();
        let (stored, removed) = (short(&change.stored), short(&change.removed));
        let change = KvChange { number: following.number, afresh, stored, removed, tally: Some(change.tally) };
        let (at, life) = (following.arrives, following.lives.0);
        let load = self.links.get(&link).and_then(|connection| self.load_at(connection.to)).unwrap_or_default();
        if !lost {
            self.events.plan(at, Event::News { link, life, change, load });
        }
    }

    /// Ends what is cut off.
    fn end_follows(&mut self) {
        let ended = |(link, following): (&Link, &Following)| {
            let router = Process::Router(link.0);
            let here = self.listens(*link).filter(|process| {
                following.lives == (self.life_of(router), self.life_of(*process))
                    && self.apart(router, *process).is_none()
            });
            (here.is_none() || !self.routers[link.0].connected.contains(&link.1)).then_some(*link)
        };
        let ended: Vec<Link> = self.follows.open.iter().filter_map(ended).collect();
        self.follows.open.retain(|link, _| !ended.contains(link));
    }

    /// Workers that routers are connected to and could follow, and do not.
    fn wanted(&self) -> Vec<Link> {
        let of = |(place, router): (Place, &crate::router::Router)| {
            router.connected.iter().map(move |worker| (place, *worker)).collect::<Vec<_>>()
        };
        let reachable = |link: &Link| {
            let router = Process::Router(link.0);
            self.listens(*link).is_some_and(|process| {
                let awake = self.frozen_until(process).is_none() && self.frozen_until(router).is_none();
                awake && self.apart(router, process).is_none()
            })
        };
        let links = self.routers.iter().enumerate().flat_map(of);
        links.filter(|link| !self.follows.open.contains_key(link) && reachable(link)).collect()
    }

    /// The process that listens at a link's other end, if it is the worker that is meant.
    fn listens(&self, link: Link) -> Option<Process> {
        let process = self.links.get(&link)?.to;
        (self.is_alive(process) && self.id_of(process) == Some(link.1)).then_some(process)
    }

    fn change_at(&mut self, process: Process) -> Option<CacheChange> {
        match process {
            Process::Prefill(place) => self.prefills[place].thread.as_mut().map(Thread::change),
            Process::Decode(place) => self.decodes[place].thread.as_mut().map(Thread::change),
            Process::KvStore(place) => self.kv_stores[place].thread.as_mut().map(Thread::change),
            _ => None,
        }
    }

    fn load_at(&self, process: Process) -> Option<Backlog> {
        match process {
            Process::Prefill(place) => self.prefills[place].thread.as_ref().map(|thread| thread.core.backlog()),
            Process::Decode(place) => self.decodes[place].thread.as_ref().map(|thread| thread.core.backlog()),
            Process::KvStore(place) => self.kv_stores[place].thread.as_ref().map(|thread| thread.core.backlog()),
            _ => None,
        }
    }

    fn all_at(&self, process: Process) -> Option<CacheChange> {
        match process {
            Process::Prefill(place) => self.prefills[place].thread.as_ref().map(Thread::all),
            Process::Decode(place) => self.decodes[place].thread.as_ref().map(Thread::all),
            Process::KvStore(place) => self.kv_stores[place].thread.as_ref().map(Thread::all),
            _ => None,
        }
    }
}

impl World {
    /// What a worker's prefix cache holds.
    fn held_at(&self, process: Process) -> Option<Tally> {
        let mut tally = Tally::default();
        self.engine_of(process)?.cached_blocks().for_each(|name| tally.add(name.short()));
        Some(tally)
    }
}

impl<R: RoleCore> Thread<R> {
    /// What changed in the cache since the last call.
    fn change(&mut self) -> CacheChange {
        self.core.take_cache_changes().for_each(|change| self.feed.note(change));
        self.feed.take()
    }

    /// All that was told to those who follow.
    fn all(&self) -> CacheChange {
        CacheChange { stored: self.feed.told(), removed: Vec::new(), tally: self.feed.tally() }
    }
}
