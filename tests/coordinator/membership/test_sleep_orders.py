"""Sleep of the mesh over lost messages, joins, deaths and restarts of the coordinator."""

from __future__ import annotations

import random

import msgspec
import pytest

from coordinator.member_state import MemberState
from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE
from coordinator.messages import (
    Exited,
    GroupPlan,
    MemoryPart,
    OperatorAnswer,
    PauseMode,
    SetSleep,
    StandingOrders,
    State,
    UpdateWeights,
    WakeUp,
)
from tests.coordinator.membership.test_registry import EXPERTS, register, to
from tests.coordinator.membership.test_standing_orders import Mesh
from tests.nightly import examples

BOTH = (MemoryPart.KV_CACHE, MemoryPart.WEIGHTS)


class SleepingMesh(Mesh):
    """A coordinator and its instances, which note what they are without."""

    def sleep(self, *parts: MemoryPart, command: str = "sleep", level: int = 1) -> int:
        return self.command(SetSleep(command=command, parts=parts or BOTH, level=level))

    def wake(self, *parts: MemoryPart, command: str = "wake") -> int:
        return self.command(WakeUp(command=command, parts=parts))

    def command(self, wish: SetSleep | WakeUp | UpdateWeights) -> int:
        (answer,) = to(b"o", self.registry.handle(b"o", wish, self.now))
        assert isinstance(answer, OperatorAnswer)
        return answer.status

    def without(self) -> list[tuple[MemoryPart, ...]]:
        """What each instance has given back."""
        return [given_back(member.orders) for member in self.members]


class GroupMesh(SleepingMesh):
    """Instances with spread experts, which enter the newest group when they are let."""

    def __init__(self) -> None:
        super().__init__(0)
        self.plans: list[GroupPlan] = []

    def join(self, name: str = "") -> MemberState:
        asks = msgspec.structs.replace(register(name, len(self.members)), settings=EXPERTS)
        member = MemberState(asks)
        member.on_form = self.plans.append
        self.members.append(member)
        self.talk(member)
        member.state = State.LOADED
        member.address = member.store = f"tcp://{name}:1"
        member.max_experts = 8
        self.talk_all()
        return member

    def enter_newest(self) -> None:
        plan = self.plans[-1]
        for member in self.members:
            member.ready_epoch, member.state = plan.epoch, State.READY
            member.enter(plan)
        self.talk_all()


def given_back(orders: StandingOrders) -> tuple[MemoryPart, ...]:
    sleep = orders.sleep
    return sleep.parts if sleep is not None and sleep.gives_back else ()


def test_memory_is_given_back_once_all_stand_still() -> None:
    mesh = SleepingMesh(2)
    assert mesh.sleep() == ACCEPTED
    mesh.talk(mesh.members[0])
    mesh.talk(mesh.members[1], follows=False)
    assert {member.orders.standstill for member in mesh.members} == {PauseMode.ABORT}
    assert mesh.without() == [(), ()]
    mesh.talk(mesh.members[1])
    mesh.talk_all()
    assert mesh.without() == [BOTH, BOTH]
    assert mesh.sleep() == DONE


def test_requests_run_once_all_have_their_memory_again() -> None:
    mesh = SleepingMesh(2)
    mesh.sleep()
    mesh.talk_all()
    mesh.talk_all()
    assert mesh.wake() == ACCEPTED
    mesh.talk(mesh.members[0])
    mesh.talk(mesh.members[1], follows=False)
    assert {member.orders.standstill for member in mesh.members} == {PauseMode.KEEP}
    mesh.talk(mesh.members[1])
    mesh.talk_all()
    assert {member.orders.standstill for member in mesh.members} == {None}
    assert mesh.wake() == DONE


def test_a_part_can_be_taken_back_before_the_others() -> None:
    mesh = SleepingMesh(1)
    mesh.sleep()
    mesh.talk_all()
    mesh.wake(MemoryPart.WEIGHTS)
    mesh.talk_all()
    assert mesh.wake(MemoryPart.WEIGHTS) == DONE
    assert mesh.without() == [(MemoryPart.KV_CACHE,)]
    assert mesh.command(UpdateWeights(command="u", source="/new")) == ACCEPTED


