//! `baton bench engine`: tokens per second of model and engine in one process, without workers or sockets, and where the time
//! goes ([`super::profile`]).

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use baton_engine::{Engine, EngineConfig, Event, ModelRunner, NewSequence, Prefix, Share, Start, Step, Time};
use baton_kernels::cuda::{CudaOptions, Driver};
use baton_kernels::{Ceilings, CpuOptions, Isa, Profiled};
use baton_model_files::Model;
use baton_runtime::{Bytes, Parsed};
use baton_types::{KvDtype, PoolGeometry, RequestId, SamplingParams, SeqId, TokenOut};
use baton_worker::{KvConfig, Loaded, Quantization, WorkerConfig, load_on, load_on_gpu, open_model};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

use super::profile::{Profiler, print_ceilings};

/// `baton bench engine`.
pub fn command() -> Command {
    let number = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").default_value(default).value_parser(value_parser!(u32)).help(help)
    };
    Command::new("engine")
        .about("Tokens a second of prefill and decode, in one process")
        .arg(Arg::new("model").long("model").default_value("smollm2").help("A name, a path, org/name on the hub, or random:NAME"))
        .args(crate::fetch::args())
        .arg(
            Arg::new("backend")
                .long("backend")
                .default_value("cpu")
                .value_parser(["cpu", "cuda"])
                .help("What computes: the CPU, or this host's first GPU, which is not profiled"),
        )
        .arg(
            Arg::new("invariant")
                .long("invariant")
                .action(ArgAction::SetTrue)
                .help("On a GPU: the same bits however prompts are cut, as workers compute"),
        )
        .arg(
            Arg::new("no-graphs")
                .long("no-graphs")
                .action(ArgAction::SetTrue)
                .help("On a GPU: decode steps launch their kernels one by one"),
        )
        .arg(
            Arg::new("no-hopper")
                .long("no-hopper")
                .action(ArgAction::SetTrue)
                .help("On a Hopper GPU: use the generic attention kernel, not Hopper's own"),
        )
        .arg(
            Arg::new("quantization")
                .long("quantization")
                .default_value("none")
                .value_parser(value_parser!(Quantization))
                .help("Weights of layers: none, or on a GPU fp8"),
        )
        .arg(number("chunk", "512", "Most tokens of a prompt computed in a step, and of all of them"))
        .arg(
            Arg::new("threads")
                .long("threads")
                .value_name("N")
                .value_parser(value_parser!(usize))
                .help("Compute threads; default: one per core"),
        )
        .arg(
            Arg::new("pin-threads")
                .long("pin-threads")
                .action(ArgAction::SetTrue)
                .help("Keep each compute thread on a CPU of its own"),
        )
        .arg(
            Arg::new("isa")
                .long("isa")
                .default_value(Isa::detect().name())
                .value_parser(Isa::available().iter().map(|isa| isa.name()).collect::<Vec<_>>())
                .help("Instruction set"),
        )
        .arg(number("decode-steps", "64", "Steps measured for each decode figure"))
        .arg(
            Arg::new("metrics")
                .long("metrics")
                .value_name("LIST")
                .value_delimiter(',')
                .default_value("prefill_512,prefill_2048,decode_1,decode_8,decode_32")
                .help(
                    "What to measure: prefill_N (a prompt of N tokens), decode_B (B sequences together, greedy), sampled_B (the same \
                     at temperature 1), and shared_B (with all but 16 tokens of their prompts in common)",
                ),
        )
        .arg(number("context", "128", "Tokens each sequence has behind it when decode_B, sampled_B and shared_B begin"))
        .arg(
            Arg::new("no-profile")
                .long("no-profile")
                .action(ArgAction::SetTrue)
                .help("Only tokens a second, without timing each operation"),
        )
        .arg(
            Arg::new("ceilings")
                .long("ceilings")
                .action(ArgAction::SetTrue)
                .help("Only what this machine can do at most; no model is loaded"),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("One JSON object a line"))
}

/// Tokens at the end of a prompt that differ between sequences when the rest is shared.
const OWN: u32 = 16;

