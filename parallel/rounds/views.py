"""Views: results that show data where it lies, in three buffers used in turn.

:mod:`parallel.communicators.base` says how long a view lasts. Tensors that show a buffer are kept by form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from parallel.rounds.contract import CallForm
from parallel.rounds.network_rounds import NetworkRounds
from parallel.rounds.shared_memory_health import SharedMemoryHealth
from parallel.rounds.shared_memory_rounds import SharedMemoryRounds
from parallel.rounds.slots import VIEW_BYTES, VIEWS, GroupMemory


class SharedMemoryViews:
    """Rounds in shared memory whose calls for views show what members have written."""

    def __init__(self, memory: GroupMemory, rounds: SharedMemoryRounds, health: SharedMemoryHealth) -> None:
        self._rank, self._layout, self._members, _ = memory
        self._rounds, self._health = rounds, health

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        """See :meth:`parallel.rounds.contract.Rounds.prepare`."""
        if form.call == "all_gather_view":
            return self._gathering(form)
        if form.call == "all_to_all_views":
            return self._exchanging(form)
        return self._rounds.prepare(form)

    def _gathering(self, form: CallForm) -> Callable[[torch.Tensor], torch.Tensor]:
        """All members' parts side by side in one buffer, or in a new tensor."""
        result, dtype = (sum(form.sizes), *form.shape[1:]), form.dtype
        if not 0 < math.prod(result) * dtype.itemsize <= self._layout.view_bytes:
            gather = self._rounds.prepare(form._replace(call="all_gather"))

            def copy(given: torch.Tensor) -> torch.Tensor:
                whole = given.new_empty(result)
                gather(given, whole)
                return whole

            return copy
        exchange = self._rounds.prepare(form)
        wholes: list[torch.Tensor | None] = [None] * VIEWS
        first, layout = self._members[0], self._layout

        def show(given: torch.Tensor) -> torch.Tensor:
            buffer = exchange(given)
            whole = wholes[buffer]
            if whole is None:
                whole = wholes[buffer] = first.rows(layout.view_at(buffer), result, dtype)
            return whole

        return show

    def _exchanging(self, form: CallForm) -> Callable[[torch.Tensor], list[torch.Tensor]]:
        """The members' parts for this one, by rank, where they have written them.

        A large part for itself is shown where it was given.
        """
        _, shape, dtype, sizes, receive_sizes = form
        rank, received = self._rank, list(receive_sizes)
        own = None
        if sizes[rank] * math.prod(shape[1:]) * dtype.itemsize > self._layout.own_bytes:
            own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
            received[rank] = 0
        exchange = self._rounds.prepare(form)
        copy = self._rounds.prepare(form._replace(call="all_to_all"))
        views: list[list[torch.Tensor] | None] = [None] * VIEWS

        def show(given: torch.Tensor) -> list[torch.Tensor]:
            buffer: int = exchange(given)
            if buffer == VIEWS:  # all know by now that the data of some member is too large
                # That takes more than one round, so who goes on to the next call has seen that all others are
                # done with what they gave.
                self._health.begin("all_to_all")
                incoming = given.new_empty((sum(receive_sizes), *shape[1:]))
                copy(given, incoming)
                return list(incoming.split(list(receive_sizes)))
            kept = views[buffer]
            if kept is None:
                at = self._layout.view_at(buffer, rank)
                kept = views[buffer] = [
                    member.rows(at, (rows, *shape[1:]), dtype)
                    for member, rows in zip(self._members, received, strict=True)
                ]
            parts = kept.copy()
            if own is not None:
                parts[rank] = given[own]
            return parts

        return show


class NetworkViews:
    """Rounds over links whose calls for views fill memory of the communicator's, in turn."""

    def __init__(self, rounds: NetworkRounds) -> None:
        self._rounds = rounds
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(VIEWS)]
        self._next = 0

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        """See :meth:`parallel.rounds.contract.Rounds.prepare`."""
        if form.call == "all_gather_view":
            gather = self._rounds.prepare(form._replace(call="all_gather"))
            views = _BufferViews((sum(form.sizes), *form.shape[1:]), form.dtype, None)

            def show(given: torch.Tensor) -> torch.Tensor:
                whole, _ = self._view(views)
                gather(given, whole)
                return whole

            return show
        if form.call == "all_to_all_views":
            exchange, rows = self._rounds.prepare(form._replace(call="all_to_all")), list(form.receive_sizes)
            views = _BufferViews((sum(rows), *form.shape[1:]), form.dtype, rows)

            def show_parts(given: torch.Tensor) -> list[torch.Tensor]:
                whole, parts = self._view(views)
                exchange(given, whole)
                return parts.copy()

            return show_parts
        return self._rounds.prepare(form)

    def _view(self, views: _BufferViews) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Memory for a result in the next buffer, and its parts by member."""
        if not 0 < views.num_bytes <= VIEW_BYTES:
            return views.cut(torch.empty(views.shape, dtype=views.dtype))
        number, self._next = self._next, (self._next + 1) % VIEWS
        if self._buffers[number].numel() < views.num_bytes:
            self._buffers[number] = torch.empty(views.num_bytes, dtype=torch.uint8)
        return views.of(number, self._buffers[number])


class _BufferViews:
    """Tensors of one form, kept as long as the buffer that they show."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, sizes: list[int] | None) -> None:
        """``sizes``: rows of the parts; None: there are none."""
        self.shape, self.dtype, self._sizes = shape, dtype, sizes
        self.num_bytes = math.prod(shape) * dtype.itemsize
        self._kept: list[tuple[torch.Tensor, tuple[torch.Tensor, list[torch.Tensor]]] | None] = [None] * VIEWS

    def of(self, number: int, buffer: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The tensor at the beginning of a buffer, and its parts."""
        kept = self._kept[number]
        if kept is None or kept[0] is not buffer:
            whole = buffer[: self.num_bytes].view(self.dtype).view(self.shape)
            kept = self._kept[number] = buffer, self.cut(whole)
        return kept[1]

    def cut(self, whole: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A result and its parts."""
        return whole, [] if self._sizes is None else list(whole.split(self._sizes))
