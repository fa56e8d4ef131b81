//! Decode blocks that are reserved late: a queue of prompts holds none of them, and every answer is the same (I1).
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use anyhow::ensure;
use baton_cluster::Role;
use baton_tests::cluster::client::{apart, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, models, status};
use tempfile::TempDir;

/// Prompts at a time, and the blocks of one with its answer.
const PROMPTS: u64 = 10;
const BLOCKS: u32 = 320 / 16;

/// The answers to many prompts at once, and how many of the decode worker's blocks were lent at most. `late`: how long a prompt must have to
/// wait for its blocks to be reserved late.
fn lent(model: &TempDir, late: &str) -> anyhow::Result<(Vec<Vec<u32>>, u32)> {
    let env = [("BATON_LATE_RESERVATION", late), ("BATON_RESERVE_AHEAD", "320"), ("BATON_PLACEMENT", "round-robin")];
    let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
    let cluster = Cluster::start(ClusterOptions { env, ..ClusterOptions::new(model) })?;
    let client = cluster.client()?;
    let member = cluster.wait_for_worker(Role::Decode, |_| true)?.member;
    let (most, over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let (seen, done) = (most.clone(), over.clone());
    let watch = cluster.spawn(async move {
        while !done.load(Ordering::Relaxed) {
            if let Some(blocks) = status(&member).await.ok().and_then(|status| status.blocks) {
                seen.fetch_max(blocks.lent, Ordering::Relaxed);
            }
        }
    });
    let ask = |seed| {
        let client = client.clone();
        cluster.spawn(async move { client.ask(apart(sampled(prompt(310, seed), 4, seed))).await })
    };
    let asked: Vec<_> = (0..PROMPTS).map(ask).collect();
    let mut answers = Vec::new();
    for answer in asked {
        answers.push(cluster.block_on(answer)??.ids);
    }
    over.store(true, Ordering::Relaxed);
    cluster.block_on(watch)?;
    cluster.wait_idle()?;
    cluster.stop()?;
    Ok((answers, most.load(Ordering::Relaxed)))
}

#[test]
fn a_queue_of_prompts_holds_no_decode_blocks() -> anyhow::Result<()> {
    let model = models::slow()?;
    let (want, early) = lent(&model, "1h")?;
    ensure!(early > BLOCKS * PROMPTS as u32 / 2, "{early} blocks were lent when all prompts waited");
    let (got, late) = lent(&model, "0s")?;
    ensure!(got == want, "I1: {got:?} instead of {want:?}");
    ensure!((1..=BLOCKS * 4).contains(&late), "{late} blocks were lent, of {BLOCKS} for each prompt");
    Ok(())
}
