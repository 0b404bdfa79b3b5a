"""How a member's segment is cut: words that tell how far it is, slots for what it gives."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch

from parallel.communicators.segments import Segment

_LINE_WORDS = 8  # words (int64) of a cache line
_PAGE_BYTES = 4096


class Slots:
    """One member's segment. Words that different members wait for stand on different cache lines."""

    def __init__(self, segment: Segment, size: int, slot_bytes: int, arena_bytes: int = 0) -> None:
        self.memory = segment.memory
        words = _Words(segment)
        self.counter = words.take(1)
        """Rounds that it has published."""
        self.state = words.take(1)
        """Whether it is still there: see the communicator."""
        self.notes = words.take(2 + size), words.take(2 + size)
        """By slot: call, rounds that follow, bytes for each member."""
        self.sent = [words.take(1) for _ in range(size)]
        """By receiver: letters written for it."""
        self.envelopes = [words.take(2) for _ in range(size)]
        """By receiver, for its letters in turn: slot + 2 * bytes."""
        self.taken = [words.take(1) for _ in range(size)]
        """By sender: letters read."""
        first = _words_bytes(size)
        self.slot_offsets = first, first + slot_bytes
        """Of what this member gives in every other round."""
        slots = torch.frombuffer(self.memory, dtype=torch.uint8, offset=first, count=2 * slot_bytes)
        self._slots = slots.split(slot_bytes)
        self._typed: dict[torch.dtype, list[torch.Tensor]] = {}
        address: int = slots.data_ptr()
        self.slot_addresses = address, address + slot_bytes
        self.letter_addresses = address + 2 * slot_bytes, address + 3 * slot_bytes
        """Of what it sends to one other."""
        self.arena = address + 4 * slot_bytes
        """Address of memory whose use is up to the group's owner: see the communicator."""
        self.arena_bytes = arena_bytes

    def slot(self, number: int, dtype: torch.dtype) -> torch.Tensor:
        """A slot as a tensor: [elements that fit]."""
        if dtype not in self._typed:
            self._typed[dtype] = [slot.view(dtype) for slot in self._slots]
        return self._typed[dtype][number]


class Span(NamedTuple):
    """A stretch of memory in some tensor, which the holder keeps alive. Copying it as such costs a tenth of
    what slices of tensors cost, which is what small tensors are all about."""

    address: int
    length: int

    def copy_to(self, place: int, low: int = 0, most: int = sys.maxsize) -> int:
        """At most so many bytes from ``low`` on; returns how many."""
        num_bytes = min(most, self.length - low)
        if num_bytes > 0:
            ctypes.memmove(place, self.address + low, num_bytes)
        return num_bytes

    def copy_from(self, place: int, low: int = 0, most: int = sys.maxsize) -> None:
        num_bytes = min(most, self.length - low)
        if num_bytes > 0:
            ctypes.memmove(self.address + low, place, num_bytes)


def span_of(tensor: torch.Tensor) -> Span:
    """All of a contiguous tensor."""
    return Span(tensor.data_ptr(), tensor.nbytes)


def spans_of(tensor: torch.Tensor, sizes: Sequence[int]) -> list[Span]:
    """Its parts of so many rows each, which must be all that it has."""
    spans, address = [], tensor.data_ptr()
    row_bytes = tensor.nbytes // max(1, len(tensor))
    for size in sizes:
        spans.append(Span(address, size * row_bytes))
        address += size * row_bytes
    return spans


class _Words:
    """Hands out the words at the beginning of a segment."""

    def __init__(self, segment: Segment) -> None:
        self._words, self._next = segment.words, 0

    def take(self, number: int) -> memoryview:
        first = self._next
        self._next += _lines(number) * _LINE_WORDS
        return self._words[first : first + number]


def segment_bytes(size: int, slot_bytes: int, arena_bytes: int = 0) -> int:
    """Of the segment of each member in a group of ``size``."""
    return _words_bytes(size) + 4 * slot_bytes + arena_bytes


def _words_bytes(size: int) -> int:
    lines = 2 + 2 * _lines(2 + size) + 3 * size
    return -(-lines * _LINE_WORDS * 8 // _PAGE_BYTES) * _PAGE_BYTES


def _lines(number: int) -> int:
    """Cache lines for this many words."""
    return -(-number // _LINE_WORDS)
