//! What attention sinks are for: `cargo run --release -p baton-tests --example attention_sinks -- --model smollm2`.
//!
//! Reads a text up to some places, before the window is full, past it and past the model's context, and goes on from each with
//! the text's own tokens: perplexity there with full attention, with sinks and window, and with the window alone.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use baton_model_files::{Model, fetch};
use baton_tests::local::{Local, Options};
use baton_tests::perplexity::{log_probability, python_documentation};
use baton_types::SamplingParams;
use clap::Parser;

#[derive(Parser)]
#[command(about = "Perplexity along a long text, with and without attention sinks, as a table")]
struct Args {
    /// A name, a path, or org/name on the hub.
    #[arg(long, default_value = "smollm2")]
    model: String,
    /// First tokens that stay visible, rounded up to blocks of 16.
    #[arg(long, default_value_t = 4)]
    sinks: u32,
    /// Last tokens that are visible.
    #[arg(long, default_value_t = 1024)]
    window: u32,
    /// Where to measure: tokens of the text before.
    #[arg(long, value_delimiter = ',', default_value = "512,2048,8400")]
    at: Vec<usize>,
    /// Tokens measured at each place.
    #[arg(long, default_value_t = 300)]
    steps: usize,
    /// The text; default: Python's documentation.
    #[arg(long)]
    text: Option<PathBuf>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let model = Model::open(&fetch::resolve(&args.model, &fetch::default_cache()?, &fetch::Quiet)?)?;
    let text = match &args.text {
        Some(path) => std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?,
        None => python_documentation()?,
    };
    let ids = model.tokenizer().encode(&text, true)?;
    let most = args.at.iter().max().copied().unwrap_or(0) + args.steps;
    ensure!(args.steps > 0 && !args.at.contains(&0), "--steps and --at must be at least 1");
    ensure!(ids.len() >= most, "the text has {} tokens; --at and --steps need {most}", ids.len());
    let context = model.config().context_length;
    println!("{}, context of {context}: perplexity of {} tokens", model.name(), args.steps);
    println!("| attention | {} |", args.at.iter().map(|at| format!("after {at}")).collect::<Vec<_>>().join(" | "));
    println!("| --- |{}", " --- |".repeat(args.at.len()));
    let kinds = [
        ("full", None),
        ("sinks and window", Some((args.sinks, args.window))),
        ("window alone", Some((0, args.window))),
    ];
    for (name, sinks) in kinds {
        let mut row = format!("| {name} |");
        for at in &args.at {
            row += &match sinks.is_none() && at + args.steps > context as usize {
                true => " – |".to_owned(),
                false => format!(" {:.2} |", perplexity(&model, sinks, &ids, *at, args.steps)?),
            };
        }
        println!("{row}");
    }
    Ok(())
}

/// Of `steps` tokens that come after the first `at`.
fn perplexity(model: &Model, sinks: Option<(u32, u32)>, ids: &[u32], at: usize, steps: usize) -> anyhow::Result<f64> {
    let blocks = (at + steps).div_ceil(16) as u32 + 1;
    let options = Options { sinks, blocks, context: Some(blocks * 16), ..Options::default() };
    let params = SamplingParams { temperature: 0.0, max_tokens: steps as u32, ..SamplingParams::default() };
    let mut sum = 0.0;
    Local::new(model, options)?.run(&[(ids[..at].to_vec(), params)], &mut |_, index, logits| {
        let next = ids[at + index as usize];
        sum += log_probability(logits, next);
        Some(next)
    })?;
    Ok((-sum / steps as f64).exp())
}
