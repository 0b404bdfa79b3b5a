"""Layout of a member's segment: words that count its progress, slots for its data."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from parallel.rounds.memory_order import Fence
from parallel.rounds.segments import Segment

_WORD_BYTES = 8
LINE_BYTES = 64
"""Size of a cache line.

Words that different members wait for are on different lines.
"""
_PAGE_BYTES = 4096
OWN_BYTES = 16 << 10
"""Most bytes of a member's own all-to-all part that are copied.

Copying so few takes less time than slicing a tensor.
"""
VIEWS = 3
"""Buffers for results that are read where they were written: see ``shared_memory``."""


SLOT_BYTES = 1 << 20
"""Size of each of a member's two slots and two letters.

Memory is used as far as tensors fill them.
"""
VIEW_BYTES = 64 << 20
"""Size of each buffer for views; memory is used as far as they are filled."""
ARENA_BYTES = 1 << 30
"""Size of a member's further memory for native code.

Memory is used as far as it is written.
"""


class SegmentSizes(NamedTuple):
    """Sizes of the parts of a member's segment."""

    slot_bytes: int = SLOT_BYTES
    view_bytes: int = VIEW_BYTES
    arena_bytes: int = ARENA_BYTES


USUAL_SIZES = SegmentSizes()
"""Sizes of the segments of all groups; tests have smaller ones."""


