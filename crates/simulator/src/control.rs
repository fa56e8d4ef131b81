//! The control plane's network: streams between routers and workers. Messages take time, arrive in order, and may be lost.
//!
//! A router has one connection to each worker it knows. After the connection has broken, its next use opens it again. It goes to the
//! worker's address, where another process than the intended one may answer.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use baton_policy::{Broken, DecodeWord, LegEnd, PrefillWord};
use baton_roles::exchange::Answer;
use baton_types::{SamplingParams, WorkerId};

use crate::Violation;
use crate::events::{Event, Life, Place, Process};
use crate::exchange::PrefixAsk;
use crate::stream::Micros;
use crate::world::World;

/// Silence after which a used connection is given up, microseconds: a ping every second, and time for its answer.
pub(crate) const SILENCE: Micros = 2_000_000;

/// Names a connection: the router's place and the worker's id.
pub(crate) type Link = (Place, WorkerId);
/// Number of a stream over a connection.
pub(crate) type Call = u64;

/// A request as a router sends it to a worker.
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

/// A message from a router to a worker.
#[derive(Clone, Debug)]
pub(crate) enum Up {
    Decode {
        call: Call,
        ask: Box<Ask>,
        local: bool,
    },
    Prefill {
        call: Call,
        ask: Box<Ask>,
        target: Option<Vec<u8>>,
    },
    /// The target of a request that was sent without.
    Target {
        call: Call,
        target: Vec<u8>,
    },
    /// Take this prefix from another worker.
    Fetch {
        call: Call,
        prefix: PrefixAsk,
    },
    /// Give this prefix to the worker that the target is from.
    Serve {
        call: Call,
        prefix: PrefixAsk,
        target: Vec<u8>,
    },
    Cancel {
        call: Call,
    },
    Probe,
}

/// A message from a worker to a router.
#[derive(Clone, Debug)]
pub(crate) enum Down {
    DecodeSaid(Call, DecodeWord),
    PrefillSaid(Call, PrefillWord),
    /// Of a prefix that is fetched or served; not that it failed.
    Moved(Call, Answer),
    Ended(Call, LegEnd),
    Probed,
}

/// A connection of a router to a worker.
#[derive(Debug)]
pub(crate) struct Connection {
    pub to: Process,
    /// Incarnations of the router and the worker when the connection was opened; None while it is not open.
    lives: Option<(Life, Life)>,
    /// Number of the connection, counted up each time it breaks.
    pub made: u64,
    /// Messages in flight to the worker (`up`) and to the router (`down`), in order, with their arrival times.
    up: VecDeque<(Micros, Up)>,
    down: VecDeque<(Micros, Down)>,
    /// Streams that are open as far as the router knows.
    pub calls: BTreeSet<Call>,
}

impl Connection {
    pub(crate) fn new(to: Process) -> Connection {
        Connection { to, lives: None, made: 0, up: VecDeque::new(), down: VecDeque::new(), calls: BTreeSet::new() }
    }
}

impl World {
    /// Sends over a connection, opening it if needed. If nobody listens at the address, the connection is refused.
    pub(crate) fn send_up(&mut self, link: Link, message: Up) {
        let router_life = self.routers[link.0].life;
        let Some(connection) = self.links.get_mut(&link) else { return };
        let to = connection.to;
        if let Up::Decode { call, .. } | Up::Prefill { call, .. } | Up::Fetch { call, .. } | Up::Serve { call, .. } =
            &message
        {
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
                self.events.plan(at, Event::Broken { link, made, broken: Broken::Refused });
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

    /// Whether both ends of a connection are still the processes it was opened between.
    fn stands(&self, link: Link, made: u64) -> bool {
        let Some(connection) = self.links.get(&link).filter(|connection| connection.made == made) else { return false };
        connection.lives == Some((self.routers[link.0].life, self.life_of(connection.to)))
    }

    /// Delivers the messages that have arrived at a worker.
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
                (Process::KvStore(place), message) => self.kv_store_asked(place, (link, made), message)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Delivers the messages that have arrived at a router.
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

    /// Ends a connection. The router learns of it now, the worker a little later.
    pub(crate) fn break_link(&mut self, link: Link, made: u64, broken: Broken) -> Result<(), Violation> {
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
                let end = LegEnd::Lost { message: "simulated".into(), broken };
                self.router_heard(link, Down::Ended(call, end))?;
            }
        }
        Ok(())
    }

    /// Ends every connection of a process, each after a random delay.
    pub(crate) fn break_links_of(&mut self, process: Process) {
        let of = |(link, connection): (&Link, &Connection)| {
            let its = connection.to == process || Process::Router(link.0) == process;
            (its && connection.lives.is_some()).then_some((*link, connection.made))
        };
        let broken: Vec<(Link, u64)> = self.links.iter().filter_map(of).collect();
        for (link, made) in broken {
            let at = self.now + self.random.within(1, 20_000);
            self.events.plan(at, Event::Broken { link, made, broken: Broken::Closed });
        }
    }

    /// Drops the connections of a router that has died. Its successor opens its own; workers learn of the end a little later.
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

    /// Ends the open connections over which nothing has come for too long, as keep-alives do.
    pub(crate) fn keep_alive(&mut self) -> Result<(), Violation> {
        let silent = |(link, connection): (&Link, &Connection)| {
            let router = Process::Router(link.0);
            let since = [self.apart_since(router, connection.to), self.frozen_since(connection.to)];
            let silent = since.into_iter().flatten().any(|since| since + SILENCE <= self.now);
            let hears = self.frozen_until(router).is_none();
            (silent && hears && connection.lives.is_some()).then_some((*link, connection.made))
        };
        let broken: Vec<(Link, u64)> = self.links.iter().filter_map(silent).collect();
        broken.into_iter().try_for_each(|(link, made)| self.break_link(link, made, Broken::TimedOut))
    }
}

/// Takes the next message, if it has arrived.
fn due<T>(queue: &mut VecDeque<(Micros, T)>, now: Micros) -> Option<T> {
    let (at, _) = queue.front()?;
    if *at > now {
        return None;
    }
    queue.pop_front().map(|(_, message)| message)
}
