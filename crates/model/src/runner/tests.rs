//! Launches and collections on a device that records all calls.

use std::sync::Arc;

use baton_engine::{CacheConfig, Engine, EngineConfig, Event, NewSequence, Order, Share, Start, Step, Time};
use baton_kernels::cuda::{CudaBackend, CudaOptions, Nowhere, Recorded, Recorder};
use baton_model_files::RandomModel;
use baton_types::{KvDtype, PoolGeometry, RequestId, SamplingParams};

use super::*;
use crate::{DecoderLimits, kv_layout};

/// An engine, and a model on a device that computes nothing and records all calls.
struct Scene {
    engine: Engine,
    runner: Decoder<CudaBackend<Recorder<Nowhere>>>,
    device: Arc<Recorder<Nowhere>>,
    events: Vec<Event>,
}

impl Scene {
    fn new() -> Scene {
        let model = RandomModel::parse("random:tiny").unwrap().unwrap().open().unwrap();
        let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
        let geometry = PoolGeometry::uniform(layout, 8);
        let limits = EngineConfig {
            token_budget: 32,
            chunk: 32,
            pack_tokens: 32,
            max_running: 4,
            max_waiting: 4,
            context_tokens: 64,
            local_prefill_tokens: 0,
            reserve_ahead: 16,
            order: Order::default(),
            overtakes: 0,
            cache: CacheConfig::default(),
        };
        let engine = Engine::new(limits, &geometry).unwrap();
        let device = Arc::new(Recorder::new(Nowhere::default()));
        let backend = CudaBackend::new(Arc::clone(&device), geometry.clone(), CudaOptions::default()).unwrap();
        let limits = DecoderLimits { tokens: 32, samples: 4, context: 64, table_entries: 8 };
        let runner = Decoder::load(&model, &geometry.layout, backend, limits).unwrap();
        Scene { engine, runner, device, events: Vec::new() }
    }

    /// Plans a step and launches it.
    fn launch(&mut self) -> (Step, Result<(), RunError>) {
        let step = self.engine.plan(Time(0), &mut self.events).expect("a step");
        let runner = &mut self.runner;
        let launched = self.engine.with_batch(&step, |batch| runner.launch(batch, &mut |_| ()));
        (step, launched)
    }

    /// Submits a new sequence, plans a step and launches it.
    fn launch_new(&mut self, max_tokens: u32) -> (Step, Result<(), RunError>) {
        self.submit(max_tokens);
        self.launch()
    }

