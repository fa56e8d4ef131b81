//! The router's settings.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_policy::Keep;
use baton_runtime::{Bytes, FetchConfig, ProcessConfig, TlsConfig};

use crate::error::RouterError;
use crate::model::TOKEN_CACHE;

/// Half of what people notice: below that, the decode blocks that a waiting prompt holds are held for a moment only.
const LATE_RESERVATION: Duration = Duration::from_millis(250);

/// The value of `registry` for the one inside the router.
pub(crate) const EMBEDDED: &str = "embedded";

baton_runtime::config_enum! {
    /// How workers are chosen.
    pub enum PlacementKind {
        /// Where a request waits least, and makes others wait least, as predicted from what workers say of their load and their KV.
        Predicted = "predicted",
        /// In turn.
        RoundRobin = "round-robin",
        /// The worker with the fewest requests of this router; equals take turns.
        LeastLoaded = "least-loaded",
    }
}

baton_runtime::config_enum! {
    /// Where values for sampling come from that a request leaves out.
    pub enum DefaultsKind {
        /// From the model.
        Model = "model",
        /// From OpenAI's API.
        Api = "api",
    }
}

baton_runtime::config! {
    /// The router: serves clients over OpenAI-compatible HTTP and gRPC, and coordinates each request.
    pub struct RouterConfig {
        use fetch: FetchConfig = FetchConfig::default();
        use process: ProcessConfig = ProcessConfig::default();
        use internal_tls: TlsConfig = TlsConfig::default();
        /// Address of the OpenAI-compatible HTTP API; port 0 takes a free one.
        http: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8000)),
        /// Address of the gRPC API; port 0 takes a free one.
        grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8001)),
        /// Certificate for clients in PEM, then the intermediate ones: HTTP and gRPC have TLS then. Needs public_tls_key too. Both are read
        /// again when they change. Default: no TLS.
        public_tls_cert: Option<PathBuf> = None,
        /// Private key of public_tls_cert, in PEM.
        public_tls_key: Option<PathBuf> = None,
        /// Address where workers register, and where `baton status` asks, if the registry is embedded; port 0 takes a free one. Whoever
        /// reaches it can register a worker and so receive prompts: let only workers and operators.
        internal: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 8002)),
        /// Serves the embedded registry at the gRPC API's address, too, for workers that were started before there was --internal. Then
        /// every client can register a worker. It goes with the next version.
        registry_on_grpc: bool = false,
        /// The models to serve, separated by commas, each as a path, a name, org/name on the hub, or random:NAME.
        /// The router reads only their tokenizers and chat templates. A worker has one model, and gets the requests for that.
        model: String = "smollm2".to_owned(),
        /// Names by which clients ask for the model, separated by commas; the first is the one that answers carry. Those of several models
        /// are separated by semicolons, in the order of model.
        /// Default: the value of model or, if that is a path, the file's name without its ending.
        served_name: Option<String> = None,
        /// How to sample where a request does not say: model (as its makers advise: generation_config.json, general.sampling of a GGUF file, or
        /// the catalogue; the API's defaults where they say nothing), or api (temperature 1, all tokens).
        sampling_defaults: DefaultsKind = DefaultsKind::Model,
        /// The registry of the workers: embedded (this router holds their leases), or etcd://HOST:PORT,…
        registry: String = "embedded".to_owned(),
        /// A TOML file with the API keys of clients, as hashes, and what each tenant may use; see docs/tenants.md. It is read again when
        /// it changes, and on SIGHUP. Default: no client needs a key.
        keys_file: Option<PathBuf> = None,
        /// Prompt tokens that may wait at each worker that computes prompts: of all requests with keys_file, else of batch requests. Further
        /// requests wait in the router, so that tenants take turns. More keeps fast workers busy; less lets other tenants in sooner.
        fair_window: u32 = 8192,
        /// File with a secret of the cluster, 16 bytes or more, the same for all its processes: the names by which they speak of KV follow from
        /// it, so that who sees names cannot tell whose prompts they are. With another one, KV of before is not found. Default: no secret.
        kv_secret_file: Option<PathBuf> = None,
        /// A file that keeps the latest view of the workers, so that a router that restarts while the registry is away serves at once.
        /// Default: none.
        view_file: Option<PathBuf> = None,
        /// Longest time a request may take.
        request_timeout: Duration = Duration::from_secs(600),
        /// Maximum answers in progress at a time (a request with n=4 counts as 4); more are refused with 429.
        max_inflight: usize = 1024,
        /// Maximum open connections, for HTTP and for gRPC each; one more takes the place of one that waits for a request.
        max_connections: usize = 4096,
        /// Maximum size of a request's body.
        body_limit: Bytes = Bytes(8 << 20),
        /// Maximum bytes of the bodies that are being read and parsed at a time, and of the answers that are sent whole; more are refused with
        /// 429. Answers that are streamed need none, unless they repeat their prompts (echo).
        body_memory: Bytes = Bytes(256 << 20),
        /// Memory for the tokens of texts seen before: prompts that begin alike are tokenised once up to where they differ. 0: none.
        token_cache: Bytes = TOKEN_CACHE,
        /// How workers are chosen: predicted (where a request waits least and makes others wait least, by what workers say of their load and
        /// their KV), round-robin, or least-loaded (the fewest requests of this router).
        placement: PlacementKind = PlacementKind::Predicted,
        /// With predicted: most tokens that a decode worker computes of a prompt, where that is soonest, while there are prefill workers.
        local_prompt: u32 = 256,
        /// Decode blocks for a prompt that is predicted to wait at least this long at its prefill worker are reserved when its turn is near, so
        /// that a queue of prompts holds none. 0s: for all prompts, and with any placement (least-loaded counts them from then on only).
        late_reservation: Duration = LATE_RESERVATION,
        /// KV stores (`baton kv-store`) keep the blocks of prompts and answers from this use on, at most 15; 1: all. With 2 they take in a fraction of
        /// it, and nothing of what comes once (docs/kv-store.md).
        kv_store_min_uses: u32 = 1,
        /// Idle workers take copies of prefixes that many prompts begin with, so that these are there when load grows: each at most this
        /// percentage of its KV pool in ten minutes. 0: none (docs/placement.md).
        hot_prefix_percent: u32 = 10,
        /// Learns how long each tenant's users take from an answer to their next question, and has a conversation's KV brought from a worker's own store,
        /// or from a KV store, into a pool shortly before it is likely to go on (docs/kv-store.md).
        recall_turns: bool = false,
        /// With predicted: a request whose first token is predicted to come later than this is rejected with 429 before any work is spent on
        /// it; the error says why, and when to retry. A key or a request may have its own (see docs/placement.md). Default: none is.
        reject_ttft: Option<Duration> = None,
        /// With predicted: a request whose tokens are predicted to be further apart than this, in the mean, is rejected so. Default: none is.
        reject_itl: Option<Duration> = None,
        /// How many times work is started for one answer before it fails.
        max_attempts: u32 = 3,
        /// How long an answer waits for a worker when none is left that can go on with it; a new request waits 2s of it at most. Longer
        /// outlasts the restart of a cluster's only worker.
        worker_wait: Duration = Duration::from_secs(2),
        /// A worker that sends nothing for this long, not even the answer to a ping, counts as lost.
        worker_timeout: Duration = Duration::from_secs(2),
        /// A worker that takes this long to the first token of an answer is given up, and the request goes on elsewhere; not for batch work.
        first_token_timeout: Duration = Duration::from_secs(300),
        /// A worker that takes this long from one token of an answer to the next is given up, and the request goes on elsewhere; not for batch
        /// work.
        /// Where there is more to do than room, sequences are preempted and wait; let it be longer than that.
        token_timeout: Duration = Duration::from_secs(300),
        /// An HTTP connection that waits for its next request is closed after this long; for its first, after 10s. Keep it above the idle
        /// timeout of a load balancer.
        idle_timeout: Duration = Duration::from_secs(75),
        /// A gRPC connection is asked to end after this long, so that clients spread over routers that were added; default: never. Its
        /// calls end first. A call that begins at that moment is sent again by most clients; those made with tonic must do so themselves.
        /// One that has not ended when request_timeout and send_timeout are over after that is cut.
        connection_age: Option<Duration> = None,
        /// An answer whose client reads nothing of it for this long, while more is there, is given up; so is one whose client cannot be reached
        /// for this long.
        send_timeout: Duration = Duration::from_secs(60),
        /// Shows the beginning of prompts on the admin endpoint's page. Without it, the page shows no text of any request.
        admin_prompts: bool = false,
        /// Interval of the comments that keep a stream alive while it has nothing else to send.
        keep_alive: Duration = Duration::from_secs(5),
    }
}