def test_no_update_begins_where_instances_are_without_weights() -> None:
    mesh = SleepingMesh(1)
    mesh.sleep()
    mesh.talk_all()
    assert mesh.command(UpdateWeights(command="u", source="/new")) == CONFLICT


def test_the_mesh_does_not_sleep_while_new_weights_are_prepared() -> None:
    mesh = SleepingMesh(1)
    mesh.command(UpdateWeights(command="u", source="/new"))
    assert mesh.sleep() == CONFLICT
    assert mesh.sleep(MemoryPart.KV_CACHE) == ACCEPTED


def test_a_joiner_stays_asleep() -> None:
    mesh = SleepingMesh(1)
    mesh.sleep()
    mesh.talk_all()
    mesh.talk_all()
    mesh.join()
    assert mesh.without() == [BOTH, BOTH]


def test_a_pause_outlasts_a_sleep() -> None:
    mesh = SleepingMesh(1)
    mesh.pause(PauseMode.KEEP)
    mesh.sleep()
    mesh.talk_all()
    mesh.wake()
    mesh.talk_all()
    mesh.talk_all()
    assert mesh.members[0].orders.sleep is None
    assert mesh.members[0].orders.standstill is PauseMode.KEEP


def test_a_pause_that_a_restarted_coordinator_hears_of_first_wakes_nobody() -> None:
    mesh = SleepingMesh(2)
    mesh.sleep()
    mesh.talk_all()
    mesh.talk_all()
    mesh.restart()
    mesh.pause(PauseMode.KEEP, arrives=False)
    mesh.talk_all()
    assert mesh.without() == [BOTH, BOTH]
    assert {member.orders.pause for member in mesh.members} == {PauseMode.KEEP}


def test_a_command_to_wake_a_mesh_that_does_not_sleep_is_done() -> None:
    mesh = SleepingMesh(1)
    mesh.wake()
    mesh.talk_all()
    assert mesh.wake() == DONE


def test_no_group_is_formed_while_weights_are_given_back() -> None:
    mesh = GroupMesh()
    for name in "ab":
        mesh.join(name)
    assert mesh.plans[-1].peers[-1].instance == "b"
    mesh.enter_newest()
    mesh.command(SetSleep(command="s", parts=(MemoryPart.WEIGHTS,)))
    mesh.talk_all()
    mesh.talk_all()
    assert all(given_back(each.orders) for each in mesh.members)
    mesh.join("c")
    assert len(mesh.plans[-1].peers) == 2
    mesh.command(WakeUp(command="w"))
    mesh.talk_all()
    mesh.talk_all()
    assert len(mesh.plans[-1].peers) == 3


@pytest.mark.parametrize("seed", range(examples(200)))
def test_nobody_is_without_memory_while_another_may_compute(seed: int) -> None:
    """In no state of the mesh, through deaths, joins, restarts and lost messages."""
    rng = random.Random(seed)
    mesh = SleepingMesh(rng.randint(1, 3))
    number, asleep = 0, False
    for _ in range(80):
        match rng.randrange(9):
            case 0:
                asleep, number = True, number + 1
                status = mesh.sleep(*rng.sample(BOTH, rng.choice((1, 2))), command=str(number))
                assert status in (ACCEPTED, DONE)
            case 1:
                number += 1
                parts = rng.choice(((), (), (MemoryPart.WEIGHTS,)))
                assert mesh.wake(*parts, command=str(number)) in (ACCEPTED, DONE)
            case 2:
                if len(mesh.members) < 6:
                    mesh.join()
            case 3:
                mesh.restart()
                mesh.talk_all()
            case 4:
                if len(mesh.members) > 1:
                    gone = mesh.members.pop(rng.randrange(len(mesh.members)))
                    mesh.send("s", Exited(gone.register.instance, "was killed"))
            case _:
                mesh.talk(rng.choice(mesh.members), follows=rng.random() < 0.7)
        bare = [member for member in mesh.members if given_back(member.orders)]
        running = [member for member in mesh.members if member.orders.standstill is None]
        assert not (bare and running), f"{bare} have given memory back, {running} may compute"
    for _ in range(2):
        mesh.talk_all()
    mesh.wake(command="last")
    for _ in range(3):
        mesh.talk_all()
    assert mesh.wake(command="last") == DONE
    assert {member.orders.standstill for member in mesh.members} == {None}
    assert asleep
