//! Attention sinks and a window: logits are those of a naive cache that evicts, keeps keys unrotated and rotates them by their
//! places, as the paper has it (StreamingLLM, Xiao et al. 2023); the same over every chunking, preemption and route (I1); and a
//! stream runs past the model's context in a pool that holds a window.

use std::collections::{BTreeMap, VecDeque};

use anyhow::{Context, ensure};
use baton_model_files::Model;
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};
use baton_tests::cluster::{Cluster, ClusterOptions};
use baton_tests::local::{Local, Options};
use baton_tests::tiny::{self, TinyModel};
use baton_types::{KvDtype, SamplingParams};

/// Tokens; the sinks are one block.
const SINKS: u32 = 16;
const WINDOW: u32 = 40;
/// Past the tiny model's context.
const STREAM: u32 = 1000;

/// A small llama with grouped heads and a context of 128.
fn llama() -> anyhow::Result<TinyModel> {
    let mut model = tiny::config("llama-gqa-odd-vocab")?;
    model.config["max_position_embeddings"] = 128.into();
    Ok(model)
}

fn opened(model: &TinyModel, directory: &tempfile::TempDir) -> anyhow::Result<Model> {
    let path = directory.path().join(&model.name);
    model.write(&path)?;
    Ok(Model::open(&path)?)
}

fn streaming() -> Options {
    Options { sinks: Some((SINKS, WINDOW)), context: Some(STREAM), kv: KvDtype::F32, ..Options::default() }
}

/// One layer's cache entry: the key before rotation, and the value.
type Entry = (Vec<f64>, Vec<f64>);

/// The whole model in f64, one token at a time.
struct Naive {
    tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    config: serde_json::Value,
    caches: Vec<VecDeque<Entry>>,
}

impl Naive {
    fn new(model: &TinyModel) -> anyhow::Result<Naive> {
        let tensors = model.tensors()?.into_iter();
        let tensors = tensors.map(|t| (t.name.clone(), (t.shape.clone(), t.values(model.seed)))).collect();
        let mut naive = Naive { tensors, config: model.config.clone(), caches: Vec::new() };
        naive.caches = vec![VecDeque::new(); naive.size("num_hidden_layers")];
        Ok(naive)
    }

    fn size(&self, field: &str) -> usize {
        self.config[field].as_u64().unwrap_or_default() as usize
    }

    fn product(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let (shape, values) = &self.tensors[name];
        let row = |r: usize| values[r * shape[1]..][..shape[1]].iter().zip(x).map(|(&w, x)| f64::from(w) * x).sum();
        (0..shape[0]).map(row).collect()
    }

    fn norm(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let eps = self.config["rms_norm_eps"].as_f64().unwrap_or_default();
        let mean = x.iter().map(|v| v * v).sum::<f64>() / x.len() as f64;
        let weight = &self.tensors[name].1;
        x.iter().zip(weight).map(|(v, &w)| v / (mean + eps).sqrt() * f64::from(w)).collect()
    }

    /// A head rotated to a place.
    fn rotated(&self, x: &[f64], place: usize) -> Vec<f64> {
        let (half, theta) = (x.len() / 2, self.config["rope_theta"].as_f64().unwrap_or(10_000.0));
        let turn = |d: usize| {
            let angle = place as f64 * theta.powf(-2.0 * (d % half) as f64 / x.len() as f64);
            let (a, b) = (x[d % half], x[half + d % half]);
            if d < half { a * angle.cos() - b * angle.sin() } else { b * angle.cos() + a * angle.sin() }
        };
        (0..x.len()).map(turn).collect()
    }

