//! One worker: the real engine and the real latency model, over a device whose steps take as long as [`super::Hardware`] says.

use baton_engine::{
    CacheConfig, CacheFeed, Engine, EngineConfig, Event, NewSequence, Order, Prefix, Share, Start, Step, Time, fake,
};
use baton_latency::{Backlog, StepModel, StepWork};
use baton_policy::BlockName;
use baton_roles::{backlog, work};
use baton_types::testing::Random;
use baton_types::{PoolGeometry, RequestId, SamplingParams, SeqId, TokenOut, WorkerId};

use super::Hardware;
use super::cluster::BLOCK;

/// Most tokens of a prompt that a prefill and a decode worker compute in a step.
const CHUNKS: [u32; 2] = [8192, 1024];
/// Steps take longer or shorter by this share, at random.
const NOISE: f64 = 0.03;

pub(super) struct Worker {
    pub id: WorkerId,
    pub engine: Engine,
    pub events: Vec<Event>,
    feed: CacheFeed,
    model: StepModel,
    /// The step that is being computed, what it computes, and how long it takes, in seconds.
    step: Option<(Step, StepWork, f64)>,
    /// What was told last.
    told: Option<Backlog>,
    /// Number of the next change of its cache.
    pub number: u64,
    /// When its link is free, in nanoseconds.
    pub link_free: u64,
    /// Seconds of the steps that began since it was last asked.
    busy: f64,
    random: Random,
    out: Vec<TokenOut>,
}

impl Worker {
    pub fn new(id: WorkerId, decodes: bool, hardware: &Hardware) -> Worker {
        let chunk = CHUNKS[usize::from(decodes)];
        let config = EngineConfig {
            token_budget: chunk + 512,
            chunk,
            pack_tokens: chunk,
            max_running: 512,
            max_waiting: 1 << 20,
            context_tokens: 1 << 20,
            local_prefill_tokens: 64,
            reserve_ahead: 16,
            order: Order::Priority,
            overtakes: 64,
            cache: CacheConfig::default(),
        };
        let mut layout = fake::tiny_layout(BLOCK);
        layout.groups.truncate(1);
        let engine = Engine::new(config, &PoolGeometry::uniform(layout, hardware.blocks));
        let mut engine = engine.unwrap_or_else(|error| panic!("the settings above are right: {error}"));
        engine.note_cache_changes();
        Worker {
            id,
            engine,
            events: Vec::new(),
            feed: CacheFeed::default(),
            model: StepModel::default(),
            step: None,
            told: None,
            number: 1,
            link_free: 0,
            busy: 0.0,
            random: Random(id.0),
            out: Vec::new(),
        }
    }

    /// Queues a sequence.
    pub fn submit(&mut self, request: usize, tokens: Vec<u32>, output: u32, start: Start) -> SeqId {
        let prefix = Prefix { root: BlockName::root("", BLOCK), ..Prefix::default() };
        let new = NewSequence {
            request_id: RequestId(request.to_string()),
            prompt_tokens: tokens.len() as u32,
            tokens,
            params: SamplingParams { max_tokens: output, ..SamplingParams::default() },
            start,
            deadline: None,
            prefix: Some(prefix),
            priority: 0,
            share: Share::default(),
            parked: false,
        };
        self.engine.submit(new).unwrap_or_else(|error| panic!("it takes every request: {error}"))
    }

    /// Begins a step if there is none and something is to be computed. Returns how long it takes, in nanoseconds.
    pub fn begin(&mut self, now: u64, hardware: &Hardware) -> Option<u64> {
        if self.step.is_some() {
            return None;
        }
        let step = self.engine.plan(Time(now), &mut self.events)?;
        let work = work(&step);
        let noise = 1.0 + NOISE * f64::from(self.random.unit());
        let took = hardware.step(&work) * noise;
        self.busy += took;
        self.step = Some((step, work, took));
        Some((took * 1e9) as u64)
    }

    /// The step is computed.
    pub fn end(&mut self) {
        let Some((step, work, took)) = self.step.take() else { return };
        let token = |index| TokenOut { index, id: 0, ..TokenOut::default() };
        self.out.extend(step.rows().iter().filter(|row| row.samples).map(|row| token(row.index)));
        self.engine.apply(step, &mut self.out, &mut self.events);
        self.model.add(&work, std::time::Duration::from_secs_f64(took));
    }

    /// How many seconds it computed since the last call.
    pub fn take_busy(&mut self) -> f64 {
        std::mem::take(&mut self.busy)
    }

    /// Tokens of the answers in progress and their prompts.
    pub fn in_progress(&self) -> u64 {
        backlog(&self.engine, self.model.cost()).work.context
    }

    /// What entered and left its cache since the last call, and its load; `None` for what has not changed.
    pub fn news(&mut self) -> (Option<baton_engine::CacheChange>, Option<Backlog>) {
        self.engine.take_cache_changes().for_each(|change| self.feed.note(change));
        let change = Some(self.feed.take()).filter(|change| !change.is_empty() || self.number == 1);
        let load = backlog(&self.engine, self.model.cost());
        let changed = self.told != Some(load);
        self.told = Some(load);
        (change, changed.then_some(load))
    }
}
