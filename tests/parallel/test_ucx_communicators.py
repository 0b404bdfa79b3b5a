"""Groups over UCX, whose members are threads of this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import DeviceConfig
from engine.groups.transport import installation_problem, transport_problem
from parallel.communicators import Communicator, make_communicator
from parallel.communicators.mixed import MixedCommunicator
from parallel.communicators.network import NetworkCommunicator
from parallel.links import ucx_links
from parallel.links.meeting import MeetingClient, MeetingHost
from parallel.links.native_links import NativeLinks
from parallel.links.ucx_installation import PREFIX
from parallel.links.ucx_links import UcxLinks
from tests.parallel.link_pairs import needs_ucx

pytestmark = pytest.mark.mesh
SECONDS = 10.0


@pytest.fixture
def meeting() -> Iterator[MeetingHost]:
    host = MeetingHost("127.0.0.1")
    yield host
    host.close()


def together(
    meeting: MeetingHost, size: int, use: Callable[[Communicator], Any], **how: Any
) -> list[Future[Any]]:
    """What each member of a group in threads returns from ``use``."""

    def run(rank: int) -> Any:
        client = MeetingClient("127.0.0.1", meeting.port, timeout=SECONDS)
        own = {name: value(rank) if callable(value) else value for name, value in how.items()}
        group = make_communicator(own.pop("kind"), client, rank, size, name="group", timeout=SECONDS, **own)
        try:
            return use(group)
        finally:
            group.close()

    with ThreadPoolExecutor(size) as pool:
        return [pool.submit(run, rank) for rank in range(size)]


def event_descriptors() -> int:
    """Descriptors by which links are woken."""
    return sum(
        os.readlink(each).startswith("anon_inode:")
        for each in Path("/proc/self/fd").glob("[0-9]*")
        if each.is_symlink()
    )


def links_and_sum(group: Communicator) -> tuple[type, list[float]]:
    assert isinstance(group, NetworkCommunicator)
    return type(group.links), group.all_reduce(torch.full((3,), float(group.rank + 1))).tolist()


def test_auto_keeps_to_tcp_without_rdma_on_all(meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ucx()
    asked: list[int] = []

    def only_one_has() -> bool:
        asked.append(threading.get_ident())
        return len(asked) == 1

    monkeypatch.setattr(ucx_links, "has_rdma", only_one_has)
    found = together(meeting, 2, links_and_sum, kind="tcp", transport="auto")
    assert [each.result() for each in found] == [(NativeLinks, [3.0] * 3)] * 2
    assert len(asked) == 2


def test_auto_takes_ucx_with_rdma_on_all(meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ucx()
    monkeypatch.setattr(ucx_links, "has_rdma", lambda: True)
    found = together(meeting, 2, links_and_sum, kind="tcp", transport="auto")
    assert [each.result() for each in found] == [(UcxLinks, [3.0] * 3)] * 2


def test_hosts_of_a_mixed_group_are_joined_by_ucx(meeting: MeetingHost) -> None:
    needs_ucx()

    def use(group: Communicator) -> list[float]:
        assert isinstance(group, MixedCommunicator)
        return group.all_reduce(torch.full((1000,), float(group.rank + 1))).unique().tolist()

    found = together(
        meeting, 3, use, kind="mixed", transport="ucx", host_name=lambda rank: f"host {rank // 2}"
    )
    assert [each.result() for each in found] == [[6.0]] * 3


def test_a_member_that_cannot_use_ucx_is_named(meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_ucx()
    before = event_descriptors()
    monkeypatch.setattr(ucx_links, "transports", lambda: "nothing")
    found = together(meeting, 2, links_and_sum, kind="ucx")
    for each in found:
        with pytest.raises(
            ValueError, match="--mesh-transport ucx: rank 0 cannot use UCX: UCX cannot be used"
        ):
            each.result()
    assert event_descriptors() == before


def test_without_ucx_the_flag_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PREFIX, "/nonexistent")
    asked, other = DeviceConfig(mesh_transport="ucx"), DeviceConfig(mesh_transport="auto")
    ucx_links.load.cache_clear()
    try:
        for problem in (installation_problem, transport_problem):
            assert f"--mesh-transport ucx: {PREFIX}=/nonexistent" in str(problem(asked))
            assert problem(other) is None
    finally:
        ucx_links.load.cache_clear()
