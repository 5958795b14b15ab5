"""The names on /metrics, in tables. All of them travel with heartbeats, so that any gateway can show them all.

To add a metric: count it in the actor that knows it, put it into that actor's `beat_facts().counters` under `name` or
`name{label="value",...}`, and add its line here. Nothing else changes; a name that an actor sends and no table here
knows fails tests/e2e/test_metrics.py.

Values of one name and labels from several actors add up. Labels are the sender's business: executors label what is
theirs (`executor="ex0"`), so that sums over labels stay the whole server's. The dashboard in docs/grafana and its test
read what the exporter shows, so new names need no change there either.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "epicycle_"

# name -> (kind, help).
FROM_BEATS: Final[dict[str, tuple[str, str]]] = {
    "requests_finished_total": ("counter", "choices ended, by reason"),
    "aborts_total": ("counter", "requests cut short, by cause"),
    "gateway_in_flight": ("gauge", "sequences in flight at a gateway"),
    "gateway_unsent_cancels": ("gauge", "cancels that a gateway couldn't send yet"),
    "requests_running": ("gauge", "requests that hold a slot"),
    "requests_waiting": ("gauge", "requests without a first token yet, by what they wait for"),
    "kv_pages": ("gauge", "pages of the KV pool by state"),
    "kv_usage_ratio": ("gauge", "share of the KV pool that requests hold; cached prefixes count as free"),
    "uneven_census_total": ("counter", "counts of the pool that didn't add up"),
    "prompt_tokens_total": ("counter", "prompt tokens taken in"),
    "generation_tokens_total": ("counter", "tokens generated"),
    "ticks_total": ("counter", "traversals of the recurrent core"),
    "rows_in_ticks_total": ("counter", "rows summed over ticks"),
    "mixed_depth_ticks_total": ("counter", "ticks with rows at different depths"),
    "tick_parts_total": ("counter", "parts of device ticks by how they were run: replayed from a graph, or launched"),
    "padding_rows_total": ("counter", "rows of device ticks in which nobody was"),
    "whole_token_ticks_total": ("counter", "device ticks that ran all loops of a token at once"),
    "graph_bytes": ("gauge", "device memory that captured graphs hold"),
    "graph_capture_seconds": ("gauge", "what capturing the graphs took at start"),
    "core_row_loops_total": ("counter", "loops run, summed over rows"),
    "prefix_query_tokens_total": ("counter", "prompt tokens of requests that looked for a cached prefix"),
    "prefix_hit_tokens_total": ("counter", "prompt tokens not computed, since the prefix cache had them"),
    "session_pinned_pages": ("gauge", "pages that sessions keep in the prefix cache"),
    "loops_saved_total": ("counter", "loops not run because tokens left early"),
    "preemptions_total": ("counter", "requests taken off the device to make room"),
    "resumes_total": ("counter", "preempted requests that went on"),
    "preemption_refusals_total": ("counter", "requests that could not be saved, since the host pages were full"),
    "kv_plan": ("gauge", "terms of the pool plan made at start, bytes or counts by their names"),
    "host_pages": ("gauge", "pages of host memory for preempted requests and cached prefixes, by state"),
    "prefix_spilled_pages_total": ("counter", "cached pages given up that were copied to the host"),
    "prefix_host_hit_tokens_total": ("counter", "prompt tokens whose KV came back from the host"),
    "prefix_evicted_pages_total": ("counter", "cached pages given up to make room"),
    "starved_total": ("counter", "times a row had to wait for its lease to grow, or ended because it could not"),
    "yielded_rows_total": ("counter", "rows that ended early to give up their pages"),
    "plans_total": ("counter", "plans sent to the executor"),
    "merged_plan_changes_total": ("counter", "plan changes merged into a pending plan"),
    "merged_token_rows_total": ("counter", "token rows merged because a gateway was slow"),
    "stale_messages_total": ("counter", "messages dropped for an epoch, slot or request that is gone"),
    "send_again_total": ("counter", "sends that found a link full"),
    "transfers_total": ("counter", "prompts whose KV one executor was to compute for another"),
    "transfers_in_flight": ("gauge", "prompts whose KV is not where it decodes yet"),
    "transfer_failures_total": ("counter", "transfers that failed, by code; their requests ran again on one executor"),
    "transfer_sent_total": ("counter", "prompts whose KV an executor has handed over"),
    "transfer_received_total": ("counter", "prompts whose KV an executor has taken over"),
    "transfer_sent_bytes_total": ("counter", "bytes of KV written to other executors"),
    "transfer_early_bytes_total": ("counter", "of those, bytes on their way before their prompt was computed"),
    "transfer_writes_total": ("counter", "writes to other executors"),
    "transfer_blocks_total": ("counter", "blocks of those writes before neighbours were merged"),
    "transfer_segments_total": ("counter", "segments that the blocks were merged to"),
    "transfer_inflight_bytes": ("gauge", "bytes of writes on their way"),
    "transfer_tail_seconds_total": ("counter", "from the ends of prompts to the acknowledgements of their transfers"),
    "transfer_tail_median_seconds": ("gauge", "the same of the last transfers, median"),
    "transfer_late_messages_total": ("counter", "messages about transfers that were over"),
    "transfer_link_bytes_per_second": ("gauge", "rate of the way to another executor, measured when the two met"),
    "rejections_total": ("counter", "requests refused, by code"),
    "record_rows_total": ("counter", "rows written by --record"),
    "record_dropped_total": ("counter", "rows that --record didn't write: queue or disk full, or no token made"),
}

# Histograms: beats carry `NAME_bucket{le="..."}`, each bucket's own count, not cumulative, and the sum by itself.
# name -> (the name of the sum, help).
HISTOGRAMS_FROM_BEATS: Final[dict[str, tuple[str, str]]] = {
    "ttft_seconds": ("ttft_seconds_sum", "time to the first token"),
    "itl_seconds": ("itl_seconds_sum", "time between a sequence's token messages"),
    "e2e_seconds": ("e2e_seconds_sum", "time from acceptance of the body to the end"),
    "queue_seconds": ("queue_seconds_sum", "time without a slot"),
    "prefill_seconds": ("prefill_seconds_sum", "time from slot to first token"),
    "decode_seconds": ("decode_seconds_sum", "time from first to last token"),
    "loops_per_token": ("loops_per_token_sum", "loops run per generated token"),
    "rows_per_tick": ("rows_in_ticks_total", "rows of a tick"),
}

# What every process says of itself: shown with the label `actor`, never summed. name -> help.
PER_ACTOR: Final[dict[str, str]] = {
    "loop_lag_seconds": "since the actor's own loop last turned",
    "vram_bytes": "device memory that the process has reserved",
}

# vLLM's name -> ours, with the same value and one more label, `model_name`; dashboards made for vLLM then work.
ALIASES: Final[dict[str, str]] = {
    "vllm:num_requests_running": "requests_running",
    "vllm:num_requests_waiting_by_reason": "requests_waiting",
    "vllm:kv_cache_usage_perc": "kv_usage_ratio",
    "vllm:gpu_cache_usage_perc": "kv_usage_ratio",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:prefix_cache_queries_total": "prefix_query_tokens_total",
    "vllm:prefix_cache_hits_total": "prefix_hit_tokens_total",
}
# The same for sums over all labels.
SUMMED_ALIASES: Final[dict[str, str]] = {"vllm:num_requests_waiting": "requests_waiting"}
# And for histograms.
HISTOGRAM_ALIASES: Final[dict[str, str]] = {
    "vllm:time_to_first_token_seconds": "ttft_seconds",
    "vllm:inter_token_latency_seconds": "itl_seconds",
    "vllm:e2e_request_latency_seconds": "e2e_seconds",
    "vllm:request_queue_time_seconds": "queue_seconds",
    "vllm:request_prefill_time_seconds": "prefill_seconds",
    "vllm:request_decode_time_seconds": "decode_seconds",
}
