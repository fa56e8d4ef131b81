//! Reports what a worker's core holds: as metrics, as snapshots, as signals for autoscalers.

use std::sync::Arc;

use baton_engine::Time;
use baton_roles::{RoleCore, Snapshot, WorkerCore};
use baton_runtime::metrics as names;
use metrics::{counter, gauge};
use tokio::sync::watch;

use crate::news::WorkerNews;
use crate::signals::{Limits, Signals};

/// Where the reports go.
pub(crate) struct Reporter {
    pub snapshot: watch::Sender<Snapshot>,
    pub told: Told,
}

/// Who else wants to know of a worker.
pub(crate) struct Told {
    /// Autoscalers, and what a worker's load is measured by for them.
    pub signals: watch::Sender<Option<Signals>>,
    pub limits: Limits,
    /// Routers, of the prefix cache and of what there is to do.
    pub news: Arc<WorkerNews>,
}

impl Reporter {
    /// Publishes what the core holds now, if it has changed.
    pub(crate) fn report<R: RoleCore>(&self, core: &WorkerCore<R>) {
        let snapshot = core.snapshot();
        if *self.snapshot.borrow() != snapshot {
            report_engine(core, &snapshot);
            Self::report_errors(core);
            // Last, so that whoever sees the new snapshot reads metrics at least as new.
            self.snapshot.send_replace(snapshot);
        }
    }

    /// Tells what entered and left the prefix cache. Once a turn is enough.
    pub(crate) fn report_cache<R: RoleCore>(&self, core: &mut WorkerCore<R>) {
        self.told.news.note(core.take_cache_changes());
    }

    /// Publishes how well the time of steps is predicted.
    fn report_errors<R: RoleCore>(core: &WorkerCore<R>) {
        let (decode, prefill) = core.steps().errors();
        for (of, error) in [("decode", decode), ("prefill", prefill)] {
            if let Some(error) = error {
                gauge!(names::STEP_ERROR, "of" => of).set(error);
            }
        }
    }

    /// Publishes how loaded the worker is. Once a turn is enough.
    pub(crate) fn report_load<R: RoleCore>(&self, core: &WorkerCore<R>, now: Time) {
        let Told { signals: told, limits, news } = &self.told;
        news.load(core.backlog());
        let signals = Signals::new(&core.snapshot(), &core.load(now), *limits);
        if *told.borrow() != Some(signals) {
            gauge!(names::LOAD).set(signals.load);
            gauge!(names::QUEUED_TOKENS).set(signals.queued_tokens as f64);
            gauge!(names::QUEUE_SECONDS).set(signals.queue_seconds);
            told.send_replace(Some(signals));
        }
    }
}

fn report_engine<R: RoleCore>(core: &WorkerCore<R>, now: &Snapshot) {
    let e = core.engine();
    let blocks = now.blocks;
    gauge!(names::RUNNING).set(now.running as f64);
    gauge!(names::QUEUE_DEPTH).set(now.waiting as f64);
    gauge!(names::KEPT_BLOCKS).set(now.kept as f64);
    counter!(names::PREFIX_HIT_TOKENS).absolute(e.prefix_hit_tokens());
    counter!(names::CACHE_EVICTIONS).absolute(e.evictions());
    counter!(names::DECODE_TOKENS).absolute(e.decoded_tokens());
    counter!(names::DECODED_WASTED).absolute(e.decoded_wasted());
    counter!(names::PREEMPTIONS).absolute(e.preemptions());
    for (state, count) in [
        ("free", blocks.free),
        ("used", blocks.used),
        ("cached", blocks.cached),
        ("lent", blocks.lent),
        ("quarantined", blocks.quarantined),
    ] {
        gauge!(names::KV_BLOCKS, "state" => state).set(count as f64);
    }
}
