//! The prefix cache through a whole cluster: what is reused is told to the token, travels no more, and changes no answer.

use std::collections::BTreeSet;

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_proto::v1;
use baton_tests::cluster::client::{Answer, prompt, sampled};
use baton_tests::cluster::http;
use baton_tests::cluster::models;
use baton_tests::cluster::{Cluster, ClusterOptions, wait};
use rustix::process::Signal;
use serde_json::{Value, json};

/// Prompt tokens; blocks have 16.
const PROMPT: usize = 100;

fn ask(cluster: &Cluster, tokens: &[u32], salt: &str) -> anyhow::Result<(Answer, u32)> {
    let request = v1::GenerateRequest { cache_salt: salt.to_owned(), ..sampled(tokens, 20, 5) };
    let client = cluster.client()?;
    let answer = cluster.block_on(client.ask(request))?;
    let usage = answer.finish.as_ref().and_then(|f| f.usage).context("usage")?;
    ensure!(usage.prompt_tokens as usize == tokens.len(), "{usage:?}");
    Ok((answer, usage.cached_tokens))
}

fn metric(cluster: &Cluster, role: Role, name: &str) -> anyhow::Result<f64> {
    let worker = cluster.workers_of(role).pop().context("a worker")?;
    Ok(worker.metrics()?.sum(name, ""))
}

/// Bytes that all prefill workers have sent, once nothing is on its way.
fn transferred(cluster: &Cluster) -> anyhow::Result<f64> {
    cluster.wait_idle()?;
    let workers = cluster.workers_of(Role::Prefill);
    workers.iter().map(|worker| Ok(worker.metrics()?.sum("baton_transfer_bytes_total", ""))).sum()
}

/// What each request reuses, whichever the route.
fn reuse(options: ClusterOptions, local: u32) -> anyhow::Result<()> {
    let split = !options.aggregated;
    let env = vec![("BATON_LOCAL_PREFILL".to_owned(), local.to_string())];
    let options = ClusterOptions { env, ..options };
    // The fork lacks 30 tokens.
    let handed_over = split && local < 30;
    let cluster = Cluster::start(options)?;
    let sent = || if split { metric(&cluster, Role::Prefill, "baton_transfer_bytes_total") } else { Ok(0.0) };
    let first = prompt(PROMPT, 1);
    let (answer, cached) = ask(&cluster, &first, "")?;
    ensure!(cached == 0, "{cached} cached tokens before anything was asked");
    let whole = sent()?;
    // I1: the last token is computed for its logits, all others are there.
    let (again, cached) = ask(&cluster, &first, "")?;
    ensure!(cached as usize == PROMPT - 1, "{cached} of {PROMPT} tokens cached");
    ensure!(again.ids == answer.ids, "a prefix hit changed the answer: {:?}, not {:?}", again.ids, answer.ids);
    ensure!(sent()? == whole, "what the decode worker has travelled again");
    // A fork inside a block: 4 whole blocks and 6 tokens of the fifth.
    let mut fork = first.clone();
    fork[70] = (fork[70] + 1) % 256;
    let (_, cached) = ask(&cluster, &fork, "")?;
    ensure!(cached == 70, "{cached} cached tokens of a fork after 70");
    let rest = sent()? - whole;
    // Of 7 blocks the decode worker has 4; a peer writes whole ones.
    ensure!(rest * 7.0 == if handed_over { whole * 3.0 } else { 0.0 }, "{rest} bytes travelled where {whole} had");
    // Another tenant's cache is empty, and its answer the same.
    let (apart, cached) = ask(&cluster, &first, "tenant")?;
    ensure!(cached == 0, "{cached} tokens of another tenant's prompt were cached");
    ensure!(apart.ids == answer.ids, "a salt changed the answer");
    let hits = |role| metric(&cluster, role, "baton_prefix_hit_tokens_total");
    // Where it is computed, to the token; where it is received, in blocks.
    let counted = hits(Role::Decode)?;
    ensure!(counted as usize == PROMPT - 1 + if handed_over { 64 } else { 70 }, "{counted} hit tokens counted");
    ensure!(!handed_over || hits(Role::Prefill)? == 70.0, "the prefill worker's are others");
    cluster.wait_idle()?;
    cluster.stop()
}

#[test]
fn what_was_asked_before_is_not_computed_again() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let options = || ClusterOptions::new(model.path());
    reuse(ClusterOptions { aggregated: true, ..options() }, 64)?;
    for (transport, local) in [("shm", 64), ("tcp", 16)] {
        reuse(ClusterOptions { transport, ..options() }, local)?;
    }
    Ok(())
}

