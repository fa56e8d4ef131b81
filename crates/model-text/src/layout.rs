//! The KV layout of a model. Layers with the same window share a group.

use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION};

use crate::ModelConfig;

/// The layout of a model's KV. `fingerprint` identifies the model's weights and configuration.
pub fn kv_layout(config: &ModelConfig, fingerprint: u64, dtype: KvDtype, block_size: u32) -> KvLayout {
    let mut groups: Vec<KvGroup> = Vec::new();
    for (layer, &window) in config.layer_windows.iter().enumerate() {
        let layer = layer as u32;
        match groups.iter_mut().find(|g| g.window == window) {
            Some(group) => group.layers.push(layer),
            None => groups.push(KvGroup {
                layers: vec![layer],
                planes: 2,
                kv_heads: config.kv_heads,
                head_dim: config.head_dim,
                window,
                sinks: 0,
            }),
        }
    }
    KvLayout { version: PROTOCOL_VERSION, model: fingerprint, dtype, block_size, groups }
}
