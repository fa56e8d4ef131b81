//! The names of all metrics that more than one crate writes or reads, and the recorder behind them.
//!
//! Base units are part of the name. Labels are small enums, never request ids. Crates record with the macros of the
//! `metrics` crate and these constants. A process renders its metrics at its admin endpoint.

use std::sync::{Mutex, PoisonError};

use ::metrics::{Unit, describe_counter, describe_gauge, describe_histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::error::RuntimeError;

/// Histogram by `class`, seconds: TTFT, from receiving a request until its first token left.
pub const TIME_TO_FIRST_TOKEN: &str = "baton_time_to_first_token_seconds";
/// Histogram by `class`, seconds: ITL, the time between two tokens of one answer.
pub const INTER_TOKEN_LATENCY: &str = "baton_inter_token_latency_seconds";
/// Histogram, seconds: from receiving a request until its answer ended.
pub const REQUEST_SECONDS: &str = "baton_request_seconds";
/// Counter by `outcome`: requests that ended.
pub const REQUESTS: &str = "baton_requests_total";
/// Gauge: requests that the router has received and that have not ended.
pub const REQUESTS_IN_FLIGHT: &str = "baton_requests_in_flight";
/// Gauge: requests waiting on a worker for their first step.
pub const QUEUE_DEPTH: &str = "baton_queue_depth";
/// Gauge: how loaded a worker is; 1 is its limit.
pub const LOAD: &str = "baton_load";
/// Gauge: prompt tokens that are to be computed on a worker.
pub const QUEUED_TOKENS: &str = "baton_queued_tokens";
/// Gauge, seconds: how long these will take, as predicted from the latest prompts.
pub const QUEUE_SECONDS: &str = "baton_queue_seconds";
/// Gauge: sequences in the running batch.
pub const RUNNING: &str = "baton_running_sequences";
/// Gauge by `state` (free, used, cached, lent, quarantined): blocks of the pool.
pub const KV_BLOCKS: &str = "baton_kv_blocks";
/// Counter: prompt tokens whose KV was reused instead of computed.
pub const PREFIX_HIT_TOKENS: &str = "baton_prefix_hit_tokens_total";
/// Counter: cached blocks evicted to make room for others.
pub const CACHE_EVICTIONS: &str = "baton_prefix_evictions_total";
/// Gauge: token blocks in the prefix cache that requests have asked to keep.
pub const KEPT_BLOCKS: &str = "baton_prefix_kept_blocks";
/// Gauge: number of prompt tokens at which a step counts as full.
pub const PACK_TOKENS: &str = "baton_pack_tokens";
/// Counter: preemptions, where a running sequence lost its blocks to one that goes first.
pub const PREEMPTIONS: &str = "baton_preemptions_total";
/// Counter: preemptions that moved the KV to host memory. After other preemptions the KV is computed again.
pub const SWAPS: &str = "baton_swaps_total";
/// Counter by `direction` (out, in): blocks copied between the pool and host memory.
pub const SWAPPED_BLOCKS: &str = "baton_swapped_blocks_total";
/// Gauge by `state` (free, used): blocks of host memory for preempted sequences.
pub const SWAP_BLOCKS: &str = "baton_swap_blocks";
/// Counter: prompt tokens computed.
pub const PREFILL_TOKENS: &str = "baton_prefill_tokens_total";
/// Counter: tokens delivered from decode rows.
pub const DECODE_TOKENS: &str = "baton_decode_tokens_total";
/// Counter: decode rows computed after their answer had ended.
pub const DECODED_WASTED: &str = "baton_decode_tokens_wasted_total";
/// Histogram, seconds: one engine step.
pub const STEP_SECONDS: &str = "baton_step_seconds";
/// Counter by `transport`: KV bytes that a prefill worker wrote in verified handoffs.
pub const TRANSFER_BYTES: &str = "baton_transfer_bytes_total";
/// Counter by `transport`: pieces in which these bytes were written.
pub const TRANSFER_SLICES: &str = "baton_transfer_slices_total";
/// Histogram by `transport`, seconds: from the first write of a handoff until its verification.
pub const TRANSFER_SECONDS: &str = "baton_transfer_seconds";
/// Counter by `transport`: KV bytes that a decode worker received in verified handoffs.
pub const TRANSFER_RECEIVED_BYTES: &str = "baton_transfer_received_bytes_total";
/// Counter: tokens of prefixes that were loaded from the worker's store below the pool, and so need not be computed.
pub const LOADED_TOKENS: &str = "baton_kv_loaded_tokens_total";
/// Gauge by `tier` (`host`, `disk`): blocks in the worker's store.
pub const TIER_BLOCKS: &str = "baton_kv_tier_blocks";
/// Counter by `tier`: tokens of blocks that the store handed out.
pub const TIER_HIT_TOKENS: &str = "baton_kv_tier_hit_tokens_total";
/// Counter by `tier`: bytes of KV that the store handed out.
pub const TIER_READ_BYTES: &str = "baton_kv_tier_read_bytes_total";
/// Counter by `tier`: blocks of the store that were not as they were stored.
pub const TIER_VERIFY_FAILURES: &str = "baton_kv_tier_verify_failures_total";
/// Counter: bytes written to the store's disk.
pub const TIER_WRITTEN_BYTES: &str = "baton_kv_tier_written_bytes_total";
/// Counter: reads and writes of the store's disk that failed.
pub const TIER_DISK_ERRORS: &str = "baton_kv_tier_disk_errors_total";
/// Counter by `outcome` (`fetched`; `refused`, before anything was sent; `failed`): prefixes that workers were asked to take from others.
pub const FETCHES: &str = "baton_kv_fetches_total";
/// Counter: tokens of prefixes that were fetched from other workers, and so need not be computed.
pub const FETCHED_TOKENS: &str = "baton_kv_fetched_tokens_total";
/// Counter by `transport` (`none`: no path was found yet) and `cause`: handoffs that failed at this end, without those that
/// their owner withdrew.
pub const TRANSFER_FAILURES: &str = "baton_transfer_failures_total";
/// Counter by `transport` and `cause`: paths to a decode worker that broke or could not be set up. Later writes are retried
/// over the next path.
pub const TRANSFER_PATH_FAILURES: &str = "baton_transfer_path_failures_total";
/// Gauge: prefill workers connected to this decode worker, updated when a handoff ends.
pub const TRANSFER_SESSIONS: &str = "baton_transfer_sessions";
/// Counter: arrivals of other bytes than were sent (I2): handoffs with such a block, and frames that changed on the way.
pub const VERIFY_FAILURES: &str = "baton_verify_failures_total";
/// Counter by `leg` and `cause`: requests resumed after a failure.
pub const RECOVERIES: &str = "baton_recoveries_total";
/// Counter by `of` (worker, pair): workers, and pairs of them, that did worse than others and were left out for a while.
pub const EJECTIONS: &str = "baton_ejections_total";
/// Gauge by `of` (decode, prefill): median relative error lately of the predicted time of a step.
pub const STEP_ERROR: &str = "baton_step_error_ratio";
/// Gauge by `of` (ttft, itl): median relative error lately of what a router predicted of its requests.
pub const PREDICTION_ERROR: &str = "baton_prediction_error_ratio";
/// Counter by `route` (split, local) and `kv` (held, none: whether a chosen worker holds some of the prompt): predicted placements.
pub const PLACEMENTS: &str = "baton_placements_total";
/// Gauge by `of` (pools, stores): blocks that the router knows some worker to have in its prefix cache, or in its own store.
pub const KV_INDEX_BLOCKS: &str = "baton_kv_index_blocks";
/// Gauge: choices that wait in the router for their turn.
pub const WAITING: &str = "baton_waiting_choices";
/// Counter by `reason` and `class`: requests refused before any work.
pub const REJECTED: &str = "baton_rejected_total";
/// Counter by `cached` (yes, no): bytes of prompts' text whose tokens were known from texts seen before, or were computed.
pub const TOKENIZED_BYTES: &str = "baton_tokenized_bytes_total";
/// Gauge by `role`: members of the cluster in the current view.
pub const MEMBERS: &str = "baton_cluster_members";
/// Gauge: 1 while the registry is away and the last known view is used, otherwise 0 (I7).
pub const VIEW_STALE: &str = "baton_cluster_view_stale";

/// Upper bounds of histogram buckets, seconds: 100 µs to 2 minutes, about three per decade.
const SECONDS: [f64; 19] = [
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
    120.0,
];

/// Renders this process's metrics. Cheap to clone.
#[derive(Clone)]
pub struct MetricsHandle(PrometheusHandle);

impl std::fmt::Debug for MetricsHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MetricsHandle")
    }
}

