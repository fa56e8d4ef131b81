//! How a simulated router has prefixes moved, as `router/src/worker/fetch.rs` does: it asks the worker that takes a prefix, then the one that
//! gives it, and lets a request wait until the first has begun. Which prefixes move, and when, is random here.
//!
//! The random numbers are of their own, so that faults elsewhere strike as they would without this.

use std::time::Duration;

use baton_policy::{BlockName, LegEnd, Placed, Prefixes as Names};
use baton_roles::exchange::Answer;
use baton_types::WorkerId;
use baton_types::testing::Random;

use crate::control::{Call, Link, Up};
use crate::events::{Event, Place, Process};
use crate::exchange::PrefixAsk;
use crate::stream::Micros;
use crate::world::World;
use crate::{Options, Violation};

/// How long a request waits at most for its prefix to begin to move.
const BEGINS: Duration = Duration::from_millis(100);

/// How often prefixes move in this run.
#[derive(Debug)]
pub(crate) struct FetchPlan {
    random: Random,
    /// Of a thousand placements, so many are followed by a fetch.
    rate: u32,
    /// Longest time from one fetch that no request needs to the next, microseconds.
    pause: Micros,
}

impl FetchPlan {
    /// The seed chooses, more often if there are KV stores. In scenarios without KV stores none move: what they wait for is counted.
    pub(crate) fn new(seed: u64, options: &Options, stores: bool) -> FetchPlan {
        let mut random = Random(seed ^ 0x6665_7463_6865);
        let rate = [0, 200, 600, 950][random.below(4) as usize];
        let pause = [20_000, 200_000, 1_000_000][random.below(3) as usize];
        let rate = match (options.faults.is_some(), options.sizes.stores) {
            _ if options.only_keeps => 0,
            (true, Some(stores)) if stores > 0 => 1000,
            (true, _) => 0,
            (false, _) if stores => rate.max(600),
            _ => rate,
        };
        FetchPlan { random, rate, pause }
    }
}

/// A call to a worker that is still open.
type Open = (Link, Call);

/// A prefix that moves.
pub(super) struct Fetching {
    ask: PrefixAsk,
    /// The worker that takes it, the one that gives it, and the call to each.
    takes: Open,
    from: WorkerId,
    gives: Option<Open>,
    /// How long each worker may take.
    limits: [Duration; 2],
    /// A request's decode stream that waits for the beginning.
    waits: Option<(Open, Up)>,
    /// It is a piece of what a KV store is to take.
    keep: Option<u64>,
}

impl Fetching {
    pub(super) fn new(ask: PrefixAsk, from: WorkerId, limits: [Duration; 2]) -> Fetching {
        Fetching { ask, takes: ((0, WorkerId(0)), 0), from, gives: None, limits, waits: None, keep: None }
    }

    /// Whether it moves over this link, to the worker at its other end.
    pub(super) fn is_taken_by(&self, link: Link) -> bool {
        self.takes.0 == link
    }

    pub(super) fn kept_as(self, keep: u64) -> Fetching {
        Fetching { keep: Some(keep), ..self }
    }
}

/// What came of a prefix that was to move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Outcome {
    Moved,
    /// The worker that takes it lent no blocks.
    Refused {
        gone: bool,
    },
    /// The worker that holds it gave nothing.
    NotGiven {
        gone: bool,
    },
    /// Both were ready, and it did not get through.
    NotTaken,
}

impl World {
    /// The random time at which the next prefix moves that no request needs.
    pub(crate) fn plan_any_prefix(&mut self) {
        if self.fetch_plan.rate > 0 {
            let at = self.now.max(400_000) + self.fetch_plan.random.within(1, self.fetch_plan.pause);
            self.events.plan(at, Event::AnyPrefix);
        }
    }

