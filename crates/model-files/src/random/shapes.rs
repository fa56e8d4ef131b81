//! Shapes of models by the names they are known by, as their own `config.json` gives them.

/// Each shape's name and configuration.
pub(super) const ALL: [(&str, &str); 9] = [
    ("tiny", include_str!("shapes/tiny.json")),
    ("smollm2-135m", include_str!("shapes/smollm2-135m.json")),
    ("gemma-3-270m", include_str!("shapes/gemma-3-270m.json")),
    ("llama-3.2-1b", include_str!("shapes/llama-3.2-1b.json")),
    ("qwen2.5-1.5b", include_str!("shapes/qwen2.5-1.5b.json")),
    ("mistral-7b", include_str!("shapes/mistral-7b.json")),
    ("llama-3.1-8b", include_str!("shapes/llama-3.1-8b.json")),
    ("qwen3-8b", include_str!("shapes/qwen3-8b.json")),
    ("llama-3.1-70b", include_str!("shapes/llama-3.1-70b.json")),
];
