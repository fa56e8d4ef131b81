//! A cluster of one prefill and one decode engine over fake models, driven tick by tick: arrivals, transfers that land
//! late or corrupt, cancels, resumptions, deadlines, failing steps. Whatever happens, [`World::run`] demands that each client
//! sees each token once, in order, and the very tokens its request gives alone (I1, I4), that blocks are conserved at each
//! tick and all free at the end (I6), that nobody's bytes change under it (I3), and that it all ends in bounded time (I5).

mod client;
mod node;

use std::collections::{BTreeMap, BTreeSet};

use baton_engine::fake::KvMemory;
use baton_engine::{Aborted, Event, HOLE, ModelRunner, NewSequence, RunError, SequenceError, Start, Step, Time};
use baton_types::{FinishReason, KvLayout, RequestId, SeqId, TokenOut};

pub use client::{Client, End, Route, Spec};
pub use node::{Fault, NodeSpec};

use node::{Node, StepInFlight, copy};

const PREFILL: usize = 0;
const DECODE: usize = 1;

enum Action {
    Arrive(usize),
    Cancel(usize),
    Resume(usize),
    Land(usize, u32),
    Clear(usize, SeqId),
}

/// How often the interesting things happened.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reached {
    pub preemptions: u64,
    pub handoffs: u64,
    pub fences: u64,
    pub failures: u64,
    pub aborts_in_step: u64,
    pub hits: u64,
    pub reserved_hits: u64,
    /// Sequences that were to receive their KV and found that it was here.
    pub spared: u64,
    pub copies: u64,
    pub evictions: u64,
    /// Preemptions that swapped, and worlds in which one came back from host memory.
    pub swaps: u64,
    pub returns: u64,
    /// Steps launched behind another, and rows in them whose token was not known.
    pub ahead: u64,
    pub follows: u64,
}

pub struct World {
    nodes: [Node; 2],
    pub clients: Vec<Client>,
    agenda: BTreeMap<u64, Vec<Action>>,
    /// Decode blocks an old peer keeps writing garbage to, until it is fenced.
    scribbled: BTreeMap<SeqId, Vec<(usize, usize)>>,
    /// Sequences that are to receive, and those of them that blocks were lent for.
    receives: BTreeSet<SeqId>,
    reserved: BTreeSet<SeqId>,
    tick: u64,
    reached: Reached,
}

impl World {
    pub fn new(layout: &KvLayout, sides: [NodeSpec; 2], specs: Vec<Spec>) -> World {
        let nodes = sides.map(|side| Node::new(layout.clone(), side));
        let mut agenda: BTreeMap<u64, Vec<Action>> = BTreeMap::new();
        for (c, spec) in specs.iter().enumerate() {
            agenda.entry(spec.arrival).or_default().push(Action::Arrive(c));
            let ends = [(spec.cancel, Action::Cancel(c)), (spec.resume, Action::Resume(c))];
            for (at, action) in ends.into_iter().filter_map(|(at, action)| Some((at?, action))) {
                agenda.entry(spec.arrival + at).or_default().push(action);
            }
        }
        let clients = specs.into_iter().map(Client::new).collect();
        World {
            nodes,
            clients,
            agenda,
            scribbled: BTreeMap::new(),
            tick: 0,
            receives: BTreeSet::new(),
            reserved: BTreeSet::new(),
            reached: Reached::default(),
        }
    }

    /// Ticks that are enough even if one sequence at a time advanced by one token a tick, each attempt from scratch.
    fn bound(&self) -> u64 {
        let faults = self.nodes.iter().map(|node| node.faults.len() as u64).sum::<u64>();
        // Beyond its tokens, a row in vain for each end.
        let whole = |s: &Spec| u64::from(s.prompt + 2 * s.max_tokens) + 2 * s.delay + 8;
        let last = self.clients.iter().map(|c| c.spec.arrival + c.spec.cancel.max(c.spec.resume).unwrap_or(0)).max();
        last.unwrap_or(0) + (6 + faults) * self.clients.iter().map(|c| whole(&c.spec)).sum::<u64>()
    }

