//! A model in this process: engine and decoder without workers, sockets or transfers. The one route all others are
//! compared with.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail};
use baton_engine::{
    Batch, CacheConfig, Engine, EngineConfig, Event, ModelRunner, NewSequence, Order, Prefix, RunError, Share, Start,
    Time,
};
use baton_kernels::cuda::{CudaBackend, CudaOptions, ExchangingDevice};
use baton_kernels::{Backend, CpuBackend, CpuOptions, HostPool, Isa};
use baton_model::parallel::TensorParallel;
use baton_model::{Decoder, DecoderLimits, Sampler, kv_layout};
use baton_model_files::Model;
use baton_types::{KvDtype, KvLayout, PoolGeometry, RequestId, SamplingParams, SeqId, TokenOut};

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Element type of the KV pool.
    pub kv: KvDtype,
    /// Most prompt tokens of one sequence a step.
    pub chunk: u32,
    /// Most tokens a step.
    pub budget: u32,
    /// Most sequences in the batch.
    pub max_running: u32,
    /// Blocks of the pool, of 16 tokens.
    pub blocks: u32,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set.
    pub isa: Isa,
    /// Requests share what they begin with.
    pub share: bool,
    /// Attention sinks and window, tokens.
    pub sinks: Option<(u32, u32)>,
    /// Longest sequence; default: the model's context, as far as the pool holds it.
    pub context: Option<u32>,
}

impl Default for Options {
    fn default() -> Self {
        let cpu = CpuOptions::default();
        Options {
            kv: KvDtype::F16,
            chunk: 512,
            budget: 512,
            max_running: 32,
            blocks: 256,
            threads: cpu.threads,
            isa: cpu.isa,
            share: false,
            sinks: None,
            context: None,
        }
    }
}

/// Called with (sequence's place in the call, token index, logits) for each sampled token; may say which token to take
/// instead of the sampled one.
pub type OnLogits<'a> = dyn FnMut(usize, u32, &[f32]) -> Option<u32> + 'a;

/// An engine over a decoder.
pub struct Local<B: Backend = CpuBackend> {
    engine: Engine,
    runner: Runner<B>,
    prefix: Option<Prefix>,
}

/// What computes its steps.
enum Runner<B: Backend> {
    One(Box<Decoder<B>>),
    Ranks(Box<TensorParallel<B>>),
}

impl<B: Backend> Runner<B> {
    fn run_logits(
        &mut self,
        batch: &Batch<'_>,
        each: &mut dyn FnMut(&mut Sampler, usize, &mut [f32]),
    ) -> Result<(), RunError> {
        match self {
            Runner::One(decoder) => decoder.run_logits(batch, &mut |_| (), each),
            Runner::Ranks(ranks) => ranks.run_logits(batch, &mut |_| (), each),
        }
    }
}

impl<B: Backend + 'static> Runner<B> {
    fn as_dyn(&mut self) -> &mut dyn ModelRunner {
        match self {
            Runner::One(decoder) => &mut **decoder,
            Runner::Ranks(ranks) => &mut **ranks,
        }
    }
}

impl Local {
    /// Loads a model on the CPU.
    pub fn new(model: &Model, options: Options) -> anyhow::Result<Local> {
        Local::on(model, options, |geometry| on_cpu(options, geometry))
    }

    /// Loads a model onto so many tensor-parallel ranks on the CPU.
    pub fn ranks(model: &Model, options: Options, ranks: u32) -> anyhow::Result<Local> {
        Local::with(model, options, |layout, limits| {
            let geometry = PoolGeometry::uniform(layout.clone().of_ranks(ranks), options.blocks);
            let backends = (0..ranks).map(|_| on_cpu(options, &geometry)).collect::<Result<_, _>>()?;
            Ok(Runner::Ranks(Box::new(TensorParallel::on_cpu(model, layout, limits, backends)?)))
        })
    }

    /// Opens the model at `path` and loads it.
    pub fn open(path: &Path, options: Options) -> anyhow::Result<Local> {
        Local::new(&Model::open(path)?, options)
    }
}

