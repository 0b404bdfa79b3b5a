"""What the member processes of the communicator tests do.

Each function runs in every member of a group.

Started with multiprocessing's fork server, which has torch loaded. They report by exit code, and by a
JSON file where the test needs more.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel.communicators import CollectiveError, Communicator, mixed
from parallel.communicators.mixed import MixedCommunicator
from parallel.communicators.network import NetworkCommunicator, Speed
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.groups import form
from parallel.links.connecting import connect
from parallel.links.forming_group import FormingGroup
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingClient
from parallel.links.meeting_contract import Prefixed
from parallel.links.ucx_links import why_not
from parallel.rounds.host_routes import HostRoutes
from parallel.rounds.native_shared_memory_rounds import load
from parallel.rounds.slots import SegmentSizes
from tests.parallel.devices.nccl_over_gloo import nccl_over_gloo
from tests.parallel.link_pairs import UCX_WAYS

KEY = LinkKey(bytes(range(32)))
PATIENCE = 20.0 * float(os.environ.get("LOCKSTEP_TESTS_SLOWER", "1"))
"""Seconds for everything that should work; the variable is for emulated machines."""
SMALL_SLOT = 4096
SMALL_SIZES = SegmentSizes(slot_bytes=SMALL_SLOT, view_bytes=4 * SMALL_SLOT)
TYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)
SHAPES = ((), (7,), (3, 5))
REDUCED_TYPES = TYPES[:-1]


class Member:
    """One member process and how it reaches the others."""

    def __init__(self, backend: str, rank: int, size: int, test: int, port: int, directory: Path) -> None:
        torch.set_num_threads(1)
        self.backend, self.rank, self.size, self.directory = backend, rank, size, directory
        self._test = test
        self.meeting = MeetingClient("127.0.0.1", port, timeout=PATIENCE)

    def form(self, name: str, size: int | None = None, timeout: float = PATIENCE) -> Communicator:
        size = size or self.size
        if self.backend in ("small_slots", "python", "mixed"):
            native = self.backend == "small_slots" or (self.backend == "mixed" and self.rank % 2 == 0)
            group = SharedMemoryCommunicator(
                self._forming(name, size, timeout),
                sizes=SegmentSizes() if self.backend == "python" else SMALL_SIZES,
                native=native,
            )
            assert group.is_native == (native and load() is not None)
            return group
        if self.backend == "nccl":
            return nccl_over_gloo(Prefixed(self.meeting, f"{self._test} {name}"), self.rank, size, timeout)
        if self.backend in ("mixed_hosts", "mixed_apart"):
            return self._mixed(name, size, timeout)
        if self.backend in ("tcp_python", "tcp_mixed"):
            return self.connect(name, size, timeout)
        if self.backend == "ucx_shared_memory":
            os.environ["UCX_TLS"] = UCX_WAYS["UCX over shared memory"][1]
        backend = "ucx" if self.backend == "ucx_shared_memory" else self.backend
        return form(self.meeting, self._test, self.rank, size, backend, timeout, group=name)

    def _forming(self, name: str, size: int, timeout: float) -> FormingGroup:
        return FormingGroup(Prefixed(self.meeting, f"{self._test} {name}"), self.rank, size, timeout=timeout)

    def connect(self, name: str, size: int, timeout: float) -> NetworkCommunicator:
        """A group over sockets, some or all of whose members keep to Python."""
        native = self.backend == "tcp_mixed" and self.rank % 2 == 0
        sockets = connect(
            self._forming(name, size, timeout),
            host="127.0.0.1",
            name=name,
            key=KEY,
            streams=2 if self.backend == "tcp_mixed" else 1,
        )
        group = NetworkCommunicator(sockets, self.rank, size, timeout=timeout, native=native)
        assert group.is_native == (native and load() is not None)
        assert bool(group.links_address) == group.is_native
        return group

    def _mixed(self, name: str, size: int, timeout: float) -> Communicator:
        """A group of members on two hosts, as far as they know.

        In ``mixed_apart`` neighbours are on different ones. Rank 1 keeps to Python.
        """
        host = self.rank % 2 if self.backend == "mixed_apart" else 2 * self.rank // size
        native, forming = self.rank != 1, self._forming(name, size, timeout)
        sockets = connect(forming, host="127.0.0.1", name=name, key=KEY)
        network = NetworkCommunicator(sockets, self.rank, size, timeout=timeout, native=native)
        return MixedCommunicator(forming, network, host_name=f"host {host}", sizes=SMALL_SIZES, native=native)

    def report(self, **facts: Any) -> None:
        """For the test, which waits for the file."""
        path = self.directory / f"{self.rank}.json"
        path.with_suffix(".new").write_text(json.dumps(facts))
        path.with_suffix(".new").rename(path)

    @contextmanager
    def expect_error(self) -> Iterator[dict[str, Any]]:
        """Expect a CollectiveError with this message, blame and evidence, within a time."""
        found: dict[str, Any] = {}
        began = time.monotonic()
        try:
            yield found
        except CollectiveError as error:
            now = time.monotonic()
            found.update(
                message=str(error), blamed=error.rank, evidence=error.evidence, at=now, seconds=now - began
            )
        else:
            raise AssertionError("this should have failed")


def run(
    function: Callable[[Member], None],
    backend: str,
    rank: int,
    size: int,
    test: int,
    port: int,
    directory: str,
) -> None:
    """The target of a member process.

    ``test`` numbers the tests that share the meeting place at ``port``.
    """
    function(Member(backend, rank, size, test, port, Path(directory)))


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def settled(expected: tuple[int, int]) -> tuple[int, int]:
    """The same, when it is as expected or a second is over.

    A thread that was joined may take a moment to end.
    """
    deadline = time.monotonic() + 1.0
    while held() != expected and time.monotonic() < deadline:
        time.sleep(0.001)
    return held()


# ---- what they do when all goes well


def every_method(member: Member) -> None:
    """Each method against what follows from everybody's data, which each member can compute by itself."""
    before = held()
    group = member.form("every_method")
    for case in range(3):
        for dtype in TYPES:
            for shape in SHAPES:
                check_exchanges(group, random.Random(f"{case}/{dtype}/{shape}"), dtype, shape, most=9)
    check_exchanges(group, random.Random(1), torch.float32, (64,), most=9000)  # parts of up to 2.3 MB
    check_exchanges(group, random.Random(2), torch.bfloat16, (), most=700_001)
    check_nothing(group)
    check_forms_of_tensors(group)
    group.close()
    with member.expect_error() as error:
        group.all_gather_ints([1])
    assert "it was closed" in error["message"]
    assert "memfd" not in Path("/proc/self/maps").read_text()
    assert settled(before) == before


