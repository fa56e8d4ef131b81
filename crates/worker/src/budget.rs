//! Divides a GPU's memory: a worker takes a fraction of it, the model takes its part of that fraction, and the rest is KV.
//!
//! Pure arithmetic, done before anything is allocated, so that the error for a model that does not fit names the setting to change.

use std::sync::Arc;

use baton_kernels::KernelError;
use baton_kernels::cuda::Device;
use baton_model::Footprint;
use baton_runtime::Bytes;
use baton_types::KvLayout;

use crate::WorkerError;

/// A GPU's memory in bytes; for several GPUs the least of each value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct GpuMemory {
    /// All memory.
    pub total: u64,
    /// Memory not allocated by anybody.
    pub free: u64,
}

impl GpuMemory {
    /// What each of these devices has at least, now.
    pub fn of<D: Device>(devices: &[Arc<D>]) -> Result<Self, KernelError> {
        devices.iter().try_fold(GpuMemory { total: u64::MAX, free: u64::MAX }, |least, device| {
            let (total, free) = (device.properties().memory, device.free_memory()?);
            Ok(GpuMemory { total: least.total.min(total), free: least.free.min(free) })
        })
    }
}

/// How much of a GPU's memory a worker may use, and what its model needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Budget {
    pub gpu: GpuMemory,
    /// This worker's share of all the memory.
    pub fraction: f64,
    /// What the model takes in addition to its KV.
    pub footprint: Footprint,
}

impl Budget {
    /// Bytes this worker may take: its fraction of all memory, and no more than is free.
    fn room(&self) -> u64 {
        ((self.gpu.total as f64 * self.fraction) as u64).min(self.gpu.free)
    }

    /// Blocks of the pool: those that the `asked` bytes hold, or else as many as fit beside the model. Logs where the memory goes.
    ///
    /// # Errors
    /// The model does not fit, does not fit with the pool asked for, or leaves no room for one block.
    pub fn blocks(&self, layout: &KvLayout, asked: Option<Bytes>) -> Result<u32, WorkerError> {
        let block = layout.block_bytes_all_groups();
        let (needed, room) = (self.footprint.total() + asked.map_or(block, |kv| kv.0), self.room());
        if needed > room {
            let kv = asked.map_or("a block of KV at least".to_owned(), |kv| format!("KV {} (kv_memory)", gib(kv.0)));
            return Err(self.does_not_fit(needed, &kv, asked));
        }
        let blocks = most_blocks(asked.map_or(room - self.footprint.total(), |kv| kv.0), block);
        self.log(u64::from(blocks) * block, u64::from(blocks) * u64::from(layout.block_size));
        Ok(blocks)
    }

    fn does_not_fit(&self, needed: u64, kv: &str, asked: Option<Bytes>) -> WorkerError {
        let GpuMemory { total, free } = self.gpu;
        let Footprint { weights, activations, workspace } = self.footprint;
        let (all, weights, activations, workspace) = (gib(needed), gib(weights), gib(activations), gib(workspace));
        let needs = format!("{all}: weights {weights}, activations {activations}, workspace {workspace}, {kv}");
        let has = format!("{} of the GPU's {}, of which {} are free", self.fraction, gib(total), gib(free));
        let fix = match asked {
            _ if self.footprint.total() > total => "the GPU is too small: serve a smaller model, or lower token_budget",
            Some(_) => "lower kv_memory, raise gpu_memory_fraction, or end what else uses the GPU",
            None if needed > free => "end what else uses the GPU, or give other workers a smaller gpu_memory_fraction",
            None => "raise gpu_memory_fraction, or lower token_budget",
        };
        WorkerError::GpuMemory { needs, has, fix }
    }

    fn log(&self, kv: u64, tokens: u64) {
        let Footprint { weights, activations, workspace } = self.footprint;
        let left = self.gpu.free.saturating_sub(self.footprint.total() + kv);
        tracing::info!(
            total = gib(self.gpu.total),
            free = gib(self.gpu.free),
            fraction = self.fraction,
            weights = gib(weights),
            activations = gib(activations),
            workspace = gib(workspace),
            kv = gib(kv),
            kv_tokens = tokens,
            left = gib(left),
            "GPU memory"
        );
    }
}

/// Blocks that fit into `bytes`. At most `u32::MAX / 2`, so that block numbers have one bit to spare.
pub(crate) fn most_blocks(bytes: u64, block: u64) -> u32 {
    (bytes / block.max(1)).min(u64::from(u32::MAX / 2)) as u32
}

/// Bytes as GiB, for people.
fn gib(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / (1u64 << 30) as f64)
}

#[cfg(test)]
mod tests {
    use baton_types::{KvDtype, KvGroup, PROTOCOL_VERSION};

    use super::*;

    const GIB: u64 = 1 << 30;

    /// Llama 3.1 8B: a block of 16 tokens in 16 bits has 2 MiB.
    fn layout() -> KvLayout {
        let group =
            KvGroup { layers: (0..32).collect(), planes: 2, kv_heads: 8, head_dim: 128, window: None, sinks: 0 };
        KvLayout { version: PROTOCOL_VERSION, model: 0, dtype: KvDtype::F16, block_size: 16, groups: vec![group] }
    }

    fn budget(total: u64, free: u64, fraction: f64) -> Budget {
        let footprint = Footprint { weights: 15 * GIB, activations: GIB, workspace: GIB };
        Budget { gpu: GpuMemory { total, free }, fraction, footprint }
    }

    #[test]
    fn what_the_model_leaves_of_the_fraction_is_kv() {
        assert_eq!(budget(140 * GIB, 139 * GIB, 0.9).blocks(&layout(), None).unwrap(), (126 - 17) * 512);
        assert_eq!(budget(140 * GIB, 139 * GIB, 0.5).blocks(&layout(), None).unwrap(), (70 - 17) * 512);
        let beside_another = budget(140 * GIB, 50 * GIB, 0.9);
        assert_eq!(beside_another.blocks(&layout(), None).unwrap(), (50 - 17) * 512, "no more than is free");
        assert_eq!(beside_another.blocks(&layout(), Some(Bytes::gib(2))).unwrap(), 1024, "what was asked for");
        let barely = budget(100 * GIB, 17 * GIB + (2 << 20), 0.9);
        assert_eq!(barely.blocks(&layout(), None).unwrap(), 1, "one block is enough to begin with");
    }

    #[test]
    fn what_does_not_fit_is_told_with_the_setting_that_would_help() {
        let error = |budget: Budget, kv| budget.blocks(&layout(), kv).unwrap_err().to_string();
        let said = error(budget(16 * GIB, 15 * GIB, 0.9), None);
        assert!(said.contains("weights 15.00 GiB") && said.contains("the GPU is too small"), "{said}");
        let said = error(budget(24 * GIB, 23 * GIB, 0.5), None);
        assert!(said.contains("0.5 of the GPU's 24.00 GiB") && said.contains("raise gpu_memory_fraction"), "{said}");
        let said = error(budget(80 * GIB, 10 * GIB, 0.9), None);
        assert!(said.contains("10.00 GiB are free") && said.contains("end what else uses the GPU"), "{said}");
        let said = error(budget(24 * GIB, 23 * GIB, 0.9), Some(Bytes::gib(6)));
        assert!(said.contains("KV 6.00 GiB (kv_memory)") && said.contains("lower kv_memory"), "{said}");
    }

    #[test]
    fn block_numbers_never_run_out() {
        assert_eq!(most_blocks(u64::MAX, 1), u32::MAX / 2);
        assert_eq!(most_blocks(100, 0), 100);
    }
}
