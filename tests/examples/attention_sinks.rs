//! What attention sinks are for: `cargo run --release -p baton-tests --example attention_sinks -- --model smollm2`.
//!
//! Reads a text up to some places, before the window is full, past it and past the model's context, and goes on from each with
//! the text's own tokens. Tells the perplexity there with sinks and window, and with what else one might do: full attention,
//! the window alone, and cutting the text to the last tokens and reading those anew.

use std::path::PathBuf;

use anyhow::ensure;
use baton_model_files::{Model, fetch};
use baton_tests::local::{Local, Options};
use baton_tests::perplexity::{log_probability, text};
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
    #[arg(long, value_delimiter = ',', default_value = "512,2048,8500,10000")]
    at: Vec<usize>,
    /// Tokens measured at each place.
    #[arg(long, default_value_t = 500)]
    steps: usize,
    /// The text; default: Python's documentation.
    #[arg(long)]
    text: Option<PathBuf>,
}

/// One row of the table.
struct Way {
    name: &'static str,
    /// Sinks and window.
    seen: Option<(u32, u32)>,
    /// The text's last tokens that are read at each place.
    read: usize,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let model = Model::open(&fetch::resolve(&args.model, &fetch::default_cache()?, &fetch::NoProgress)?)?;
    let text = text(args.text.as_deref())?;
    let ids = model.tokenizer().encode(&text, true)?;
    let most = args.at.iter().max().copied().unwrap_or(0) + args.steps;
    ensure!(args.steps > 0 && !args.at.contains(&0), "--steps and --at must be at least 1");
    ensure!(ids.len() >= most, "the text has {} tokens; --at and --steps need {most}", ids.len());
    let (sinks, window) = (args.sinks, args.window);
    println!(
        "{}, context of {}, {sinks} sinks, window of {window}: perplexity of {} tokens",
        model.name(),
        model.config().context_length,
        args.steps
    );
    println!("| attention | {} |", args.at.iter().map(|at| format!("after {at}")).collect::<Vec<_>>().join(" | "));
    println!("| --- |{}", " --- |".repeat(args.at.len()));
    for way in [
        Way { name: "sinks and window", seen: Some((sinks, window)), read: usize::MAX },
        Way { name: "window alone", seen: Some((0, window)), read: usize::MAX },
        Way { name: "full, the last tokens read anew", seen: None, read: (sinks + window) as usize },
        Way { name: "full", seen: None, read: usize::MAX },
    ] {
        let row = perplexities(&model, &way, &ids, &args)?;
        println!("| {} | {} |", way.name, row.iter().map(|p| format!("{p:.2}")).collect::<Vec<_>>().join(" | "));
    }
    Ok(())
}

/// Of the tokens that come after each place, all places in one batch. What one has read the next need not read again.
fn perplexities(model: &Model, way: &Way, ids: &[u32], args: &Args) -> anyhow::Result<Vec<f64>> {
    let params = SamplingParams { temperature: 0.0, max_tokens: args.steps as u32, ..SamplingParams::default() };
    let prompt = |at: &usize| (ids[at.saturating_sub(way.read)..*at].to_vec(), params.clone());
    let requests: Vec<_> = args.at.iter().map(prompt).collect();
    let blocks = |(prompt, _): &(Vec<u32>, SamplingParams)| (prompt.len() + args.steps).div_ceil(16) as u32 + 1;
    let (longest, all) = (requests.iter().map(blocks).max().unwrap_or(1), requests.iter().map(blocks).sum());
    let options =
        Options { sinks: way.seen, blocks: all, context: Some(longest * 16), share: true, ..Options::default() };
    let mut sums = vec![0.0; requests.len()];
    Local::new(model, options)?.run(&requests, &mut |place, index, logits| {
        let next = ids[args.at[place] + index as usize];
        sums[place] += log_probability(logits, next);
        Some(next)
    })?;
    Ok(sums.iter().map(|sum| (-sum / args.steps as f64).exp()).collect())
}
