"""The rounds of :mod:`parallel.rounds.shared_memory_rounds`, each collective in a single native call.

The calls are those of ``native/collectives.cpp``.

What a small tensor takes is what Python does around that call, so arguments are packed into one array that
the other side knows, no tensor is sliced, and nothing is made anew that could be kept.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from parallel.compiler import INCLUDE
from parallel.links.native_links import OFF, SLOWER
from parallel.native_source import NativeLibrary, NativeSource
from parallel.rounds.arithmetic import even_sizes
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.shared_memory_rounds import TWO_STEP_BYTES, Rounds
from parallel.rounds.slots import SegmentLayout, Slots

KINDS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.bfloat16: 2,
    torch.float16: 3,
    torch.uint8: 4,
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
}
"""Numbers of tensor types in ``sums.hpp``."""
_GIVEN_UP, _OTHER_CALL = 1, 2  # outcomes of a call; 0: done, 3: other bytes
_MOST_INTS = 512
_LONGEST_BUDGET = 2e-3

_Check = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class _Group(ctypes.Structure):
    """The struct of the same name in ``collectives.cpp``."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "rank", "size", "slot_bytes", "region_bytes", "view_bytes", "view_region_bytes",
                "own_bytes", "two_step_bytes",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "counter", "notes", "announced", "sent", "envelopes", "taken", "slots", "letters", "views",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("members", "terms")),
        ("check", _Check),
        ("crowded", ctypes.c_int64),
        ("budget", ctypes.c_double),
        ("shared", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("known", "num_views", "letters_sent")),
        ("letter_user", ctypes.c_int64 * 2),
        ("letter_number", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("culprit", "found", "expected")),
    ]  # fmt: skip


_ARGUMENTS = {
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "all_gather_ints"), 3),
    **dict.fromkeys(("all_gather_view", "all_to_all_views"), 2),
    **dict.fromkeys(("broadcast", "send", "receive"), 4),
}
"""How many each call has."""


SOURCE = NativeSource(
    path=INCLUDE / "collectives.cpp",
    headers=(INCLUDE,),
    flags=("-mprefer-vector-width=512",),
    structs={"group": _Group},
    off=OFF,
    absent="native collectives: off,",
    instead=SLOWER,
)


class CollectivesLibrary:
    """Compiled collectives: functions of addresses and numbers, 64 bits each."""

    def __init__(self, opened: NativeLibrary, arguments: Mapping[str, int], prefix: str = "") -> None:
        """``arguments``: how many each function takes, by the name behind ``lockstep_`` and ``prefix``."""
        self.calls: dict[str, Any] = {
            name: opened.bind(f"{prefix}{name}", *(ctypes.c_int64,) * given)
            for name, given in arguments.items()
        }
        self.kinds = {dtype: kind for dtype, kind in KINDS.items() if opened.call(f"{prefix}sums", kind)}
        """Numbers of the tensor types that the compiled collectives add up."""


@cache
def load() -> CollectivesLibrary | None:
    """The compiled collectives, built first if need be; None where that fails.

    The reason is logged once.
    """
    return SOURCE.load(lambda opened: CollectivesLibrary(opened, _ARGUMENTS))


def make_rounds(
    library: CollectivesLibrary | None,
    rank: int,
    layout: SegmentLayout,
    members: Sequence[Slots],
    health: SharedMemoryHealth,
    crowded: bool,
) -> Rounds:
    """One member's part, native if there is a library."""
    if library is None:
        return Rounds(rank, layout, members, health, crowded=crowded)
    return NativeRounds(library, rank, layout, members, health, crowded=crowded)