/// A metric. The number is above 0.
#[derive(Clone, Copy)]
enum Metric {
    /// The prefill of one prompt of so many tokens.
    Prefill(u32),
    /// Greedy decode of so many sequences together, with prompts of their own.
    Decode(u32),
    /// The same at temperature 1.
    Sampled(u32),
    /// Greedy decode of so many sequences that share all but the last [`OWN`] tokens of their prompts.
    Shared(u32),
}

impl Metric {
    fn parse(name: &str) -> anyhow::Result<Metric> {
        let what = || format!("{name:?} is not prefill_N, decode_B, sampled_B or shared_B, with a number above 0");
        let (kind, n) = name.split_once('_').with_context(what)?;
        match (kind, n.parse().ok().filter(|&n: &u32| n > 0)) {
            ("prefill", Some(n)) => Ok(Metric::Prefill(n)),
            ("decode", Some(n)) => Ok(Metric::Decode(n)),
            ("sampled", Some(n)) => Ok(Metric::Sampled(n)),
            ("shared", Some(n)) => Ok(Metric::Shared(n)),
            _ => anyhow::bail!(what()),
        }
    }
}

/// The most sequences that run at once; at least a worker's default.
fn together(metrics: &[(&String, Metric)]) -> u32 {
    let sequences = metrics.iter().map(|(_, metric)| match metric {
        Metric::Prefill(_) => 1,
        Metric::Decode(n) | Metric::Sampled(n) | Metric::Shared(n) => *n,
    });
    sequences.max().unwrap_or(1).max(WorkerConfig::default().max_running)
}

struct Bench {
    engine: Engine,
    runner: Box<dyn ModelRunner>,
    profiler: Option<Profiler>,
    vocab: u32,
    /// Temperature of the sequences submitted from now on.
    temperature: f32,
    chunk: u32,
    /// Decode steps before the measured ones; if above 0, a prompt is also computed once before the measured rounds.
    warm_up: u32,
    /// How often a prompt's prefill is measured; the median counts.
    rounds: usize,
    events: Vec<Event>,
    out: Vec<TokenOut>,
    /// Steps launched and not yet collected, oldest first.
    flights: VecDeque<Step>,
}

/// Warm-up steps on a GPU: the first steps of a size load kernels, choose algorithms for products, and are captured as a graph.
const GPU_WARM_UP: u32 = 4;
/// Rounds of prefill on a GPU, of which the median counts.
const GPU_ROUNDS: usize = 5;

