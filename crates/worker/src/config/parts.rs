//! Settings that workers and KV stores have in common.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_runtime::{Bytes, Parsed};
use baton_transfer::{Cpus, TransferLimits, TransportChoice, UcxOptions};
use baton_types::KvDtype;

use crate::Quantization;

baton_runtime::config! {
    /// How a worker is reached, and which cluster it joins.
    pub struct JoinConfig {
        /// Address of the gRPC server that the router calls; port 0 takes a free one.
        grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Host name or address by which others reach this worker; needed when it listens on 0.0.0.0.
        advertise: Option<String> = None,
        /// Where workers register: http://HOST:PORT of a router's internal address, or etcd://HOST:PORT,…; with TLS https:// or etcds://
        registry: String = "http://127.0.0.1:8002".to_owned(),
        /// How long the cluster keeps this worker in its view without a sign of life from it, which comes three times as often. With etcd and
        /// more than a few hundred workers take 30s.
        registry_ttl: Duration = Duration::from_secs(5),
    }
}

baton_runtime::config! {
    /// How KV travels between workers.
    pub struct TransferConfig {
        /// Address where KV arrives over TCP; port 0 takes a free one. A prefill worker takes prefixes from others there, if they can reach it.
        transfer: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
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
        /// CPUs for the threads that send, receive and check KV, for example 0-3,8; default: with up to 16 CPUs, those with even numbers receive
        /// and those with odd ones send; else any. CPUs close to the network card and to the pool's memory are best. To keep compute threads off
        /// these CPUs, lower threads and set pin_threads, which takes the first CPUs.
        transfer_cpus: Parsed<Cpus> = Parsed::default(),
        /// A folder that all workers of this machine can write to, for unix sockets; default: none, and workers reach each other over shared
        /// memory, or from GPU to GPU, only within a network namespace. Pods need one on a volume of their node.
        transfer_sockets: Option<PathBuf> = None,
        /// While KV travels, each end sends a sign of life at least this often. All workers of a cluster need the same.
        transfer_heartbeat: Duration = TransferLimits::default().heartbeat,
        /// While KV travels, a worker that is silent for this long is given up. At least three heartbeats. With GPUs, more than four of
        /// their longest steps: a GPU's copy can queue behind two steps, and after giving it up a worker waits only half of this time for
        /// it.
        transfer_silence: Duration = TransferLimits::default().silence,
        /// Most workers with which this one hands KV over at once. A prefill worker closes idle sessions to keep a place free.
        transfer_sessions: usize = TransferLimits::default().connections,
    }
}

baton_runtime::config! {
    /// Where KV goes that the pool has no room for.
    pub struct TiersConfig {
        /// Host memory, outside the pool, for KV that the pool has no room for: prefixes that come again are copied back instead of computed.
        /// 0B: none.
        kv_host: Bytes = Bytes(0),
        /// Directory of a local disk for KV that host memory has no room for. It outlives the process, and is this one's alone. Needs kv_host,
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
        /// Only blocks that were asked for so often are written to kv_disk and kv_object. 1: all of them; 2 saves about three quarters of a chat
        /// service's writes, and most conversations' second turn is computed.
        kv_min_uses: u32 = 1,
        /// File with a secret of the cluster, 16 bytes or more, the same for all its processes: the names by which they speak of KV follow from
        /// it, so that who sees names cannot tell whose prompts they are. With another one, KV of before is not found. Default: no secret.
        kv_secret_file: Option<PathBuf> = None,
    }
}

baton_runtime::config! {
    /// What KV is like. All workers of a cluster need the same.
    pub struct KvConfig {
        /// Element type of the KV pool: f32, f16, bf16, q8, fp8 or int4. All decode workers of a cluster need the same. A prefill worker
        /// with another type converts what it sends, and tokens may then differ by route (docs/kv-types.md).
        kv_type: Parsed<KvDtype> = Parsed(KvDtype::F16),
        /// Tokens of a KV block, a multiple of 16. All workers of a cluster need the same.
        block_size: u32 = 16,
        /// Layers of full attention see only the first tokens and this many of the last, so that a stream can run past the model's context;
        /// default: they see all. All workers of a cluster need the same.
        attention_window: Option<u32> = None,
        /// With an attention window: how many first tokens stay visible, rounded up to whole blocks; 0: none.
        attention_sinks: u32 = 4,
        /// Tensor-parallel ranks: the number of parts into which the model is split, a divisor of its KV heads. On the CPU, ranks share the
        /// compute threads. On GPUs, each rank has a GPU.
        tp: u32 = 1,
        /// Type of layer weights: none (as they are, on a GPU bf16), or on a GPU fp8 (E4M3 with one scale per output, inputs quantised to
        /// E4M3 too; about half the memory). All workers of a cluster need the same.
        quantization: Quantization = Quantization::None,
    }
}
