"""The comparison of policies on real instances, over HTTP.

They serve the shipped model, with loads made for it, or a model that waits as long as a device would compute
(``examples/benchmarks/null_model.py``), with the loads of the simulation.

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
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from engine.messages import Counters, InstanceReport
from examples.benchmarks.null_model import CONTEXT_VARIABLE, STEP_VARIABLE, TOKEN_VARIABLE
from examples.benchmarks.routing.baselines import BASELINES, Baseline
from examples.benchmarks.routing.cluster import Machine, StepTime
from examples.benchmarks.routing.outcome import Outcome
from examples.benchmarks.routing.report import REAL, Result, key_of, summary
from examples.benchmarks.routing.small_loads import HOST_LOADS, NUM_BLOCKS, NUM_SEQS
from examples.benchmarks.routing.workloads import LOADS, SMALLER, Arrival, Conversation, Load, small_ids
from router.tools.local_mesh import mesh

WARM_UPS = 4
MOST_AT_ONCE = 32
"""Requests to each instance in the last warm-up.

Else the first policy opens the connections, and its bursts come in at another pace than those of the others.
"""
REFRESH = 0.1
"""Seconds between two looks at ``/v1/loads``."""
ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "engine/models/lockstep-moe"
LONGEST = 32_768
"""Tokens of context where no model computes: more than any request of the loads has."""


# ---- whose steps


class Steps(NamedTuple):
    """A set of instances and the loads that they get."""

    name: str
    loads: Mapping[str, Callable[[random.Random, int], Load]]
    """Maker of loads, from a seed and a number of instances."""
    arguments: Callable[[str], str]
    """Arguments of ``serve`` for a load."""
    serve: Sequence[str] = ("-m", "router.launcher.serve")
    variables: Mapping[str, str] = {}
    extent: Mapping[str, float] = {}
    """Further facts of a run, for the file of results."""


def shipped_model(seconds: float, rate: float) -> Steps:
    """Instances that compute, all on this host."""
    loads = {
        name: lambda rng, _, make=make: make(rng, seconds, rate)  # type: ignore[misc]
        for name, make in HOST_LOADS.items()
    }
    arguments = f"--num-gpu-blocks-override {NUM_BLOCKS} --max-num-seqs {NUM_SEQS}"
    extent = {"seconds": seconds, "rate": rate}
    return Steps(REAL, loads, lambda _: arguments, extent=extent)


@contextlib.contextmanager
def waiting(time: StepTime, slowdown: float) -> Iterator[Steps]:
    """Instances that wait as long as such steps take, slowed down by a factor.

    The host's own work then matters less by the same factor.
    """
    variables = {
        STEP_VARIABLE: str(time.base * slowdown * 1e3),
        TOKEN_VARIABLE: str(time.per_token * slowdown * 1e6),
        CONTEXT_VARIABLE: str(time.per_context * slowdown * 1e9),
    }
    loads = {
        name: lambda rng, size, make=make: small_ids(make(rng, size, slowdown))  # type: ignore[misc]
        for name, make in LOADS.items()
    }
    serve = (str(ROOT / "examples/benchmarks/null_model.py"), "serve")
    with tempfile.TemporaryDirectory(prefix="lockstep-bench-") as folder:
        model = _with_long_context(Path(folder) / SHIPPED.name)

        def arguments(load: str) -> str:
            machine = Machine(time, **SMALLER.get(load, {}))
            return (
                f"{shlex.quote(str(model))} --num-gpu-blocks-override {machine.num_blocks} "
                f"--max-num-seqs {machine.max_num_seqs} "
                f"--max-num-batched-tokens {machine.max_num_batched_tokens}"
            )

        yield Steps(f"{time.name}, {slowdown:g}x, {REAL}", loads, arguments, serve, variables)


def _with_long_context(folder: Path) -> Path:
    """The shipped model, with a configuration for longer texts than it was trained on."""
    folder.mkdir()
    for file in SHIPPED.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((SHIPPED / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": LONGEST}))
    return folder


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
        """Pass the instances' reports on to a baseline.

        For Lockstep's own policies too, as it costs time.
        """
        while True:
            async with self._session.get(f"{self._url}/v1/loads", raise_for_status=True) as response:
                loads = (await response.json())["loads"]
            if self._baseline is not None:
                for load in loads:
                    self._baseline.reported(load["dp_rank"], _report(load), time.perf_counter())
            await asyncio.sleep(REFRESH)


def _report(load: dict[str, Any]) -> InstanceReport:
    """An instance's report, rebuilt from its entry in ``/v1/loads``."""
    return InstanceReport(
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
    """One run of a policy, a load and a seed on real instances."""

    steps: str
    load: str
    policy: str
    instances: int
    seed: int
    repeat: int

    def key(self) -> dict[str, Any]:
        return key_of(*self)


async def compare(jobs: Sequence[RealJob], steps: Steps) -> AsyncIterator[Result]:
    """Run the jobs one by one, in their order.

    The baselines share a mesh with ``prefix_aware``, so that nothing but the choices differs between them;
    others of Lockstep's policies have a mesh each.
    """
    by_mesh: dict[str, list[RealJob]] = {}
    for job in jobs:
        flag = "prefix_aware" if job.policy in BASELINES else job.policy
        arguments = (
            f"{steps.arguments(job.load)} -dp {job.instances} --load-balancing-policy {flag} "
            "--no-enable-expert-parallel --enable-prompt-tokens-details"
        )
        by_mesh.setdefault(arguments, []).append(job)
    for arguments, in_mesh in by_mesh.items():
        with mesh(arguments, steps.serve, **steps.variables) as url:
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
                for warm in range(WARM_UPS):
                    at_once = in_mesh[0].instances * (1 if warm < WARM_UPS - 1 else MOST_AT_ONCE)
                    alike = [Arrival(0.0, [5 + warm] * 600, 16)] * at_once
                    await Run(session, url, in_mesh[0].instances, "round_robin").take(alike)
                for job in in_mesh:
                    load = steps.loads[job.load](random.Random(job.seed), job.instances)
                    before = await _computed(session, url)
                    outcomes = await Run(session, url, job.instances, job.policy).take(load)
                    after = await _computed(session, url)
                    computed = [now - then for now, then in zip(after, before, strict=True)]
                    yield {**job.key(), **steps.extent, **summary(outcomes, computed)}
