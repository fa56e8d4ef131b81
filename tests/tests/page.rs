//! The live page tells what workers and requests really do, and nothing of any prompt.
#![allow(clippy::unwrap_used)]

use std::process::Command;

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::binary;
use baton_tests::cluster::client::{apart, prompt, sampled};
use baton_tests::cluster::http::{first_event, get, post};
use baton_tests::cluster::pool::Pool;
use baton_tests::cluster::{Cluster, ClusterOptions, Worker};
use half::f16;
use serde_json::{Value, json};

const SECRET: &str = "the swallow flies at dusk over the harbour wall again";

/// A text completion, and its request's id.
fn complete(cluster: &Cluster, text: &str) -> anyhow::Result<String> {
    let body = json!({"model": "random:tiny", "prompt": text, "max_tokens": 6, "ignore_eos": true}).to_string();
    let (status, answer) = post(cluster.http(), "/v1/completions", &body)?;
    ensure!(status == 200, "{status}: {answer}");
    let answer: Value = serde_json::from_str(&answer)?;
    Ok(answer["id"].as_str().context("an id")?.to_owned())
}

fn json_of(cluster: &Cluster, path: &str) -> anyhow::Result<Value> {
    let (status, body) = get(cluster.admin(), path)?;
    ensure!(status == 200, "{path}: {status} {body}");
    Ok(serde_json::from_str(&body)?)
}

#[test]
fn the_page_tells_what_the_cluster_does() -> anyhow::Result<()> {
    let cluster = Cluster::start(ClusterOptions::new("random:tiny"))?;
    ensure!(
        cluster.printed().contains(&format!("The cluster live: http://{}/", cluster.admin())),
        "{}",
        cluster.printed()
    );
    let (status, page) = get(cluster.admin(), "/")?;
    ensure!(status == 200 && page.starts_with("<!doctype html>"), "{status}: {page}");
    // Every file that the page names is there.
    for file in page.split(['"', '\'']).filter(|word| word.starts_with("/page/")) {
        ensure!(get(cluster.admin(), file)?.0 == 200, "{file}");
    }
    let id = complete(&cluster, SECRET)?;
    cluster.block_on(cluster.client()?.ask(apart(sampled(prompt(200, 1), 20, 1))))?;
    cluster.wait_idle()?;

    let now = first_event(cluster.admin(), "/page/events")?;
    let told = now["workers"].as_array().context("workers")?;
    ensure!(told.len() == 2, "{told:?}");
    for role in [Role::Prefill, Role::Decode] {
        let worker = cluster.wait_for_worker(role, |_| true)?;
        let told = told.iter().find(|told| told["id"] == worker.member.id.to_string()).context("the worker")?;
        let blocks = worker.status.blocks.context("blocks")?;
        ensure!(told["blocks"]["cached"] == blocks.cached && blocks.cached > 0, "{told}, but {blocks:?}");
        ensure!(told["blocks"]["total"] == blocks.total && told["role"] == role.as_str(), "{told}, but {blocks:?}");
    }
    ensure!(now["bound"]["by"] == "nothing", "{}", now["bound"]);
    ensure!(now["stats"]["ended"] == 2 && now["stats"]["ttft_s"]["n"] == 2, "{}", now["stats"]);

    let request = json_of(&cluster, &format!("/page/requests/{id}"))?;
    let choice = &request["choices"][0];
    ensure!(choice["tokens"] == 6 && choice["token_us"].as_array().map(Vec::len) == Some(6), "{choice}");
    ensure!(choice["outcome"] == "ok" && choice["prefill"].is_string(), "{choice}");
    // Both workers say that the KV is verified; the decode worker says it before it goes on.
    let marks = choice["marks"].as_array().context("marks")?;
    let verified: Vec<_> = marks.iter().filter(|mark| mark["what"] == "KV verified").collect();
    ensure!(verified.len() == 1 && verified[0]["at_us"].as_u64() <= choice["token_us"][1].as_u64(), "{choice}");
    // 256 bytes of KV a token, in whole blocks.
    let tokens = choice["prompt_tokens"].as_u64().context("tokens")?;
    ensure!(choice["handoff"]["bytes"] == tokens.div_ceil(16) * 16 * 256, "{choice}");
    ensure!(request["placements"][0]["decode"] == choice["decode"], "{request}");
    ensure!(now["handoffs"].as_array().is_some_and(|all| all.iter().any(|one| one["request"] == id.as_str())), "{now}");

    let shown = format!("{now}{request}");
    ensure!(!shown.contains("swallow") && !shown.contains("harbour"), "a prompt is shown: {shown}");
    ensure!(get(cluster.admin(), "/page/requests/none")?.0 == 404);
    ensure!(get(cluster.admin(), "/page/..%2f..%2fCargo.toml")?.0 == 404);
    cluster.stop()
}

