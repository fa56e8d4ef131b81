//! What each KV type costs in accuracy: `cargo run --release -p baton-tests --example kv_types -- --model smollm2`.
//!
//! Reads a text token by token over a pool of each type and compares every step's logits with those over an f32 pool. The
//! text is Python's own language reference, as the installed Python carries it, or a file.

use std::path::PathBuf;

use anyhow::ensure;
use baton_model::kv_layout;
use baton_model_files::{Model, fetch};
use baton_tests::local::{Local, Options};
use baton_tests::perplexity::{log_probability, text};
use baton_types::{KvDtype, SamplingParams};
use clap::Parser;

#[derive(Parser)]
#[command(about = "Logit error, greedy agreement and perplexity of every KV type, as a table")]
struct Args {
    /// A name, a path, or org/name on the hub.
    #[arg(long, default_value = "smollm2")]
    model: String,
    /// Steps compared.
    #[arg(long, default_value_t = 1000)]
    tokens: usize,
    /// A text of that many tokens; default: Python's documentation.
    #[arg(long)]
    text: Option<PathBuf>,
    /// Types to measure beside f32; default: all.
    #[arg(long, value_delimiter = ',', value_parser = kv_type)]
    types: Vec<KvDtype>,
}

fn name(dtype: KvDtype) -> String {
    format!("{dtype:?}").to_lowercase()
}

fn kv_type(text: &str) -> Result<KvDtype, String> {
    let names = KvDtype::ALL.map(name).join(", ");
    KvDtype::ALL.into_iter().find(|&dtype| name(dtype) == text).ok_or(format!("one of {names}"))
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let model = Model::open(&fetch::resolve(&args.model, &fetch::default_cache()?, &fetch::NoProgress)?)?;
    let text = text(args.text.as_deref())?;
    let mut ids = model.tokenizer().encode(&text, true)?;
    ensure!(ids.len() > args.tokens, "the text has {} tokens, {} steps need one more", ids.len(), args.tokens);
    ids.truncate(args.tokens + 1);
    println!("{}: {} steps", model.name(), args.tokens);
    println!("| type | bytes a token | logit error, mean | largest | same greedy token | perplexity |");
    println!("| --- | --- | --- | --- | --- | --- |");
    let mut exact = Vec::new();
    let wanted = |dtype: &KvDtype| *dtype == KvDtype::F32 || args.types.is_empty() || args.types.contains(dtype);
    for dtype in KvDtype::ALL.into_iter().filter(wanted) {
        let cost = measure(&model, dtype, &ids, &mut exact)?;
        println!("{}", cost.row(&model, dtype));
    }
    Ok(())
}

/// Against the f32 pool, over all steps.
#[derive(Default)]
struct Cost {
    steps: usize,
    error_sum: f64,
    largest: f32,
    errors: usize,
    same: usize,
    log_likelihood: f64,
}

/// Reads the text over a pool of this type. The first call's logits are what the later ones are compared with.
fn measure(model: &Model, kv: KvDtype, ids: &[u32], exact: &mut Vec<f32>) -> anyhow::Result<Cost> {
    let (vocab, steps) = (model.config().vocab_size as usize, ids.len() - 1);
    let reference = exact.is_empty();
    let options = Options { kv, blocks: ids.len().div_ceil(16) as u32 + 1, ..Options::default() };
    let params = SamplingParams { temperature: 0.0, max_tokens: steps as u32, ..SamplingParams::default() };
    let mut cost = Cost::default();
    Local::new(model, options)?.run(&[(vec![ids[0]], params)], &mut |_, index, logits| {
        let step = index as usize;
        if reference {
            exact.extend_from_slice(logits);
        }
        cost.add(&exact[step * vocab..][..vocab], logits, ids[step + 1]);
        Some(ids[step + 1])
    })?;
    ensure!(cost.steps == steps, "{} steps of {steps}", cost.steps);
    Ok(cost)
}

fn best(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]).then(b.cmp(&a)))
}

impl Cost {
    /// One step, after which the text goes on with `next`.
    fn add(&mut self, exact: &[f32], logits: &[f32], next: u32) {
        for (a, b) in exact.iter().zip(logits) {
            let error = (a - b).abs();
            self.error_sum += error as f64;
            self.largest = self.largest.max(error);
        }
        self.errors += logits.len();
        self.steps += 1;
        self.same += usize::from(best(exact) == best(logits));
        self.log_likelihood += log_probability(logits, next);
    }

    fn row(&self, model: &Model, dtype: KvDtype) -> String {
        let layout = kv_layout(model.config(), 0, dtype, 16);
        let bytes: usize = (0..layout.groups.len()).map(|g| layout.block_bytes_all_layers(g)).sum::<usize>() / 16;
        let (mean, largest) = (self.error_sum / self.errors as f64, self.largest);
        let same = 100.0 * self.same as f64 / self.steps as f64;
        let perplexity = (-self.log_likelihood / self.steps as f64).exp();
        let name = name(dtype);
        format!("| {name} | {bytes} | {mean:.4} | {largest:.3} | {same:.1} % | {perplexity:.3} |")
    }
}
