//! A whole model on the GPU backend, its kernels compiled for the host: every architecture's logits are those of the CPU backend
//! within what 16-bit weights and activations allow, nothing is allocated on the device in a step, and graphs make no difference. Tokens
//! chosen on the device are those that the host chooses, and the same whether or not steps are launched behind others (I1). And every
//! transport keeps its word between pools in a device's memory (`transports`).

#![allow(clippy::expect_used)]

#[path = "cuda/transports.rs"]
mod transports;

use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use baton_engine::{Sample, conformance};
use baton_kernels::Backend;
use baton_kernels::cuda::{CudaBackend, CudaOptions, Device, Driver, Fp8, HostDevice, Recorded, Recorder};
use baton_model::{Decoder, DecoderLimits, Footprint, Sampler, kv_layout};
use baton_model_files::Model;
use baton_tests::local::{Local, Options};
use baton_tests::{logits::distance, tiny};
use baton_types::{PoolGeometry, SamplingParams, TokenOut};

/// How far the farthest logit may be from the CPU's, in standard deviations of its row. Of the fifteen models the middle one has 0.09 and
/// the last 0.24: weights and activations of every product are rounded to 8 bits, and the models are narrow.
const FAR: f64 = 0.3;

const OPTIONS: Options = Options {
    kv: baton_types::KvDtype::Bf16,
    chunk: 20,
    budget: 48,
    max_running: 4,
    blocks: 24,
    threads: 2,
    isa: baton_kernels::Isa::Portable,
    share: false,
    sinks: None,
    context: Some(128),
};

/// Logits of each sampled token, by request, and the tokens.
struct Run {
    logits: Vec<Vec<Vec<f32>>>,
    tokens: Vec<Vec<TokenOut>>,
}

/// Three requests together: chunks and decode rows in one batch; `forced` are the tokens to go on with.
fn run<B: Backend>(model: &mut Local<B>, vocab: u32, forced: Option<&Run>) -> anyhow::Result<Run> {
    run_of(model, vocab, forced, &LENGTHS)
}

/// Tokens of the requests' prompts.
const LENGTHS: [u32; 3] = [3, 41, 18];

/// The same with some of the requests.
fn run_of<B: Backend>(model: &mut Local<B>, vocab: u32, forced: Option<&Run>, lengths: &[u32]) -> anyhow::Result<Run> {
    let params = SamplingParams { max_tokens: 5, temperature: 0.0, ..SamplingParams::default() };
    let prompt = |len: u32| (0..len).map(|i| (i * 37 + len * 11) % vocab).collect();
    let requests: Vec<_> = lengths.iter().map(|&len| (prompt(len), params.clone())).collect();
    let mut logits = vec![Vec::new(); requests.len()];
    let tokens = model.run(&requests, &mut |place, index, row| {
        logits[place].push(row.to_vec());
        forced.and_then(|run| run.tokens[place].get(index as usize)).map(|token| token.id)
    })?;
    Ok(Run { logits, tokens })
}

/// Where the KV of a model lies, with [`OPTIONS`].
fn pool(model: &Model) -> PoolGeometry {
    PoolGeometry::uniform(kv_layout(model.config(), model.fingerprint(), OPTIONS.kv, 16), OPTIONS.blocks)
}

/// What the model was foreseen to take beside that.
fn footprint(model: &Model, fp8: bool) -> Footprint {
    let (tokens, context) = (OPTIONS.budget as usize, 128);
    Footprint::of(model, &pool(model).layout, DecoderLimits { tokens, samples: 4, context, table_entries: 0 }, fp8)
}

/// The best logit's lead over the next, in standard deviations of the row.
fn lead(row: &[f32], best: usize) -> f64 {
    let mut next = row.to_vec();
    next[best] = f32::NEG_INFINITY;
    let second = next.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut flat = row.to_vec();
    flat[best] = second;
    distance(&flat, row)
}

#[test]
fn every_architecture_gives_the_logits_of_the_cpu() -> anyhow::Result<()> {
    let Some(_) = HostDevice::for_tests() else { return Ok(()) };
    every_architecture(|| HostDevice::for_tests().context("the host's kernels were there"))
}

