//! Planned events, in the order of their virtual times. Events with equal times keep the order in which they were planned.

use std::collections::BTreeMap;
use std::fmt;

use baton_membership::{FollowAction, RenewalInput};
use baton_policy::{Backlog, Broken, KvChange};
use baton_types::WorkerId;

use crate::control::Link;
use crate::faults::Fault;
use crate::membership::{Request, Sent};
use crate::stream::Micros;

/// Index of a process among those of its kind.
pub(crate) type Place = usize;
/// A process's incarnation. Events for an earlier incarnation are void.
pub(crate) type Life = u64;
/// A connection between workers. The number of a session's own connection is also the session's number at the worker that takes KV.
pub(crate) type Line = u64;
/// A session's number at the worker that gives KV. No two sessions of a run have the same.
pub(crate) type Serial = u64;

/// A process, by its address; successive incarnations share it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Process {
    Router(Place),
    Prefill(Place),
    Decode(Place),
    Registry,
    KvStore(Place),
}

impl Process {
    /// The address at which it listens.
    pub(crate) fn address(self) -> String {
        match self {
            Process::Prefill(place) => format!("http://127.0.0.1:{}", 10_000 + place),
            Process::Decode(place) => format!("http://127.0.0.1:{}", 20_000 + place),
            Process::Router(place) => format!("http://127.0.0.1:{}", 30_000 + place),
            Process::KvStore(place) => format!("http://127.0.0.1:{}", 40_000 + place),
            Process::Registry => "http://127.0.0.1:2379".into(),
        }
    }

    /// The worker that listens at an address.
    pub(crate) fn at(address: &str) -> Option<Process> {
        let port: Place = address.rsplit(':').next()?.parse().ok()?;
        match port {
            10_000..20_000 => Some(Process::Prefill(port - 10_000)),
            20_000..30_000 => Some(Process::Decode(port - 20_000)),
            40_000..50_000 => Some(Process::KvStore(port - 40_000)),
            _ => None,
        }
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Process::Router(place) => write!(f, "router {place}"),
            Process::Prefill(place) => write!(f, "prefill {place}"),
            Process::Decode(place) => write!(f, "decode {place}"),
            Process::KvStore(place) => write!(f, "kv-store {place}"),
            Process::Registry => f.write_str("registry"),
        }
    }
}

