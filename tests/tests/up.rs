//! `baton up` as a user meets it: what it prints, how it ends, what it says when it cannot start.
#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::sync::{Mutex, MutexGuard, PoisonError};

use baton_cluster::Role;
use baton_tests::binary::{self, CommandOutput};
use baton_tests::cluster::client::{apart, greedy, prompt, sampled};
use baton_tests::cluster::{Cluster, ClusterOptions, http, models, processes, wait};
use rustix::process::Signal;

/// One cluster at a time: two cores are all there may be.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `baton up` that must fail by itself, and checks that nothing is left.
fn refused(args: &[&str]) -> CommandOutput {
    let tmp = tempfile::tempdir().unwrap();
    let mut command = binary::command().unwrap();
    command.arg("up").args(args);
    for flag in ["--http", "--grpc", "--internal"] {
        if !args.contains(&flag) {
            command.args([flag, "127.0.0.1:0"]);
        }
    }
    let said: CommandOutput = command.env("TMPDIR", tmp.path()).output().unwrap().into();
    assert_eq!(processes::of(tmp.path()), []);
    assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
    assert_eq!(said.code, Some(1), "{said:?}");
    said
}

#[test]
fn it_says_what_runs_and_what_to_type_and_that_works() {
    let _alone = alone();
    let cluster = Cluster::start(ClusterOptions::new("smollm2")).unwrap();
    let printed = cluster.printed();
    for role in ["router", "prefill", "decode"] {
        let pid = cluster.pid(role).unwrap().to_string();
        let line = printed.lines().find(|l| l.trim_start().starts_with(role)).unwrap_or_else(|| panic!("{printed}"));
        assert!(line.split_whitespace().any(|word| word == pid), "{role} is {pid}: {line}");
    }
    // The curl, taken apart: what it would send, sent, but for a shorter answer.
    let curl = printed.lines().find(|l| l.trim_start().starts_with("curl ")).unwrap();
    assert!(curl.contains(&format!("http://{}/v1/chat/completions", cluster.http())), "{curl}");
    let body = curl.split_once("-d '").unwrap().1.trim_end_matches('\'');
    let body = body.replacen('{', "{\"max_tokens\": 40, ", 1);
    let (status, answer) = http::post(cluster.http(), "/v1/chat/completions", &body).unwrap();
    assert_eq!(status, 200, "{answer}");
    let text = http::streamed_text(&answer).unwrap();
    assert!(text.contains("scatter"), "{text}");
    // The chat.
    let chat = printed.lines().find(|l| l.contains(" chat --router ")).unwrap();
    assert!(chat.contains(&cluster.url()), "{chat}");
    let question = chat.split('"').nth(1).unwrap();
    let said = binary::output(&["chat", "--max-tokens", "12", "--router", &cluster.url(), question]).unwrap();
    assert!(text.starts_with(said.trim_end()), "{said}");
    cluster.wait_idle().unwrap();
    cluster.stop().unwrap();
}

#[test]
fn status_shows_every_worker() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let options = ClusterOptions { prefill: 2, decode: 2, ..ClusterOptions::new(&model) };
    let cluster = Cluster::start(options).unwrap();
    let workers = cluster.wait_idle().map(|()| cluster.workers()).unwrap();
    assert_eq!(workers.len(), 4);
    let shown = binary::output(&["status", "--registry", cluster.registry()]).unwrap();
    for worker in workers {
        let line = shown.lines().find(|l| l.contains(&worker.member.id.to_string()));
        let line = line.unwrap_or_else(|| panic!("{} is missing in\n{shown}", worker.member.id));
        assert!(line.contains(worker.member.role.as_str()) && line.ends_with("serving"), "{line}");
    }
    cluster.stop().unwrap();
}

#[test]
fn an_interrupt_lets_requests_finish() {
    let _alone = alone();
    let model = models::slow().unwrap();
    let mut cluster = Cluster::start(ClusterOptions::new(&model)).unwrap();
    let client = cluster.client().unwrap();
    let request = sampled(prompt(20, 1), 600, 1);
    let want = cluster.block_on(client.ask(apart(request.clone()))).unwrap();
    let mut answering = cluster.block_on(client.start(apart(request))).unwrap();
    cluster.block_on(answering.until(5)).unwrap();
    cluster.signal(cluster.up_pid(), Signal::INT).unwrap();
    assert_eq!(cluster.block_on(answering.rest()).unwrap(), want);
    drop(client);
    cluster.wait_for_end().unwrap();
    // Nobody died, so nobody need be alarmed.
    let log = cluster.log();
    assert!(!log.contains(" WARN "), "{log}");
    cluster.finish().unwrap();
}