class NativeRounds(Rounds):
    """The rounds of one member in C++.

    :class:`parallel.rounds.shared_memory_rounds.Rounds` does what is not done here.
    """

    is_native = True

    def __init__(
        self,
        library: CollectivesLibrary,
        rank: int,
        layout: SegmentLayout,
        members: Sequence[Slots],
        health: SharedMemoryHealth,
        *,
        crowded: bool,
    ) -> None:
        super().__init__(rank, layout, members, health, crowded=crowded)
        size = layout.size
        self._library = library
        self._ints: dict[int, tuple[Any, int, Callable[..., None]]] = {}
        self._errors: list[BaseException] = []
        self._addresses = (ctypes.c_int64 * size)(*(member.address for member in members))
        self._terms = (ctypes.c_int64 * size)()
        self._group = _Group(
            rank=rank, size=size, slot_bytes=layout.slot_bytes, region_bytes=layout.region_bytes,
            view_bytes=layout.view_bytes, view_region_bytes=layout.view_region_bytes,
            own_bytes=layout.own_bytes, two_step_bytes=TWO_STEP_BYTES, counter=layout.counter,
            notes=layout.notes,
            announced=layout.announced, sent=layout.sent, envelopes=layout.envelopes, taken=layout.taken,
            slots=layout.slots, letters=layout.letters, views=layout.views,
            members=ctypes.addressof(self._addresses), terms=ctypes.addressof(self._terms),
            check=_checking(health, self._errors), crowded=crowded, budget=_LONGEST_BUDGET,
            letter_user=(-1, -1),
        )  # fmt: skip
        self._at = ctypes.c_int64(ctypes.addressof(self._group))
        calls = library.calls
        self._all_gather_ints, self._broadcast = calls["all_gather_ints"], calls["broadcast"]
        self._send, self._receive = calls["send"], calls["receive"]

    def prepare(
        self,
        call: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        sizes: Sequence[int],
        receive_sizes: Sequence[int] = (),
    ) -> Callable[..., Any]:
        kind = self._library.kinds.get(dtype)
        if kind is None:
            if call in ("all_reduce", "reduce_scatter"):
                return super().prepare(call, shape, dtype, sizes, receive_sizes)
            kind = 0
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if call == "all_reduce":
            elements, row_bytes = math.prod(shape), dtype.itemsize
            sizes = even_sizes(elements, self.size)
        words = (ctypes.addressof(self._group), row_bytes, kind, *sizes, *receive_sizes)
        return self._calling(self._library.calls[call], (ctypes.c_int64 * len(words))(*words))

    def _calling(self, function: Any, block: ctypes.Array[ctypes.c_int64]) -> Callable[..., Any]:
        """The native function, bound to the block of arguments that stay from call to call."""
        at, fail = ctypes.c_int64(ctypes.addressof(block)), self._fail

        def run(
            given: torch.Tensor, result: torch.Tensor, block: ctypes.Array[ctypes.c_int64] = block
        ) -> None:  # which keeps the block
            if outcome := function(at, given.data_ptr(), result.data_ptr()):
                fail(outcome)

        def run_for_view(given: torch.Tensor, block: ctypes.Array[ctypes.c_int64] = block) -> int:
            buffer: int = function(at, given.data_ptr())
            if buffer < 0:
                fail(-buffer)
            return buffer

        return run if len(function.argtypes) == 3 else run_for_view

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        width = len(row)
        if width > _MOST_INTS:
            return super().all_gather_ints(row)
        if width not in self._ints:
            room = (ctypes.c_int64 * max(1, self.size * width))()
            self._ints[width] = room, ctypes.addressof(room), struct.Struct(f"={width}q").pack_into
        room, address, pack = self._ints[width]
        num_bytes = 8 * width
        pack(room, self.rank * num_bytes, *row)
        if outcome := self._all_gather_ints(self._at, address, num_bytes):
            self._fail(outcome)
        numbers: list[int] = room[:]
        return [numbers[width * rank : width * (rank + 1)] for rank in range(self.size)]

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        if outcome := self._broadcast(self._at, data.data_ptr(), data.nbytes, source):
            self._fail(outcome)

    def send(self, given: torch.Tensor, to: int) -> None:
        if outcome := self._send(self._at, given.data_ptr(), given.nbytes, to):
            self._fail(outcome)

    def receive(self, data: torch.Tensor, source: int) -> None:
        if outcome := self._receive(self._at, data.data_ptr(), data.nbytes, source):
            self._fail(outcome)

    def _fail(self, outcome: int) -> NoReturn:
        if outcome == _GIVEN_UP:
            error = self._errors.pop()
            try:
                raise error
            finally:
                del error  # it knows this frame, and would keep the members' memory
        group = self._group
        if outcome == _OTHER_CALL:
            self._fail_on_note(group.culprit, group.found)
        self._health.fail_on_bytes(group.culprit, group.found, group.expected)


def _checking(health: SharedMemoryHealth, errors: list[BaseException]) -> Any:
    """A check that collectives call now and then while they wait for a member's word.

    The wait ends when the word is ``target``; a returned 1 means: give up. The check must not know the
    rounds: each would keep the other alive.
    """

    def check(rank: int, word: int, target: int) -> int:
        try:
            health.check(rank, lambda: ctypes.c_int64.from_address(word).value >= target)
        except BaseException as error:  # noqa: BLE001 (raised by the caller: it may not pass through C++)
            errors[:] = [error]
            return 1
        return 0

    return _Check(check)
