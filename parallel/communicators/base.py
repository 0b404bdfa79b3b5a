"""The contract of a communicator: how the members of one group exchange tensors.

This module loads no torch.

A group has a fixed number of members and belongs to one epoch; another epoch gets other communicators.
Every call is collective (all members make the same calls in the same order) and bounded: when a member
dies, does not come within the timeout, or somebody calls :meth:`Communicator.abort`, the call raises
:class:`CollectiveError` on every member that waits, and the communicator is of no use any more.

Sizes may be zero on some members, or on all. What a call returns is memory of the caller's own, unless its
name ends in ``view`` or ``views``. Those may return memory that other members read and write, which saves
copies:

- A view is only read, never written.
- It lasts while this member makes its next two calls for views of this group, of either kind, and may be
  given to them. When the second of them returns it is over: what it shows may change at any time. Other calls
  do not count. Who needs it for longer copies it in time.
- A failure or the end of the group changes nothing about that.

Transports without common memory return ordinary tensors there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from parallel.links.errors import CollectiveError, Evidence

if TYPE_CHECKING:
    import torch

__all__ = ["CollectiveError", "Communicator", "Evidence"]


def carries(group: Communicator, tensor: torch.Tensor) -> bool:
    """Whether a group takes a tensor as it is.

    That is one of the CPU, or of the kind of device that it connects."""
    device = getattr(group, "device", None)
    return bool(tensor.is_cpu) or (device is not None and device.type == tensor.device.type)


class Communicator(Protocol):
    """One member's end. Calls are made from one thread; only :meth:`abort` may come from another."""

    rank: int
    size: int
    on_broken: Callable[[CollectiveError], None] | None
    """Called once, in a communicator's thread, when it notices a broken group between calls.

    Not every transport does so.
    """

    @property
    def processes(self) -> dict[int, int]:
        """Process ids by rank.

        Only those of other members in the same host and process-id namespace are listed.
        """
        ...

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        """Every member's row of (equally many) 64-bit integers, by rank.

        This is the header exchange, so latency counts.
        """
        ...

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Parts [sizes[rank], ...] of all members, concatenated by rank: [sum(sizes), ...]."""
        ...

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """As :meth:`all_gather`; what it returns may be a view."""
        ...

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Each member's part [sizes[rank], ...] of the sum of all wholes.

        ``whole`` is [sum(sizes), ...]; terms are added in rank order.
        """
        ...

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        """Send rows [sum(send_sizes), ...] to the members; return those received, in rank order.

        The result is [sum(receive_sizes), ...]. ``receive_sizes[r]`` must be what r sends to this one.
        """
        ...

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """As :meth:`all_to_all`, but with a tensor [receive_sizes[r], ...] for each rank r.

        These may be views, and what this member gives itself may be part of ``outgoing``.
        """
        ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all members, in rank order, so that all have the same bits.

        A new tensor.
        """
        ...

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """The tensor of ``source``; the others give one of the same shape and type.

        A new tensor.
        """
        ...

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor to one member, which calls :meth:`receive`.

        May or may not wait until it does, so two members never both send to each other before they receive.
        """
        ...

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        """Receive a tensor of the shape and type of ``like`` from one member."""
        ...

    def abort(self) -> None:
        """Make this and every later call fail.

        Calls fail on this member at once, and on the others as soon as they need this member. Safe from any
        thread, and when called twice.
        """
        ...

    def close(self) -> None:
        """Release all resources, after this member's last call.

        The last calls of others are not disturbed.
        """
        ...