impl RouterConfig {
    /// Refuses values that their types allow but the router cannot work with.
    pub(crate) fn check(&self) -> Result<(), RouterError> {
        let zero = [
            ("request_timeout", self.request_timeout.is_zero()),
            ("fair_window", self.fair_window == 0),
            ("max_inflight", self.max_inflight == 0),
            ("max_connections", self.max_connections == 0),
            ("body_limit", self.body_limit.0 == 0),
            ("max_attempts", self.max_attempts == 0),
            ("worker_timeout", self.worker_timeout.is_zero()),
            ("first_token_timeout", self.first_token_timeout.is_zero()),
            ("token_timeout", self.token_timeout.is_zero()),
            ("idle_timeout", self.idle_timeout.is_zero()),
            ("connection_age", self.connection_age.is_some_and(|age| age.is_zero())),
            ("send_timeout", self.send_timeout.is_zero()),
            ("keep_alive", self.keep_alive.is_zero()),
            ("reject_ttft", self.reject_ttft.is_some_and(|slo| slo.is_zero())),
            ("reject_itl", self.reject_itl.is_some_and(|slo| slo.is_zero())),
        ];
        if let Some((field, _)) = zero.into_iter().find(|(_, zero)| *zero) {
            return Err(RouterError::Zero { field });
        }
        if self.registry == EMBEDDED {
            self.internal_tls.check_listener("internal", self.internal)?;
        }
        if !self.predicts() && (self.reject_ttft.is_some() || self.reject_itl.is_some()) {
            return Err(RouterError::SloNeedsPrediction);
        }
        if !(1..=u32::from(Keep::MOST_USES)).contains(&self.kv_store_min_uses) {
            return Err(RouterError::KvStoreMinUses(self.kv_store_min_uses));
        }
        if self.hot_prefix_percent > 100 {
            return Err(RouterError::HotPrefixPercent(self.hot_prefix_percent));
        }
        if self.registry_on_grpc && (self.keys_file.is_some() || self.internal_tls.tls_cert.is_some()) {
            return Err(RouterError::OpenRegistry);
        }
        if self.body_memory.0 < self.body_limit.0 {
            return Err(RouterError::BodyMemory { memory: self.body_memory, limit: self.body_limit });
        }
        self.check_addresses()
    }