/// Heads as wide as Hopper's kernel takes them, with and without a window.
#[test]
fn wide_heads_give_the_logits_of_the_cpu() -> anyhow::Result<()> {
    for (name, head_dim) in [("llama-head-dim-24", 128), ("mistral-window", 64)] {
        let Some(device) = HostDevice::for_tests() else { return Ok(()) };
        let mut config = tiny::config(name)?;
        config.config["head_dim"] = head_dim.into();
        let directory = tempfile::tempdir()?;
        config.write(directory.path())?;
        let log = same_logits(directory.path(), device).context(name)?;
        let hopper = format!("baton_attention_hopper_bf16_{head_dim}");
        let launched = |call: &Recorded| matches!(call, Recorded::Launch(kernel) if *kernel == hopper);
        assert!(log.iter().any(launched), "{log:?}");
    }
    Ok(())
}

/// The same on a GPU, where there is one.
#[test]
fn every_architecture_gives_the_logits_of_the_cpu_on_a_gpu() -> anyhow::Result<()> {
    if let Err(error) = Driver::open(0) {
        eprintln!("skipped: {error}");
        return Ok(());
    }
    every_architecture(|| Ok(Driver::open(0)?))
}

/// Requests of every kind that a device chooses tokens of; the first is greedy, the second ends with a stop token in the midst of others.
fn requests_to_choose(vocab: u32) -> Vec<(Vec<u32>, SamplingParams)> {
    let params = SamplingParams { max_tokens: 7, temperature: 0.0, ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.9, seed: 11, ..params.clone() };
    let kinds = [
        SamplingParams { top_logprobs: Some(2), ..params.clone() },
        SamplingParams { max_tokens: 4, ..params },
        SamplingParams { top_logprobs: Some(0), max_tokens: 9, ..sampled.clone() },
        SamplingParams { top_k: 12, top_p: 0.8, seed: 12, ..sampled.clone() },
        SamplingParams { min_p: 0.02, logit_bias: vec![(1, 2.0), (5, -1.5)], seed: 13, ..sampled.clone() },
        SamplingParams { presence_penalty: 0.5, repetition_penalty: 1.2, seed: 14, max_tokens: 4, ..sampled },
    ];
    let prompt = |len: u32| (0..len).map(|i| (i * 41 + len * 7) % vocab).collect();
    [5, 23, 1, 17, 9, 3].map(prompt).into_iter().zip(kinds).collect()
}

/// What the host would choose if what it compares were off by as much as the device's rounding.
fn near(logits: &[f32], params: &SamplingParams, index: u32) -> Vec<u32> {
    [1.0 - 4e-6, 1.0 + 4e-6]
        .iter()
        .flat_map(|by: &f32| {
            [
                SamplingParams { temperature: params.temperature * by, ..params.clone() },
                SamplingParams { top_p: (params.top_p * by).min(1.0), ..params.clone() },
                SamplingParams { min_p: params.min_p * by, ..params.clone() },
            ]
        })
        .map(|params| {
            let sample = Sample { params: &params, index, prompt: &[], generated: &[] };
            Sampler::new(logits.len()).sample(&mut logits.to_vec(), &sample).id
        })
        .collect()
}