impl MetricsHandle {
    /// Prometheus text format.
    pub fn render(&self) -> String {
        self.0.render()
    }

    /// Folds recorded samples into buckets. Call it every few seconds, so that memory stays bounded (I5) when nobody reads
    /// the metrics.
    pub fn upkeep(&self) {
        self.0.run_upkeep();
    }
}

static INSTALLED: Mutex<Option<MetricsHandle>> = Mutex::new(None);

/// Installs the recorder on the first call; later calls return the same handle.
///
/// # Errors
/// Something else in this process has installed a recorder.
pub fn install() -> Result<MetricsHandle, RuntimeError> {
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(handle) = &*installed {
        return Ok(handle.clone());
    }
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .map_err(|e| RuntimeError::Buckets(e.to_string()))?
        .build_recorder();
    let handle = MetricsHandle(recorder.handle());
    ::metrics::set_global_recorder(recorder).map_err(|_| RuntimeError::Recorder)?;
    describe();
    *installed = Some(handle.clone());
    Ok(handle)
}

fn describe() {
    describe_histogram!(TIME_TO_FIRST_TOKEN, Unit::Seconds, "Request received until its first token left.");
    describe_histogram!(INTER_TOKEN_LATENCY, Unit::Seconds, "Time between two tokens of one answer.");
    describe_histogram!(REQUEST_SECONDS, Unit::Seconds, "Request received until its answer ended.");
    describe_counter!(REQUESTS, Unit::Count, "Requests that ended, by outcome.");
    describe_gauge!(REQUESTS_IN_FLIGHT, Unit::Count, "Requests that were received and have not ended.");
    describe_gauge!(QUEUE_DEPTH, Unit::Count, "Requests waiting for their first step.");
    describe_gauge!(LOAD, Unit::Count, "How loaded the worker is; 1: at its limit, 0: while it drains.");
    describe_gauge!(QUEUED_TOKENS, Unit::Count, "Prompt tokens that are to be computed.");
    describe_gauge!(QUEUE_SECONDS, Unit::Seconds, "How long the queued tokens will take, as predicted.");
    describe_gauge!(RUNNING, Unit::Count, "Sequences in the running batch.");
    describe_gauge!(KV_BLOCKS, Unit::Count, "Blocks of the KV pool, by state.");
    describe_counter!(PREFIX_HIT_TOKENS, Unit::Count, "Prompt tokens whose KV was reused instead of computed.");
    describe_counter!(CACHE_EVICTIONS, Unit::Count, "Cached blocks whose place was taken for others.");
    describe_gauge!(KEPT_BLOCKS, Unit::Count, "Blocks of tokens that requests have asked the prefix cache to keep.");
    describe_gauge!(PACK_TOKENS, Unit::Count, "Prompt tokens that fill a step.");
    describe_counter!(PREEMPTIONS, Unit::Count, "Running sequences whose blocks were taken for one that goes first.");
    describe_counter!(SWAPS, Unit::Count, "Preempted sequences whose KV went to host memory.");
    describe_counter!(SWAPPED_BLOCKS, Unit::Count, "Blocks copied to host memory and back, by direction.");
    describe_gauge!(SWAP_BLOCKS, Unit::Count, "Blocks of host memory for preempted sequences, by state.");
    describe_counter!(PREFILL_TOKENS, Unit::Count, "Prompt tokens computed.");
    describe_counter!(DECODE_TOKENS, Unit::Count, "Tokens decoded and told of.");
    describe_counter!(DECODED_WASTED, Unit::Count, "Tokens decoded for answers that had ended by then.");
    describe_histogram!(STEP_SECONDS, Unit::Seconds, "One engine step.");
    describe_counter!(TRANSFER_BYTES, Unit::Bytes, "KV bytes of verified handoffs written to peers, by transport.");
    describe_counter!(TRANSFER_SLICES, Unit::Count, "Pieces they were written in, by transport.");
    describe_histogram!(
        TRANSFER_SECONDS,
        Unit::Seconds,
        "First write of a handoff until its verification, by transport."
    );
    describe_counter!(TRANSFER_RECEIVED_BYTES, Unit::Bytes, "KV bytes received and verified, by transport.");
    describe_counter!(LOADED_TOKENS, Unit::Count, "Tokens of prefixes loaded from the worker's KV store.");
    describe_gauge!(TIER_BLOCKS, Unit::Count, "Blocks in the worker's KV store, by tier.");
    describe_counter!(TIER_HIT_TOKENS, Unit::Count, "Tokens of blocks that the KV store handed out, by tier.");
    describe_counter!(TIER_READ_BYTES, Unit::Bytes, "KV that the KV store handed out, by tier.");
    describe_counter!(TIER_VERIFY_FAILURES, Unit::Count, "Stored blocks that were not as they were stored, by tier.");
    describe_counter!(TIER_WRITTEN_BYTES, Unit::Bytes, "Bytes written to the KV store's disk.");
    describe_counter!(TIER_DISK_ERRORS, Unit::Count, "Reads and writes of the KV store's disk that failed.");
    describe_counter!(FETCHES, Unit::Count, "Prefixes that workers were asked to take from others, by outcome.");
    describe_counter!(FETCHED_TOKENS, Unit::Count, "Tokens of prefixes fetched from other workers.");
    describe_counter!(TRANSFER_FAILURES, Unit::Count, "Handoffs that failed at this end, by transport and cause.");
    describe_counter!(TRANSFER_PATH_FAILURES, Unit::Count, "Paths that failed and gave way, by transport and cause.");
    describe_gauge!(TRANSFER_SESSIONS, Unit::Count, "Prefill workers connected, when a handoff last ended.");
    describe_counter!(VERIFY_FAILURES, Unit::Count, "Blocks' handoffs and frames with other bytes than were sent.");
    describe_counter!(RECOVERIES, Unit::Count, "Requests resumed after a failure, by leg and cause.");
    describe_counter!(EJECTIONS, Unit::Count, "Workers, and pairs of them, left out for a while, by what they are.");
    describe_gauge!(STEP_ERROR, "Median relative error of the predicted time of steps, by what they compute.");
    describe_gauge!(PREDICTION_ERROR, "Median relative error of what a router predicted of its requests.");
    describe_counter!(
        PLACEMENTS,
        "Predicted placements, by route, and by whether a chosen worker holds some of the prompt."
    );
    describe_gauge!(
        KV_INDEX_BLOCKS,
        Unit::Count,
        "Blocks that some worker is known to have in its prefix cache, or in its own store."
    );
    describe_gauge!(WAITING, Unit::Count, "Choices that wait in the router for their turn.");
    describe_counter!(REJECTED, Unit::Count, "Requests refused before any work, by reason.");
    describe_counter!(
        TOKENIZED_BYTES,
        Unit::Bytes,
        "Text of prompts, by whether its tokens were known from texts seen before."
    );
    describe_gauge!(MEMBERS, Unit::Count, "Members of the cluster in the present view, by role.");
    describe_gauge!(VIEW_STALE, Unit::Count, "1 while the registry is away and the last known view is used.");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_docs_list_every_metric() {
        let docs = include_str!("../../../docs/metrics.md");
        let names =
            include_str!("metrics.rs").lines().filter_map(|line| line.strip_prefix("pub const ")?.split('"').nth(1));
        let missing: Vec<_> = names.filter(|name| !docs.contains(&format!("`{name}`"))).collect();
        assert!(missing.is_empty(), "docs/metrics.md lacks {missing:?}");
    }

    #[test]
    fn metrics_are_rendered_with_help_and_buckets() {
        let handle = install().unwrap();
        ::metrics::histogram!(TIME_TO_FIRST_TOKEN).record(0.2);
        ::metrics::counter!(REJECTED, "reason" => "no_blocks").increment(3);
        let text = install().unwrap().render();
        for want in [
            "# HELP baton_time_to_first_token_seconds Request received",
            "baton_time_to_first_token_seconds_bucket{le=\"0.25\"} 1",
            "baton_time_to_first_token_seconds_bucket{le=\"0.1\"} 0",
            "baton_rejected_total{reason=\"no_blocks\"} 3",
        ] {
            assert!(text.contains(want), "{want} is missing in\n{text}");
        }
        handle.upkeep();
    }
}
