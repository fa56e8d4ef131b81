//! Settings of a KV store: those of a worker that have to do with KV, under the same names.

use baton_runtime::{Bytes, FetchConfig, ProcessConfig, TlsConfig};
use baton_worker::{JoinConfig, KvConfig, Quantization, TiersConfig, TransferConfig, WorkerConfig, WorkerError};

baton_runtime::config! {
    /// A KV store: keeps KV that workers computed, and computes none.
    pub struct KvStoreConfig {
        use fetch: FetchConfig = FetchConfig::default();
        use process: ProcessConfig = ProcessConfig::default();
        use internal_tls: TlsConfig = TlsConfig::default();
        use join: JoinConfig = JoinConfig::default();
        use transfers: TransferConfig = TransferConfig::default();
        use tiers: TiersConfig = TiersConfig::default();
        use kv: KvConfig = KvConfig::default();
        /// The model whose KV is kept, as the workers name it. Its files are opened to tell its KV from that of others; no weights are loaded.
        model: String = "smollm2".to_owned(),
        /// Host memory for KV. A prefix must fit as a whole.
        kv_memory: Bytes = Bytes::gib(1),
        /// What computes the KV: cpu, or on GPUs the workers' backend as their log names it when the model is loaded (backend=…). Only workers
        /// with the same exchange KV with this store.
        computed_by: String = "cpu".to_owned(),
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
        if cpu && self.kv.quantization != Quantization::None {
            return refused("quantization", self.kv.quantization.to_string(), "none where the CPU computes");
        }
        if self.transfers.transfer.ip().is_loopback() && !self.join.grpc.ip().is_loopback() {
            return refused(
                "transfer",
                self.transfers.transfer.to_string(),
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
            join: config.join,
            transfers: config.transfers,
            tiers: config.tiers,
            kv: config.kv,
            kv_memory: Some(config.kv_memory),
            ..WorkerConfig::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn what_would_keep_nothing_is_refused_by_name() {
        let said = |config: KvStoreConfig| config.check().map_err(|error| error.to_string());
        let by = |computed_by: &str, quantization| KvStoreConfig {
            computed_by: computed_by.to_owned(),
            kv: KvConfig { quantization, ..KvConfig::default() },
            ..KvStoreConfig::default()
        };
        let any = || SocketAddr::from(([10, 0, 0, 1], 9000));
        let join = JoinConfig { grpc: any(), ..JoinConfig::default() };
        let reached = KvStoreConfig { join, ..KvStoreConfig::default() };
        assert_eq!(said(KvStoreConfig::default()), Ok(()));
        assert_eq!(said(by("2 ranks of cuda NVIDIA H100", Quantization::Fp8)), Ok(()));
        let transfers = TransferConfig { transfer: any(), ..TransferConfig::default() };
        assert_eq!(said(KvStoreConfig { transfers, ..reached.clone() }), Ok(()));
        for (config, wrong) in [
            (by("gpu", Quantization::None), "computed_by is gpu; it must be cpu, or"),
            (by("cpu", Quantization::Fp8), "quantization is fp8; it must be none"),
            (reached, "transfer is 127.0.0.1:0; it must be an address that workers reach"),
        ] {
            let said = said(config).unwrap_err();
            assert!(said.starts_with(wrong), "{said}");
        }
    }
}