/// Tokens chosen on the device are the host's for the same seeds: greedy ones exactly, others but where one lies at a bound. And they do
/// not depend on whether a step was launched before the one that it follows was collected (I1).
fn same_tokens<D: Device>(
    gpu: &mut Local<CudaBackend<Recorder<D>>>,
    vocab: u32,
    device: &Recorder<D>,
) -> anyhow::Result<()> {
    let mut requests = requests_to_choose(vocab);
    let mut logits = vec![Vec::new(); requests.len()];
    let host = gpu.run(&requests, &mut |place, _, row| {
        logits[place].push(row.to_vec());
        None
    })?;
    let (there, behind) = gpu.generate(&requests, false)?;
    assert_eq!(behind, 0);
    for (place, (got, want)) in there.iter().zip(&host).enumerate() {
        let params = &requests[place].1;
        let differs = got.iter().zip(want).position(|(got, want)| got.id != want.id);
        let same = differs.unwrap_or(want.len());
        for (got, want) in got.iter().zip(want).take(same) {
            assert_eq!((got.index, got.logits_digest), (want.index, want.logits_digest), "request {place}");
        }
        if let Some(at) = differs {
            let near = near(&logits[place][at], params, at as u32);
            assert!(!params.greedy() && !params.looks_back(), "request {place}, token {at}: {got:?}, {want:?}");
            assert!(near.contains(&got[at].id), "request {place}, token {at}: {got:?}, {want:?}, near {near:?}");
        }
    }
    device.take_log();
    let (ahead, behind) = gpu.generate(&requests, true)?;
    assert!(ahead == there, "the same answers, with their log probabilities");
    let log = device.take_log();
    assert!(!log.iter().any(|call| matches!(call, Recorded::Allocate(_) | Recorded::Pin(_))), "all room was there");
    assert!(behind > 0, "steps are launched behind others");
    // An answer that ends by its token, which nobody foresees, has a row in vain.
    let stop = there[0][2].id;
    requests[0].1.stop_token_ids = vec![stop];
    let (stopped, behind) = gpu.generate(&requests, true)?;
    let first = there[0].iter().position(|token| token.id == stop).unwrap_or(0);
    assert!(stopped[0][..] == there[0][..=first] && stopped[1..] == there[1..] && behind > 0);
    // Those that are drawn from the logits as they are leave nothing of a step to be launched by itself.
    let plain: Vec<_> = requests.into_iter().take(2).collect();
    let (first, _) = gpu.generate(&plain, true)?;
    let again =
        |gpu: &mut Local<CudaBackend<Recorder<D>>>| anyhow::Ok((gpu.generate(&plain, true)?.0, device.take_log()));
    again(gpu)?;
    let (answers, log) = again(gpu)?;
    assert!(answers == first);
    let alone = log.iter().filter(|call| matches!(call, Recorded::Launch("baton_sample"))).count();
    let replays = log.iter().filter(|call| matches!(call, Recorded::Replay(_))).count();
    assert!(alone <= 2 && replays > 2, "prompts only: {alone}, {replays} graphs");
    assert!(!log.iter().any(|call| matches!(call, Recorded::Synchronise(_))), "nothing but events is waited for");
    Ok(())
}

/// The suite of all runners, also with steps launched behind others, on kernels that agree to the bit (I1).
#[test]
fn a_model_on_the_device_conforms() -> anyhow::Result<()> {
    let Some(_) = HostDevice::for_tests() else { return Ok(()) };
    let directory = tempfile::tempdir()?;
    tiny::configs()?.first().context("a tiny model")?.write(directory.path())?;
    let model = Model::open(directory.path())?;
    let layout = pool(&model).layout;
    let vocab = model.config().vocab_size;
    let mut setup = conformance::Setup { geometry: PoolGeometry::uniform(layout, 1), vocab, answer_tokens: 3 };
    setup.geometry.blocks = vec![setup.blocks(); setup.geometry.layout.groups.len()];
    let entries = setup.blocks() as usize;
    let limits = DecoderLimits { tokens: 256, samples: 8, context: 128, table_entries: entries };
    let mut devices = Vec::new();
    let make = || {
        let device = Arc::new(Recorder::new(HostDevice::for_tests().expect("it was there")));
        devices.push(Arc::clone(&device));
        let options = CudaOptions { invariant: true, ..CudaOptions::default() };
        let backend = CudaBackend::new(device, setup.geometry.clone(), options).expect("a backend");
        Decoder::load(&model, &setup.geometry.layout, backend, limits).expect("a decoder")
    };
    assert_eq!(conformance::check(&setup, make), Ok(()));
    for device in devices {
        assert_eq!((device.problems(), device.live_bytes()), (Vec::new(), 0));
    }
    Ok(())
}

fn every_architecture<D: Device>(open: impl Fn() -> anyhow::Result<D>) -> anyhow::Result<()> {
    for config in tiny::configs()? {
        let directory = tempfile::tempdir()?;
        config.write(directory.path())?;
        same_logits(directory.path(), open()?).with_context(|| config.name.clone())?;
    }
    Ok(())
}

