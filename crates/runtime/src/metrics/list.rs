//! All metrics: their names, and what they say.

use super::table::metrics;

metrics! {
    "Requests" {
        TIME_TO_FIRST_TOKEN: histogram "baton_time_to_first_token_seconds" by "`class` (interactive, batch)" of "router",
            "request received until its first token left";
        INTER_TOKEN_LATENCY: histogram "baton_inter_token_latency_seconds" by "`class`" of "router",
            "between two tokens of one answer";
        REQUEST_SECONDS: histogram "baton_request_seconds" by "" of "router",
            "request received until its answer ended";
        PHASE_SECONDS: histogram "baton_phase_seconds" by "`phase` (queue, prefill, transfer, first_decode)" of "router",
            "where the time of an answer without a failure went: received until workers were asked; asked until its prompt was computed, its wait there included; until its KV was verified at the decode worker; until the next token";
        SLO: counter "baton_slo_total" by "`class`, `met` (yes, no)" of "router",
            "answers that had their tokens in time, and that had not or failed: by the SLOs that were promised, else 1 s to the first token and 0.1 s from token to token in the mean; batch work only where it asked for SLOs. The rate of `yes` is the goodput";
        REQUESTS: counter "baton_requests_total" by "`outcome`" of "router",
            "requests that ended";
        REQUESTS_IN_FLIGHT: gauge "baton_requests_in_flight" by "" of "router",
            "requests received that have not ended";
        RECOVERIES: counter "baton_recoveries_total" by "`leg`, `cause`" of "router",
            "requests resumed after a failure";
        EJECTIONS: counter "baton_ejections_total" by "`of` (worker, pair)" of "router",
            "workers, and pairs of a prefill and a decode worker, that failed more requests than others, or took much longer, and got none for a while";
        PLACEMENTS: counter "baton_placements_total" by "`route` (split, local) and `kv` (held, stored, none)" of "router",
            "placements that were predicted, by whether a chosen worker holds some of the prompt in its pool (held), or is to load some from its own store (stored)";
        KEEPS: counter "baton_kv_keeps_total" by "`outcome` (kept; refused, before anything was sent; failed)" of "router",
            "pieces of prompts and answers that KV stores were asked to take from workers";
        HOT_COPIES: counter "baton_kv_hot_copies_total" by "`outcome` (kept; refused, before anything was sent; failed)" of "router",
            "pieces of prefixes that many prompts begin with, which idle workers were asked to take ahead of need";
        RECALLS: counter "baton_kv_recalls_total" by "`outcome` (asked, of a worker's own store; kept, of a KV store; refused; failed)" of "router",
            "KV of conversations that workers were asked to bring into their pools before the next turn";
        FETCHES: counter "baton_kv_fetches_total" by "`outcome` (fetched; refused, before anything was sent; failed)" of "router",
            "prefixes that workers were asked to take from others";
        PREDICTION_ERROR: gauge "baton_prediction_error_ratio" by "`of` (ttft, itl)" of "router",
            "median error lately of the predicted time to the first token, and from token to token, as a share of what was measured";
        KV_INDEX_BLOCKS: gauge "baton_kv_index_blocks" by "`of` (pools, stores)" of "router",
            "different blocks that workers say they have in their prefix caches, or in their own stores";
        WAITING: gauge "baton_waiting_choices" by "" of "router",
            "choices that wait in the router for their turn: of [tenants](tenants.md), and [batch work](classes.md)";
        REJECTED: counter "baton_rejected_total" by "`reason` and `class` (interactive, batch, unknown)" of "router",
            "requests refused before any work; `unknown`: before their class was read. `slo_missed`: an SLO or the deadline would have been missed";
        TOKENIZED_BYTES: counter "baton_tokenized_bytes_total" by "`cached` (yes, no)" of "router",
            "text of prompts whose tokens were known from texts seen before, or were computed";
        MEMBERS: gauge "baton_cluster_members" by "`role`" of "router",
            "members of the cluster in the present view";
        VIEW_STALE: gauge "baton_cluster_view_stale" by "" of "router",
            "1 while the registry is away and the last known view is used";
    }
    "Engine" {
        QUEUE_DEPTH: gauge "baton_queue_depth" by "" of "workers",
            "requests waiting for their first step";
        LOAD: gauge "baton_load" by "" of "workers",
            "how loaded the worker is, for autoscalers: 1 is at its limit, 0 while it drains ([Kubernetes](kubernetes.md#autoscaling))";
        QUEUED_TOKENS: gauge "baton_queued_tokens" by "" of "workers",
            "prompt tokens that are to be computed here";
        QUEUE_SECONDS: gauge "baton_queue_seconds" by "" of "workers",
            "how long these will take, predicted from the rate of the latest prompts";
        RUNNING: gauge "baton_running_sequences" by "" of "workers",
            "sequences in the running batch";
        KV_BLOCKS: gauge "baton_kv_blocks" by "`state`" of "workers",
            "blocks of the pool: free, used, cached, lent, quarantined";
        PREFIX_HIT_TOKENS: counter "baton_prefix_hit_tokens_total" by "" of "workers",
            "prompt tokens whose KV was reused instead of computed";
        CACHE_EVICTIONS: counter "baton_prefix_evictions_total" by "" of "workers",
            "cached blocks that were evicted";
        KEPT_BLOCKS: gauge "baton_prefix_kept_blocks" by "" of "workers",
            "cached blocks that requests have asked to keep";
        PACK_TOKENS: gauge "baton_pack_tokens" by "" of "workers",
            "prompt tokens that fill a step";
        PREEMPTIONS: counter "baton_preemptions_total" by "" of "workers",
            "running sequences whose blocks were taken for one that goes first";
        PREFILL_TOKENS: counter "baton_prefill_tokens_total" by "" of "workers",
            "prompt tokens computed";
        DECODE_TOKENS: counter "baton_decode_tokens_total" by "" of "workers",
            "tokens delivered from decode rows";
        DECODED_WASTED: counter "baton_decode_tokens_wasted_total" by "" of "workers",
            "tokens of decode rows computed after their answer had ended: on a GPU a step is launched before the results of the step before it are known";
        STEP_SECONDS: histogram "baton_step_seconds" by "" of "workers",
            "one engine step";
        FLOPS: counter "baton_flops_total" by "" of "workers",
            "operations of the model's arithmetic in steps, a multiplication and an addition as two; norms, activations and softmax left out";
        READ_BYTES: counter "baton_read_bytes_total" by "" of "workers",
            "bytes that steps have to read: all weights once a step, and the KV of all tokens of decode rows, those beyond a layer's window included";
        CEILING: gauge "baton_ceiling" by "`of` (read_bytes, f32_flops, int8_ops)" of "workers",
            "what the processor can do at most in a second, measured at the start with `measure_ceilings`; on the CPU, products of quantised models are 8-bit operations";
        GPU_BUSY: gauge "baton_gpu_busy_ratio" by "`gpu` (number of the worker's own, from 0)" of "workers",
            "share of the last second or less in which the GPU ran a kernel, by NVML";
        GPU_MEMORY: gauge "baton_gpu_memory_bytes" by "`gpu`, `state` (used, total)" of "workers",
            "memory of the GPU, by all processes, by NVML";
        GPU_POWER: gauge "baton_gpu_power_watts" by "`gpu`" of "workers",
            "power that the GPU draws, by NVML";
        STEP_ERROR: gauge "baton_step_error_ratio" by "`of` (decode, prefill)" of "workers",
            "median error lately of the predicted time of a step, as a share of it: steps of decode rows alone, and what prompts add to others";
    }
    "Transfers" {
        TRANSFER_BYTES: counter "baton_transfer_bytes_total" by "`transport`" of "workers",
            "KV bytes sent in handoffs that were verified";
        TRANSFER_SLICES: counter "baton_transfer_slices_total" by "`transport`" of "prefill",
            "pieces that these bytes were written in";
        TRANSFER_SECONDS: histogram "baton_transfer_seconds" by "`transport`" of "prefill",
            "first write of a handoff until its verification";
        VERIFY_SECONDS: histogram "baton_verify_seconds" by "`transport`" of "prefill",
            "all of a handoff written until it was verified: what the decode worker still had to take in and compare";
        TRANSFER_RECEIVED_BYTES: counter "baton_transfer_received_bytes_total" by "`transport`" of "workers",
            "KV bytes that arrived and were verified";
        TRANSFER_FAILURES: counter "baton_transfer_failures_total" by "`transport`, `cause`" of "workers",
            "handoffs that failed; the router recovers them";
        TRANSFER_PATH_FAILURES: counter "baton_transfer_path_failures_total" by "`transport`, `cause`" of "prefill",
            "paths to a worker that could not be set up or broke; later handoffs use the next path";
        TRANSFER_SESSIONS: gauge "baton_transfer_sessions" by "" of "decode",
            "prefill workers connected, when a handoff last ended";
        VERIFY_FAILURES: counter "baton_verify_failures_total" by "" of "workers",
            "times that received bytes differed from those sent: at the decode end handoffs with such a block, at either end frames that changed in transit, each counted once";
    }
    "KV store" {
        LOADED_TOKENS: counter "baton_kv_loaded_tokens_total" by "" of "workers",
            "tokens of prefixes loaded from the worker's [KV store](kv-store.md), which need not be computed";
        STREAMED_TOKENS: counter "baton_kv_streamed_tokens_total" by "" of "workers",
            "those of them that were copied from host memory while their prompt was computed, or was to be";
        TIER_LOAD_SECONDS: histogram "baton_kv_tier_load_seconds" by "`tier`" of "workers",
            "how long prefixes that came whole took to load and verify, from when the worker asked; by the lowest tier that any of it came from, where `peer` is other workers and KV stores";
        TIER_BLOCKS: gauge "baton_kv_tier_blocks" by "`tier` (host, disk, object)" of "workers",
            "blocks in the worker's KV store";
        TIER_HIT_TOKENS: counter "baton_kv_tier_hit_tokens_total" by "`tier`" of "workers",
            "tokens of blocks that the store handed out, and of prefixes that came from peers";
        TIER_READ_BYTES: counter "baton_kv_tier_read_bytes_total" by "`tier`" of "workers",
            "KV that the store handed out, and that came from peers";
        TIER_VERIFY_FAILURES: counter "baton_kv_tier_verify_failures_total" by "`tier`" of "workers",
            "stored blocks that were not as they were stored, and prefixes that were not as a peer sent them; they are computed. Of `pool`: blocks that came from elsewhere and changed in this pool";
        TIER_WRITTEN_BYTES: counter "baton_kv_tier_written_bytes_total" by "`tier`" of "workers",
            "bytes written to the store's disk, and uploaded to its object store";
        TIER_MOVED_BYTES: counter "baton_kv_tier_moved_bytes_total" by "" of "workers",
            "bytes among those written to the store's disk that were there before, and were written elsewhere to free their segment";
        TIER_DISK_ERRORS: counter "baton_kv_tier_disk_errors_total" by "" of "workers",
            "reads and writes of the store's disk that failed";
        TIER_OBJECT_ERRORS: counter "baton_kv_tier_object_errors_total" by "" of "workers",
            "calls of the store's object store that failed or took too long; its blocks are computed meanwhile";
        FETCHED_TOKENS: counter "baton_kv_fetched_tokens_total" by "" of "workers",
            "tokens of prefixes fetched from other workers, which need not be computed";
    }
}