    /// A random router has a random prefix moved.
    pub(crate) fn any_prefix(&mut self) {
        if self.healed {
            return;
        }
        self.plan_any_prefix();
        let place = self.fetch_plan.random.below(self.routers.len() as u64) as Place;
        let request = self.fetch_plan.random.below(self.clients.len().max(1) as u64);
        let takes = |process: &Process| matches!(process, Process::Decode(_));
        let takes_any = |process: &Process| matches!(process, Process::Decode(_) | Process::Prefill(_));
        let takers = self.known(place, if self.has_kv_stores() { takes_any } else { takes });
        let awake = self.frozen_until(Process::Router(place)).is_none();
        if let Some(to) = self.one_of(&takers).filter(|_| awake && (request as usize) < self.clients.len()) {
            self.begin_fetch(place, request, to);
        }
    }

    /// Perhaps has the prefix of a request moved to one of its workers. The next stream to that one then waits for its beginning.
    pub(super) fn fetch_for(&mut self, place: Place, request: u64, placed: Placed) {
        let rate = self.fetch_plan.rate;
        let prefill = placed.prefill.filter(|_| self.has_kv_stores());
        let prefill = prefill.filter(|_| self.fetch_plan.random.chance(500));
        let to = prefill.unwrap_or(placed.decode);
        let fetch = match rate > 0 && self.fetch_plan.random.chance(rate) {
            true => self.begin_fetch(place, request, to),
            false => None,
        };
        if let Some(flight) = self.routers[place].choices.get_mut(&request) {
            flight.fetch = fetch;
        }
    }

    fn one_of(&mut self, workers: &[WorkerId]) -> Option<WorkerId> {
        let random = &mut self.fetch_plan.random;
        (!workers.is_empty()).then(|| workers[random.below(workers.len() as u64) as usize])
    }

    /// Workers of a kind that a router is connected to.
    fn known(&self, place: Place, is: fn(&Process) -> bool) -> Vec<WorkerId> {
        let router = &self.routers[place];
        let connected = router.connected.iter().copied();
        connected.filter(|worker| router.knew.get(worker).is_some_and(is)).collect()
    }

    /// A prefix of a request's prompt, in blocks, and the worker that gives it: mostly one that is said to hold it, as `to` is not.
    fn source(&mut self, place: Place, request: u64, to: WorkerId) -> Option<(WorkerId, u32)> {
        let (client, size) = (&self.clients[request as usize], self.geometry.layout.block_size);
        let most = (client.prompt.len() as u32).saturating_sub(1) / size;
        let names = Names::names(BlockName::root(&client.salt.to_string(), size), size, &[], &client.prompt);
        let mut givers = self.known(place, |process| matches!(process, Process::Prefill(_)));
        let mut holders = self.routers[place].index.find(&names, 4, request as usize);
        if self.has_kv_stores() {
            // Decode workers give as well, and stores first.
            let stores = self.known(place, |process| matches!(process, Process::KvStore(_)));
            givers.extend(&stores);
            givers.extend(self.known(place, |process| matches!(process, Process::Decode(_))));
            holders.extend(self.in_tiers(place, &names));
            holders.sort_by_key(|holder| !stores.contains(&holder.worker));
        }
        givers.retain(|giver| *giver != to);
        let holder = { holders.iter() }.find(|holder| givers.contains(&holder.worker)).copied();
        let here = { holders.iter() }.find(|holder| holder.worker == to).map_or(0, |holder| holder.blocks);
        match holder.filter(|holder| holder.blocks > here) {
            Some(holder) if self.fetch_plan.random.chance(900) => Some((holder.worker, holder.blocks.min(most))),
            _ if self.fetch_plan.random.chance(800) => None,
            _ => Some((self.one_of(&givers)?, self.fetch_plan.random.below(u64::from(most) + 1) as u32)),
        }
    }

