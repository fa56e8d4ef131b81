//! One engine over a fake model, driven by hand.

#![allow(dead_code, reason = "each test binary uses its part")]

use baton_engine::fake::{self, FakeModel};
use baton_engine::{
    BlockCounts, CacheConfig, Engine, EngineConfig, Event, Eviction, ModelRunner, NewSequence, Order, Share, Start,
    Step, Time,
};
use baton_types::{KvLayout, PoolGeometry, RequestId, SamplingParams, SeqId, TokenOut};

pub const VOCAB: u32 = 500;
pub const LIMITS: EngineConfig = EngineConfig {
    token_budget: 64,
    chunk: 32,
    pack_tokens: 64,
    max_running: 8,
    max_waiting: 8,
    context_tokens: 1000,
    local_prefill_tokens: 1,
    reserve_ahead: 16,
    order: Order::Fcfs,
    overtakes: 0,
    cache: CacheConfig { max_blocks: u32::MAX, max_kept: u32::MAX, eviction: Eviction::Lru },
};

/// Two groups without windows, so that both always have the same blocks.
pub fn layout() -> KvLayout {
    let mut layout = fake::tiny_layout(4);
    layout.groups[1].window = None;
    layout
}

/// An engine over a fake model with blocks of 4 tokens, and its events so far.
pub struct Rig {
    pub engine: Engine,
    pub model: FakeModel,
    pub events: Vec<Event>,
    pub now: Time,
}

impl Rig {
    pub fn new(config: EngineConfig, blocks: u32) -> Rig {
        let geometry = PoolGeometry::uniform(layout(), blocks);
        let engine = Engine::new(config, &geometry).unwrap();
        Rig { engine, model: FakeModel::new(geometry, VOCAB), events: Vec::new(), now: Time(0) }
    }

    pub fn submit(&mut self, start: Start, prompt: u32, max_tokens: u32) -> SeqId {
        self.engine.submit(request(start, prompt, max_tokens)).unwrap()
    }

    pub fn plan(&mut self) -> Option<Step> {
        self.engine.plan(self.now, &mut self.events)
    }

    pub fn compute(&mut self, step: &Step) -> Vec<TokenOut> {
        let (model, mut out) = (&mut self.model, Vec::new());
        self.engine.with_batch(step, |batch| model.run(batch, &mut |_| {}, &mut out)).unwrap();
        out
    }

    /// Plans a step and launches it, behind another if there is one.
    pub fn launch(&mut self) -> Option<Step> {
        let step = self.plan()?;
        let model = &mut self.model;
        self.engine.with_batch(&step, |batch| model.launch(batch, &mut |_| {})).unwrap();
        Some(step)
    }

    /// Collects the step that was launched first.
    pub fn collect(&mut self, step: Step) {
        let (model, mut out) = (&mut self.model, Vec::new());
        self.engine.with_batch(&step, |batch| model.collect(batch, &mut out)).unwrap();
        self.engine.apply(step, &mut out, &mut self.events);
    }

    /// Runs one step. Returns the sequence and length of each row.
    pub fn step(&mut self) -> Vec<(u64, u32)> {
        let Some(step) = self.plan() else { return Vec::new() };
        let rows = step.rows().iter().map(|row| (row.seq.0, row.len)).collect();
        let mut out = self.compute(&step);
        self.engine.apply(step, &mut out, &mut self.events);
        assert!(out.is_empty(), "the tokens were taken");
        rows
    }

    pub fn steps(&mut self, n: usize) -> Vec<Vec<(u64, u32)>> {
        (0..n).map(|_| self.step()).collect()
    }

    pub fn tokens_of(&self, seq: SeqId) -> Vec<u32> {
        let token = |event: &Event| match event {
            Event::Token { seq: of, token, .. } if *of == seq => Some(token.id),
            _ => None,
        };
        self.events.iter().filter_map(token).collect()
    }

    /// Used, lent and quarantined blocks of one layer group.
    pub fn blocks(&self) -> (u32, u32, u32) {
        let BlockCounts { used, lent, quarantined, .. } = self.engine.counts();
        (used / 2, lent / 2, quarantined / 2)
    }
}

pub fn request(start: Start, prompt: u32, max_tokens: u32) -> NewSequence {
    NewSequence {
        request_id: RequestId("r".into()),
        tokens: (0..prompt).collect(),
        prompt_tokens: prompt,
        params: SamplingParams { max_tokens, temperature: 0.0, ..SamplingParams::default() },
        start,
        deadline: None,
        prefix: None,
        priority: 0,
        share: Share::default(),
        parked: false,
    }
}

pub fn first(index: u32) -> TokenOut {
    TokenOut { index, id: 3, ..TokenOut::default() }
}
