//! I1 over the routes between processes: the same tokens and logits, to the bit, from one process, from a cluster without
//! split, split over shared memory, TCP and UCX, with prompts in chunks of 1, 16 and 512, alone and many at once, over pools
//! of floats and quantised ones.
//!
//! Logits are compared whole, by the digest that comes with each token; log probabilities beside it say what differs.

use std::ops::RangeInclusive;
use std::time::Duration;

use anyhow::{Context, ensure};
use baton_cluster::Role;
use baton_model_files::{Model, fetch};
use baton_proto::v1::{self, generate_request::Input, inference_client::InferenceClient};
use baton_tests::cluster::{Cluster, ClusterOptions, Worker};
use baton_tests::local::{Local, Options};
use baton_tests::tiny;
use baton_tests::ucx;
use baton_types::{Constraint, KvDtype, SamplingParams, TokenOut};
use futures::future::try_join_all;

/// Log probabilities that come with each token.
const TOP: u32 = 20;

#[derive(Clone)]
struct Request {
    prompt: Vec<u32>,
    params: SamplingParams,
}

/// Random requests: greedy and sampled, with penalties, some under a constraint, some with their prompts scored, prompts of so many tokens.
fn requests(count: usize, lengths: RangeInclusive<u64>, model: &Model, seed: u64) -> Vec<Request> {
    let vocab = u64::from(model.config().vocab_size);
    let mut random = tiny::random_u64(seed, "routes");
    let mut next = |n: u64| random.next().unwrap_or_default() % n;
    (0..count)
        .map(|i| {
            let length = lengths.start() + next(lengths.end() + 1 - lengths.start());
            let prompt = (0..length).map(|_| next(vocab) as u32).collect();
            let params = SamplingParams {
                temperature: if i % 2 == 0 { 0.0 } else { 0.8 },
                top_p: if i % 4 == 1 { 0.9 } else { 1.0 },
                top_k: if i % 4 == 3 { 40 } else { 0 },
                frequency_penalty: if i % 3 == 0 { 0.5 } else { 0.0 },
                seed: next(u64::MAX),
                max_tokens: 2 + next(10) as u32,
                top_logprobs: Some(TOP),
                prompt_logprobs: (i % 5 == 2).then_some(3),
                ..SamplingParams::default()
            };
            let constraint = match i % 7 {
                2 => Constraint::JsonSchema(
                    "{\"type\": \"object\", \"properties\": {\"a\": {\"type\": \"string\"}}}".to_owned(),
                ),
                5 => Constraint::Regex("[a-z]{2,3}( [0-9]+)*".to_owned()),
                _ => return Request { prompt, params },
            };
            let stop_token_ids = model.tokenizer().eos_ids().to_vec();
            let params = SamplingParams { constraint: Some(constraint.into()), stop_token_ids, ..params };
            Request { prompt, params }
        })
        .collect()
}

/// Everything about a token, with floats as bits: index, id, digest of all logits, log probability, those of the likeliest.
type Exact = (u32, u32, u64, Option<u32>, Vec<(u32, u32)>);

fn exact(token: TokenOut) -> anyhow::Result<Exact> {
    let digest = token.logits_digest.with_context(|| format!("token {} has no logits_digest", token.index))?;
    let top = token.top.into_iter().map(|(id, p)| (id, p.to_bits())).collect();
    Ok((token.index, token.id, digest, token.logprob.map(f32::to_bits), top))
}