    /// Has a prefix of a request's prompt moved. Returns the number of what has begun.
    fn begin_fetch(&mut self, place: Place, request: u64, to: WorkerId) -> Option<u64> {
        let (from, blocks) = self.source(place, request, to).filter(|(_, blocks)| *blocks > 0)?;
        let client = &self.clients[request as usize];
        // One token after the last block: what follows is of no matter.
        let tokens = client.prompt.get(..(blocks * self.geometry.layout.block_size) as usize + 1)?.to_vec();
        let (salt, priority) = (client.salt, client.priority);
        let random = &mut self.fetch_plan.random;
        let most = [20_000, 500_000, 2_000_000][random.below(3) as usize];
        let limit = Duration::from_micros(random.within(1_000, most));
        let ask = PrefixAsk { request, tokens, salt, priority, time_left: limit };
        Some(self.start_fetch(place, to, Fetching::new(ask, from, [limit; 2])))
    }

    /// Asks a worker to take a prefix. Returns the number of what has begun.
    pub(super) fn start_fetch(&mut self, place: Place, to: WorkerId, mut fetching: Fetching) -> u64 {
        self.next_call += 1;
        let (call, link) = (self.next_call, (place, to));
        fetching.takes = (link, call);
        let (ask, from, [lends, _]) = (fetching.ask.clone(), fetching.from, fetching.limits);
        self.note(|| format!("router {place} has {to} fetch {} tokens from {from}", ask.tokens.len() - 1));
        self.routers[place].fetch_calls.insert(call, call);
        self.routers[place].fetching.insert(call, fetching);
        self.plan_prefix_over(place, call, lends, false);
        self.send_up(link, Up::Fetch { call, prefix: ask });
        call
    }

    fn plan_prefix_over(&mut self, place: Place, prefix: u64, limit: Duration, serves: bool) {
        let (life, router) = (self.routers[place].life, Process::Router(place));
        let at = self.micros(router, self.clock_now(router) + limit).max(self.now + 1);
        self.events.plan(at, Event::PrefixOver { router: place, life, prefix, serves });
    }

    /// Opens a stream, once the prefix has begun to move that it waits for.
    pub(super) fn send_after(&mut self, place: Place, prefix: Option<u64>, (call, link): (Call, Link), message: Up) {
        let fetching = prefix.and_then(|prefix| Some((prefix, self.routers[place].fetching.get_mut(&prefix)?)));
        match fetching.filter(|(_, fetching)| fetching.takes.0 == link && fetching.gives.is_none()) {
            Some((prefix, fetching)) => {
                fetching.waits = Some(((link, call), message));
                let (life, router) = (self.routers[place].life, Process::Router(place));
                let at = self.micros(router, self.clock_now(router) + BEGINS).max(self.now + 1);
                self.events.plan(at, Event::PrefixBegins { router: place, life, prefix });
            }
            None => self.send_up(link, message),
        }
    }

    /// What waits for a prefix waits no longer.
    pub(crate) fn let_go(&mut self, place: Place, prefix: u64) {
        let router = &mut self.routers[place];
        let waits = router.fetching.get_mut(&prefix).and_then(|fetching| fetching.waits.take());
        self.send_late(place, waits);
    }

    fn send_late(&mut self, place: Place, waits: Option<(Open, Up)>) {
        if let Some(((link, call), message)) = waits
            && self.routers[place].calls.contains_key(&call)
        {
            self.send_up(link, message);
        }
    }

