"""Two meshes on one PostgreSQL: one goes on with what the other leaves."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.mesh.harness import Command, Ports, serve, wait_until
from tests.mesh.stored.batch_client import answers_of, batch_lines, begin_batch, finished
from tests.mesh.stored.resuming_client import Resumed, run
from tests.mesh.stored.test_router_deaths import _call, _ended, anonymous
from tests.router.postgres import new_database, server

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(500)]

NUM_LINES = 40
BODY: dict[str, Any] = {"model": "lockstep-moe", "temperature": 0.8, "seed": 3, "ignore_eos": True}
STREAM = BODY | {"prompt": "Chapter one", "max_tokens": 1500, "stream": True}
RESPONSE = BODY | {"input": "Chapter one", "max_output_tokens": 1500}


def test_another_host_goes_on_with_what_a_dead_one_has_left(tmp_path: Path) -> None:
    with server() as postgres, contextlib.ExitStack() as stack:
        database = new_database(postgres)
        one, other = Ports(), Ports()

        def begun(name: str, ports: Ports) -> Command:
            flags = ["lockstep-moe", "-dp", "1", "--store-url", database, *ports.head()]
            command = stack.enter_context(serve(tmp_path / f"{name}.log", *flags))
            command.wait_for("1 instance ready")
            return command

        first, second = begun("first", one), begun("second", other)
        lines = batch_lines(NUM_LINES)
        calm, text = asyncio.run(_streamed(other.url, "calm")), asyncio.run(_text(other.url))
        answers = answers_of(finished(other.url, begin_batch(other.url, lines)))
        background = asyncio.run(_call(one.url, "POST", "", RESPONSE | {"background": True}))["id"]
        batch = begin_batch(one.url, lines)

        disturbed = asyncio.run(_streamed(one.url, "dead", other.url, first))
        assert disturbed.breaks > 0, "the kill came after the stream's end"
        assert anonymous(disturbed) == anonymous(calm)
        ended = wait_until(lambda: _ended(other.url, background), 60)
        assert ended["output"][0]["content"][0]["text"] == text
        assert answers_of(finished(other.url, batch)) == answers
        for what in (f"answer {background}", f"answer {disturbed.id}", f"batch {batch}"):
            assert f"goes on with {what}" in second.log

        # and with what both have left, once one of them is there again
        background = asyncio.run(_call(other.url, "POST", "", RESPONSE | {"background": True}))["id"]
        batch = begin_batch(other.url, lines)
        _kill(second)
        third = begun("third", one)
        ended = wait_until(lambda: _ended(one.url, background), 60)
        assert ended["output"][0]["content"][0]["text"] == text
        assert answers_of(finished(one.url, batch)) == answers
        assert f"goes on with answer {background}" in third.log


def _kill(command: Command) -> None:
    """SIGKILL of all processes of a host."""
    for member in command.family(itself=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


async def _streamed(url: str, id: str, other: str = "", command: Command | None = None) -> Resumed:
    """A resumable stream, which goes on at the other host if its own is killed."""
    stream = Resumed("completions", STREAM, id)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(240)) as client:
        reading = asyncio.create_task(run(client, url, stream, again_at=other or url))
        if command is not None:
            await asyncio.to_thread(wait_until, lambda: len(stream.events) > 100, 60, every=0.01)
            await asyncio.to_thread(_kill, command)
        await reading
    assert not stream.errors, stream.errors
    return stream


async def _text(url: str) -> str:
    return str((await _call(url, "POST", "", RESPONSE))["output"][0]["content"][0]["text"])