/// What was asked of the device without graphs is handed back.
fn same_logits<D: Device>(path: &Path, device: D) -> anyhow::Result<Vec<Recorded>> {
    let model = Model::open(path)?;
    let vocab = model.config().vocab_size;
    let device = Arc::new(Recorder::new(device));
    let want = run(&mut Local::new(&model, OPTIONS)?, vocab, None)?;
    // Set where Hopper's own kernels are known to be wrong, so that the rest can be looked at.
    let hopper = std::env::var_os("NO_HOPPER").is_none();
    let options = CudaOptions { invariant: false, hopper, ..CudaOptions::default() };
    let mut gpu: Local<CudaBackend<Recorder<D>>> =
        Local::on(&model, OPTIONS, |geometry| Ok(CudaBackend::new(Arc::clone(&device), geometry.clone(), options)?))?;
    let allocates = |log: Vec<Recorded>| log.iter().any(|call| matches!(call, Recorded::Allocate(_)));
    device.take_log();
    let got = run(&mut gpu, vocab, Some(&want))?;
    assert!(!allocates(device.take_log()), "all room was there");
    let mut far = 0f64;
    for (got, want) in got.logits.iter().flatten().zip(want.logits.iter().flatten()) {
        far = far.max(distance(got, want));
        let best = |row: &[f32]| (0..row.len()).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap_or(0);
        if lead(want, best(want)) > 2.0 * FAR {
            assert_eq!(best(got), best(want), "the greedy token where no other is near");
        }
    }
    let footprint = footprint(&model, false);
    let taken = device.live_bytes() - pool(&model).bytes() as u64;
    let known = footprint.weights + footprint.activations;
    assert!((known..=footprint.total()).contains(&taken), "{taken} bytes beside the pool, foreseen: {footprint:?}");
    println!("logits within {far:.4} standard deviations");
    assert!(far < FAR, "logits {far} standard deviations apart");

    // The same requests again, now as graphs, with room for all there is.
    let again = run(&mut gpu, vocab, Some(&want))?;
    assert!(again.logits == got.logits, "the same bits again");
    let log = device.take_log();
    assert!(log.iter().any(|call| matches!(call, Recorded::Replay(_))), "decode steps are graphs");
    assert!(!allocates(log), "a step allocates nothing");
    same_tokens(&mut gpu, vocab, &device)?;
    drop(gpu);
    assert_eq!(device.live_graphs(), 0);

    let options = CudaOptions { graphs: false, ..options };
    let mut plain: Local<CudaBackend<Recorder<D>>> =
        Local::on(&model, OPTIONS, |geometry| Ok(CudaBackend::new(Arc::clone(&device), geometry.clone(), options)?))?;
    device.take_log();
    assert!(run(&mut plain, vocab, Some(&want))?.logits == got.logits, "without graphs: the same bits");
    let captures = |call: &Recorded| matches!(call, Recorded::BeginCapture(_) | Recorded::Replay(_));
    let log = device.take_log();
    assert!(!log.iter().any(captures));
    drop(plain);
    assert_eq!(device.problems(), [""; 0]);
    assert_eq!(device.live_bytes(), 0);
    Ok(log)
}

/// How far a row of logits may be from that with weights in 16 bits, as the root of the mean square of differences over the row's standard
/// deviation; rows that have nothing to do with each other are 1.4 apart. Rounding to 4 bits where there were 8 is 16 times as coarse.
const APART_IN_FP8: f64 = 0.7;

/// The same on average.
const MEAN_IN_FP8: f64 = 0.45;

/// Root of the mean square of two rows' differences, in standard deviations of the second.
fn apart(got: &[f32], want: &[f32]) -> f64 {
    let mean_of = |x: &dyn Fn(usize) -> f64| (0..want.len()).map(x).sum::<f64>() / want.len() as f64;
    let mean = mean_of(&|i| f64::from(want[i]));
    let spread = mean_of(&|i| (f64::from(want[i]) - mean).powi(2));
    (mean_of(&|i| (f64::from(got[i]) - f64::from(want[i])).powi(2)) / spread).sqrt()
}

