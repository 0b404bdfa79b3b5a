"""The comparison on real instances: loads for a small model, sent to a mesh over HTTP.

Lockstep's policy chooses as it always does. The others run in this client, which is then their router: it
pins each request to the rank that they choose, knows what it sent itself, and reads what the instances
report (``/v1/loads``) every 100 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, NamedTuple

import aiohttp

from engine.messages import Counters, Report
from examples.routing.baselines import BASELINES, Baseline
from examples.routing.outcome import Outcome
from examples.routing.report import Result, key_of, summary
from examples.routing.small_loads import HOST_LOADS, NUM_BLOCKS, NUM_SEQS
from examples.routing.workloads import Arrival, Conversation, Load
from router.bench.local_mesh import mesh

REFRESH = 0.1
"""Seconds between two looks at ``/v1/loads``."""
STEPS = "real instances"


# ---- one run


class Run:
    """A load under a policy."""

    def __init__(self, session: aiohttp.ClientSession, url: str, size: int, policy: str) -> None:
        self._session = session
        self._url = url
        self._baseline: Baseline | None = BASELINES[policy](size) if policy in BASELINES else None
        self._salt = f"{policy} {time.time()}"  # no run finds what another has left in the caches
        self._outcomes: list[Outcome] = []

    async def take(self, load: Load) -> list[Outcome]:
        began = time.perf_counter()
        async with _beside(self._watch()):
            await asyncio.gather(*(self._item(item, began) for item in load))
        return self._outcomes

    async def _item(self, item: Arrival | Conversation, began: float) -> None:
        await asyncio.sleep(max(0.0, began + item.at - time.perf_counter()))
        if isinstance(item, Arrival):
            await self._ask(item.prompt, item.output, item.session)
            return
        history = item.system
        for new_words, output in item.turns:
            prompt = [*history, *new_words]
            history = [*prompt, *await self._ask(prompt, output, item.session)]
            await asyncio.sleep(item.pause)

    async def _ask(self, prompt: list[int], output: int, affinity: str) -> list[int]:
        """The tokens of the answer."""
        headers = {"X-Session-Affinity": affinity} if affinity else {}
        outcome = Outcome(time.perf_counter(), prompt_tokens=len(prompt))
        if self._baseline is not None:
            outcome.rank = self._baseline.choose(prompt, outcome.arrival)
            headers["X-Data-Parallel-Rank"] = str(outcome.rank)
        body = {
            "prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True, "cache_salt": self._salt,
        }  # fmt: skip
        ids: list[int] = []
        async with self._session.post(
            f"{self._url}/v1/completions", json=body, headers=headers, raise_for_status=True
        ) as response:
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                outcome.first_token = outcome.first_token or time.perf_counter()
                chunk = json.loads(line[6:])
                for choice in chunk["choices"]:
                    ids += choice["token_ids"]
                if usage := chunk.get("usage"):
                    outcome.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        outcome.end = time.perf_counter()
        assert len(ids) == output, f"{len(ids)} tokens of {output}"
        if self._baseline is not None:
            self._baseline.finished(outcome.rank)
        self._outcomes.append(outcome)
        return ids

    async def _watch(self) -> None:
        """Tell a baseline what the instances report; for Lockstep's own policies too, as it costs time."""
        while True:
            async with self._session.get(f"{self._url}/v1/loads", raise_for_status=True) as response:
                loads = (await response.json())["loads"]
            if self._baseline is not None:
                for load in loads:
                    self._baseline.reported(load["dp_rank"], _report(load), time.perf_counter())
            await asyncio.sleep(REFRESH)


def _report(load: dict[str, Any]) -> Report:
    """As the instance has sent it, from what ``/v1/loads`` tells of it."""
    return Report(
        last_dispatch=0,
        running=load["num_running_reqs"],
        waiting=load["num_waiting_reqs"],
        waiting_tokens=load["num_waiting_tokens"],
        blocks_used=load["num_used_blocks"],
        blocks_total=load["max_total_num_blocks"],
        counters=Counters(),
    )


@contextlib.asynccontextmanager
async def _beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _computed(session: aiohttp.ClientSession, url: str) -> list[int]:
    """Tokens that each instance has computed since its start, prompts and output."""
    async with session.get(f"{url}/metrics", raise_for_status=True) as response:
        text = await response.text()
    found = re.findall(r'^vllm:iteration_tokens_total_sum\{[^}]*engine="(\d+)"[^}]*\} (\S+)$', text, re.M)
    return [int(float(value)) for _, value in sorted(found, key=lambda each: int(each[0]))]


# ---- all runs


class RealJob(NamedTuple):
    """One policy under one load made from one seed, on so many real instances, for the so manieth time."""

    load: str
    policy: str
    instances: int
    seed: int
    repeat: int

    def key(self) -> dict[str, Any]:
        return key_of(STEPS, *self)


async def compare(jobs: Sequence[RealJob], seconds: float, rate: float) -> AsyncIterator[Result]:
    """Run by run in the order of ``jobs``. The baselines share a mesh with ``prefix_aware``, so that nothing
    but the choices differs between them; others of Lockstep's policies have a mesh each."""
    by_mesh: dict[tuple[str, int], list[RealJob]] = {}
    for job in jobs:
        flag = "prefix_aware" if job.policy in BASELINES else job.policy
        by_mesh.setdefault((flag, job.instances), []).append(job)
    for (flag, size), in_mesh in by_mesh.items():
        arguments = (
            f"-dp {size} --load-balancing-policy {flag} --no-enable-expert-parallel "
            f"--enable-prompt-tokens-details --num-gpu-blocks-override {NUM_BLOCKS} --max-num-seqs {NUM_SEQS}"
        )
        with mesh(arguments) as url:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                for warm in range(4):
                    alike = [Arrival(0.0, [5 + warm] * 600, 16)] * size
                    await Run(session, url, size, "round_robin").take(alike)
                for job in in_mesh:
                    load = HOST_LOADS[job.load](random.Random(job.seed), seconds, rate)
                    before = await _computed(session, url)
                    outcomes = await Run(session, url, size, job.policy).take(load)
                    after = await _computed(session, url)
                    computed = [now - then for now, then in zip(after, before, strict=True)]
                    extent = {"seconds": seconds, "rate": rate}
                    yield {**job.key(), **extent, **summary(outcomes, computed)}
