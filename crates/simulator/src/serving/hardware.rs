//! How long steps and transfers take on a device: the truth that workers learn while they serve.

use baton_latency::StepWork;

/// A model on a device, by what bounds it: arithmetic, memory, links.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hardware {
    /// Weights of the model.
    pub parameters: f64,
    /// Layers times query heads times the dimension of a head.
    pub attention: f64,
    /// Bytes of a token's KV.
    pub kv_bytes: f64,
    /// Bytes of a weight.
    pub weight_bytes: f64,
    /// Operations a second that prompts reach.
    pub flops: f64,
    /// Bytes a second that decode steps read.
    pub memory: f64,
    /// Bytes a second between two workers.
    pub link: f64,
    /// What each step takes beside that, in seconds.
    pub overhead: f64,
    /// Blocks of the KV pool.
    pub blocks: u32,
}

impl Hardware {
    /// Llama 3.1 8B in bfloat16 on a device like an H200 (989 TFLOP/s, of which prompts reach 55%; 4.8 TB/s, of which steps reach 75%; a link of
    /// 400 Gbit/s, of which transfers reach 80%; 110 GB for KV).
    pub const LLAMA_8B_ON_H200: Hardware = Hardware {
        parameters: 8.03e9,
        attention: 32.0 * 32.0 * 128.0,
        kv_bytes: 131_072.0,
        weight_bytes: 2.0,
        flops: 989e12 * 0.55,
        memory: 4.8e12 * 0.75,
        link: 50e9 * 0.8,
        overhead: 1.5e-3,
        blocks: 52_000,
    };

    /// How long a step takes, in seconds: a roofline. A prompt's tokens need two operations for each weight, and four for each pair and each
    /// dimension of attention; a decode step reads all weights once, and the KV of its rows.
    pub fn step(&self, work: &StepWork) -> f64 {
        let tokens = (work.tokens + work.rows) as f64;
        let pairs = (work.pairs + work.context) as f64;
        let computes = (2.0 * self.parameters * tokens + 4.0 * self.attention * pairs) / self.flops;
        let reads = (self.parameters * self.weight_bytes + self.kv_bytes * work.context as f64) / self.memory;
        computes.max(reads) + self.overhead
    }

    /// How long the KV of so many tokens is on the way, in seconds.
    pub fn transfer(&self, tokens: u32) -> f64 {
        f64::from(tokens) * self.kv_bytes / self.link
    }
}
