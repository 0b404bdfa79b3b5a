"""Order and window of the inputs of one pooled request (pure).

Each input is a request of the mesh by itself, so that instances share a large batch by its tokens, and a
death moves only the inputs under way there. No more are under way than :data:`MOST_TOKENS` hold. The callers
are HTTP requests, lines of batches, and the class ``LLM``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

MOST_TOKENS = 131_072
"""Tokens of one request's inputs that are under way at once."""
MOST_INPUTS = 512
"""Inputs of one request that are under way at once."""
MOST_OF_LINE = 64
"""Inputs of one batch line that are under way or wait for a place."""

Answer = TypeVar("Answer")


class PooledBatch(Generic[Answer]):
    """Inputs of a request: which may be sent, and the answers so far."""

    def __init__(self, sizes: Sequence[int], most: int = MOST_INPUTS) -> None:
        """``sizes``: the number of tokens of each input; ``most``: inputs under way at once."""
        self._sizes = sizes
        self._most = most
        self._next = 0
        self._under_way: set[int] = set()
        self._num_tokens = 0
        self._answers: dict[int, Answer] = {}

    def __repr__(self) -> str:
        return f"<PooledBatch {len(self._answers)} of {len(self._sizes)}, {len(self._under_way)} under way>"

    @property
    def is_complete(self) -> bool:
        """Whether each input has its answer."""
        return len(self._answers) == len(self._sizes)

    def to_send(self) -> Iterator[int]:
        """Inputs to be sent now, in order; each counts as sent once it is given."""
        while self._next < len(self._sizes):
            size = self._sizes[self._next]
            is_full = len(self._under_way) >= self._most or self._num_tokens + size > MOST_TOKENS
            if self._under_way and is_full:
                return
            index, self._next = self._next, self._next + 1
            self._under_way.add(index)
            self._num_tokens += size
            yield index

    def take(self, index: int, answer: Answer) -> bool:
        """Keep the answer to an input; False for one that is not under way."""
        if index not in self._under_way:
            return False
        self._under_way.remove(index)
        self._num_tokens -= self._sizes[index]
        self._answers[index] = answer
        return True

    def answers(self) -> list[Answer]:
        """The answers in the order of the inputs, once all are there."""
        assert self.is_complete
        return [self._answers[index] for index in range(len(self._sizes))]
