"""The error of a broken group, and the evidence for it."""

from __future__ import annotations

from typing import Literal

Evidence = Literal["exited", "closed", "deadline", "aborted"]
"""How a member knows that a group is broken: a process has ended (certain).

An end of the group is closed, by a death or by somebody who gave up; somebody did not come in time; this end
was aborted or closed.
"""


class CollectiveError(RuntimeError):
    """A collective did not complete; says which and, where it is known, because of whom."""

    def __init__(self, message: str, rank: int | None = None, evidence: Evidence = "closed") -> None:
        super().__init__(message)
        self.rank = rank
        """Rank of the member to blame, as far as is known."""
        self.evidence = evidence