/// Runs the benchmark and prints the results.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let number = |name| matches.get_one(name).copied().with_context(|| format!("--{name}"));
    let (steps, context, chunk) = (number("decode-steps")?, number("context")?, number("chunk")?);
    anyhow::ensure!(context > 0, "--context 0: a sequence has at least one token behind it");
    anyhow::ensure!(chunk > 0, "--chunk 0: a step has at least one token");
    let named = matches.get_many::<String>("metrics").into_iter().flatten();
    let metrics = named.map(|name| Ok((name, Metric::parse(name)?))).collect::<anyhow::Result<Vec<_>>>()?;
    let gpu = matches.get_one::<String>("backend").is_some_and(|backend| backend == "cuda");
    let quantization = matches.get_one("quantization").copied().unwrap_or(Quantization::None);
    anyhow::ensure!(
        gpu || quantization == Quantization::None,
        "--quantization {quantization}: only with --backend cuda"
    );
    let config = WorkerConfig {
        model: matches.get_one::<String>("model").cloned().unwrap_or_default(),
        fetch: crate::fetch::settings(matches)?,
        threads: matches.get_one("threads").copied(),
        pin_threads: matches.get_flag("pin-threads"),
        kv_memory: (!gpu).then(|| Bytes::gib(2)),
        kv: KvConfig {
            kv_type: Parsed(if gpu { KvDtype::Bf16 } else { KvDtype::F16 }),
            quantization,
            ..KvConfig::default()
        },
        chunk,
        token_budget: chunk.max(together(&metrics)),
        max_running: together(&metrics),
        ..WorkerConfig::default()
    };
    let json = matches.get_flag("json");
    let named = matches.get_one::<String>("isa");
    let isa = Isa::available().into_iter().find(|isa| named.is_some_and(|name| name == isa.name())).context("--isa")?;
    let threads = config.threads.unwrap_or(CpuOptions::default().threads);
    let ceilings = || Ceilings::measure(CpuOptions { threads, isa, pinned: config.pin_threads });
    if matches.get_flag("ceilings") {
        print_ceilings(&ceilings()?, json);
        return Ok(());
    }
    let model = open_model(&config)?;
    let mut bench = if gpu {
        let device = Arc::new(Driver::open(0)?);
        let (invariant, graphs) = (matches.get_flag("invariant"), !matches.get_flag("no-graphs"));
        let hopper = !matches.get_flag("no-hopper");
        let options = CudaOptions { invariant, graphs, hopper, fp8: quantization == Quantization::Fp8 };
        let Loaded { decoder, geometry, engine } = load_on_gpu(&config, &model, device, options)?;
        let bench = Bench::new(engine, &geometry, Box::new(decoder), None, &model)?;
        Bench { warm_up: GPU_WARM_UP, rounds: GPU_ROUNDS, ..bench }
    } else if matches.get_flag("no-profile") {
        let Loaded { decoder, geometry, engine } = load_on(&config, &model, isa, |backend, _| backend)?;
        Bench::new(engine, &geometry, Box::new(decoder), None, &model)?
    } else {
        let ceilings = ceilings()?;
        print_ceilings(&ceilings, json);
        let profiler = Profiler::new(ceilings, json);
        let wrap = |backend, layout: &_| Profiled::new(backend, Clone::clone(layout), profiler.shared());
        let Loaded { decoder, geometry, engine } = load_on(&config, &model, isa, wrap)?;
        let runner = profiler.runner(decoder);
        Bench::new(engine, &geometry, Box::new(runner), Some(profiler), &model)?
    };
    bench.prefill(64)?;
    for (name, metric) in metrics {
        bench.temperature = if matches!(metric, Metric::Sampled(_)) { 1.0 } else { 0.0 };
        let (tokens, seconds) = match metric {
            Metric::Prefill(n) => (n, bench.prefill(n)?),
            Metric::Decode(n) | Metric::Sampled(n) => (n * steps, bench.decode(n, steps, context, 0)?),
            Metric::Shared(n) => (n * steps, bench.decode(n, steps, context, context.saturating_sub(OWN))?),
        };
        let profile = bench.profiler.as_ref().map(|profiler| (profiler, profiler.take()));
        let rate = |seconds: f64| f64::from(tokens) / seconds;
        let ceiling = profile.as_ref().map(|(profiler, profile)| rate(profiler.least_seconds(profile)));
        if json {
            let value = rate(seconds);
            println!("{}", serde_json::json!({"metric": name, "value": value, "unit": "tokens/s", "ceiling": ceiling}));
        } else {
            let of = ceiling.map_or(String::new(), |c| format!(" of at most {c:.1} on this machine"));
            println!("{name:<14} {:>10.1} tokens/s{of}", rate(seconds));
        }
        if let Some((profiler, profile)) = profile {
            profiler.print(name, &profile, seconds);
        }
    }
    Ok(())
}

impl Bench {
    fn new(
        engine: EngineConfig,
        geometry: &PoolGeometry,
        runner: Box<dyn ModelRunner>,
        profiler: Option<Profiler>,
        model: &Model,
    ) -> anyhow::Result<Bench> {
        let chunk = engine.chunk;
        let engine = Engine::new(engine, geometry)?;
        let vocab = model.config().vocab_size;
        let (events, out, flights) = (Vec::new(), Vec::new(), VecDeque::new());
        let (temperature, warm_up, rounds) = (0.0, 0, 1);
        Ok(Bench { engine, runner, profiler, vocab, temperature, chunk, warm_up, rounds, events, out, flights })
    }

