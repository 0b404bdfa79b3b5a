"""Standing orders over lost messages, joins, deaths and restarts of the coordinator."""

from __future__ import annotations

import random

import pytest

from coordinator.member_state import MemberState
from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE
from coordinator.membership.records import Rules
from coordinator.membership.registry import Registry
from coordinator.messages import (
    Exited,
    FromCoordinator,
    Load,
    OperatorAnswer,
    PauseMode,
    SetPause,
    StandingOrders,
    State,
    ToCoordinator,
    Unknown,
    WeightVersion,
)
from tests.coordinator.membership.test_registry import register, to
from tests.nightly import examples


class Mesh:
    """A coordinator and its instances, which follow orders when they are let."""

    def __init__(self, size: int) -> None:
        self.members: list[MemberState] = []
        self._num_started = 0
        self.now = 0.0
        self.restart()
        for _ in range(size):
            self.join()

    def join(self) -> MemberState:
        member = MemberState(register(f"m{self._num_started}", self._num_started))
        self._num_started += 1
        self.members.append(member)
        self.talk(member)
        member.state, member.address = State.READY, f"tcp://{member.register.instance}:1"
        self.talk(member)
        return member

    def restart(self) -> None:
        """Start the coordinator again, which keeps no file."""
        self.now += 10.0
        rules = Rules(name="m", token=f"token {self.now}")
        self.registry = Registry(rules)
        self.registry.tick(self.now)
        self.now += 10.0
        for member in self.members:
            member.take(Unknown())

    def talk(self, member: MemberState, *, follows: bool = True) -> None:
        """Let an instance and the coordinator exchange all that they want to."""
        for _ in range(4):
            if follows:
                member.in_effect = member.orders.revision
            for message in member.outgoing(Load()):
                for answer in self.send(member.register.instance, message):
                    member.take(answer)

    def talk_all(self) -> None:
        for member in self.members:
            self.talk(member)

    def send(self, name: str, message: ToCoordinator) -> list[FromCoordinator]:
        done = self.registry.handle(name.encode(), message, self.now)
        done += self.registry.tick(self.now)
        return to(name.encode(), done)

    def pause(self, mode: PauseMode | None, *, arrives: bool = True, command: str = "") -> int:
        """Status of the answer to a command, whose orders may be lost on the way."""
        wish = SetPause(command=command or f"{mode}", mode=mode)
        done = self.registry.handle(b"o", wish, self.now)
        for member in self.members if arrives else ():
            for message in to(member.register.instance.encode(), done):
                member.take(message)
        (answer,) = to(b"o", done)
        assert isinstance(answer, OperatorAnswer)
        return answer.status

    def shown(self, member: MemberState) -> State:
        (state,) = (
            each.state for each in self.registry.view().members if each.instance == member.register.instance
        )
        return state


def test_a_pause_is_done_when_it_is_in_effect_everywhere() -> None:
    mesh = Mesh(2)
    assert mesh.pause(PauseMode.KEEP) == ACCEPTED
    mesh.talk(mesh.members[0])
    mesh.talk(mesh.members[1], follows=False)
    assert mesh.pause(PauseMode.KEEP) == ACCEPTED
    mesh.talk(mesh.members[1])
    assert mesh.pause(PauseMode.KEEP) == DONE
    assert mesh.registry.view().orders.pause is PauseMode.KEEP


def test_orders_that_are_lost_come_with_the_answer_to_the_next_heartbeat() -> None:
    mesh = Mesh(1)
    mesh.pause(PauseMode.WAIT, arrives=False)
    assert mesh.members[0].orders.pause is None
    mesh.talk(mesh.members[0])
    assert mesh.members[0].orders.pause is PauseMode.WAIT
    assert mesh.pause(PauseMode.WAIT) == DONE


def test_the_same_command_twice_is_one_change() -> None:
    mesh = Mesh(1)
    mesh.pause(PauseMode.KEEP)
    revision = mesh.registry.view().orders.revision
    mesh.pause(PauseMode.KEEP)
    assert mesh.registry.view().orders.revision == revision


def test_a_command_that_a_later_one_overrules_is_not_obeyed_again() -> None:
    mesh = Mesh(1)
    mesh.pause(PauseMode.KEEP, command="first")
    mesh.pause(None, command="second")
    assert mesh.pause(PauseMode.KEEP, command="first") == CONFLICT
    mesh.talk_all()
    assert mesh.pause(None, command="second") == DONE


def test_a_joiner_is_welcomed_with_the_orders() -> None:
    mesh = Mesh(1)
    mesh.pause(PauseMode.KEEP)
    assert mesh.join().orders.pause is PauseMode.KEEP


def test_a_joiner_that_missed_the_orders_does_not_serve() -> None:
    mesh = Mesh(1)
    late = MemberState(register("late", 1))
    mesh.members.append(late)
    mesh.talk(late)  # welcomed before the pause
    mesh.pause(PauseMode.KEEP, arrives=False)
    late.state, late.address = State.READY, "tcp://late:1"
    for message in late.outgoing(Load()):
        mesh.send("late", message)  # and the answer is lost, too
    assert mesh.shown(late) is State.LOADED
    mesh.talk(late)
    assert mesh.shown(late) is State.READY
    assert late.orders.pause is PauseMode.KEEP


