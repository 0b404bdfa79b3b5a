"""Health of a group over several hosts, which breaks as a whole.

This module loads no torch.

Waits in shared memory end when the links are broken, and what breaks the shared memory of a host breaks the
links, by which the other hosts know. Ranks in errors are always those of the whole group.

A wait may be one for a member that waits for another one. So that the member that does not come is blamed,
and not the one that waits for it, later stages of a call have a later deadline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallel.links.errors import CollectiveError
from parallel.links.last_words import Blame
from parallel.rounds.network_health import NetworkHealth
from parallel.rounds.shared_memory_health import SharedMemoryHealth

STAGE_SECONDS = 0.25
"""Least seconds between the deadlines of a call's successive stages.

A member that is late by less, and waits for one that does not come, is not blamed in its place.
"""
STAGE_PART = 0.25
"""The same as part of the time that a call has."""


class HostHealth(SharedMemoryHealth):
    """Health of the members on one host: broken as soon as the whole group is."""

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        timeout: float,
        why_broken: Callable[[], Blame | None],
        should_stop: Callable[[], bool],
    ) -> None:
        """``names``: the members' ranks in the whole group. ``why_broken`` asks for its health."""
        super().__init__(rank, timeout, should_stop, names)
        self._why_broken = why_broken
        self.whole_call: str | None = None
        """The call of the whole group that the next calls are parts of."""

    def begin(self, call: str) -> None:
        super().begin(self.whole_call or call)

    def _hopeless(self, rank: int) -> Blame | None:
        if self.reason is None and (blame := self._why_broken()) is not None:
            return blame
        return super()._hopeless(rank)


class MixedHealth:
    """Health of a whole group, of its links and of this host's shared memory.

    As a context it fails the whole group where what is done in it fails.
    """

    def __init__(self, network: NetworkHealth, host: HostHealth, local: Sequence[int]) -> None:
        """``local``: ranks on this member's host."""
        self.network, self.host = network, host
        self._local = local
        self._stage_seconds = max(STAGE_SECONDS, STAGE_PART * network.timeout)

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        # An error that is none of the group's leaves the call half made, too.
        reason, rank, evidence = self.host.blame or self.network.blame or ("it was aborted", None, "aborted")
        for part in (self.host, self.network):
            part.give_up(reason, rank, evidence)

    @property
    def reason(self) -> str | None:
        """Why the group is broken; None while it is not."""
        return self.network.reason

    @property
    def on_broken(self) -> Callable[[CollectiveError], None] | None:
        """Called once when a break is noticed between calls."""
        return self.network.on_broken

    @on_broken.setter
    def on_broken(self, call: Callable[[CollectiveError], None] | None) -> None:
        self.network.on_broken = call

    def begin(self, call: str) -> None:
        """Begin a call of the whole group.

        Raises:
            CollectiveError: the group is broken.
        """
        self.network.begin(call)
        self.host.whole_call = call
        self.host.grace = self.network.grace = 0.0

    def begin_on_host(self, call: str) -> None:
        """Begin a call whose waits for this host's members are native code's."""
        with self:
            self.host.begin(call)

    def stage(self, number: int) -> None:
        """Set later deadlines: what follows waits for members that wait themselves."""
        self.host.grace = self.network.grace = number * self._stage_seconds

    def check(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait can no longer end well; from now on all calls fail, here and at the
                others.
        """
        with self:
            if rank in self._local:
                self.stage(1)  # it may wait for a member of another host
                self.host.check(self._local.index(rank), has_arrived)
            else:
                self.network.check(rank, has_arrived)

    def abort(self) -> None:
        """Make all calls fail from now on, here and soon at the others."""
        self.network.abort()
        self.host.abort()

    def close(self) -> None:
        """Send the last word and release everything; no call comes any more."""
        self.network.close()
        self.host.close()
