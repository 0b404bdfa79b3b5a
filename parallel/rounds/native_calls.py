"""Calls of compiled collectives: packed arguments, and errors that pass through C++.

What a small tensor takes is what Python does around such a call. So arguments are packed once into an array
that C++ knows, no tensor is sliced, and nothing is made anew that could be kept.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from parallel.native_source import NativeLibrary

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
GIVEN_UP, OTHER_CALL, OTHER_BYTES = 1, 2, 3
"""Outcomes of a call beside 0: done, and 4: the links are broken."""
LONGEST_BUDGET = 2e-3
"""Seconds that a member polls at most before it sleeps."""
MOST_ROOMS = 512
"""Most lengths of rows of integers that have memory of their own."""

Fail = Callable[[int], NoReturn]
"""Raises the error of an outcome."""


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


def bound_call(function: Any, words: Sequence[int], fail: Fail) -> Callable[..., Any]:
    """A native function with a block of words that stay from call to call.

    With three arguments it fills a result: (given, result) -> None. With two it leaves the result in a buffer
    for views: (given) -> buffer.
    """
    block = (ctypes.c_int64 * len(words))(*words)
    at = ctypes.c_int64(ctypes.addressof(block))

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


class IntsRooms:
    """Memory for all members' rows of integers, by the length of a row."""

    def __init__(self, rank: int, size: int, bind: Callable[[int, int], Callable[[], int]]) -> None:
        """``bind`` makes the native call: (address of the memory, bytes of a row)."""
        self._rank, self._size, self._bind = rank, size, bind
        self._rooms: dict[int, tuple[Any, Callable[..., None], Callable[[], int]]] = {}

    def all_gather(self, row: Sequence[int], fail: Fail) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        width = len(row)
        found = self._rooms.get(width)
        room, pack, exchange = self._make(width) if found is None else found
        pack(*row)
        if outcome := exchange():
            fail(outcome)
        numbers: list[int] = room[:]
        return [numbers[width * rank : width * (rank + 1)] for rank in range(self._size)]

    def _make(self, width: int) -> tuple[Any, Callable[..., None], Callable[[], int]]:
        if len(self._rooms) >= MOST_ROOMS:
            self._rooms.clear()
        room = (ctypes.c_int64 * max(1, self._size * width))()
        pack = partial(struct.Struct(f"={width}q").pack_into, room, self._rank * 8 * width)
        made = self._rooms[width] = room, pack, self._bind(ctypes.addressof(room), 8 * width)
        return made


class CheckErrors:
    """Errors of checks that C++ makes while it waits, kept until it returns."""

    def __init__(self) -> None:
        self._errors: list[BaseException] = []

    def passes(self, check: Callable[[], object]) -> int:
        """Make a check; 1, which means to give up, if it raises."""
        try:
            check()
        except BaseException as error:  # noqa: BLE001 (raised by the caller of the native code)
            self._errors[:] = [error]
            return 1
        return 0

    def raise_last(self) -> NoReturn:
        """Raise the error for which the native code gave up."""
        error = self._errors.pop()
        try:
            raise error
        finally:
            del error  # it knows this frame, and would keep the members' memory
