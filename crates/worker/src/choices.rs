//! Choices of settings: the backend, and the type of weights.

baton_runtime::config_enum! {
    /// What computes.
    pub enum BackendKind {
        /// A usable GPU, else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// A GPU; without one the worker does not start.
        Cuda = "cuda",
    }
}

baton_runtime::config_enum! {
    /// By what other processes open a pool in a GPU's memory.
    pub enum GpuPoolHandles {
        /// File descriptors where the driver has them, else legacy handles.
        Auto = "auto",
        /// CUDA's legacy inter-process handles.
        Legacy = "legacy",
    }
}

baton_runtime::config_enum! {
    /// The type in which layer weights are kept.
    pub enum Quantization {
        /// The backend's own choice for the stored type.
        None = "none",
        /// On a GPU: 8-bit floats (E4M3) with one scale per output. Their inputs are quantised to E4M3 too.
        Fp8 = "fp8",
    }
}

impl Quantization {
    /// The fingerprint of a model with these weights. It differs by type, because KV computed with one type is not valid for another.
    pub(crate) fn of_model(self, fingerprint: u64) -> u64 {
        match self {
            Quantization::None => fingerprint,
            // Any constant except 0.
            Quantization::Fp8 => fingerprint ^ 0x6670_385f_6534_6d33,
        }
    }
}
