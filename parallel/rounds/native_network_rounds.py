"""Collectives over links, each in a single native call.

The calls are those of ``native/network_collectives.cpp``, over a table of ``native/links.hpp``, whatever
fills it. With small tensors time is what Python does around the call, so arguments are packed once for each
form of a tensor.

Messages: a header of 16 bytes (the note that says which call it belongs to, and the bytes of the payload),
then the payload. Members that send to each other send as many messages in the same order as if they ran the
calls in Python.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn, Protocol

import torch

from parallel.compiler import INCLUDE, is_x86
from parallel.links.errors import Evidence
from parallel.links.native_links import OFF, SLOWER, NativeLinks
from parallel.native_source import NativeLibrary, NativeSource
from parallel.rounds.arithmetic import even_sizes, sum_in_rank_order
from parallel.rounds.native_shared_memory_rounds import CollectivesLibrary
from parallel.rounds.shared_memory_rounds import CALLS, TWO_STEP_BYTES

SPREAD_BYTES = 256 << 10
"""Tensors of more bytes are broadcast in parts, if there are more than two members."""

_GIVEN_UP, _OTHER_CALL, _OTHER_BYTES = 1, 2, 3  # outcomes of a call; 0: done, 4: the links are broken
_MOST_INTS = 512
_LONGEST_BUDGET = 2e-3

_CheckPeer = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


class LinkHealth(Protocol):
    """What a call asks while it waits, and how it fails."""

    def check(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        What a member sent before it went is received before its links break, so ``has_arrived`` is always
        False.

        Raises:
            CollectiveError: the wait makes no sense any more.
        """
        ...

    def fail(self, reason: str, rank: int | None, evidence: Evidence) -> NoReturn:
        """The call has failed, because of member ``rank``, if it is known."""
        ...

    def fail_on_bytes(self, rank: int, sent: int, expected: int) -> NoReturn:
        """Member ``rank`` sends another number of bytes than is expected here."""
        ...

    def fail_on_links(self, peer: int | None, error: int) -> NoReturn:
        """A link is broken, or all were aborted.

        See :class:`parallel.links.native_links.BrokenLink`.
        """
        ...


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
    flags=("-mprefer-vector-width=512",) if is_x86() else (),
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