    /// A worker says something of a prefix, or its call has ended.
    pub(super) fn prefix_heard(
        &mut self,
        place: Place,
        call: Call,
        said: Result<Answer, LegEnd>,
    ) -> Result<(), Violation> {
        let size = self.geometry.layout.block_size as usize;
        let router = &mut self.routers[place];
        let Some(prefix) = router.fetch_calls.get(&call).copied() else { return Ok(()) };
        let Some(fetching) = router.fetching.get_mut(&prefix) else { return Ok(()) };
        match said {
            Ok(Answer::Reserved(target)) if fetching.gives.is_none() => {
                self.next_call += 1;
                let (call, link) = (self.next_call, (place, fetching.from));
                fetching.gives = Some((link, call));
                let (ask, limit) = (fetching.ask.clone(), fetching.limits[1]);
                router.fetch_calls.insert(call, prefix);
                self.let_go(place, prefix);
                self.plan_prefix_over(place, prefix, limit, true);
                self.send_up(link, Up::Serve { call, prefix: ask, target });
            }
            Ok(Answer::Fetched(tokens)) if fetching.gives.is_some() => {
                // Whole blocks before the last token.
                let asked = (fetching.ask.tokens.len() - 1) / size * size;
                if tokens as usize != asked {
                    let what = format!("{tokens} tokens are said to be fetched, {asked} were asked for");
                    return Err(self.violation("reported once", what));
                }
                return self.end_fetch(place, prefix, None, Outcome::Moved);
            }
            // The other worker says so itself.
            Ok(Answer::Served(_)) => {
                router.fetch_calls.remove(&call);
                if let Some(connection) = fetching.gives.and_then(|(link, _)| self.links.get_mut(&link)) {
                    connection.calls.remove(&call);
                }
            }
            Ok(answer) => return Err(self.violation("reported once", format!("of a prefix: {answer:?}, out of turn"))),
            Err(end) => {
                let gone = matches!(end, LegEnd::Lost { .. } | LegEnd::Early | LegEnd::Draining { .. });
                let outcome = match fetching.gives {
                    None => Outcome::Refused { gone },
                    Some(_) if fetching.takes.1 == call => Outcome::NotTaken,
                    Some(_) => Outcome::NotGiven { gone },
                };
                let why = match end {
                    LegEnd::Lost { .. } | LegEnd::Early => "lost",
                    LegEnd::Draining { .. } => "draining",
                    _ if fetching.gives.is_none() => "not lent",
                    _ if fetching.takes.1 == call => "not fetched",
                    _ => "not served",
                };
                return self.end_fetch(place, prefix, Some(why), outcome);
            }
        }
        Ok(())
    }

    /// A stage has taken too long.
    pub(crate) fn prefix_is_late(&mut self, place: Place, prefix: u64, serves: bool) -> Result<(), Violation> {
        let fetching = self.routers[place].fetching.get(&prefix);
        let outcome = if serves { Outcome::NotTaken } else { Outcome::Refused { gone: true } };
        match fetching.is_some_and(|fetching| fetching.gives.is_some() == serves) {
            true => self.end_fetch(place, prefix, Some("late"), outcome),
            false => Ok(()),
        }
    }

    /// Ends both calls. `why`: why it failed, if it did.
    fn end_fetch(
        &mut self,
        place: Place,
        prefix: u64,
        why: Option<&'static str>,
        outcome: Outcome,
    ) -> Result<(), Violation> {
        let Some(fetching) = self.routers[place].fetching.remove(&prefix) else { return Ok(()) };
        let Fetching { takes, gives, waits, keep, from, .. } = fetching;
        self.send_late(place, waits);
        for (link, call) in [Some(takes), gives].into_iter().flatten() {
            self.routers[place].fetch_calls.remove(&call);
            self.drop_call(link, call);
        }
        self.note(|| format!("prefix {prefix} of router {place}: {}", why.unwrap_or("fetched")));
        if let Some(why) = why {
            let failed = if keep.is_some() { &mut self.summary.keeps_failed } else { &mut self.summary.fetches_failed };
            *failed.entry(why).or_default() += 1;
        }
        match keep {
            Some(keep) => return self.piece_over(place, keep, outcome),
            // Prompts often wait for less time than a prefix takes: only that a store is gone is held against it.
            None if outcome == (Outcome::NotGiven { gone: true }) => {
                self.moved_apart(place, takes.0.1, from, outcome);
            }
            None => {}
        }
        Ok(())
    }
}
