//! Tensor parallelism on the CPU: every architecture over several ranks says what one rank says, up to rounding; at one degree it says
//! the same to the bit on every route (I1); and a rank that fails takes no other with it (I5).
#![allow(clippy::unwrap_used)]

mod cluster;
mod devices;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, ensure};
use baton_engine::{
    CacheConfig, Engine, EngineConfig, Event, ModelRunner, NewSequence, Order, RunError, SequenceError, Share, Start,
    Time, conformance,
};
use baton_kernels::{Backend, CpuBackend, CpuOptions, HostPool};
use baton_model::parallel::{Collective, Sharding, TensorParallel, ThreadRanks};
use baton_model::{DecoderLimits, kv_layout};
use baton_model_files::{Model, fetch};
use baton_tests::local::{Local, Options};
use baton_tests::{references, tiny};
use baton_types::{KvDtype, PoolGeometry, RequestId, SamplingParams, TokenOut};

/// Largest difference of a logit between degrees, f32 weights and KV, and from the reference.
const TOLERANCE: f32 = 1e-3;

/// A lead below this is a tie for 4-bit weights, see `parity_gguf.rs`; how far their logits may be apart in the mean.
const NEAR_TIE: f32 = 0.5;
const FAR: f64 = 0.3;

type Request = (Vec<u32>, SamplingParams);
/// Logits by (request, token index).
type Logits = BTreeMap<(usize, u32), Vec<f32>>;

fn greedy(prompt: Vec<u32>, max_tokens: u32) -> Request {
    (prompt, SamplingParams { temperature: 0.0, max_tokens, ..SamplingParams::default() })
}

fn run<B: Backend>(local: &mut Local<B>, requests: &[Request]) -> anyhow::Result<(Vec<Vec<u32>>, Logits)> {
    let mut seen = Logits::new();
    let answers = local.run(requests, &mut |request, index, logits| {
        seen.insert((request, index), logits.to_vec());
        None
    })?;
    Ok((answers.into_iter().map(|tokens| tokens.into_iter().map(|token| token.id).collect()).collect(), seen))
}

fn farthest(a: &[f32], b: &[f32]) -> f32 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, |most, x| if x.is_nan() { f32::INFINITY } else { most.max(x) })
}

/// Tiny models, opened.
fn each_model(mut test: impl FnMut(&str, &Model) -> anyhow::Result<()>) -> anyhow::Result<()> {
    for config in tiny::configs()? {
        let directory = tempfile::tempdir()?;
        config.write(directory.path())?;
        test(&config.name, &Model::open(directory.path())?).with_context(|| config.name.clone())?;
    }
    Ok(())
}

/// The same greedy tokens as one rank, and logits within a bound, at every degree that fits.
#[test]
fn every_architecture_says_the_same_at_every_degree() -> anyhow::Result<()> {
    let reference = references::tiny()?;
    let (mut largest, mut runs) = (0f32, Vec::new());
    each_model(|name, model| {
        let reference = reference.models.iter().find(|model| model.name == name).context("a reference")?;
        let prompts = reference.prompts.iter();
        let requests: Vec<_> =
            prompts.map(|prompt| greedy(prompt.prompt_ids.clone(), prompt.output_ids.len() as u32)).collect();
        let options = Options { kv: KvDtype::F32, chunk: 7, budget: 64, threads: 1, ..Options::default() };
        let (want, logits) = run(&mut Local::new(model, options)?, &requests)?;
        for ranks in [1, 2, 4] {
            if let Err(error) = Sharding::of(model, ranks, 0) {
                ensure!(error.to_string().starts_with("heads is 6, which 4 ranks cannot share"), "{error}");
                continue;
            }
            let (tokens, at_ranks) = run(&mut Local::ranks(model, options, ranks)?, &requests)?;
            ensure!(tokens == want, "{ranks} ranks: {tokens:?} != {want:?}");
            let apart = logits.iter().map(|(at, row)| farthest(row, &at_ranks[at])).fold(0.0, f32::max);
            ensure!(if ranks == 1 { apart == 0.0 } else { apart < TOLERANCE }, "{ranks} ranks: {apart} apart");
            largest = largest.max(apart);
            runs.push(ranks);
        }
        Ok(())
    })?;
    let at = |ranks| runs.iter().filter(|&&run| run == ranks).count();
    ensure!((at(1), at(2), at(4)) == (15, 15, 13), "{:?}", (at(1), at(2), at(4)));
    println!("largest difference between degrees {largest:.2e}");
    Ok(())
}