class NativeNetworkRounds:
    """One member's part in C++.

    Tensors are contiguous and on the CPU; results go to tensors that are given. A call that fails aborts the
    links: what it was given may be freed then.
    """

    is_native = True

    def __init__(
        self, library: NetworkLibrary, links: NativeLinks, health: LinkHealth, *, crowded: bool
    ) -> None:
        """The links remain the caller's, who closes them after the last call."""
        self.rank, self.size = links.rank, links.size
        self.two_step_bytes = TWO_STEP_BYTES
        """Tensors of more bytes are reduced in parts, if there are more than two members.

        All members have the same here, and change it before the first call that it matters to.
        """
        self.spread_bytes = SPREAD_BYTES
        """Tensors of more bytes are broadcast in parts, as above."""
        self._library, self._links, self._health = library, links, health
        self._ints: dict[int, tuple[Any, int, int, Callable[..., None]]] = {}
        self._errors: list[BaseException] = []
        size = self.size
        self._incoming = ctypes.create_string_buffer(library.incoming_bytes * size)
        self._headers = (ctypes.c_int64 * (4 * size))()
        self._terms = (ctypes.c_int64 * size)()
        self._chunks = torch.empty(size * library.chunk_bytes, dtype=torch.uint8)
        self._group = _Group(
            links=links.address, incoming=ctypes.addressof(self._incoming),
            check=_checking(health, self._errors), crowded=crowded, budget=_LONGEST_BUDGET, culprit=-1,
            headers=ctypes.addressof(self._headers), terms=ctypes.addressof(self._terms),
            chunks=self._chunks.data_ptr(),
        )  # fmt: skip
        self._at = ctypes.c_int64(ctypes.addressof(self._group))
        self._calls = library.calls
        self._all_gather_ints = library.calls["all_gather_ints"]
        self._exchange = library.calls["exchange"]

    def prepare(
        self,
        call: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        sizes: Sequence[int],
        receive_sizes: Sequence[int] = (),
    ) -> Callable[..., None]:
        """The method of this name, bound to a shape, a type and sizes.

        Only the tensors themselves remain to be given.
        """
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        num_bytes = math.prod(shape) * dtype.itemsize
        if call == "all_gather":
            return self._bound(call, _note(call, sum(sizes) * row_bytes), row_bytes, sizes)
        if call == "all_to_all":
            return self._bound(call, _note(call, 0), row_bytes, (*sizes, *receive_sizes))
        kind = self._library.kinds.get(dtype)
        in_parts = self.size > 2 and num_bytes > self.two_step_bytes
        if call == "all_reduce":
            sizes, row_bytes = even_sizes(math.prod(shape), self.size), dtype.itemsize
        if kind is None:
            return self._reducing_in_python(call, shape, dtype, sizes, in_parts)
        if call == "all_reduce" and in_parts:
            notes = _note("reduce_scatter", num_bytes), _note("all_gather", num_bytes)
            return self._bound("all_reduce_in_parts", notes[0], row_bytes, sizes, kind, notes[1])
        return self._bound(call, _note(call, num_bytes), row_bytes, sizes, kind)

    def _bound(
        self, call: str, note: int, row_bytes: int, sizes: Sequence[int], kind: int = 0, second_note: int = 0
    ) -> Callable[..., None]:
        """The native function, bound to the block of arguments that stay from call to call."""
        words = (self._at.value, note, second_note, row_bytes, kind, *sizes)
        block = (ctypes.c_int64 * len(words))(*words)
        at, fail, function = ctypes.c_int64(ctypes.addressof(block)), self._fail, self._calls[call]

        def run(
            given: torch.Tensor, result: torch.Tensor, block: ctypes.Array[ctypes.c_int64] = block
        ) -> None:  # which keeps the block
            if outcome := function(at, given.data_ptr(), result.data_ptr()):
                fail(outcome)

        return run

    def _reducing_in_python(
        self, call: str, shape: Sequence[int], dtype: torch.dtype, sizes: Sequence[int], in_parts: bool
    ) -> Callable[..., None]:
        """Sum of elements that native code does not add up: same messages, then torch."""
        size, rank = self.size, self.rank
        num_bytes = math.prod(shape) * dtype.itemsize
        if call == "all_reduce" and in_parts:
            flat = (math.prod(shape),)
            scatter = self._reducing_in_python("reduce_scatter", flat, dtype, sizes, in_parts)
            gather = self._bound("all_gather", _note("all_gather", num_bytes), dtype.itemsize, sizes)

            def reduce_in_parts(given: torch.Tensor, total: torch.Tensor) -> None:
                mine = total.view(-1).split(list(sizes))[rank]
                scatter(given.view(-1), mine)
                gather(mine, total)

            return reduce_in_parts
        if call == "all_reduce":
            terms_shape = (size, *shape)
            exchange = self._bound("all_gather", _note(call, num_bytes), num_bytes, [1] * size)
        else:
            terms_shape = (size, sizes[rank], *shape[1:])
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            exchange = self._bound(
                "all_to_all", _note(call, num_bytes), row_bytes, (*sizes, *([sizes[rank]] * size))
            )

        def reduce(given: torch.Tensor, total: torch.Tensor) -> None:
            terms = given.new_empty(terms_shape)
            exchange(given, terms)
            sum_in_rank_order(list(terms), out=total)

        return reduce

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        width = len(row)
        if width not in self._ints:
            room = (ctypes.c_int64 * max(1, self.size * width))()
            note = _note("all_gather_ints", 8 * width)
            packing = note, ctypes.addressof(room), struct.Struct(f"={width}q").pack_into
            if len(self._ints) >= _MOST_INTS:
                self._ints.clear()
            self._ints[width] = room, *packing
        room, note, address, pack = self._ints[width]
        pack(room, self.rank * 8 * width, *row)
        if outcome := self._all_gather_ints(self._at, note, address, 8 * width):
            self._fail(outcome)
        numbers: list[int] = room[:]
        return [numbers[width * rank : width * (rank + 1)] for rank in range(self.size)]

    def all_gather(self, part: torch.Tensor, whole: torch.Tensor, sizes: Sequence[int]) -> None:
        """Gather parts of ``sizes[rank]`` rows into the whole."""
        self.prepare("all_gather", part.shape, part.dtype, sizes)(part, whole)

    def reduce_scatter(self, whole: torch.Tensor, total: torch.Tensor, sizes: Sequence[int]) -> None:
        """Sum all wholes into this member's total."""
        self.prepare("reduce_scatter", whole.shape, whole.dtype, sizes)(whole, total)

    def all_to_all(
        self,
        outgoing: torch.Tensor,
        incoming: torch.Tensor,
        send_sizes: Sequence[int],
        receive_sizes: Sequence[int],
    ) -> None:
        """Exchange rows with all members, in rank order."""
        self.prepare("all_to_all", outgoing.shape, outgoing.dtype, send_sizes, receive_sizes)(
            outgoing, incoming
        )

    def all_reduce(self, given: torch.Tensor, total: torch.Tensor) -> None:
        """Sum over all members into the total."""
        self.prepare("all_reduce", given.shape, given.dtype, ())(given, total)

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Send the source's tensor to all others."""
        num_bytes = data.nbytes
        note = _note("broadcast", num_bytes)
        if self.size > 2 and num_bytes > self.spread_bytes:
            words = (self._at.value, note, 0, 1, 0, *even_sizes(num_bytes, self.size))
            block = (ctypes.c_int64 * len(words))(*words)
            outcome = self._calls["broadcast_in_parts"](ctypes.addressof(block), data.data_ptr(), source)
        else:
            outcome = self._calls["broadcast"](self._at, note, data.data_ptr(), num_bytes, source)
        if outcome:
            self._fail(outcome)

    def send(self, given: torch.Tensor, to: int) -> None:
        """Send a tensor to one member."""
        note, num_bytes = _note("send", 0), given.nbytes
        if outcome := self._calls["send"](self._at, note, given.data_ptr(), num_bytes, to):
            self._fail(outcome)

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive a tensor from one member."""
        note, num_bytes = _note("send", 0), data.nbytes
        if outcome := self._calls["receive"](self._at, note, data.data_ptr(), num_bytes, source):
            self._fail(outcome)

    def exchange(
        self,
        note: int,
        outgoing: Sequence[tuple[int, int, int]],
        incoming: Sequence[tuple[int, int, int]],
    ) -> None:
        """Exchange messages with some members: (peer, address, bytes) of each.

        There is at most one to a peer, and one from it.
        """
        words = [word for each in (*outgoing, *incoming) for word in each]
        block = (ctypes.c_int64 * len(words))(*words)
        if outcome := self._exchange(self._at, note, ctypes.addressof(block), len(outgoing), len(incoming)):
            self._fail(outcome)

    def _fail(self, outcome: int) -> NoReturn:
        broken = self._links.broken
        self._links.abort()  # nothing that this call has posted is sent any more
        if outcome == _GIVEN_UP:
            error = self._errors.pop()
            try:
                raise error
            finally:
                del error  # it knows this frame
        group = self._group
        if outcome == _OTHER_CALL:
            num_bytes, call = divmod(group.found, len(CALLS))
            reason = f"rank {group.culprit} calls {CALLS[call]} of {num_bytes} bytes"
            self._health.fail(reason, group.culprit, "closed")
        if outcome == _OTHER_BYTES:
            self._health.fail_on_bytes(group.culprit, group.found, group.expected)
        assert broken is not None
        self._health.fail_on_links(*broken)


def _note(call: str, num_bytes: int) -> int:
    """Number that the headers of a call have on all members."""
    return CALLS.index(call) + num_bytes * len(CALLS)


def _checking(health: LinkHealth, errors: list[BaseException]) -> Any:
    """A check that calls make now and then while they wait for a peer.

    A returned 1 means: give up.
    """

    def check(rank: int) -> int:
        try:
            health.check(rank, _never)
        except BaseException as error:  # noqa: BLE001 (raised by the caller: it may not pass through C++)
            errors[:] = [error]
            return 1
        return 0

    return _CheckPeer(check)


def _never() -> bool:
    return False
