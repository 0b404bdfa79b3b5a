"""Messages about groups between an engine and its workers.

The workers are the other ends of real channels.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from coordinator.messages import GroupPlan
from engine.executor import group_control
from engine.executor.channel import Channel
from engine.executor.group_control import GroupControl
from engine.executor.group_messages import (
    AbandonGroups,
    Counts,
    ExpertsRead,
    FromGroups,
    GroupsFormed,
    NotPrepared,
    PrepareGroups,
    TellCounts,
    ToGroups,
)
from engine.model.checkpoint import CheckpointError, ReadingStopped
from parallel.communicators.base import CollectiveError
from tests.waiting import until

PATIENCE = 20.0
FORM = GroupPlan(epoch=3, store="", peers=[], owners=())
DECODER: msgspec.msgpack.Decoder[ToGroups] = msgspec.msgpack.Decoder(ToGroups)


class Ends:
    """Two workers' ends."""

    def __init__(self) -> None:
        pairs = [socket.socketpair() for _ in range(2)]
        self.silences: list[int | None] = []
        self.control = GroupControl([Channel(ours) for ours, _ in pairs], self._on_silence)
        self.workers = [Channel(theirs) for _, theirs in pairs]

    def _on_silence(self) -> None:
        self.silences.append(self.control.silent)

    def say(self, worker: int, message: FromGroups) -> None:
        self.workers[worker].send(msgspec.msgpack.encode(message))

    def hear(self, worker: int) -> ToGroups:
        return DECODER.decode(self.workers[worker].receive(0.0))


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.control.close()
    for worker in ends.workers:
        worker.close()


def never() -> bool:
    return False


def test_all_workers_are_told_and_all_answers_collected(ends: Ends) -> None:
    prepare = PrepareGroups(FORM, place=1, free_bytes=7)
    ends.control.tell(prepare)
    assert [ends.hear(0), ends.hear(1)] == [prepare, prepare]
    ends.say(1, ExpertsRead(3, num_read=5))
    ends.say(1, GroupsFormed(3))  # it is ahead of the other one
    ends.say(0, ExpertsRead(2, num_read=9))  # of an epoch before
    ends.say(0, ExpertsRead(3, num_read=4))
    read = ends.control.collect(3, ExpertsRead, PATIENCE, never)
    assert [each.num_read for each in read] == [4, 5]
    threading.Timer(0.05, ends.say, (0, GroupsFormed(3))).start()
    assert len(ends.control.collect(3, GroupsFormed, PATIENCE, never)) == 2


@pytest.mark.parametrize(
    ("failed", "error"),
    [
        (NotPrepared(3, "CheckpointError", "no room"), CheckpointError),
        (NotPrepared(3, "ValueError", "several hosts"), ValueError),
        (NotPrepared(3, "KeyError", "x"), RuntimeError),
    ],
)
def test_what_one_worker_cannot_ends_it_for_all(
    ends: Ends, failed: NotPrepared, error: type[Exception]
) -> None:
    ends.say(0, ExpertsRead(3, 1))
    ends.say(1, failed)
    with pytest.raises(error, match=failed.text):
        ends.control.collect(3, ExpertsRead, PATIENCE, never)
    assert ends.hear(0) == AbandonGroups(3)


def test_a_worker_says_which_instance_is_to_blame(ends: Ends) -> None:
    ends.say(0, NotPrepared(3, "CollectiveError", "it died", suspect=2, evidence="exited"))
    with pytest.raises(CollectiveError) as caught:
        ends.control.collect(3, GroupsFormed, PATIENCE, never)
    assert (caught.value.rank, caught.value.evidence) == (2, "exited")


def test_a_later_epoch_ends_the_waiting(ends: Ends) -> None:
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(ReadingStopped):
        ends.control.collect(3, ExpertsRead, PATIENCE, stop.is_set)
    assert [ends.hear(0), ends.hear(1)] == [AbandonGroups(3)] * 2


def test_nobody_waits_for_a_worker_that_is_gone_or_silent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_control, "SILENCE_TIMEOUT", 0.2)
    ends.control.ask_who_lives()
    assert ends.hear(0) == TellCounts()
    ends.say(0, Counts({5: 2}, spare_bytes=1))
    with pytest.raises(CollectiveError, match="does not answer"):
        ends.control.collect(3, ExpertsRead, PATIENCE, never)
    assert ends.control.silent == 1
    assert ends.control.counts == [Counts({5: 2}, spare_bytes=1), None]
    ends.workers[1].close()
    until(lambda: ends.control._ended)
    began = time.monotonic()
    ends.control.silent = None
    with pytest.raises(CollectiveError, match="is gone"):
        ends.control.collect(4, ExpertsRead, PATIENCE, never)
    assert time.monotonic() - began < PATIENCE / 2


def test_a_worker_that_falls_silent_is_noticed_while_steps_go_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_control, "COUNTS_INTERVAL", 0.02)
    monkeypatch.setattr(group_control, "SILENCE_TIMEOUT", 1.0)
    deadline = time.monotonic() + PATIENCE
    num_answers = 0
    while not ends.silences:  # as an engine and its workers do while steps go on; one of them stops soon
        assert time.monotonic() < deadline
        ends.control.ask_counts()
        time.sleep(0.01)
        for worker in (0, 1) if num_answers < 20 else (0,):
            ends.workers[worker].send(msgspec.msgpack.encode(Counts({}, spare_bytes=0)))
        num_answers += 1
    assert ends.silences == [1]
    assert num_answers > 20, "as long as both answered nobody was blamed"
