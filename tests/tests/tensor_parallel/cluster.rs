//! Workers with several ranks in a cluster: what they answer, and what they hand to workers with others.

use std::path::Path;

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_model_files::Model;
use baton_proto::v1::inference_client::InferenceClient;
use baton_tests::cluster::client::{apart, greedy, prompt};
use baton_tests::cluster::{Cluster, ClusterOptions};
use baton_tests::local::{Local, Options};
use baton_tests::tiny;
use baton_types::SamplingParams;
use futures::future::try_join_all;

/// Tokens of an answer, each with the digest of all its logits.
type Answer = Vec<(u32, Option<u64>)>;

const TOKENS: u32 = 8;

fn prompts() -> Vec<Vec<u32>> {
    (1..).zip([2, 17, 40, 64, 90]).map(|(seed, tokens)| prompt(tokens, seed)).collect()
}

/// In this process, on so many ranks.
fn local(model: &Model, ranks: u32) -> anyhow::Result<Vec<Answer>> {
    let params =
        SamplingParams { temperature: 0.0, max_tokens: TOKENS, top_logprobs: Some(0), ..SamplingParams::default() };
    let mut local = Local::ranks(model, Options::default(), ranks)?;
    let answer = |prompt: Vec<u32>| {
        let tokens = local.one(&prompt, &params)?;
        Ok(tokens.into_iter().map(|token| (token.id, token.logits_digest)).collect())
    };
    prompts().into_iter().map(answer).collect()
}

async fn ask(mut client: InferenceClient<tonic::transport::Channel>, prompt: Vec<u32>) -> anyhow::Result<Answer> {
    let mut request = apart(greedy(prompt, TOKENS));
    request.sampling.as_mut().context("sampling")?.top_logprobs = Some(0);
    let mut stream = client.generate(request).await?.into_inner();
    let mut answer = Answer::new();
    while let Some(part) = stream.message().await? {
        answer.extend(part.tokens.into_iter().map(baton_types::TokenOut::from).map(|t| (t.id, t.logits_digest)));
    }
    Ok(answer)
}

/// Of a cluster whose prefill and decode workers have so many ranks; all requests at once.
fn answers(model: &Path, (prefill, decode): (u32, u32), transport: &'static str) -> anyhow::Result<Vec<Answer>> {
    let flags = [("--prefill-tp", prefill), ("--tp", decode), ("--threads", 2)];
    let args = flags.iter().flat_map(|(flag, value)| [(*flag).to_owned(), value.to_string()]).collect();
    let cluster = Cluster::start(ClusterOptions { transport, args, ..ClusterOptions::new(model) })?;
    let answers = cluster.block_on(async {
        let client = InferenceClient::connect(cluster.url()).await?;
        try_join_all(prompts().into_iter().map(|prompt| ask(client.clone(), prompt))).await
    })?;
    cluster.wait_idle()?; // I6
    let sender = cluster.workers_of(Role::Prefill).pop().context("a prefill worker")?;
    let handoffs = sender.metrics()?.sum("baton_transfer_seconds_count", &format!("transport=\"{transport}\""));
    ensure!(handoffs as usize == prompts().len(), "{handoffs} handoffs over {transport}");
    cluster.stop()?;
    Ok(answers)
}

fn ids(answers: &[Answer]) -> Vec<Vec<u32>> {
    answers.iter().map(|answer| answer.iter().map(|(id, _)| *id).collect()).collect()
}

/// Two ranks on both sides: to the bit what one process with two ranks says. Two on one side: the first token is to the bit what the
/// prefill worker's degree gives, all tokens are those of either degree, and transports agree to the bit.
#[test]
fn workers_of_any_degree_hand_over_to_each_other() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    tiny::config("llama-gqa-odd-vocab")?.write(directory.path())?;
    let model = Model::open(directory.path())?;
    let at = [local(&model, 1)?, local(&model, 2)?];
    ensure!(at[0] != at[1], "two degrees that round alike would show nothing");
    ensure!(ids(&at[0]) == ids(&at[1]), "prompts whose tokens are no near ties");
    ensure!(answers(directory.path(), (2, 2), "shm")? == at[1], "two ranks split and in one process differ"); // I1
    for (prefill, decode) in [(2, 1), (1, 2)] {
        let [shm, tcp] = ["shm", "tcp"].map(|transport| answers(directory.path(), (prefill, decode), transport));
        let (shm, tcp) = (shm?, tcp?);
        ensure!(shm == tcp, "{prefill} -> {decode}: transports differ"); // I1
        ensure!(ids(&shm) == ids(&at[0]), "{prefill} -> {decode}: {:?} != {:?}", ids(&shm), ids(&at[0]));
        let first = |answers: &[Answer]| answers.iter().map(|answer| answer.first().copied()).collect::<Vec<_>>();
        ensure!(first(&shm) == first(&at[prefill as usize - 1]), "{prefill} -> {decode}: the first tokens");
    }
    Ok(())
}

/// A degree that the model does not allow is told with what would fit, at the start.
#[test]
fn a_worker_that_cannot_split_its_model_says_why() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    tiny::config("llama-gqa-odd-vocab")?.write(directory.path())?;
    let model = directory.path().to_str().context("a path in UTF-8")?;
    for (flags, said) in [
        (["--tp", "3"], "tp is 3; it must be a divisor of the model's 2 KV heads"),
        (["--tp", "0"], "tp is 0; it must be at least 1"),
    ] {
        let mut command = baton_tests::binary::command()?;
        let output = command.args(["decode", "--model", model, "--admin", "127.0.0.1:0"]).args(flags).output()?;
        let log = String::from_utf8_lossy(&output.stderr);
        ensure!(!output.status.success() && log.contains(said), "{}: {log}", output.status);
    }
    Ok(())
}
