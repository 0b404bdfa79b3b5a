"""A group that forms, as one of its members sees it.

This module loads no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace

from parallel.links.meeting_contract import Meeting, Prefixed
from parallel.links.rendezvous import exchange


@dataclass(frozen=True)
class FormingGroup:
    """One member's rank in a new group, the meeting place, and bounds of waits."""

    meeting: Meeting
    """The group's own part of a meeting place."""
    rank: int
    """Rank of this member, below ``size``."""
    size: int
    _: KW_ONLY
    timeout: float
    """Seconds that each call of the formed group may take."""
    forming_timeout: float | None = None
    """Seconds to wait for the others while the group forms; None: ``timeout``."""
    should_stop: Callable[[], bool] | None = None
    """Asked while others have not come; forming ends with an error when it returns True."""

    @property
    def patience(self) -> float:
        """Seconds to wait for the others while the group forms."""
        return self.timeout if self.forming_timeout is None else self.forming_timeout

    def at(self, name: str) -> FormingGroup:
        """The same group at a part of the meeting place that has this name."""
        return replace(self, meeting=Prefixed(self.meeting, name))

    def exchange(self, mine: bytes, names: Sequence[int] | None = None) -> list[bytes]:
        """The values of all members by rank; see :func:`parallel.links.rendezvous.exchange`."""
        return exchange(
            self.meeting, self.rank, self.size, mine, timeout=self.patience, should_stop=self.should_stop,
            names=names,
        )  # fmt: skip
