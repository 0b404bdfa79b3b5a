"""Groups of an epoch that are prepared in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from coordinator.messages import GroupPlan
from engine.groups.preparation import SETTLE, Preparation

FORM = GroupPlan(epoch=2, store="", peers=[], owners=(), token="")


class Group:
    """A group that knows what became of it."""

    def __init__(self) -> None:
        self.formed_at = time.monotonic()
        self.is_aborted, self.closed = False, threading.Event()

    def abort(self) -> None:
        self.is_aborted = True

    def close(self) -> None:
        self.closed.set()


def prepared(*, is_urgent: bool) -> tuple[Preparation[Group], Group, threading.Event]:
    """A preparation whose group is formed, the group, and whether it may be entered."""
    formed, ended = threading.Event(), threading.Event()
    groups: list[Group] = []

    def connect(form: GroupPlan, should_stop: Callable[[], bool]) -> Group:
        groups.append(Group())
        formed.set()
        return groups[0]

    preparation = Preparation(
        FORM, lambda form, should_stop: 0, connect, lambda ended_one: ended.set(), is_urgent=is_urgent
    )
    preparation.start()
    assert formed.wait(10)
    return preparation, groups[0], ended


@pytest.mark.parametrize("is_urgent", [False, True])
def test_a_group_formed_beside_steps_is_entered_some_steps_later(is_urgent: bool) -> None:
    preparation, group, ended = prepared(is_urgent=is_urgent)
    assert ended.wait(10)
    assert preparation.group is group
    assert is_urgent or preparation.formed_at - group.formed_at >= SETTLE


def test_a_group_that_is_not_wanted_any_more_is_closed_though_nobody_entered_it() -> None:
    preparation, group, ended = prepared(is_urgent=False)
    preparation.abandon()
    assert group.closed.wait(10)
    assert group.is_aborted
    assert preparation.group is None
    assert not ended.is_set(), "no member has been told"