def check_exchanges(
    group: Communicator, chance: random.Random, dtype: torch.dtype, shape: tuple[int, ...], most: int
) -> None:
    rank, ranks = group.rank, range(group.size)

    def size() -> int:
        return chance.choice([0, 1, chance.randint(0, most), most])

    assert group.all_gather_ints([rank, -(2**63), 2**63 - 1]) == [[r, -(2**63), 2**63 - 1] for r in ranks]

    sizes = [size() for _ in ranks]
    parts = [numbers(chance, n, dtype, shape) for n in sizes]
    assert torch.equal(group.all_gather(parts[rank], sizes), torch.cat(parts))
    assert torch.equal(group.all_gather_view(parts[rank], sizes), torch.cat(parts))

    table = [[size() for _ in ranks] for _ in ranks]  # from, to
    given = [numbers(chance, sum(row), dtype, shape) for row in table]
    received = group.all_to_all(given[rank], table[rank], [row[rank] for row in table])
    expected = [given[r].split(table[r])[rank] for r in ranks]
    assert torch.equal(received, torch.cat(expected))
    views = group.all_to_all_views(given[rank], table[rank], [row[rank] for row in table])
    assert all(torch.equal(view, part) for view, part in zip(views, expected, strict=True))

    source = chance.randrange(group.size)
    told = [numbers(chance, most, dtype, shape) for _ in ranks]
    assert torch.equal(group.broadcast(told[rank], source), told[source])

    around_the_ring(group, parts)

    if dtype in REDUCED_TYPES:
        sizes = [size() for _ in ranks]
        wholes = [numbers(chance, sum(sizes), dtype, shape) for _ in ranks]
        assert torch.equal(group.reduce_scatter(wholes[rank], sizes), in_order(wholes).split(sizes)[rank])
        assert torch.equal(group.all_reduce(told[rank]), in_order(told))


