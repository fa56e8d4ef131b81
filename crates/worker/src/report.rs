//! Reports what a worker's core holds: as metrics, as snapshots, as signals for autoscalers.

use baton_engine::Time;
use baton_roles::{RoleCore, Snapshot, WorkerCore};
use baton_runtime::metrics as names;
use metrics::{counter, gauge};
use tokio::sync::watch;

use crate::signals::{Limits, Signals};

/// Where the reports go.
pub(crate) struct Reporter {
    pub snapshot: watch::Sender<Snapshot>,
    pub signals: watch::Sender<Option<Signals>>,
    pub limits: Limits,
}

impl Reporter {
    /// Publishes what the core holds now, if it has changed.
    pub(crate) fn report<R: RoleCore>(&self, core: &WorkerCore<R>) {
        let snapshot = core.snapshot();
        if *self.snapshot.borrow() != snapshot {
            report_engine(core, &snapshot);
            // Last, so that whoever sees the new snapshot reads metrics at least as new.
            self.snapshot.send_replace(snapshot);
        }
    }

    /// Publishes how loaded the worker is. Once a turn is enough.
    pub(crate) fn report_load<R: RoleCore>(&self, core: &WorkerCore<R>, now: Time) {
        let signals = Signals::new(&core.snapshot(), &core.load(now), self.limits);
        if *self.signals.borrow() != Some(signals) {
            gauge!(names::LOAD).set(signals.load);
            gauge!(names::QUEUED_TOKENS).set(signals.queued_tokens as f64);
            gauge!(names::QUEUE_SECONDS).set(signals.queue_seconds);
            self.signals.send_replace(Some(signals));
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
    counter!(names::SWAPS).absolute(e.swaps());
    for (direction, blocks) in ["out", "in"].into_iter().zip(e.swapped_blocks()) {
        counter!(names::SWAPPED_BLOCKS, "direction" => direction).absolute(blocks);
    }
    let host = e.host_counts();
    for (state, count) in [("free", host.free), ("used", host.used)] {
        gauge!(names::SWAP_BLOCKS, "state" => state).set(count as f64);
    }
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
