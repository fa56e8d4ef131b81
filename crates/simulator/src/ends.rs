//! The two ends of handoffs at a worker: one takes KV into its pool, the other gives KV from it. Prefill workers give, decode workers take.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Index, IndexMut};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use baton_handoff::{Ledger, Members, Op, PathTable, ReceiverEvent, TransferError, TransferLimits, TransferStats};
use baton_roles::{Input, decode, exchange, prefill};
use baton_types::{BlockId, Epoch, SeqId, WorkerId, mix};

use crate::events::{Life, Line, Process, Serial};
use crate::opening::Handoff;
use crate::pool::{Blocks, Memory};
use crate::prefixes::Job;
use crate::receiver_session::ReceiverSession;
use crate::sender_session::SenderSession;
use crate::stream::Timer;
use crate::world::World;

/// The ends of one kind, by the worker that has them.
pub(crate) struct Ends<T>(BTreeMap<Process, T>);

impl<T> Default for Ends<T> {
    fn default() -> Ends<T> {
        Ends(BTreeMap::new())
    }
}

impl<T> Ends<T> {
    /// Gives a worker an end in place of the one it had.
    pub(crate) fn set(&mut self, process: Process, end: T) {
        self.0.insert(process, end);
    }

    pub(crate) fn has(&self, process: Process) -> bool {
        self.0.contains_key(&process)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (Process, &T)> {
        self.0.iter().map(|(process, end)| (*process, end))
    }
}

impl<T> Index<Process> for Ends<T> {
    type Output = T;

    fn index(&self, process: Process) -> &T {
        &self.0[&process]
    }
}

impl<T> IndexMut<Process> for Ends<T> {
    fn index_mut(&mut self, process: Process) -> &mut T {
        self.0.get_mut(&process).expect("a worker that has this end")
    }
}

/// The checker's own record of what is lent under an epoch.
pub(crate) struct Lent {
    pub tokens: Vec<u32>,
    pub first: Vec<u32>,
    pub blocks: Blocks,
}

/// Takes KV: the real ledger, its sessions, and the checker's records.
pub(crate) struct Receiver {
    pub life: Life,
    pub id: WorkerId,
    pub memory: Memory<Epoch>,
    pub ledger: Ledger,
    /// Tokens of every sequence that the worker has accepted.
    pub sequences: BTreeMap<SeqId, Vec<u32>>,
    pub books: BTreeMap<Epoch, Lent>,
    /// The epoch under which each sequence's blocks were lent.
    pub lends: BTreeMap<SeqId, Epoch>,
    pub verified: BTreeSet<Epoch>,
    /// Epochs of prefixes that are fetched.
    pub fetches: BTreeSet<Epoch>,
    /// Blocks that came with a fetched prefix and were not written to since, with their groups.
    pub fetched: BTreeSet<(usize, BlockId)>,
    pub sessions: BTreeMap<Line, ReceiverSession>,
    pub members: Members<Line>,
    /// The session of each connection that has joined one.
    pub streams: BTreeMap<Line, Line>,
    pub desk: Timer,
}

impl Receiver {
    pub(crate) fn new(life: Life, memory: Memory<Epoch>, limits: TransferLimits) -> Receiver {
        Receiver {
            life,
            id: WorkerId(life),
            ledger: Ledger::new(&memory.geometry, limits.clone()),
            members: Members::new(limits.connections),
            memory,
            sequences: BTreeMap::new(),
            books: BTreeMap::new(),
            lends: BTreeMap::new(),
            verified: BTreeSet::new(),
            fetches: BTreeSet::new(),
            fetched: BTreeSet::new(),
            sessions: BTreeMap::new(),
            streams: BTreeMap::new(),
            desk: Timer::default(),
        }
    }

    /// Epochs under which a peer may write.
    pub(crate) fn lent(&self) -> Vec<Epoch> {
        self.books.keys().copied().collect()
    }

    /// Removes a session, or a connection that never became one.
    pub(crate) fn forget(&mut self, line: Line) {
        self.members.dismiss(line);
        self.streams.retain(|_, owner| *owner != line);
    }

    /// Whether a reservation was ever announced as verified.
    pub(crate) fn has_verified(&self, epoch: Epoch) -> bool {
        self.verified.contains(&epoch)
    }
}

/// What a handoff's owner is told.
#[derive(Clone, PartialEq, Debug)]
pub(crate) enum Told {
    Done(Result<TransferStats, TransferError>),
    Quiet,
}

/// What callbacks were told, each with its handoff's number.
type Reports = Arc<Mutex<Vec<(u64, Told)>>>;

/// A write that waits for room.
pub(crate) struct Waiting {
    pub handoff: u64,
    pub op: Op,
    pub patience: Instant,
}

/// Gives KV: handoffs and their sessions.
pub(crate) struct Sender {
    pub life: Life,
    pub id: WorkerId,
    pub memory: Memory<u64>,
    pub handoffs: BTreeMap<u64, Handoff>,
    pub waiting: VecDeque<Waiting>,
    /// Prefixes that are served, in the order in which they are written.
    pub jobs: VecDeque<Job>,
    pub next: u64,
    pub sessions: BTreeMap<Serial, SenderSession>,
    /// The last session to each worker.
    pub latest: BTreeMap<WorkerId, Serial>,
    pub paths: PathTable,
    pub reports: Reports,
}

impl Sender {
    pub(crate) fn new(life: Life, memory: Memory<u64>) -> Sender {
        Sender {
            life,
            id: WorkerId(life),
            memory,
            handoffs: BTreeMap::new(),
            waiting: VecDeque::new(),
            jobs: VecDeque::new(),
            next: 0,
            sessions: BTreeMap::new(),
            latest: BTreeMap::new(),
            paths: PathTable::default(),
            reports: Reports::default(),
        }
    }

    /// The handoff of a sequence.
    pub(crate) fn of(&self, seq: SeqId) -> Option<u64> {
        self.handoffs.iter().find(|(_, handoff)| handoff.seq == Some(seq)).map(|(id, _)| *id)
    }
}

impl World {
    /// Passes an event of the receiving end to the worker's engine thread.
    pub(crate) fn pass_on(&mut self, here: Process, event: ReceiverEvent) {
        if let Process::Decode(place) = here {
            self.decodes[place].inbox.push_back(Input::Command(decode::Command::Received(event)));
        }
    }

    /// Tells a prefill worker's role of one of its handoffs.
    pub(crate) fn prefill_told(&mut self, here: Process, command: prefill::Command) {
        if let Process::Prefill(place) = here {
            self.prefills[place].inbox.push_back(Input::Command(command));
        }
    }

    /// Passes a command to the part of a worker that exchanges prefixes.
    pub(crate) fn exchange_told(&mut self, here: Process, command: exchange::Command) {
        match here {
            Process::Prefill(place) => self.prefills[place].inbox.push_back(Input::Exchange(command)),
            Process::Decode(place) => self.decodes[place].inbox.push_back(Input::Exchange(command)),
            _ => {}
        }
    }

    /// Whether two workers run on one host.
    pub(crate) fn near(&self, from: Process, to: Process) -> bool {
        let number = match (from, to) {
            (Process::Prefill(from), Process::Decode(to)) => from * 64 + to,
            _ => return false,
        };
        mix(self.seed ^ mix(number as u64)) % 10 < 6
    }
}