/// At a fixed degree not a bit depends on batch, chunks, threads or preemption.
#[test]
fn at_one_degree_the_route_changes_no_bit() -> anyhow::Result<()> {
    each_model(|name, model| {
        let sampled = |seed: u32, length: u32| {
            let prompt = (0..length).map(|at| (at * 7 + seed * 31) % 200).collect();
            let params =
                SamplingParams { temperature: 0.9, max_tokens: 12, seed: seed.into(), ..SamplingParams::default() };
            (prompt, params)
        };
        let requests: Vec<_> = [(1, 40), (2, 3), (3, 57), (4, 18)].map(|(seed, length)| sampled(seed, length)).into();
        let ranks = if Sharding::of(model, 4, 0).is_ok() { 4 } else { 2 };
        let plain = Options { threads: 1, max_running: 8, ..Options::default() };
        let mut alone = (Vec::new(), Logits::new());
        for (place, request) in requests.iter().enumerate() {
            let (mut tokens, logits) = run(&mut Local::ranks(model, plain, ranks)?, std::slice::from_ref(request))?;
            alone.0.append(&mut tokens);
            alone.1.extend(logits.into_iter().map(|((_, index), row)| ((place, index), row)));
        }
        for options in [
            Options { chunk: 512, ..plain },
            Options { chunk: 5, budget: 16, threads: 2, ..plain },
            Options { chunk: 16, blocks: 8, ..plain },
            Options { chunk: 16, blocks: 8, share: true, ..plain },
        ] {
            let together = run(&mut Local::ranks(model, options, ranks)?, &requests)?;
            ensure!(together == alone, "{name}, {ranks} ranks, {options:?}");
        }
        Ok(())
    })
}

/// Real files: Q4_1 with a Q8_0 embedding that is the output head, over three ranks; K-quants beside Q5_0, with one KV head that every
/// rank holds, over four. Activations are rounded to 8 bits, which turns a last bit of a sum into a step of that size.
#[test]
fn quantised_models_say_the_same_within_their_own_noise() -> anyhow::Result<()> {
    for (name, ranks, refused) in [("smollm2", 3, 2), ("gemma", 4, 3)] {
        let model = Model::open(&fetch::resolve(name, &fetch::default_cache()?, &fetch::NoProgress)?)?;
        let error = Sharding::of(&model, refused, 0).unwrap_err().to_string();
        ensure!(error.contains(&format!("which {refused} ranks cannot share")), "{error}");
        let prompt = model.tokenizer().encode("The capital of France is", true)?;
        let requests = [greedy(prompt, 12)];
        let options = Options { context: Some(256), ..Options::default() };
        let (want, logits) = run(&mut Local::new(&model, options)?, &requests)?;
        let (mut sum, mut count, mut problem) = (0f64, 0u64, None);
        // One rank's answer is gone on with, so that every step is compared.
        Local::ranks(&model, options, ranks)?.run(&requests, &mut |request, index, row| {
            let one = &logits[&(request, index)];
            sum += one.iter().zip(row).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>();
            count += row.len() as u64;
            let best = want[request][index as usize];
            let lead = |id: usize| one[best as usize] - one[id];
            let said = (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
            if lead(said) > NEAR_TIE {
                problem = Some(format!("token {index} is {said}, not {best}, though that leads by {}", lead(said)));
            }
            Some(best)
        })?;
        let mean = sum / count as f64;
        println!("{name}, {ranks} ranks: logits differ by {mean:.4} in the mean");
        ensure!(problem.is_none() && mean < FAR, "{name}: {mean}, {problem:?}");
    }
    Ok(())
}

/// The suite every runner passes.
#[test]
fn ranks_conform() -> anyhow::Result<()> {
    each_model(|name, model| {
        let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
        let vocab = model.config().vocab_size;
        let mut setup = conformance::Setup { geometry: PoolGeometry::uniform(layout, 1), vocab, answer_tokens: 5 };
        let blocks = setup.blocks();
        setup.geometry.blocks.fill(blocks);
        let limits = DecoderLimits { tokens: 256, samples: 4, context: 128, table_entries: blocks as usize };
        let make = || {
            let backends = backends(&setup.geometry, 2, 1);
            TensorParallel::on_cpu(model, &setup.geometry.layout, limits, backends).unwrap()
        };
        ensure!(conformance::check(&setup, make) == Ok(()), "{name}: {:?}", conformance::check(&setup, make));
        Ok(())
    })
}

fn backends(geometry: &PoolGeometry, ranks: u32, threads: usize) -> Vec<CpuBackend> {
    let mine = PoolGeometry { layout: geometry.layout.clone().of_ranks(ranks), blocks: geometry.blocks.clone() };
    let backend = |_| {
        let pool = Arc::new(HostPool::in_memory(mine.clone()).unwrap());
        CpuBackend::new(CpuOptions { threads, ..CpuOptions::default() }, pool).unwrap()
    };
    (0..ranks).map(backend).collect()
}

/// How a rank goes wrong.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Fault {
    Panic,
    Error,
}

/// A rank's exchange that goes wrong once, at its `at`-th sum.
struct Faulty<C> {
    inner: C,
    fault: Fault,
    /// Sums until it happens, then out of reach.
    at: Arc<AtomicUsize>,
}

