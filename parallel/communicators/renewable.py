"""A member's end of successive groups, for layers that keep their communicator.

This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from parallel.communicators.base import CollectiveError, Communicator
from parallel.links.counts import LinkCount, link_counts

if TYPE_CHECKING:
    import torch


class RenewableCommunicator:
    """Communicator that passes every call on to the group of the current epoch.

    See :class:`parallel.communicators.base.Communicator`. In all groups this member has the same rank, and
    they have the same size.
    """

    def __init__(self, group: Communicator, *, blames: bool = True) -> None:
        """A communicator of this group.

        Without ``blames``, errors name no member: inside an instance, its members mean nothing to other
        instances.
        """
        self.group = group
        self.rank, self.size = group.rank, group.size
        self.processes = group.processes
        self._blames = blames

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group!r}>"

    @property
    def device(self) -> torch.device | None:
        """Kind of device whose tensors the group carries, too; None: the CPU's only."""
        found: torch.device | None = getattr(self.group, "device", None)
        return found

    def renew(self, group: Communicator) -> Communicator:
        """Use another group from the next call on; returns the one before. Between two calls."""
        assert (group.rank, group.size) == (self.rank, self.size)
        before, self.group, self.processes = self.group, group, group.processes
        return before

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self.group, name)(*arguments)
        except CollectiveError as error:
            if not self._blames:
                error.rank = None
            raise

    # ---- the contract

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        return self.group.on_broken

    @on_broken.setter
    def on_broken(self, call: Callable[[CollectiveError], None] | None) -> None:
        self.group.on_broken = call

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        rows: list[list[int]] = self._call("all_gather_ints", row)
        return rows

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole: torch.Tensor = self._call("all_gather", part, sizes)
        return whole

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        whole: torch.Tensor = self._call("all_gather_view", part, sizes)
        return whole

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        part: torch.Tensor = self._call("reduce_scatter", whole, sizes)
        return part

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        incoming: torch.Tensor = self._call("all_to_all", outgoing, send_sizes, receive_sizes)
        return incoming

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        parts: list[torch.Tensor] = self._call("all_to_all_views", outgoing, send_sizes, receive_sizes)
        return parts

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self._call("all_reduce", tensor)
        return total

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given: torch.Tensor = self._call("broadcast", tensor, source)
        return given

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._call("send", tensor, to)

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        letter: torch.Tensor = self._call("receive", like, source)
        return letter

    def link_counts(self) -> list[LinkCount]:
        """What the group's links have carried, by rank; none if it has none."""
        return link_counts(self.group)

    def abort(self) -> None:
        self.group.abort()

    def close(self) -> None:
        self.group.close()
