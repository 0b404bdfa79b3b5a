"""Order of memory between members: words that publish data, and waits for them.

Collectives in C++ are judged by ThreadSanitizer. Those in Python show their reads and writes here: between
data and the word that publishes it stands a fence, on both sides.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from parallel import groups
from parallel.compiler import INCLUDE
from parallel.links.errors import CollectiveError
from parallel.native_source import NativeSource
from parallel.rounds import memory_order, slots
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.shared_memory_rounds import SharedMemoryRounds
from parallel.rounds.slots import GroupMemory, SegmentLayout, SegmentSizes, Slots
from tests.parallel.rounds import races

SIZE = 3
SLOT = 4096
LAYOUT = SegmentLayout.of(SIZE, SegmentSizes(SLOT, 4 * SLOT, 0))


def test_collectives_in_cpp_have_no_data_race(tmp_path: Path) -> None:
    printed = races.run(Path(__file__).with_name("races.cpp"), tmp_path, INCLUDE)
    assert printed == "9600 calls\n"


class Event(NamedTuple):
    """What a member does with shared memory."""

    kind: str
    """``fence``; ``publish`` of an own word; ``await`` of another's; ``data``: all else."""
    what: str = ""


class Trace:
    """Events of one member in their order."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def note(self, kind: str, what: str = "") -> None:
        self.events.append(Event(kind, what))

    def problems(self) -> list[str]:
        """Words published or data used without a fence in between."""
        found, data, awaited = [], "", ""
        for kind, what in self.events:
            if kind == "fence":
                data = awaited = ""
            elif kind == "publish" and data:
                found.append(f"{what} is published before {data} is there")
            elif kind == "data" and awaited:
                found.append(f"{what} is used before {awaited} is known")
            data = what if kind == "data" else data
            awaited = what if kind == "await" else awaited
        return found


CURRENT = threading.local()
"""The trace of this thread's member."""


