//! `baton kv`, `baton status --kv` and `baton warm`, with real processes.
#![allow(clippy::unwrap_used)]

use std::path::Path;

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_tests::binary;
use baton_tests::cluster::client::{prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, models, wait};
use serde_json::Value;

fn start(model: &Path, disk: &Path) -> anyhow::Result<Cluster> {
    let host = format!("{}B", models::block_bytes(model)? * 600);
    let disk = disk.display().to_string();
    let args = ["--kv-host", &host, "--kv-disk", &disk, "--kv-disk-size", "64MiB"];
    let args = args.into_iter().map(str::to_owned).collect();
    // Workers take it from the environment: KV that asks to be kept is evicted last.
    let env = vec![("BATON_EVICTION".to_owned(), "priority".to_owned())];
    Cluster::start(ClusterOptions { aggregated: true, args, env, ..ClusterOptions::new(model) })
}

fn kv(words: &[&str]) -> anyhow::Result<Value> {
    Ok(serde_json::from_str(&binary::output(&[&["kv"], words, &["--json"]].concat())?)?)
}

/// An object store is listed, checked and freed by its URL.
#[test]
fn an_object_store_is_listed_checked_and_freed() -> anyhow::Result<()> {
    let (model, folder) = (models::slow()?, tempfile::tempdir()?);
    let (host, url) =
        (format!("{}B", models::block_bytes(model.path())? * 600), format!("file://{}", folder.path().display()));
    let args = ["--kv-host", &host, "--kv-object", &url, "--kv-object-size", "64MiB"].map(str::to_owned).to_vec();
    let cluster = Cluster::start(ClusterOptions { aggregated: true, args, ..ClusterOptions::new(model.path()) })?;
    cluster.block_on(cluster.client()?.ask(sampled(prompt(330, 1), 4, 1)))?;
    let listed = wait(|| {
        let listed = kv(&["ls", &url]).ok()?;
        (listed["objects"][0]["blocks"].as_u64()? >= 20 && listed["objects"][0]["about"].is_object()).then_some(listed)
    })?;
    cluster.stop()?;
    let (kept, tokens) = (&listed["objects"][0], 16 * listed["objects"][0]["blocks"].as_u64().context("blocks")?);
    ensure!(kept["tokens"] == tokens && kept["about"]["backend"].is_string(), "{listed:#}");
    let checked = kv(&["stat", &url])?;
    ensure!(
        checked["objects"][0]["whole"].as_u64() >= Some(20) && checked["objects"][0]["damaged"] == 0,
        "{checked:#}"
    );
    let shown = binary::output(&["kv", "stat", &url])?;
    ensure!(shown.contains("blocks of 16 tokens") && shown.contains(" whole, 0 damaged"), "{shown}");
    let ours = kept["identity"].as_str().context("identity")?;
    let gc = |words: &[&str]| kv(&[&["gc", &url], words].concat());
    ensure!(gc(&[]).unwrap_err().to_string().contains("--keep"), "nothing is freed by mistake");
    ensure!(gc(&["--keep", ours, "--yes"])?["bytes"] == 0);
    let other = format!("{:016x}-{:016x}", 1, 2);
    ensure!(gc(&["--keep", &other])?["done"] == false && kv(&["ls", &url]).is_ok(), "only said");
    ensure!(gc(&["--keep", &other, "--yes"])?["bytes"].as_u64() > Some(0));
    let nothing = kv(&["ls", &url]).unwrap_err().to_string();
    ensure!(nothing.contains("there is no KV in"), "{nothing}");
    Ok(())
}

#[test]
fn prompts_are_warmed_seen_on_disk_checked_and_freed() -> anyhow::Result<()> {
    let (model, folder, work) = (models::slow()?, tempfile::tempdir()?, tempfile::tempdir()?);
    let cluster = start(model.path(), folder.path())?;
    let prompts = work.path().join("prompts.jsonl");
    let long = |word: &str| format!("{word} ").repeat(120);
    let lines = [
        serde_json::json!(long("alpha")).to_string(),
        serde_json::json!({"prompt": long("beta"), "keep_seconds": 60}).to_string(),
    ];
    std::fs::write(&prompts, lines.join("\n"))?;
    let (file, router) = (prompts.display().to_string(), format!("http://{}", cluster.grpc()));
    let warm = || binary::output(&["warm", &file, "--router", &router, "--concurrency", "1"]);
    let first = warm()?;
    ensure!(first.contains("2 prompts warm") && first.contains(" 0 cached"), "{first}");
    cluster.wait_idle()?;
    let again = warm()?;
    ensure!(!again.contains(" 0 cached"), "{again}");
    // A line that the cluster refuses is named, and the others are warmed.
    std::fs::write(&prompts, [&lines[0], "{\"prompt\": \"x\", \"keep_seconds\": 99999999}"].join("\n"))?;
    let refused = warm().unwrap_err().to_string();
    ensure!(refused.contains("line 2") && refused.contains("cache_keep_seconds"), "{refused}");
    let said = binary::output(&["status", "--kv", "--json", "--registry", cluster.registry()])?;
    let said: Value = serde_json::from_str(&said)?;
    let tiers = said["workers"][0]["tiers"].as_array().context("tiers")?.clone();
    let names: Vec<&str> = tiers.iter().filter_map(|tier| tier["tier"].as_str()).collect();
    ensure!(names == ["pool", "host", "disk"], "{said:#}");
    for tier in &tiers {
        ensure!(
            tier["limit_bytes"].as_u64() > Some(0) && tier["bytes"].as_u64() <= tier["limit_bytes"].as_u64(),
            "{tier}"
        );
    }
    ensure!(tiers[1]["blocks"].as_u64() > Some(0), "{said:#}");
    let shown = binary::output(&["status", "--kv", "--registry", cluster.registry()])?;
    ensure!(shown.contains("HIT TOKENS") && shown.contains(" disk "), "{shown}");
    let directory = folder.path().display().to_string();
    // A worker has the folder.
    let worker = cluster.wait_for_worker(Role::Decode, |_| true)?;
    let busy = binary::output(&["kv", "gc", &directory, "--yes"]).unwrap_err().to_string();
    ensure!(busy.contains(&worker.pid.to_string()), "{busy}");
    cluster.stop()?;
    let listed = kv(&["ls", &directory])?;
    let blocks = listed["files"][0]["blocks"].as_u64().context("blocks")?;
    ensure!(blocks >= 10, "{listed:#}");
    let stat = kv(&["stat", &directory])?;
    ensure!(stat["files"][0]["damaged"] == 0 && stat["files"][0]["whole"].as_u64() >= Some(blocks), "{stat:#}");
    ensure!(kv(&["gc", &directory, "--yes"])?["files"] == serde_json::json!([]), "all is of use");
    let nobody = "0000000000000001-0000000000000002";
    ensure!(kv(&["gc", &directory, "--keep", nobody])?["freed"] == false);
    ensure!(kv(&["ls", &directory])?["files"][0]["blocks"] == blocks, "nothing was changed");
    ensure!(kv(&["gc", &directory, "--keep", nobody, "--yes"])?["freed"] == true);
    let empty = binary::output(&["kv", "ls", &directory]).unwrap_err().to_string();
    ensure!(empty.contains("there is no KV in"), "{empty}");
    Ok(())
}