def around_the_ring(group: Communicator, parts: list[torch.Tensor]) -> None:
    """Everybody sends to the next and receives from the one before."""
    before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    if group.rank == 0:
        group.send(parts[0], after)
    received = group.receive(torch.empty_like(parts[before]), before)
    if group.rank != 0:
        group.send(parts[group.rank], after)
    assert torch.equal(received, parts[before])


def check_nothing(group: Communicator) -> None:
    """Nobody has any rows."""
    nothing, zeros = torch.empty(0, 3), [0] * group.size
    for _ in range(3):
        assert group.all_gather(nothing, zeros).shape == (0, 3)
        assert group.all_to_all(nothing, zeros, zeros).shape == (0, 3)
        assert group.all_gather_view(nothing, zeros).shape == (0, 3)
        assert [view.shape for view in group.all_to_all_views(nothing, zeros, zeros)] == [(0, 3)] * group.size
        assert group.reduce_scatter(nothing, zeros).shape == (0, 3)
        assert group.all_reduce(nothing).shape == (0, 3)
        assert group.broadcast(nothing, 0).shape == (0, 3)
        assert group.all_gather_ints([]) == [[] for _ in zeros]


def check_forms_of_tensors(group: Communicator) -> None:
    """Tensors in pieces, without dimensions, with gradients; results are memory of the caller's own."""
    ones = [1] * group.size
    across = torch.arange(12.0).reshape(3, 4).t()
    assert torch.equal(group.all_reduce(across), across * group.size)
    assert torch.equal(group.all_gather(across[:, 1:2].t(), ones), across[:, 1].expand(group.size, 4))
    assert torch.equal(group.all_gather_view(across[:, 1:2].t(), ones), across[:, 1].expand(group.size, 4))
    assert group.all_reduce(torch.tensor(2.5)).shape == ()
    assert not group.all_reduce(torch.ones(2, requires_grad=True)).requires_grad
    tensor = torch.ones(3)
    results = [
        group.broadcast(tensor, 0),
        group.all_reduce(tensor),
        group.all_gather(tensor[:1], ones),
        group.all_to_all(torch.ones(group.size), ones, ones),
    ]
    before = [result.clone() for result in results]
    group.all_reduce(tensor + 1)
    assert all(torch.equal(result, kept) for result, kept in zip(results, before, strict=True))
    for result in results:
        result.zero_()
    assert torch.equal(tensor, torch.ones(3))


def numbers(chance: random.Random, rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Such that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (rows, *shape), generator=generator).to(dtype)
    magnitudes = torch.randint(-6, 7, (rows, *shape), generator=generator)
    return (torch.randn(rows, *shape, generator=generator) * 2.0**magnitudes).to(dtype)


def in_order(terms: list[torch.Tensor]) -> torch.Tensor:
    """The sum in rank order; of half types in float32, rounded once."""
    exact = terms[0].dtype if terms[0].dtype not in (torch.bfloat16, torch.float16) else torch.float32
    total = terms[0].to(exact)
    for term in terms[1:]:
        total = total + term.to(exact)
    return total.to(terms[0].dtype)


def crowd_of_members(member: Member) -> None:
    """More members than cores: nobody may keep the core that another needs."""
    group = member.form("crowd")
    for turn in range(40):
        tensor = torch.full((3,), float(turn + member.rank))
        assert group.all_reduce(tensor)[0] == sum(range(turn, turn + member.size))
        everybody = group.all_to_all_views(tensor[:1].expand(member.size), *[[1] * member.size] * 2)
        assert torch.cat(everybody).tolist() == [float(turn + rank) for rank in range(member.size)]
        assert group.all_gather(tensor[:1], [1] * member.size).tolist() == [
            float(turn + rank) for rank in range(member.size)
        ]
    group.all_gather_ints([0])
    used = time.process_time()
    if member.rank == 0:
        time.sleep(1.0)
    began = time.monotonic()
    group.all_gather_ints([1])
    member.report(used=time.process_time() - used, waited=time.monotonic() - began)
    group.all_gather_ints([2])
    group.close()


