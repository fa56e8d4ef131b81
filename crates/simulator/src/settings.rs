//! The sizes and settings of a run's engines.

use baton_engine::{CacheConfig, EngineConfig, Eviction, Order};
use baton_types::testing::Random;
use baton_types::{KvLayout, PoolGeometry, mix};

/// Engine settings, as most runs have them.
pub(crate) fn engine(random: &mut Random) -> EngineConfig {
    EngineConfig {
        token_budget: random.within(8, 40) as u32,
        chunk: random.within(2, 24) as u32,
        pack_tokens: random.within(4, 40) as u32,
        max_running: random.within(1, 8) as u32,
        max_waiting: 64,
        context_tokens: 64,
        local_prefill_tokens: random.below(6) as u32,
        reserve_ahead: 8,
        order: Order::ALL[random.below(3) as usize],
        overtakes: 3,
        cache: CacheConfig { max_blocks: if random.chance(700) { u32::MAX } else { 0 }, ..CacheConfig::default() },
    }
}

/// Varies seldom-used settings: a cache of few blocks, every eviction policy, tight batches. Draws nothing from the seed's main sequence.
pub(crate) fn vary(config: EngineConfig, seed: u64) -> EngineConfig {
    let random = &mut Random(mix(seed ^ 0x656e_6769_6e65));
    if random.chance(400) {
        return config;
    }
    let few = |random: &mut Random| if random.chance(600) { u32::MAX } else { random.below(8) as u32 };
    let cache = CacheConfig {
        max_blocks: few(random),
        max_kept: few(random),
        eviction: Eviction::ALL[random.below(3) as usize],
    };
    let max_running = random.within(1, 6) as u32;
    let token_budget = max_running + random.below(30) as u32;
    let (chunk, overtakes) = (random.within(1, 20) as u32, random.below(20) as u32);
    let reserve_ahead = random.below(30) as u32;
    EngineConfig { cache, max_running, token_budget, chunk, overtakes, reserve_ahead, ..config }
}

/// Blocks of a pool that is short of room: enough for the longest request (20 tokens of prompt and 24 of answer), and a few more.
pub(crate) fn few_blocks(block_size: u32, seed: u64) -> u32 {
    48u32.div_ceil(block_size) + (mix(seed ^ 3) % 4) as u32
}

/// Pools of `blocks` blocks in every layer group. With a seed, later groups have a few more in most runs.
pub(crate) fn pools(layout: KvLayout, blocks: u32, seed: Option<u64>) -> PoolGeometry {
    let more = seed.map_or(0, |seed| (mix(seed ^ 4) % 4) as u32);
    let blocks = (0..layout.groups.len() as u32).map(|group| blocks + group * more).collect();
    PoolGeometry { layout, blocks }
}

/// The same layout, where all layers see all tokens.
pub(crate) fn unwindowed(mut layout: KvLayout) -> KvLayout {
    layout.groups.iter_mut().for_each(|group| (group.window, group.sinks) = (None, 0));
    layout
}

/// The same settings with a cache of so few blocks that what comes again is in the store only.
pub(crate) fn forgetful(config: EngineConfig, seed: u64) -> EngineConfig {
    let max_blocks = (1 + mix(seed ^ 53) % 8) as u32;
    EngineConfig { cache: CacheConfig { max_blocks, ..config.cache }, ..config }
}
