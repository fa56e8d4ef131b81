//! Three hosts, as far as the network can tell: router, prefill and decode worker in a network namespace each, joined by a
//! bridge, or by a wire that is slow, lossy and now and then cut. KV must find its way over TCP, and the answer must be that of
//! one process.
#![allow(clippy::unwrap_used)]

mod bad;
mod far;
mod hosts;
mod wire;

use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, ensure};
use baton_cluster::{Role, View};
use baton_model_files::fetch;
use baton_tests::cluster::client::{Client, greedy, prompt};
use baton_tests::cluster::http::Metrics;
use baton_tests::cluster::{connect, models, status, wait, wait_all_free};
use baton_tests::local::{Local, Options};
use baton_types::SamplingParams;
use hosts::{Hosts, PREFILL, REGISTRY, ROUTER, address, three_hosts, three_pods};

/// What one process answers, greedily.
fn one_process(path: &Path, prompt: &[u32], tokens: u32) -> Vec<u32> {
    let params = SamplingParams { temperature: 0.0, max_tokens: tokens, ..SamplingParams::default() };
    let mut local = Local::open(path, Options::default()).unwrap();
    local.one(prompt, &params).unwrap().into_iter().map(|token| token.id).collect()
}

/// One test at a time: there is one set of addresses.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn three_hosts_answer_like_one_process() {
    answers_like_one_process(|model| three_hosts(model, None), "tcp");
}

/// Workers with a network namespace each, and a folder that both can write to.
#[test]
fn pods_of_one_node_hand_over_by_shared_memory() {
    answers_like_one_process(three_pods, "shm");
}

/// Asks a cluster, whose KV must go over this transport and no other.
fn answers_like_one_process(start: impl FnOnce(&Path) -> Option<Hosts>, transport: &str) {
    let _alone = alone();
    let path = fetch::resolve("smollm2", &fetch::default_cache().unwrap(), &fetch::ProgressBar::new()).unwrap();
    let Some(hosts) = start(&path) else { return };
    let (prompt, tokens) = (prompt(150, 1), 24);
    let want = one_process(&path, &prompt, tokens);
    let work = || {
        let answer = runtime()?.block_on(async {
            let client = Client::connect(address(ROUTER, 8001)).await?;
            let answer = client.ask(greedy(prompt, tokens)).await?;
            wait_all_free(REGISTRY).await?;
            anyhow::Ok(answer)
        })?;
        let metrics = Metrics::of(address(PREFILL, 9000))?;
        let over = metrics.sum("baton_transfer_bytes_total", &format!("transport=\"{transport}\""));
        Ok((answer.ids, over, metrics.sum("baton_transfer_bytes_total", "")))
    };
    let (ids, over, all) = hosts.visit(work).unwrap();
    assert_eq!(ids, want); // I1
    assert!(over > 0.0 && over == all, "{over} bytes of {all} went over {transport}");
    hosts.stop().unwrap();
}

#[test]
fn a_cable_pulled_mid_prompt_changes_no_answer() {
    let _alone = alone();
    let model = models::slow().unwrap();
    let Some(hosts) = three_hosts(model.path(), None) else { return };
    let (prompt, tokens) = (prompt(3000, 1), 20);
    let want = one_process(model.path(), &prompt, tokens);
    let cable = |state: &str| {
        let hub = format!("{}-hub", hosts.name);
        let status = Command::new("ip").args(["-n", &hub, "link", "set", "prefill", state]).status()?;
        ensure!(status.success(), "ip link set prefill {state}");
        anyhow::Ok(())
    };
    let work = || {
        let runtime = runtime()?;
        let mut views = runtime.block_on(async { anyhow::Ok(connect(REGISTRY).await?.watch()) })?;
        let both = |view: &Arc<View>| view.members.len() == 2;
        let view = runtime.block_on(views.wait_for(both))?.clone();
        let prefill = view.members.iter().find(|m| m.role == Role::Prefill).context("a prefill worker")?;
        let client = runtime.block_on(Client::connect(address(ROUTER, 8001)))?;
        let answering = runtime.block_on(client.start(greedy(prompt.clone(), tokens)))?;
        wait(|| runtime.block_on(status(prefill)).ok().filter(|s| s.running > 0))?;
        cable("down")?;
        // Nothing says that the worker is gone; its silence does (I5).
        let cut = runtime.block_on(answering.rest())?;
        let recoveries = Metrics::of(address(ROUTER, 9000))?.sum("baton_recoveries_total", "");
        cable("up")?;
        runtime.block_on(views.wait_for(both)).map(drop)?;
        runtime.block_on(wait_all_free(REGISTRY))?; // I6
        let whole = runtime.block_on(client.ask(greedy(prompt, tokens)))?;
        Ok((cut.ids, whole.ids, recoveries))
    };
    let (cut, whole, recoveries) = hosts.visit(work).unwrap();
    assert_eq!((cut, whole), (want.clone(), want));
    assert!(recoveries >= 1.0);
    hosts.stop().unwrap();
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
