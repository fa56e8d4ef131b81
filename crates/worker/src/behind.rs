//! A step that begins before its prefix is loaded, and takes each layer as it comes ([`baton_roles::StepLaunch::behind`]).

use baton_engine::{Batch, ModelRunner, RunError};

use crate::tiers::Loading;

/// Launches a step and reports the layers that it has stored. Where it does not wait for a load, each of its layers does. What was computed with a damaged
/// layer is not reported (I2), and nothing writes to the step's blocks any more when this returns (I3).
pub(crate) fn launch_behind(
    runner: &mut dyn ModelRunner,
    batch: &Batch<'_>,
    loading: Option<&Loading>,
    stored: &mut dyn FnMut(u32),
) -> Result<(), RunError> {
    let mut right = true;
    let launched = runner.launch(batch, &mut |layer| {
        right = right && loading.is_none_or(|loading| loading.wait_for(layer));
        if right {
            stored(layer);
        }
    });
    let whole = loading.is_none_or(Loading::wait);
    if launched.is_ok() && !whole {
        // It is the only step in flight.
        let _ = runner.collect(batch, &mut Vec::new());
        return Err(RunError("the KV of its prefix did not come to the pool as it was stored".to_owned()));
    }
    launched
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use baton_engine::fake::{FakeModel, tiny_layout};
    use baton_engine::{CacheConfig, Engine, EngineConfig, NewSequence, Order, Share, Start, Time};
    use baton_types::{PoolGeometry, RequestId, SamplingParams};

    use super::*;

    /// I2, I3: nothing that follows from a damaged layer is told, and the step is over only when its load is.
    #[test]
    fn a_step_behind_a_load_takes_each_layer_as_it_comes() {
        let geometry = PoolGeometry::uniform(tiny_layout(4), 30);
        let limits = EngineConfig {
            token_budget: 16,
            chunk: 16,
            pack_tokens: 16,
            max_running: 2,
            max_waiting: 2,
            context_tokens: 64,
            local_prefill_tokens: 0,
            reserve_ahead: 16,
            order: Order::Priority,
            overtakes: 2,
            cache: CacheConfig::default(),
        };
        let mut engine = Engine::new(limits, &geometry).unwrap();
        let mut model = FakeModel::new(geometry, 50);
        let new = NewSequence {
            request_id: RequestId("behind".to_owned()),
            tokens: vec![1, 2, 3],
            prompt_tokens: 3,
            params: SamplingParams { max_tokens: 1, ..SamplingParams::default() },
            start: Start::Compute,
            deadline: None,
            prefix: None,
            priority: 0,
            share: Share::default(),
            parked: false,
        };
        engine.submit(new).unwrap();
        let step = engine.plan(Time(0), &mut Vec::new()).unwrap();
        // Layer 0 is there; after a while comes layer 1 or nothing, and after that layer 2.
        let mut run = |layers: u32| {
            let (loading, mut told, over) = (Loading::default(), Vec::new(), AtomicBool::new(false));
            loading.reach(1);
            let outcome = std::thread::scope(|scope| {
                scope.spawn(|| {
                    for reached in 1..=layers {
                        std::thread::sleep(Duration::from_millis(10));
                        loading.reach(reached);
                    }
                    std::thread::sleep(Duration::from_millis(10));
                    over.store(true, Ordering::Relaxed);
                    loading.end(layers == 3);
                });
                engine.with_batch(&step, |batch| {
                    let launched = launch_behind(&mut model, batch, Some(&loading), &mut |layer| told.push(layer));
                    assert!(over.load(Ordering::Relaxed), "it ends with the load");
                    launched
                })
            });
            (told, outcome.is_ok())
        };
        assert_eq!(run(2), (vec![0, 1], false));
        assert_eq!(run(3), (vec![0, 1, 2], true));
        let mut collect = || engine.with_batch(&step, |batch| model.collect(batch, &mut Vec::new()));
        assert_eq!((collect().is_ok(), collect().is_ok()), (true, false), "nothing is left of the failed one");
        engine.fail(step, RunError("over".to_owned()), &mut Vec::new());
    }
}
