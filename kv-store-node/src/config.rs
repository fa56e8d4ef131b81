//! Settings of a KV store: those of a worker that have to do with KV, under the same names.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use baton_runtime::{Bytes, FetchConfig, Parsed, ProcessConfig, TlsConfig};
use baton_transfer::{Cpus, TransferLimits, TransportChoice, UcxOptions};
use baton_types::KvDtype;
use baton_worker::{Quantization, WorkerConfig, WorkerError};

baton_runtime::config! {
    /// A KV store: keeps KV that workers computed, and computes none.
    pub struct KvStoreConfig {
        use fetch: FetchConfig = FetchConfig::default();
        use process: ProcessConfig = ProcessConfig::default();
        use internal_tls: TlsConfig = TlsConfig::default();
        /// The model whose KV is kept, as the workers name it. Its files are opened to tell its KV from that of others; no weights are loaded.
        model: String = "smollm2".to_owned(),
        /// Address of the gRPC server that routers call; port 0 takes a free one.
        grpc: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Address where KV arrives over TCP; port 0 takes a free one. Workers on other machines must reach it.
        transfer: SocketAddr = SocketAddr::from(([127, 0, 0, 1], 0)),
        /// Host name or address by which others reach this store; needed when it listens on 0.0.0.0.
        advertise: Option<String> = None,
        /// Where workers register: http://HOST:PORT of a router's internal address, or etcd://HOST:PORT,…; with TLS https:// or etcds://
        registry: String = "http://127.0.0.1:8002".to_owned(),
        /// How long the cluster keeps this store in its view without a sign of life from it, which comes three times as often.
        registry_ttl: Duration = Duration::from_secs(5),
        /// How KV travels to workers: auto, shm, tcp or ucx.
        transport: Parsed<TransportChoice> = Parsed(TransportChoice::Auto),
        /// Directory of UCX's libucp.so.0; default: where the system looks for libraries.
        ucx_library: Option<PathBuf> = None,
        /// Settings of UCX under its own names, separated by spaces.
        ucx_options: Parsed<UcxOptions> = Parsed::default(),
        /// TCP connections to each worker, at most 16.
        tcp_connections: usize = 1,
        /// CPUs for the threads that send, receive and check KV, for example 0-3,8; default: any.
        transfer_cpus: Parsed<Cpus> = Parsed::default(),
        /// A folder that all workers of this machine can write to, for unix sockets; default: none (see baton decode --help).
        transfer_sockets: Option<PathBuf> = None,
        /// While KV travels, each end sends a sign of life at least this often. All workers of a cluster need the same.
        transfer_heartbeat: Duration = TransferLimits::default().heartbeat,
        /// While KV travels, a worker that is silent for this long is given up. At least three heartbeats.
        transfer_silence: Duration = TransferLimits::default().silence,
        /// Most workers with which this store has KV on the way at once.
        transfer_sessions: usize = TransferLimits::default().connections,
        /// Element type of the KV: f32, f16, bf16, q8, fp8 or int4, as the workers'.
        kv_type: Parsed<KvDtype> = Parsed(KvDtype::F16),
        /// Host memory for KV. A prefix must fit as a whole.
        kv_memory: Bytes = Bytes::gib(1),
        /// Further host memory, where blocks pass through to kv_disk and kv_object; 0B: none.
        kv_host: Bytes = Bytes(0),
        /// Directory of a local disk for KV that host memory has no room for. It outlives the store, and is this store's alone. Needs kv_host.
        kv_disk: Option<PathBuf> = None,
        /// Most space that KV takes in kv_disk.
        kv_disk_size: Bytes = Bytes::gib(10),
        /// Object store for KV that host memory has no room for: s3://BUCKET/PREFIX, reached by AWS's variables, or file:///DIRECTORY. Needs kv_host.
        kv_object: Option<String> = None,
        /// Most space that KV takes in kv_object.
        kv_object_size: Bytes = Bytes::gib(100),
        /// File with a secret of the cluster, 16 bytes or more, the same for all its processes: the names by which they speak of KV follow from
        /// it, so that who sees names cannot tell whose prompts they are. With another one, KV of before is not found. Default: no secret.
        kv_secret_file: Option<PathBuf> = None,
        /// Tokens of a KV block, as the workers have it.
        block_size: u32 = 16,
        /// As the workers have it: layers of full attention see only the first tokens and this many of the last; default: they see all.
        attention_window: Option<u32> = None,
        /// With an attention window: how many first tokens stay visible, as the workers have it.
        attention_sinks: u32 = 4,
        /// What computes the KV: cpu, or on GPUs the workers' backend as their log names it when the model is loaded (backend=…). Only workers
        /// with the same exchange KV with this store.
        computed_by: String = "cpu".to_owned(),
        /// Tensor-parallel ranks of the workers.
        tp: u32 = 1,
        /// Type of layer weights at the workers: none or fp8.
        quantization: Quantization = Quantization::None,
    }
}

