"""The rounds of :mod:`parallel.communicators.rounds`, each collective in one call of
``native/collectives.cpp``.

What a small tensor takes is what Python does around that call, so arguments are packed into one array that
the other side knows, no tensor is sliced, and nothing is made anew that could be kept.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import subprocess
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import torch

from parallel import compiler
from parallel.communicators.rounds import TWO_STEP_BYTES, Rounds, region_bytes
from parallel.communicators.slots import Layout, Slots
from parallel.communicators.standing import Standing

logger = logging.getLogger(__name__)

SOURCE = compiler.INCLUDE / "collectives.cpp"
OFF = "LOCKSTEP_NATIVE_COLLECTIVES"
"""Environment variable: 0 keeps to Python."""
FLAGS = ("-mprefer-vector-width=512",)

_KINDS = {
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
_GIVEN_UP, _OTHER_CALL = 1, 2  # outcomes of a call; 0: done, 3: other bytes
_CALL_WORDS = 5
_MOST_INTS = 512
_LONGEST_BUDGET = 2e-3

_Check = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)


class _Group(ctypes.Structure):
    """As in ``collectives.cpp``."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in ("rank", "size", "slot_bytes", "region_bytes", "two_step_bytes")
        ),
        *(
            (name, ctypes.c_int64)
            for name in (
                "counter", "notes", "announced", "sent", "envelopes", "taken", "slots", "letters",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("members", "terms", "call")),
        ("check", _Check),
        ("crowded", ctypes.c_int64),
        ("budget", ctypes.c_double),
        *((name, ctypes.c_int64) for name in ("known", "letters_sent")),
        ("letter_user", ctypes.c_int64 * 2),
        ("letter_number", ctypes.c_int64 * 2),
        *((name, ctypes.c_int64) for name in ("culprit", "found", "expected")),
    ]  # fmt: skip


class Library:
    """The compiled collectives."""

    def __init__(self, loaded: ctypes.CDLL) -> None:
        if loaded.lockstep_group_bytes() != ctypes.sizeof(_Group):
            raise OSError("collectives.cpp and native_rounds.py do not fit each other")
        self.calls: dict[str, Any] = {}
        for name in (
            "all_gather_ints", "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast",
            "send", "receive",
        ):  # fmt: skip
            self.calls[name] = getattr(loaded, f"lockstep_{name}")
            self.calls[name].restype = ctypes.c_int64  # no types of arguments: they are given as C objects
        self.kinds = {
            dtype: kind for dtype, kind in _KINDS.items() if loaded.lockstep_sums(ctypes.c_int64(kind))
        }
        """Numbers of those types that it adds up."""


@cache
def load() -> Library | None:
    """The collectives, compiled first if need be; None (and a line in the log, once) where there are none."""
    if os.environ.get(OFF) == "0":
        logger.info("native collectives: off (%s=0)", OFF)
        return None
    try:
        path = compiler.compiled(SOURCE, sorted(compiler.INCLUDE.glob("*.hpp")), FLAGS)
        return Library(ctypes.CDLL(str(path)))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("native collectives: off, %s; Python does the same, slower", compiler.reason(error))
        return None


def make_rounds(
    library: Library | None,
    rank: int,
    layout: Layout,
    members: Sequence[Slots],
    standing: Standing,
    crowded: bool,
) -> Rounds:
    """One member's part, native if there is a library."""
    if library is None:
        return Rounds(rank, layout, members, standing, crowded=crowded)
    return NativeRounds(library, rank, layout, members, standing, crowded=crowded)


