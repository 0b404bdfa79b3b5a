"""Queue of requests that wait for a slot, and their expected cost (pure).

The sums are for routers, which choose an instance by them. They are kept up as requests come and go, since a
queue may hold thousands.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from engine.scheduling.request import Request


class WaitingQueue:
    """Waiting requests in the order of their admission.

    Their tokens do not change here.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._requests: list[Request] = []
        self.num_tokens = 0
        self.num_uncached = 0
        """Tokens without those that the prefix cache is expected to have."""
        self.num_blocks = 0
        self.num_begun = 0
        """Requests that have some output: moved from another instance, or preempted."""

    def __repr__(self) -> str:
        return f"<WaitingQueue of {len(self._requests)}, {self.num_tokens} tokens>"

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        """Waiting request at this index; 0 is the first one."""
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def goes_before(self, request: Request) -> bool:
        """Whether the first waiting request has a strictly higher priority than this running one."""
        return bool(self._requests) and self._requests[0].priority < request.priority

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=lambda other: other.order)
        self._count(request, 1)

    def remove(self, request: Request) -> None:
        self._requests.remove(request)
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        num_tokens = len(request.token_ids)
        self.num_tokens += sign * num_tokens
        self.num_begun += sign * (request.num_output > 0)
        self.num_uncached += sign * request.num_expected
        self.num_blocks += sign * -(-num_tokens // self._block_size)