#[test]
fn without_a_prefix_cache_every_block_is_free_again() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let env = vec![("BATON_PREFIX_CACHE_BLOCKS".to_owned(), "0".to_owned())];
    let cluster = Cluster::start(ClusterOptions { env, ..ClusterOptions::new(model.path()) })?;
    for _ in 0..2 {
        let (_, cached) = ask(&cluster, &prompt(PROMPT, 1), "")?;
        ensure!(cached == 0, "{cached} cached tokens without a cache");
    }
    cluster.wait_idle()?;
    for worker in cluster.workers() {
        let blocks = worker.blocks();
        ensure!(blocks.free == blocks.total, "{blocks:?}"); // I6
    }
    cluster.stop()
}

/// What HTTP clients are told, in one body and at the end of a stream.
#[test]
fn http_tells_what_was_cached() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let cluster = Cluster::start(ClusterOptions::new(model.path()))?;
    let mut body = json!({"prompt": prompt(PROMPT, 1), "max_tokens": 5, "temperature": 0, "ignore_eos": true});
    let mut cached = |stream: bool| -> anyhow::Result<u64> {
        body["stream"] = stream.into();
        body["stream_options"] = if stream { json!({"include_usage": true}) } else { Value::Null };
        let (status, answer) = http::post(cluster.http(), "/v1/completions", &body.to_string())?;
        ensure!(status == 200, "{status} {answer}");
        let last = match stream {
            true => answer
                .lines()
                .filter_map(|line| line.strip_prefix("data: {"))
                .next_back()
                .map(|rest| format!("{{{rest}")),
            false => Some(answer),
        };
        let answer: Value = serde_json::from_str(&last.context("an event")?)?;
        let usage = &answer["usage"];
        ensure!(usage["prompt_tokens"] == PROMPT && usage["completion_tokens"] == 5, "{answer}");
        usage["prompt_tokens_details"]["cached_tokens"].as_u64().with_context(|| format!("no cached_tokens: {answer}"))
    };
    let told = [cached(false)?, cached(false)?, cached(true)?];
    ensure!(told == [0, PROMPT as u64 - 1, PROMPT as u64 - 1], "{told:?} cached tokens");
    cluster.wait_idle()?;
    cluster.stop()
}

/// The choices of one request: their prompt is computed once and handed over once, wherever there are other workers.
#[test]
fn choices_of_one_prompt_share_one_handoff() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let asked = |cluster: &Cluster, n: u64, salt: &str| -> anyhow::Result<(Vec<Value>, Value)> {
        let body = json!({"prompt": prompt(PROMPT, 1), "max_tokens": 20, "temperature": 1, "seed": 7, "ignore_eos": true,
            "n": n, "cache_salt": salt, "return_token_ids": true});
        let (status, answer) = http::post(cluster.http(), "/v1/completions", &body.to_string())?;
        ensure!(status == 200, "{status} {answer}");
        let mut answer: Value = serde_json::from_str(&answer)?;
        let choices = answer["choices"].as_array_mut().context("choices")?;
        Ok((choices.iter_mut().map(|choice| choice["token_ids"].take()).collect(), answer["usage"].take()))
    };
    // By predicted time, a model so small is handed over again sooner than an answer waits for three others.
    let env = vec![("BATON_PLACEMENT".to_owned(), "least-loaded".to_owned())];
    let cluster = Cluster::start(ClusterOptions { prefill: 2, decode: 2, env, ..ClusterOptions::new(model.path()) })?;
    let sent = || transferred(&cluster);
    let (alone, _) = asked(&cluster, 1, "one")?;
    let one = sent()?;
    let (choices, usage) = asked(&cluster, 4, "four")?;
    let four = sent()? - one;
    ensure!(one > 0.0 && four == one, "{four} bytes travelled for four choices where one takes {one}");
    ensure!(usage["prompt_tokens"] == PROMPT && usage["completion_tokens"] == 80, "{usage}");
    ensure!(usage["prompt_tokens_details"]["cached_tokens"] == 0, "it was computed for this request: {usage}");
    let (_, usage) = asked(&cluster, 4, "four")?;
    ensure!(usage["prompt_tokens_details"]["cached_tokens"] == PROMPT - 1, "{usage}");
    cluster.stop()?;
    // I1
    let cluster = Cluster::start(ClusterOptions { aggregated: true, ..ClusterOptions::new(model.path()) })?;
    let (want, _) = asked(&cluster, 4, "")?;
    ensure!(choices == want && alone == want[..1], "{choices:?}, where one worker says {want:?}");
    ensure!(want.windows(2).all(|pair| pair[0] != pair[1]), "the choices are too alike to tell them apart: {want:?}");
    cluster.stop()
}

