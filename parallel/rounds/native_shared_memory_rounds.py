"""Rounds in shared memory, each collective in a single native call of ``native/collectives.cpp``."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import torch

from parallel.rounds.arithmetic import TWO_STEP_BYTES, even_sizes
from parallel.rounds.collectives_source import SOURCE, CGroup, CheckFunction
from parallel.rounds.contract import CallForm
from parallel.rounds.native_calls import (
    GIVEN_UP,
    LONGEST_BUDGET,
    OTHER_CALL,
    CheckErrors,
    CollectivesLibrary,
    IntsRooms,
    bound_call,
)
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.shared_memory_rounds import SharedMemoryRounds
from parallel.rounds.slots import GroupMemory

_MOST_INTS = 512  # in a row: a slot has room for so many, however small it is

_ARGUMENTS = {
    **dict.fromkeys(("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "all_gather_ints"), 3),
    **dict.fromkeys(("all_gather_view", "all_to_all_views"), 2),
    **dict.fromkeys(("broadcast", "send", "receive"), 4),
}
"""How many each call has."""


@cache
def load() -> CollectivesLibrary | None:
    """The compiled collectives, built first if need be; None where that fails.

    The reason is logged once.
    """
    return SOURCE.load(lambda opened: CollectivesLibrary(opened, _ARGUMENTS))


class NativeSharedMemoryRounds(SharedMemoryRounds):
    """One member's exchanges through shared memory in C++.

    Sums of types that C++ does not add up are Python's.
    """

    is_native = True

    def __init__(
        self, library: CollectivesLibrary, memory: GroupMemory, health: SharedMemoryHealth, *, crowded: bool
    ) -> None:
        super().__init__(memory, health, crowded=crowded)
        rank, layout, members, _ = memory
        size = layout.size
        self._library = library
        self._errors = CheckErrors()
        self._addresses = (ctypes.c_int64 * size)(*(member.address for member in members))
        self._terms = (ctypes.c_int64 * size)()
        self._group = CGroup(
            rank=rank, size=size, slot_bytes=layout.slot_bytes, region_bytes=layout.region_bytes,
            view_bytes=layout.view_bytes, view_region_bytes=layout.view_region_bytes,
            own_bytes=layout.own_bytes, two_step_bytes=TWO_STEP_BYTES, counter=layout.counter,
            notes=layout.notes,
            announced=layout.announced, sent=layout.sent, envelopes=layout.envelopes, taken=layout.taken,
            slots=layout.slots, letters=layout.letters, views=layout.views,
            members=ctypes.addressof(self._addresses), terms=ctypes.addressof(self._terms),
            check=_checking(health, self._errors), crowded=crowded, budget=LONGEST_BUDGET,
            letter_user=(-1, -1),
        )  # fmt: skip
        self._at = ctypes.c_int64(ctypes.addressof(self._group))
        self._ints = IntsRooms(rank, size, partial(partial, library.calls["all_gather_ints"], self._at))
        calls = library.calls
        self._broadcast, self._send, self._receive = calls["broadcast"], calls["send"], calls["receive"]

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        call, shape, dtype, sizes, receive_sizes = form
        kind = self._library.kinds.get(dtype)
        if kind is None and call in ("all_reduce", "reduce_scatter"):
            return super().prepare(form)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        if call == "all_reduce":
            elements, row_bytes = math.prod(shape), dtype.itemsize
            sizes = even_sizes(elements, self.size)
        words = (ctypes.addressof(self._group), row_bytes, kind or 0, *sizes, *receive_sizes)
        return bound_call(self._library.calls[call], words, self._fail)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return (
            super().all_gather_ints(row) if len(row) > _MOST_INTS else self._ints.all_gather(row, self._fail)
        )

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
        if outcome == GIVEN_UP:
            self._errors.raise_last()
        group = self._group
        if outcome == OTHER_CALL:
            self._fail_on_note(group.culprit, group.found)
        self._health.fail_on_bytes(group.culprit, group.found, group.expected)


def make_rounds(
    memory: GroupMemory, health: SharedMemoryHealth, *, crowded: bool, native: bool
) -> SharedMemoryRounds:
    """One member's rounds: in C++, if that is asked for and can be compiled."""
    library = load() if native else None
    if library is None:
        return SharedMemoryRounds(memory, health, crowded=crowded)
    return NativeSharedMemoryRounds(library, memory, health, crowded=crowded)


def _checking(health: SharedMemoryHealth, errors: CheckErrors) -> Any:
    """A check that collectives make while they wait for a member's word.

    It must not know the rounds: each would keep the other alive.
    """

    def check(rank: int, word: int, target: int) -> int:
        def has_arrived() -> bool:
            return bool(ctypes.c_int64.from_address(word).value >= target)

        return errors.passes(lambda: health.check(rank, has_arrived))

    return CheckFunction(check)
