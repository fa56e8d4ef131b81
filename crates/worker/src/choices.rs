//! What settings choose between: what computes, and as what weights are kept.

baton_runtime::config_enum! {
    /// What computes.
    pub enum BackendKind {
        /// A GPU where there is one that can, else the CPU.
        Auto = "auto",
        /// The CPU.
        Cpu = "cpu",
        /// A GPU, or the worker does not start.
        Cuda = "cuda",
    }
}

baton_runtime::config_enum! {
    /// As what the weights of layers are kept.
    pub enum Quantization {
        /// What the backend has for their type.
        None = "none",
        /// On a GPU 8-bit floats (E4M3) with a scale for each output, and so the rows that they are multiplied with.
        Fp8 = "fp8",
    }
}

impl Quantization {
    /// The fingerprint of a model with such weights: their KV is not that of others.
    pub(crate) fn of_model(self, fingerprint: u64) -> u64 {
        match self {
            Quantization::None => fingerprint,
            // Any number that is not 0.
            Quantization::Fp8 => fingerprint ^ 0x6670_385f_6534_6d33,
        }
    }
}