    /// Starts the clock with an empty profile.
    fn start(&self) -> Instant {
        if let Some(profiler) = &self.profiler {
            profiler.take();
        }
        Instant::now()
    }

    /// Submits a sequence with a prompt of `prompt` tokens and an answer of `answer` tokens. The first `common` tokens are the same
    /// for every `salt`; if `common` is above 0, the sequence uses the prefix cache.
    fn submit(&mut self, prompt: u32, common: u32, answer: u32, salt: u32) -> anyhow::Result<SeqId> {
        let vocab = self.vocab;
        let id = |i: u32, salt: u32| i.wrapping_mul(2_654_435_761).wrapping_add(salt.wrapping_mul(97)) % vocab;
        Ok(self.engine.submit(NewSequence {
            request_id: RequestId(salt.to_string()),
            tokens: (0..prompt).map(|i| id(i, if i < common { 0 } else { salt })).collect(),
            prompt_tokens: prompt,
            params: SamplingParams { temperature: self.temperature, max_tokens: answer, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: (common > 0).then(Prefix::default),
            priority: 0,
            share: Share::default(),
            parked: false,
        })?)
    }

    /// Collects one step and returns the number of tokens it sampled. Where the runner overlaps steps, the next one is launched
    /// before that.
    fn step(&mut self) -> anyhow::Result<usize> {
        let Bench { engine, runner, events, flights, .. } = self;
        let most = if runner.overlaps() { 2 } else { 1 };
        while flights.len() < most
            && let Some(step) = engine.plan(Time(0), events)
        {
            engine.with_batch(&step, |batch| runner.launch(batch, &mut |_| ()))?;
            flights.push_back(step);
        }
        self.collect()
    }

    /// Collects all launched steps.
    fn settle(&mut self) -> anyhow::Result<()> {
        while !self.flights.is_empty() {
            self.collect()?;
        }
        Ok(())
    }

    fn collect(&mut self) -> anyhow::Result<usize> {
        let Bench { engine, runner, out, events, flights, .. } = self;
        let step = flights.pop_front().context("nothing to compute")?;
        out.clear();
        engine.with_batch(&step, |batch| runner.collect(batch, out))?;
        let sampled = out.len();
        engine.apply(step, out, events);
        events.clear();
        Ok(sampled)
    }

    /// Seconds for the prefill of one prompt of `tokens` tokens: the median of all rounds.
    fn prefill(&mut self, tokens: u32) -> anyhow::Result<f64> {
        if self.warm_up > 0 {
            self.prompt(tokens)?;
        }
        let mut rounds = (0..self.rounds).map(|_| self.prompt(tokens)).collect::<Result<Vec<_>, _>>()?;
        rounds.sort_by(f64::total_cmp);
        rounds.get(rounds.len() / 2).copied().context("at least one round")
    }

    fn prompt(&mut self, tokens: u32) -> anyhow::Result<f64> {
        self.submit(tokens, 0, 1, 1)?;
        let started = self.start();
        while self.step()? == 0 {}
        Ok(started.elapsed().as_secs_f64())
    }

    /// Seconds for `steps` decode steps of `batch` sequences, measured after all prompts of `context` tokens are computed. The first
    /// `common` tokens of the prompts are the same.
    fn decode(&mut self, batch: u32, steps: u32, context: u32, common: u32) -> anyhow::Result<f64> {
        // Early sequences decode while later prompts are computed, each step at least an eighth of a chunk; answers must last that long.
        let most = self.warm_up + steps + 1 + batch * context.div_ceil((self.chunk / 8).max(1));
        let submit = |salt| self.submit(context, common, most, salt);
        let sequences = (0..batch).map(submit).collect::<Result<Vec<_>, _>>()?;
        while self.step()? < batch as usize {}
        for _ in 0..self.warm_up {
            self.step()?;
        }
        let started = self.start();
        for _ in 0..steps {
            self.step()?;
        }
        let seconds = started.elapsed().as_secs_f64();
        for seq in sequences {
            self.engine.abort(seq, false)?;
        }
        self.settle()?;
        Ok(seconds)
    }
}
