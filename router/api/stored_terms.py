"""What another router must repeat to make the same stored answer."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from router.mesh import Generates


@dataclass(frozen=True)
class StoredTerms:
    """Terms of one stored answer."""

    created: int
    """Seconds since 1970."""
    seed: int
    """Seed of the seeds of its samples."""
    mesh: Generates
    """Where its samples are generated."""


def stored_terms(request: Request) -> StoredTerms | None:
    """The terms of a request whose answer is stored; None for all others."""
    found: StoredTerms | None = getattr(request.state, "stored", None)
    return found
