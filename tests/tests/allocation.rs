//! No allocation inside a step: decode steps of a warm decoder ask the allocator for nothing, on any thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use anyhow::{Context, ensure};
use baton_engine::{CacheConfig, Engine, EngineConfig, ModelRunner, NewSequence, Order, Share, Start, Time};
use baton_kernels::{CpuBackend, CpuOptions, HostPool};
use baton_model::parallel::TensorParallel;
use baton_model::{Decoder, DecoderLimits, kv_layout};
use baton_model_files::Model;
use baton_tests::tiny;
use baton_types::{KvDtype, PoolGeometry, RequestId, SamplingParams};

struct Counting;

static COUNTING: AtomicBool = AtomicBool::new(false);
static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: passes everything on to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.load(Ordering::Relaxed) {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_step_allocates_nothing() -> anyhow::Result<()> {
    for config in tiny::configs()? {
        let directory = tempfile::tempdir()?;
        config.write(directory.path())?;
        let model = Model::open(directory.path())?;
        let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
        let geometry = PoolGeometry::uniform(layout, 64);
        let limits = DecoderLimits { tokens: 64, samples: 2, context: 128, table_entries: 64 };
        let backend = |geometry: &PoolGeometry| {
            let pool = Arc::new(HostPool::in_memory(geometry.clone())?);
            anyhow::Ok(CpuBackend::new(CpuOptions { threads: 2, ..CpuOptions::default() }, pool)?)
        };
        let part = PoolGeometry { layout: geometry.layout.clone().of_ranks(2), ..geometry.clone() };
        let ranks = vec![backend(&part)?, backend(&part)?];
        let runners: [(Box<dyn ModelRunner>, u64); 2] = [
            (Box::new(Decoder::load(&model, &geometry.layout, backend(&geometry)?, limits)?), 2),
            (Box::new(TensorParallel::on_cpu(&model, &geometry.layout, limits, ranks)?), 4),
        ];
        for (mut runner, threads) in runners {
            steps(&mut *runner, &geometry, threads).with_context(|| config.name.clone())?;
        }
    }
    Ok(())
}

/// What a thread may set up for itself, once: on a busy machine one may come to its first task only in a later step.
const SET_UP: u64 = 4;

/// Runs twenty steps. What is allocated in each of them adds up to more than what threads set up.
fn steps(runner: &mut dyn ModelRunner, geometry: &PoolGeometry, threads: u64) -> anyhow::Result<()> {
    let limits = EngineConfig {
        token_budget: 64,
        chunk: 20,
        pack_tokens: u32::MAX,
        max_running: 8,
        max_waiting: 8,
        context_tokens: 128,
        local_prefill_tokens: 0,
        reserve_ahead: 16,
        order: Order::default(),
        overtakes: 0,
        cache: CacheConfig::default(),
    };
    let mut engine = Engine::new(limits, geometry)?;
    for temperature in [0.0, 0.8, 0.8] {
        engine.submit(NewSequence {
            request_id: RequestId("a".to_owned()),
            tokens: (1..30).collect(),
            prompt_tokens: 29,
            params: SamplingParams { temperature, top_p: 0.9, max_tokens: 40, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: None,
            priority: 0,
            share: Share::default(),
            parked: false,
        })?;
    }
    let (mut events, mut out) = (Vec::new(), Vec::with_capacity(8));
    let mut allocated = 0;
    for number in 0..20 {
        let step = engine.plan(Time(0), &mut events).context("work is left")?;
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        engine.with_batch(&step, |batch| {
            COUNTING.store(true, Ordering::Relaxed);
            let outcome = runner.run(batch, &mut |_| (), &mut out);
            COUNTING.store(false, Ordering::Relaxed);
            outcome
        })?;
        if number > 0 {
            allocated += ALLOCATIONS.load(Ordering::Relaxed) - before;
        }
        ensure!(allocated <= SET_UP * threads, "step {number} allocated, {allocated} times with those before it");
        engine.apply(step, &mut out, &mut events);
        events.clear();
    }
    Ok(())
}