impl<D: ExchangingDevice> Local<CudaBackend<D>> {
    /// Loads a model onto a tensor-parallel rank on each of these devices.
    pub fn ranks_on(model: &Model, options: Options, devices: &[Arc<D>], cuda: CudaOptions) -> anyhow::Result<Self> {
        Local::with(model, options, |layout, limits| {
            let geometry = PoolGeometry::uniform(layout.clone().of_ranks(devices.len() as u32), options.blocks);
            let backend = |device: &Arc<D>| CudaBackend::new(Arc::clone(device), geometry.clone(), cuda);
            let backends = devices.iter().map(backend).collect::<Result<_, _>>()?;
            let ranks = TensorParallel::on_devices(model, layout, limits, backends, D::connect(devices)?)?;
            Ok(Runner::Ranks(Box::new(ranks)))
        })
    }
}

/// A backend over a pool of its own.
fn on_cpu(options: Options, geometry: &PoolGeometry) -> anyhow::Result<CpuBackend> {
    let pool = Arc::new(HostPool::in_memory(geometry.clone())?);
    let cpu = CpuOptions { threads: options.threads, isa: options.isa, pinned: false };
    Ok(CpuBackend::new(cpu, pool)?)
}

impl<B: Backend> Local<B> {
    /// Loads a model on what `make` makes for its pool.
    pub fn on(
        model: &Model,
        options: Options,
        make: impl FnOnce(&PoolGeometry) -> anyhow::Result<B>,
    ) -> anyhow::Result<Self> {
        Local::with(model, options, |layout, limits| {
            let backend = make(&PoolGeometry::uniform(layout.clone(), options.blocks))?;
            Ok(Runner::One(Box::new(Decoder::load(model, layout, backend, limits)?)))
        })
    }

    fn with(
        model: &Model,
        options: Options,
        make: impl FnOnce(&KvLayout, DecoderLimits) -> anyhow::Result<Runner<B>>,
    ) -> anyhow::Result<Self> {
        let mut layout = kv_layout(model.config(), model.fingerprint(), options.kv, 16);
        if let Some((sinks, window)) = options.sinks {
            layout = layout.with_sinks(sinks, window);
        }
        let geometry = PoolGeometry::uniform(layout, options.blocks);
        let context = options.context.unwrap_or(model.config().context_length.min(options.blocks * 16));
        let limits = DecoderLimits {
            tokens: options.budget as usize,
            samples: 4,
            context: context as usize,
            table_entries: options.blocks as usize,
        };
        let runner = make(&geometry.layout, limits)?;
        let config = EngineConfig {
            token_budget: options.budget,
            chunk: options.chunk,
            pack_tokens: u32::MAX,
            max_running: options.max_running,
            max_waiting: u32::MAX,
            context_tokens: context,
            local_prefill_tokens: 0,
            reserve_ahead: 16,
            order: Order::default(),
            overtakes: 0,
            cache: CacheConfig::default(),
        };
        let prefix = options.share.then(Prefix::default);
        Ok(Local { engine: Engine::new(config, &geometry)?, runner, prefix })
    }

    /// Prompt tokens that were not computed so far.
    pub fn hit_tokens(&self) -> u64 {
        self.engine.prefix_hit_tokens()
    }

    /// Times a sequence's blocks were taken from it so far.
    pub fn preemptions(&self) -> u64 {
        self.engine.preemptions()
    }

    /// Answers one prompt.
    pub fn one(&mut self, prompt: &[u32], params: &SamplingParams) -> anyhow::Result<Vec<TokenOut>> {
        let mut answers = self.run(&[(prompt.to_vec(), params.clone())], &mut |_, _, _| None)?;
        answers.pop().context("one request has one answer")
    }

