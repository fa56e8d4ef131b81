//! For tests: a small shape, and blocks that are made by a number.

use std::sync::Arc;

use baton_kv_cache::BlockName;
use baton_types::testing::Random;
use baton_types::{KvDtype, KvGroup, KvLayout, PROTOCOL_VERSION};

use crate::{Block, BlockKey, Shape};

/// Two groups, three layers, blocks of four tokens.
pub fn shape() -> Shape {
    let group = |layers: Vec<u32>| KvGroup { layers, planes: 2, kv_heads: 1, head_dim: 16, window: None, sinks: 0 };
    let groups = vec![group(vec![0, 2]), group(vec![1])];
    let layout = KvLayout { version: PROTOCOL_VERSION, model: 1, dtype: KvDtype::F16, block_size: 4, groups };
    Shape::new(&layout).expect("a shape")
}

/// The key of block `number`, which follows block `parent`, or the root.
pub fn key(number: u32, parent: Option<u32>) -> BlockKey {
    let name = |number: u32| BlockName::root("test", 4).then(&[number; 4]).name();
    let parent = parent.map_or(BlockName::root("test", 4).name(), name);
    BlockKey { name: name(number), parent, tokens: Arc::from([number; 4]), groups: 0b11 }
}

/// The KV of block `number`.
pub fn data(shape: &Shape, number: u32) -> Vec<u8> {
    Random(u64::from(number)).bytes(shape.data_bytes())
}

/// Block `number`, the first of its prompt.
pub fn block(shape: &Shape, number: u32) -> Block {
    let key = key(number, None);
    Block { digests: shape.digests(key.groups, &data(shape, number)), key }
}
