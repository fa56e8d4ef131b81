//! `baton bench engine`: tokens a second of the model and engine in this process, without workers or sockets.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use baton_engine::{Engine, Event, ModelRunner, NewSequence, Start, Time};
use baton_model_files::Model;
use baton_runtime::Bytes;
use baton_types::{RequestId, SamplingParams, SeqId, TokenOut};
use baton_worker::{Loaded, WorkerConfig, load, resolve_model};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};

/// `baton bench engine`.
pub fn command() -> Command {
    let number = |name: &'static str, default: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name("N").default_value(default).value_parser(value_parser!(u32)).help(help)
    };
    Command::new("engine")
        .about("Tokens a second of prefill and decode, in one process")
        .arg(Arg::new("model").long("model").default_value("smollm2").help("A name, a path, or org/name on the hub"))
        .arg(
            Arg::new("model-cache")
                .long("model-cache")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("Folder of fetched models"),
        )
        .arg(
            Arg::new("threads")
                .long("threads")
                .value_name("N")
                .value_parser(value_parser!(usize))
                .help("Compute threads; default: one per core"),
        )
        .arg(number("decode-steps", "64", "Steps measured for each decode figure"))
        .arg(
            Arg::new("metrics")
                .long("metrics")
                .value_name("LIST")
                .value_delimiter(',')
                .default_value("prefill_512,prefill_2048,decode_1,decode_4,decode_16")
                .help("What to measure: prefill_N (a prompt of N tokens) and decode_B (B sequences together)"),
        )
        .arg(Arg::new("json").long("json").action(ArgAction::SetTrue).help("One JSON object a line"))
}

/// Tokens each sequence of a decode figure has behind it.
const CONTEXT: u32 = 128;

struct Bench {
    engine: Engine,
    runner: Box<dyn ModelRunner>,
    vocab: u32,
    events: Vec<Event>,
    out: Vec<TokenOut>,
}

/// Measures and prints.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let config = WorkerConfig {
        model: matches.get_one::<String>("model").cloned().unwrap_or_default(),
        model_cache: matches.get_one("model-cache").cloned(),
        threads: matches.get_one("threads").copied(),
        kv_memory: Bytes::gib(1),
        chunk: 512,
        ..WorkerConfig::default()
    };
    let model = Model::open(&resolve_model(&config)?)?;
    let Loaded { decoder, geometry, engine, .. } = load(&config, &model)?;
    let vocab = decoder.config().vocab_size;
    let engine = Engine::new(engine, &geometry)?;
    let mut bench = Bench { engine, runner: Box::new(decoder), vocab, events: Vec::new(), out: Vec::new() };
    bench.prefill(64)?;
    let steps = matches.get_one("decode-steps").copied().unwrap_or(64);
    for metric in matches.get_many::<String>("metrics").into_iter().flatten() {
        let (kind, n) =
            metric.split_once('_').with_context(|| format!("{metric:?} is neither prefill_N nor decode_B"))?;
        let n: u32 = n.parse().with_context(|| format!("{metric:?}: {n:?} is not a number"))?;
        let value = match kind {
            "prefill" => n as f64 / bench.prefill(n)?,
            "decode" => (n * steps) as f64 / bench.decode(n, steps)?,
            _ => anyhow::bail!("{metric:?} is neither prefill_N nor decode_B"),
        };
        if matches.get_flag("json") {
            println!("{}", serde_json::json!({"metric": metric, "value": value, "unit": "tokens/s"}));
        } else {
            println!("{metric:<14} {value:>10.1} tokens/s");
        }
    }
    Ok(())
}

impl Bench {
    fn submit(&mut self, prompt: u32, answer: u32, salt: u32) -> anyhow::Result<SeqId> {
        let vocab = self.vocab;
        let id = |i: u32| i.wrapping_mul(2_654_435_761).wrapping_add(salt.wrapping_mul(97)) % vocab;
        Ok(self.engine.submit(NewSequence {
            request: RequestId(salt.to_string()),
            tokens: (0..prompt).map(id).collect(),
            prompt_tokens: prompt,
            params: SamplingParams { temperature: 0.0, max_tokens: answer, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: None,
            priority: 0,
        })?)
    }

    /// One step; tokens sampled.
    fn step(&mut self) -> anyhow::Result<usize> {
        let step = self.engine.plan(Time(0), &mut self.events).context("nothing to compute")?;
        self.out.clear();
        let Bench { engine, runner, out, events, .. } = self;
        engine.with_batch(&step, |batch| runner.run(batch, &mut |_| (), out))?;
        let sampled = out.len();
        engine.apply(step, out, events);
        events.clear();
        Ok(sampled)
    }

    /// Seconds for one prompt of `tokens`.
    fn prefill(&mut self, tokens: u32) -> anyhow::Result<f64> {
        self.submit(tokens, 1, 1)?;
        let started = Instant::now();
        while self.step()? == 0 {}
        Ok(started.elapsed().as_secs_f64())
    }

    /// Seconds for `steps` steps of `batch` sequences, after all have their prompt computed.
    fn decode(&mut self, batch: u32, steps: u32) -> anyhow::Result<f64> {
        let most = steps + batch * CONTEXT;
        let sequences = (0..batch).map(|salt| self.submit(CONTEXT, most, salt)).collect::<Result<Vec<_>, _>>()?;
        while self.step()? < batch as usize {}
        let started = Instant::now();
        for _ in 0..steps {
            self.step()?;
        }
        let seconds = started.elapsed().as_secs_f64();
        for seq in sequences {
            self.engine.abort(seq, false)?;
        }
        Ok(seconds)
    }
}