class SegmentLayout(NamedTuple):
    """Offsets of the parts of a segment, in bytes from its beginning."""

    size: int
    """Members of the group."""
    slot_bytes: int
    counter: int
    notes: int
    """Two words on the counter's line: a waiter for the counter reads them next."""
    state: int
    announced: int
    """Twice as many lines as 1 + ``size`` words need."""
    sent: int
    """Words on a line for each member, as those below."""
    envelopes: int
    taken: int
    slots: int
    """Two slots, then two for letters."""
    letters: int
    view_bytes: int
    views: int
    """:data:`VIEWS` buffers of ``view_bytes``."""
    arena: int
    num_bytes: int

    @classmethod
    def of(cls, size: int, sizes: SegmentSizes) -> SegmentLayout:
        """Layout of the segments of a group of ``size`` members."""
        slot_bytes, view_bytes, arena_bytes = sizes
        if view_bytes < slot_bytes:
            raise ValueError("a buffer for views cannot be smaller than a slot")
        announced = 2 * LINE_BYTES
        sent = announced + 2 * _lines(1 + size) * LINE_BYTES
        envelopes, taken, end = (sent + each * size * LINE_BYTES for each in (1, 2, 3))
        slots = -(-end // _PAGE_BYTES) * _PAGE_BYTES
        letters = slots + 2 * slot_bytes
        views = letters + 2 * slot_bytes
        arena = views + VIEWS * view_bytes
        return cls(
            size, slot_bytes, 0, _WORD_BYTES, LINE_BYTES, announced, sent, envelopes, taken, slots, letters,
            view_bytes, views, arena, arena + arena_bytes,
        )  # fmt: skip

    def view_at(self, buffer: int, region: int = 0) -> int:
        """Where a buffer for views begins, or what in it is for one member."""
        return self.views + buffer * self.view_bytes + region * self.view_region_bytes

    @property
    def region_bytes(self) -> int:
        """Part of a slot that is for one member."""
        return _region_bytes(self.slot_bytes, self.size)

    @property
    def view_region_bytes(self) -> int:
        """Part of a buffer for views that is for one member."""
        return _region_bytes(self.view_bytes, self.size)

    @property
    def own_bytes(self) -> int:
        """Bytes of a member's own part that are copied: see :data:`OWN_BYTES`."""
        return min(OWN_BYTES, self.view_region_bytes)


class Slots:
    """One member's segment as mapped memory: its words, slots, letters and arena."""

    def __init__(self, segment: Segment, layout: SegmentLayout) -> None:
        self.memory = segment.memory
        size, slot_bytes = layout.size, layout.slot_bytes

        def words(at: int, number: int) -> memoryview:
            return segment.words[at // _WORD_BYTES :][:number]

        self.counter = words(layout.counter, 1)
        """Rounds that this member has published."""
        self.notes = words(layout.notes, 2)
        """Note by slot: which call it belongs to."""
        self.state = words(layout.state, 1)
        """State of the member: see :mod:`parallel.rounds.shared_memory_health`."""
        line = _lines(1 + size) * LINE_BYTES
        self.announced = [words(layout.announced + slot * line, 1 + size) for slot in (0, 1)]
        """Rounds that follow and bytes for each member, by slot."""
        self.sent = [words(layout.sent + each * LINE_BYTES, 1) for each in range(size)]
        """Letters written, by receiver."""
        self.envelopes = [words(layout.envelopes + each * LINE_BYTES, 2) for each in range(size)]
        """Slot + 2 * bytes of letters in turn, by receiver."""
        self.taken = [words(layout.taken + each * LINE_BYTES, 1) for each in range(size)]
        """Letters read, by sender."""
        first = layout.slots
        self.slot_offsets = first, first + slot_bytes
        """Offsets of the two slots, used in alternate rounds."""
        slots = torch.frombuffer(self.memory, dtype=torch.uint8, offset=first, count=2 * slot_bytes)
        self._slots = slots.split(slot_bytes)
        self._typed: dict[torch.dtype, list[torch.Tensor]] = {}
        self.address: int = slots.data_ptr() - first
        """Address of the segment."""
        self.slot_addresses = self.address + first, self.address + first + slot_bytes
        self.letter_addresses = self.address + layout.letters, self.address + layout.letters + slot_bytes
        """Addresses of the data sent to a single member."""
        self.arena = self.address + layout.arena
        """Address of memory whose use is up to the group's owner: see the communicator."""
        self.arena_bytes = layout.num_bytes - layout.arena

    def rows(self, at: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that begins ``at`` this byte; it keeps the memory mapped."""
        count = math.prod(shape)
        with torch.inference_mode(False):  # it may be kept, and used in either mode
            if count == 0:
                return torch.empty(shape, dtype=dtype)
            return torch.frombuffer(self.memory, dtype=dtype, offset=at, count=count).view(*shape)

    def slot(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """A slot as a tensor: [elements that fit]."""
        if dtype not in self._typed:
            self._typed[dtype] = [slot.view(dtype) for slot in self._slots]
        return self._typed[dtype][number]


class GroupMemory(NamedTuple):
    """Segments of a group on one host, as one member has mapped them."""

    rank: int
    """Rank of this member."""
    layout: SegmentLayout
    members: Sequence[Slots]
    """Segments by rank."""
    fence: Fence
    """Fence between data and the words that publish it."""


class MemorySpan(NamedTuple):
    """A stretch of a tensor's memory, which the holder keeps alive.

    Copying it as such costs a tenth of what slices of tensors cost, which is what small tensors are all
    about.
    """

    address: int
    length: int

    def copy_to(self, target: int, low: int = 0, most: int = sys.maxsize) -> int:
        """Copy at most so many bytes from ``low`` on; returns how many."""
        num_bytes = min(most, self.length - low)
        if num_bytes > 0:
            ctypes.memmove(target, self.address + low, num_bytes)
        return num_bytes

    def copy_from(self, source: int, low: int = 0, most: int = sys.maxsize) -> None:
        num_bytes = min(most, self.length - low)
        if num_bytes > 0:
            ctypes.memmove(self.address + low, source, num_bytes)


def span_of(tensor: torch.Tensor) -> MemorySpan:
    """The span of a whole contiguous tensor."""
    return MemorySpan(tensor.data_ptr(), tensor.nbytes)


def spans_of(tensor: torch.Tensor, sizes: Sequence[int]) -> list[MemorySpan]:
    """Spans of a tensor's parts of so many rows each.

    The parts must be all that it has.
    """
    spans, address = [], tensor.data_ptr()
    row_bytes = tensor.nbytes // max(1, len(tensor))
    for size in sizes:
        spans.append(MemorySpan(address, size * row_bytes))
        address += size * row_bytes
    return spans


def _lines(number: int) -> int:
    """Cache lines for this many words."""
    return -(-number * _WORD_BYTES // LINE_BYTES)


def _region_bytes(num_bytes: int, size: int) -> int:
    return num_bytes // size // LINE_BYTES * LINE_BYTES