#[test]
fn a_second_interrupt_cuts_requests_off() {
    let _alone = alone();
    let model = models::slow().unwrap();
    let mut cluster = Cluster::start(ClusterOptions::new(&model)).unwrap();
    let client = cluster.client().unwrap();
    let mut answering = cluster.block_on(client.start(sampled(prompt(20, 1), 8000, 1))).unwrap();
    cluster.block_on(answering.until(5)).unwrap();
    cluster.signal(cluster.up_pid(), Signal::INT).unwrap();
    wait(|| cluster.log().contains(" router draining").then_some(())).unwrap();
    cluster.signal(cluster.up_pid(), Signal::INT).unwrap();
    let error = cluster.block_on(answering.rest()).unwrap_err();
    assert!(error.downcast_ref::<tonic::Status>().is_some(), "{error:#}");
    drop(client);
    cluster.wait_for_end().unwrap();
    cluster.finish().unwrap();
}

#[test]
fn nothing_outlives_a_killed_parent() {
    let _alone = alone();
    let model = models::slow().unwrap();
    let mut cluster = Cluster::start(ClusterOptions::new(&model)).unwrap();
    let client = cluster.client().unwrap();
    let mut answering = cluster.block_on(client.start(greedy(prompt(20, 1), 500))).unwrap();
    cluster.block_on(answering.until(5)).unwrap();
    cluster.kill_up().unwrap();
    // Its children drain, so the answer is whole; then they go.
    let answer = cluster.block_on(answering.rest()).unwrap();
    assert_eq!(answer.ids.len(), 500);
    drop(client);
    cluster.finish().unwrap();
}

#[test]
fn a_killed_worker_is_started_again() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let cluster = Cluster::start(ClusterOptions::new(&model)).unwrap();
    let client = cluster.client().unwrap();
    let request = sampled(prompt(40, 2), 30, 2);
    let want = cluster.block_on(client.ask(apart(request.clone()))).unwrap();
    for role in [Role::Prefill, Role::Decode] {
        let old = cluster.wait_for_worker(role, |_| true).unwrap();
        cluster.signal(old.pid, Signal::KILL).unwrap();
        let new = cluster.wait_for_worker(role, |w| w.pid != old.pid).unwrap();
        assert_ne!(new.member.id, old.member.id);
        assert_eq!(cluster.block_on(client.ask(apart(request.clone()))).unwrap(), want, "after another {role:?}");
    }
    cluster.wait_idle().unwrap();
    cluster.stop().unwrap();
}

#[test]
fn scale_up_and_down_under_load_fails_no_request() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let cluster = Cluster::start(ClusterOptions::new(&model)).unwrap();
    let client = cluster.client().unwrap();
    let url = cluster.registry().to_owned();
    let scale = |prefill: usize, decode: usize| {
        let counts = [&prefill.to_string(), &decode.to_string()].map(String::to_owned);
        let args = ["scale", "--prefill", &counts[0], "--decode", &counts[1], "--wait", "--registry", &url];
        let said = binary::output(&args).unwrap();
        let last = format!("{prefill} of {prefill} prefill and {decode} of {decode} decode workers serve");
        assert_eq!(said.lines().last(), Some(&*last), "{said}");
        assert_eq!((cluster.pids("prefill").len(), cluster.pids("decode").len()), (prefill, decode));
    };
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let load = (0..4u64).map(|lane| {
        let (client, stopped) = (client.clone(), stopped.clone());
        async move {
            let mut asked = 0;
            while !*stopped.borrow() {
                let answer = client.ask(sampled(prompt(30, lane), 100, lane)).await?;
                anyhow::ensure!(answer.ids.len() == 100, "{answer:?}");
                asked += 1;
            }
            anyhow::Ok(asked)
        }
    });
    let tasks: Vec<_> = load.map(|lane| cluster.spawn(lane)).collect();
    for (prefill, decode) in [(2, 3), (1, 1), (0, 2), (1, 1)] {
        scale(prefill, decode);
    }
    // One worker goes, under load as well: the only one only if another takes its place.
    let the_worker = || {
        let status = binary::output(&["status", "--json", "--registry", &url]).unwrap();
        let status: serde_json::Value = serde_json::from_str(&status).unwrap();
        let workers = status["workers"].as_array().unwrap();
        let decode = workers.iter().find(|worker| worker["role"] == "decode").unwrap();
        decode["id"].as_str().unwrap().to_owned()
    };
    let drain = |more: &[&str]| binary::run(&[&["drain", &the_worker(), "--registry", &url], more].concat()).unwrap();
    let before = cluster.pids("decode");
    let drained = |more: &[&str]| {
        let said = drain(more);
        assert_eq!(said.code, Some(0), "{said:?}");
    };
    drained(&["--replace", "--dry-run"]);
    assert_eq!(cluster.pids("decode"), before);
    let refused = drain(&["--wait"]);
    assert!(refused.code == Some(1) && refused.err.contains("--replace"), "{refused:?}");
    drained(&["--replace", "--wait"]);
    assert!(cluster.pids("decode").len() == 1 && cluster.pids("decode") != before);
    scale(1, 2);
    drained(&["--wait"]);
    assert_eq!(cluster.pids("decode").len(), 1);
    stop.send_replace(true);
    for task in tasks {
        assert!(cluster.block_on(task).unwrap().unwrap() > 0);
    }
    assert_eq!(cluster.router_metrics().unwrap().sum("baton_rejected_total", ""), 0.0);
    cluster.wait_idle_workers(2).unwrap();
    for (args, word) in [
        (vec!["scale", "--registry", &url], "--prefill"),
        (vec!["scale", "--registry", &url, "--decode", "0"], "decode"),
        (vec!["drain", "--registry", &url, "nobody"], "nobody"),
        (vec!["scale", "--registry", &url, "--decode", "9999"], "decode"),
        (vec!["scale", "--registry", "http://127.0.0.1:1", "--decode", "1"], "127.0.0.1:1"),
    ] {
        let said = binary::run(&args).unwrap();
        assert!(said.code == Some(1) && said.err.contains(word), "{args:?}: {said:?}");
    }
    cluster.stop().unwrap();
}