impl<B: Backend, C: Collective<B>> Collective<B> for Faulty<C> {
    fn all_reduce(&mut self, backend: &mut B, x: &mut B::Buffer, elements: usize) -> Result<(), RunError> {
        match (self.at.fetch_sub(1, Ordering::Relaxed), self.fault) {
            (1, Fault::Panic) => panic!("a planned panic"),
            (1, Fault::Error) => Err(RunError("a planned error".to_owned())),
            _ => self.inner.all_reduce(backend, x, elements),
        }
    }

    fn gather(
        &mut self,
        backend: &mut B,
        part: &B::Buffer,
        rows: usize,
        splits: &[usize],
        whole: &mut B::Buffer,
    ) -> Result<(), RunError> {
        self.inner.gather(backend, part, rows, splits, whole)
    }

    fn abort(&self, why: &RunError) {
        self.inner.abort(why);
    }

    fn reset(&mut self) -> Result<(), RunError> {
        self.inner.reset()
    }
}

fn small() -> EngineConfig {
    EngineConfig {
        token_budget: 16,
        chunk: 16,
        pack_tokens: u32::MAX,
        max_running: 2,
        max_waiting: 2,
        context_tokens: 64,
        local_prefill_tokens: 0,
        reserve_ahead: 16,
        order: Order::default(),
        overtakes: 0,
        cache: CacheConfig::default(),
    }
}

/// Room for one prompt.
const LIMITS: DecoderLimits = DecoderLimits { tokens: 16, samples: 2, context: 64, table_entries: 8 };

/// The first token after a prompt, or why its sequence ended.
fn ask(engine: &mut Engine, runner: &mut dyn ModelRunner) -> anyhow::Result<Result<TokenOut, SequenceError>> {
    engine.submit(NewSequence {
        request_id: RequestId("a".to_owned()),
        tokens: vec![5, 6, 7],
        prompt_tokens: 3,
        params: greedy(Vec::new(), 1).1,
        start: Start::Compute,
        deadline: None,
        prefix: None,
        priority: 0,
        share: Share::default(),
        parked: false,
    })?;
    let (mut events, mut out) = (Vec::new(), Vec::new());
    let step = engine.plan(Time(0), &mut events).context("a prompt to compute")?;
    match engine.with_batch(&step, |batch| runner.run(batch, &mut |_| (), &mut out)) {
        Ok(()) => engine.apply(step, &mut out, &mut events),
        Err(error) => engine.fail(step, error, &mut events),
    }
    ensure!(engine.idle(), "blocks are left: {:?}", engine.counts()); // I6
    let said = events.into_iter().find_map(|event| match event {
        Event::Token { token, .. } => Some(Ok(token)),
        Event::Failed { error, .. } => Some(Err(error)),
        _ => None,
    });
    said.context("neither a token nor an error")
}

/// Whichever rank fails, and wherever in the step: the step fails with that rank's reason, nobody waits for ever (I5), and the next
/// step gives what it always gave.
#[test]
fn a_rank_that_fails_ends_the_step_for_all() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    tiny::config("llama-mha")?.write(directory.path())?;
    let model = Model::open(Path::new(directory.path()))?;
    let layout = kv_layout(model.config(), model.fingerprint(), KvDtype::F16, 16);
    let geometry = PoolGeometry::uniform(layout, 4);
    let sums = 2 * model.config().layers as usize;
    for (fault, ranks) in [(Fault::Panic, 2), (Fault::Error, 4)] {
        for (culprit, at) in (0..ranks as usize).flat_map(|rank| [1, 2, sums].map(|at| (rank, at))) {
            let never = || Arc::new(AtomicUsize::new(usize::MAX));
            let trigger = never();
            let exchange = ThreadRanks::ranks(ranks as usize, 16 * model.config().hidden_size as usize);
            let collectives = exchange.into_iter().enumerate().map(|(rank, inner)| {
                let at = if rank == culprit { Arc::clone(&trigger) } else { never() };
                Box::new(Faulty { inner, fault, at }) as Box<dyn Collective<CpuBackend>>
            });
            let backends = backends(&geometry, ranks, 1).into_iter().zip(collectives).collect();
            let mut runner = TensorParallel::load(&model, &geometry.layout, LIMITS, backends)?;
            let mut engine = Engine::new(small(), &geometry)?;
            let want = ask(&mut engine, &mut runner)?;
            ensure!(want.is_ok(), "{want:?}");
            for _ in 0..2 {
                trigger.store(at, Ordering::Relaxed);
                let reason = match fault {
                    Fault::Panic => format!("rank {culprit} panicked: a planned panic"),
                    Fault::Error => "a planned error".to_owned(),
                };
                let failed = Err(SequenceError::Run(RunError(reason)));
                assert_eq!(ask(&mut engine, &mut runner)?, failed, "{fault:?} on {culprit} at {at}");
                trigger.store(usize::MAX, Ordering::Relaxed);
                assert_eq!(ask(&mut engine, &mut runner)?, want);
            }
        }
    }
    Ok(())
}
