"""A communicator over one of torch's process groups, built from sends and receives.

All members talk to each other directly, so a collective costs one hop, and sums are taken in rank order, so
that all members have the same bits whatever carries them. What carries them is a :class:`Wire`: gloo's on a
CPU (:mod:`parallel.communicators.gloo`), NCCL's on devices (:mod:`parallel.communicators.nccl`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch

from parallel.communicators.base import CollectiveError, Evidence
from parallel.rounds.arithmetic import (
    TWO_STEP_BYTES,
    check_own,
    check_rows,
    check_sizes,
    even_sizes,
    plain,
    sum_in_rank_order,
)
from parallel.rounds.segments import this_host

Messages = Iterable[tuple[int, torch.Tensor]]
"""Tensors with the members that they go to, or come from."""


class Wire(Protocol):
    """The connections of one member to all others, and why they were cut."""

    reason: str | None
    """Why nothing can be sent any more."""
    blamed: int | None
    evidence: Evidence
    on_broken: Callable[[CollectiveError], None] | None

    def transfer(self, outgoing: Messages, incoming: Messages, seconds: float) -> RuntimeError | None:
        """Send and receive all of these at once.

        Empty ones are left out, on both sides.

        What the library says if that fails, and then everything is cut.
        """
        ...

    def cut(self, reason: str) -> None:
        """Make everything fail that waits, here or there, and all later transfers."""
        ...


class ProcessGroupCommunicator:
    """One member; see :class:`parallel.communicators.base.Communicator`."""

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        """A member of no group yet: forming sets :attr:`wire`."""
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._peers = [peer for peer in range(size) if peer != rank]
        self._reason_alone: str | None = None
        self.wire: Wire | None = None
        self.processes: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.rank} of {self.size}, {self._reason or 'open'}>"

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        """See the contract: deaths are noticed between calls too."""
        return self.wire.on_broken if self.wire is not None else None

    @on_broken.setter
    def on_broken(self, call: Callable[[CollectiveError], None] | None) -> None:
        if self.wire is not None:
            self.wire.on_broken = call

    @property
    def _reason(self) -> str | None:
        """Why the communicator is of no use any more."""
        return self.wire.reason if self.wire else self._reason_alone

    # ---- the contract

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        mine = self._numbers(row)
        gathered = self._gather("all_gather_ints", mine)
        rows: list[list[int]] = gathered.tolist()
        return rows

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_sizes("all_gather", sizes, self.size)
        check_rows("all_gather", part, sizes[self.rank])
        part = self._plain(part)
        whole = part.new_empty(sum(sizes), *part.shape[1:])
        parts = whole.split(list(sizes))
        parts[self.rank].copy_(part)
        self._exchange("all_gather", self._to_all(part), self._from_all(parts))
        return whole

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self.all_gather(part, sizes)

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        check_sizes("reduce_scatter", sizes, self.size)
        check_rows("reduce_scatter", whole, sum(sizes))
        outgoing = self._plain(whole).split(list(sizes))
        mine = outgoing[self.rank]
        received = mine.new_empty(self.size, *mine.shape)
        terms = [mine if member == self.rank else received[member] for member in range(self.size)]
        self._exchange("reduce_scatter", self._from_all(outgoing), self._from_all(terms))
        return sum_in_rank_order(terms, out=torch.empty_like(mine))

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        check_sizes("all_to_all", send_sizes, self.size)
        check_sizes("all_to_all", receive_sizes, self.size)
        check_rows("all_to_all", outgoing, sum(send_sizes))
        check_own("all_to_all", send_sizes[self.rank], receive_sizes[self.rank])
        sent = self._plain(outgoing).split(list(send_sizes))
        incoming = outgoing.new_empty(sum(receive_sizes), *outgoing.shape[1:])
        received = incoming.split(list(receive_sizes))
        received[self.rank].copy_(sent[self.rank])
        self._exchange("all_to_all", self._from_all(sent), self._from_all(received))
        return incoming

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        incoming = self.all_to_all(outgoing, send_sizes, receive_sizes)
        return list(incoming.split(list(receive_sizes)))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = self._plain(tensor).reshape(-1)
        if self.size > 2 and flat.nbytes > TWO_STEP_BYTES:
            sizes = even_sizes(flat.numel(), self.size)
            total = self.all_gather(self.reduce_scatter(flat, sizes), sizes)
        else:
            terms = self._gather("all_reduce", flat)
            total = sum_in_rank_order(terms.unbind(), out=torch.empty_like(flat))
        return total.reshape(tensor.shape)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        result = self._plain(tensor).clone()
        if source == self.rank:
            self._exchange("broadcast", self._to_all(result), ())
        else:
            self._exchange("broadcast", (), [(source, result)])
        return result

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._exchange("send", [(to, self._plain(tensor))], ())

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        result = torch.empty_like(self._plain(like))
        self._exchange("receive", (), [(source, result)])
        return result

    def abort(self) -> None:
        if self.wire is not None:
            self.wire.cut("it was aborted")
        else:
            self._reason_alone = self._reason_alone or "it was aborted"

    def close(self) -> None:
        if self.wire is not None:
            self._leave()
        else:
            self._reason_alone = self._reason_alone or "it was closed"

    # ---- what depends on the wire

    def _leave(self) -> None:
        """Close the wire in an orderly way."""
        raise NotImplementedError

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as the wire wants it: in one piece, outside autograd."""
        return plain(tensor)

    def _numbers(self, row: Sequence[int]) -> torch.Tensor:
        """A row of numbers where the wire carries them."""
        return torch.tensor(row, dtype=torch.int64)

    # ---- what it is built from

    def _gather(self, call: str, mine: torch.Tensor) -> torch.Tensor:
        """Tensors [n] of all members, stacked by rank: [size, n]."""
        gathered = mine.new_empty(self.size, mine.numel())
        gathered[self.rank] = mine
        self._exchange(call, self._to_all(mine), self._from_all(gathered.unbind()))
        return gathered

    def _to_all(self, tensor: torch.Tensor) -> Messages:
        return [(peer, tensor) for peer in self._peers]

    def _from_all(self, tensors: Sequence[torch.Tensor]) -> Messages:
        """Pairs of each peer and its own tensor, to be sent or filled."""
        return [(peer, tensors[peer]) for peer in self._peers]

    def _exchange(self, call: str, outgoing: Messages, incoming: Messages) -> None:
        """Send and receive all of these at once.

        Empty ones are left out, on both sides.
        """
        if self._reason is not None:
            raise self._error(call)
        if self.wire is not None:
            error = self.wire.transfer(outgoing, incoming, self._timeout)
            if error is not None:
                raise self._error(call) from error

    def _error(self, call: str) -> CollectiveError:
        message = f"{call} on rank {self.rank}: {self._reason}"
        if self.wire is None:
            return CollectiveError(message, None, "aborted")
        return CollectiveError(message, self.wire.blamed, self.wire.evidence)


def local_processes(said: Sequence[tuple[str, int]]) -> dict[int, int]:
    """Process ids by rank of those on this host, from (host, pid) of all."""
    here = this_host()
    return {rank: pid for rank, (host, pid) in enumerate(said) if host == here}


def first_line(error: Exception) -> str:
    """The message of gloo or NCCL without advice."""
    return str(error).partition("\n")[0].partition(". This is")[0]
