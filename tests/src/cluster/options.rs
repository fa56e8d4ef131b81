//! What a cluster is made of, as flags of `baton up`.

use std::path::Path;

/// How to start a cluster.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// A path or a name.
    pub model: String,
    /// Prefill workers.
    pub prefill: u32,
    /// Decode workers.
    pub decode: u32,
    /// No split.
    pub aggregated: bool,
    /// auto, shm, tcp, ucx or cuda-ipc.
    pub transport: &'static str,
    /// Where workers are found; None: in the router.
    pub registry: Option<String>,
    /// Further flags of `baton up`; they replace those above.
    pub args: Vec<String>,
    /// Further variables of its environment.
    pub env: Vec<(String, String)>,
    /// Texts by which to know the ERROR lines that a test provokes.
    pub expected_errors: Vec<&'static str>,
}

impl ClusterOptions {
    /// One prefill and one decode worker.
    pub fn new(model: impl AsRef<Path>) -> ClusterOptions {
        ClusterOptions {
            model: model.as_ref().to_string_lossy().into_owned(),
            prefill: 1,
            decode: 1,
            aggregated: false,
            transport: "auto",
            registry: None,
            args: Vec::new(),
            env: Vec::new(),
            expected_errors: Vec::new(),
        }
    }

    /// With pools of so many blocks of `block_bytes`, and service by priority: meant to be too little for `running` sequences at once. All workers
    /// together have four times as much host memory.
    pub fn under_pressure(mut self, blocks: u32, block_bytes: u64, running: u32) -> ClusterOptions {
        let memory = |blocks: u32| format!("{}B", u64::from(blocks) * block_bytes);
        self.args.extend(["--kv-memory".to_owned(), memory(blocks)]);
        let settings =
            [("KV_HOST", memory(4 * blocks)), ("MAX_RUNNING", running.to_string()), ("ORDER", "priority".to_owned())];
        self.env.extend(settings.map(|(key, value)| (format!("BATON_{key}"), value)));
        self
    }

    pub(super) fn flags(&self) -> Vec<String> {
        let (prefill, decode) = (self.prefill.to_string(), self.decode.to_string());
        let mut pairs = vec![
            ("--http", "127.0.0.1:0"),
            ("--grpc", "127.0.0.1:0"),
            ("--internal", "127.0.0.1:0"),
            ("--log", "info"),
            ("--kv-memory", "64MiB"),
            ("--model", &self.model),
            ("--transport", self.transport),
            ("--prefill", &prefill),
            ("--decode", &decode),
        ];
        pairs.extend(self.registry.as_deref().map(|registry| ("--registry", registry)));
        // A flag may be given once.
        pairs.retain(|(flag, _)| !self.args.iter().any(|arg| arg == flag));
        let pairs = pairs.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value.to_owned()]);
        let aggregated = self.aggregated.then(|| "--aggregated".to_owned());
        ["up".to_owned()].into_iter().chain(pairs).chain(aggregated).chain(self.args.iter().cloned()).collect()
    }
}
