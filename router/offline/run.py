"""Runs many prompts through a mesh, a bounded number at a time.

The outputs come in the prompts' order.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from router.api.request_run import RequestRun
from router.errors import ApiError
from router.mesh import Mesh, MeshError
from router.metrics.metrics import Metrics
from router.offline.inputs import Job, in_users_terms
from router.offline.outputs import RequestOutput, output_of
from router.text.output_stream import join
from router.text.tokens import Tokenizer

NOBODY_TIMEOUT = 60.0
"""Seconds that a prompt waits for an instance that can take it."""
NOBODY_INTERVAL = 0.05
"""Seconds between two looks for an instance that takes a prompt."""


class GenerationError(RuntimeError):
    """A prompt that the mesh could not finish, through no fault of the prompt."""


async def run_jobs(
    mesh: Mesh,
    metrics: Metrics,
    tokenizer: Tokenizer,
    jobs: Sequence[Job],
    most_samples: int,
    on_output: Callable[[RequestOutput], None],
) -> list[RequestOutput]:
    """Run all jobs with at most ``most_samples`` samples in flight.

    Those of one job are always allowed. The first failure ends all.

    Raises:
        ValueError: an instance refuses a prompt, or its grammar turned out to be too complex.
        GenerationError: no instance could take a prompt for NOBODY_TIMEOUT seconds.
    """
    outputs: dict[int, RequestOutput] = {}
    waiting = iter(enumerate(jobs))
    widest = max((len(job.samples) for job in jobs), default=1)

    async def work() -> None:
        for index, job in waiting:  # shared: a loop that is free takes the next
            try:
                output = await _run_job(mesh, metrics, tokenizer, job)
            except (ApiError, MeshError) as error:
                raise _readable(error, job, index, len(jobs)) from error
            outputs[index] = output
            on_output(output)

    workers = [asyncio.create_task(work()) for _ in range(min(len(jobs), max(1, most_samples // widest)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [outputs[index] for index in range(len(jobs))]


async def _run_job(mesh: Mesh, metrics: Metrics, tokenizer: Tokenizer, job: Job) -> RequestOutput:
    deadline = time.monotonic() + NOBODY_TIMEOUT
    while not mesh.healthy and time.monotonic() < deadline:  # noqa: ASYNC110 (health is no event)
        await asyncio.sleep(NOBODY_INTERVAL)
    run = RequestRun(mesh, metrics, job.samples, time.perf_counter())
    return output_of(job, [join(pieces) for pieces in await run.outputs()], tokenizer)


def _readable(error: ApiError | MeshError, job: Job, index: int, count: int) -> Exception:
    if error.status < 500:
        return in_users_terms(error, index, count)
    return GenerationError(f"request {job.request_id} failed: {error}")
