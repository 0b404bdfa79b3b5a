"""A communicator whose members are threads of one process, for tests above the contract."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parallel.communicators.base import CollectiveError

TIMEOUT = 20.0


class _Board:
    """Where the members of a group put what they give."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=TIMEOUT)
        self.given: list[Any] = [None] * size
        self.letters: dict[tuple[int, int], queue.Queue[Any]] = {
            (source, to): queue.Queue() for source in range(size) for to in range(size)
        }


class ThreadCommunicator:
    """One member; see :class:`parallel.communicators.base.Communicator`."""

    def __init__(self, board: _Board, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.processes: dict[int, int] = {}
        self.device: torch.device | None = None
        """Kind of device whose tensors it carries, too."""
        self.on_broken: Callable[[CollectiveError], None] | None = None
        self._board = board

    def _exchange(self, given: Any) -> list[Any]:
        """Copies: what a member gave may change as soon as its call has returned."""
        try:
            self._board.given[self.rank] = _copied(given)
            self._board.barrier.wait()
            all_given = list(self._board.given)
            self._board.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise CollectiveError("a member did not come") from error
        return all_given

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        return [list(given) for given in self._exchange(tuple(row))]

    def all_gather(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        parts = self._exchange(part)
        assert [len(given) for given in parts] == list(sizes)
        return torch.cat(parts)

    def all_gather_view(self, part: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return self.all_gather(part, sizes)

    def reduce_scatter(self, whole: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        total = sum(self._exchange(whole)[1:], self._exchange(whole)[0])
        part: torch.Tensor = total.split(list(sizes))[self.rank]
        return part

    def all_to_all(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> torch.Tensor:
        assert sum(send_sizes) == len(outgoing)
        given = self._exchange(outgoing.split(list(send_sizes)))
        received = [parts[self.rank] for parts in given]
        assert [len(part) for part in received] == list(receive_sizes)
        return torch.cat(received)

    def all_to_all_views(
        self, outgoing: torch.Tensor, send_sizes: Sequence[int], receive_sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        incoming = self.all_to_all(outgoing, send_sizes, receive_sizes)
        return list(incoming.split(list(receive_sizes)))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        given = self._exchange(tensor)
        return sum(given[1:], given[0].clone())

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        given: torch.Tensor = self._exchange(tensor)[source]
        return given.clone()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        self._board.letters[self.rank, to].put(tensor.clone())

    def receive(self, like: torch.Tensor, source: int) -> torch.Tensor:
        try:
            letter: torch.Tensor = self._board.letters[source, self.rank].get(timeout=TIMEOUT)
        except queue.Empty as error:
            raise CollectiveError(f"nothing came from rank {source}") from error
        assert (letter.shape, letter.dtype) == (like.shape, like.dtype)
        return letter

    def abort(self) -> None:
        self._board.barrier.abort()

    def close(self) -> None:
        return


def _copied(given: Any) -> Any:
    if isinstance(given, torch.Tensor):
        return given.clone()
    return tuple(map(_copied, given)) if isinstance(given, tuple | list) else given


def thread_group(size: int) -> list[ThreadCommunicator]:
    """All members of a new group."""
    board = _Board(size)
    return [ThreadCommunicator(board, rank, size) for rank in range(size)]