#[test]
fn prompts_are_shown_by_flag() -> anyhow::Result<()> {
    let env = vec![("BATON_ADMIN_PROMPTS".to_owned(), "true".to_owned())];
    let cluster = Cluster::start(ClusterOptions { env, ..ClusterOptions::new("random:tiny") })?;
    let request = json_of(&cluster, &format!("/page/requests/{}", complete(&cluster, SECRET)?))?;
    ensure!(request["choices"][0]["prompt"].as_str().is_some_and(|shown| shown.contains(SECRET)), "{request}");
    cluster.stop()
}

/// The calculator, the command, and what a worker has allocated.
#[test]
fn the_calculator_says_what_the_command_says_and_workers_allocate() -> anyhow::Result<()> {
    let cluster = Cluster::start(ClusterOptions::new("random:tiny"))?;
    let command = |words: &[&str]| -> anyhow::Result<Value> {
        let mut command: Command = binary::command()?;
        let output = command.args(["model", "estimate", "--json"]).args(words).output()?;
        ensure!(output.status.success(), "{output:?}");
        let mut told: Value = serde_json::from_slice(&output.stdout)?;
        told.as_object_mut().context("an object")?.remove("stored_weight_bytes");
        Ok(told)
    };
    let page = |asked: Value| -> anyhow::Result<Value> {
        let (status, body) = post(cluster.admin(), "/page/estimate", &asked.to_string())?;
        ensure!(status == 200, "{status}: {body}");
        Ok(serde_json::from_str(&body)?)
    };
    let gib80: u64 = 80 << 30;
    for shape in ["tiny", "gemma-3-270m", "llama-3.1-8b", "llama-3.1-70b"] {
        for kv_type in ["f16", "q8", "int4"] {
            let said =
                command(&[shape, "--kv-type", kv_type, "--tp", "2", "--gpu-memory", "80GiB", "--context", "1024"])?;
            let asked = json!({"model": shape, "kv_type": kv_type, "tp": 2, "gpu_memory": gib80, "context": 1024});
            let told = page(asked)?;
            ensure!(told == said, "{shape} {kv_type}: {told} on the page, {said} by the command");
        }
    }
    // The workers of these tests have pools of 64 MiB.
    let told = page(json!({"model": "random:tiny", "kv_memory": 64 << 20}))?;
    let blocks = cluster.wait_for_worker(Role::Decode, |_| true)?.status.blocks.context("blocks")?;
    ensure!(told["blocks"] == blocks.total, "{told}, but {blocks:?}");
    for (asked, wrong) in [
        (json!({"model": "/etc/passwd"}), "model: "),
        (json!({"model": "tiny", "tp": 3}), "tp: is 3"),
        (json!({"model": "tiny", "tokens": 3}), "unknown field `tokens`"),
        (json!({"config": {"model_type": "mamba"}}), "mamba"),
    ] {
        let (status, body) = post(cluster.admin(), "/page/estimate", &asked.to_string())?;
        ensure!((400..500).contains(&status) && body.contains(wrong), "{asked}: {status} {body}");
    }
    cluster.stop()
}

// `random:tiny` in blocks of 16 tokens, two bytes an element.
const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 16;
const BLOCK: usize = 16;

/// K and V of one head out of a worker's own memory, block by block: `[K, V]`, each with `DIM` elements for each token.
fn in_pool(worker: &Worker, layer: usize, head: usize, blocks: &[usize]) -> anyhow::Result<[Vec<f32>; 2]> {
    let all = worker.status.blocks.context("blocks")?.total as usize;
    let pool = Pool::of(worker)?.bytes()?;
    let (slice, bytes_of_block) = (BLOCK * DIM * 2, 2 * HEADS * BLOCK * DIM * 2);
    ensure!(pool.len() == LAYERS * all * bytes_of_block);
    let mut told = [Vec::new(), Vec::new()];
    for block in blocks {
        for (plane, numbers) in told.iter_mut().enumerate() {
            let at = (layer * all + block) * bytes_of_block + (plane * HEADS + head) * slice;
            numbers.extend(
                pool[at..at + slice].chunks_exact(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]]).to_f32()),
            );
        }
    }
    Ok(told)
}