    fn attend(&mut self, layer: usize, x: &[f64]) -> Vec<f64> {
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}_proj.weight");
        let [q, k, v] = ["q", "k", "v"].map(|part| self.product(&name(part), x));
        let cache = &mut self.caches[layer];
        cache.push_back((k, v));
        if cache.len() > (SINKS + WINDOW) as usize {
            cache.remove(SINKS as usize);
        }
        let (cache, heads, kv_heads) =
            (&self.caches[layer], self.size("num_attention_heads"), self.size("num_key_value_heads"));
        let dim = q.len() / heads;
        let mut out = Vec::new();
        for head in 0..heads {
            let of = |row: &[f64]| row[head / (heads / kv_heads) * dim..][..dim].to_vec();
            // The newest stands at the end of the cache, wherever it stands in the text.
            let query = self.rotated(&q[head * dim..][..dim], cache.len() - 1);
            let score = |(place, (key, _)): (usize, &Entry)| -> f64 {
                let key = self.rotated(&of(key), place);
                query.iter().zip(&key).map(|(a, b)| a * b).sum::<f64>() / (dim as f64).sqrt()
            };
            let scores: Vec<f64> = cache.iter().enumerate().map(score).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            for d in 0..dim {
                out.push(scores.iter().zip(cache).map(|(s, (_, v))| (s - max).exp() / total * of(v)[d]).sum());
            }
        }
        self.product(&name("o"), &out)
    }

    /// Logits after one more token.
    fn step(&mut self, id: u32) -> Vec<f64> {
        let (shape, embedding) = &self.tensors["model.embed_tokens.weight"];
        let mut x: Vec<f64> = embedding[id as usize * shape[1]..][..shape[1]].iter().map(|&v| f64::from(v)).collect();
        for layer in 0..self.caches.len() {
            let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
            let attended = self.attend(layer, &self.norm(&name("input_layernorm"), &x));
            x.iter_mut().zip(attended).for_each(|(x, y)| *x += y);
            let normed = self.norm(&name("post_attention_layernorm"), &x);
            let gate = self.product(&name("mlp.gate_proj"), &normed);
            let up = self.product(&name("mlp.up_proj"), &normed);
            let inner: Vec<f64> = gate.iter().zip(&up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect();
            let down = self.product(&name("mlp.down_proj"), &inner);
            x.iter_mut().zip(down).for_each(|(x, y)| *x += y);
        }
        let head = if self.tensors.contains_key("lm_head.weight") { "lm_head" } else { "model.embed_tokens" };
        self.product(&format!("{head}.weight"), &self.norm("model.norm.weight", &x))
    }
}

#[test]
fn logits_are_those_of_a_cache_that_evicts() -> anyhow::Result<()> {
    let (tiny, directory) = (llama()?, tempfile::tempdir()?);
    let model = opened(&tiny, &directory)?;
    let token = |at: u32| at.wrapping_mul(2_654_435_761) % 200;
    // A prompt longer than sinks and window, and an answer that goes on past the model's context.
    let (prompt, answer) = (90, 120);
    let mut naive = Naive::new(&tiny)?;
    let wanted: Vec<Vec<f64>> = (0..prompt + answer - 1).map(|at| naive.step(token(at))).collect();
    let params = SamplingParams { temperature: 0.0, max_tokens: answer, ..SamplingParams::default() };
    for chunk in [1, 7, 512] {
        let mut local = Local::new(&model, Options { chunk, ..streaming() })?;
        let mut worst = 0.0f64;
        local.run(&[((0..prompt).map(token).collect(), params.clone())], &mut |_, index, logits| {
            let wanted = &wanted[(prompt + index) as usize - 1];
            let off = logits.iter().zip(wanted).map(|(&a, b)| (f64::from(a) - b).abs()).fold(0.0, f64::max);
            let size = wanted.iter().map(|b| b.abs()).fold(0.0, f64::max);
            worst = worst.max(off / size);
            Some(token(prompt + index))
        })?;
        ensure!(worst < 1e-4, "chunks of {chunk}: logits off by {worst:.1e} of the largest");
    }
    Ok(())
}

/// Some longer than the window, some beyond the context.
fn requests() -> Vec<(Vec<u32>, SamplingParams)> {
    let token = |request: u32, at: u32| (request * 7919 + at * 31 + at * at) % 200;
    let request = |i: u32| {
        let prompt = [3, 15, 16, 56, 57, 100, 150, 201][i as usize % 8];
        let params = SamplingParams {
            temperature: if i.is_multiple_of(2) { 0.0 } else { 0.9 },
            seed: u64::from(i),
            max_tokens: 10 + 17 * (i % 5),
            top_logprobs: Some(0),
            ..SamplingParams::default()
        };
        ((0..prompt).map(|at| token(i % 3, at)).collect(), params)
    };
    (0..10).map(request).collect()
}

/// Tokens and digests of all their logits.
type Answers = Vec<Vec<(u32, Option<u64>)>>;

fn answers(model: &Model, options: Options) -> anyhow::Result<(Answers, Local)> {
    let mut local = Local::new(model, options)?;
    let answers = local.run(&requests(), &mut |_, _, _| None)?;
    let bits = answers.into_iter().map(|tokens| tokens.into_iter().map(|t| (t.id, t.logits_digest)).collect());
    Ok((bits.collect(), local))
}