impl KvStoreConfig {
    /// Checks what a worker's settings are not checked for.
    ///
    /// # Errors
    /// [`WorkerError::Config`]: the field, and what it must be.
    pub(crate) fn check(&self) -> Result<(), WorkerError> {
        let refused =
            |field, value: String, must: &str| Err(WorkerError::Config { field, value, must: must.to_owned() });
        let cpu = self.computed_by == "cpu";
        if !cpu && !self.computed_by.contains("cuda") {
            return refused(
                "computed_by",
                self.computed_by.clone(),
                "cpu, or the backend of workers on GPUs as their log names it",
            );
        }
        if cpu && self.quantization != Quantization::None {
            return refused("quantization", self.quantization.to_string(), "none where the CPU computes");
        }
        if self.transfer.ip().is_loopback() && !self.grpc.ip().is_loopback() {
            return refused(
                "transfer",
                self.transfer.to_string(),
                "an address that workers reach, as grpc is: a store lives by what they send",
            );
        }
        Ok(())
    }
}

impl From<KvStoreConfig> for WorkerConfig {
    fn from(config: KvStoreConfig) -> WorkerConfig {
        WorkerConfig {
            fetch: config.fetch,
            process: config.process,
            internal_tls: config.internal_tls,
            model: config.model,
            grpc: config.grpc,
            transfer: config.transfer,
            advertise: config.advertise,
            registry: config.registry,
            registry_ttl: config.registry_ttl,
            transport: config.transport,
            ucx_library: config.ucx_library,
            ucx_options: config.ucx_options,
            tcp_connections: config.tcp_connections,
            transfer_cpus: config.transfer_cpus,
            transfer_sockets: config.transfer_sockets,
            transfer_heartbeat: config.transfer_heartbeat,
            transfer_silence: config.transfer_silence,
            transfer_sessions: config.transfer_sessions,
            kv_type: config.kv_type,
            kv_memory: Some(config.kv_memory),
            kv_host: config.kv_host,
            kv_disk: config.kv_disk,
            kv_disk_size: config.kv_disk_size,
            kv_object: config.kv_object,
            kv_object_size: config.kv_object_size,
            kv_secret_file: config.kv_secret_file,
            block_size: config.block_size,
            attention_window: config.attention_window,
            attention_sinks: config.attention_sinks,
            tp: config.tp,
            quantization: config.quantization,
            ..WorkerConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_keep_nothing_is_refused_by_name() {
        let said = |config: KvStoreConfig| config.check().map_err(|error| error.to_string());
        let any = || SocketAddr::from(([10, 0, 0, 1], 9000));
        let gpus = "2 ranks of cuda NVIDIA H100".to_owned();
        assert_eq!(said(KvStoreConfig::default()), Ok(()));
        assert_eq!(
            said(KvStoreConfig { computed_by: gpus.clone(), quantization: Quantization::Fp8, ..Default::default() }),
            Ok(())
        );
        assert_eq!(said(KvStoreConfig { grpc: any(), transfer: any(), ..Default::default() }), Ok(()));
        for (config, wrong) in [
            (
                KvStoreConfig { computed_by: "gpu".to_owned(), ..Default::default() },
                "computed_by is gpu; it must be cpu, or",
            ),
            (
                KvStoreConfig { quantization: Quantization::Fp8, ..Default::default() },
                "quantization is fp8; it must be none",
            ),
            (
                KvStoreConfig { grpc: any(), ..Default::default() },
                "transfer is 127.0.0.1:0; it must be an address that workers reach",
            ),
        ] {
            let said = said(config).unwrap_err();
            assert!(said.starts_with(wrong), "{said}");
        }
    }
}