async fn ask(
    client: InferenceClient<tonic::transport::Channel>,
    request: Request,
    salt: &str,
) -> anyhow::Result<Vec<Exact>> {
    let p = request.params;
    let sampling = v1::Sampling {
        max_tokens: Some(p.max_tokens),
        temperature: Some(p.temperature),
        top_p: Some(p.top_p),
        top_k: Some(p.top_k),
        seed: Some(p.seed),
        frequency_penalty: Some(p.frequency_penalty),
        top_logprobs: p.top_logprobs,
        prompt_logprobs: p.prompt_logprobs,
        ignore_eos: p.constraint.is_none(),
        constraint: p.constraint.map(|c| Constraint::clone(&c).into()),
        ..Default::default()
    };
    let input = Some(Input::TokenIds(v1::TokenIds { ids: request.prompt }));
    let request =
        v1::GenerateRequest { input, sampling: Some(sampling), cache_salt: salt.to_owned(), ..Default::default() };
    let mut client = client;
    let mut stream = client.generate(request).await?.into_inner();
    let mut tokens = Vec::new();
    while let Some(part) = stream.message().await? {
        tokens.extend(part.prompt.into_iter().chain(part.tokens).map(TokenOut::from));
    }
    tokens.into_iter().map(exact).collect()
}

/// Asks one after the other, or all at once; prefixes are shared with those who have the same salt.
fn through(cluster: &Cluster, requests: &[Request], together: bool, salt: &str) -> anyhow::Result<Vec<Vec<Exact>>> {
    cluster.block_on(async {
        let client = InferenceClient::connect(format!("http://{}", cluster.grpc())).await?;
        if together {
            return try_join_all(requests.iter().map(|r| ask(client.clone(), r.clone(), salt))).await;
        }
        let mut answers = Vec::new();
        for request in requests {
            answers.push(ask(client.clone(), request.clone(), salt).await?);
        }
        Ok(answers)
    })
}

/// KV stores of a cluster.
fn stores(options: &ClusterOptions) -> usize {
    let count = options.args.iter().skip_while(|arg| *arg != "--kv-stores").nth(1);
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

fn wait_idle(cluster: &Cluster, options: &ClusterOptions) -> anyhow::Result<()> {
    cluster.wait_idle_workers(if options.aggregated { 1 } else { 2 } + stores(options))
}

fn compare(
    name: &str,
    spec: &str,
    local: &mut Local,
    requests: &[Request],
    routes: &[(&str, ClusterOptions)],
) -> anyhow::Result<()> {
    let mut wanted = Vec::new();
    for request in requests {
        let (answers, _) = local.generate(&[(request.prompt.clone(), request.params.clone())], false)?;
        wanted.push(answers.concat().into_iter().map(exact).collect::<anyhow::Result<Vec<_>>>()?);
    }
    for (route, options) in routes {
        let cluster = Cluster::start(ClusterOptions { model: spec.to_owned(), ..options.clone() })?;
        let mut passes = vec![("alone", false, "a"), ("at once", true, "b"), ("at once, all of it cached", true, "b")];
        if stores(options) > 0 {
            // A prefix is fetched where there is room for it.
            passes.push(("alone, all of it in the store", false, "a"));
        }
        for (pass, (how, together, salt)) in (1..).zip(passes) {
            if pass > 3 {
                // For a second a router takes what was answered for held where it was.
                std::thread::sleep(Duration::from_secs(2));
            }
            let got = through(&cluster, requests, together, salt)?;
            for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                ensure!(got == wanted, "{name} {route} {how}: request {i} differs:\n{got:?}\n{wanted:?}");
            }
            if options.aggregated {
                continue;
            }
            // Every single one went this way, none was prefilled on the decode worker instead, but for what that has already.
            wait_idle(&cluster, options)?;
            let prefill = cluster.workers_of(Role::Prefill).pop().context("a prefill worker")?;
            let label = format!("transport=\"{}\"", options.transport);
            let handoffs = prefill.metrics()?.sum("baton_transfer_seconds_count", &label) as usize;
            // Of a single token there is nothing to hand over.
            let handed = requests.iter().filter(|request| request.prompt.len() > 1).count();
            let (least, most) = (pass.min(2) * handed, pass * handed);
            let found = format!("{handoffs} handoffs with {label}, at least {least} and at most {most} are due");
            ensure!((least..=most).contains(&handoffs), "{name} {route} {how}: {found}");
        }
        wait_idle(&cluster, options)?;
        if stores(options) > 0 {
            let fetched = cluster.router_metrics()?.sum("baton_kv_fetches_total", "outcome=\"fetched\"");
            let kept = cluster.router_metrics()?.sum("baton_kv_keeps_total", "");
            ensure!(
                fetched > 0.0,
                "{name} {route}: nothing was fetched from the KV store, of {kept} pieces that it was given"
            );
        }
        if options.args.iter().any(|arg| arg == "--kv-host") {
            let loaded = |worker: &Worker| Ok(worker.metrics()?.sum("baton_kv_loaded_tokens_total", ""));
            let loaded = cluster.workers().iter().map(loaded).sum::<anyhow::Result<f64>>()?;
            ensure!(loaded > 0.0, "{name} {route}: nothing was loaded from the tiers");
            for (flag, tier) in [("--kv-disk", "disk"), ("--kv-object", "object")] {
                let label = format!("tier=\"{tier}\"");
                let hits = |worker: &Worker| Ok(worker.metrics()?.sum("baton_kv_tier_hit_tokens_total", &label));
                let hits = cluster.workers().iter().map(hits).sum::<anyhow::Result<f64>>()?;
                ensure!(
                    hits > 0.0 || !options.args.iter().any(|arg| arg == flag),
                    "{name} {route}: nothing came from there"
                );
            }
        }
        cluster.stop()?;
    }
    println!(
        "{name}: {} requests alike over {} routes, alone, at once and from the cache",
        requests.len(),
        routes.len()
    );
    Ok(())
}