    fn submit(&mut self, max_tokens: u32) {
        let new = NewSequence {
            request_id: RequestId("r".to_owned()),
            tokens: (0..20).collect(),
            prompt_tokens: 20,
            params: SamplingParams { max_tokens, temperature: 0.0, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: None,
            priority: 0,
            share: Share::default(),
            parked: false,
        };
        self.engine.submit(new).unwrap();
    }

    fn collect(&mut self, step: &Step) -> Result<(), RunError> {
        let runner = &mut self.runner;
        self.engine.with_batch(step, |batch| runner.collect(batch, &mut Vec::new()))
    }

    /// Fails the step: its blocks are free from now on.
    fn fail(&mut self, step: Step, error: RunError) {
        self.engine.fail(step, error, &mut self.events);
    }
}

/// q, k and v are one product, gate and up are another. Other kernels run only where no product can do their work.
#[test]
fn a_layer_of_a_decode_step_is_nine_launches() {
    let mut scene = Scene::new();
    let (first, launched) = scene.launch_new(4);
    launched.unwrap();
    scene.device.take_log();
    let (second, launched) = scene.launch();
    launched.unwrap();
    let log = scene.device.take_log();
    let done: Vec<_> = log
        .iter()
        .filter_map(|call| match call {
            Recorded::Launch(kernel) => Some((*kernel).to_owned()),
            Recorded::Product(_, outs, cols) => Some(format!("{outs} x {cols}")),
            _ => None,
        })
        .collect();
    let c = scene.runner.config();
    let (hidden, ffn, q) = (c.hidden_size, c.intermediate_size, c.q_size());
    let attention = "baton_attention_decode_f16_64".to_owned();
    let layer = [
        "baton_rms_norm".to_owned(),
        format!("{} x {hidden}", q + 2 * c.kv_size()),
        "baton_rope_store_kv".to_owned(),
        attention,
        format!("{hidden} x {q}"),
        "baton_rms_norm".to_owned(),
        format!("{} x {hidden}", 2 * ffn),
        "baton_gate_mul".to_owned(),
        format!("{hidden} x {ffn}"),
    ];
    let layers = c.layers as usize;
    assert_eq!(done[1..=layers * layer.len()], *vec![layer; layers].as_flattened());
    assert_eq!(done[0], "baton_embed");
    assert_eq!(done[1 + layers * 9..][..2], ["baton_add", "baton_embed"], "{done:?}");
    scene.collect(&first).unwrap();
    scene.collect(&second).unwrap();
    assert_eq!(scene.device.problems(), [""; 0]);
}

/// I3, I6: work that a launch queued before it failed uses blocks that are free as soon as the failure is known.
#[test]
fn nothing_of_a_step_is_under_way_when_its_launch_has_failed() {
    let mut scene = Scene::new();
    let (step, launched) = scene.launch_new(4);
    launched.unwrap();
    assert!(!scene.device.under_way().is_empty());
    // This launch fails in the middle of a layer, behind a step that is not collected.
    scene.device.refuse("baton_gate_mul");
    let (second, launched) = scene.launch();
    assert!(launched.as_ref().unwrap_err().0.contains("baton_gate_mul"));
    assert_eq!(scene.device.under_way(), [""; 0]);
    assert_eq!(scene.runner.lost(), None, "the next may go well");
    scene.collect(&step).unwrap();
    scene.fail(step, RunError("planted".to_owned()));
    scene.fail(second, launched.unwrap_err());
    assert!(scene.engine.idle());
    scene.device.refuse("");
    let (step, launched) = scene.launch_new(1);
    assert_eq!(launched, Ok(()));
    assert_eq!(scene.collect(&step), Ok(()));
    scene.fail(step, RunError("over".to_owned()));
    assert_eq!(scene.device.problems(), [""; 0]);
}

#[test]
fn a_device_that_cannot_be_waited_for_behind_a_failure_is_lost() {
    for at_launch in [true, false] {
        let mut scene = Scene::new();
        if at_launch {
            scene.device.refuse("baton_gate_mul");
        }
        scene.device.refuse_waits(true);
        let (step, launched) = scene.launch_new(1);
        assert_eq!(launched.is_err(), at_launch);
        let failed = if at_launch { launched } else { scene.collect(&step) };
        assert!(!scene.device.under_way().is_empty(), "and nobody knows until when");
        scene.device.refuse_waits(false);
        assert!(scene.runner.lost().is_some(), "also when it says no more of it");
        scene.fail(step, failed.unwrap_err());
    }
}

/// A row of several tokens reads a layer's K and V of earlier tokens after that layer was reported: they may come to be there meanwhile.
#[test]
fn a_layer_is_read_after_it_is_reported() {
    let mut scene = Scene::new();
    let new_tokens = |device: &Recorder<Nowhere>| {
        let log = device.take_log();
        log.iter().filter(|call| matches!(call, Recorded::Launch(kernel) if kernel.contains("attention"))).count()
    };
    assert!(scene.runner.reads_by_layer());
    scene.submit(4);
    let step = scene.engine.plan(Time(0), &mut scene.events).unwrap();
    scene.device.take_log();
    let (runner, device, mut read) = (&mut scene.runner, &scene.device, Vec::new());
    let mut on_layer = |_| read.push(new_tokens(device));
    scene.engine.with_batch(&step, |batch| runner.launch(batch, &mut on_layer)).unwrap();
    read.push(new_tokens(device));
    let layers = scene.runner.config().layers as usize;
    assert_eq!(read, [vec![0], vec![1; layers]].concat());
    scene.collect(&step).unwrap();
}
