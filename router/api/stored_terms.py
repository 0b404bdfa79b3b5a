"""Terms of stored answers and of batches' lines, which another router must repeat."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.requests import Request

from router.mesh import Generates
from router.metrics.request_histograms import CountedRequests

WaitForTurn = Callable[[], Awaitable[None]]


@dataclass(frozen=True)
class StoredTerms:
    """Terms of one stored answer."""

    created: int
    """Seconds since 1970."""
    seed: int
    """Seed of the seeds of its samples."""
    mesh: Generates
    """Where its samples are generated."""
    is_whole: bool = False
    """Whether it comes in one piece unless its request asks for a stream."""
    is_limited: bool = True
    """Whether it takes from the quota of its API key."""
    counts: CountedRequests | None = None
    """Where it is counted; None: with the requests of clients."""
    wait_for_turn: WaitForTurn | None = None
    """Waits until an answer that stop strings may end may be made."""


def stored_terms(request: Request) -> StoredTerms | None:
    """The terms of a request whose answer is stored; None for all others."""
    found: StoredTerms | None = getattr(request.state, "stored", None)
    return found
