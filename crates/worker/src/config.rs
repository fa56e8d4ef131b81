//! Settings of a worker. Both roles have the same settings.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_engine::{Eviction, Order};
use baton_runtime::config::{Plain, Value};
use baton_runtime::{Bytes, FetchConfig, Parsed, ProcessConfig, TlsConfig};
use baton_transfer::{Cpus, TransferLimits, TransportChoice, UcxOptions, UcxSettings};
use baton_types::KvDtype;

use crate::{BackendKind, GpuPoolHandles, Quantization};

/// How many prompt tokens fill a step ([`baton_engine::EngineConfig::pack_tokens`]).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum PackTokens {
    /// As many as saturate the hardware, measured when the worker starts.
    Auto,
    /// This many tokens.
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
        use internal_tls: TlsConfig = TlsConfig::default();
        /// The model: a path, a name, org/name on the hub, or random:NAME (random weights, no download). All workers and routers of a
        /// cluster need the same.
        model: String = "smollm2".to_owned(),
        /// Gives the model's files, if they come from a hub, to whoever asks at the admin endpoint for one by its digest: see --model-peers.
        share_models: bool = false,
        /// Address of the gRPC server that the router calls; port 0 takes a free one.
        grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Address where KV arrives over TCP; port 0 takes a free one. A prefill worker takes prefixes from others there, if they can reach it.
        transfer: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Host name or address by which others reach this worker; needed when it listens on 0.0.0.0.
        advertise: Option<String> = None,
        /// Where workers register: http://HOST:PORT of a router's internal address, or etcd://HOST:PORT,…; with TLS https:// or etcds://
        registry: String = "http://127.0.0.1:8002".to_owned(),
        /// How long the cluster keeps this worker in its view without a sign of life from it, which comes three times as often. With etcd and
        /// more than a few hundred workers take 30s.
        registry_ttl: Duration = Duration::from_secs(5),
        /// How KV travels to decode workers (prefill workers): auto, shm, tcp, ucx or cuda-ipc. auto uses ucx too if ucx_library or
        /// ucx_options is set. A decode worker accepts all of them; with ucx it opens UCX at its start instead of for the first peer.
        transport: Parsed<TransportChoice> = Parsed(TransportChoice::Auto),
        /// Directory of UCX's libucp.so.0; default: where the system looks for libraries.
        ucx_library: Option<PathBuf> = None,
        /// Settings of UCX under its own names, separated by spaces, for example TLS=rc,cuda_ipc NET_DEVICES=mlx5_0:1. UCX takes settings
        /// that are absent here from its own UCX_* variables and files.
        ucx_options: Parsed<UcxOptions> = Parsed::default(),
        /// TCP connections to each decode worker (prefill workers), at most 16. More than one helps if each connection has a limit, or if a
        /// long path loses packets. Otherwise one is fastest.
        tcp_connections: usize = 1,
        /// CPUs for the threads that send, receive and check KV, for example 0-3,8; default: any. CPUs close to the network card and to the
        /// pool's memory are best. To keep compute threads off these CPUs, lower threads and set pin_threads, which takes the first CPUs.
        transfer_cpus: Parsed<Cpus> = Parsed::default(),
        /// A folder that all workers of this machine can write to, for unix sockets; default: none, and workers reach each other over shared
        /// memory, or from GPU to GPU, only within a network namespace. Pods need one on a volume of their node.
        transfer_sockets: Option<PathBuf> = None,
        /// Longest time a decode worker keeps blocks reserved for KV that has not arrived.
        kv_lease: Duration = Duration::from_secs(600),
        /// While KV travels, each end sends a sign of life at least this often. All workers of a cluster need the same.
        transfer_heartbeat: Duration = TransferLimits::default().heartbeat,
        /// While KV travels, a worker that is silent for this long is given up. At least three heartbeats. With GPUs, more than four of
        /// their longest steps: a GPU's copy can queue behind two steps, and after giving it up a worker waits only half of this time for
        /// it.
        transfer_silence: Duration = TransferLimits::default().silence,
        /// Longest time a prefill worker's step waits for a decode worker that accepts no more KV.
        transfer_room: Duration = TransferLimits::default().room,
        /// Most workers with which this one hands KV over at once. A prefill worker closes idle sessions to keep a place free.
        transfer_sessions: usize = TransferLimits::default().connections,
        /// A session with another worker is closed when it has handed nothing over for this long; the next handoff begins another.
        transfer_idle: Duration = TransferLimits::default().idle,
        /// Longest time to connect to a decode worker, over all transports tried; also the longest time for each handoff to be admitted.
        transfer_handshake: Duration = TransferLimits::default().handshake,
        /// Element type of the KV pool: f32, f16, bf16, q8, fp8 or int4. All decode workers of a cluster need the same. A prefill worker
        /// with another type converts what it sends, and tokens may then differ by route (docs/kv-types.md).
        kv_type: Parsed<KvDtype> = Parsed(KvDtype::F16),
        /// Memory of the KV pool; default: 512MiB, or on a GPU what gpu_memory_fraction leaves.
        kv_memory: Option<Bytes> = None,
        /// Share of a GPU's memory for this worker's model and KV, above 0 and at most 1. Workers on the same GPU must divide it among
        /// them.
        gpu_memory_fraction: f64 = 0.9,
        /// By what other workers of this host open a KV pool in a GPU's memory: auto, by file descriptors where the driver has them; legacy, by
        /// CUDA's inter-process handles, for which pods need hostIPC and hostPID. Try legacy if the driver or UCX fails on such memory.
        gpu_pool_handles: GpuPoolHandles = GpuPoolHandles::Auto,
        /// Most host memory, outside the pool, for the KV of preempted sequences. Used where copying KV is faster than computing it again;
        /// 0B: none.
        swap_bytes: Bytes = Bytes(0),
        /// Host memory, outside the pool, for KV that the pool has no room for: prefixes that come again are copied back instead of computed.
        /// 0B: none.
        kv_host: Bytes = Bytes(0),
        /// Directory of a local disk for KV that host memory has no room for. It outlives the worker, and is this worker's alone. Needs kv_host,
        /// where blocks pass through.
        kv_disk: Option<PathBuf> = None,
        /// Most space that KV takes in kv_disk.
        kv_disk_size: Bytes = Bytes::gib(10),
        /// Object store for KV that host memory has no room for: s3://BUCKET/PREFIX, reached by AWS's variables (AWS_ENDPOINT_URL, AWS_REGION,
        /// AWS_ACCESS_KEY_ID, …), or file:///DIRECTORY of a file system that hosts share. It outlives the worker. Needs kv_host, where blocks pass
        /// through.
        kv_object: Option<String> = None,
        /// Most space that KV takes in kv_object.
        kv_object_size: Bytes = Bytes::gib(100),
        /// File with a secret of the cluster, 16 bytes or more, the same for all its processes: the names by which they speak of KV follow from
        /// it, so that who sees names cannot tell whose prompts they are. With another one, KV of before is not found. Default: no secret.
        kv_secret_file: Option<PathBuf> = None,
        /// Tokens of a KV block, a multiple of 16. All workers of a cluster need the same.
        block_size: u32 = 16,
        /// Layers of full attention see only the first tokens and this many of the last, so that a stream can run past the model's context;
        /// default: they see all. All workers of a cluster need the same.
        attention_window: Option<u32> = None,
        /// With an attention window: how many first tokens stay visible, rounded up to whole blocks; 0: none.
        attention_sinks: u32 = 4,
        /// Longest sequence in tokens, prompt and answer together; default: the model's context, or less if the pool cannot hold it. With
        /// an attention window it may exceed the model's context.
        context: Option<u32> = None,
        /// Most tokens computed in one step, over all sequences.
        token_budget: u32 = 512,
        /// Most prompt tokens of one sequence computed in one step.
        chunk: u32 = 256,
        /// Decode workers: if at least half of a prompt's KV is cached here and at most this many tokens are missing, the worker computes
        /// them itself beside its decode work. All prompts computed like this share the bound. 0: all prompts go to prefill workers.
        local_prefill: u32 = 64,
        /// Prefill workers: a prompt whose decode blocks are reserved late (the router's late_reservation) is announced when at most this many
        /// tokens are to be computed before it. More leave more time to reserve, and hold decode blocks for longer.
        reserve_ahead: u32 = 1024,
        /// Prompt tokens that fill a step. More than saturate the hardware only make prompts wait for each other. auto: the number that
        /// saturates it, measured at the start.
        pack_tokens: PackTokens = PackTokens::Auto,
        /// Target for the time to first token. The worker's load (/load, baton_load) is 1 when computing its queued prompts takes this long.
        slo_ttft: Duration = Duration::from_secs(1),
        /// Target for the time between two tokens of an answer. The worker's load is 1 when they take this long.
        slo_itl: Duration = Duration::from_millis(100),
        /// Most sequences in the running batch.
        max_running: u32 = 64,
        /// Most sequences that wait for a place in the batch; more are refused. Batch work that waits counts for batch work alone.
        max_waiting: u32 = 1024,
        /// In which order sequences are served: priority (by each request's priority, equal ones first come, first served), fcfs (first
        /// come, first served, whatever their priority) or shortest-first. Batch work comes last in each.
        order: Parsed<Order> = Parsed(Order::Priority),
        /// With an order other than fcfs: how many later sequences may start before an earlier one, at most.
        overtakes: u32 = 64,
        /// Most blocks in the prefix cache; 0: no prefix cache; default: all blocks that no sequence uses.
        prefix_cache_blocks: Option<u32> = None,
        /// Which cached blocks are evicted first: lru, lfu or priority (blocks that no request asked to keep go first).
        eviction: Parsed<Eviction> = Parsed(Eviction::Lru),
        /// With eviction = priority: longest time for which a request can have its blocks kept.
        max_keep: Duration = Duration::from_secs(3600),
        /// With eviction = priority: most of the prefix cache that requests can have kept at once, in percent. Blocks beyond it count as
        /// any other.
        max_kept_percent: u32 = 50,
        /// What computes: cpu; cuda (an NVIDIA GPU, without which the worker does not start); or auto (a usable GPU, else the CPU).
        backend: BackendKind = BackendKind::Cpu,
        /// On GPUs: number of the first GPU to use, from 0. Tensor-parallel ranks use it and the ones after it.
        first_gpu: u32 = 0,
        /// On a GPU: a request's tokens do not depend on other requests, on how its prompt is split into chunks, or on its route. Without
        /// it, steps are faster (decode steps of long sequences many times), and tokens may differ where two are almost equally likely.
        invariant: bool = true,
        /// On a GPU: a decode step of a size seen before is launched as one CUDA graph. This changes no token.
        cuda_graphs: bool = true,
        /// On a Hopper GPU: prefill attention uses Hopper's matrix units and copy engine, if that kernel supports the pool.
        hopper_attention: bool = true,
        /// Longest time for one step; default: 60s on a GPU, 10m on the CPU. If a step takes longer, the worker fails its requests so that
        /// they resume elsewhere, leaves the cluster and ends with an error, so that it is started again.
        step_timeout: Option<Duration> = None,
        /// Type of layer weights: none (as they are, on a GPU bf16), or on a GPU fp8 (E4M3 with one scale per output, inputs quantised to
        /// E4M3 too; about half the memory). All workers of a cluster need the same.
        quantization: Quantization = Quantization::None,
        /// Compute threads on the CPU; default: one per core.
        threads: Option<usize> = None,
        /// Tensor-parallel ranks: the number of parts into which the model is split, a divisor of its KV heads. On the CPU, ranks share the
        /// compute threads. On GPUs, each rank has a GPU.
        tp: u32 = 1,
        /// Pin each compute thread to a CPU of its own. Only for workers that have their CPUs to themselves.
        pin_threads: bool = false,
        /// On the CPU: measure at the start, for about a second, what the processor can do at most, for metrics (baton_ceiling). Other work on the
        /// machine lowers it.
        measure_ceilings: bool = false,
    }
}

impl WorkerConfig {
    /// Whether KV is kept below the pool.
    pub(crate) fn keeps_kv(&self) -> bool {
        self.kv_host.0 > 0 || self.kv_disk.is_some() || self.kv_object.is_some()
    }

    /// The transfer settings as the transfer engine takes them.
    pub fn transfer_limits(&self) -> TransferLimits {
        TransferLimits {
            heartbeat: self.transfer_heartbeat,
            silence: self.transfer_silence,
            room: self.transfer_room,
            connections: self.transfer_sessions,
            idle: self.transfer_idle,
            handshake: self.transfer_handshake,
            ..TransferLimits::default()
        }
    }

    /// The UCX settings as the transfer engine takes them.
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
}
