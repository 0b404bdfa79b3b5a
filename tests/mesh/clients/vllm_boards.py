"""What vLLM's example Grafana boards ask Prometheus for, as expressions over metric and label names.

The classic board (``prometheus_grafana/grafana.json``) and the panels of the newer set that concern one model on
any hardware: not those for LoRA, several modalities, speculative decoding, KV connectors and sleep mode.
"""

from __future__ import annotations

QUANTILES = (0.5, 0.9, 0.95, 0.99)
OLD = '{model_name="$model_name"}'
NEW = '{job=~"$job",model_name=~"$model_name",instance=~"$instance",engine=~"$engine"}'
RATE = "[$__rate_interval]"


def quantiles(name: str, labels: str) -> list[str]:
    return [
        f"histogram_quantile({quantile}, sum by (le) (rate({name}_bucket{labels}{RATE})))"
        for quantile in QUANTILES
    ]


def mean(name: str, labels: str) -> str:
    return f"rate({name}_sum{labels}{RATE}) / rate({name}_count{labels}{RATE})"


LATENCIES = ("e2e_request_latency", "inter_token_latency", "time_to_first_token")

CLASSIC = [
    *(query for name in LATENCIES for query in quantiles(f"vllm:{name}_seconds", OLD)),
    *(mean(f"vllm:{name}_seconds", OLD) for name in LATENCIES),
    f"rate(vllm:prompt_tokens_total{OLD}{RATE})",
    f"rate(vllm:generation_tokens_total{OLD}{RATE})",
    f"vllm:num_requests_running{OLD}",
    f"vllm:num_requests_waiting{OLD}",
    f"vllm:kv_cache_usage_perc{OLD}",
    f"sum by (le) (increase(vllm:request_prompt_tokens_bucket{OLD}{RATE}))",
    f"sum by (le) (increase(vllm:request_generation_tokens_bucket{OLD}{RATE}))",
    f"sum by (finished_reason) (increase(vllm:request_success_total{OLD}{RATE}))",
    f"rate(vllm:request_queue_time_seconds_sum{OLD}{RATE})",
    f"rate(vllm:request_prefill_time_seconds_sum{OLD}{RATE})",
    f"rate(vllm:request_decode_time_seconds_sum{OLD}{RATE})",
    f"rate(vllm:request_max_num_generation_tokens_sum{OLD}{RATE})",
]

NEWER = [
    *(
        query
        for name in (
            *LATENCIES,
            "request_queue_time",
            "request_inference_time",
            "request_time_per_output_token",
        )
        for query in quantiles(f"vllm:{name}_seconds", NEW)
    ),
    *(
        query
        for name in ("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total")
        for query in quantiles(f"vllm:{name}", NEW)
    ),
    *(
        f"sum by (instance, engine) (rate(vllm:{name}_total{NEW}{RATE}))"
        for name in ("num_preemptions", "prompt_tokens", "generation_tokens", "request_success")
    ),
    f"sum(rate(vllm:prefix_cache_hits_total{NEW}{RATE}))"
    f" / (sum(rate(vllm:prefix_cache_queries_total{NEW}{RATE})) > 0)",
    f"sum(rate(vllm:prompt_tokens_cached_total{NEW}{RATE})) / (sum(rate(vllm:prompt_tokens_total{NEW}{RATE})) > 0)",
    f"sum by (source) (rate(vllm:prompt_tokens_by_source_total{NEW}{RATE}))",
    f"sum by (reason) (vllm:num_requests_waiting_by_reason{NEW})",
    f"max by (instance, engine) (vllm:kv_cache_usage_perc{NEW})",
    f"sum(rate(vllm:request_prefill_kv_computed_tokens_sum{NEW}{RATE}))",
    f"sum by (instance, engine) (rate(vllm:request_params_max_tokens_sum{NEW}{RATE}))",
    f"sum by (instance, engine) (rate(vllm:request_params_n_sum{NEW}{RATE}))",
    '(2 - (max(vllm:engine_sleep_state{model_name=~"$model_name",sleep_state="awake"}) == bool 0)) > 1',
    '1 - (sum(rate(vllm:request_success_total{model_name=~"$model_name",finished_reason="error"}[5m]))'
    ' / (sum(rate(vllm:request_success_total{model_name=~"$model_name"}[5m])) > 0))',
    'time() - process_start_time_seconds{job=~"$job",instance=~"$instance"}',
    f"vllm:cache_config_info{NEW}",
]
