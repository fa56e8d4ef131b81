//! A whole cluster whose workers have their KV pools in a device's memory: the kernels compiled for the host stand in for a GPU, and memory
//! that processes share for what GPUs share. From device to device, and between devices and the CPU, in processes of their own.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use baton_cluster::{Member, Role};
use baton_kernels::cuda::{HostDevice, Recorder};
use baton_runtime::{Bytes, Parsed};
use baton_tests::cluster::client::{Client, apart, prompt, sampled};
use baton_tests::cluster::http::Metrics;
use baton_tests::cluster::{HANG, status, wait, wait_all_free};
use baton_tests::{binary, tiny, ucx};
use baton_transfer::TransportChoice;
use baton_worker::{
    JoinConfig, KvConfig, PackTokens, Ready, TiersConfig, TransferConfig, WorkerConfig, WorkerError, load_on_devices,
    open_model,
};
use tokio::runtime::Runtime;

/// What a child of this program is told to be: a role, what it computes on and by how many ranks, and where.
const CHILD: &str = "BATON_TESTS_DEVICE_WORKER";

/// How long a device that stands still is waited for.
const STANDS_STILL: Duration = Duration::from_secs(2);

/// Not a test: what a [`Scene`] runs its workers as.
#[test]
fn child() -> anyhow::Result<()> {
    let Ok(told) = std::env::var(CHILD) else { return Ok(()) };
    let [role, on, transport, registry, model] = told.splitn(5, ' ').collect::<Vec<_>>()[..] else {
        panic!("told {told:?}")
    };
    let config = WorkerConfig {
        model: model.to_owned(),
        join: JoinConfig { registry: registry.to_owned(), ..JoinConfig::default() },
        transfers: TransferConfig {
            transport: Parsed(match transport {
                "tcp" => TransportChoice::Tcp,
                "ucx" => TransportChoice::Ucx,
                _ => TransportChoice::Auto,
            }),
            ucx_library: (transport == "ucx").then(|| ucx::library().map(Into::into)).flatten(),
            ..TransferConfig::default()
        },
        kv_memory: Some(Bytes::mib(2)),
        threads: Some(1),
        kv: KvConfig { tp: on.trim_start_matches(char::is_alphabetic).parse().unwrap_or(1), ..KvConfig::default() },
        local_prefill: 0,
        pack_tokens: PackTokens::Tokens(64),
        step_timeout: (on == "still").then_some(STANDS_STILL),
        tiers: TiersConfig {
            kv_host: Bytes::mib(if on.starts_with("stored") { 8 } else { 0 }),
            kv_disk: on.starts_with("stored").then(|| std::path::Path::new(model).join("kv")),
            kv_disk_size: Bytes::mib(64),
            ..TiersConfig::default()
        },
        ..WorkerConfig::default()
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let (gpu, still) = (!on.starts_with("cpu"), on == "still");
    let devices = (0..config.kv.tp).filter(|_| gpu).map_while(|_| HostDevice::for_tests());
    // As of a driver that names memory by no descriptors.
    let devices = devices.map(|device| if on == "legacy" { device.with_legacy_handles() } else { device }).collect();
    runtime.block_on(async {
        let load = move |config: &WorkerConfig| load(config, devices, still);
        match (role, gpu) {
            ("prefill", false) => baton_prefill_node::run(config).await,
            (_, false) => baton_decode_node::run(config).await,
            ("prefill", true) => baton_prefill_node::run_loaded(config, load).await,
            (_, true) => baton_decode_node::run_loaded(config, load).await,
        }
    })?;
    Ok(())
}

/// The worker's model on these devices, the first of which stands still after a few steps where it is to.
fn load(config: &WorkerConfig, devices: Vec<HostDevice>, still: bool) -> Result<Ready, WorkerError> {
    let (model, mut devices) = (open_model(config)?, devices.into_iter().peekable());
    if let Some(device) = devices.next_if(|_| still) {
        let device = Arc::new(Recorder::new(device));
        let ready = load_on_devices(config, &model, std::slice::from_ref(&device))?;
        device.stand_still_after(20);
        return Ok(ready);
    }
    load_on_devices(config, &model, &devices.map(Arc::new).collect::<Vec<_>>())
}

/// A router and workers, killed when it is dropped.
struct Scene {
    children: Vec<Child>,
    registry: String,
    client: Client,
    members: Vec<Member>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Scene {
    fn start(runtime: &Runtime, model: &str, workers: &[&str]) -> anyhow::Result<Scene> {
        // Free a moment ago, and asked for by nobody else.
        let free: Vec<_> = (0..3).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
        let [address, internal, admin] = [free[0].local_addr()?, free[1].local_addr()?, free[2].local_addr()?];
        drop(free);
        let (grpc, internal) = (address.to_string(), internal.to_string());
        let registry = format!("http://{internal}");
        let mut router = binary::command()?;
        router.args(["router", "--model", model, "--grpc", &grpc, "--internal", &internal]);
        // Short prompts are handed over, too.
        router.args(["--http", "127.0.0.1:0", "--admin", &admin.to_string(), "--local-prompt", "0"]);
        let mut children = vec![spawn(router)?];
        for worker in workers {
            let mut command = Command::new(std::env::current_exe()?);
            command.args(["--exact", "child", "--nocapture"]).env(CHILD, format!("{worker} {registry} {model}"));
            children.push(spawn(command)?);
        }
        let client = wait(|| runtime.block_on(Client::connect(address)).ok())?;
        let mut scene = Scene { children, registry, client, members: Vec::new() };
        scene.members = runtime.block_on(async {
            let mut views = baton_cluster::connect(&scene.registry, None).await?.watch();
            let all = views.wait_for(|view| !view.stale && view.members.len() == workers.len());
            anyhow::Ok(tokio::time::timeout(HANG, all).await.context("workers do not come")??.members.clone())
        })?;
        // The router looks for itself.
        let knows_all = |metrics: Metrics| metrics.sum("baton_cluster_members", "") == workers.len() as f64;
        wait(|| Metrics::of(admin).ok().filter(|metrics| knows_all(metrics.clone())).map(drop))?;
        Ok(scene)
    }

    /// What the prefill worker has opened the decode worker's pool by, and what that says of its pool.
    async fn opened_by(&self) -> anyhow::Result<(String, String)> {
        let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| self.members.iter().find(|m| m.role == role));
        let peers = status(prefill.context("a prefill worker")?).await?.peers;
        let opened = peers.iter().flat_map(|peer| &peer.paths).map(|path| path.opened_by.as_str()).collect();
        Ok((opened, status(decode.context("a decode worker")?).await?.pool_by))
    }

    /// Handoffs of the prefill worker, by what carried them; and why the others do not.
    async fn carried(&self) -> anyhow::Result<(BTreeMap<String, u64>, BTreeMap<String, String>)> {
        let prefill = self.members.iter().find(|member| member.role == Role::Prefill).context("a prefill worker")?;
        let peers = status(prefill).await?.peers;
        let paths = peers.iter().flat_map(|peer| &peer.paths);
        let carried = paths.clone().filter(|p| p.handoffs > 0).map(|p| (p.transport.clone(), p.handoffs));
        let unused = paths.map(|p| (p.transport.clone(), p.unused.clone()));
        Ok((carried.collect(), unused.collect()))
    }
}

fn spawn(mut command: Command) -> anyhow::Result<Child> {
    command.stdin(Stdio::null()).stdout(Stdio::null());
    baton_runtime::die_with_parent(&mut command);
    Ok(command.spawn()?)
}

/// Answers of a cluster of these workers, after which all blocks are free (I6).
async fn answers(scene: &Scene) -> anyhow::Result<Vec<Vec<u32>>> {
    let mut answers = Vec::new();
    for (seed, tokens) in (1..).zip([3, 40, 17, 90]) {
        let request = apart(sampled(prompt(tokens, seed), 6, seed));
        answers.push(scene.client.ask(request).await?.ids);
    }
    wait_all_free(&scene.registry).await?;
    Ok(answers)
}

const REQUESTS: u64 = 4;

/// A model and what answers of clusters are made with.
struct Stage {
    runtime: Runtime,
    directory: tempfile::TempDir,
}

/// Answers, handoffs by what carried them, and why the other paths did not.
type Told = (Vec<Vec<u32>>, (BTreeMap<String, u64>, BTreeMap<String, String>));

impl Stage {
    /// None where there are no kernels for the host.
    fn set() -> anyhow::Result<Option<Stage>> {
        let Some(_) = HostDevice::for_tests() else { return Ok(None) };
        let directory = tempfile::tempdir()?;
        tiny::config("llama-gqa-odd-vocab")?.write(directory.path())?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
        Ok(Some(Stage { runtime, directory }))
    }

    /// Of a cluster of these workers.
    fn go(&self, workers: &[&str]) -> anyhow::Result<Told> {
        let model = self.directory.path().to_str().context("a path in UTF-8")?;
        let scene = Scene::start(&self.runtime, model, workers)?;
        let answers = self.runtime.block_on(answers(&scene)).with_context(|| format!("{workers:?}"))?;
        let carried = match workers.len() {
            1 => Default::default(),
            _ => self.runtime.block_on(scene.carried())?,
        };
        Ok((answers, carried))
    }
}

/// Each answer's first token, which the prefill worker gives.
fn first(answers: &[Vec<u32>]) -> Vec<u32> {
    answers.iter().map(|ids| ids[0]).collect()
}

#[test]
fn kv_goes_between_devices_and_between_a_device_and_the_cpu() -> anyhow::Result<()> {
    let Some(stage) = Stage::set()? else { return Ok(()) };
    let go = |workers: &[&str]| stage.go(workers);
    let (alone, _) = go(&["decode device auto"])?;
    assert!(alone.iter().all(|ids| ids.len() == 6));

    let (got, (carried, unused)) = go(&["prefill device auto", "decode device auto"])?;
    assert_eq!(got, alone, "I1: from device to device");
    assert_eq!(carried, [("cuda-ipc".to_owned(), REQUESTS)].into());
    assert!(unused["shm"].contains("cannot be mapped"), "{unused:?}");
    let (got, (carried, _)) = go(&["prefill device tcp", "decode device auto"])?;
    assert_eq!(got, alone, "I1: through staging memory");
    assert_eq!(carried, [("tcp".to_owned(), REQUESTS)].into());

    let by_ucx = ucx::library().is_some();
    if by_ucx {
        let (got, (carried, _)) = go(&["prefill device ucx", "decode device ucx"])?;
        assert_eq!(got, alone, "I1: as a network's card takes it from one device and puts it into another");
        assert_eq!(carried, [("ucx".to_owned(), REQUESTS)].into());
    }

    // A GPU's arithmetic is not the CPU's: the first token comes from one, the others from the other.
    let (got, (carried, unused)) = go(&["prefill cpu auto", "decode device auto"])?;
    assert!(got.iter().all(|ids| ids.len() == 6));
    assert_eq!(carried, [("tcp".to_owned(), REQUESTS)].into());
    assert!(unused["cuda-ipc"].contains("this worker's pool is not in a GPU's memory"), "{unused:?}");
    let (mixed, (carried, _)) = go(&["prefill device auto", "decode cpu auto"])?;
    assert_eq!(carried, [("shm".to_owned(), REQUESTS)].into());
    assert_eq!(first(&mixed), first(&alone), "the prefill worker's device gives the first token");
    let (got, _) = go(&["prefill device tcp", "decode cpu auto"])?;
    assert_eq!(got, mixed, "I1: over shared memory or TCP, out of a device");
    if by_ucx {
        let (got, (carried, _)) = go(&["prefill device ucx", "decode cpu ucx"])?;
        assert_eq!(got, mixed, "I1: or straight out of it");
        assert_eq!(carried, [("ucx".to_owned(), REQUESTS)].into());
        let (_, (carried, _)) = go(&["prefill cpu ucx", "decode device ucx"])?;
        assert_eq!(carried, [("ucx".to_owned(), REQUESTS)].into());
    }
    Ok(())
}

/// Over a socket the pool's descriptor goes with its handle. Without one the legacy handle serves, and status says why.
#[test]
fn pools_are_opened_by_descriptors_and_otherwise_by_legacy_handles() -> anyhow::Result<()> {
    let Some(stage) = Stage::set()? else { return Ok(()) };
    let model = stage.directory.path().to_str().context("a path in UTF-8")?;
    let mut all = Vec::new();
    for (decode, by, why) in [
        ("decode device auto", "descriptor", ""),
        ("decode legacy auto", "legacy CUDA IPC handle", "CUDA_ERROR_NOT_SUPPORTED"),
    ] {
        let scene = Scene::start(&stage.runtime, model, &["prefill device auto", decode])?;
        all.push(stage.runtime.block_on(answers(&scene))?);
        let (carried, _) = stage.runtime.block_on(scene.carried())?;
        assert_eq!(carried, [("cuda-ipc".to_owned(), REQUESTS)].into());
        let (opened, pool) = stage.runtime.block_on(scene.opened_by())?;
        assert_eq!(opened, by);
        assert!(pool.starts_with(by) && pool.contains(why), "{pool}");
    }
    assert_eq!(all[0], all[1], "I1");
    Ok(())
}

/// Workers of two ranks, on a device each: to each other and to workers without ranks, on a device or the CPU, they are as any other.
#[test]
fn ranks_on_devices_hand_over_as_one_worker() -> anyhow::Result<()> {
    let Some(stage) = Stage::set()? else { return Ok(()) };
    let go = |workers: &[&str]| stage.go(workers);
    let (alone, _) = go(&["decode device2 auto"])?;
    assert!(alone.iter().all(|ids| ids.len() == 6));

    let (got, (carried, unused)) = go(&["prefill device2 auto", "decode device2 auto"])?;
    assert_eq!(got, alone, "I1: split or not, at one degree");
    assert_eq!(carried, [("tcp".to_owned(), REQUESTS)].into());
    assert!(unused["cuda-ipc"].contains("spread over several GPUs"), "{unused:?}");

    let (to_cpu, (carried, _)) = go(&["prefill device2 auto", "decode cpu2 auto"])?;
    assert_eq!(carried, [("shm".to_owned(), REQUESTS)].into());
    assert_eq!(first(&to_cpu), first(&alone), "the prefill worker's devices give the first token");
    let (got, _) = go(&["prefill device2 tcp", "decode cpu2 auto"])?;
    assert_eq!(got, to_cpu, "I1: over shared memory or TCP, out of two devices");
    let (_, (carried, _)) = go(&["prefill cpu2 auto", "decode device2 auto"])?;
    assert_eq!(carried, [("tcp".to_owned(), REQUESTS)].into());

    // To and from a worker on one device, which learns only by asking that the other's pool is not one device's.
    let (got, (carried, _)) = go(&["prefill device2 auto", "decode device auto"])?;
    assert_eq!((first(&got), carried), (first(&alone), [("tcp".to_owned(), REQUESTS)].into()));
    let (got, (carried, unused)) = go(&["prefill device auto", "decode device2 auto"])?;
    assert!(got.iter().all(|ids| ids.len() == 6));
    assert_eq!(carried, [("tcp".to_owned(), REQUESTS)].into());
    assert!(unused["cuda-ipc"].contains("spread over several GPUs"), "{unused:?}");
    Ok(())
}

/// KV of a device's pool goes to host memory and to disk, and from there into the pool of the next worker: of one device, and of two.
#[test]
fn kv_of_a_device_comes_back_from_disk() -> anyhow::Result<()> {
    for worker in ["decode stored auto", "decode stored2 auto"] {
        let Some(Stage { runtime, directory }) = Stage::set()? else { return Ok(()) };
        let model = directory.path().to_str().context("a path in UTF-8")?;
        let ask = |scene: &Scene| -> anyhow::Result<Vec<(Vec<u32>, u32)>> {
            let one = |seed| {
                let answer = runtime.block_on(scene.client.ask(sampled(prompt(90, seed), 6, seed)))?;
                let usage = answer.finish.as_ref().and_then(|finish| finish.usage).context("usage")?;
                anyhow::Ok((answer.ids, usage.cached_tokens))
            };
            (1..4).map(one).collect()
        };
        let metric = |scene: &Scene, name: &str, labels: &str| {
            let admin = scene.members[0].admin.trim_start_matches("http://").parse()?;
            anyhow::Ok(Metrics::of(admin)?.sum(name, labels))
        };
        let scene = Scene::start(&runtime, model, &[worker])?;
        let first = ask(&scene)?;
        assert!(first.iter().all(|(_, cached)| *cached == 0), "{first:?}");
        wait(|| (metric(&scene, "baton_kv_tier_blocks", "tier=\"disk\"").ok()? >= 15.0).then_some(()))?;
        drop(scene);
        let scene = Scene::start(&runtime, model, &[worker])?;
        wait(|| (metric(&scene, "baton_kv_tier_blocks", "tier=\"disk\"").ok()? >= 15.0).then_some(()))?;
        let again = ask(&scene)?;
        for ((want, _), (got, cached)) in first.iter().zip(&again) {
            assert_eq!((got, *cached), (want, 80), "I1");
        }
        wait(|| (metric(&scene, "baton_kv_loaded_tokens_total", "").ok()? == 240.0).then_some(()))?;
        runtime.block_on(wait_all_free(&scene.registry))?;
    }
    Ok(())
}

/// I5, I4: a worker whose device stands still in the midst of answers says so, leaves and ends with an error, as its supervisor needs it to;
/// the answers go on elsewhere, each token once.
#[test]
fn answers_go_on_elsewhere_when_a_device_stands_still() -> anyhow::Result<()> {
    let Some(Stage { runtime, directory }) = Stage::set()? else { return Ok(()) };
    let model = directory.path().to_str().context("a path in UTF-8")?;
    let answers = |scene: &Scene| -> anyhow::Result<Vec<Vec<u32>>> {
        let ask = |seed: u64| {
            let (client, request) = (scene.client.clone(), apart(sampled(prompt(5 + seed as usize, seed), 24, seed)));
            runtime.spawn(async move { tokio::time::timeout(HANG, client.ask(request)).await.context("no answer")? })
        };
        let asked: Vec<_> = (1..=6).map(ask).collect();
        asked.into_iter().map(|answer| Ok(runtime.block_on(answer)??.ids)).collect()
    };
    let alone = answers(&Scene::start(&runtime, model, &["decode device auto"])?)?;
    let mut scene = Scene::start(&runtime, model, &["decode device auto", "decode still auto"])?;
    assert_eq!(answers(&scene)?, alone);
    let ended = wait(|| scene.children[2].try_wait().ok().flatten())?;
    assert!(ended.code().is_some_and(|code| code != 0), "{ended}");
    runtime.block_on(async {
        let mut views = baton_cluster::connect(&scene.registry, None).await?.watch();
        let left = views.wait_for(|view| !view.stale && view.members.len() == 1);
        tokio::time::timeout(HANG, left).await.context("it is still a member")??;
        wait_all_free(&scene.registry).await
    })
}
