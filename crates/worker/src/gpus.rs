//! How busy a worker's GPUs are, for metrics.

use std::time::Duration;

use baton_nvml::{Gpus, Sample};
use baton_runtime::metrics as names;
use metrics::gauge;

/// The GPUs are asked so often.
const EVERY: Duration = Duration::from_secs(5);

/// Tells of these GPUs from now on, as long as the process lives.
pub(crate) fn report(ids: Vec<[u8; 16]>) {
    if ids.is_empty() {
        return;
    }
    // NVML's calls may take long where a GPU is in trouble.
    let thread = std::thread::Builder::new().name("gpu-metrics".to_owned()).spawn(move || match Gpus::find(&ids) {
        Ok(gpus) => loop {
            gpus.sample().into_iter().enumerate().for_each(|(at, sample)| tell(at, sample));
            std::thread::sleep(EVERY);
        },
        Err(error) => tracing::warn!(%error, "no metrics of the GPU's use, memory and power"),
    });
    if let Err(error) = thread {
        tracing::warn!(%error, "no thread for metrics of the GPU");
    }
}

/// Of the worker's GPU with this number, from 0.
fn tell(at: usize, sample: Sample) {
    let Sample { busy, used, total, watts } = sample;
    let gpu = at.to_string();
    if let Some(busy) = busy {
        gauge!(names::GPU_BUSY, "gpu" => gpu.clone()).set(busy);
    }
    for (state, bytes) in [("used", used), ("total", total)] {
        if let Some(bytes) = bytes {
            gauge!(names::GPU_MEMORY, "gpu" => gpu.clone(), "state" => state).set(bytes as f64);
        }
    }
    if let Some(watts) = watts {
        gauge!(names::GPU_POWER, "gpu" => gpu).set(watts);
    }
}
