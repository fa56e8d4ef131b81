//! A router over real sockets, with scripted workers.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

pub mod allocations;
mod exchange;
mod logs;
mod worker;

use std::sync::Arc;
use std::time::Duration;

use baton_cluster::{EmbeddedRegistry, Member, Registry, RegistryLease, Role};
use baton_router::testing::model;
use baton_router::{PlacementKind, RegistryChoice, RouterConfig, RunningRouter, ServedModel};
use baton_runtime::{Outcome, Readiness, Shutdown, Tasks};
use baton_types::WorkerId;
use serde_json::{Value, json};

pub use exchange::Exchanges;
pub use model::{CALLS, CONTEXT, END, MODEL, NAME};
pub use worker::{Decode, FakeWorker, Prefill, World, digest_at};

/// A router and its workers.
pub struct Cluster {
    pub world: Arc<World>,
    pub registry: EmbeddedRegistry,
    pub readiness: Readiness,
    pub shutdown: Shutdown,
    pub tasks: Tasks,
    pub router: RunningRouter,
    pub http: reqwest::Client,
    leases: Vec<RegistryLease>,
    workers: Vec<Arc<FakeWorker>>,
    _files: tempfile::TempDir,
}

/// Where chats go.
pub const CHAT: &str = "/v1/chat/completions";
/// Where completions go.
pub const TEXT: &str = "/v1/completions";

/// A configuration for tests: free ports, short waits.
pub fn config() -> RouterConfig {
    RouterConfig {
        http: ([127, 0, 0, 1], 0).into(),
        grpc: ([127, 0, 0, 1], 0).into(),
        internal: ([127, 0, 0, 1], 0).into(),
        request_timeout: Duration::from_secs(60),
        // So that a test knows who is asked.
        placement: PlacementKind::RoundRobin,
        ..RouterConfig::default()
    }
}

impl Cluster {
    /// Starts a router with this many `prefill` and `decode` workers, which all answer `answer`. Waits until it is ready.
    pub async fn start(prefill: usize, decode: usize, answer: &str) -> Cluster {
        Cluster::with(config(), prefill, decode, &[answer]).await
    }

    /// Like `start`, with other settings. A request's seed chooses among the answers.
    pub async fn with(config: RouterConfig, prefill: usize, decode: usize, answers: &[&str]) -> Cluster {
        Cluster::of_model(model::TEMPLATE, config, prefill, decode, answers).await
    }

    /// Like `with`, for a model with another chat template.
    pub async fn of_model(
        template: &str,
        config: RouterConfig,
        prefill: usize,
        decode: usize,
        answers: &[&str],
    ) -> Cluster {
        let files = tempfile::tempdir().unwrap();
        let served = ServedModel::new(model::write_and_open(files.path(), template), MODEL);
        let mut cluster = Cluster::of_models(files, vec![served], config, answers).await;
        for _ in 0..prefill {
            cluster.add(Role::Prefill, |_| {}).await;
        }
        for _ in 0..decode {
            cluster.add(Role::Decode, |_| {}).await;
        }
        if decode > 0 {
            cluster.readiness.wait().await;
            // The router may be ready with an older view; wait for the one with all workers.
            cluster.seen(prefill + decode).await;
        }
        cluster
    }

    /// A router of these models, whose files are in `files`, without workers yet.
    pub async fn of_models(
        files: tempfile::TempDir,
        models: Vec<ServedModel>,
        config: RouterConfig,
        answers: &[&str],
    ) -> Cluster {
        logs::watch();
        let registry = EmbeddedRegistry::new();
        let shutdown = Shutdown::new(Duration::from_secs(20));
        let tasks = Tasks::new(shutdown.clone());
        let readiness = Readiness::new("starting");
        let choice = RegistryChoice::Embedded(registry.clone());
        let router = baton_router::start(&config, models, choice, shutdown.clone(), &tasks, readiness.clone());
        let router = router.await.unwrap();
        Cluster {
            world: World::new(answers),
            registry,
            readiness,
            shutdown,
            tasks,
            router,
            http: reqwest::Client::new(),
            leases: Vec::new(),
            workers: Vec::new(),
            _files: files,
        }
    }

    /// Tries to start a router without workers.
    pub async fn try_start(config: RouterConfig) -> Result<RunningRouter, baton_router::RouterError> {
        let files = tempfile::tempdir().unwrap();
        let served = ServedModel::new(model::write_and_open(files.path(), model::TEMPLATE), MODEL);
        Cluster::try_start_with(config, vec![served]).await
    }

    /// Tries to start a router of these models, without workers.
    pub async fn try_start_with(
        config: RouterConfig,
        models: Vec<ServedModel>,
    ) -> Result<RunningRouter, baton_router::RouterError> {
        let shutdown = Shutdown::new(Duration::from_secs(20));
        let choice = RegistryChoice::Embedded(EmbeddedRegistry::new());
        let (tasks, readiness) = (Tasks::new(shutdown.clone()), Readiness::new("starting"));
        baton_router::start(&config, models, choice, shutdown, &tasks, readiness).await
    }