    /// Whether the chosen placement predicts when tokens come.
    pub(crate) fn predicts(&self) -> bool {
        self.placement == PlacementKind::Predicted
    }

    fn check_addresses(&self) -> Result<(), RouterError> {
        let [http, grpc, internal] = [("--http", self.http), ("--grpc", self.grpc), ("--internal", self.internal)];
        // With another registry there is no internal listener.
        let pairs = if self.registry == EMBEDDED {
            &[(http, grpc), (http, internal), (grpc, internal)][..]
        } else {
            &[(http, grpc)]
        };
        match pairs.iter().find(|(a, b)| clash(a.1, b.1)) {
            Some((a, b)) => Err(RouterError::SameAddress { addr: a.1, flags: (a.0, b.0) }),
            None => Ok(()),
        }
    }
}

/// True when only one of the two addresses can be listened on.
fn clash(a: SocketAddr, b: SocketAddr) -> bool {
    let same_host = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    a.port() == b.port() && a.port() != 0 && same_host
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_servers_need_two_addresses() {
        let clash = |a: &str, b: &str| clash(a.parse().unwrap(), b.parse().unwrap());
        assert!(clash("127.0.0.1:80", "127.0.0.1:80") && clash("0.0.0.0:80", "127.0.0.1:80"));
        assert!(!clash("127.0.0.1:0", "127.0.0.1:0"), "0 takes two free ports");
        assert!(!clash("127.0.0.1:80", "127.0.0.2:80") && !clash("127.0.0.1:80", "127.0.0.1:81"));
    }

    #[test]
    fn uses_that_are_not_counted_are_refused_by_name() {
        let said = |uses| {
            RouterConfig { kv_store_min_uses: uses, ..RouterConfig::default() }.check().map_err(|e| e.to_string())
        };
        assert_eq!([said(1), said(15)], [Ok(()), Ok(())]);
        for uses in [0, 16] {
            assert_eq!(said(uses), Err(format!("kv_store_min_uses is {uses}; it must be 1 to 15")));
        }
    }

    #[test]
    fn more_than_all_of_a_pool_is_refused_by_name() {
        let said = |percent| RouterConfig { hot_prefix_percent: percent, ..RouterConfig::default() }.check();
        assert!([0, 100].into_iter().all(|percent| said(percent).is_ok()));
        let error = said(101).unwrap_err().to_string();
        assert_eq!(error, "hot_prefix_percent is 101; it must be at most 100");
    }

    #[test]
    fn an_address_that_is_taken_twice_is_refused_by_name() {
        let internal = RouterConfig { internal: RouterConfig::default().grpc, ..RouterConfig::default() };
        let error = internal.check().unwrap_err().to_string();
        assert!(error.contains("--grpc") && error.contains("--internal"), "{error}");
        let elsewhere = RouterConfig { registry: "etcd://a:1".to_owned(), ..internal };
        elsewhere.check().unwrap();
    }
}
