"""Plans: what a collective needs for tensors of one form, worked out once.

With small tensors nearly all of the time is what Python does around the exchange. A model gives the same few
forms again and again, so what depends on the form only is kept: that the sizes fit, the shape of the
result, the arguments of the native call, tensors that show the buffers for views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.rounds.arithmetic import check_own, check_rows, check_sizes, plain
from parallel.rounds.contract import CallForm, Rounds

MOST_PLANS = 512
"""Most plans kept at once; then all are forgotten."""


Prepare = Callable[[CallForm], Callable[..., Any]]
"""Makes a call of a form: see :meth:`parallel.rounds.contract.Rounds.prepare`."""


class Plan:
    """Plan of a call with tensors of one form."""

    __slots__ = ("alike", "dtype", "fresh", "receive_sizes", "run", "shape", "sizes")

    def __init__(self, form: CallForm, result: tuple[int, ...], run: Callable[..., Any]) -> None:
        """``result``: the shape of what is returned."""
        _, self.shape, self.dtype, self.sizes, self.receive_sizes = form
        self.alike = result == tuple(self.shape)
        """Whether the result has the shape of what is given."""
        self.fresh = result[0] if len(result) == 1 else result
        """Shape of the result in the form that torch takes fastest."""
        self.run = run
        """The exchange, as :meth:`parallel.rounds.contract.Rounds.prepare` makes it."""


class Plans:
    """One member's rounds, and its plans of their calls, kept by what they depend on."""

    def __init__(self, rounds: Rounds, begin: Callable[[str], None], prepare: Prepare | None = None) -> None:
        """``begin`` starts a call's deadline. ``prepare``: that of the rounds, if none makes their views."""
        self.rounds = rounds
        self._begin = begin
        self._prepare = prepare or rounds.prepare
        self._plans: dict[CallForm, Plan] = {}
        self._last: dict[str, Plan] = {}
        """The newest plan by call."""

    def start(
        self, call: str, tensor: torch.Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> tuple[Plan, torch.Tensor]:
        """The plan of a call that begins, and the tensor as the exchange wants it.

        Written for speed: this is most of what a small tensor takes.

        Raises:
            CollectiveError: the group is broken.
            ValueError: the tensor does not fit the sizes.
        """
        plan = self._last.get(call)
        if (
            plan is None
            or sizes != plan.sizes
            or receive_sizes != plan.receive_sizes
            or tensor.shape != plan.shape
            or tensor.dtype is not plan.dtype
        ):
            plan = self._find(call, tensor, sizes, receive_sizes)
        if not (tensor.is_contiguous() and tensor.is_cpu) or tensor.requires_grad:
            tensor = plain(tensor)
        self._begin(call)
        return plan, tensor

    def _find(
        self, call: str, tensor: torch.Tensor, sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> Plan:
        """The plan for this call, which is now its newest."""
        form = CallForm(call, tensor.shape, tensor.dtype, tuple(sizes), tuple(receive_sizes))
        plan = self._plans.get(form)
        if plan is None:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            result = _shape_of_result(form, tensor, self.rounds.rank, self.rounds.size)
            plan = self._plans[form] = Plan(form, result, self._prepare(form))
        # Lists and tuples are never equal: keep what is given now, by value.
        plan.sizes, plan.receive_sizes = sizes[:], receive_sizes[:]
        self._last[call] = plan
        return plan


def _shape_of_result(form: CallForm, tensor: torch.Tensor, rank: int, size: int) -> tuple[int, ...]:
    """Shape of what a member's call returns; all parts together where it returns a list.

    Raises:
        ValueError: the tensor does not fit the sizes.
    """
    call, shape, _, sizes, receive_sizes = form
    if call == "all_reduce":
        return tuple(shape)
    rows = check_sizes(call, sizes, size)
    check_rows(call, tensor, sizes[rank] if call.startswith("all_gather") else rows)
    if call.startswith("all_to_all"):
        rows = check_sizes(call, receive_sizes, size)
        check_own(call, sizes[rank], receive_sizes[rank])
    return (sizes[rank] if call == "reduce_scatter" else rows, *shape[1:])