def uneven_paces(member: Member) -> None:
    """Members that come late now and then, and leave during the others' last call."""
    chance = random.Random(f"own pace of {member.rank}")
    for epoch in range(12):
        group = member.form(f"pace {epoch}")
        for turn in range(8):
            time.sleep(chance.choice([0, 0, 0, 0.003]))
            tensor = torch.full((2000,), float(turn + member.rank))
            expected = sum(range(turn, turn + member.size))
            assert torch.equal(group.all_reduce(tensor), torch.full((2000,), float(expected)))
            if turn % 2:
                assert group.broadcast(tensor, epoch % member.size)[0] == turn + epoch % member.size
        group.close()


def slow_readers(member: Member) -> None:
    """Views held as long as the contract allows, by members that read them late.

    The members stop now and then before they read, while the others hurry on. Some views are given to the
    last call that may have them.
    """
    group = member.form("slow_readers")
    alike, own = random.Random("what all do"), random.Random(f"the pace of {member.rank}")
    rank, ranks = member.rank, range(member.size)
    held: list[tuple[Sequence[torch.Tensor], list[torch.Tensor]]] = []  # views, and what they must show

    def look() -> None:
        for views, expected in held:
            assert all(torch.equal(view, right) for view, right in zip(views, expected, strict=True))

    for turn in range(240):
        rows = alike.choice([1, 3, 40, 2000])
        given = [numbers(alike, rows * member.size, torch.int64, (2,)) for _ in ranks]
        if alike.random() < 0.3:
            group.all_reduce(given[rank][:1])  # does not count
        if turn % 3 == own.randrange(3):
            time.sleep(own.choice([0, 0.002]))
        look()
        if alike.random() < 0.5:
            part = given[rank][:rows]
            if alike.random() < 0.5 and len(held) == 2 and len(held[0][0]) == 1:
                part = held[0][0][0][:rows]  # the same for all: everybody sees the whole
                given = [held[0][1][0]] * member.size
            sizes = [min(rows, len(each)) for each in given]
            held.append(([group.all_gather_view(part, sizes)], [torch.cat([each[:rows] for each in given])]))
        else:
            sizes = [rows] * member.size
            parts = group.all_to_all_views(given[rank], sizes, sizes)
            held.append((parts, [each.split(rows)[rank] for each in given]))
        del held[:-2]
    # That it matters: a call later than allowed, what a view showed is gone.
    views = [group.all_gather_view(torch.full((8,), turn), [8] * member.size) for turn in range(4)]
    group.all_gather_ints([0])
    member.report(shown=[view[0].item() for view in views])
    group.all_gather_ints([0])
    group.close()
    assert views[3].tolist() == [3] * 8 * member.size  # the end of the group changes nothing


def same_data_everywhere(member: Member) -> None:
    """The same calls over each transport: results must be equal to the last bit."""
    found: dict[str, list[torch.Tensor]] = {}
    kept = member.backend
    ucx = ("ucx", "ucx_shared_memory") if why_not() is None else ()
    for backend in ("gloo", "shared_memory", "tcp", "tcp_python", "tcp_mixed", "nccl", *ucx):
        member.backend = backend
        group = member.form(f"same data {backend}")
        found[backend] = [
            result
            for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
            for rows in (1, 3, 500, 60_000)  # the last in two steps
            for result in results_of(group, random.Random(f"{dtype}/{rows}"), dtype, rows)
        ]
        group.close()
    member.backend = kept
    for backend, results in found.items():
        for result, reference in zip(results, found["gloo"], strict=True):
            assert result.dtype == reference.dtype
            as_bytes = [each.contiguous().view(-1).view(torch.uint8) for each in (result, reference)]
            assert torch.equal(*as_bytes), backend


def results_of(
    group: Communicator, chance: random.Random, dtype: torch.dtype, rows: int
) -> list[torch.Tensor]:
    """Results of all calls with tensors of so many rows for each member."""
    ranks, sizes = range(group.size), [rows] * group.size
    whole = [numbers(chance, rows * group.size, dtype, (2,)) for _ in ranks][group.rank]
    return [
        group.all_reduce(whole),
        group.reduce_scatter(whole, sizes),
        group.all_gather(whole[:rows], sizes),
        group.all_to_all(whole, sizes, sizes),
        group.broadcast(whole, group.size - 1),
    ]


