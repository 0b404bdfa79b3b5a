"""Instances with spread experts die, stop, leave and join; no stream loses a token.

One mesh serves all tests; each brings it back to three instances before it begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.test_loss import NUM_CALM, NUM_TOKENS, crowd
from tests.mesh.harness import wait_until
from tests.mesh.spread_mesh import SpreadMesh

pytestmark = pytest.mark.mesh


def room_for_four() -> int:
    """Bytes of four of the shipped model's eight experts in float32.

    Two instances then hold all experts, and one does not. Native kernels keep a copy.
    """
    from engine.kernels.core import library

    each = 6 * 3 * 192 * 192 * 4
    return 4 * each * (1 if library.load() is None else 2)


class Mesh(SpreadMesh):
    """Three instances that are disturbed."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack) -> None:
        super().__init__(directory, stack, each=["--expert-memory-bytes", str(room_for_four())])
        self.undisturbed = asyncio.run(crowd(self))
        assert all(len(ids) == NUM_TOKENS for ids in self.undisturbed)

    def disturb(self, act: Callable[[], None]) -> None:
        """While 24 streams run, do this once rank 1 works; the streams must not notice."""

        def once_busy() -> None:
            wait_until(lambda: self.running(1) > 2, 20, "instance 1 works")
            act()

        streams = asyncio.run(asyncio.wait_for(crowd(self, once_busy), 90))
        assert streams == self.undisturbed

    def still_right(self) -> None:
        """Some more streams are as ever, and nothing stays."""
        calm = asyncio.run(crowd(self, count=6, num_tokens=NUM_CALM))
        assert calm == [ids[:NUM_CALM] for ids in self.undisturbed[:6]]
        assert_idle(self)


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with contextlib.ExitStack() as stack:
        mesh = Mesh(tmp_path_factory.mktemp("recovery"), stack)
        yield mesh
        for command in mesh.commands[
            1:
        ]:  # all at once: who is left has no room for the experts of who leaves,
            if command.process.poll() is None:  # and is waited for
                command.process.send_signal(signal.SIGTERM)
        assert mesh.command.stop() == 0
        assert "Traceback" not in mesh.log


@pytest.fixture
def mesh(three: Mesh) -> Mesh:
    three.make_whole()
    # Who comes back under the rank of a dead one is on trial until its first tokens.
    first = asyncio.run(crowd(three, count=3, ranks={0: 0, 1: 1, 2: 2}, num_tokens=40))
    assert first == [ids[:40] for ids in three.undisturbed[:3]]
    return three


def test_a_killed_instance_costs_no_token_and_comes_back_under_load(mesh: Mesh) -> None:
    mesh.disturb(mesh.engine(1).kill)
    assert mesh.ready() == [0, 2]
    assert "instance 1 taken out: its process" in mesh.log
    assert mesh.log.count("recovered in epoch") == 2
    assert_idle(mesh)

    def join() -> None:
        mesh.join_one("-dpr", "1")
        wait_until(lambda: mesh.ready() == [0, 1, 2], 60)

    streams = asyncio.run(asyncio.wait_for(crowd(mesh, join), 90))
    assert streams == mesh.undisturbed
    mesh.still_right()


@pytest.mark.nightly
def test_an_instance_is_drained_under_load(mesh: Mesh) -> None:
    leaver = mesh.engine(1)
    mesh.disturb(leaver.terminate)
    wait_until(lambda: mesh.ready() == [0, 2], 20)
    leaver.wait(20)
    afterwards = mesh.command.log.rpartition("instance 1 is draining")[2]
    assert "instance 1 left" in afterwards
    assert "taken out" not in afterwards
    assert_idle(mesh)


def test_a_stopped_instance_is_left_behind_and_joins_again(mesh: Mesh) -> None:
    stopped = mesh.engine(1)
    try:
        mesh.disturb(stopped.suspend)
        assert 1 not in mesh.ready()
    finally:
        stopped.resume()
    wait_until(lambda: mesh.ready() == [0, 1, 2], 30, "it is back")
    assert mesh.engine(1) == stopped
    mesh.still_right()


def test_the_coordinator_and_an_instance_die_together(mesh: Mesh) -> None:
    coordinator = mesh.command.child("Coordinator")

    def kill_both() -> None:
        victim = mesh.engine(1)
        coordinator.send_signal(signal.SIGKILL)
        victim.kill()

    mesh.disturb(kill_both)
    wait_until(lambda: mesh.ready() == [0, 2], 20)
    mesh.still_right()


@pytest.mark.nightly
def test_the_coordinator_dies_and_later_an_instance(mesh: Mesh) -> None:
    epoch = mesh.view().epoch

    def kill_one_after_the_other() -> None:
        coordinator = mesh.command.child("Coordinator")
        coordinator.kill()
        wait_until(
            lambda: not coordinator.is_running() and mesh.ready() == [0, 1, 2], 20, "the world is right"
        )
        assert mesh.view().epoch == epoch, "nobody had to form a group for that"
        mesh.engine(1).kill()

    streams = asyncio.run(asyncio.wait_for(crowd(mesh, kill_one_after_the_other), 90))
    assert streams == mesh.undisturbed
    wait_until(lambda: mesh.ready() == [0, 2], 20)
    assert mesh.view().epoch > epoch
    mesh.still_right()


def test_experts_that_do_not_fit_wait_for_another_instance(mesh: Mesh) -> None:
    """Two of three die, and the last one has no room for all experts."""

    def kill_two() -> None:
        for victim in [mesh.engine(1), mesh.engine(2)]:
            victim.kill()
        wait_until(lambda: "the 8 experts do not fit on 1" in mesh.status(), 20, "the status says so")
        request = urllib.request.Request(
            f"{mesh.url}/v1/completions",
            b'{"prompt": "It is", "max_tokens": 1}',
            {"content-type": "application/json"},
        )
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=20)
        assert (refused.value.code, refused.value.headers["retry-after"]) == (503, "1")
        assert "1 more instance: the 8 experts do not fit on 1" in refused.value.read().decode()
        assert mesh.engine(0).is_running()
        mesh.join_one("-dpr", "1")

    mesh.disturb(kill_two)
    assert mesh.ready() == [0, 1]
    mesh.still_right()