/// What the walk-through shows is in the workers' pools, bit for bit, in the blocks that it names.
#[test]
fn the_walk_through_shows_what_is_in_the_pools() -> anyhow::Result<()> {
    let cluster = Cluster::start(ClusterOptions::new("random:tiny"))?;
    let tour = |wanted: Value| -> anyhow::Result<(u16, Value)> {
        let (status, body) = post(cluster.admin(), "/page/tour", &wanted.to_string())?;
        Ok((status, serde_json::from_str(&body).context(body)?))
    };
    let mut requests = Vec::new();
    for (layer, head) in [(0, 0), (1, 1)] {
        let (status, told) = tour(json!({"layer": layer, "head": head}))?;
        ensure!(status == 200 && told["head_dim"] == DIM && told["block_size"] == BLOCK, "{status}: {told}");
        requests.push(told["first"]["request"].clone());
        for (at, role, tokens) in
            [("prefill", Role::Prefill, 48), ("decode", Role::Decode, 64), ("after", Role::Decode, 48)]
        {
            let worker = cluster.wait_for_worker(role, |_| true)?;
            let kept = &told[at];
            ensure!(kept["worker"] == worker.member.id.to_string(), "{at}: {kept}");
            let blocks: Vec<usize> = serde_json::from_value(kept["blocks"].clone())?;
            ensure!(blocks.len() == tokens / BLOCK, "{at}: {blocks:?}");
            let [keys, values] = in_pool(&worker, layer, head, &blocks)?;
            let shown = |name: &str| serde_json::from_value::<Vec<f32>>(kept[name].clone());
            ensure!(keys.len() == tokens * DIM && keys.iter().any(|key| *key != 0.0));
            ensure!(shown("keys")? == keys && shown("values")? == values, "{at}, layer {layer}, head {head}");
        }
        let same = |of: &str, from: usize, to: usize| {
            Ok::<_, anyhow::Error>(told[of]["blocks"].as_array().context("blocks")?[from..to].to_vec())
        };
        ensure!(same("decode", 0, 2)? == same("after", 0, 2)? && same("decode", 2, 3)? != same("after", 2, 3)?);
        ensure!(told["first"]["cached"] == 0 && told["second"]["cached"] == 32, "{told}");
        ensure!(
            told["prefill"]["keys"].as_array().context("keys")?[..]
                == told["decode"]["keys"].as_array().context("keys")?[..48 * DIM]
        );
    }
    ensure!(requests[0] == requests[1], "both heads are of one recording");

    // One request's view has the same blocks.
    let request = json_of(&cluster, &format!("/page/requests/{}", requests[0].as_str().context("an id")?))?;
    let (status, told) = tour(json!({}))?;
    ensure!(status == 200 && told["layer"] == 0, "{status}");
    let blocks = &request["choices"][0]["blocks"];
    ensure!(blocks["prefill"]["blocks"] == told["prefill"]["blocks"], "{blocks}");
    let decode = told["decode"]["blocks"].as_array().context("blocks")?;
    ensure!(blocks["decode"]["blocks"].as_array().context("blocks")?[..] == decode[..3], "{blocks}, but {decode:?}");

    for (asked, status, wrong) in [
        (json!({"layer": 2}), 400, "layer is 2"),
        (json!({"head": 2}), 400, "kv_head is 2; the layer has 2"),
        (json!({"model": "none"}), 400, "none"),
        (json!({"row": 1}), 400, "unknown field `row`"),
    ] {
        let (got, told) = tour(asked.clone())?;
        ensure!(got == status && told["error"].to_string().contains(wrong), "{asked}: {got} {told}");
    }
    // What is not there is no reason to ask the model again.
    let (_, told) = tour(json!({}))?;
    ensure!(told["first"]["request"] == requests[0], "{}, not {}", told["first"]["request"], requests[0]);
    cluster.wait_idle()?;
    cluster.stop()
}
