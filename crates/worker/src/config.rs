//! Settings of a worker; both roles have the same.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_engine::{Eviction, Order};
use baton_runtime::config::{Plain, Value};
use baton_runtime::{Bytes, FetchConfig, Parsed, ProcessConfig};
use baton_transfer::{Cpus, Tls, TlsFiles, TransferLimits, TransportChoice, UcxOptions, UcxSettings};
use baton_types::KvDtype;

use crate::{BackendKind, Quantization, WorkerError};

/// How many prompt tokens fill a step.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PackTokens {
    /// As many as saturate the hardware, found by measuring.
    Auto,
    /// So many.
    Tokens(u32),
}

impl Value for PackTokens {
    const EXPECTS: &'static str = "auto or a whole number between 1 and 4294967295";

    fn from_plain(value: &Plain) -> Result<Self, String> {
        if value.text("").is_ok_and(|text| text == "auto") {
            return Ok(PackTokens::Auto);
        }
        let tokens = u32::from_plain(value).ok().filter(|tokens| *tokens > 0);
        tokens.map(PackTokens::Tokens).ok_or_else(|| value.refused(Self::EXPECTS))
    }

    fn to_plain(&self) -> Option<Plain> {
        match self {
            PackTokens::Auto => Some(Plain::Text("auto".to_owned())),
            PackTokens::Tokens(tokens) => tokens.to_plain(),
        }
    }
}

