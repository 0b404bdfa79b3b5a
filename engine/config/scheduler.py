"""Settings of the scheduler: what goes into one step, and what may wait for it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.settings.flags import Natural, Size, flag
from engine.config.speculation import SpeculativeConfig, read_config

CPU_TOKENS, GPU_TOKENS = 512, 2048
"""Default token budget of a step, on CPUs and on GPUs."""
CPU_TOKENS_BESIDE_DECODES = 128
"""Lower bound of the limit of prompt tokens beside decode rows, on CPUs."""
LARGEST_LONE_STEP = 2048
"""Most tokens of a step on a CPU while there is one request only."""
SECONDS_BESIDE_DECODES = 0.15
"""Seconds that prompts may add to a step with decode rows, with the default budget."""
LONE_CHUNK_SECONDS = 0.5
"""Seconds that a step beyond the usual token budget may take.

A request that arrives meanwhile waits until that step ends.
"""
INTERACTIVE_SECONDS = 0.05
"""Value of both limits with ``--performance-mode interactivity``."""
CPU_THROUGHPUT_TOKENS, GPU_THROUGHPUT_TOKENS = 2048, 4096
"""Default token budget of a step with ``--performance-mode throughput``."""
REQUESTS, THROUGHPUT_REQUESTS = 128, 256
"""Default number of requests that run at once, and with ``--performance-mode throughput``."""
MOST_SEQUENCES = 65536
"""Most requests in a step.

Far more than pays anywhere: each has a token in every step, and a step must stay short.
"""
TAIL_DIVISOR = 16
"""Divisor of the token budget, which a prompt's tail may exceed by that part.

