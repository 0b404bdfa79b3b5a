"""Answers of an engine in this process, bit by bit, under any settings."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Counters, Delta, FinishReason, RoutedExperts, Submit, TokenLogprobs
from engine.model.checkpoint import read_model_info
from engine.pieces.kinds import BoundarySlots
from engine.speculation.speculation import Speculation
from engine.step import ModelFacts
from tests.engine.invariance.mixed import longest_of
from tests.engine.oracle import Oracle, knowing

PEER = b"router"
PATIENCE = 120.0 if platform.machine() == "x86_64" else 1200.0
"""Seconds that a run may take: an emulated machine is slow."""
NGRAMS = '{"method": "ngram", "num_speculative_tokens": 5, "adaptive": false}'
MOST_TOKENS = 2048
"""Context length."""

Line = tuple[int, str, int, tuple[int, ...], tuple[str, ...]]


def line(logprobs: TokenLogprobs) -> Line:
    """Log-probabilities at one position; numbers in hexadecimal, so that each bit counts."""
    best = tuple(each.hex() for each in logprobs.top_logprobs)
    return logprobs.token_id, logprobs.logprob.hex(), logprobs.rank, tuple(logprobs.top_ids), best


@dataclass
class Answer:
    """All of an answer that has to be equal."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Line] = field(default_factory=list)
    prompt_logprobs: list[Line | None] | None = None
    ended: tuple[FinishReason | None, int | None] = (None, None)
    routed: list[RoutedExperts] = field(default_factory=list, compare=False)
    """Experts of its tokens, in the parts that came."""

    def take(self, delta: Delta) -> None:
        """Add what a step gave."""
        self.token_ids += delta.token_ids
        self.logprobs += map(line, delta.logprobs or ())
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [None if each is None else line(each) for each in delta.prompt_logprobs]
        if delta.routed_experts is not None:
            self.routed.append(delta.routed_experts)
        if delta.finish_reason is not None:
            assert not delta.error, delta.error
            self.ended = delta.finish_reason, delta.stop_reason

    def behind(self, count: int) -> Answer:
        """The answer as resumed behind ``count`` tokens: all ids, only later log-probabilities."""
        return replace(self, logprobs=self.logprobs[count:], prompt_logprobs=None)

    @property
    def text(self) -> tuple[list[int], object]:
        """The answer without log-probabilities."""
        return self.token_ids, self.ended


Answers = dict[int, Answer]


@dataclass(frozen=True, kw_only=True)
class How:
    """Settings of an instance, none of which may change a bit."""

    budget: int = 512
    """Tokens of a step."""
    seqs: int = 64
    cache: int = 16384
    """Tokens that the KV cache has room for."""
    states: int = 256
    """Slots of recurrent states, where the model has such."""
    caching: bool = True
    ngrams: bool = False
    drafts: Answers | None = None
    """Answers to be drafted, with mistakes."""
    policy: Any = "fcfs"
    threads: int = 1
    long_prefill: int = 0
    longest: int = MOST_TOKENS
    """Context length, if the model has as much."""
    together: bool = True
    """Whether all requests come at once, else each after the end of the one before."""


ALONE = How(caching=False, together=False)