#[test]
fn aggregated_has_no_prefill_worker() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let split = Cluster::start(ClusterOptions::new(&model)).unwrap();
    let ask = |cluster: &Cluster| {
        let client = cluster.client().unwrap();
        let answer = cluster.block_on(client.ask(sampled(prompt(100, 3), 60, 3))).unwrap();
        cluster.wait_idle().unwrap();
        answer
    };
    let want = ask(&split);
    split.stop().unwrap();
    let whole = Cluster::start(ClusterOptions { aggregated: true, ..ClusterOptions::new(&model) }).unwrap();
    assert!(whole.pids("prefill").is_empty());
    assert_eq!(ask(&whole), want); // I1
    whole.stop().unwrap();
}

#[test]
fn a_model_that_is_made_answers_the_same_split_and_whole() {
    let _alone = alone();
    let ask = |options: ClusterOptions| {
        let cluster = Cluster::start(options).unwrap();
        let client = cluster.client().unwrap();
        let greedy = cluster.block_on(client.ask(apart(greedy(prompt(100, 4), 40)))).unwrap();
        let sampled = cluster.block_on(client.ask(apart(sampled(prompt(100, 5), 40, 5)))).unwrap();
        assert_eq!(greedy.ids.len(), 40);
        let body = r#"{"model": "random:tiny:7", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": "hello"}]}"#;
        let (status, chat) = http::post(cluster.http(), "/v1/chat/completions", body).unwrap();
        assert_eq!(status, 200, "{chat}");
        let chat: serde_json::Value = serde_json::from_str(&chat).unwrap();
        cluster.wait_idle().unwrap();
        cluster.stop().unwrap();
        (greedy, sampled, chat["choices"][0]["message"]["content"].clone())
    };
    let split = ask(ClusterOptions::new("random:tiny:7"));
    assert!(split.2.as_str().is_some_and(|text| !text.is_empty()), "{}", split.2);
    assert_eq!(ask(ClusterOptions { aggregated: true, ..ClusterOptions::new("random:tiny:7") }), split); // I1
}

#[test]
fn a_port_in_use_is_named() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flag in ["--http", "--grpc", "--internal"] {
        let said = refused(&["--model", model.path().to_str().unwrap(), flag, &address]);
        assert!(said.err.contains(&address) && said.err.contains(flag), "{said:?}");
    }
}

#[test]
fn a_model_that_is_none_is_refused() {
    let _alone = alone();
    let said = refused(&["--model", "no-such-model"]);
    assert!(said.err.contains("no-such-model") && said.err.contains("smollm2"), "{said:?}");
    let said = refused(&["--model", "random:tiney"]);
    assert!(said.err.contains("did you mean random:tiny?"), "{said:?}");
    let said = refused(&["--model", "/no/such/file.gguf"]);
    assert!(said.err.contains("/no/such/file.gguf"), "{said:?}");
    let model = models::tiny().unwrap();
    let weights = model.path().join("model.safetensors");
    std::fs::File::options().write(true).open(&weights).unwrap().set_len(1000).unwrap();
    let said = refused(&["--model", model.path().to_str().unwrap()]);
    assert!(said.err.contains("model.safetensors"), "{said:?}");
    let file = model.path().join("broken.gguf");
    std::fs::write(&file, b"GGUF\x03\0\0\0 and no more").unwrap();
    let said = refused(&["--model", file.to_str().unwrap()]);
    assert!(said.err.contains("broken.gguf"), "{said:?}");
}

