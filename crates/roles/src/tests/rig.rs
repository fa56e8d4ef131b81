//! A core over the fake model that records what it wants done.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use baton_engine::fake::{FakeModel, tiny_layout};
use baton_engine::{CacheConfig, Engine, EngineConfig, ModelRunner, NewSequence, Order, RunError, Share, Start, Time};
use baton_handoff::TransferError;
use baton_types::{KvLayout, PoolGeometry, RequestId, SamplingParams, SeqId};

use crate::{Effect, Input, RoleCore, StepDone, StepLaunch, WorkerCore, exchange, tiers};

pub(super) const VOCAB: u32 = 50;
pub(super) const BLOCK: u32 = 4;
pub(super) const LEASE: Duration = Duration::from_secs(60);

/// The first request of each table.
pub(super) const SEQ: SeqId = SeqId(0);

/// A core, its model, and the role's effects so far.
pub(super) struct Rig<R: RoleCore> {
    pub core: WorkerCore<R>,
    model: FakeModel,
    pub said: Vec<R::Effect>,
    /// What is wanted for prefixes that move.
    pub exchanged: Vec<exchange::Effect>,
    /// What is wanted for the store.
    pub tiered: Vec<tiers::Effect>,
    pub now: Time,
    /// Blocks given to handoffs to write, counted once for each layer.
    pub writes: u32,
    /// The error with which handoffs refuse every write; `None`: they accept.
    pub refuse: Option<TransferError>,
    /// Why every step fails; `None`: it does not.
    pub fails: Option<RunError>,
    /// The loads that launched steps did not wait for, and why such a launch fails.
    pub behind: Vec<SeqId>,
    pub damaged: Option<RunError>,
    /// Results of the steps so far.
    pub stepped: Vec<StepDone>,
}

impl<R: RoleCore> Rig<R> {
    pub fn new(make: impl FnOnce(Arc<KvLayout>) -> R) -> Rig<R> {
        Rig::caching(0, make)
    }

    /// A worker whose prefix cache has at most this many blocks of tokens.
    pub fn caching(max_blocks: u32, make: impl FnOnce(Arc<KvLayout>) -> R) -> Rig<R> {
        let geometry = geometry();
        let engine = engine(max_blocks, &geometry);
        let layout = Arc::new(geometry.layout.clone());
        let core = WorkerCore::new(engine, make(layout.clone()), layout, LEASE, false);
        let (model, said, exchanged) = (FakeModel::new(geometry, VOCAB), Vec::new(), Vec::new());
        let (tiered, behind, stepped) = (Vec::new(), Vec::new(), Vec::new());
        let (now, writes, refuse, fails, damaged) = (Time(0), 0, None, None, None);
        Rig { core, model, said, exchanged, tiered, now, writes, refuse, fails, behind, damaged, stepped }
    }

    /// Gives an input, and has the model compute what follows from it. Effects of the role are recorded and not
    /// answered.
    pub fn input(&mut self, input: Input<R::Command>) {
        self.core.feed(input, self.now);
        while let Some(effect) = self.core.next_effect() {
            match effect {
                Effect::Role(effect) => self.said.push(effect),
                Effect::Exchange(effect) => self.exchanged.push(effect),
                Effect::Tiers(effect) => self.tiered.push(effect),
                Effect::Launch(launch) => {
                    let answer = self.launch(launch);
                    self.core.feed(answer, self.now);
                }
                Effect::Collect { failed: Some(error), .. } => {
                    self.core.feed(Input::Collected { outcome: Err(error), lost: None }, self.now);
                }
                Effect::Collect { step, .. } => {
                    let (mut out, model) = (Vec::new(), &mut self.model);
                    let outcome = self.core.with_batch(step, |batch| model.collect(batch, &mut out)).unwrap();
                    let outcome = self.fails.clone().map_or(outcome, Err);
                    self.core.feed(Input::Collected { outcome: outcome.map(|()| out), lost: None }, self.now);
                }
                Effect::Stepped(done) => self.stepped.push(done),
                Effect::Ended(error) => panic!("{error}"),
            }
        }
        // I6
        self.core.engine().check().unwrap();
    }

    fn launch(&mut self, mut launch: StepLaunch) -> Input<R::Command> {
        let Rig { core, model, writes, refuse, behind, damaged, .. } = self;
        if let Some(load) = launch.behind() {
            behind.push(load);
            if let Some(error) = damaged.take() {
                return Input::Launched { launch, outcome: Err(error) };
            }
        }
        let mut on_layer = |layer| {
            launch.stored(layer, |write| {
                *writes += write.pairs.len() as u32;
                refuse.clone().map_or(Ok(()), Err)
            })
        };
        let step = core.engine().steps();
        let outcome = core.with_batch(step, |batch| model.launch(batch, &mut on_layer)).unwrap();
        Input::Launched { launch, outcome }
    }

    /// Used, lent and quarantined blocks, as text.
    pub fn blocks(&self) -> String {
        let b = self.core.engine().counts();
        format!("{} used {} lent {} aside", b.used, b.lent, b.quarantined)
    }
}

pub(super) fn geometry() -> PoolGeometry {
    PoolGeometry::uniform(tiny_layout(BLOCK), 12)
}

/// An engine whose prefix cache has at most this many blocks of tokens.
pub(super) fn engine(max_blocks: u32, geometry: &PoolGeometry) -> Engine {
    let config = EngineConfig {
        token_budget: 16,
        chunk: 16,
        pack_tokens: u32::MAX,
        max_running: 2,
        max_waiting: 2,
        context_tokens: 40,
        local_prefill_tokens: 0,
        reserve_ahead: 16,
        order: Order::default(),
        overtakes: 0,
        cache: CacheConfig { max_blocks, ..CacheConfig::default() },
    };
    let mut engine = Engine::new(config, geometry).unwrap();
    engine.note_ended();
    engine
}

pub(super) fn request(start: Start, tokens: u32) -> Box<NewSequence> {
    Box::new(NewSequence {
        request_id: RequestId("r".into()),
        tokens: (0..tokens).collect(),
        prompt_tokens: tokens,
        params: SamplingParams { max_tokens: 3, ..SamplingParams::default() },
        start,
        deadline: None,
        prefix: None,
        priority: 0,
        share: Share::default(),
        parked: false,
    })
}

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("src/tests").join(name)
}

pub(super) fn compare(table: &str, name: &str) {
    let committed = std::fs::read_to_string(file(name)).unwrap_or_default();
    for (got, want) in table.lines().zip(committed.lines()) {
        assert_eq!(got, want, "{name} changed");
    }
    assert_eq!(table.len(), committed.len(), "{name} changed its size");
}

pub(super) fn rewrite(table: &str, name: &str) {
    std::fs::write(file(name), table).unwrap();
}
