from __future__ import annotations

import pytest

from coordinator.messages import Load, Member, State
from router.launcher.scaling import (
    MachineCapacity,
    ScalingPlan,
    ScalingRefused,
    free_number,
    plan,
    shared_devices,
)

CPU = MachineCapacity(devices=None, cores=4)


def world(**states: State) -> list[Member]:
    """``_0=State.READY`` and so on."""
    return [
        Member(
            instance=name, rank=int(name[1:]), state=state, phase="", address="", host="h", pid=1, load=Load()
        )
        for name, state in states.items()
    ]


READY, LOADING, DRAINING = State.READY, State.LOADING, State.DRAINING


def test_more_get_the_lowest_free_ranks() -> None:
    members = world(_0=READY, _2=READY, _3=DRAINING)
    assert plan(4, members, [0, 2], CPU, False) == ScalingPlan(start=(1, 4))
    assert plan(5, members, [0, 2, 5], CPU, False).start == (1, 4), "5 is ours and has not registered yet"
    assert plan(3, world(), [0, 1, 2], CPU, False) == ScalingPlan()


def test_fewer_means_our_highest_ranks() -> None:
    members = world(_0=READY, _1=READY, _2=READY, _9=READY)
    assert plan(2, members, [0, 1, 2], CPU, False) == ScalingPlan(drain=(2, 1))
    assert plan(4, members, [0, 1, 2], CPU, False) == ScalingPlan()
    with pytest.raises(ScalingRefused, match="3 instances would have to go, and only 2 are of this serve"):
        plan(1, members, [0, 1], CPU, False)


def test_who_was_told_to_go_is_not_counted_though_the_world_shows_it_ready() -> None:
    members = world(_0=READY, _1=READY, _2=READY, _3=READY)
    assert plan(3, members, [0, 1, 2], CPU, False, ["_3"]) == ScalingPlan()
    assert plan(2, members, [0, 1, 2], CPU, False, ["_3"]).drain == (2,)
    assert plan(4, members, [0, 1, 2], CPU, False, ["_3"]).start == (4,), "3 is not free yet"
    members = world(_0=READY, _1=LOADING, _2=LOADING)
    with pytest.raises(ScalingRefused, match="none of the instances that would stay is ready"):
        plan(1, members, [1, 2], CPU, False, ["_0"])


def test_somebody_must_go_on_serving() -> None:
    members = world(_0=LOADING, _1=READY)
    with pytest.raises(ScalingRefused, match="none of the instances that would stay is ready"):
        plan(1, members, [0, 1], CPU, False)
    assert plan(1, members, [0, 1], CPU, True).drain == (1,)
    with pytest.raises(ScalingRefused, match="at least one"):
        plan(0, members, [0, 1], CPU, True)


def test_devices_are_a_limit_and_cores_a_warning() -> None:
    members = world(_0=READY)
    machine = MachineCapacity(devices=4, devices_per_instance=2, cores=2)
    assert plan(2, members, [0], machine, False).start == (1,)
    with pytest.raises(ScalingRefused, match=r"3 instances of 2 CUDA device.s. each are more than the 4"):
        plan(3, members, [0], machine, False)
    assert plan(4, members, [0], CPU, False).warning == ""
    assert "share 4 cores" in plan(5, members, [0], CPU, False).warning


def test_more_instances_than_can_be_meant_are_not_started() -> None:
    members = world(_0=READY)
    with pytest.raises(ScalingRefused, match=r"129 instances on 4 cores: .* the most that is started is 128"):
        plan(129, members, [0], CPU, True)
    assert len(plan(128, members, [0], CPU, False).start) == 127


def test_instances_that_share_devices_are_told_so() -> None:
    machine = MachineCapacity(devices=4, devices_per_instance=2, cores=2)
    assert (machine.room, CPU.room) == (2, 0)
    assert shared_devices(2, machine) == shared_devices(9, CPU) == ""
    assert shared_devices(1, MachineCapacity(devices=1, devices_per_instance=2, cores=2)) == "", (
        "that one is refused"
    )
    assert "3 instances of 2 CUDA device(s) each share the 4" in shared_devices(3, machine)


@pytest.mark.parametrize(
    ("staying", "leaving", "room", "number"),
    [
        ([], [], 0, 0),
        ([0, 1], [], 0, 2),
        ([0, 2], [1], 0, 3),
        ([0, 2], [], 4, 1),
        ([0, 1], [2], 4, 3),  # the devices of one that drains are in use for a while
        ([0, 2, 3], [1], 4, 1),  # but others are for long
        ([0, 1], [], 2, 2),
    ],
)
def test_one_more_gets_the_lowest_number_that_has_devices_to_itself(
    staying: list[int], leaving: list[int], room: int, number: int
) -> None:
    assert free_number(staying, leaving, room) == number
