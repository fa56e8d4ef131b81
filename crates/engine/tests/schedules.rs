//! Ten thousand random schedules through the engine; the world says what must hold in each.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod world;

use baton_engine::{CacheConfig, EngineConfig, Eviction, Order, SwapConfig, SwapRates, fake};
use baton_types::KvLayout;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use world::{End, Fault, NodeSpec, Reached, Route, Spec, World};

fn spec() -> impl Strategy<Value = Spec> {
    let route = prop_oneof![Just(Route::Local), Just(Route::Eager), Just(Route::Late), Just(Route::Corrupt)];
    let shape = (1u32..40, prop_oneof![2 => 1u32..12, 1 => 12u32..30], any::<bool>(), 0u64..1000, any::<bool>(), route);
    let times = (0u64..30, 0u64..6);
    let ends = (prop::option::weighted(0.15, 0u64..40), prop::option::weighted(0.2, 1u64..40));
    let deadline = prop::option::weighted(0.15, 0u64..80);
    let standing = (deadline, 0u32..50, -200i32..200);
    (shape, times, ends, standing).prop_map(
        |(
            (prompt, max_tokens, sampled, seed, stops, route),
            (arrival, delay),
            (cancel, resume),
            (deadline, fork, priority),
        )| Spec {
            prompt,
            fork,
            shares: fork % 5 != 0,
            priority,
            max_tokens,
            sampled,
            seed,
            stops,
            route,
            arrival,
            delay,
            cancel,
            resume,
            deadline,
        },
    )
}

/// No host memory, a little, or enough; swapping is always cheaper than computing, or only where blocks are well filled.
fn swap() -> impl Strategy<Value = SwapConfig> {
    let bytes = prop_oneof![1 => Just(0), 2 => 0u64..4000, 3 => Just(1 << 20)];
    let rates = prop_oneof![4 => Just((u64::MAX, 1)), 1 => Just((200, 1)), 1 => Just((0, 1))];
    (bytes, rates).prop_map(|(bytes, (copy_bytes_per_second, prefill_tokens_per_second))| {
        let rates = SwapRates { copy_bytes_per_second, prefill_tokens_per_second };
        SwapConfig { bytes, rates }
    })
}

/// Limits of a node, its blocks beyond those it needs, its faults, and whether it runs ahead and late.
type Side = (EngineConfig, [u32; 2], Vec<(u64, Fault)>, [bool; 2]);

/// Limits of a node; its blocks are those the largest request can need and the given few beyond.
fn node() -> impl Strategy<Value = Side> {
    let fault = prop_oneof![Just(Fault::Error), Just(Fault::Nothing), Just(Fault::Output)];
    let order = prop_oneof![
        2 => Just((Order::Fcfs, 0)),
        1 => (0u32..20).prop_map(|overtakes| (Order::ShortestFirst, overtakes)),
        1 => (0u32..20).prop_map(|overtakes| (Order::Priority, overtakes)),
    ];
    let eviction = prop_oneof![Just(Eviction::Lru), Just(Eviction::Lfu), Just(Eviction::Priority)];
    let max_blocks = prop_oneof![1 => Just(0), 2 => 1u32..8, 6 => Just(u32::MAX)];
    let max_kept = prop_oneof![1 => Just(0), 2 => 1u32..8, 3 => Just(u32::MAX)];
    let cache = (max_blocks, max_kept, eviction).prop_map(|(max_blocks, max_kept, eviction)| CacheConfig {
        max_blocks,
        max_kept,
        eviction,
    });
    let local = prop_oneof![1 => Just(0), 2 => Just(1), 2 => 2u32..40];
    let prompts = (1u32..20, prop_oneof![1u32..40, Just(u32::MAX)], local);
    let limits = (1u32..6, 0u32..30, prompts, order, cache, swap()).prop_map(
        |(max_running, more, prompts, order, cache, swap)| EngineConfig {
            token_budget: max_running + more,
            chunk: prompts.0,
            pack_tokens: prompts.1,
            max_running,
            max_waiting: 1000,
            context_tokens: 1000,
            local_prefill_tokens: prompts.2,
            order: order.0,
            overtakes: order.1,
            cache,
            swap,
        },
    );
    let spare = prop_oneof![3 => 0u32..4, 2 => 4u32..16, 1 => 0u32..40];
    let faults = prop_oneof![2 => Just(Vec::new()), 1 => prop::collection::vec((0u64..60, fault), 0..3)];
    let flight = any::<[bool; 2]>();
    (limits, (spare.clone(), spare), faults, flight).prop_map(|(config, (a, b), faults, f)| (config, [a, b], faults, f))
}

