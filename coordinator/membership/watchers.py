"""Watchers of the mesh's view: who follows it, and what each is sent (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.membership.mesh_view import MeshView
from coordinator.membership.records import Instruction, Peer, Publish, Rules, Send
from coordinator.messages import AnswerChecks, Watch
from coordinator.views import ViewLog

MAX_WATCHERS = 10_000
"""Peers that get each change of the view; any more get only answers."""

NO_CHECKS = AnswerChecks()


class Watchers:
    """The peers that follow the view of the mesh."""

    def __init__(self, rules: Rules, view: MeshView, log: ViewLog) -> None:
        self._rules = rules
        self._view = view
        self._log = log
        self._heard_at: dict[Peer, float] = {}
        self._answers: dict[Peer, AnswerChecks] = {}
        """Shadow checks of those that are routers and have some."""
        self._newcomers: set[Peer] = set()
        """Watchers that need the whole view."""

    def __len__(self) -> int:
        return len(self._heard_at)

    def __repr__(self) -> str:
        return f"<Watchers {len(self)}, {len(self._newcomers)} new>"

    def watch(self, peer: Peer, message: Watch, now: float) -> Iterator[Instruction]:
        """Answer a watcher that is alive, and names the view that it has."""
        if peer in self._heard_at or len(self._heard_at) < MAX_WATCHERS:
            self._heard_at[peer] = now
            self._count(peer, message.answers)
        if self._log.has(message.series, message.number):
            yield Send(peer, self._log.current())
        elif len(self._newcomers) < MAX_WATCHERS:  # else it asks again
            self._newcomers.add(peer)
            self._log.touch_head()

    def push(self, now: float) -> Iterator[Instruction]:
        """Send what has changed to all, and the whole view to those that need it."""
        change = self._log.change(self._view.head(), self._view.members, now)
        followers = tuple(peer for peer in self._heard_at if peer not in self._newcomers)
        if change is not None and followers:
            yield Publish(followers, change)
        if self._newcomers:
            yield Publish(tuple(self._newcomers), self._log.whole())
            self._newcomers.clear()

    def forget_silent(self, now: float) -> None:
        """Forget watchers that have asked nothing for too long."""
        for peer, heard_at in list(self._heard_at.items()):
            if now - heard_at > self._rules.watcher_timeout:
                del self._heard_at[peer]
                self._count(peer, NO_CHECKS)

    def _count(self, peer: Peer, answers: AnswerChecks) -> None:
        """Take over the shadow checks of a router."""
        before = self._answers.pop(peer, NO_CHECKS)
        if answers != NO_CHECKS:
            self._answers[peer] = answers
        if answers != before:
            total = self._view.answers
            self._view.answers = AnswerChecks(
                total.checked + answers.checked - before.checked, total.wrong + answers.wrong - before.wrong
            )
