//! The two ends of handoffs at a worker: one takes KV into its pool, the other gives KV from it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::{Index, IndexMut};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use baton_engine::HOLE;
use baton_handoff::{Ledger, Members, Op, PathTable, ReceiverEvent, TransferError, TransferLimits, TransferStats};
use baton_roles::{Input, RoleCore, WorkerCore, decode, exchange, prefill};
use baton_types::{Epoch, SeqId, WorkerId, mix};

use crate::Violation;
use crate::events::{Life, Line, Process, Serial};
use crate::fetched::Fetched;
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
    /// Blocks that came with a fetched prefix and were not written to since.
    pub fetched: Fetched,
    /// Sequences that have read some of them.
    pub seen: BTreeSet<SeqId>,
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
            fetched: Fetched::new(),
            seen: BTreeSet::new(),
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

    /// Whether nothing is under way.
    pub(crate) fn is_free(&self) -> bool {
        self.handoffs.is_empty() && self.jobs.is_empty()
    }

    /// The handoff of a sequence.
    pub(crate) fn of(&self, seq: SeqId) -> Option<u64> {
        self.handoffs.iter().find(|(_, handoff)| handoff.seq == Some(seq)).map(|(id, _)| *id)
    }
}

impl World {
    /// I3: no step touches a block that a peer may write to.
    pub(crate) fn touches_nothing_lent<R: RoleCore>(
        &self,
        here: Process,
        core: &mut WorkerCore<R>,
        step: u64,
    ) -> Result<(), Violation> {
        let memory = &self.receivers[here].memory;
        let lent = core.with_batch(step, |batch| {
            let tables = batch.rows.iter().flat_map(|row| row.tables.iter().enumerate());
            let blocks = tables.flat_map(|(group, table)| table.blocks().iter().map(move |block| (group, *block)));
            let mut kept = blocks.filter(|(_, block)| *block != HOLE);
            kept.find_map(|(group, block)| memory.owner(group, block).map(|epoch| (group, block, epoch)))
        });
        match lent.flatten() {
            Some((group, block, epoch)) => {
                let what = format!("{here} computes with {block} of group {group}, which is lent under {epoch}");
                Err(self.violation("I3", what))
            }
            None => Ok(()),
        }
    }

    /// I3: no step writes to a block that a handoff reads.
    pub(crate) fn writes_nothing_read<R: RoleCore>(
        &self,
        here: Process,
        core: &mut WorkerCore<R>,
        step: u64,
    ) -> Result<(), Violation> {
        let memory = &self.senders[here].memory;
        let size = memory.geometry.layout.block_size as usize;
        let read = core.with_batch(step, |batch| {
            batch.rows.iter().find_map(|row| {
                let (from, to) = (row.start as usize / size, (row.start as usize + row.tokens.len()).div_ceil(size));
                row.tables.iter().enumerate().find_map(|(group, table)| {
                    let written = table.blocks().get(from..to).unwrap_or_default();
                    written.iter().find_map(|block| memory.owner(group, *block).map(|id| (group, *block, id)))
                })
            })
        });
        match read.flatten() {
            Some((group, block, id)) => {
                let what = format!("{here} writes to {block} of group {group}, which handoff {id} reads");
                Err(self.violation("I3", what))
            }
            None => Ok(()),
        }
    }

    /// Passes an event of the receiving end to the worker's engine thread.
    pub(crate) fn pass_on(&mut self, here: Process, event: ReceiverEvent) {
        match here {
            Process::Decode(place) => {
                self.decodes[place].inbox.push_back(Input::Command(decode::Command::Received(event)));
            }
            _ => self.exchange_told(here, exchange::Command::Received(event)),
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
            Process::KvStore(place) => self.kv_stores[place].inbox.push_back(Input::Exchange(command)),
            _ => {}
        }
    }

    /// Whether two workers run on one host.
    pub(crate) fn near(&self, from: Process, to: Process) -> bool {
        let number = |process| match process {
            Process::Prefill(place) => place,
            Process::Decode(place) => 1000 + place,
            Process::KvStore(place) => 2000 + place,
            Process::Router(_) | Process::Registry => 0,
        };
        let number = match (from, to) {
            (Process::Prefill(from), Process::Decode(to)) => from * 64 + to,
            _ => (1 << 20) + number(from).min(number(to)) * 4096 + number(from).max(number(to)),
        };
        mix(self.seed ^ mix(number as u64)) % 10 < 6
    }
}