prop_compose! {
    fn world()(
        block_size in prop_oneof![2 => 1u32..4, 1 => 4u32..9],
        sinks in any::<bool>(),
        nodes in (node(), node()),
        specs in prop::collection::vec(spec(), 1..14),
    ) -> (KvLayout, [NodeSpec; 2], Vec<Spec>) {
        let layout = if sinks { fake::sinks_layout(block_size) } else { fake::tiny_layout(block_size) };
        let largest = specs.iter().map(|s| (s.prompt + s.max_tokens).div_ceil(block_size)).max().unwrap_or(1);
        let side = |(config, spare, faults, [ahead, late]): Side| {
            let most = |group: usize| layout.groups[group].most_live(config.chunk, block_size).unwrap_or(largest);
            let blocks = (0..2).map(|group| most(group).min(largest) + spare[group]).collect();
            NodeSpec { config, blocks, faults, ahead, late }
        };
        let sides = [side(nodes.0), side(nodes.1)];
        (layout, sides, specs)
    }
}

proptest! {
    // PROPTEST_CASES asks for more.
    #![proptest_config(ProptestConfig {
        cases: ProptestConfig::default().cases.max(10_000),
        max_shrink_iters: 20_000,
        ..ProptestConfig::default()
    })]

    /// I1, I3, I4, I5, I6 on every route, alone and together, with every failure.
    #[test]
    fn any_schedule_gives_each_client_its_tokens_and_all_blocks_back((layout, sides, specs) in world()) {
        World::new(&layout, sides, specs).run();
    }
}

/// The schedules reach what they are there for.
#[test]
fn schedules_are_not_idle() {
    let mut runner = TestRunner::deterministic();
    let mut sum = Reached::default();
    let mut ends = [0; 3];
    for _ in 0..1200 {
        let (layout, sides, specs) = world().new_tree(&mut runner).unwrap().current();
        let mut world = World::new(&layout, sides, specs);
        world.run();
        let Reached { preemptions, handoffs, fences, failures, aborts_in_step, .. } = world.reached();
        let Reached { hits, reserved_hits, spared, copies, evictions, swaps, returns, ahead, follows, .. } =
            world.reached();
        sum.ahead += ahead;
        sum.follows += follows;
        sum.swaps += swaps;
        sum.returns += returns;
        sum.hits += hits;
        sum.reserved_hits += reserved_hits;
        sum.spared += spared;
        sum.copies += copies;
        sum.evictions += evictions;
        sum.preemptions += preemptions;
        sum.handoffs += handoffs;
        sum.fences += fences;
        sum.failures += failures;
        sum.aborts_in_step += aborts_in_step;
        for client in &world.clients {
            match client.end.unwrap() {
                End::Finished(_) => ends[0] += 1,
                End::Cancelled => ends[1] += 1,
                End::Deadline => ends[2] += 1,
            }
        }
    }
    let counts = [
        [sum.preemptions, sum.handoffs, sum.fences, sum.failures, sum.aborts_in_step].as_slice(),
        &[
            sum.hits,
            sum.reserved_hits,
            sum.spared,
            sum.copies,
            sum.evictions,
            sum.swaps,
            sum.returns,
            sum.ahead,
            sum.follows,
        ],
    ]
    .concat();
    assert!(counts.iter().chain(&ends).all(|count| *count >= 50), "{sum:?}, ends {ends:?}");
}