class Instance:
    """A loaded model, served under one setting after the other."""

    def __init__(
        self, directory: Path, executor: Any, block_size: int = 16, facts: ModelFacts | None = None
    ) -> None:
        self.facts = facts
        self.info = read_model_info(directory)
        self.executor = executor
        self.block_size = block_size

    def core(self, how: How, submits: Sequence[Submit] = ()) -> EngineCore:
        """An engine with an empty cache."""
        num_blocks = how.cache // self.block_size
        self.executor.set_threads(how.threads)
        kinds = [] if self.facts is None else self.facts.boundaries
        boundaries = [BoundarySlots(kind, how.states) for kind in kinds]
        self.executor.allocate(num_blocks, sum(each.count for each in boundaries))
        config = EngineConfig(
            cache=CacheConfig(block_size=self.block_size, enable_prefix_caching=how.caching),
            scheduler=SchedulerConfig(
                max_num_batched_tokens=how.budget,
                max_num_seqs=min(how.seqs, how.budget),
                speculative_config=NGRAMS if how.ngrams else None,
                scheduling_policy=how.policy,
                long_prefill_token_threshold=how.long_prefill,
            ),
        )
        speculation: Speculation | None = None
        if how.drafts is not None:
            texts = [[*each.prompt_ids, *how.drafts[each.request].token_ids] for each in submits]
            speculation = Oracle(knowing(texts), right=0.8)
        return EngineCore(
            config,
            self.info,
            self.executor,
            num_blocks=num_blocks,
            max_model_len=min(how.longest, self.info.context_length),
            place=ModelPlace(boundaries=boundaries, keeps_experts=True),
            speculation=speculation,
        )

    def answers(self, submits: Sequence[Submit], how: How) -> tuple[Answers, Counters]:
        """All answers under these settings, and what the engine counted."""
        core = self.core(how, submits)
        found: Answers = {}
        for group in [submits] if how.together else [[submit] for submit in submits]:
            found |= run(core, group)
        assert core.reports.report(0, 0).blocks_used == 0
        return found, core.scheduler.counters()

    def check_in_company(self, submits: Sequence[Submit], alone: Answers) -> None:
        """Answers of all requests at once are those of each alone.

        In one batch; with chunks, hits in the prefix cache, preemption and drafts; with drafts that are
        accepted.
        """
        assert self.answers(submits, How())[0] == alone
        scarce = longest_of(submits) // self.block_size * self.block_size + 3 * self.block_size
        found, counters = self.answers(submits, How(budget=24, cache=scarce, ngrams=True))
        assert found == alone
        assert counters.prefix_cache_hits > 0, "no two of them begin alike"
        assert counters.preemptions > 0, "the cache was not small enough to prove anything"
        found, counters = self.answers(submits, How(budget=64, drafts=alone))
        assert found == alone
        assert counters.drafted_tokens > sum(counters.taken_by_place) > 0


def run(core: EngineCore, submits: Sequence[Submit], steps_between: int = 0) -> Answers:
    """Answers of one engine to requests that come at once, or some steps apart."""
    found = {submit.request: Answer(list(submit.output_ids)) for submit in submits}
    deadline = time.monotonic() + PATIENCE
    for submit in submits:
        assert core.submit(PEER, submit) is None
        for _ in range(steps_between):
            step(core, found, lambda: None)
    while not core.is_empty:
        assert time.monotonic() < deadline
        step(core, found, lambda: time.sleep(0.001))
    return found


def step(core: EngineCore, found: Answers, idle: Callable[[], None]) -> None:
    """One turn of :class:`engine.serving.server.Server`'s loop, without its sockets."""
    assert core.take_ready() == []
    if core.has_work:
        core.stepping.notice_work()
    if not core.has_work and not core.stepping.must_step:
        return idle()
    for delta in core.step().get(PEER, []):
        found[delta.request].take(delta)


def settings(
    directory: Path, block_size: int = 16, dtype: Any = "bfloat16", kept: Any = "auto", **device: Any
) -> EngineConfig:
    """Settings of an instance; ``kept``: data type of keys and values."""
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype=dtype),
        cache=CacheConfig(block_size=block_size, kv_cache_dtype=kept),
        device=DeviceConfig(**{"device": "cpu"} | device),
        scheduler=SchedulerConfig(max_num_batched_tokens=128, max_num_seqs=64),
    )


def load(
    directory: Path, block_size: int = 16, dtype: Any = "bfloat16", kept: Any = "auto", **device: Any
) -> Instance:
    """An instance of one worker."""
    config = settings(directory, block_size, dtype, kept, **device)
    executor = UniExecutor(config, read_model_info(directory), 1)
    facts = executor.load(lambda _phase: None)
    executor.allocate(8, 2)
    return Instance(directory, executor, block_size, facts)