    pub fn run(&mut self) {
        let bound = self.bound();
        loop {
            for action in self.agenda.remove(&self.tick).unwrap_or_default() {
                self.act(action);
            }
            self.scribble();
            for side in [DECODE, PREFILL] {
                self.step(side);
                self.nodes[side].engine.check().unwrap();
            }
            let over = self.clients.iter().all(|c| c.end.is_some()) && self.nodes.iter().all(|n| n.flights.is_empty());
            if over && self.nodes.iter().all(|node| node.engine.idle()) {
                break;
            }
            self.tick += 1;
            assert!(self.tick <= bound, "I5: not over after {bound} ticks");
        }
        for node in &mut self.nodes {
            self.reached.hits += node.engine.prefix_hit_tokens();
            self.reached.evictions += node.engine.evictions();
            self.reached.swaps += node.engine.swaps();
            self.reached.returns += u64::from(node.engine.swapped_blocks()[1] > 0);
            node.engine.clear_cache().unwrap();
            node.engine.check().unwrap();
            let counts = node.engine.counts();
            assert_eq!(counts.free, counts.total, "I6: all blocks are free after the last request");
            let host = node.engine.host_counts();
            assert_eq!(host.free, host.total, "I6: and all of host memory");
        }
        let layout = &self.nodes[DECODE].geometry.layout;
        self.clients.iter().for_each(|client| client.check_answer(layout));
    }

