//! Reserves host memory for KV that is swapped out, and measures how fast it is copied there.

use std::time::Instant;

use baton_engine::{SwapConfig, SwapRates};
use baton_kernels::Backend;
use baton_model::ModelError;
use baton_types::{BlockId, PoolGeometry};

use crate::WorkerConfig;
use crate::error::{WorkerError, check};

/// Blocks copied for the measurement: more than CPU caches hold, few enough to take no noticeable time.
const MEASURED_BLOCKS: u32 = 64;

/// Reserves host memory on every rank and measures the copy rate of one rank, a lower bound for all ranks together.
pub(crate) fn prepare_swap<B: Backend>(
    config: &WorkerConfig,
    backends: &mut [B],
    geometry: &PoolGeometry,
) -> Result<SwapConfig, WorkerError> {
    let mut swap = SwapConfig { bytes: config.swap_bytes.0, rates: SwapRates::default() };
    let blocks = swap.blocks(&geometry.layout);
    if blocks == 0 {
        let one = SwapConfig::block_bytes(&geometry.layout);
        let must = format!("0, or at least {one} bytes, one block of this model");
        check(config.swap_bytes.0 == 0, "swap_bytes", config.swap_bytes, must)?;
        return Ok(swap);
    }
    let part = geometry.of_ranks(backends.len() as u32);
    for backend in &mut *backends {
        backend.reserve_swap(blocks).map_err(ModelError::from)?;
    }
    swap.rates.copy_bytes_per_second = backends.first_mut().map_or(0, |backend| copy_rate(backend, &part, blocks));
    Ok(swap)
}

/// Copy rate in bytes per second, out of the pool and back. Both pool and host memory are still unused.
fn copy_rate<B: Backend>(backend: &mut B, geometry: &PoolGeometry, host_blocks: u32) -> u64 {
    let blocks = geometry.blocks.iter().copied().min().unwrap_or(0).min(host_blocks).min(MEASURED_BLOCKS);
    let mut copied = || {
        let started = Instant::now();
        for block in (0..blocks).map(BlockId) {
            for group in 0..geometry.layout.groups.len() {
                backend.swap_out(group, block, block);
                backend.swap_in(group, block, block);
            }
        }
        started.elapsed()
    };
    // The first run includes the system's work of mapping the memory.
    copied();
    let seconds = copied().as_secs_f64().max(1e-9);
    let bytes = 2 * u64::from(blocks) * SwapConfig::block_bytes(&geometry.layout);
    (bytes as f64 / seconds) as u64
}