/// Something that happens at a given time.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    // Clients and routers.
    Arrive {
        request: u64,
    },
    Leave {
        request: u64,
    },
    /// A client has taken a token.
    Taken {
        router: Place,
        life: Life,
        request: u64,
    },
    /// A choice asked to be woken now.
    Wake {
        router: Place,
        life: Life,
        request: u64,
    },
    Probe {
        router: Place,
        life: Life,
        worker: WorkerId,
    },
    /// A probe was not answered in time.
    ProbeOver {
        router: Place,
        life: Life,
        worker: WorkerId,
    },
    /// A prefix that is to move has taken too long, at this stage.
    PrefixOver {
        router: Place,
        life: Life,
        prefix: u64,
        serves: bool,
    },
    /// A request has waited long enough for its prefix to begin to move.
    PrefixBegins {
        router: Place,
        life: Life,
        prefix: u64,
    },
    /// A router may have some prefix moved that no request needs now.
    AnyPrefix,
    /// A router looks whether a KV store should take what a request has left.
    Keep {
        router: Place,
        life: Life,
        keep: u64,
    },
    /// News of a worker's prefix cache, and of its load.
    News {
        link: Link,
        life: Life,
        change: KvChange,
        load: Backlog,
    },
    // Streams between routers and workers.
    Up {
        link: Link,
        made: u64,
    },
    Down {
        link: Link,
        made: u64,
    },
    Broken {
        link: Link,
        made: u64,
        broken: Broken,
    },
    /// A worker learns that a connection has ended.
    Hangup {
        process: Process,
        life: Life,
        link: Link,
        made: u64,
    },
    KeepAlive,
    // Membership.
    Renewal {
        process: Process,
        life: Life,
    },
    ToRegistry {
        process: Process,
        life: Life,
        attempt: u64,
        request: Request,
    },
    FromRegistry {
        process: Process,
        life: Life,
        attempt: u64,
        answer: RenewalInput,
    },
    Expiry,
    Follow {
        router: Place,
        life: Life,
        action: FollowAction,
    },
    FollowWake {
        router: Place,
        life: Life,
    },
    Watch {
        router: Place,
        life: Life,
        feed: u64,
    },
    Listed {
        router: Place,
        life: Life,
        feed: u64,
        sent: Option<Sent>,
    },
    ListDue {
        router: Place,
        feed: u64,
    },
    RegistryBack,
    RegistryFails {
        fault: Fault,
    },
    // Workers.
    EngineTurn {
        process: Process,
        life: Life,
    },
    /// What a busy engine thread waits for has happened.
    EngineStep {
        process: Process,
        life: Life,
    },
    /// The threads of a worker's store go on.
    StoreTurn {
        process: Process,
        life: Life,
    },
    /// A session at a worker that takes KV has a turn.
    ReceiverTurn {
        line: Line,
    },
    /// A session at a worker that gives KV has a turn.
    SenderTurn {
        process: Process,
        life: Life,
        session: Serial,
    },
    /// A worker looks for expired leases.
    Desk {
        process: Process,
        life: Life,
    },
    /// A worker that takes KV learns that the giver's process has ended.
    Died {
        line: Line,
    },
    /// A worker's thread that writes prefixes goes on.
    WritePrefix {
        process: Process,
        life: Life,
    },
    /// A handoff should have ended by now.
    MustHaveEnded {
        process: Process,
        life: Life,
        handoff: u64,
    },
    /// A connection between workers breaks.
    Cut {
        line: Line,
    },
    /// The deadline of a worker's drain.
    DrainOver {
        process: Process,
        life: Life,
    },
    // Faults.
    /// A scenario's rule strikes.
    Rule {
        number: usize,
        it: Option<Process>,
    },
    /// A random fault may strike.
    Strike,
    /// A KV store joins, or a fault strikes one.
    JoinKvStore,
    StrikeKvStore,
    /// All faults end.
    Heal,
}

impl Event {
    /// The process whose turn it is, if any, and the incarnation that the event is for.
    pub(crate) fn process(&self) -> Option<(Process, Option<Life>)> {
        Some(match self {
            Event::Taken { router, life, .. }
            | Event::Wake { router, life, .. }
            | Event::Probe { router, life, .. }
            | Event::ProbeOver { router, life, .. }
            | Event::PrefixOver { router, life, .. }
            | Event::PrefixBegins { router, life, .. }
            | Event::Keep { router, life, .. }
            | Event::Follow { router, life, .. }
            | Event::FollowWake { router, life }
            | Event::Listed { router, life, .. } => (Process::Router(*router), Some(*life)),
            Event::News { link, life, .. } => (Process::Router(link.0), Some(*life)),
            Event::Renewal { process, life }
            | Event::FromRegistry { process, life, .. }
            | Event::EngineTurn { process, life }
            | Event::EngineStep { process, life }
            | Event::StoreTurn { process, life }
            | Event::Hangup { process, life, .. }
            | Event::DrainOver { process, life } => (*process, Some(*life)),
            Event::SenderTurn { process, life, .. }
            | Event::WritePrefix { process, life }
            | Event::MustHaveEnded { process, life, .. }
            | Event::Desk { process, life } => (*process, Some(*life)),
            _ => return None,
        })
    }
}

/// Planned events.
#[derive(Debug, Default)]
pub(crate) struct Events {
    planned: BTreeMap<(Micros, u64), Event>,
    number: u64,
}

impl Events {
    pub(crate) fn plan(&mut self, at: Micros, event: Event) {
        self.number += 1;
        self.planned.insert((at, self.number), event);
    }

    pub(crate) fn next(&mut self) -> Option<(Micros, Event)> {
        self.planned.pop_first().map(|((at, _), event)| (at, event))
    }
}