# ---- what they do when something fails


def one_is_killed(member: Member) -> None:
    """Rank 1 is killed while the others wait for it.

    They go on as an epoch of two.
    """
    group = member.form("one_is_killed")
    ones = [1] * member.size
    whole = group.all_gather_view(torch.tensor([member.rank]), ones)
    member.report(ready=True)
    if member.rank == 1:
        time.sleep(PATIENCE)
    with member.expect_error() as error:
        group.all_to_all_views(torch.ones(member.size), ones, ones)
    with member.expect_error() as later:
        group.all_reduce(torch.ones(3))
    group.close()
    assert whole.tolist() == list(range(member.size))
    began = time.monotonic()
    member.rank = min(member.rank, 1)
    survivors = member.form("the survivors", size=2)
    assert survivors.all_gather_ints([member.rank]) == [[0], [1]]
    again = time.monotonic() - began
    survivors.close()
    member.rank = group.rank
    member.report(**error, later=later, again=again)


def an_onlooker_is_told(member: Member) -> None:
    """Rank 0 is killed while rank 2 waits for rank 1, which is busy."""
    group = member.form("an_onlooker_is_told")
    member.report(ready=True)
    if member.rank == 2:
        with member.expect_error() as error:
            group.receive(torch.ones(1), 1)
        member.report(**error)
    else:
        time.sleep(PATIENCE)


def one_aborts(member: Member) -> None:
    """Rank 0 aborts from a thread while it waits.

    Rank 1 comes later and must not wait.
    """
    group = member.form("one_aborts")
    if member.rank == 0:
        aborted_at: list[float] = []

        def abort() -> None:
            aborted_at.append(time.monotonic())
            group.abort()

        timer = threading.Timer(0.2, abort)
        timer.start()
        with member.expect_error() as error:
            group.all_gather(torch.ones(1, 2), [1] * member.size)
        timer.join()
        error["after"] = error["at"] - aborted_at[0]
        group.abort()
    else:
        time.sleep(0.6)
        with member.expect_error() as error:
            group.all_gather(torch.ones(1, 2), [1] * member.size)  # what rank 0 gave may be there already
            group.all_gather(torch.ones(1, 2), [1] * member.size)
    with member.expect_error() as later:
        group.broadcast(torch.ones(2), 0)
    member.report(**error, later=later)


def many_epochs(member: Member) -> None:
    """Groups that end in every way, one after another; nothing of them stays."""
    counts: list[tuple[int, int]] = []
    for epoch in range(52):  # the last one ends well: who ends first would count as dead
        group = member.form(f"epoch {epoch}", timeout=5.0)
        if epoch % 3 == 0:
            group.all_reduce(torch.ones(1000))
        elif member.rank == epoch % member.size:
            time.sleep(0.01)
            group.abort()
        else:
            with member.expect_error() as error:
                group.all_gather_ints([epoch])
                group.all_gather_ints([epoch])
            assert error["evidence"] == "closed"
            assert error["seconds"] < 1.0
        group.close()
        del group
        if epoch == 5:
            time.sleep(0.05)  # for threads to end
        counts.append(settled(counts[5]) if epoch > 5 else held())
    assert counts[-1] == counts[5], counts
    assert "memfd" not in Path("/proc/self/maps").read_text()


def one_does_not_come(member: Member) -> None:
    """Rank 1 is there but makes no call."""
    group = member.form("one_does_not_come", timeout=0.5)
    if member.rank == 0:
        with member.expect_error() as error:
            group.all_to_all(torch.ones(2), [1, 1], [1, 1])
        member.report(**error)
    else:
        time.sleep(1.5)
        with member.expect_error() as error:
            group.all_to_all(torch.ones(2), [1, 1], [1, 1])
            group.all_to_all(torch.ones(2), [1, 1], [1, 1])
        member.report(**error)