/// I1.
#[test]
fn chunks_preemption_and_shared_prefixes_change_nothing() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    for config in [llama()?, tiny::config("gemma3")?] {
        let model = opened(&config, &directory)?;
        for kv in [KvDtype::F16, KvDtype::Int4] {
            let plain = Options { kv, max_running: 1, ..streaming() };
            let (wanted, _) = answers(&model, plain)?;
            let (full, _) = answers(&model, Options { sinks: None, ..plain })?;
            for (at, (prompt, params)) in requests().iter().enumerate() {
                let within = prompt.len() as u32 + params.max_tokens <= SINKS + WINDOW;
                ensure!(!within || wanted[at] == full[at], "{} {kv:?}: request {at} is within the window", config.name);
            }
            for (chunk, blocks, share) in
                [(1, 256, false), (16, 64, true), (5, 9, true), (512, 47, true), (5, 12, false)]
            {
                let crowded = Options { chunk, budget: chunk.max(32), blocks, share, max_running: 32, ..plain };
                let (got, local) = answers(&model, crowded)?;
                ensure!(got == wanted, "{} {kv:?}: chunks of {chunk}, {blocks} blocks: answers differ", config.name);
                ensure!(!share || local.hit_tokens() > 0, "nothing was shared");
                ensure!(blocks > 12 || local.preemptions() > 0, "nothing was preempted");
            }
        }
    }
    Ok(())
}

/// I5: memory is bounded though the stream is not.
#[test]
fn a_stream_runs_past_context_and_pool() -> anyhow::Result<()> {
    let (tiny, directory) = (llama()?, tempfile::tempdir()?);
    let model = opened(&tiny, &directory)?;
    // 8 blocks are 128 tokens: sinks, a window and a chunk.
    let options = Options { blocks: 8, chunk: 16, ..streaming() };
    let prompt: Vec<u32> = (0..300).map(|at| at * 7 % 200).collect();
    let params = SamplingParams { temperature: 0.0, max_tokens: STREAM - 300, ..SamplingParams::default() };
    let answer = Local::new(&model, options)?.one(&prompt, &params)?;
    ensure!(answer.len() == 700, "{} tokens", answer.len());
    let ample = Local::new(&model, Options { blocks: 100, ..streaming() })?.one(&prompt, &params)?;
    ensure!(answer == ample, "I1: the pool's size changes nothing");
    let over = SamplingParams { max_tokens: STREAM - 299, ..params.clone() };
    let error = Local::new(&model, options)?.one(&prompt, &over).err().context("over the limit")?.to_string();
    ensure!(error.contains("more than the context of 1000"), "{error}");
    let error = Local::new(&model, Options { blocks: 6, ..options })?.one(&prompt, &params).err().context("no room")?;
    ensure!(error.to_string().contains("the worker's pool holds 96"), "{error}");
    Ok(())
}

/// I1 over the split: only sinks and window travel.
#[test]
fn a_split_stream_is_the_same_stream() -> anyhow::Result<()> {
    let (tiny, directory) = (llama()?, tempfile::tempdir()?);
    let model = opened(&tiny, &directory)?;
    let options = Options { kv: KvDtype::F16, max_running: 1, ..streaming() };
    let (wanted, _) = answers(&model, options)?;
    let settings = [
        ("BATON_ATTENTION_WINDOW", WINDOW.to_string()),
        ("BATON_ATTENTION_SINKS", "4".to_owned()),
        ("BATON_CONTEXT", STREAM.to_string()),
        ("BATON_CHUNK", "24".to_owned()),
    ];
    let env = settings.map(|(name, value)| (name.to_owned(), value)).to_vec();
    let path = directory.path().join(&tiny.name);
    for aggregated in [false, true] {
        let cluster = Cluster::start(ClusterOptions { env: env.clone(), aggregated, ..ClusterOptions::new(&path) })?;
        for salt in ["alone", "shared", "shared"] {
            let got = cluster.block_on(async {
                let mut client = InferenceClient::connect(format!("http://{}", cluster.grpc())).await?;
                let mut answers = Answers::new();
                for (i, (prompt, p)) in requests().into_iter().enumerate() {
                    let sampling = v1::Sampling {
                        max_tokens: Some(p.max_tokens),
                        temperature: Some(p.temperature),
                        seed: Some(p.seed),
                        top_logprobs: p.top_logprobs,
                        ignore_eos: true,
                        ..Default::default()
                    };
                    let cache_salt = if salt == "alone" { format!("{salt} {i}") } else { salt.to_owned() };
                    let input = Some(Input::TokenIds(v1::TokenIds { ids: prompt }));
                    let request =
                        v1::GenerateRequest { input, sampling: Some(sampling), cache_salt, ..Default::default() };
                    let mut stream = client.generate(request).await?.into_inner();
                    let mut tokens = Vec::new();
                    while let Some(part) = stream.message().await? {
                        tokens.extend(part.tokens.into_iter().map(|t| (t.id, t.logits_digest)));
                    }
                    answers.push(tokens);
                }
                anyhow::Ok(answers)
            })?;
            ensure!(got == wanted, "{salt}, aggregated: {aggregated}: answers differ");
        }
        cluster.wait_idle()?;
        cluster.stop()?;
    }
    Ok(())
}