fn route(transport: &'static str, chunk: u32, aggregated: bool) -> ClusterOptions {
    let env = vec![("BATON_CHUNK".to_owned(), chunk.to_string())];
    ClusterOptions { transport, aggregated, env, ..ClusterOptions::new("") }
}

/// Over UCX's TCP; None where there is no UCX.
fn ucx_route(chunk: u32) -> Option<ClusterOptions> {
    let mut options = route("ucx", chunk, false);
    options.env.extend(ucx::env(ucx::library()?));
    Some(options)
}

/// Decode blocks are reserved when the prompt's turn is near, whether it waits or not.
fn late(mut options: ClusterOptions) -> ClusterOptions {
    options.env.push(("BATON_LATE_RESERVATION".to_owned(), "0s".to_owned()));
    options
}

/// With a pool too small for all prompts, and the KV store below it: in host memory, of which most goes to what else is named.
fn tiers(mut options: ClusterOptions, below: Option<(&str, String)>) -> ClusterOptions {
    let host = if below.is_some() { "8MiB" } else { "256MiB" };
    options.args.extend(["--kv-memory", "12MiB", "--kv-host", host].map(str::to_owned));
    options.args.extend(below.into_iter().flat_map(|(flag, place)| [flag.to_owned(), place]));
    options
}

/// A real model over `routes`, its KV of this type: `count` prompts of so many tokens.
fn real(
    count: usize,
    lengths: RangeInclusive<u64>,
    kv: KvDtype,
    routes: &[(&str, ClusterOptions)],
) -> anyhow::Result<()> {
    let path = fetch::resolve("smollm2", &fetch::default_cache()?, &fetch::NoProgress)?;
    let model = Model::open(&path)?;
    let spec = path.to_str().context("a path in UTF-8")?;
    let mut local = Local::new(&model, Options { kv, ..Options::default() })?;
    compare("smollm2", spec, &mut local, &requests(count, lengths, &model, 1), routes)
}