baton_runtime::config! {
    /// A worker: one model, one KV pool, one role.
    pub struct WorkerConfig {
        use fetch: FetchConfig = FetchConfig::default();
        use process: ProcessConfig = ProcessConfig::default();
        /// The model: a path, a name, org/name on the hub, or random:NAME, made without a download. All workers and routers of a cluster need the same.
        model: String = "smollm2".to_owned(),
        /// Address of the gRPC server the router calls; port 0 takes a free one.
        grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Address KV arrives at over TCP (decode workers); port 0 takes a free one.
        transfer: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Host name or address that others reach this worker by; needed when it listens on 0.0.0.0.
        advertise: Option<String> = None,
        /// Where workers register: http://HOST:PORT of a router's gRPC, or etcd://HOST:PORT,…
        registry: String = "http://127.0.0.1:8001".to_owned(),
        /// How long the cluster keeps this worker in its view when it is not heard.
        registry_ttl: Duration = Duration::from_secs(5),
        /// How KV travels to decode workers (prefill workers): auto, shm, tcp, ucx or cuda-ipc; auto uses ucx too where one of the next two
        /// settings is given. A decode worker takes all of them; with ucx it opens UCX when it starts, not for the first peer.
        transport: Parsed<TransportChoice> = Parsed(TransportChoice::Auto),
        /// Directory of UCX's libucp.so.0; default: where the system looks for libraries.
        ucx_library: Option<PathBuf> = None,
        /// Settings of UCX by its own names, separated by spaces, as TLS=rc,cuda_ipc NET_DEVICES=mlx5_0:1. What is not
        /// here, UCX takes from its own UCX_* variables and files.
        ucx_options: Parsed<UcxOptions> = Parsed::default(),
        /// Connections that KV goes over to each decode worker that is reached over TCP (prefill workers), at most 16. More than one
        /// helps where what limits the way is a bound for each connection, or packets lost on a long way; elsewhere one is fastest.
        tcp_connections: usize = 1,
        /// CPUs that the threads run on which send, receive and check KV, as 0-3,8; default: any. Best are those beside the network card
        /// and the pool's memory. Compute threads keep off them if they are fewer (threads) and pinned (pin_threads takes the first CPUs).
        transfer_cpus: Parsed<Cpus> = Parsed::default(),
        /// This worker's certificate in PEM, for TLS between workers where KV goes over TCP. With the next two settings; all workers
        /// of a cluster have them or none. Read once, at the start.
        transfer_tls_cert: Option<PathBuf> = None,
        /// Its private key in PEM.
        transfer_tls_key: Option<PathBuf> = None,
        /// Certificates in PEM of the authorities whose workers may send KV here and receive it from here.
        transfer_tls_ca: Option<PathBuf> = None,
        /// A name that the certificates of all decode workers have; default: each has the name or address it is reached by.
        transfer_tls_name: Option<String> = None,
        /// Longest time a decode worker keeps blocks reserved for KV that has not arrived.
        kv_lease: Duration = Duration::from_secs(600),
        /// While KV travels, each end tells the other at least so often that it is alive. All workers of a cluster need the same.
        transfer_heartbeat: Duration = TransferLimits::default().heartbeat,
        /// While KV travels, a worker that is not heard for so long is given up; at least three heartbeats, and with GPUs more than four
        /// of their longest steps: what they were to copy and is given up comes behind two, and is waited for half as long.
        transfer_silence: Duration = TransferLimits::default().silence,
        /// Longest time a prefill worker's step waits because a decode worker takes no more KV.
        transfer_room: Duration = TransferLimits::default().room,
        /// Longest time for connecting to a decode worker, over all paths, and again for each request to be let in.
        transfer_handshake: Duration = TransferLimits::default().handshake,
        /// Element type of the KV pool: f32, f16, bf16, q8, fp8 or int4. All workers of a cluster need the same.
        kv_type: Parsed<KvDtype> = Parsed(KvDtype::F16),
        /// Memory of the KV pool; default: 512MiB, or what gpu_memory_fraction leaves where the pool is in a GPU's memory.
        kv_memory: Option<Bytes> = None,
        /// Share of a GPU's memory that this worker takes for model and KV, above 0 and at most 1. Workers that share a GPU share it.
        gpu_memory_fraction: f64 = 0.9,
        /// Most memory beside the pool for the KV of preempted sequences, used where copying is faster than
        /// computing again; 0B: none.
        swap_bytes: Bytes = Bytes(0),
        /// Tokens of a KV block, a multiple of 16. All workers of a cluster need the same.
        block_size: u32 = 16,
        /// Layers of full attention see only the first tokens and this many of the last, so that a stream may run past the
        /// model's context; default: all. All workers of a cluster need the same.
        attention_window: Option<u32> = None,
        /// With an attention window: first tokens that stay visible, rounded up to whole blocks; 0: none.
        attention_sinks: u32 = 4,
        /// Longest sequence, prompt and answer; default: what the model was made for, as far as the pool can hold it. With an
        /// attention window it may be longer than that.
        context: Option<u32> = None,
        /// Most tokens computed in one step, over all sequences.
        token_budget: u32 = 512,
        /// Most prompt tokens of one sequence computed in one step.
        chunk: u32 = 256,
        /// Decode workers: most tokens of a prompt that one which holds the rest of it, the larger part, computes by itself, beside what
        /// it decodes and others of the kind, instead of having KV sent; 0: none, so that each prompt is read by a prefill worker.
        local_prefill: u32 = 64,
        /// Prompt tokens that fill a step; more than saturates the hardware only makes prompts wait for each other. auto: as many
        /// as a short measurement at the start finds to do so.
        pack_tokens: PackTokens = PackTokens::Auto,
        /// Most sequences in the running batch.
        max_running: u32 = 64,
        /// Most sequences that wait for a place; more are refused.
        max_waiting: u32 = 1024,
        /// In which order sequences are served: priority (the request's own, then first come first served), fcfs (whatever
        /// the requests say) or shortest-first.
        order: Parsed<Order> = Parsed(Order::Priority),
        /// Under another order than fcfs: how many later sequences may start before one, at most.
        overtakes: u32 = 64,
        /// Most blocks of tokens kept for prompts that begin alike; 0: none; default: all that nobody else needs.
        prefix_cache_blocks: Option<u32> = None,
        /// Which cached blocks make room first: lru, lfu or priority (those that no request asked to keep).
        eviction: Parsed<Eviction> = Parsed(Eviction::Lru),
        /// Under eviction = priority: longest time a request can have its blocks kept, whatever it asks for.
        max_keep: Duration = Duration::from_secs(3600),
        /// Under eviction = priority: most of the prefix cache that is kept at once, in percent; requests beyond are as any other.
        max_kept_percent: u32 = 50,
        /// What computes: cpu, cuda (a GPU by NVIDIA, or the worker does not start), or auto: a GPU where there is one that can.
        backend: BackendKind = BackendKind::Cpu,
        /// On GPUs: the number of the first one to take, counted from 0; tensor-parallel ranks take it and those after it.
        first_gpu: u32 = 0,
        /// On a GPU: a request's tokens do not depend on what else runs, how its prompt was cut or by which way its KV came. Without it
        /// steps are faster, decode steps of long sequences many times, and tokens may differ where two are almost as likely.
        invariant: bool = true,
        /// On a GPU: decode steps of a size that was there before are launched as a whole. Not a token depends on it.
        cuda_graphs: bool = true,
        /// On a Hopper GPU: prompts are attended to by its own matrix units and copy engine, where their kernel takes the pool.
        hopper_attention: bool = true,
        /// On a GPU: longest time that it may take for a step. One that takes longer is taken to stand still: the worker tells its requests,
        /// which go on elsewhere, leaves the cluster and ends with an error, so that it is started anew.
        gpu_timeout: Duration = Duration::from_secs(60),
        /// Weights of layers: none (as they are, on a GPU bf16), or on a GPU fp8: 8-bit floats (E4M3) with a scale for each output, and so the
        /// rows that they are multiplied with; about half the memory. All workers of a cluster need the same.
        quantization: Quantization = Quantization::None,
        /// Compute threads on the CPU; default: one per core.
        threads: Option<usize> = None,
        /// Tensor-parallel ranks: the model is split over so many, which on the CPU share the threads and on GPUs have one each. A divisor of its
        /// KV heads.
        tp: u32 = 1,
        /// Keep each compute thread on a CPU of its own; for workers that share their CPUs with nobody.
        pin_threads: bool = false,
    }
}

