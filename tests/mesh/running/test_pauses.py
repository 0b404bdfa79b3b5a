"""Pauses of a mesh: requests stand still, end, or are held back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.load import Answer, ask, session
from tests.mesh.faults.test_loss import body_of
from tests.mesh.harness import free_port, wait_until
from tests.mesh.spread_mesh import FLAGS, SpreadMesh

pytestmark = pytest.mark.mesh

NUM_STREAMS, NUM_TOKENS = 6, 400


class PausedMesh(SpreadMesh):
    """Two instances, and the admin API with its own port."""

    def __init__(
        self, directory: Path, stack: contextlib.ExitStack, how: str, more: Sequence[str] = ()
    ) -> None:
        """``how``: flags of the layout. ``more``: further flags."""
        self.admin = free_port()
        flags = [*FLAGS, "--admin-port", str(self.admin), *more]
        super().__init__(directory, stack, 2, how=how.split(), flags=flags)

    def call(self, path: str, body: dict[str, Any] | None = None, method: str = "POST") -> tuple[int, Any]:
        """Status and answer of a call to the admin API."""
        data = None if method == "GET" else json.dumps(body).encode() if body is not None else b""
        headers = {"content-type": "application/json"} if body is not None else {}
        url = f"http://127.0.0.1:{self.admin}{path}"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, data, headers, method=method), timeout=120
            ) as answer:
                text = answer.read().decode()
                return answer.status, json.loads(text) if text.startswith("{") else text
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def body(self, number: int, salt: str) -> dict[str, Any]:
        """The body of a stream, with an id of its own."""
        return body_of(number, salt, NUM_TOKENS) | {"request_id": f"req-{number}"}

    def steps(self) -> dict[int, int]:
        """Steps of each instance so far, by its last heartbeat."""
        return {member.rank: member.load.steps for member in self.view().members}

    async def streams(
        self, meanwhile: Callable[[list[Answer]], Awaitable[None]] | None = None, salt: str = "x"
    ) -> list[Answer]:
        """Streams that run while something is done, once all have tokens."""
        answers = [Answer(index, time.monotonic()) for index in range(NUM_STREAMS)]
        async with session() as client:
            tasks = [
                asyncio.create_task(ask(client, self.url, self.body(answer.number, salt), answer, {}))
                for answer in answers
            ]
            if meanwhile is not None:
                started = lambda: all(answer.ids for answer in answers)  # noqa: E731
                await asyncio.to_thread(wait_until, started, 30, "all have tokens", 0.01)
                await meanwhile(answers)
            await asyncio.gather(*tasks)
        return answers


@pytest.mark.parametrize(
    "how", [pytest.param("--no-enable-expert-parallel", marks=pytest.mark.nightly), "-ep"]
)
def test_a_pause_outlasts_a_death_and_holds_for_a_joiner(tmp_path: Path, how: str) -> None:
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, how)
        undisturbed = [answer.ids for answer in asyncio.run(mesh.streams())]
        assert all(len(ids) == NUM_TOKENS for ids in undisturbed)

        async def keep(answers: list[Answer]) -> None:
            """Pause; kill an instance; let another one join; see that no token comes; resume."""
            assert await asyncio.to_thread(mesh.call, "/pause?mode=keep") == (200, {"status": "paused"})
            assert mesh.call("/is_paused", method="GET") == (200, {"is_paused": True})
            mesh.engine(1).kill()
            await asyncio.to_thread(wait_until, lambda: mesh.ready() == [0], 20, "the dead one is out")
            before = [len(answer.ids) for answer in answers]
            assert any(count < NUM_TOKENS for count in before)
            await asyncio.to_thread(mesh.make_whole)
            assert [len(answer.ids) for answer in answers] == before
            assert await asyncio.to_thread(mesh.call, "/resume") == (200, {"status": "resumed"})

        answers = asyncio.run(mesh.streams(keep, "y"))
        assert [(answer.error, answer.ids) for answer in answers] == [(None, ids) for ids in undisturbed]
        assert mesh.call("/is_paused", method="GET") == (200, {"is_paused": False})

        async def abort(answers: list[Answer]) -> None:
            """End all, SGLang's way; a request that comes then waits."""
            paused = {"message": "Generation paused successfully.", "status": "ok"}
            assert await asyncio.to_thread(mesh.call, "/pause_generation", {"mode": "abort"}) == (200, paused)
            late = Answer(0, time.monotonic())
            async with session() as client:
                task = asyncio.create_task(ask(client, mesh.url, body_of(0, "z", NUM_TOKENS), late, {}))
                waits = lambda: sum(member.load.waiting for member in mesh.view().members) == 1  # noqa: E731
                await asyncio.to_thread(wait_until, waits, 20, "it waits")
                assert not late.ids
                status, _ = await asyncio.to_thread(mesh.call, "/continue_generation", {})
                assert status == 200
                await task
            assert (late.error, late.ids) == (None, undisturbed[0])

        answers = asyncio.run(mesh.streams(abort, "z"))
        assert [answer.error for answer in answers] == [None] * NUM_STREAMS
        for answer, ids in zip(answers, undisturbed, strict=True):
            assert answer.ids == ids[: len(answer.ids)]
            assert answer.finish_reason == ("abort" if len(answer.ids) < NUM_TOKENS else "length")
        assert any(answer.finish_reason == "abort" for answer in answers)

        async def wait(answers: list[Answer]) -> None:
            """Let all end; flush what they have left."""
            assert await asyncio.to_thread(mesh.call, "/pause?mode=wait") == (200, {"status": "paused"})
            assert all(member.load.running == 0 for member in mesh.view().members)
            assert mesh.call("/flush_cache", method="GET") == (200, "Cache flushed.\n")
            assert mesh.call("/resume") == (200, {"status": "resumed"})

        answers = asyncio.run(mesh.streams(wait, "w"))
        assert [(answer.error, answer.ids) for answer in answers] == [(None, ids) for ids in undisturbed]

        async def end_one(answers: list[Answer]) -> None:
            """End one request by its id, then the others."""
            assert (await asyncio.to_thread(mesh.call, "/abort_request", {"rid": "req-2"}))[0] == 200
            ended = lambda: answers[2].finish_reason  # noqa: E731
            await asyncio.to_thread(wait_until, ended, 20, "it has ended")
            assert [answer.finish_reason for answer in answers if answer.number != 2].count("abort") == 0
            assert (await asyncio.to_thread(mesh.call, "/abort_request", {"abort_all": True}))[0] == 200

        answers = asyncio.run(mesh.streams(end_one, "e"))
        assert answers[2].finish_reason == "abort"
        assert sum(answer.finish_reason == "abort" for answer in answers) > 1
        assert_idle(mesh)
        assert mesh.call("/pause?mode=never")[0] == 400
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
