"""Rounds over links, each collective in a single native call of ``native/network_collectives.cpp``.

The links are a table of ``native/links.hpp``, whatever fills it. Members that send to each other send as many
messages in the same order as if they ran the calls in Python.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import torch

from parallel.compiler import INCLUDE
from parallel.links.native_links import OFF, SLOWER, NativeLinks
from parallel.native_source import NativeLibrary, NativeSource
from parallel.rounds.arithmetic import even_sizes
from parallel.rounds.contract import CallForm
from parallel.rounds.messages import LinkHealth, Outgoing
from parallel.rounds.native_calls import (
    GIVEN_UP,
    LONGEST_BUDGET,
    OTHER_BYTES,
    OTHER_CALL,
    CheckErrors,
    CollectivesLibrary,
    IntsRooms,
    bound_call,
)
from parallel.rounds.network_rounds import NetworkRounds, RankedLinks
from parallel.rounds.notes import call_of, note_of

_CheckPeer = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class _Group(ctypes.Structure):
    """The struct of the same name in ``network_collectives.cpp``."""

    _fields_ = (
        ("links", ctypes.c_void_p),
        ("incoming", ctypes.c_void_p),
        ("check", _CheckPeer),
        ("crowded", ctypes.c_int64),
        ("budget", ctypes.c_double),
        ("shared", ctypes.c_int64),
        ("culprit", ctypes.c_int64),
        ("found", ctypes.c_int64),
        ("expected", ctypes.c_int64),
        ("headers", ctypes.c_void_p),
        ("terms", ctypes.c_void_p),
        ("chunks", ctypes.c_void_p),
    )


_ARGUMENTS = {
    **dict.fromkeys(("all_gather", "all_to_all", "reduce_scatter", "all_reduce", "all_reduce_in_parts"), 3),
    "broadcast_in_parts": 3,
    "all_gather_ints": 4,
    **dict.fromkeys(("broadcast", "send", "receive", "exchange"), 5),
}
"""How many each call has."""
SOURCE = NativeSource(
    path=INCLUDE / "network_collectives.cpp",
    headers=(INCLUDE,),
    structs={"network_group": _Group},
    off=OFF,
    absent="native collectives over the network: off,",
    instead=SLOWER,
)


class NetworkLibrary(CollectivesLibrary):
    """The compiled collectives over links."""

    def __init__(self, opened: NativeLibrary) -> None:
        super().__init__(opened, _ARGUMENTS, "network_")
        self.incoming_bytes = opened.call("network_incoming_bytes")
        self.chunk_bytes = opened.call("network_chunk_bytes")


@cache
def load() -> NetworkLibrary | None:
    """The compiled collectives, built first if need be; None where that fails.

    The reason is logged once.
    """
    return SOURCE.load(NetworkLibrary)


class NativeNetworkRounds(NetworkRounds):
    """One member's exchanges over links in C++.

    Sums of types that C++ does not add up are Python's.
    A call that fails aborts the links: what it was given may be freed then.
    """

    is_native = True

    def __init__(
        self, library: NetworkLibrary, links: NativeLinks, health: LinkHealth, *, crowded: bool
    ) -> None:
        super().__init__(links, health, crowded=crowded)
        self._library, self._links, self._health = library, links, health
        self._errors = CheckErrors()
        size = self.size
        self._incoming = ctypes.create_string_buffer(library.incoming_bytes * size)
        self._headers = (ctypes.c_int64 * (4 * size))()
        self._terms_at = (ctypes.c_int64 * size)()
        self._chunks = torch.empty(size * library.chunk_bytes, dtype=torch.uint8)
        self._group = _Group(
            links=links.address, incoming=ctypes.addressof(self._incoming),
            check=_checking(health, self._errors), crowded=crowded, budget=LONGEST_BUDGET, culprit=-1,
            headers=ctypes.addressof(self._headers), terms=ctypes.addressof(self._terms_at),
            chunks=self._chunks.data_ptr(),
        )  # fmt: skip
        self._at = ctypes.c_int64(ctypes.addressof(self._group))
        self._calls = library.calls
        self._ints = IntsRooms(self.rank, size, partial(_ints_call, self._calls["all_gather_ints"], self._at))
        self._exchange = self._calls["exchange"]

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        call, shape, dtype, sizes, receive_sizes = form
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        num_bytes = math.prod(shape) * dtype.itemsize
        kind, second_note = self._library.kinds.get(dtype), 0
        if call == "all_gather":
            note = note_of(call, sum(sizes) * row_bytes)
        elif call == "all_to_all":
            note, sizes = note_of(call, 0), (*sizes, *receive_sizes)
        elif kind is None:
            return super().prepare(form)
        else:
            note = note_of(call, num_bytes)
            if call == "all_reduce":
                sizes, row_bytes = even_sizes(math.prod(shape), self.size), dtype.itemsize
                if self.size > 2 and num_bytes > self.two_step_bytes:
                    call = "all_reduce_in_parts"
                    note, second_note = note_of("reduce_scatter", num_bytes), note_of("all_gather", num_bytes)
        words = (self._at.value, note, second_note, row_bytes, kind or 0, *sizes)
        return bound_call(self._calls[call], words, self._fail)

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._ints.all_gather(row, self._fail)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        num_bytes = data.nbytes
        note = note_of("broadcast", num_bytes)
        if self.size > 2 and num_bytes > self.spread_bytes:
            words = (self._at.value, note, 0, 1, 0, *even_sizes(num_bytes, self.size))
            block = (ctypes.c_int64 * len(words))(*words)
            outcome = self._calls["broadcast_in_parts"](ctypes.addressof(block), data.data_ptr(), source)
        else:
            outcome = self._calls["broadcast"](self._at, note, data.data_ptr(), num_bytes, source)
        if outcome:
            self._fail(outcome)

    def send(self, given: torch.Tensor, to: int) -> None:
        note, num_bytes = note_of("send", 0), given.nbytes
        if outcome := self._calls["send"](self._at, note, given.data_ptr(), num_bytes, to):
            self._fail(outcome)

    def receive(self, data: torch.Tensor, source: int) -> None:
        note, num_bytes = note_of("send", 0), data.nbytes
        if outcome := self._calls["receive"](self._at, note, data.data_ptr(), num_bytes, source):
            self._fail(outcome)

    def exchange(self, note: int, outgoing: Iterable[Outgoing], incoming: Iterable[Outgoing]) -> None:
        """Send and receive messages, at most one to and from each peer."""
        outgoing, incoming = list(outgoing), list(incoming)
        words = [word for each in (*outgoing, *incoming) for word in each]
        block = (ctypes.c_int64 * len(words))(*words)
        if outcome := self._exchange(self._at, note, ctypes.addressof(block), len(outgoing), len(incoming)):
            self._fail(outcome)

    def _fail(self, outcome: int) -> NoReturn:
        broken = self._links.broken
        self._links.abort()  # nothing that this call has posted is sent any more
        if outcome == GIVEN_UP:
            self._errors.raise_last()
        group = self._group
        if outcome == OTHER_CALL:
            reason = f"rank {group.culprit} calls {call_of(group.found)}"
            self._health.fail(reason, group.culprit, "closed")
        if outcome == OTHER_BYTES:
            self._health.fail_on_bytes(group.culprit, group.found, group.expected)
        assert broken is not None
        self._health.fail_on_links(*broken)


def make_rounds(links: RankedLinks, health: LinkHealth, *, crowded: bool) -> NetworkRounds:
    """One member's rounds over links, native where links and compiler are."""
    library = load() if isinstance(links, NativeLinks) else None
    if library is None or not isinstance(links, NativeLinks):
        return NetworkRounds(links, health, crowded=crowded)
    return NativeNetworkRounds(library, links, health, crowded=crowded)


def _ints_call(function: Any, group: ctypes.c_int64, address: int, num_bytes: int) -> Callable[[], int]:
    return partial(function, group, note_of("all_gather_ints", num_bytes), address, num_bytes)


def _checking(health: LinkHealth, errors: CheckErrors) -> Any:
    """A check that calls make now and then while they wait for a peer."""
    return _CheckPeer(lambda rank: errors.passes(lambda: health.check(rank, _never)))


def _never() -> bool:
    """Nothing arrives late: links break after all that was sent has come."""
    return False
