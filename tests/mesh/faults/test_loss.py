"""An independent instance dies under load.

Every stream goes on at the others, token for token.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coordinator.process import process
from engine.config import SHIPPED_MODEL
from tests.mesh.faults.frozen_thread import FrozenThread
from tests.mesh.faults.load import Answer, ask, session
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.spread_mesh import SpreadMesh
from tests.nightly import NIGHTLY

pytestmark = pytest.mark.mesh

STEP_TIMEOUT = 4.0
"""Seconds. Longer than any step takes, also on a busy machine."""
NUM_STREAMS = 24 if NIGHTLY else 16
NUM_TOKENS = 250
"""Tokens of each stream: enough that a kill finds all streams running."""
NUM_CALM = 100
"""Tokens of a stream that nothing happens to."""


def body_of(index: int, salt: str = "none", num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """A stream: greedy ones and seeded samples, some with penalties.

    ``salt``: whose cached prompts it may use.
    """
    rng = random.Random(index)
    return {
        "model": SHIPPED_MODEL,
        "prompt": [rng.randrange(5, 4000) for _ in range(rng.randrange(3, 200))],
        "max_tokens": num_tokens,
        "temperature": 0 if index % 2 else 0.8,
        "seed": index,
        "presence_penalty": 0.5 if index % 3 == 0 else 0.0,
        "stream": True,
        "ignore_eos": True,
        "return_token_ids": True,
        "cache_salt": salt,
    }


def crowd_of(ports: Ports, count: int, num_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """Token ids of ``count`` streams at once, which may reuse prompts of earlier ones."""
    return asyncio.run(crowd(ports, count=count, salt="none", num_tokens=num_tokens))


async def crowd(
    ports: Ports,
    kill: object = None,
    count: int = NUM_STREAMS,
    ranks: dict[int, int] | None = None,
    salt: str = "",
    num_tokens: int = NUM_TOKENS,
) -> list[list[int]]:
    """``ranks``: instances that some of the streams ask for, and have before ``kill`` is called.

    Without a ``salt`` no instance has their prompts cached, so that they go to all that are there.
    """
    pinned, salt = ranks or {}, salt or secrets.token_hex(4)
    answers = [Answer(index, time.monotonic()) for index in range(count)]
    async with session() as client:

        async def stream(index: int) -> None:
            headers = {"X-data-parallel-rank": str(pinned[index])} if index in pinned else {}
            await ask(client, ports.url, body_of(index, salt, num_tokens), answers[index], headers)

        streams = [asyncio.create_task(stream(index)) for index in range(count)]
        if callable(kill):
            await asyncio.to_thread(
                wait_until, lambda: all(answers[index].ids for index in pinned), 20, "those with an instance"
            )
            await asyncio.to_thread(kill)
        await asyncio.gather(*streams)
    errors = [answer.error for answer in answers if answer.error]
    assert not errors, errors
    return [answer.ids for answer in answers]


def test_an_instance_that_is_killed_or_stopped_or_hangs_costs_no_token(tmp_path: Path) -> None:
    ports = Ports()
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "32"]
    flags += ["--execute-model-timeout", str(STEP_TIMEOUT)]
    flags += ["-dp", "3", "--no-enable-expert-parallel"]
    slow = {"LOCKSTEP_NATIVE_KERNELS": "0"}  # so that streams last longer than a look at who works
    with serve(tmp_path / "log", *flags, *ports.head(), env=slow) as command:
        command.wait_for("3 instances ready")
        undisturbed = asyncio.run(crowd(ports))
        assert all(len(ids) == NUM_TOKENS for ids in undisturbed)
        one, two = command.child("Engine_1"), command.child("Engine_2")

        def once_busy(rank: int, do: Callable[[], object]) -> None:
            def busy() -> bool:
                return any(member.rank == rank and member.load.running > 2 for member in ports.view().members)

            wait_until(busy, 20, f"instance {rank} works")
            do()

        killed = asyncio.run(crowd(ports, lambda: once_busy(1, one.kill), ranks={0: 1, 1: 1}))
        assert killed == undisturbed, "those that had asked for instance 1 included"
        assert "requests of instance 1 go on elsewhere" in command.log
        assert "requests of instance 1 are back after" in command.log
        wait_until(lambda: ranks(ports) == [0, 2], 10)

        try:
            stopped = asyncio.run(crowd(ports, lambda: once_busy(2, two.suspend)))
            assert stopped == undisturbed, "its silence took it out, and its requests went on"
            assert ranks(ports) == [0]
        finally:
            two.resume()
        wait_until(lambda: ranks(ports) == [0, 2], 20, "it is back")
        calm = asyncio.run(crowd(ports, count=6, num_tokens=NUM_CALM))
        assert calm == [ids[:NUM_CALM] for ids in undisturbed[:6]], "and says nothing of what it had before"

        frozen: list[FrozenThread] = []

        def hang() -> None:
            frozen.append(FrozenThread(two.pid, lambda: stalled_for(ports, 2)))

        assert asyncio.run(crowd(ports, lambda: once_busy(2, hang))) == undisturbed
        assert frozen[0].status == process.EXIT_HUNG, "its signs of life went on, so it had to know by itself"
        assert "a step has not ended after" in command.log
        command.wait_for(f"Engine_2 (pid {two.pid}) ended with status {process.EXIT_HUNG}")
        assert command.stop() == 0


def stalled_for(ports: Ports, rank: int) -> float:
    """Seconds since the last step of an instance that has work."""
    return sum(member.load.stalled_for for member in ports.view().members if member.rank == rank)


def ranks(ports: Ports) -> list[int]:
    """Ranks of the members in the view."""
    return [member.rank for member in ports.view().members]


def test_a_rank_is_taken_anew_before_a_restarted_coordinator_knows_all(tmp_path: Path) -> None:
    """Routers keep members missing from its first views, unless another has their rank."""
    with contextlib.ExitStack() as stack:
        mesh = SpreadMesh(tmp_path, stack, 3, apart=True, how=["--no-enable-expert-parallel"])
        lost, left = [mesh.engine(0), mesh.engine(2)], mesh.engine(1)
        mesh.command.child("Coordinator").kill()
        for each in lost:
            each.kill()
        mesh.join_one()
        wait_until(lambda: mesh.ready() == [0, 1], 20, "the new instance 0 serves")
        left.kill()
        asked = asyncio.run(asyncio.wait_for(crowd(mesh, count=4, num_tokens=20), 60))
        assert all(len(ids) == 20 for ids in asked)
