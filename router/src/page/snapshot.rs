//! What the page shows of the cluster at one moment, as JSON.

use std::collections::HashMap;
use std::time::Duration;

use baton_cluster::Role;
use baton_policy::{Backlog, Bottleneck, Lately, Targets, WorkerLoad, bottleneck};
use baton_proto::v1;
use baton_types::WorkerId;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::stats::{Aged, Stats};
use crate::models::Models;
use crate::trace::MOST;
use crate::worker::Seen;

/// Requests in the list.
const LISTED: usize = 60;
/// Handoffs in the list, and how long one is in it.
const HANDOFFS: usize = 12;
const RECENT: Duration = Duration::from_secs(60);

/// Asks all workers how they are, and gathers what this router knows.
pub(super) async fn take(models: &Models, targets: Targets, since: Instant) -> Value {
    let (mut workers, mut links, mut loads, mut requests, mut handoffs) =
        <(Vec<_>, Vec<_>, Vec<_>, Vec<_>, Vec<_>)>::default();
    let (mut aged, mut known) = (Vec::new(), since.elapsed().as_secs_f64());
    for served in models.all() {
        let statuses = served.workers.statuses().await;
        let now = Instant::now();
        for seen in served.workers.look().into_iter().filter(|seen| seen.member.role != Role::Supervisor) {
            let status = statuses.get(&seen.member.id);
            loads.extend(load(&seen));
            workers.push(worker(&seen, status));
            links.extend(status.into_iter().flat_map(|status| peers(seen.member.id, status)));
        }
        let traces = served.workers.traces().latest();
        // Older ones of this model were forgotten.
        if traces.len() >= MOST {
            let ages = traces.iter().map(|trace| now.saturating_duration_since(trace.received()).as_secs_f64());
            known = known.min(ages.fold(0.0, f64::max));
        }
        for trace in traces.iter().rev() {
            let age = now.saturating_duration_since(trace.received());
            aged.push(Aged { age: age.as_secs_f64(), times: trace.times() });
            requests.push((age, trace.brief()));
            let done = trace.handoff().map(|(at, told)| (now.saturating_duration_since(at), told));
            handoffs.extend(done.filter(|(age, _)| *age < RECENT));
        }
    }
    let stats = Stats::of(&aged, known, targets);
    let lately = Lately { first_tokens: &stats.first, tokens: &stats.gaps, tails: &stats.tails };
    let found = bottleneck(&loads, lately, targets);
    let running = aged.iter().filter(|trace| trace.times.ended.is_none()).count();
    json!({
        "router": router(models, since, targets),
        "workers": workers,
        "links": links,
        "running": running,
        "stats": stats.json(),
        "bound": bound(&found),
        "requests": newest(requests, LISTED),
        "handoffs": newest(handoffs, HANDOFFS),
    })
}

/// The newest of these, each with its age.
fn newest(mut all: Vec<(Duration, Value)>, most: usize) -> Vec<Value> {
    all.sort_by_key(|(age, _)| *age);
    let with_age = |(age, mut value): (Duration, Value)| {
        value["age_ms"] = json!(age.as_millis() as u64);
        value
    };
    all.into_iter().take(most).map(with_age).collect()
}

fn router(models: &Models, since: Instant, targets: Targets) -> Value {
    let served = models.all().map(|served| served.model.id());
    let (stale, revision) = models.first().workers.view_state();
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "models": served.collect::<Vec<_>>(),
        "uptime_s": since.elapsed().as_secs(),
        "stale": stale,
        "revision": revision,
        "not_ready": models.not_ready(),
        "slo": {"ttft_s": targets.first_token, "itl_s": targets.token},
    })
}

fn bound(found: &Bottleneck) -> Value {
    let pressures: HashMap<&str, f64> = found.pressures.iter().map(|(of, share)| (of.as_str(), *share)).collect();
    json!({"by": found.by.as_str(), "over": found.over, "sentence": found.sentence, "pressures": pressures})
}

/// What bounds the cluster does not depend on workers that are lost, or say nothing, nor on KV stores.
fn load(seen: &Seen) -> Option<WorkerLoad> {
    let backlog = seen.backlog.filter(|_| !seen.lost && seen.member.role != Role::KvStore)?;
    Some(WorkerLoad { prefill: seen.member.role == Role::Prefill, backlog, blocks: seen.member.blocks })
}

fn worker(seen: &Seen, status: Option<&v1::StatusResponse>) -> Value {
    let Seen { member, lost, ejected, in_flight, backlog } = seen;
    let mut told = json!({
        "id": member.id.to_string(),
        "role": member.role.as_str(),
        "model": member.model,
        "address": member.grpc,
        "state": state(seen, status),
        "ejected": ejected,
        "lost": lost,
        "in_flight": in_flight,
        "blocks_total": member.blocks,
        "block_size": member.block_size,
        "context_tokens": member.context_tokens,
    });
    if let Some(backlog) = backlog {
        let Backlog { work, coming, room, .. } = backlog;
        told["queued_tokens"] = json!(work.tokens);
        told["queue_s"] = json!(backlog.queue());
        told["rows"] = json!(work.rows);
        told["coming"] = json!(coming.rows);
        told["room"] = json!(room);
    }
    if let Some(status) = status {
        told["running"] = json!(status.running);
        told["waiting"] = json!(status.waiting);
        told["steps"] = json!(status.steps);
        let v1::BlockCounts { total, free, used, cached, lent, quarantined } = status.blocks.unwrap_or_default();
        told["blocks"] = json!({
            "total": total, "free": free, "used": used, "cached": cached, "lent": lent, "quarantined": quarantined,
        });
    }
    told
}

fn state(seen: &Seen, status: Option<&v1::StatusResponse>) -> &'static str {
    match status {
        _ if seen.lost => "lost",
        None => "silent",
        Some(status) if status.draining || seen.member.draining => "draining",
        Some(_) if seen.ejected => "left out",
        Some(_) => "serving",
    }
}

fn peers(from: WorkerId, status: &v1::StatusResponse) -> impl Iterator<Item = Value> {
    status.peers.iter().filter_map(move |peer| {
        let path = peer.paths.iter().find(|path| path.in_use)?;
        let handoffs: u64 = peer.paths.iter().map(|path| path.handoffs).sum();
        let failures: u64 = peer.paths.iter().map(|path| path.failures).sum();
        Some(json!({
            "from": from.to_string(),
            "to": WorkerId(peer.id).to_string(),
            "transport": path.transport,
            "bytes_per_second": path.bytes_per_second,
            "handoffs": handoffs,
            "failures": failures,
        }))
    })
}
