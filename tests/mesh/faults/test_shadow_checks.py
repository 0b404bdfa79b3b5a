"""Shadow checks on real instances: one that computes wrongly is named and drained, no other."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import aiohttp
import pytest

from coordinator.messages import State
from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from tests.mesh.harness import Command, Ports, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

ROOT = Path(__file__).parent.parent.parent.parent
WHOLE_EXPERTS = ["--no-enable-expert-parallel"]
BLOCKS = ["--num-gpu-blocks-override", "600"]
SLOTS = ["--max-num-seqs", "64"]
SMALL = [*WHOLE_EXPERTS, *BLOCKS, *SLOTS]
AT_ONCE = 16
"""Requests at a time: few enough that instances are idle now and then."""


@contextlib.contextmanager
def mesh_with_flipped_bit(
    directory: Path, *flags: str, how: Sequence[str] = WHOLE_EXPERTS
) -> Iterator[tuple[Ports, Command]]:
    """Three instances, of which rank 2 has one flipped bit in its weights."""
    ports = Ports()
    argv = ["-dp", "3", "-dpr", "2", *ports.join(), *BLOCKS]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    placed = ["-dp", "3", "-dpl", "2", *ports.head()]
    with (
        serve(directory / "head.log", SHIPPED_MODEL, *placed, *BLOCKS, *SLOTS, *how, *flags) as head,
        Command(directory / "2.log", "tests.mesh.faults.flipped_instance", *argv, env=env) as flipped,
    ):
        head.wait_for("3 instances ready")
        assert "one bit of the last norm is flipped" in flipped.log
        yield ports, head


async def ask(url: str, count: int, *, at_once: int = AT_ONCE, max_tokens: int = 8) -> None:
    """Send requests, ``at_once`` at a time: half greedy, half with seeds of the router."""
    gate = asyncio.Semaphore(at_once)
    async with aiohttp.ClientSession() as session:

        async def one(number: int) -> None:
            body = {
                "model": SHIPPED_MODEL,
                "prompt": f"Number {number} of the sea",
                "max_tokens": max_tokens,
                "temperature": float(number % 2),
                "ignore_eos": True,
            }
            async with gate, session.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["choices"][0]["logprobs"] is None

        await asyncio.gather(*(one(number) for number in range(count)))


async def metric(ports: Ports, name: str) -> dict[str, float]:
    """Values of a counter, by its only label."""
    async with aiohttp.ClientSession() as session, session.get(f"{ports.url}/metrics") as answer:
        text = await answer.text()
    return {
        label: float(value)
        for label, value in re.findall(rf'^{name}_total{{\w+="(\w+)"}} (\S+)$', text, re.M)
    }


def checks(ports: Ports) -> dict[str, float]:
    return asyncio.run(metric(ports, "lockstep:shadow_checks"))


def test_a_flipped_bit_is_named_and_its_instance_drained(tmp_path: Path) -> None:
    """Within 200 requests at rate 0.1, by two routers that each check their own share."""
    flags = ["--shadow-rate", "0.1", "--shadow-action", "drain", "-asc", "2"]
    with mesh_with_flipped_bit(tmp_path, *flags) as (ports, head):
        classes = {member.numerics for member in ports.view().members}
        assert len(classes) == 1, "nothing but the bits of its answers gives it away"
        asyncio.run(ask(ports.url, 200))
        wait_until(lambda: 2 not in [member.rank for member in ports.view().members], 20, "rank 2 has left")
        assert "decides: instance 2 computes otherwise than two others" in head.log
        assert "drain of instance 2: instance 2 was asked to drain" in head.log
        assert [member.state for member in ports.view().members] == [State.READY] * 2
        assert set(asyncio.run(metric(ports, "lockstep:shadow_differences"))) == {"2"}
        found = checks(ports)
        assert found["odd"] >= 1
        assert found["undecided"] == 0, "three instances were there, or the odd one was gone"
        asyncio.run(ask(ports.url, 100))
        assert set(asyncio.run(metric(ports, "lockstep:shadow_differences"))) == {"2"}
        later = checks(ports)
        assert later["equal"] > found["equal"]
        assert later["undecided"] == 0, "the other two agree, also about what rank 2 had computed before"
        assert head.stop() == 0
        assert "Traceback" not in head.log


@pytest.mark.nightly
def test_a_difference_in_a_group_that_spreads_experts_names_nobody(tmp_path: Path) -> None:
    """The flipped bit is in a part that each instance has for itself."""
    flags = ["--shadow-rate", "0.3", "--shadow-action", "drain"]
    with mesh_with_flipped_bit(tmp_path, *flags, how=["-ep"]) as (ports, head):
        asyncio.run(ask(ports.url, 200))
        found = checks(ports)
        assert found["undecided"] >= 1
        assert found["odd"] == 0
        assert "undecided, the group spreads experts" in head.log
        assert [member.state for member in ports.view().members] == [State.READY] * 3


@pytest.mark.nightly
def test_no_healthy_instance_is_named_in_ten_thousand_requests(tmp_path: Path) -> None:
    ports = Ports()
    flags = [*SMALL, "--shadow-rate", "0.1", "--shadow-action", "drain"]
    with serve(tmp_path / "head.log", SHIPPED_MODEL, "-dp", "3", *ports.head(), *flags) as head:
        head.wait_for("3 instances ready")
        asyncio.run(ask(ports.url, 10_000, at_once=12))
        for _ in range(10):  # the faster the machine answers, the more checks find no room
            if checks(ports)["equal"] > 500:
                break
            asyncio.run(ask(ports.url, 1000, at_once=4))
        found = checks(ports)
        print(found)
        assert found["equal"] > 500
        assert (found["odd"], found["undecided"], found["lost"]) == (0, 0, 0)
        assert len(ports.view().members) == 3
        assert head.stop() == 0
        assert "shadow check" not in head.log
