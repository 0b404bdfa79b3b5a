"""Table of the histograms of requests: attribute, metric name, help and buckets."""

from __future__ import annotations

from router.metrics.histograms import Histogram

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
LENGTH_BUCKETS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))
COUNT_BUCKETS = (1, 2, 5, 10, 20)


class RequestHistograms:
    """Histograms of request times (seconds) and lengths (tokens), in the order of the metrics page."""

    def __init__(self) -> None:
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", TTFT_BUCKETS
        )
        self.itl = Histogram("vllm:inter_token_latency_seconds", "From token to token.", ITL_BUCKETS)
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its last token.", LATENCY_BUCKETS
        )
        self.queue = Histogram("vllm:request_queue_time_seconds", "Waiting at an instance.", LATENCY_BUCKETS)
        self.prefill = Histogram(
            "vllm:request_prefill_time_seconds",
            "From the first step with a request to its first token.",
            LATENCY_BUCKETS,
        )
        self.decode = Histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", LATENCY_BUCKETS
        )
        self.inference = Histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode.", LATENCY_BUCKETS
        )
        self.tpot = Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token of a request, the first one left out.",
            ITL_BUCKETS,
        )
        self.computed = Histogram(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens that the instance of the first token computed.",
            LENGTH_BUCKETS,
        )
        self.most_tokens = Histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest sample.", LENGTH_BUCKETS
        )
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Tokens of prompts.", LENGTH_BUCKETS)
        self.generation_tokens = Histogram(
            "vllm:request_generation_tokens",
            "Tokens of a sample up to its end, that of a stop string included.",
            LENGTH_BUCKETS,
        )
        self.params_n = Histogram("vllm:request_params_n", "Samples asked for.", COUNT_BUCKETS)
        self.params_max_tokens = Histogram(
            "vllm:request_params_max_tokens", "Tokens asked for at most.", LENGTH_BUCKETS
        )

    def __repr__(self) -> str:
        return f"<RequestHistograms {[each.name for each in self.all()]}>"

    def all(self) -> list[Histogram]:
        """All histograms, in the order of the metrics page."""
        return list(vars(self).values())

    def add_lengths(self, others: RequestHistograms) -> None:
        """Add what others observed but for the times, which were not those of any client."""
        for own, other in zip(self.all(), others.all(), strict=True):
            if not own.name.endswith("_seconds"):
                own.add(other.totals())

    def without_times(self) -> RequestHistograms:
        """Histograms of which those of lengths are the same, and those of times others."""
        found = RequestHistograms()
        same = {key: each for key, each in vars(self).items() if not each.name.endswith("_seconds")}
        vars(found).update(same)
        return found


class CountedRequests:
    """Counts that a :class:`router.metrics.meter.Meter` writes: requests running, ended, and measured."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.requests = RequestHistograms()
        self.success: dict[tuple[str, str], int] = {}
        """Finished requests by engine and finish reason."""
        self.has_times = True
        """Whether times are measured: those of requests that clients wait for."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.in_flight} in flight, {sum(self.success.values())} finished>"

    def take(self, others: CountedRequests) -> None:
        """Count requests that ended elsewhere, without their times."""
        for key, count in others.success.items():
            self.success[key] = self.success.get(key, 0) + count
        self.requests.add_lengths(others.requests)

    def without_times(self) -> CountedRequests:
        """Counts of requests that are counted here as well, but for their times."""
        found = CountedRequests()
        found.success, found.requests = self.success, self.requests.without_times()
        found.has_times = False
        return found