def one_is_stopped(member: Member) -> None:
    """Rank 1 is stopped, so that it neither works nor ends."""
    group = member.form("one_is_stopped", timeout=0.5)
    member.report(ready=True)
    with member.expect_error() as error:
        while True:
            group.all_gather(torch.ones(1, 1 << 18), [1] * member.size)  # more than what the system takes
            time.sleep(0.001)
    group.close()
    member.report(**error)


def different_calls(member: Member) -> None:
    """What does not belong together must not look like an answer."""
    group = member.form("different_calls")
    with member.expect_error() as error:
        if member.rank == 0:
            group.all_reduce(torch.ones(5))
        else:
            group.all_gather_ints([1, 2, 3])
    group = member.form("different sizes")
    with member.expect_error() as sizes:
        group.all_to_all(torch.ones(2), [1, 1], [1, 1] if member.rank == 0 else [2, 1])
        group.all_gather_ints([1])
    group = member.form("different views")
    with member.expect_error() as views:
        group.all_to_all_views(torch.ones(2), [1, 1], [1, 1] if member.rank == 0 else [2, 1])
        group.all_gather_ints([1])
    member.report(**error, sizes=sizes["message"], views=views["message"])


def one_of_several_does_not_come(member: Member) -> None:
    """Rank 1 makes no call; others wait for late members that wait for it."""
    groups = [member.form(f"epoch {epoch}", timeout=0.5) for epoch in range(2)]
    for group, elements, late in zip(groups, (3, 100_000), (2, 0), strict=True):
        time.sleep({1: 1.2, late: 0.1}.get(member.rank, 0.0))
        with member.expect_error() as error:
            group.all_reduce(torch.ones(elements))
        assert error["blamed"] in ((None, 1) if member.rank == 1 else (1,)), error
        assert error["seconds"] < 2.0, error
        group.close()


def one_calls_something_else(member: Member) -> None:
    """Rank 1 makes another call, and members on all hosts learn that."""
    group = member.form("something else")
    with member.expect_error() as error:
        for _ in range(2):  # the first may be over before the others know
            if member.rank == 1:
                group.all_gather_ints([1, 2])
            else:
                group.all_reduce(torch.ones(5))
    member.report(**error)


def sums_by_every_way(member: Member) -> None:
    """Sums over hosts by every way: their bits, and the bytes that cross."""
    group = member.form("sums")
    assert isinstance(group, MixedCommunicator)
    routes = HostRoutes([str(host) for host in group.hosts], group.rank)
    for speed in (Speed(1.0, 1e12), Speed(0.0, 1.0)):  # one hop, then as few bytes as can be
        group.network.speed = speed
        for case, (dtype, rows) in enumerate(itertools.product(REDUCED_TYPES, (0, 1, 7, 200_001))):
            chance = random.Random(case)
            terms = [numbers(chance, rows, dtype, ()) for _ in range(group.size)]
            before = sum(count.bytes_sent for count in group.link_counts())
            total = group.all_reduce(terms[group.rank])
            assert torch.equal(total.view(torch.uint8), in_order(terms).view(torch.uint8)), (speed, dtype)
            sent = sum(count.bytes_sent for count in group.link_counts()) - before
            by_all = [row[0] for row in group.all_gather_ints([sent])]
            num_bytes, widening = terms[0].nbytes, 2 if dtype.itemsize == 2 and dtype.is_floating_point else 1
            way = routes.way(num_bytes, widening, latency=speed.latency, bandwidth=speed.bandwidth)
            hosts = [sum(by_all[rank] for rank in ranks) for ranks in routes.members]
            most = 64 * 16 + 4 * group.size * dtype.itemsize  # headers, and pieces that are not all alike
            assert max(hosts) <= routes.busiest_bytes(way, num_bytes, widening) + most, (way, hosts)
    group.close()


def one_cannot_form(member: Member) -> None:
    """Rank 1 has links to all others, and then cannot share memory with rank 0."""
    if member.rank == 1:
        with unittest.mock.patch.object(
            mixed, "SharedMemoryCommunicator", side_effect=ValueError("no memory")
        ), pytest.raises(ValueError, match="no memory"):  # fmt: skip
            member.form("cannot form")
        return
    with member.expect_error() as error:
        group = member.form("cannot form")  # rank 2 has its host for itself
        group.all_gather_ints([1])
    member.report(**error)