    /// Starts and registers a worker; `change` edits its registration.
    pub async fn add(&mut self, role: Role, change: impl FnOnce(&mut Member)) -> Arc<FakeWorker> {
        let worker = FakeWorker::start(role, Arc::clone(&self.world)).await;
        self.register(worker, role, change).await
    }

    /// Starts a worker, scripts it, and registers it.
    pub async fn add_with(&mut self, role: Role, script: impl FnOnce(&FakeWorker)) -> Arc<FakeWorker> {
        self.add_and(role, |_| {}, script).await
    }

    /// Starts a worker, scripts it, and registers it as `change` says.
    pub async fn add_and(
        &mut self,
        role: Role,
        change: impl FnOnce(&mut Member),
        script: impl FnOnce(&FakeWorker),
    ) -> Arc<FakeWorker> {
        let worker = FakeWorker::start(role, Arc::clone(&self.world)).await;
        script(&worker);
        self.register(worker, role, change).await
    }

    async fn register(
        &mut self,
        worker: Arc<FakeWorker>,
        role: Role,
        change: impl FnOnce(&mut Member),
    ) -> Arc<FakeWorker> {
        let mut member = Member {
            id: WorkerId(self.workers.len() as u64 + 1),
            role,
            grpc: worker.address(),
            admin: "http://127.0.0.1:1".into(),
            model: model::NAME.into(),
            layout: 7,
            blocks: 64,
            block_size: 16,
            window_tokens: 0,
            max_running: 0,
            context_tokens: CONTEXT,
            draining: false,
            late_targets: true,
            exchanges: 0,
            kv_secret: 0,
        };
        change(&mut member);
        worker.is(member.id);
        self.leases.push(self.registry.register(member, Duration::from_secs(600)).await.unwrap());
        self.workers.push(Arc::clone(&worker));
        worker
    }

    /// The worker at this index, in the order of addition: prefill workers first.
    pub fn worker(&self, at: usize) -> &FakeWorker {
        &self.workers[at]
    }

    /// A worker's registration.
    pub fn member(&self, at: usize) -> Member {
        self.leases[at].member()
    }

    /// Hands over a worker's lease; dropping or revoking it takes the worker out of the view.
    pub fn forget(&mut self, at: usize) -> RegistryLease {
        self.leases.remove(at)
    }

    /// Completes when the router's view has this many members.
    pub async fn seen(&self, members: usize) {
        loop {
            if self.router.cluster()["members"].as_array().unwrap().len() == members {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.router.http_addr)
    }

    pub fn grpc_url(&self) -> String {
        format!("http://{}", self.router.grpc_addr)
    }

    /// Where workers register.
    pub fn registry_url(&self) -> String {
        format!("http://{}", self.router.internal_addr.unwrap())
    }

    /// POSTs JSON.
    pub async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.http.post(self.url(path)).json(body).send().await.unwrap()
    }

    /// POSTs JSON and returns status and body.
    pub async fn ask(&self, path: &str, body: &Value) -> (u16, Value) {
        let response = self.post(path, body).await;
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Completes "hi" with these additional fields. Must succeed.
    pub async fn complete(&self, fields: Value) -> Value {
        let (status, body) =
            self.ask("/v1/completions", &merged(json!({"prompt": "hi", "max_tokens": 50}), fields)).await;
        assert_eq!(status, 200, "{body}");
        body
    }

    /// POSTs a request for a stream. Returns its data lines, parsed, without the last one, which must be `[DONE]`.
    pub async fn stream(&self, path: &str, body: Value) -> Vec<Value> {
        let response = self.post(path, &merged(body, json!({"stream": true}))).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        let mut lines = data_lines(&response.text().await.unwrap());
        assert_eq!(lines.pop().as_deref(), Some("[DONE]"));
        lines.iter().map(|l| serde_json::from_str(l).unwrap()).collect()
    }

    /// Ends the router. Every task must end by itself.
    pub async fn stop(self) {
        self.shutdown.start("test");
        assert_eq!(self.tasks.join().await, Outcome::Clean);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            logs::no_errors();
        }
    }
}

/// The payloads of a stream's data lines. Skips comments; anything else is a failure.
pub fn data_lines(text: &str) -> Vec<String> {
    assert!(text.ends_with("\n\n"), "an event ends with an empty line");
    let events = text.split("\n\n").filter(|e| !e.is_empty() && !e.starts_with(':'));
    events.map(|e| e.strip_prefix("data: ").unwrap_or_else(|| panic!("{e:?}")).to_owned()).collect()
}

pub fn merged(mut body: Value, fields: Value) -> Value {
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// A chat that says hi.
pub fn hello() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}]})
}

/// The tokens of a text for the model whose tokens are bytes.
pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The text of a completion's first choice.
pub fn text(body: &Value) -> &str {
    body["choices"][0]["text"].as_str().unwrap()
}

/// The text of one choice, joined from a stream's chunks.
pub fn streamed(chunks: &[Value], choice: u64) -> String {
    let of = |c: &Value| c["text"].as_str().or(c["delta"]["content"].as_str()).unwrap_or_default().to_owned();
    let choices = chunks.iter().flat_map(|c| c["choices"].as_array().unwrap());
    choices.filter(|c| c["index"] == choice).map(of).collect()
}
