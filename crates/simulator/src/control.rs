//! The control plane's network: streams between routers and workers, as messages that take their time, come in order, and may never
//! come.
//!
//! A router has one connection to each worker it knows, made anew when it is used after it broke. It goes to the worker's address:
//! who answers there may be another process than the one that was meant.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use baton_policy::{DecodeWord, LegEnd, PrefillWord};
use baton_types::{SamplingParams, WorkerId};

use crate::Violation;
use crate::events::{Event, Life, Place, Process};
use crate::stream::Micros;
use crate::world::World;

/// How long nothing may come over a connection that is used: a ping a second, and the time it may take.
pub(crate) const SILENCE: Micros = 2_000_000;

/// A connection's name.
pub(crate) type Link = (Place, WorkerId);
/// One use of a connection: a stream.
pub(crate) type Call = u64;

/// What a router asks of a worker.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub request: u64,
    pub tokens: Vec<u32>,
    pub prompt_tokens: u32,
    pub params: SamplingParams,
    pub time_left: Duration,
    pub salt: u64,
    pub priority: i32,
}

/// From a router to a worker.
#[derive(Clone, Debug)]
pub(crate) enum Up {
    Decode { call: Call, ask: Box<Ask>, local: bool },
    Prefill { call: Call, ask: Box<Ask>, target: Vec<u8> },
    Cancel { call: Call },
    Probe,
}

/// From a worker to a router.
#[derive(Clone, Debug)]
pub(crate) enum Down {
    DecodeSaid(Call, DecodeWord),
    PrefillSaid(Call, PrefillWord),
    Ended(Call, LegEnd),
    Probed,
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub to: Process,
    /// The router's and the worker's, since it was made.
    lives: Option<(Life, Life)>,
    /// Times it was made.
    pub made: u64,
    /// Under way to the worker, and to the router: each in its order, with the time of its arrival.
    up: VecDeque<(Micros, Up)>,
    down: VecDeque<(Micros, Down)>,
    /// Streams that are open, as far as the router knows.
    pub calls: BTreeSet<Call>,
}

impl Connection {
    pub(crate) fn new(to: Process) -> Connection {
        Connection { to, lives: None, made: 0, up: VecDeque::new(), down: VecDeque::new(), calls: BTreeSet::new() }
    }
}

impl World {
    /// Sends over a connection, which is made if there is none. One to an address where nobody listens is refused.
    pub(crate) fn send_up(&mut self, link: Link, message: Up) {
        let router_life = self.routers[link.0].life;
        let Some(connection) = self.links.get_mut(&link) else { return };
        let to = connection.to;
        if let Up::Decode { call, .. } | Up::Prefill { call, .. } = &message {
            connection.calls.insert(*call);
        }
        let alive = self.is_alive(to);
        let life = self.life_of(to);
        let delay = self.faults.delay(&mut self.random);
        let at = self.now + delay;
        let Some(connection) = self.links.get_mut(&link) else { return };
        if connection.lives.is_none() {
            if !alive {
                let made = connection.made;
                self.events.plan(at, Event::Broken { link, made, silent: true });
                return;
            }
            connection.lives = Some((router_life, life));
        }
        let at = connection.up.back().map_or(at, |(last, _)| at.max(*last));
        connection.up.push_back((at, message));
        let made = connection.made;
        self.events.plan(at, Event::Up { link, made });
    }

    pub(crate) fn send_down(&mut self, link: Link, made: u64, message: Down) {
        let delay = self.faults.delay(&mut self.random);
        let at = self.now + delay;
        let Some(connection) = self.links.get_mut(&link).filter(|c| c.made == made && c.lives.is_some()) else {
            return;
        };
        let at = connection.down.back().map_or(at, |(last, _)| at.max(*last));
        connection.down.push_back((at, message));
        self.events.plan(at, Event::Down { link, made });
    }

    /// Whether both ends of a connection are the processes it was made between.
    fn stands(&self, link: Link, made: u64) -> bool {
        let Some(connection) = self.links.get(&link).filter(|connection| connection.made == made) else { return false };
        connection.lives == Some((self.routers[link.0].life, self.life_of(connection.to)))
    }

