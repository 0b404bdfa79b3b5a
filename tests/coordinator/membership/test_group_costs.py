"""What changes of a group cost the coordinator for each member.

Costs are lines of the coordinator's code that are executed, and bytes of its messages: no clock decides.
"""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import pytest

import coordinator
from coordinator.member_state import MemberState
from coordinator.membership.records import Instruction, Publish, Rules, Send
from coordinator.membership.registry import Registry
from coordinator.messages import Evidence, GroupPlan, Load, Lost, State
from coordinator.rpc.codec import encode
from tests.coordinator.membership.test_registry import SETTINGS, register

FEW, MANY = 24, 96
MOST_GROWTH = 1.25
"""Most growth of a cost for each member, with four times as many members."""
CODE = coordinator.__path__[0]
EXPERTS = 192


class Crowd:
    """A real registry, and real states of members, which enter each group at once."""

    def __init__(self, size: int) -> None:
        self._settings = msgspec.structs.replace(
            SETTINGS, enable_expert_parallel=True, data_parallel_size=size, num_experts=EXPERTS
        )
        self.registry = Registry(Rules(size=size))
        self.registry.tick(0.0)
        self.now = 10.0
        self.members: dict[str, MemberState] = {}
        self.lines = self.bytes = 0
        self._numbers = itertools.count()

    def join(self, count: int) -> None:
        """So many more instances register, load and get into the group."""
        names = [f"i{next(self._numbers):04d}" for _ in range(count)]
        for number, name in ((int(name[1:]), name) for name in names):
            member = MemberState(register(name, number, settings=self._settings))
            member.on_form = self._enters(member)
            self.members[name] = member
        self.say(names)
        for name in names:
            member = self.members[name]
            member.state, member.address, member.store = State.LOADED, f"tcp://10.0.0.1:{name}", f"h:{name}"
        self.say(names)

    def lose(self, name: str) -> None:
        """An instance dies; all others report it."""
        dead = self.members.pop(name)
        assert dead.form is not None
        for other in self.members:
            suspects = Lost(instance=other, epoch=dead.form.epoch, suspects=(name,), evidence=Evidence.CLOSED)
            self.members[other].report(suspects)
        self.say([*self.members])
        self.now += 0.4
        self._deliver(lambda: self.registry.tick(self.now))

    def say(self, names: list[str]) -> None:
        """Heartbeats of these, and all that follows from them."""
        for name in names:
            for message in self.members[name].outgoing(Load()):
                self._deliver(lambda name=name, message=message: self._handle(name, message))  # type: ignore[misc]

    def epochs(self) -> set[int]:
        """The groups that members step in."""
        return {member._group.epoch if member._group is not None else 0 for member in self.members.values()}

    def _handle(self, name: str, message: Any) -> list[Instruction]:
        return self.registry.handle(name.encode(), message, self.now)

    def _deliver(self, react: Callable[[], list[Instruction]]) -> None:
        due = deque([react])
        while due:
            with self._counted():
                instructions = due.popleft()()
            for item in instructions:
                match item:
                    case Send(peer, message):
                        peers: tuple[bytes, ...] = (peer,)
                    case Publish(peers, message):
                        pass
                    case _:
                        continue
                self.bytes += len(peers) * len(encode(message))
                for name in (each.decode() for each in peers):
                    member = self.members.get(name)
                    before = member.ready_epoch if member is not None else 0
                    if member is not None and (member.take(message) or member.ready_epoch != before):
                        for said in member.outgoing(Load()):
                            due.append(lambda name=name, said=said: self._handle(name, said))  # type: ignore[misc]

    def _enters(self, member: MemberState) -> Callable[[GroupPlan], None]:
        def on_form(form: GroupPlan) -> None:
            member.ready_epoch, member.state = form.epoch, State.READY
            place = [peer.instance for peer in form.peers].index(member.register.instance)
            member.hold([[[expert for expert, owner in enumerate(form.owners) if owner == place]]])
            member.enter(form)

        return on_form

    @contextmanager
    def _counted(self) -> Iterator[None]:
        def call(frame: FrameType, event: str, argument: object) -> Any:
            return line if frame.f_code.co_filename.startswith(CODE) else None

        def line(frame: FrameType, event: str, argument: object) -> Any:
            self.lines += event == "line"
            return line

        before = sys.gettrace()
        sys.settrace(call)
        try:
            yield
        finally:
            sys.settrace(before)


def costs_of(size: int) -> dict[str, tuple[float, float]]:
    """Lines and bytes for each member, by what happens."""
    crowd = Crowd(size)
    found: dict[str, tuple[float, float]] = {}

    def note(what: str, epoch: int) -> None:
        assert crowd.epochs() == {epoch}, what
        found[what] = crowd.lines / size, crowd.bytes / size
        crowd.lines = crowd.bytes = 0

    crowd.join(size)
    note("the first group", 1)
    crowd.lose("i0005")
    note("a loss", 2)
    crowd.join(1)
    note("a newcomer", 3)
    crowd.say([*crowd.members])
    note("heartbeats", 3)
    return found


@pytest.fixture(scope="module")
def costs() -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, float]]]:
    return costs_of(FEW), costs_of(MANY)


@pytest.mark.parametrize("what", ["the first group", "a loss", "a newcomer", "heartbeats"])
def test_the_work_for_each_member_does_not_grow_with_the_mesh(what: str, costs: Any) -> None:
    few, many = (found[what][0] for found in costs)
    assert many <= MOST_GROWTH * few, f"{few:.0f} lines for each of {FEW} members, {many:.0f} of {MANY}"


@pytest.mark.parametrize("what", ["a loss", "heartbeats"])
def test_the_bytes_for_each_member_do_not_grow_with_the_mesh(what: str, costs: Any) -> None:
    """But for the first plan that an instance gets, which names all members."""
    few, many = (found[what][1] for found in costs)
    assert many <= MOST_GROWTH * few, f"{few:.0f} bytes for each of {FEW} members, {many:.0f} of {MANY}"


def test_an_instance_gets_the_plan_once_and_changes_from_then_on(costs: Any) -> None:
    _, many = costs
    whole = many["the first group"][1]
    assert 40 * MANY < whole < 80 * MANY, "one plan, with some 45 bytes a member, and few answers"
    assert many["a loss"][1] < whole / 8
    assert many["a newcomer"][1] < whole / 8
