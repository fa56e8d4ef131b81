//! `baton warm`: has the KV of prompts computed and kept before users come.

mod prompts;

use std::io::Read;
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use baton_proto::v1;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use futures::StreamExt;

use crate::chat::{Client, router_args};
use prompts::Prompt;

/// `baton warm`.
pub fn command() -> Command {
    let number = |name: &'static str, value: &'static str, default: &'static str| {
        Arg::new(name).long(name).value_name(value).default_value(default)
    };
    Command::new("warm")
        .about("Sends prompts through a running cluster, so that their KV is computed and kept before users come")
        .after_help(
            "Each line of FILE is a JSON string, or an object with `prompt` or `messages`, and, if wanted, `cache_salt` and `keep_seconds`:\n  \
             {\"messages\": [{\"role\": \"system\", \"content\": \"You are…\"}], \"keep_seconds\": 3600}\n\
             The prompt must begin as users' requests do, with their cache_salt. KV that asks to be kept is evicted last where workers have --eviction priority.",
        )
        .arg(Arg::new("file").value_name("FILE").required(true).help("The prompts, a JSON line each; -: standard input"))
        .arg(Arg::new("text").long("text").action(ArgAction::SetTrue).help("The whole file is one prompt, as it is"))
        .args(router_args())
        .arg(
            Arg::new("model").long("model").value_name("NAME").default_value("").help("The model's name at the router; default: its first"),
        )
        .arg(
            number("keep-seconds", "SECONDS", "3600")
                .value_parser(value_parser!(u32))
                .help("How long workers are asked to keep the KV, where a line does not say; 0: as any other"),
        )
        .arg(
            number("concurrency", "N", "2")
                .value_parser(value_parser!(u16).range(1..=1024))
                .help("Prompts that are sent at once"),
        )
}

/// Sends all prompts; fails at the end if one of them did.
pub async fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    let file = matches.get_one::<String>("file").context("a file is needed")?;
    let (text, keep) = (read(file)?, matches.get_one::<u32>("keep-seconds").copied().unwrap_or(0));
    let prompts = match matches.get_flag("text") {
        true => vec![Prompt::of_text(text)],
        false => prompts::parse(&text).with_context(|| format!("{file} has a line that cannot be read"))?,
    };
    if prompts.is_empty() {
        bail!("{file} has no prompts: give each as a JSON line, or the whole file as one with --text");
    }
    let model = matches.get_one::<String>("model").map_or("", String::as_str);
    let at_once = usize::from(matches.get_one::<u16>("concurrency").copied().unwrap_or(1));
    let (client, count) = (Client::connect(matches).await?, prompts.len());
    let asked = prompts.into_iter().map(|prompt| {
        let (mut client, line) = (client.clone(), prompt.line);
        let request = prompt.request(model, keep);
        async move { (line, warm(&mut client, request).await) }
    });
    let mut answers = futures::stream::iter(asked).buffer_unordered(at_once);
    let (mut done, mut failed, mut sum) = (0, 0, v1::Usage::default());
    while let Some((line, answer)) = answers.next().await {
        done += 1;
        match answer {
            Ok(usage) => {
                let (all, cached) = (usage.prompt_tokens, usage.cached_tokens);
                println!(
                    "{done}/{count}  line {line}: {all} tokens, {} computed, {cached} cached",
                    all.saturating_sub(cached)
                );
                sum.prompt_tokens += all;
                sum.cached_tokens += cached;
            }
            Err(error) => {
                failed += 1;
                eprintln!("{done}/{count}  line {line}: {error:#}");
            }
        }
    }
    let computed = sum.prompt_tokens.saturating_sub(sum.cached_tokens);
    println!("{} prompts warm: {computed} tokens computed, {} were cached", count - failed, sum.cached_tokens);
    if failed > 0 {
        bail!("{failed} of {count} prompts failed; their lines are named above");
    }
    Ok(())
}

fn read(file: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    match file {
        "-" => std::io::stdin().read_to_string(&mut text).context("reading standard input")?,
        file => std::fs::File::open(Path::new(file))
            .and_then(|mut opened| opened.read_to_string(&mut text))
            .with_context(|| format!("reading {file}"))?,
    };
    Ok(text)
}

async fn warm(client: &mut Client, request: v1::GenerateRequest) -> anyhow::Result<v1::Usage> {
    let mut stream = client.generate(request).await?;
    while let Some(part) = client.next(&mut stream).await? {
        if let Some(usage) = part.finish.and_then(|finish| finish.usage) {
            return Ok(usage);
        }
    }
    Err(anyhow!("the answer ended without a count of tokens"))
}