class TracedWords:
    """Words of a segment that note who reads and writes them."""

    def __init__(self, words: memoryview, trace: Trace, name: str, *, reads: str, writes: str) -> None:
        self._words, self._trace, self._name = words, trace, name
        self._reads, self._writes = reads, writes

    def __getitem__(self, index: int) -> int:
        if self._reads:
            self._trace.note(self._reads, self._name)
        return int(self._words[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._trace.note(self._writes, self._name)
        self._words[index] = value


def traced(segment: Any, trace: Trace, *, is_own: bool) -> Slots:
    """One member's segment, as the member of this trace sees it."""
    made: Any = Slots(segment, LAYOUT)

    def words(name: str, given: memoryview, *, counts: bool) -> TracedWords:
        reads = ("" if is_own else "await") if counts else "data"
        return TracedWords(given, trace, name, reads=reads, writes="publish" if counts else "data")

    made.counter = words("counter", made.counter, counts=True)
    made.notes = words("note", made.notes, counts=False)
    for name, counts in {"announced": False, "envelopes": False, "sent": True, "taken": True}.items():
        setattr(made, name, [words(name, each, counts=counts) for each in getattr(made, name)])
    show = made.slot

    def slot(number: int, dtype: torch.dtype) -> torch.Tensor:
        trace.note("data", "slot")
        shown: torch.Tensor = show(number, dtype)
        return shown

    made.slot = slot
    return made  # type: ignore[no-any-return]


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> list[tuple[SharedMemoryRounds, Trace]]:
    """Members of a group as threads of this process, with their traces."""
    mapped = [mmap.mmap(-1, LAYOUT.num_bytes) for _ in range(SIZE)]
    segments = [SimpleNamespace(memory=each, words=memoryview(each).cast("q")) for each in mapped]
    traces = [Trace() for _ in range(SIZE)]
    move = ctypes.memmove

    def memmove(target: int, source: int, count: int) -> int:
        CURRENT.trace.note("data", "copy")
        return move(target, source, count)

    monkeypatch.setattr(slots, "ctypes", SimpleNamespace(memmove=memmove))

    def member(rank: int) -> tuple[SharedMemoryRounds, Trace]:
        trace = traces[rank]
        seen = [traced(each, trace, is_own=peer == rank) for peer, each in enumerate(segments)]
        health = SharedMemoryHealth(rank, 20.0, None)
        for peer in range(SIZE):
            health.know(peer, seen[peer].state)
        memory = GroupMemory(rank, LAYOUT, seen, lambda: trace.note("fence"))
        return SharedMemoryRounds(memory, health, crowded=True), trace

    return [member(rank) for rank in range(SIZE)]


Calls = Callable[[SharedMemoryRounds], object]


def all_gathered(rounds: SharedMemoryRounds) -> None:
    whole = torch.zeros(3000)
    rounds.all_gather(torch.full((1000,), rounds.rank + 1.0), whole, [1000] * SIZE)
    assert whole.view(SIZE, -1).mean(1).tolist() == [1.0, 2.0, 3.0]


def added_up(rounds: SharedMemoryRounds) -> None:
    total = torch.zeros(3000)
    rounds.all_reduce(torch.full((3000,), rounds.rank + 1.0), total)
    assert total.unique().tolist() == [6.0]


def exchanged(rounds: SharedMemoryRounds) -> None:
    incoming = torch.zeros(3 * 800)
    rounds.all_to_all(torch.full((3 * 800,), rounds.rank + 1.0), incoming, [800] * SIZE, [800] * SIZE)
    assert incoming.view(SIZE, -1).mean(1).tolist() == [1.0, 2.0, 3.0]


def shown(rounds: SharedMemoryRounds) -> None:
    for _ in range(4):
        rounds.all_to_all_views(torch.ones(3 * 100), [100] * SIZE, [100] * SIZE)
        rounds.all_gather_view(torch.ones(100), [100] * SIZE)


def spread(rounds: SharedMemoryRounds) -> None:
    data = torch.full((3000,), float(rounds.rank))
    rounds.broadcast(data, 1)
    assert data.unique().tolist() == [1.0]


def counted(rounds: SharedMemoryRounds) -> None:
    assert rounds.all_gather_ints([rounds.rank]) == [[0], [1], [2]]


def passed_on(rounds: SharedMemoryRounds) -> None:
    data = torch.full((5000,), float(rounds.rank))
    if rounds.rank == 0:
        rounds.send(data, 1)
    elif rounds.rank == 1:
        rounds.receive(data, 0)
        assert data.unique().tolist() == [0.0]


@pytest.mark.parametrize("calls", [all_gathered, added_up, exchanged, shown, spread, counted, passed_on])
def test_a_fence_stands_between_data_and_its_word(
    group: list[tuple[SharedMemoryRounds, Trace]], calls: Calls
) -> None:
    errors: list[BaseException] = []

    def run(rounds: SharedMemoryRounds, trace: Trace) -> None:
        CURRENT.trace = trace
        try:
            calls(rounds)
        except BaseException as error:  # noqa: BLE001 (shown by the test)
            errors.append(error)

    threads = [threading.Thread(target=run, args=member) for member in group]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert not errors
    assert [trace.problems() for _, trace in group] == [[], [], []]
    kinds = {event.kind for _, trace in group for event in trace.events}
    assert kinds == {"data", "fence", "publish", "await"}


def test_a_last_word_follows_what_was_published_before_it() -> None:
    trace, arrived = Trace(), False
    mine, other = (memoryview(bytearray(8)).cast("q") for _ in range(2))
    health: Any = SharedMemoryHealth(0, 20.0, None)
    health._fence = lambda: trace.note("fence")
    health.know(0, TracedWords(mine, trace, "state", reads="", writes="publish"))
    health.know(1, TracedWords(other, trace, "state", reads="await", writes=""))

    def has_arrived() -> bool:
        trace.note("data", "counter")
        return arrived

    other[0] = 1  # it has closed its end
    arrived = True
    health.check(1, has_arrived)
    arrived = False
    trace.note("data", "counter")  # of this member
    with pytest.raises(CollectiveError, match="rank 1 has closed its end"):
        health.check(1, has_arrived)
    assert mine[0] != 0
    assert trace.problems() == []
    assert [kind for kind, _ in trace.events].count("publish") == 1


@pytest.mark.parametrize(
    ("machine", "has"), [("x86_64", True), ("aarch64", True), ("riscv64", False), ("ppc64le", False)]
)
def test_which_machines_have_a_fence(machine: str, has: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = memory_order.no_fence
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(memory_order, "_compiled", lambda: compiled)
    assert (memory_order.fence_here() is not None) == has


def test_the_fence_of_cpp_is_one_of_the_collectives() -> None:
    if shutil.which("g++") is None:
        pytest.skip("no g++ here")
    memory_order._compiled.cache_clear()
    fence = memory_order._compiled()
    assert fence is not None
    assert fence() is None


def test_without_a_fence_members_use_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no compiler")

    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(NativeSource, "open", fail)
    memory_order._compiled.cache_clear()
    assert groups.choose_transport(["a", "a"]) == "tcp"
    assert "members of this host use sockets, not shared memory: no compiler" in caplog.text
    memory_order._compiled.cache_clear()