    /// What has arrived at a worker.
    pub(crate) fn up(&mut self, link: Link, made: u64) -> Result<(), Violation> {
        if !self.stands(link, made) {
            return Ok(());
        }
        let to = self.links[&link].to;
        if let Some(until) = self.apart(Process::Router(link.0), to).or(self.frozen_until(to)) {
            self.events.plan(self.later(until), Event::Up { link, made });
            return Ok(());
        }
        let now = self.now;
        while self.stands(link, made)
            && let Some(message) = self.links.get_mut(&link).and_then(|connection| due(&mut connection.up, now))
        {
            match (to, message) {
                (_, Up::Probe) => self.send_down(link, made, Down::Probed),
                (Process::Decode(place), message) => self.decode_asked(place, (link, made), message)?,
                (Process::Prefill(place), message) => self.prefill_asked(place, (link, made), message)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// What has arrived at a router.
    pub(crate) fn down(&mut self, link: Link, made: u64) -> Result<(), Violation> {
        if !self.stands(link, made) {
            return Ok(());
        }
        let (from, router) = (self.links[&link].to, Process::Router(link.0));
        if let Some(until) = self.apart(router, from).or(self.frozen_until(router)) {
            self.events.plan(self.later(until), Event::Down { link, made });
            return Ok(());
        }
        let now = self.now;
        while self.stands(link, made)
            && let Some(message) = self.links.get_mut(&link).and_then(|connection| due(&mut connection.down, now))
        {
            if let Down::Ended(call, _) = &message
                && let Some(connection) = self.links.get_mut(&link)
            {
                connection.calls.remove(call);
            }
            self.router_heard(link, message)?;
        }
        Ok(())
    }

    /// A connection ends; each end learns of it in its time. `silent`: the router gives it up because nothing comes, or nobody
    /// listens.
    pub(crate) fn break_link(&mut self, link: Link, made: u64, silent: bool) -> Result<(), Violation> {
        let Some(connection) = self.links.get_mut(&link).filter(|connection| connection.made == made) else {
            return Ok(());
        };
        connection.made += 1;
        connection.up.clear();
        connection.down.clear();
        let (to, lives) = (connection.to, connection.lives.take());
        let calls = std::mem::take(&mut connection.calls);
        if lives.is_some_and(|(_, worker)| worker == self.life_of(to)) {
            let at = self.now + self.random.within(1, 50_000);
            self.events.plan(at, Event::Hangup { process: to, life: self.life_of(to), link, made });
        }
        if lives.is_none_or(|(router, _)| router == self.routers[link.0].life) {
            for call in calls {
                let end = LegEnd::Lost { message: "simulated".into(), silent };
                self.router_heard(link, Down::Ended(call, end))?;
            }
        }
        Ok(())
    }

    /// Every connection of a process ends, sooner or later.
    pub(crate) fn break_links_of(&mut self, process: Process) {
        let of = |(link, connection): (&Link, &Connection)| {
            let its = connection.to == process || Process::Router(link.0) == process;
            (its && connection.lives.is_some()).then_some((*link, connection.made))
        };
        let broken: Vec<(Link, u64)> = self.links.iter().filter_map(of).collect();
        for (link, made) in broken {
            let at = self.now + self.random.within(1, 20_000);
            self.events.plan(at, Event::Broken { link, made, silent: false });
        }
    }

    /// A router has died: the next one makes connections of its own, and workers learn of the end of these in their time.
    pub(crate) fn forget_links(&mut self, place: Place) {
        let mut gone = Vec::new();
        for (link, connection) in self.links.iter_mut().filter(|(link, _)| link.0 == place) {
            if connection.lives.take().is_some() {
                gone.push((*link, connection.to, connection.made));
            }
            connection.made += 1;
            connection.up.clear();
            connection.down.clear();
            connection.calls.clear();
        }
        for (link, process, made) in gone {
            let at = self.now + self.random.within(1, 50_000);
            self.events.plan(at, Event::Hangup { process, life: self.life_of(process), link, made });
        }
    }

    /// What keep-alives notice: connections in use over which nothing has come for too long.
    pub(crate) fn keep_alive(&mut self) -> Result<(), Violation> {
        let silent = |(link, connection): (&Link, &Connection)| {
            let router = Process::Router(link.0);
            let since = [self.apart_since(router, connection.to), self.frozen_since(connection.to)];
            let silent = since.into_iter().flatten().any(|since| since + SILENCE <= self.now);
            let hears = self.frozen_until(router).is_none();
            (silent && hears && connection.lives.is_some()).then_some((*link, connection.made))
        };
        let broken: Vec<(Link, u64)> = self.links.iter().filter_map(silent).collect();
        broken.into_iter().try_for_each(|(link, made)| self.break_link(link, made, true))
    }
}

/// The next message, if it has arrived.
fn due<T>(queue: &mut VecDeque<(Micros, T)>, now: Micros) -> Option<T> {
    let (at, _) = queue.front()?;
    if *at > now {
        return None;
    }
    queue.pop_front().map(|(_, message)| message)
}
