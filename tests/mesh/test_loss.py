"""An independent instance dies under load; every stream goes on at the others, token for token."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import openai
import pytest

from engine.config import SHIPPED_MODEL
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(240)]

NUM_STREAMS = 24
NUM_TOKENS = 250
"""Of each: long enough that a kill finds them all under way."""


async def stream(client: openai.AsyncOpenAI, index: int, rank: int | None = None) -> list[int]:
    """Token ids of one stream: greedy ones and seeded samples, some with penalties. ``rank``: of the instance
    that is asked for."""
    rng = random.Random(index)
    chunks = await client.completions.create(
        model=SHIPPED_MODEL,
        prompt=[rng.randrange(5, 4000) for _ in range(rng.randrange(3, 200))],
        max_tokens=NUM_TOKENS,
        temperature=0 if index % 2 else 0.8,
        seed=index,
        presence_penalty=0.5 if index % 3 == 0 else 0.0,
        stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
        extra_headers={} if rank is None else {"X-data-parallel-rank": str(rank)},
    )
    ids: list[int] = []
    async with chunks:
        async for chunk in chunks:
            for choice in chunk.choices:
                ids += choice.token_ids  # type: ignore[attr-defined]
    return ids


def crowd_of(ports: Ports, count: int) -> list[list[int]]:
    """Token ids of so many streams at once."""
    return asyncio.run(crowd(ports, count=count))


async def crowd(
    ports: Ports, kill: object = None, count: int = NUM_STREAMS, ranks: dict[int, int] | None = None
) -> list[list[int]]:
    """``ranks``: instances that some of the streams ask for."""
    async with openai.AsyncOpenAI(base_url=f"{ports.url}/v1", api_key="none", max_retries=0) as client:
        streams = [
            asyncio.create_task(stream(client, index, (ranks or {}).get(index))) for index in range(count)
        ]
        if callable(kill):
            await asyncio.to_thread(kill)
        return await asyncio.gather(*streams)


def test_a_killed_instance_costs_no_token(tmp_path: Path) -> None:
    ports = Ports()
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "32"]
    with serve(tmp_path / "log", "-dp", "3", "--no-enable-expert-parallel", *ports.head(), *flags) as command:
        command.wait_for("3 instances ready")
        undisturbed = asyncio.run(crowd(ports))
        assert all(len(ids) == NUM_TOKENS for ids in undisturbed)
        victim = command.child("Engine_1")

        def kill() -> None:
            wait_until(lambda: ports.view().members[1].load.running > 2, 20, "instance 1 works")
            victim.send_signal(signal.SIGKILL)

        disturbed = asyncio.run(crowd(ports, kill, ranks={0: 1, 1: 1}))
        assert disturbed == undisturbed, "those that had asked for instance 1 included"
        assert "requests of instance 1 go on elsewhere" in command.log
        assert "requests of instance 1 are back after" in command.log
        wait_until(lambda: [member.rank for member in ports.view().members] == [0, 2], 10)
        assert command.stop() == 0