class NativeRounds(Rounds):
    """See :class:`parallel.communicators.rounds.Rounds`, which does what is not done here."""

    is_native = True

    def __init__(
        self,
        library: Library,
        rank: int,
        layout: Layout,
        members: Sequence[Slots],
        standing: Standing,
        *,
        crowded: bool,
    ) -> None:
        super().__init__(rank, layout, members, standing, crowded=crowded)
        size = layout.size
        self._kinds = library.kinds
        self._arguments = (ctypes.c_int64 * (_CALL_WORDS + 2 * size))()
        self._pack = struct.Struct(f"={_CALL_WORDS}q").pack_into
        self._pack_sizes = struct.Struct(f"={_CALL_WORDS + size}q").pack_into
        self._pack_two_sizes = struct.Struct(f"={_CALL_WORDS + 2 * size}q").pack_into
        self._ints = (ctypes.c_int64 * (size * _MOST_INTS))()
        self._ints_at = ctypes.addressof(self._ints)
        self._rows: dict[int, tuple[struct.Struct, struct.Struct]] = {}
        self._errors: list[BaseException] = []
        self._addresses = (ctypes.c_int64 * size)(*(member.address for member in members))
        self._terms = (ctypes.c_int64 * size)()
        self._group = _Group(
            rank=rank, size=size, slot_bytes=layout.slot_bytes, region_bytes=region_bytes(layout),
            two_step_bytes=TWO_STEP_BYTES, counter=layout.counter, notes=layout.notes,
            announced=layout.announced, sent=layout.sent, envelopes=layout.envelopes, taken=layout.taken,
            slots=layout.slots,
            letters=layout.letters, members=ctypes.addressof(self._addresses),
            terms=ctypes.addressof(self._terms), call=ctypes.addressof(self._arguments),
            check=_checking(standing, self._errors), crowded=crowded, budget=_LONGEST_BUDGET,
            letter_user=(-1, -1),
        )  # fmt: skip
        self._at = ctypes.byref(self._group)
        calls = library.calls
        self._all_gather_ints, self._all_gather = calls["all_gather_ints"], calls["all_gather"]
        self._reduce_scatter, self._all_to_all = calls["reduce_scatter"], calls["all_to_all"]
        self._all_reduce, self._broadcast = calls["all_reduce"], calls["broadcast"]
        self._send, self._receive = calls["send"], calls["receive"]

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        width = len(row)
        if width > _MOST_INTS:
            return super().all_gather_ints(row)
        if width not in self._rows:
            self._rows[width] = struct.Struct(f"={width}q"), struct.Struct(f"={width * self.size}q")
        one, all_rows = self._rows[width]
        num_bytes = 8 * width
        one.pack_into(self._ints, self.rank * num_bytes, *row)
        self._pack(self._arguments, 0, 0, self._ints_at, num_bytes, 0, 0)
        if outcome := self._all_gather_ints(self._at):
            self._fail(outcome)
        numbers = all_rows.unpack_from(self._ints)
        return [list(numbers[width * rank : width * (rank + 1)]) for rank in range(self.size)]

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        self._pack_sizes(self._arguments, 0, part.data_ptr(), whole.data_ptr(), whole.nbytes, 0, 0, *sizes)
        if outcome := self._all_gather(self._at):
            self._fail(outcome)

    def reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        kind = self._kinds.get(whole.dtype)
        if kind is None:
            return super().reduce_scatter(whole, total, sizes)
        self._pack_sizes(
            self._arguments, 0, whole.data_ptr(), total.data_ptr(), whole.nbytes, 0, kind, *sizes
        )
        if outcome := self._reduce_scatter(self._at):
            self._fail(outcome)
        return None

    def all_to_all(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
    ) -> None:
        self._pack_two_sizes(
            self._arguments, 0, outgoing.data_ptr(), incoming.data_ptr(), outgoing.nbytes, incoming.nbytes, 0,
            *send_sizes, *receive_sizes,
        )  # fmt: skip
        if outcome := self._all_to_all(self._at):
            self._fail(outcome)

    def all_reduce(self, given: torch.Tensor, total: torch.Tensor) -> None:
        kind = self._kinds.get(given.dtype)
        if kind is None:
            return super().all_reduce(given, total)
        self._pack(self._arguments, 0, given.data_ptr(), total.data_ptr(), given.nbytes, given.itemsize, kind)
        if outcome := self._all_reduce(self._at):
            self._fail(outcome)
        return None

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        self._pack(self._arguments, 0, 0, data.data_ptr(), data.nbytes, source, 0)
        if outcome := self._broadcast(self._at):
            self._fail(outcome)

    def send(self, given: torch.Tensor, to: int) -> None:
        self._pack(self._arguments, 0, given.data_ptr(), 0, given.nbytes, to, 0)
        if outcome := self._send(self._at):
            self._fail(outcome)

    def receive(self, data: torch.Tensor, source: int) -> None:
        self._pack(self._arguments, 0, 0, data.data_ptr(), data.nbytes, source, 0)
        if outcome := self._receive(self._at):
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
        self._standing.fail_on_bytes(group.culprit, group.found, group.expected)


def _checking(standing: Standing, errors: list[BaseException]) -> Any:
    """What the collectives call now and then while they wait until the word of a member is ``target``; 1:
    give up. It must not know the rounds: they would keep each other."""

    def check(rank: int, word: int, target: int) -> int:
        try:
            standing.check(rank, lambda: ctypes.c_int64.from_address(word).value >= target)
        except BaseException as error:  # noqa: BLE001 (raised by the caller: it may not pass through C++)
            errors[:] = [error]
            return 1
        return 0

    return _Check(check)
