"""Two instances in lockstep over real sockets: wakes, and the instances that they reach."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from coordinator.rpc.rpc import Listener
from engine.groups import stepping
from engine.groups.stepping import InLockstep
from engine.messages import ToInstance
from parallel.lockstep import Wake
from tests.parallel.thread_group import thread_group
from tests.waiting import until

EPOCH = 3


class Member:
    """An instance with stepping and a socket, and nothing to compute."""

    def __init__(self, group: Any) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self.listener: Listener[Any, Any] = Listener(
            self._context, "tcp://127.0.0.1:*", ToInstance, name="member"
        )
        self._group = group
        self.lockstep: InLockstep

    def meet(self, other: Member) -> None:
        self.lockstep = InLockstep(self._group, EPOCH, [other.listener.endpoint])

    def agree(self, num_tokens: int) -> stepping.Agreement:
        return self.lockstep.agree(num_tokens, 0, 0, 0, EPOCH)

    def take_wakes(self) -> bool:
        """Whether this instance is awake, after all messages that have come."""
        while (received := self.listener.receive()) is not None:
            self.lockstep.on_wake(received[1])
        return self.lockstep.must_step

    def close(self) -> None:
        self.lockstep.close()
        self.listener.close()
        self._context.destroy(linger=0)


@pytest.fixture
def members() -> Iterator[tuple[Member, Member]]:
    first, second = map(Member, thread_group(2))
    first.meet(second)
    second.meet(first)
    with ThreadPoolExecutor() as threads:
        assert all(each.pauses for each in threads.map(lambda member: member.agree(0), (first, second)))
        yield first, second
    first.close()
    second.close()


def test_a_woken_instance_wakes_its_peers_when_the_step_does_not_begin(
    members: tuple[Member, Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has sent a wake to the first alone."""
    monkeypatch.setattr(stepping, "PASS_ON_AFTER", 0.1)
    first, second = members
    first.lockstep.on_wake(Wake(EPOCH, 1))
    with ThreadPoolExecutor() as threads:
        agreed = threads.submit(first.agree, 5)  # waits for the second
        until(second.take_wakes, 10)
        assert second.agree(0).sizes == agreed.result().sizes == (5, 0)


def test_a_wake_for_a_step_far_ahead_leaves_the_next_request_alone(members: tuple[Member, Member]) -> None:
    first, second = members
    first.lockstep.on_wake(Wake(EPOCH, 2**62))
    assert not first.lockstep.must_step
    first.lockstep.notice_work()
    with ThreadPoolExecutor() as threads:
        agreed = threads.submit(first.agree, 5)
        until(second.take_wakes, 10)
        assert second.agree(0).sizes == agreed.result().sizes == (5, 0)
    with ThreadPoolExecutor() as threads:
        assert all(each.pauses for each in threads.map(lambda member: member.agree(0), members))
    assert not first.lockstep.must_step
