"""What a collective over shared memory needs for tensors of one form, worked out once.

With small tensors nearly all of the time is what Python does around the exchange. A model gives the same few
forms again and again, so what depends on the form only is kept: that the sizes fit, the shape of the
result, the arguments of the native call, tensors that show the buffers for views.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.rounds.arithmetic import check_own, check_rows, check_sizes, plain
from parallel.rounds.shared_memory_rounds import Rounds
from parallel.rounds.slots import VIEWS, SegmentLayout, Slots

MOST_PLANS = 512
"""Most plans kept at once; then all are forgotten."""

Key = tuple[str, Sequence[int], torch.dtype, Sequence[int], Sequence[int]]


class Plan:
    """Plan of a call with tensors of one form."""

    __slots__ = (
        "alike",
        "dtype",
        "fits",
        "fresh",
        "own",
        "receive_sizes",
        "result",
        "run",
        "shape",
        "sizes",
        "views",
    )

    def __init__(
        self, key: Key, result: tuple[int, ...], run: Callable[..., Any], fits: bool, own: slice | None
    ) -> None:
        _, self.shape, self.dtype, self.sizes, self.receive_sizes = key
        self.result = result
        """Shape of what is returned."""
        self.alike = result == tuple(self.shape)
        self.fresh = result[0] if len(result) == 1 else result
        """The same shape in the form that torch takes fastest."""
        self.run = run
        """The exchange.

        With a result to fill: (given, result) -> None; for views: (given) -> buffer.
        """
        self.fits = fits
        """Whether there is room for views of this form, as far as this member knows."""
        self.own = own
        """All-to-all: this member's part for itself, if it is not written to its segment."""
        self.views: list[Any] = [None] * VIEWS
        """Views by buffer: a tensor, or one for each rank.

        Made when first needed.
        """


class PlanCache(ABC):
    """One member's plans, kept by what they depend on."""

    def __init__(self) -> None:
        self._plans: dict[Key, Plan] = {}
        self.last: dict[str, Plan] = {}
        """The newest plan by call."""

    def find(
        self, call: str, tensor: torch.Tensor, sizes: Sequence[int] = (), receive_sizes: Sequence[int] = ()
    ) -> Plan:
        """The plan for this call, which is now its newest.

        Raises:
            ValueError: the tensor does not fit the sizes.
        """
        key = call, tensor.shape, tensor.dtype, tuple(sizes), tuple(receive_sizes)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._make(key, tensor)
        # Lists and tuples are never equal: keep what is given now, by value.
        plan.sizes, plan.receive_sizes = sizes[:], receive_sizes[:]
        self.last[call] = plan
        return plan

    def start(
        self, call: str, tensor: torch.Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> tuple[Plan, torch.Tensor]:
        """The plan of a call that begins, and the tensor as the exchange wants it.

        Written for speed: this is most of what a small tensor takes.

        Raises:
            ValueError: the tensor does not fit the sizes.
        """
        plan = self.last.get(call)
        if (
            plan is None
            or sizes != plan.sizes
            or receive_sizes != plan.receive_sizes
            or tensor.shape != plan.shape
            or tensor.dtype is not plan.dtype
        ):
            plan = self.find(call, tensor, sizes, receive_sizes)
        if not (tensor.is_contiguous() and tensor.is_cpu) or tensor.requires_grad:
            tensor = plain(tensor)
        return plan, tensor

    @abstractmethod
    def _make(self, key: Key, tensor: torch.Tensor) -> Plan:
        """The plan of a call that there is none of yet."""


class Plans(PlanCache):
    """One member's plans for exchanges through shared memory."""

    def __init__(self, rank: int, layout: SegmentLayout, members: Sequence[Slots], rounds: Rounds) -> None:
        super().__init__()
        self.rank, self.rounds = rank, rounds
        self._layout, self._members = layout, members

    def _make(self, key: Key, tensor: torch.Tensor) -> Plan:
        call, shape, dtype, sizes, receive_sizes = key
        result = shape_of_result(key, tensor, self.rank, self._layout.size)
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        own = None
        if call == "all_to_all_views" and sizes[self.rank] * row_bytes > self._layout.own_bytes:
            own = slice(sum(sizes[: self.rank]), sum(sizes[: self.rank + 1]))
        num_bytes = 0 if call == "all_reduce" else result[0] * row_bytes
        run = self.rounds.prepare(call, shape, dtype, sizes, receive_sizes)
        return Plan(key, result, run, 0 < num_bytes <= self._layout.view_bytes, own)

    def whole(self, plan: Plan, buffer: int) -> torch.Tensor:
        """View of all members' parts, side by side in one buffer.

        It is kept for the next time.
        """
        whole = self._members[0].rows(self._layout.view_at(buffer), plan.result, plan.dtype)
        plan.views[buffer] = whole
        return whole

    def parts(self, plan: Plan, buffer: int) -> list[torch.Tensor]:
        """Views of the members' parts for this one, by rank.

        They are kept for the next time.

        Where this member's own part is not there, something else is in its place.
        """
        at = self._layout.view_at(buffer, self.rank)
        received = list(plan.receive_sizes)
        if plan.own is not None:
            received[self.rank] = 0
        parts = [
            member.rows(at, (rows, *plan.shape[1:]), plan.dtype)
            for member, rows in zip(self._members, received, strict=True)
        ]
        plan.views[buffer] = parts
        return parts


def shape_of_result(key: Key, tensor: torch.Tensor, rank: int, size: int) -> tuple[int, ...]:
    """Shape of what a member's call returns; all parts together where it returns a list.

    Raises:
        ValueError: the tensor does not fit the sizes.
    """
    call, shape, _, sizes, receive_sizes = key
    if call == "all_reduce":
        return tuple(shape)
    rows = check_sizes(call, sizes, size)
    check_rows(call, tensor, sizes[rank] if call.startswith("all_gather") else rows)
    if call.startswith("all_to_all"):
        rows = check_sizes(call, receive_sizes, size)
        check_own(call, sizes[rank], receive_sizes[rank])
    return (sizes[rank] if call == "reduce_scatter" else rows, *shape[1:])