impl WorkerConfig {
    /// Bounds of transfers, in the transfer engine's words.
    pub fn transfer_limits(&self) -> TransferLimits {
        TransferLimits {
            heartbeat: self.transfer_heartbeat,
            silence: self.transfer_silence,
            room: self.transfer_room,
            handshake: self.transfer_handshake,
            ..TransferLimits::default()
        }
    }

    /// TLS between workers, if it is set up.
    ///
    /// # Errors
    /// When files are missing or cannot be used.
    pub fn transfer_tls(&self) -> Result<Option<Tls>, WorkerError> {
        let name = self.transfer_tls_name.clone();
        match [&self.transfer_tls_cert, &self.transfer_tls_key, &self.transfer_tls_ca].map(Option::as_ref) {
            [None, None, None] if name.is_none() => Ok(None),
            [Some(certificate), Some(key), Some(authority)] => {
                let [certificate, key, authority] = [certificate, key, authority].map(PathBuf::clone);
                Ok(Some(Tls::load(&TlsFiles { certificate, key, authority, name })?))
            }
            [cert, key, _] => {
                let fields = [(cert, "transfer_tls_cert"), (key, "transfer_tls_key")];
                let missing = fields.into_iter().find(|(value, _)| value.is_none());
                let field = missing.map_or("transfer_tls_ca", |(_, field)| field);
                let must = "a file: TLS takes transfer_tls_cert, transfer_tls_key and transfer_tls_ca together";
                Err(WorkerError::Config { field, value: "not set".to_owned(), must: must.to_owned() })
            }
        }
    }

    /// How UCX is found and set up, in the transfer engine's words.
    pub fn ucx(&self) -> UcxSettings {
        UcxSettings { directory: self.ucx_library.clone(), options: self.ucx_options.0.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_of_a_step_are_a_number_or_found_by_measuring() {
        for (plain, want) in [
            (Plain::Text("auto".to_owned()), Ok(PackTokens::Auto)),
            (Plain::Text("64".to_owned()), Ok(PackTokens::Tokens(64))),
            (Plain::Int(64), Ok(PackTokens::Tokens(64))),
            (Plain::Int(0), Err(format!("0 is not {}", PackTokens::EXPECTS))),
            (Plain::Text("all".to_owned()), Err(format!("\"all\" is not {}", PackTokens::EXPECTS))),
        ] {
            let read = PackTokens::from_plain(&plain);
            assert_eq!(read, want);
            if let Ok(value) = read {
                assert_eq!(PackTokens::from_plain(&value.to_plain().unwrap()), Ok(value), "what is printed reads back");
            }
        }
    }

    #[test]
    fn tls_takes_three_files_or_none() {
        let refused = |cert: Option<&str>, key: Option<&str>, ca: Option<&str>, name: Option<&str>| {
            let config = WorkerConfig {
                transfer_tls_cert: cert.map(PathBuf::from),
                transfer_tls_key: key.map(PathBuf::from),
                transfer_tls_ca: ca.map(PathBuf::from),
                transfer_tls_name: name.map(str::to_owned),
                ..WorkerConfig::default()
            };
            config.transfer_tls().map(|tls| assert!(tls.is_none())).map_err(|error| error.to_string())
        };
        let file = Some("/nonexistent");
        assert_eq!(refused(None, None, None, None), Ok(()));
        for (error, want) in [
            (refused(file, None, file, None), "transfer_tls_key is not set"),
            (refused(None, file, None, None), "transfer_tls_cert is not set"),
            (refused(file, file, None, None), "transfer_tls_ca is not set"),
            (refused(None, None, None, Some("worker")), "transfer_tls_cert is not set"),
            (refused(file, file, file, None), "tls.certificate: /nonexistent"),
        ] {
            let error = error.unwrap_err();
            assert!(error.starts_with(want), "{error}");
        }
    }
}