    /// What happened, so that a test can tell that it does.
    pub fn reached(&self) -> Reached {
        Reached { preemptions: self.nodes[DECODE].engine.preemptions(), ..self.reached }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::Arrive(c) if self.clients[c].end.is_none() => {
                self.place(c, self.clients[c].spec.route != Route::Local)
            }
            Action::Land(c, epoch) if epoch == self.clients[c].epoch => self.land(c),
            Action::Land(..) => {}
            Action::Clear(side, seq) => {
                self.reached.fences += 1;
                if side == DECODE {
                    self.scribbled.remove(&seq);
                }
                self.nodes[side].engine.clear_quarantine(seq).unwrap();
            }
            Action::Cancel(c) if self.clients[c].end.is_none() => {
                self.clients[c].end = Some(End::Cancelled);
                self.withdraw(c);
            }
            Action::Resume(c) if self.clients[c].end.is_none() => {
                self.withdraw(c);
                // Every other time the other way round.
                let split = (self.clients[c].spec.route == Route::Local) == c.is_multiple_of(2);
                self.place(c, split);
            }
            Action::Arrive(_) | Action::Cancel(_) | Action::Resume(_) => {}
        }
    }

    fn later(&mut self, ticks: u64, action: Action) {
        self.agenda.entry(self.tick + 1 + ticks).or_default().push(action);
    }

    /// Submits the request to the decode side, with the tokens the client has.
    fn place(&mut self, c: usize, split: bool) {
        let start = if split { Start::Receive } else { Start::Compute };
        self.submit(DECODE, c, start);
    }

    fn submit(&mut self, side: usize, c: usize, start: Start) {
        let (node, client) = (&mut self.nodes[side], &mut self.clients[c]);
        let prompt = client.spec.tokens();
        let prompt_tokens = prompt.len() as u32;
        let tokens = prompt.into_iter().chain(client.answer.iter().map(|token| token.id)).collect();
        let seq = node.engine.submit(NewSequence {
            request_id: RequestId(c.to_string()),
            tokens,
            prompt_tokens,
            params: client.spec.params(),
            start,
            deadline: client.spec.deadline.map(|at| Time(client.spec.arrival + at)),
            prefix: client.spec.prefix(),
            priority: client.spec.priority,
        });
        let seq = seq.unwrap();
        client.at[side] = Some(seq);
        node.clients.insert(seq, c);
        if start == Start::Receive {
            self.receives.insert(seq);
        }
    }

    /// Ends the request's sequences on both sides, as after a disconnect: fenced only some ticks later.
    fn withdraw(&mut self, c: usize) {
        for side in [DECODE, PREFILL] {
            let Some(seq) = self.clients[c].at[side].take() else { continue };
            let node = &mut self.nodes[side];
            node.clients.remove(&seq);
            let ranges = node.ranges(seq);
            if node.engine.abort(seq, true).unwrap() == Aborted::Quarantined {
                self.fence_later(side, seq, ranges, c);
            }
            assert!(self.nodes[side].engine.abort(seq, true).is_err(), "aborted once is enough");
        }
        self.forget_transfer(c);
    }

    /// The old peer's access ends some ticks from now; until then it writes whatever it likes.
    fn fence_later(&mut self, side: usize, seq: SeqId, ranges: Vec<(usize, usize)>, c: usize) {
        if side == DECODE {
            self.scribbled.insert(seq, ranges);
        }
        self.later(self.clients[c].spec.delay, Action::Clear(side, seq));
    }

    fn forget_transfer(&mut self, c: usize) {
        let client = &mut self.clients[c];
        client.epoch += 1;
        client.pending.clear();
        client.first = None;
    }

    fn scribble(&mut self) {
        for (offset, len) in self.scribbled.values().flatten() {
            self.nodes[DECODE].memory.store(*offset, &vec![self.tick as u8 | 0x80; *len]);
        }
    }

    /// The KV of a finished prefill is complete on the decode side, or found corrupt.
    fn land(&mut self, c: usize) {
        let client = &mut self.clients[c];
        let (Some(prefill), Some(decode)) = (client.at[PREFILL].take(), client.at[DECODE]) else {
            panic!("no handoff")
        };
        let first = client.first.clone().unwrap();
        for (from, to, len) in std::mem::take(&mut client.pending) {
            copy(&self.nodes[PREFILL].memory, &mut self.nodes[DECODE].memory.clone(), from, to, len);
        }
        self.nodes[PREFILL].engine.release(prefill).unwrap();
        self.nodes[PREFILL].clients.remove(&prefill);
        self.forget_transfer(c);
        if self.clients[c].spec.route == Route::Corrupt {
            self.withdraw(c);
            return self.place(c, false);
        }
        let (mut events, wrong) = (Vec::new(), TokenOut { index: first.index + 1, ..first.clone() });
        let engine = &mut self.nodes[DECODE].engine;
        assert!(engine.kv_arrived(decode, &wrong, &mut events).is_err(), "I4: a gap is refused");
        engine.kv_arrived(decode, &first, &mut events).unwrap();
        self.reached.handoffs += 1;
        assert!(engine.kv_arrived(decode, &first, &mut events).is_err(), "KV arrives once");
        self.handle(DECODE, events);
    }

    /// Launches what can be launched, and collects the step launched first.
    fn step(&mut self, side: usize) {
        let most = if self.nodes[side].ahead { 2 } else { 1 };
        let sound = |flight: &StepInFlight| flight.fault != Some(Fault::Nothing);
        while self.nodes[side].flights.len() < most && self.nodes[side].flights.iter().all(sound) {
            let mut events = Vec::new();
            let step = self.nodes[side].engine.plan(Time(self.tick), &mut events);
            self.handle(side, events);
            let Some(step) = step else { break };
            let budget = self.nodes[side].engine.config().token_budget;
            assert!((1..=budget).contains(&step.tokens()), "I5: a step within its budget");
            self.reached.ahead += u64::from(!self.nodes[side].flights.is_empty());
            self.reached.follows += step.rows().iter().filter(|row| row.follows.is_some()).count() as u64;
            self.launch(side, step);
        }
        let Some(flight) = self.nodes[side].flights.pop_front() else { return };
        let mut out = Vec::new();
        let result = self.collect(side, &flight, &mut out);
        // Some clients leave while the step is computed.
        let leaving: Vec<usize> = (0..self.clients.len()).filter(|c| self.leaves_now(*c)).collect();
        self.reached.aborts_in_step += leaving.len() as u64;
        leaving.into_iter().for_each(|c| self.act(Action::Cancel(c)));
        let (mut events, engine) = (Vec::new(), &mut self.nodes[side].engine);
        match result {
            Ok(()) => engine.apply(flight.step, &mut out, &mut events),
            Err(error) => engine.fail(flight.step, error, &mut events),
        }
        self.handle(side, events);
    }

    fn leaves_now(&self, c: usize) -> bool {
        let spec = &self.clients[c].spec;
        c % 3 == 1 && spec.cancel.is_some_and(|at| spec.arrival + at == self.tick + 1)
    }

    fn launch(&mut self, side: usize, step: Step) {
        let [prefill, decode] = &mut self.nodes;
        let block_size = prefill.geometry.layout.block_size;
        let (from, to) = (prefill.geometry.clone(), decode.geometry.clone());
        let node = if side == PREFILL { prefill } else { decode };
        let fault = node.faults.iter().find(|(at, _)| *at == self.tick).map(|(_, fault)| *fault);
        let mut flight = StepInFlight { step, fault, copies: Vec::new() };
        let (clients, owners, model) = (&mut self.clients, &node.clients, &mut node.model);
        if fault == Some(Fault::Nothing) {
            return node.flights.push_back(flight);
        }
        let (mut failure, mut copies) = (None, 0);
        let StepInFlight { step, copies: eager, .. } = &mut flight;
        node.engine.with_batch(step, |batch| {
            assert_eq!(batch.rows.len(), step.rows().len());
            let mut on_layer = |layer: u32| {
                let (group, inner) = from.layout.locate(layer).unwrap();
                for (row, planned) in batch.rows.iter().zip(step.rows()).filter(|(_, planned)| planned.held) {
                    let c = owners[&row.seq];
                    let client = &mut clients[c];
                    let mut pending = std::mem::take(&mut client.pending);
                    let wanted = |at: &usize| *at >= client.cached && client.targets[group][*at] != HOLE;
                    for at in planned.completed_blocks(block_size).filter(wanted) {
                        let read = from.block_range(group, inner, row.tables[group].blocks()[at]);
                        let write = to.block_range(group, inner, client.targets[group][at]);
                        match client.spec.route {
                            Route::Eager => eager.push((c, client.epoch, read.start, write.start, read.len())),
                            _ => pending.push((read.start, write.start, read.len())),
                        }
                    }
                    client.pending = pending;
                }
            };
            copies = batch.copies.len() as u64;
            failure = model.launch(batch, &mut on_layer).err();
        });
        self.reached.copies += copies;
        if let Some(error) = failure {
            panic!("the fake saw a broken contract: {error}");
        }
        node.flights.push_back(flight);
    }

    fn collect(&mut self, side: usize, flight: &StepInFlight, out: &mut Vec<TokenOut>) -> Result<(), RunError> {
        if flight.fault == Some(Fault::Nothing) {
            return Err(RunError("planted".into()));
        }
        let Node { engine, model, .. } = &mut self.nodes[side];
        let collected = engine.with_batch(&flight.step, |batch| model.collect(batch, out));
        if let Err(error) = collected {
            panic!("the fake saw a broken contract: {error}");
        }
        let (source, mut target) = (self.nodes[PREFILL].memory.clone(), self.nodes[DECODE].memory.clone());
        for &(c, epoch, from, to, len) in &flight.copies {
            if self.clients[c].epoch == epoch {
                copy(&source, &mut target, from, to, len);
            }
        }
        match flight.fault {
            Some(Fault::Error) => Err(RunError("planted".into())),
            Some(Fault::Output) => {
                out.push(TokenOut::default());
                Ok(())
            }
            Some(Fault::Nothing) | None => Ok(()),
        }
    }

    fn handle(&mut self, side: usize, events: Vec<Event>) {
        for event in events {
            let seq = event.seq();
            let Some(c) = self.nodes[side].clients.get(&seq).copied() else { panic!("{event:?} for nobody") };
            assert_eq!(self.clients[c].at[side], Some(seq));
            match event {
                Event::Reserved { cached_tokens, .. } => {
                    assert!(self.reserved.insert(seq), "reserved once: what was received is not received again");
                    let engine = &self.nodes[DECODE].engine;
                    let tables = engine.tables(seq).unwrap();
                    let cached = engine.lent_from(seq).unwrap();
                    assert_eq!(cached * engine.block_size(), cached_tokens);
                    assert!(cached_tokens < tables[0].tokens(), "the last token is always computed");
                    self.reached.reserved_hits += u64::from(cached);
                    self.clients[c].cached = cached as usize;
                    self.clients[c].targets = tables.iter().map(|table| table.blocks().to_vec()).collect();
                    self.submit(PREFILL, c, Start::ComputeAndHold);
                }
                Event::Token { token, .. } => {
                    if self.receives.remove(&seq) && !self.reserved.contains(&seq) {
                        self.reached.spared += 1;
                    }
                    self.clients[c].deliver(token)
                }
                Event::Prefilled { token, finish, .. } => self.prefilled(c, token, finish),
                Event::Finished { reason, .. } => {
                    self.nodes[side].clients.remove(&seq);
                    let client = &mut self.clients[c];
                    client.at[side] = None;
                    assert_eq!(client.end.replace(End::Finished(reason)), None, "ends once");
                }
                Event::Failed { error, quarantined, .. } => self.failed(side, c, seq, error, quarantined),
            }
        }
    }

    fn prefilled(&mut self, c: usize, token: TokenOut, finish: Option<FinishReason>) {
        self.clients[c].deliver(token.clone());
        self.clients[c].first = Some(token);
        if let Some(reason) = finish {
            self.clients[c].end = Some(End::Finished(reason));
            return self.withdraw(c);
        }
        let (delay, epoch) = (self.clients[c].spec.delay, self.clients[c].epoch);
        self.later(delay, Action::Land(c, epoch));
    }

    fn failed(&mut self, side: usize, c: usize, seq: SeqId, error: SequenceError, quarantined: bool) {
        self.reached.failures += 1;
        self.nodes[side].clients.remove(&seq);
        let exposed = side == PREFILL || !self.clients[c].targets.is_empty();
        assert!(exposed || !quarantined, "only blocks that others reach are fenced");
        if quarantined {
            self.fence_later(side, seq, Vec::new(), c);
        }
        self.clients[c].at[side] = None;
        if matches!(error, SequenceError::Deadline { .. }) {
            self.clients[c].end = Some(End::Deadline);
            return self.withdraw(c);
        }
        self.forget_transfer(c);
        match side {
            // The prefill runs again against the same reservation.
            PREFILL => self.submit(PREFILL, c, Start::ComputeAndHold),
            _ => self.place(c, c.is_multiple_of(2)),
        }
    }
}
