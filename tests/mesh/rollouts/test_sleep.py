"""Sleep of a mesh: memory goes and comes back, joiners sleep, requests wait."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import psutil
import pytest

from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.load import Answer, ask, session
from tests.mesh.harness import wait_until
from tests.mesh.running.test_pauses import PausedMesh

pytestmark = pytest.mark.mesh

DENSE = "--no-enable-expert-parallel"


def resident(mesh: PausedMesh) -> dict[int, float]:
    """Memory of each instance with its workers, in MiB."""
    found = {}
    for each in mesh.view().members:
        process = psutil.Process(each.pid)
        found[each.rank] = sum(
            one.memory_info().rss / 2**20 for one in (process, *process.children(recursive=True))
        )
    return found


@pytest.mark.parametrize(
    "how", [DENSE, *(pytest.param(each, marks=pytest.mark.nightly) for each in ("-ep", "-ep -tp 2"))]
)
def test_a_sleeping_mesh_gives_back_memory_and_goes_on(how: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, how)
        undisturbed = [answer.ids for answer in asyncio.run(mesh.streams())]
        awake = resident(mesh)

        async def meanwhile(answers: list[Answer]) -> None:
            status, _ = await asyncio.to_thread(mesh.call, "/release_memory_occupation", {"tags": None})
            assert status == 200
            assert mesh.call("/is_sleeping", method="GET") == (200, {"is_sleeping": True})
            asleep = resident(mesh)
            saved = {rank: awake[rank] - asleep[rank] for rank in awake}
            print("MiB awake, asleep:", awake, asleep)
            assert min(saved.values()) > 30, f"weights and cache were to go: {saved}"
            before = [len(answer.ids) for answer in answers]

            mesh.engine(1).kill()
            await asyncio.to_thread(wait_until, lambda: mesh.ready() == [0], 20, "the dead one is out")
            if how == DENSE:
                await asyncio.to_thread(mesh.make_whole)
            else:  # no group is formed while weights lack
                mesh.join_one("-dpr", "1")
            sleeps = lambda: mesh.log.count("asleep: memory of weights given back") == 3  # noqa: E731
            await asyncio.to_thread(wait_until, sleeps, 90, "a joiner sleeps, too")
            mesh.command.child("Coordinator").kill()
            both_are_back = lambda: mesh.log.count("registering again") >= 2  # noqa: E731
            await asyncio.to_thread(wait_until, both_are_back, 30, "instances are back")
            knows_all = lambda: len(mesh.view().members) == 2 and 0 in mesh.ready()  # noqa: E731
            await asyncio.to_thread(wait_until, knows_all, 30, "the coordinator knows all")
            assert mesh.view().orders.sleep is not None

            late = Answer(0, time.monotonic())
            async with session() as client:
                body = mesh.body(0, "late") | {"request_id": "late"}
                task = asyncio.create_task(ask(client, mesh.url, body, late, {}))
                waits = lambda: sum(member.load.waiting for member in mesh.view().members) > len(answers)  # noqa: E731
                await asyncio.to_thread(wait_until, waits, 20, "a request that comes meanwhile waits")
                assert [len(answer.ids) for answer in answers] == before
                status, _ = await asyncio.to_thread(
                    mesh.call, "/resume_memory_occupation", {"tags": ["weights"]}
                )
                assert (status, late.ids) == (200, [])
                assert mesh.call("/is_sleeping", method="GET") == (200, {"is_sleeping": True})
                assert (await asyncio.to_thread(mesh.call, "/wake_up"))[0] == 200
                await task
            assert (late.error, late.ids) == (None, undisturbed[0])

        answers = asyncio.run(mesh.streams(meanwhile, "y"))
        assert [(answer.error, answer.ids) for answer in answers] == [(None, ids) for ids in undisturbed]
        assert mesh.call("/is_sleeping", method="GET") == (200, {"is_sleeping": False})
        assert_idle(mesh)
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