def test_an_instance_that_serves_goes_on_serving_while_orders_reach_it() -> None:
    mesh = Mesh(2)
    mesh.pause(PauseMode.KEEP, arrives=False)
    assert [mesh.shown(member) for member in mesh.members] == [State.READY] * 2


def test_nobody_waits_for_an_instance_that_died() -> None:
    mesh = Mesh(2)
    mesh.pause(PauseMode.KEEP)
    mesh.talk(mesh.members[0])
    mesh.send("s", Exited(mesh.members[1].register.instance, "was killed"))
    assert mesh.pause(PauseMode.KEEP) == DONE


def test_a_restarted_coordinator_has_the_orders_from_its_instances() -> None:
    mesh = Mesh(2)
    mesh.pause(PauseMode.KEEP)
    mesh.talk_all()
    before = mesh.members[0].orders.revision
    mesh.restart()
    mesh.talk_all()
    orders = mesh.registry.view().orders
    assert orders.pause is PauseMode.KEEP
    assert orders.revision > before
    assert {member.orders for member in mesh.members} == {orders}


def test_a_coordinator_that_does_not_know_all_instances_answers_nothing_as_done() -> None:
    registry = Registry(Rules(name="m", token="t"))
    (sent,) = to(b"o", registry.handle(b"o", SetPause(command="c", mode=PauseMode.KEEP), 1.0))
    assert isinstance(sent, OperatorAnswer)
    assert sent.status == ACCEPTED


def test_orders_that_reached_one_instance_count_less_than_those_of_a_later_coordinator() -> None:
    mesh = Mesh(2)
    mesh.pause(PauseMode.KEEP, arrives=False)
    mesh.members[0].take(mesh.registry.view().orders)  # the other one never hears of them
    away, mesh.members = mesh.members[0], mesh.members[1:]
    mesh.restart()
    mesh.talk_all()
    mesh.pause(PauseMode.WAIT)
    mesh.talk_all()
    mesh.members.append(away)
    away.take(Unknown())
    mesh.talk_all()
    mesh.talk_all()
    assert {member.orders.pause for member in mesh.members} == {PauseMode.WAIT}
    assert mesh.pause(PauseMode.WAIT) == DONE


def test_a_weight_version_never_goes_back() -> None:
    mesh = Mesh(1)
    ahead = StandingOrders(revision=1, token="older", weights=WeightVersion(number=5, label="five"))
    mesh.pause(PauseMode.KEEP)
    mesh.pause(None)
    mesh.members[0].orders = ahead
    mesh.members[0].take(Unknown())
    mesh.talk(mesh.members[0])
    orders = mesh.registry.view().orders
    assert (orders.weights.label, orders.pause) == ("five", None)
    assert mesh.members[0].orders == orders


@pytest.mark.parametrize("seed", range(examples(200)))
def test_all_follow_in_the_end_and_done_is_true(seed: int) -> None:
    """Done holds for all that the coordinator knew then, and for later ones.

    A coordinator that was restarted may first hear of one that its predecessor did not reach.
    """
    rng = random.Random(seed)
    mesh = Mesh(rng.randint(1, 3))
    mode: PauseMode | None = None
    covered: set[str] = set()
    before: set[str] = set()
    number = 0
    for _ in range(60):
        is_done = False
        match rng.randrange(8):
            case 0:
                mode = rng.choice((*PauseMode, None))
                covered.clear()
                number += 1
                is_done = mesh.pause(mode, arrives=rng.random() < 0.5, command=str(number)) == DONE
            case 1:
                if len(mesh.members) < 6:
                    mesh.join()
            case 2:
                covered &= before  # nobody answers for one that this coordinator never heard of
                mesh.restart()
                mesh.talk(rng.choice(mesh.members))  # else nobody can tell it from the first coordinator
            case 3:
                if len(mesh.members) > 1:
                    gone = mesh.members.pop(rng.randrange(len(mesh.members)))
                    mesh.send("s", Exited(gone.register.instance, "was killed"))
            case 4:
                is_done = mesh.pause(mode, arrives=rng.random() < 0.5, command=str(number)) == DONE
            case _:
                mesh.talk(rng.choice(mesh.members), follows=rng.random() < 0.7)
        view = mesh.registry.view()
        ready = {each.instance for each in view.members if each.state is State.READY}
        covers = is_done or (covered and view.orders.pause is mode)
        covered |= (ready if is_done else ready - before) if covers else set()
        before = ready
        for member in mesh.members:
            assert member.register.instance not in covered or member.orders.pause is mode
    for _ in range(3):
        mesh.talk_all()
    assert mesh.pause(mode, command=str(number)) in (ACCEPTED, DONE)
    mesh.talk_all()
    assert mesh.pause(mode, command=str(number)) == DONE
    assert {member.orders for member in mesh.members} == {mesh.registry.view().orders}