In a step of its own it would keep the first token back for as long as a whole step.
"""


def most_tokens(budget: int) -> int:
    """Most tokens of a step with this budget."""
    return budget + budget // TAIL_DIVISOR


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the scheduler: what goes into one step."""

    max_num_batched_tokens: Annotated[
        Size | None,
        flag(
            help="Token budget of a step, a sixteenth more where that completes a prompt; unset: 512 on a "
            "CPU, 2048 on a GPU, more with --performance-mode throughput, at least --max-num-seqs."
        ),
    ] = None
    max_num_seqs: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_SEQUENCES)] | None,
        flag(help="Requests that run at once; unset: 128, with --performance-mode throughput 256."),
    ] = None
    performance_mode: Annotated[
        Literal["balanced", "interactivity", "throughput"],
        flag(
            help="throughput: more tokens and requests in a step where --max-num-batched-tokens and "
            "--max-num-seqs are unset, and prompts are not held back for requests that decode; "
            "interactivity: prompts add at most 0.05 s to a step on a CPU where 0.15 s is the default, and "
            "on a GPU decode steps of 1 to 32 requests are captured each."
        ),
    ] = "balanced"
    enable_chunked_prefill: Annotated[
        bool, flag(help="Split long prompts over steps; without it a prompt must fit the token budget.")
    ] = True
    long_prefill_token_threshold: Annotated[
        Natural, flag(help="Prompts get at most this many tokens per step (0: no limit).")
    ] = 0
    async_scheduling: Annotated[
        bool | None,
        flag(
            help="Schedule the next step while a GPU computes (default: on where decode steps are CUDA "
            "graphs, except with -tp, -pp, spread experts or recurrent states). On a CPU it has no effect."
        ),
    ] = None
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        flag(help="Order of waiting requests: arrival, or priority then arrival."),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        Natural, flag(help="Requests that may wait on an instance; more are answered 503.")
    ] = 4096
    max_num_queued_tokens: Annotated[
        Size | None,
        flag(help="Tokens that may wait on an instance before it takes no more requests (503); unset: any."),
    ] = None
    speculative_config: Annotated[
        str | None,
        flag(
            "-sc",
            json=True,
            help='JSON object, like {"method": "ngram", "num_speculative_tokens": 5}: tokens that may come '
            "next are looked up in the request's own text and computed ahead; the output stays the same. "
            'With {"method": "draft_model", "model": DIRECTORY} a small model of the same tokenizer '
            'proposes them, with {"method": "mtp"} a layer of the checkpoint does, with {"method": "eagle3", '
            '"model": DIRECTORY} an EAGLE-3 head.',
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.speculative_config is not None:
            read_config(self.speculative_config)
        if self.max_num_queued_tokens is not None and self.max_num_queued_tokens < 1:
            raise ValueError("--max-num-queued-tokens must be at least 1")
        if self.max_num_batched_tokens is None:
            return
        if self.max_num_batched_tokens < 1:
            raise ValueError("--max-num-batched-tokens must be at least 1")
        if self.max_num_batched_tokens < self.most_requests():
            raise ValueError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} must be at least "
                f"--max-num-seqs {self.most_requests()}: each running request needs a token per step"
            )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The parsed ``speculative_config``; None: nothing is drafted."""
        return None if self.speculative_config is None else read_config(self.speculative_config)

    @property
    def goes_for_throughput(self) -> bool:
        return self.performance_mode == "throughput"

    def most_requests(self) -> int:
        """Most requests that run at once."""
        if self.max_num_seqs is not None:
            return self.max_num_seqs
        if not self.goes_for_throughput:
            return REQUESTS
        return max(REQUESTS, min(THROUGHPUT_REQUESTS, self.max_num_batched_tokens or THROUGHPUT_REQUESTS))

    def most_sampled(self) -> int:
        """Most tokens that a step samples: one per running request, and one per drafted token."""
        each = 1 if self.speculative is None else 1 + self.speculative.most
        return min(self.most_requests() * each, self.token_budget())

    def token_budget(self, has_gpu: bool = False) -> int:
        """Token budget of one step.

        From a few hundred tokens on a CPU computes prompts little faster, and more would only make the first
        of many prompts wait for the last.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        if self.goes_for_throughput:
            default = GPU_THROUGHPUT_TOKENS if has_gpu else CPU_THROUGHPUT_TOKENS
        else:
            default = GPU_TOKENS if has_gpu else CPU_TOKENS
        return max(default, self.most_requests())

    def prompt_tokens_beside_decodes(self, has_gpu: bool = False) -> int | None:
        """Most prompt tokens in a step with decode rows; None: no limit.

        On a CPU so many are computed as fast as more are. On a GPU, where each step with prompts has to be
        launched anew, they are not.
        """
        if has_gpu or self.goes_for_throughput:
            return None
        return max(CPU_TOKENS_BESIDE_DECODES, self.token_budget() // 4)

    def prompt_seconds_beside_decodes(self, has_gpu: bool = False) -> float | None:
        """Seconds that prompt tokens may add to a step with decode rows; None: no limit."""
        if has_gpu or self.goes_for_throughput or self.max_num_batched_tokens is not None:
            return None
        return INTERACTIVE_SECONDS if self.performance_mode == "interactivity" else SECONDS_BESIDE_DECODES

    def largest_lone_chunk(self, has_gpu: bool = False) -> int:
        """Most tokens of a prefill chunk of the only request; 0: the usual budget.

        With what may complete a prompt beyond it, a step has :data:`LARGEST_LONE_STEP` tokens at most.
        """
        if has_gpu or self.max_num_batched_tokens is not None or self.goes_for_throughput:
            return 0
        return LARGEST_LONE_STEP - self.token_budget() // TAIL_DIVISOR

    def lone_chunk_seconds(self) -> float:
        """Seconds that a prefill chunk of the only request may take."""
        return INTERACTIVE_SECONDS if self.performance_mode == "interactivity" else LONE_CHUNK_SECONDS

    def largest_step(self) -> int:
        """Most tokens of a step on a CPU."""
        return max(most_tokens(self.token_budget()), LARGEST_LONE_STEP if self.largest_lone_chunk() else 0)