#[test]
fn bad_settings_are_refused_by_name() {
    let _alone = alone();
    let model = models::tiny().unwrap();
    let model = model.path().to_str().unwrap();
    for (args, word) in [
        (["--model", model, "--decode", "0"], "--decode"),
        (["--model", model, "--registry", "consul://a:1"], "consul://a:1"),
        (["--model", model, "--kv-memory", "1KiB"], "kv_memory"),
        (["--model", model, "--context", "100000"], "context"),
    ] {
        let said = refused(&args);
        assert!(said.err.contains(word), "{args:?}: {said:?}");
    }
}

#[test]
fn check_config_prints_the_settings_and_starts_nothing() {
    let args = ["up", "--check-config", "--prefill", "3", "--kv-memory", "1GiB"];
    let text = binary::output(&args).unwrap();
    for line in ["prefill = 3", "decode = 1", "kv_memory = \"1GiB\"", "http = \"127.0.0.1:8000\""] {
        assert!(text.contains(line), "{line} is missing in\n{text}");
    }
    // What it prints is a settings file.
    let file = tempfile::NamedTempFile::with_suffix(".toml").unwrap();
    std::fs::write(file.path(), &text).unwrap();
    let again = ["up", "--check-config", "--config", file.path().to_str().unwrap()];
    let strip =
        |text: &str| text.lines().map(|l| l.split('#').next().unwrap().trim_end().to_owned()).collect::<Vec<_>>();
    assert_eq!(strip(&binary::output(&again).unwrap()), strip(&text));
}

#[test]
fn chat_takes_what_fits_and_names_what_does_not_answer() {
    let _alone = alone();
    // Its context of 512 tokens is shorter than a chat's usual limit.
    let model = models::tiny().unwrap();
    let cluster = Cluster::start(ClusterOptions::new(&model)).unwrap();
    binary::output(&["chat", "--router", &cluster.url(), "--temperature", "1", "hello"]).unwrap();
    let http = format!("http://{}", cluster.http());
    for (router, word) in
        [(http.as_str(), "gRPC address"), ("http://127.0.0.1:1", "baton up"), ("host:1", "http://HOST")]
    {
        let said = binary::run(&["chat", "--router", router, "hello"]).unwrap();
        assert!(said.code == Some(1) && said.err.contains(word) && said.err.contains(router), "{said:?}");
    }
    cluster.stop().unwrap();
}

#[test]
fn models_are_listed_and_inspected() {
    let dir = models::tiny().unwrap();
    let cache = tempfile::tempdir().unwrap();
    let cache = ["--model-cache", cache.path().to_str().unwrap()];
    let listed = binary::output(&["model", "list", cache[0], cache[1]]).unwrap();
    assert!(listed.lines().any(|l| l.starts_with("smollm2") && l.ends_with("not fetched yet")), "{listed}");
    let facts = binary::output(&["model", "inspect", "--json", dir.path().to_str().unwrap()]).unwrap();
    let facts: serde_json::Value = serde_json::from_str(&facts).unwrap();
    assert!(facts.to_string().contains("llama"), "{facts}");
    let said = binary::run(&["model", "inspect", "/no/such/model", cache[0], cache[1]]).unwrap();
    assert!(said.code == Some(1) && said.err.contains("/no/such/model"), "{said:?}");
}

/// On a host without a GPU: with one the flag is served, and there is nothing to see here.
#[test]
fn a_gpu_that_is_asked_for_and_not_there_ends_the_worker_with_the_reason() {
    if baton_kernels::cuda::devices().is_ok() {
        eprintln!("skipped: this host has a GPU");
        return;
    }
    for role in ["prefill", "decode"] {
        // Told before the model is looked for.
        let args = [role, "--backend", "cuda", "--model", "/nowhere", "--admin", "127.0.0.1:0"];
        let said: CommandOutput = binary::command().unwrap().args(args).output().unwrap().into();
        assert_eq!(said.code, Some(1), "{said:?}");
        assert!(said.err.contains("--backend cuda: no GPU: ") && said.err.contains("--backend cpu"), "{said:?}");
        assert!(!said.err.contains("panicked"), "{said:?}");
    }
}
