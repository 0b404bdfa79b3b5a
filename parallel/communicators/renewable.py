"""A member's end of one group after another, for layers that keep what they were given (loads no torch)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from parallel.communicators.base import CollectiveError, Communicator

if TYPE_CHECKING:
    import torch


class RenewableCommunicator:
    """Passes every call on to the group of the current epoch; see
    :class:`parallel.communicators.base.Communicator`. All groups have the same size and place this member
    alike."""

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def __repr__(self) -> str:
        return f"<RenewableCommunicator {self._group!r}>"

    def renew(self, group: Communicator) -> Communicator:
        """Use another group from the next call on; returns the one before. Between two calls."""
        assert (group.rank, group.size) == (self._group.rank, self._group.size)
        before, self._group = self._group, group
        return before

    # ---- the contract

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def processes(self) -> dict[int, int]:
        return self._group.processes

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        return self._group.on_broken

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return self._group.all_gather_ints(row)

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._group.all_gather(part, sizes)

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self._group.reduce_scatter(whole, sizes)

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        return self._group.all_to_all(outgoing, send_sizes, receive_sizes)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._group.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        return self._group.broadcast(tensor, source)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._group.send(tensor, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        return self._group.receive(like, source)

    def abort(self) -> None:
        self._group.abort()

    def close(self) -> None:
        self._group.close()
