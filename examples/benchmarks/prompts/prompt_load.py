"""Loads of ``bench_prompts.py``: prompts of one length at once, and a long one beside decodes.

Prompts are random tokens, so no two have a prefix in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from router.tools.bench.client import BenchTarget, send, session
from router.tools.bench.datasets import BenchRequest
from router.tools.bench.report import RequestResult, percentile

Prompt = list[int]
Run = dict[str, Any]

LOWEST_ID = 300
"""Lowest token id in prompts: below it are special tokens and single bytes."""
ANSWER = 4
"""Tokens of each answer to a prompt whose first token is timed."""
ROUND_TOKENS, MOST_ROUNDS = 8000, 4
"""Prompt tokens that make a run long enough, and most rounds of requests for them."""
DECODE_PROMPT = 128
SETTLED = 8
"""Tokens that each decode has given before the long prompt comes."""
DECODE_SECONDS = 120.0
"""Longest wait for them."""


def rounds_of(length: int, count: int) -> int:
    """How often a run sends ``count`` prompts: the first tokens of short ones scatter."""
    return max(1, min(MOST_ROUNDS, ROUND_TOKENS // (length * count)))


def prompts_of(key: str, vocabulary: int, lengths: Sequence[int]) -> list[Prompt]:
    """Prompts of these lengths; the same for the same key."""
    rng = random.Random(key)
    return [[rng.randrange(LOWEST_ID, vocabulary) for _ in range(length)] for length in lengths]


async def first_tokens(target: BenchTarget, prompts: Sequence[Prompt], count: int) -> Run:
    """Send the prompts, ``count`` at a time, each time once all before are answered."""
    outcomes: list[RequestResult] = []
    async with session() as http:
        for begin in range(0, len(prompts), count):
            asks = (BenchRequest(prompt, ANSWER) for prompt in prompts[begin : begin + count])
            outcomes += await asyncio.gather(*(send(http, target, ask) for ask in asks))
    good = [1000 * outcome.ttft for outcome in outcomes if not outcome.error]
    run: Run = {"failed": len(outcomes) - len(good)}
    run["error"] = next((outcome.error for outcome in outcomes if outcome.error), "")
    if good:
        run |= {"ttft_ms": statistics.median(good), "ttft_most_ms": max(good)}
    return run


async def beside_decodes(target: BenchTarget, prompt: Prompt, decodes: Sequence[Prompt], most: int) -> Run:
    """Send one prompt while others decode.

    The gaps between tokens are those that end after the prompt was sent and begin before its first token.
    ``most``: tokens that a decode may give; it is cut short once the prompt has its first token.
    """
    times: list[list[float]] = [[] for _ in decodes]
    async with session() as http:
        tasks = [
            asyncio.create_task(send(http, target, BenchRequest(one, most), on_token=own.append))
            for one, own in zip(decodes, times, strict=True)
        ]
        try:
            await _until(lambda: all(len(own) >= SETTLED for own in times), tasks)
            began = time.perf_counter()
            outcome = await send(http, target, BenchRequest(prompt, 1))
            ended = began + outcome.ttft
            await _until(lambda: all(own and own[-1] > ended for own in times), tasks)
        finally:
            error = next((task.result().error for task in tasks if task.done()), "")
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    early = sum(task.done() and not task.cancelled() for task in tasks)
    gaps = sorted(gap for own in times for gap in gaps_within(own, began, ended))
    run: Run = {"failed": bool(outcome.error) + early, "error": outcome.error or error}
    if gaps and not run["failed"]:
        run |= {"ttft_ms": 1000 * outcome.ttft, "num_gaps": len(gaps)}
        run |= {"itl_ms": percentile(gaps, 50), "itl_p99_ms": percentile(gaps, 99), "itl_most_ms": gaps[-1]}
    return run


async def _until(is_so: Callable[[], bool], tasks: Sequence[asyncio.Task[RequestResult]]) -> None:
    """Wait until that is so, or a request has ended, or DECODE_SECONDS have passed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DECODE_SECONDS):
            while not is_so() and not any(task.done() for task in tasks):
                await asyncio.wait(tasks, timeout=0.005, return_when=asyncio.FIRST_COMPLETED)


def gaps_within(times: Sequence[float], began: float, ended: float) -> list[float]:
    """Milliseconds between tokens that came at these times, of gaps that reach into the span."""
    pairs = itertools.pairwise(times)
    return [1000 * (later - earlier) for earlier, later in pairs if later > began and earlier < ended]
