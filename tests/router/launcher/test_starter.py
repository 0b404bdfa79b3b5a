"""Which processes of a launcher are forked, and which start as programs of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from coordinator.process import process
from engine.host.forked import Forked, ForkServer, is_possible
from router.launcher.launch import ProcessSpec
from router.launcher.starter import ProcessStarter

pytestmark = pytest.mark.skipif(not is_possible("cpu", 0), reason="only Linux forks")


@pytest.fixture
def starter() -> Iterator[ProcessStarter]:
    made = ProcessStarter(ForkServer.start(["coordinator.__main__"]))
    yield made
    made.close()


@pytest.mark.parametrize(("role", "forks"), [("coordinator", True), ("router", False)])
def test_what_the_fork_server_has_loaded_is_forked(starter: ProcessStarter, role: str, forks: bool) -> None:
    spec = ProcessSpec(name=role.title(), role=role, argv=("--no-such-flag",), address="", threads=1)

    async def run() -> tuple[bool, int]:
        child = await starter.start(1, spec, "name", lambda: True)
        assert child is not None
        return isinstance(child.process, Forked), await child.ended()

    assert starter.forks(spec) is forks
    assert asyncio.run(run()) == (forks, process.EXIT_USAGE)


def test_a_module_of_a_role_is_another_program(starter: ProcessStarter) -> None:
    spec = ProcessSpec(
        name="Node", role="coordinator", module="engine.executor.nodes", argv=(), address="", threads=1
    )
    assert not starter.forks(spec)