#[test]
fn a_real_model_answers_alike_over_every_route() -> anyhow::Result<()> {
    let (disk, objects) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let (disk, objects) = (disk.path().display().to_string(), format!("file://{}", objects.path().display()));
    let cache = tempfile::tempdir()?;
    let kept = |mut options: ClusterOptions| {
        options.args.extend(["--model-cache".to_owned(), cache.path().display().to_string()]);
        options
    };
    let unkept = |mut options: ClusterOptions| {
        options.args.extend(["--packed-weights", "0B"].map(str::to_owned));
        options
    };
    let routes = [
        ("aggregated", route("auto", 512, true)),
        ("aggregated, from host memory", tiers(route("auto", 512, true), None)),
        ("aggregated, from disk", tiers(route("auto", 512, true), Some(("--kv-disk", disk)))),
        ("aggregated, from an object store", tiers(route("auto", 512, true), Some(("--kv-object", objects)))),
        ("split over shm, chunks of 16, weights packed by one of both", kept(route("shm", 16, false))),
        ("split over tcp, chunks of 512, reserved late, packed weights found", kept(late(route("tcp", 512, false)))),
        ("aggregated, weights packed for itself", unkept(route("auto", 512, true))),
    ];
    real(14, 1..=120, KvDtype::F16, &routes)?;
    let files: Vec<_> = std::fs::read_dir(cache.path().join("packed"))?.flatten().map(|entry| entry.path()).collect();
    ensure!(files.len() == 1 && files[0].extension().is_some_and(|end| end == "packed"), "kept: {files:?}");
    Ok(())
}

/// Some prompts are long enough to be fetched from another process, and pools are too small for all of them. Prompts differ in length, so that workers learn
/// what a token takes.
#[test]
fn a_real_model_answers_alike_from_what_is_kept_elsewhere() -> anyhow::Result<()> {
    let small = |mut options: ClusterOptions, memory: &str, more: &[&str]| {
        options.args.extend(["--kv-memory", memory].iter().chain(more).map(|arg| (*arg).to_owned()));
        options
    };
    let store = ["--kv-stores", "1", "--kv-store-memory", "128MiB"];
    let routes = [
        ("aggregated, from a KV store over shm", small(route("shm", 512, true), "16MiB", &store)),
        ("split over tcp, from a KV store", small(route("tcp", 512, false), "16MiB", &store)),
        ("split over shm, from host memory", small(route("shm", 512, false), "16MiB", &["--kv-host", "256MiB"])),
    ];
    real(6, 40..=400, KvDtype::F16, &routes)?;
    let disk = tempfile::tempdir()?;
    let disk = disk.path().display().to_string();
    let q8 = ["--kv-type", "q8", "--kv-host", "4MiB", "--kv-disk", &disk];
    real(6, 40..=400, KvDtype::Q8, &[("aggregated, q8 from disk", small(route("auto", 512, true), "9MiB", &q8))])?;
    let int4 = [&["--kv-type", "int4"][..], &store].concat();
    let routes = [("aggregated, int4 from a KV store over tcp", small(route("tcp", 512, true), "5MiB", &int4))];
    real(6, 40..=400, KvDtype::Int4, &routes)
}

#[test]
#[ignore = "takes minutes: just soak"]
fn a_real_model_answers_alike_whatever_the_chunk() -> anyhow::Result<()> {
    let routes = [
        ("split over shm, chunks of 16", route("shm", 16, false)),
        ("split over shm, chunks of 512", route("shm", 512, false)),
        ("split over tcp, chunks of 16", route("tcp", 16, false)),
        ("split over tcp, chunks of 512", route("tcp", 512, false)),
    ];
    real(28, 1..=120, KvDtype::F16, &routes)?;
    // A step a token is dear: short prompts, whose answers cross into a second block.
    let routes = [
        ("split over shm, chunks of 1", route("shm", 1, false)),
        ("split over tcp, chunks of 1", route("tcp", 1, false)),
    ];
    real(28, 1..=12, KvDtype::F16, &routes)
}