    /// Where each sequence stands among the requests.
    fn submit(&mut self, requests: &[(Vec<u32>, SamplingParams)]) -> anyhow::Result<BTreeMap<SeqId, usize>> {
        let mut places: BTreeMap<SeqId, usize> = BTreeMap::new();
        for (place, (prompt, params)) in requests.iter().enumerate() {
            let seq = self.engine.submit(NewSequence {
                request_id: RequestId(place.to_string()),
                tokens: prompt.clone(),
                prompt_tokens: prompt.len() as u32,
                params: params.clone(),
                start: Start::Compute,
                deadline: None,
                prefix: self.prefix,
                priority: 0,
                share: Share::default(),
                parked: false,
            })?;
            places.insert(seq, place);
        }
        Ok(places)
    }

    /// Runs requests together until all have ended.
    pub fn run(
        &mut self,
        requests: &[(Vec<u32>, SamplingParams)],
        on_logits: &mut OnLogits<'_>,
    ) -> anyhow::Result<Vec<Vec<TokenOut>>> {
        let places = self.submit(requests)?;
        let mut answers = vec![Vec::new(); requests.len()];
        let (mut events, mut out, mut left) = (Vec::new(), Vec::new(), requests.len());
        while left > 0 {
            let step = self.engine.plan(Time(0), &mut events).context("sequences are left but no step")?;
            out.clear();
            let Local { engine, runner, .. } = self;
            engine.with_batch(&step, |batch| {
                let sampling: Vec<_> = batch.rows.iter().filter(|row| row.sample.is_some()).collect();
                runner.run_logits(batch, &mut |sampler, i, logits| {
                    if let Some(sample) = &sampling[i].sample {
                        let forced = on_logits(places[&sampling[i].seq], sample.index, logits);
                        let token = sampler.sample(logits, sample);
                        out.push(TokenOut { id: forced.unwrap_or(token.id), ..token });
                    }
                })
            })?;
            self.engine.apply(step, &mut out, &mut events);
            self.engine.check()?;
            left -= deliver(&mut events, &places, &mut answers)?;
        }
        if !self.engine.idle() {
            bail!("blocks are left: {:?}", self.engine.counts());
        }
        Ok(answers)
    }
}

impl<B: Backend + 'static> Local<B> {
    /// The same as a worker does it: tokens of prompts are scored where that is asked for, tokens are chosen where the model likes, and with `ahead` steps are launched behind others. Also how many
    /// were.
    pub fn generate(
        &mut self,
        requests: &[(Vec<u32>, SamplingParams)],
        ahead: bool,
    ) -> anyhow::Result<(Vec<Vec<TokenOut>>, u64)> {
        let places = self.submit(requests)?;
        let mut answers = vec![Vec::new(); requests.len()];
        let Local { engine, runner, .. } = self;
        let runner = runner.as_dyn();
        let most = if ahead && runner.overlaps() { 2 } else { 1 };
        let (mut events, mut out, mut left) = (Vec::new(), Vec::new(), requests.len());
        let (mut flights, mut behind) = (VecDeque::new(), 0);
        while left > 0 || !flights.is_empty() {
            while flights.len() < most
                && let Some(step) = engine.plan(Time(0), &mut events)
            {
                engine.with_batch(&step, |batch| runner.launch(batch, &mut |_| ()))?;
                behind += u64::from(!flights.is_empty());
                flights.push_back(step);
            }
            let step = flights.pop_front().context("sequences are left but no step")?;
            engine.with_batch(&step, |batch| runner.collect(batch, &mut out))?;
            engine.apply(step, &mut out, &mut events);
            engine.check()?;
            left -= deliver(&mut events, &places, &mut answers)?;
        }
        if !engine.idle() {
            bail!("blocks are left: {:?}", engine.counts());
        }
        Ok((answers, behind))
    }
}

/// Adds tokens to their answers; how many have ended.
fn deliver(
    events: &mut Vec<Event>,
    places: &BTreeMap<SeqId, usize>,
    answers: &mut [Vec<TokenOut>],
) -> anyhow::Result<usize> {
    let mut ended = 0;
    for event in events.drain(..) {
        match event {
            Event::Scored { seq, tokens } => answers[places[&seq]].extend(tokens),
            Event::Token { seq, token, .. } => answers[places[&seq]].push(token),
            Event::Finished { .. } => ended += 1,
            other => bail!("unexpected {other:?}"),
        }
    }
    Ok(ended)
}