/// A follow-up question begins with the answer before it, which only the decode worker has seen being written.
#[test]
fn a_conversation_goes_on_from_its_answer() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let mut said = Vec::new();
    for split in [false, true] {
        // One prefill worker: a second one, with none of it, might fetch the last turn's prefix from the decode worker.
        let prefill = if split { 1 } else { 2 };
        let options = ClusterOptions { prefill, decode: 2, aggregated: !split, ..ClusterOptions::new(model.path()) };
        let options = ClusterOptions { env: vec![("BATON_LOCAL_PREFILL".to_owned(), "64".to_owned())], ..options };
        let cluster = Cluster::start(options)?;
        let sent = || if split { transferred(&cluster) } else { Ok(0.0) };
        let mut turns = prompt(80, 3);
        let mut answers = Vec::new();
        // New tokens of each turn, and what of the prompt is there where it is computed, on one worker and on two. The answer's
        // last token never was; the last turn is too long for the decode worker, and the prefill worker has only the first.
        let mut travelled = Vec::new();
        for (new, cached) in [(0, [0, 0]), (2, [99, 99]), (63, [121, 121]), (70, [204, 80])] {
            turns.extend(prompt(new, 4 + new as u64));
            let before = sent()?;
            let (answer, found) = ask(&cluster, &turns, "")?;
            let want = cached[usize::from(split)];
            ensure!(found == want, "{found} tokens of {} cached, not {want}", turns.len());
            travelled.push(sent()? - before);
            turns.extend(&answer.ids);
            answers.push(answer.ids);
        }
        // Of the last prompt's 18 blocks 12 are here already.
        let want = [5.0, 0.0, 0.0, 6.0].map(|blocks| blocks * travelled[0] / 5.0);
        ensure!(travelled == want && split == (travelled[0] > 0.0), "{travelled:?} bytes travelled, not {want:?}");
        said.push(answers);
        cluster.stop()?;
    }
    ensure!(said[0] == said[1], "I1: {said:?}");
    Ok(())
}

/// A router that has just started has seen no prompt. The workers tell it what they hold.
#[test]
fn a_new_router_places_prompts_where_their_kv_is() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let env = vec![("BATON_LOCAL_PREFILL".to_owned(), "64".to_owned())];
    let cluster = Cluster::start(ClusterOptions { decode: 3, env, ..ClusterOptions::new(model.path()) })?;
    // One prompt on each of the decode workers, in turn.
    let prompts: Vec<Vec<u32>> = (0..3).map(|seed| prompt(PROMPT, 50 + seed)).collect();
    for prompt in &prompts {
        ensure!(ask(&cluster, prompt, "")?.1 == 0);
    }
    let known = |blocks: f64| {
        wait(|| cluster.router_metrics().is_ok_and(|m| m.sum("baton_kv_index_blocks", "") == blocks).then_some(()))
    };
    // Six full blocks of each prompt, and the one that the answer fills.
    known(21.0)?;
    let old = cluster.pid("router")?;
    cluster.signal(old, Signal::KILL)?;
    wait(|| cluster.pids("router").first().filter(|pid| **pid != old).copied())?;
    known(21.0)?;
    for prompt in prompts.iter().rev() {
        let (_, cached) = ask(&cluster, prompt, "")?;
        ensure!(cached as usize == PROMPT - 1, "{cached} of {PROMPT} tokens cached");
    }
    cluster.wait_idle()?;
    cluster.stop()
}

/// Requests that begin alike and come at once: answers are those of each alone, whatever was shared meanwhile (I1).
#[test]
fn those_who_come_at_once_share_and_say_the_same() -> anyhow::Result<()> {
    let model = models::tiny()?;
    let cluster = Cluster::start(ClusterOptions::new(model.path()))?;
    let client = cluster.client()?;
    let begin = prompt(90, 7);
    let prompts: Vec<Vec<u32>> = (0..12).map(|i| [begin.clone(), prompt(5 + i % 3, 8 + i as u64)].concat()).collect();
    let together = cluster.block_on(async {
        let asked = prompts.iter().map(|p| client.ask(sampled(p.as_slice(), 16, 9)));
        futures::future::try_join_all(asked).await
    })?;
    for (prompt, shared) in prompts.iter().zip(&together) {
        let (request, salt) =
            (sampled(prompt.as_slice(), 16, 9), format!("alone {prompt:?}").chars().take(200).collect());
        let alone = cluster.block_on(client.ask(v1::GenerateRequest { cache_salt: salt, ..request }))?;
        ensure!(alone.ids == shared.ids, "{:?} shared, {:?} alone", shared.ids, alone.ids);
    }
    let different: BTreeSet<&[u32]> = together.iter().map(|a| a.ids.as_slice()).collect();
    ensure!(different.len() == prompts.len(), "the prompts' answers are too alike to tell them apart");
    cluster.wait_idle()?;
    cluster.stop()
}