/// A quantised pool travels as it is: elements and their scales arrive to the bit.
#[test]
fn quantised_pools_answer_alike_over_every_route() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    tiny::config("llama-gqa-odd-vocab")?.write(directory.path())?;
    let model = Model::open(directory.path())?;
    let spec = directory.path().to_str().context("a path in UTF-8")?;
    let requests = requests(24, 1..=90, &model, 4);
    for (name, kv) in [("q8", KvDtype::Q8), ("int4", KvDtype::Int4)] {
        let split = |transport, chunk| ClusterOptions {
            args: vec!["--kv-type".to_owned(), name.to_owned()],
            ..route(transport, chunk, false)
        };
        let routes = [("split over shm", split("shm", 7)), ("split over tcp", split("tcp", 512))];
        let mut local = Local::new(&model, Options { kv, ..Options::default() })?;
        compare(name, spec, &mut local, &requests, &routes)?;
    }
    Ok(())
}

#[test]
fn tiny_models_answer_alike_over_every_route() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    for name in ["gemma3", "qwen3"] {
        let config = tiny::configs()?.into_iter().find(|c| c.name.starts_with(name)).context("a tiny model")?;
        let path = directory.path().join(name);
        config.write(&path)?;
        let model = Model::open(&path)?;
        let spec = path.to_str().context("a path in UTF-8")?;
        let mut routes = vec![
            ("split over shm", route("shm", 1, false)),
            ("split over shm, reserved late", late(route("shm", 16, false))),
            ("split over tcp", route("tcp", 16, false)),
        ];
        routes.extend(ucx_route(16).map(|options| ("split over ucx", options)));
        let mut local = Local::new(&model, Options::default())?;
        compare(name, spec, &mut local, &requests(30, 1..=90, &model, 3), &routes)?;
    }
    Ok(())
}

/// The prefill worker keeps f16 and the decode worker q8: the first token is computed over f16, the others over what the
/// prefill worker rounded on the way, which is the same over every transport.
#[test]
fn kv_changes_its_type_between_workers_alike_over_every_transport() -> anyhow::Result<()> {
    let directory = tempfile::tempdir()?;
    let config = tiny::configs()?.into_iter().find(|c| c.name.starts_with("qwen3")).context("a tiny model")?;
    config.write(directory.path())?;
    let model = Model::open(directory.path())?;
    let requests = requests(20, 1..=90, &model, 4);
    let mut over_f16 = Local::new(&model, Options::default())?;
    let mut answers = Vec::new();
    for transport in ["shm", "tcp"] {
        let args = ["--kv-type", "q8", "--prefill-kv-type", "f16"].map(str::to_owned).to_vec();
        let cluster = Cluster::start(ClusterOptions { transport, args, ..ClusterOptions::new(directory.path()) })?;
        let got = through(&cluster, &requests, true, transport)?;
        for (request, got) in requests.iter().zip(&got) {
            let (local, _) = over_f16.generate(&[(request.prompt.clone(), request.params.clone())], false)?;
            let wanted = local.concat().into_iter().map(exact).collect::<anyhow::Result<Vec<_>>>()?;
            let first = request.params.prompt_logprobs.map_or(0, |_| request.prompt.len() - 1);
            let over_f16 = (got.get(..=first), wanted.get(..=first));
            ensure!(over_f16.0 == over_f16.1, "the first token is computed over f16:\n{over_f16:?}");
            if let (Some(got), Some(wanted)) = (got.get(first + 1), wanted.get(first + 1)) {
                ensure!(got.2 != wanted.2, "the second token is computed over q8, whose logits are others");
            }
        }
        let prefill = cluster.workers_of(Role::Prefill).pop().context("a prefill worker")?;
        let label = format!("transport=\"{transport}\"");
        let handoffs = prefill.metrics()?.sum("baton_transfer_seconds_count", &label);
        ensure!(handoffs == requests.len() as f64, "{handoffs} handoffs over {transport}");
        cluster.wait_idle()?;
        cluster.stop()?;
        answers.push(got);
    }
    ensure!(answers[0] == answers[1], "shm and tcp differ");
    Ok(())
}
