"""The contract of rounds: one member's exchanges, below the checks and deadlines of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

Sizes = Sequence[int]
"""Rows by rank."""


class CallForm(NamedTuple):
    """Form of a call: all that it depends on but the tensors themselves."""

    call: str
    """Name of the call, as in :mod:`parallel.rounds.notes`."""
    shape: Sequence[int]
    """Shape of the tensor that is given."""
    dtype: torch.dtype
    sizes: Sizes = ()
    """Rows of each member's part; of an all-to-all, those to each member."""
    receive_sizes: Sizes = ()
    """Rows from each member, of an all-to-all."""


class Rounds(Protocol):
    """One member's exchanges with all others.

    Tensors are contiguous and on the CPU; results go to tensors that are given.
    """

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def is_native(self) -> bool:
        """Whether collectives are calls into C++."""
        ...

    def prepare(self, form: CallForm) -> Callable[..., Any]:
        """The call bound to its form, for tensors: (given, result) -> None.

        Calls for views return tensors: (given) -> tensor, or tensors by rank.
        """
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of 64-bit integers, by rank."""
        ...

    def broadcast(self, data: torch.Tensor, source: int) -> None:
        """Fill the tensor with that of the source."""
        ...

    def send(self, given: torch.Tensor, to: int) -> None:
        """Send a tensor to one member."""
        ...

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Fill the tensor with one that a member sends."""
        ...


def bound_method(rounds: object, form: CallForm) -> Callable[..., Any]:
    """The method of a call's name, bound to sizes: what rounds in Python prepare."""
    method: Callable[..., Any] = getattr(rounds, form.call)
    if form.call == "all_reduce":
        return method
    if form.receive_sizes:
        return partial(method, send_sizes=form.sizes, receive_sizes=form.receive_sizes)
    return partial(method, sizes=form.sizes)
