//! Settings of a worker. Both roles have the same settings.

mod parts;

use std::time::Duration;

use baton_engine::{Eviction, Order};
use baton_runtime::config::{Plain, Value};
use baton_runtime::{Bytes, FetchConfig, Parsed, ProcessConfig, TlsConfig};
use baton_transfer::{TransferLimits, UcxSettings};

pub use parts::{JoinConfig, KvConfig, TiersConfig, TransferConfig};

use crate::{BackendKind, GpuPoolHandles};

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
        use join: JoinConfig = JoinConfig::default();
        use transfers: TransferConfig = TransferConfig::default();
        use tiers: TiersConfig = TiersConfig::default();
        use kv: KvConfig = KvConfig::default();
        /// The model: a path, a name, org/name on the hub, or random:NAME (random weights, no download). All workers and routers of a
        /// cluster need the same.
        model: String = "smollm2".to_owned(),
        /// Gives the model's files, if they come from a hub, to whoever asks at the admin endpoint for one by its digest: see --model-peers.
        share_models: bool = false,
        /// Longest time a decode worker keeps blocks reserved for KV that has not arrived.
        kv_lease: Duration = Duration::from_secs(600),
        /// Longest time a prefill worker's step waits for a decode worker that accepts no more KV.
        transfer_room: Duration = TransferLimits::default().room,
        /// A session with another worker is closed when it has handed nothing over for this long; the next handoff begins another.
        transfer_idle: Duration = TransferLimits::default().idle,
        /// Longest time to connect to a decode worker, over all transports tried; also the longest time for each handoff to be admitted.
        transfer_handshake: Duration = TransferLimits::default().handshake,
        /// Memory of the KV pool; default: 512MiB, or on a GPU what gpu_memory_fraction leaves.
        kv_memory: Option<Bytes> = None,
        /// Share of a GPU's memory for this worker's model and KV, above 0 and at most 1. Workers on the same GPU must divide it among
        /// them.
        gpu_memory_fraction: f64 = 0.9,
        /// By what other workers of this host open a KV pool in a GPU's memory: auto, by file descriptors where the driver has them; legacy, by
        /// CUDA's inter-process handles, for which pods need hostIPC and hostPID. Try legacy if the driver or UCX fails on such memory.
        gpu_pool_handles: GpuPoolHandles = GpuPoolHandles::Auto,
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
        /// With eviction = priority: most of the prefix cache, and of kv_host, that requests can have kept at once, in percent. Blocks beyond it
        /// count as any other.
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
        /// Compute threads on the CPU; default: one per core.
        threads: Option<usize> = None,
        /// On the CPU: most disk space, in the model cache, for weights as the kernels read them. The next worker on this machine that needs the
        /// same ones maps them instead of packing its own (docs/memory.md). The model cache must be on a local disk. 0B: none.
        packed_weights: Bytes = Bytes(0),
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
        self.tiers.kv_host.0 > 0 || self.tiers.kv_disk.is_some() || self.tiers.kv_object.is_some()
    }

    /// The transfer settings as the transfer engine takes them.
    pub fn transfer_limits(&self) -> TransferLimits {
        TransferLimits {
            heartbeat: self.transfers.transfer_heartbeat,
            silence: self.transfers.transfer_silence,
            room: self.transfer_room,
            connections: self.transfers.transfer_sessions,
            idle: self.transfer_idle,
            handshake: self.transfer_handshake,
            ..TransferLimits::default()
        }
    }

    /// The UCX settings as the transfer engine takes them.
    pub fn ucx(&self) -> UcxSettings {
        UcxSettings { directory: self.transfers.ucx_library.clone(), options: self.transfers.ucx_options.0.clone() }
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