/// Weights and activations of 8 bits: logits near those of 16, with a device that applies the rows' scales and one that does not, in the
/// memory that was foreseen; and not a bit depends on the batch or on how prompts are cut (I1).
#[test]
fn weights_of_8_bits_give_logits_near_those_of_16_whatever_the_batch() -> anyhow::Result<()> {
    // With and without biases, norms of heads and sizes that stay bf16 (an inner width of 136).
    for name in ["llama-gqa-odd-vocab", "llama-head-dim-24", "qwen2", "gemma3"] {
        let directory = tempfile::tempdir()?;
        tiny::config(name)?.write(directory.path())?;
        let model = Model::open(directory.path())?;
        for fp8 in [Fp8::Plain, Fp8::Scaled] {
            let Some(device) = HostDevice::for_tests() else { return Ok(()) };
            let device = Arc::new(Recorder::new(device.with_fp8(fp8)));
            near_in_fp8(&model, &device).with_context(|| format!("{name}, {fp8:?}"))?;
            assert_eq!((device.problems(), device.live_bytes()), (Vec::new(), 0));
        }
    }
    Ok(())
}

/// The same on a GPU, where there is one.
#[test]
fn weights_of_8_bits_give_logits_near_those_of_16_on_the_gpu() -> anyhow::Result<()> {
    let device = match Driver::open(0) {
        Ok(device) if device.properties().fp8 != Fp8::None => Arc::new(Recorder::new(device)),
        Ok(_) => {
            eprintln!("skipped: this GPU multiplies no matrices of 8 bits");
            return Ok(());
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            return Ok(());
        }
    };
    println!("fp8: {:?}", device.properties().fp8);
    let directory = tempfile::tempdir()?;
    tiny::config("qwen2")?.write(directory.path())?;
    near_in_fp8(&Model::open(directory.path())?, &device)
}

fn near_in_fp8<D: Device>(model: &Model, device: &Arc<Recorder<D>>) -> anyhow::Result<()> {
    let vocab = model.config().vocab_size;
    let load = |options: Options, fp8: bool| {
        let cuda = CudaOptions { invariant: true, fp8, ..CudaOptions::default() };
        Local::on(model, options, |geometry| Ok(CudaBackend::new(Arc::clone(device), geometry.clone(), cuda)?))
    };
    let want = run(&mut load(OPTIONS, false)?, vocab, None)?;
    let mut gpu = load(OPTIONS, true)?;
    device.take_log();
    let forced = run(&mut gpu, vocab, Some(&want))?;
    let log = device.take_log();
    assert!(
        log.contains(&Recorded::Launch("baton_quantise_rows")) && log.contains(&Recorded::Launch("baton_rms_norm"))
    );
    assert!(!log.iter().any(|call| matches!(call, Recorded::Allocate(_))), "all room was there");
    let rows = || forced.logits.iter().flatten().zip(want.logits.iter().flatten());
    let distances: Vec<f64> = rows().map(|(got, want)| apart(got, want)).collect();
    let far = distances.iter().copied().fold(0.0, f64::max);
    let mean = distances.iter().sum::<f64>() / distances.len() as f64;
    println!("logits of 8 bits up to {far:.4} standard deviations apart, {mean:.4} on average");
    assert!(distances.iter().all(|&far| far > 0.0 && far < APART_IN_FP8), "{distances:?}");
    assert!(mean < MEAN_IN_FP8, "{mean} on average");
    let (footprint, pool) = (footprint(model, true), pool(model).bytes() as u64);
    let taken = device.live_bytes() - pool;
    let known = footprint.weights + footprint.activations;
    assert!((known..=footprint.total()).contains(&taken), "{taken} bytes beside the pool, foreseen: {footprint:?}");

    // I1: tokens and logits of a request are the same in any batch and however its prompt is cut.
    let free = run(&mut gpu, vocab, None)?;
    drop(gpu);
    let mut cut = load(Options { chunk: 7, budget: 16, ..OPTIONS }, true)?;
    for (place, &length) in LENGTHS.iter().enumerate() {
        let alone = run_of(&mut cut, vocab, None, &[length])?;
        assert!(alone.logits[0] == free.logits[place], "a prompt of {length} tokens, alone and cut: the same bits");
        assert_eq!(alone.tokens[0], free.tokens[place]);
    }
    Ok(())
}
