"""An instance's way from group to group, as lists of events and instructions."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.messages import Evidence, GroupPlan, Lost, Peer
from engine.groups.recovery import (
    LEAVE_TIMEOUT,
    Abandon,
    AbortGroup,
    AwaitGroup,
    DropRequests,
    Enter,
    LeaveMesh,
    Prepare,
    Recovery,
    ReportLost,
    StepOn,
    Turn,
    names,
)
from parallel.placement import held_by_rank
from tests.coordinator.membership.group_mesh import Mesh


def form(epoch: int, members: str = "abc", leavers: str = "", broken: int = 0) -> GroupPlan:
    """A plan whose experts 0, 1, 2 ... go round the members."""
    return GroupPlan(
        epoch=epoch,
        store="h:1",
        peers=[Peer(rank, f"tcp://{name}", "h", name) for rank, name in enumerate(members)],
        owners=tuple(expert % len(members) for expert in range(4)) if members else (),
        leavers=tuple(leavers),
        broken=broken,
    )


def turn(recovery: Recovery, now: float = 0.0) -> Turn:
    return recovery.turn(now)


@pytest.fixture
def recovery() -> Recovery:
    """The recovery of instance a, in the group of epoch 1 with b and c."""
    recovery = Recovery("a")
    assert turn(recovery) == AwaitGroup()
    assert recovery.on_form(form(1)) == [Prepare(form(1))]
    assert turn(recovery) == AwaitGroup()
    assert recovery.prepared(1) == []
    assert turn(recovery) == Enter(form(1))
    assert turn(recovery) == StepOn()
    assert repr(recovery) == "<Recovery a group 1, next none>"
    return recovery


def test_a_group_of_a_form() -> None:
    assert names(form(1)) == ["a", "b", "c"]
    whole = form(1)
    held = [held_by_rank(whole.placement, whole.ranks, index) for index in range(3)]
    assert held == [[[[0, 3]]], [[[1]]], [[[2]]]]
    two_ranks = msgspec.structs.replace(form(1, "ab"), owners=(0, 1, 2, 3), ranks=2)
    assert held_by_rank(two_ranks.placement, two_ranks.ranks, 1) == [[[2]], [[3]]]


# ---- by agreement


def test_a_healthy_change_goes_by_agreement(recovery: Recovery) -> None:
    following = form(2, "abcd")
    assert recovery.on_form(following) == [Prepare(following)]
    assert (recovery.ready_epoch, recovery.switch_pending) == (1, False)
    assert turn(recovery) == StepOn()
    assert recovery.prepared(2) == []
    assert (recovery.epoch, recovery.ready_epoch, recovery.switch_pending) == (1, 2, True)
    assert turn(recovery) == StepOn(), "ready, but the others may not be"
    assert recovery.switched(2) == []
    assert turn(recovery) == Enter(following)
    assert (recovery.epoch, recovery.ready_epoch, recovery.switch_pending) == (2, 2, False)


def test_forms_that_are_repeated_stale_or_not_for_this_instance_do_nothing(recovery: Recovery) -> None:
    recovery.on_form(form(3))
    assert recovery.on_form(form(3)) == []
    assert recovery.on_form(form(2)) == []
    assert recovery.on_form(form(4, "bc")) == []
    assert recovery.target == form(3)


def test_a_later_form_takes_the_place_of_one_that_is_prepared(recovery: Recovery) -> None:
    recovery.on_form(form(2))
    assert recovery.on_form(form(3)) == [Abandon(2), Prepare(form(3))]
    assert recovery.prepared(2) == [Abandon(2)], "its group is closed when it comes after all"
    assert recovery.ready_epoch == 1
    recovery.prepared(3)
    assert recovery.on_form(form(4)) == [Abandon(3), Prepare(form(4))]
    assert recovery.ready_epoch == 1, "ready no more"


def test_who_cannot_follow_an_agreement_breaks_the_group(recovery: Recovery) -> None:
    """The others have entered 2.

    Here a Form has come in between, because somebody is lost.
    """
    recovery.on_form(form(2))
    recovery.prepared(2)
    recovery.on_form(form(3))
    assert recovery.switched(2) == [AbortGroup(1)]
    assert turn(recovery) == AwaitGroup()
    recovery.prepared(3)
    assert turn(recovery) == Enter(form(3))


def test_a_plan_that_comes_after_an_agreement_breaks_the_group_that_all_leave(recovery: Recovery) -> None:
    """Steps under way end before the turn that enters: a plan may come in between."""
    recovery.on_form(form(2))
    recovery.prepared(2)
    recovery.switched(2)
    assert recovery.on_form(form(3)) == [Abandon(2), AbortGroup(1), Prepare(form(3))]
    assert turn(recovery) == AwaitGroup(), "nobody steps in group 1 any more"
    recovery.prepared(3)
    assert turn(recovery) == Enter(form(3))


def test_a_leaver_that_all_let_go_goes_though_another_plan_comes(recovery: Recovery) -> None:
    recovery.drained(5.0)
    recovery.on_form(form(2, "bc", leavers="a"))
    recovery.switched(2)
    assert recovery.on_form(form(3, "bcd", leavers="a")) == [AbortGroup(1)]
    assert turn(recovery, 6.0) == LeaveMesh()


def test_a_change_that_cannot_be_prepared_leaves_the_group_as_it_is(recovery: Recovery) -> None:
    recovery.on_form(form(2))
    lost = Lost(instance="a", epoch=2, suspects=("d",), evidence=Evidence.CLOSED)
    assert recovery.failed(2, ["d"]) == [Abandon(2), ReportLost(lost)]
    assert turn(recovery) == StepOn()
    assert recovery.failed(7) == []


# ---- after a loss


def test_a_broken_group_is_reported_and_left_for_the_next_one(recovery: Recovery) -> None:
    lost = Lost(instance="a", epoch=1, suspects=("b",), evidence=Evidence.DEADLINE)
    assert recovery.group_failed(1, ["b"], Evidence.DEADLINE) == [AbortGroup(1), ReportLost(lost)]
    assert recovery.group_failed(1, ["b"], Evidence.EXITED) == [], "once is enough"
    assert turn(recovery) == AwaitGroup()
    assert recovery.epoch == 0
    assert recovery.on_form(form(2, "ac", broken=1)) == [Prepare(form(2, "ac", broken=1))]
    recovery.prepared(2)
    assert turn(recovery) == Enter(form(2, "ac", broken=1)), "no agreement is needed"


@pytest.mark.parametrize("following", [form(2, "ac"), form(2, "abc", broken=1)])
def test_a_form_may_be_the_first_to_say_that_the_group_is_dead(
    recovery: Recovery, following: GroupPlan
) -> None:
    assert recovery.on_form(following) == [AbortGroup(1), Prepare(following)]
    assert recovery.group_failed(1, [], Evidence.CLOSED) == [], "the step thread comes out of its collective"
    assert turn(recovery) == AwaitGroup()
    recovery.prepared(2)
    assert turn(recovery) == Enter(following)


def test_a_failure_of_a_group_that_is_left_already_is_none(recovery: Recovery) -> None:
    recovery.on_form(form(2))
    recovery.prepared(2)
    recovery.switched(2)
    turn(recovery)
    assert recovery.group_failed(1, ["b"], Evidence.EXITED) == []
    assert turn(recovery) == StepOn()


def test_a_loss_while_a_change_is_ready_enters_it_at_once(recovery: Recovery) -> None:
    recovery.on_form(form(2, "abcd"))
    recovery.prepared(2)
    recovery.group_failed(1, [], Evidence.CLOSED)
    assert turn(recovery) == Enter(form(2, "abcd"))


def test_a_loss_before_the_first_form_of_a_change_waits_for_it(recovery: Recovery) -> None:
    recovery.on_form(form(2, "abcd"))
    recovery.group_failed(1, [], Evidence.CLOSED)
    assert turn(recovery) == AwaitGroup()


def test_a_member_that_a_restarted_coordinator_finds_in_an_older_group_leaves_it_at_once() -> None:
    """It does not wait there for peers that have left, until a deadline."""
    mesh = Mesh()
    mesh.begin("abc")
    older = mesh.forms["a"]
    newer = msgspec.structs.replace(older, epoch=2)
    recovery = Recovery("a")
    recovery.on_form(older)
    recovery.prepared(older.epoch)
    assert turn(recovery) == Enter(older)
    mesh.restart_coordinator()
    for name, group in ("a", older), ("b", newer), ("c", newer):
        mesh.register(name, epoch=group.epoch, group=group)
        mesh.says(name, epoch=group.epoch)
    mesh.wait(2.5, alive="abc")
    following = mesh.forms["a"]
    assert recovery.on_form(following) == [AbortGroup(older.epoch), Prepare(following)]
    assert turn(recovery) == AwaitGroup()


# ---- leaving


def test_a_leaver_goes_with_the_agreement_on_the_group_without_it(recovery: Recovery) -> None:
    recovery.drained(5.0)
    assert turn(recovery, 5.0) == StepOn()
    assert recovery.on_form(form(2, "bc", leavers="a")) == [], "nothing to prepare"
    assert recovery.ready_epoch == 2
    assert recovery.switch_pending
    assert turn(recovery, 6.0) == StepOn()
    assert recovery.switched(2) == []
    assert turn(recovery, 6.0) == LeaveMesh()
    assert turn(recovery, 7.0) == LeaveMesh()
    assert recovery.on_form(form(3)) == []


def test_a_leaver_that_is_told_of_one_group_more_goes_with_any_agreement(recovery: Recovery) -> None:
    recovery.drained(5.0)
    recovery.on_form(form(2, "bc", leavers="a"))
    recovery.on_form(form(3, "bcd", leavers="a"))
    assert recovery.switched(2) == []
    assert turn(recovery, 6.0) == LeaveMesh()


def test_the_last_one_just_goes(recovery: Recovery) -> None:
    recovery.on_form(form(2, "a", leavers="bc"))
    recovery.prepared(2)
    recovery.switched(2)
    assert turn(recovery) == Enter(form(2, "a", leavers="bc"))
    recovery.drained(5.0)
    assert turn(recovery, 5.0) == LeaveMesh()


def test_a_leaver_whose_group_breaks_just_goes(recovery: Recovery) -> None:
    recovery.drained(5.0)
    recovery.group_failed(1, [], Evidence.CLOSED)
    assert turn(recovery, 5.0) == LeaveMesh()


def test_a_leaver_waits_for_a_bounded_time(recovery: Recovery) -> None:
    recovery.drained(5.0)
    recovery.drained(6.0)
    assert turn(recovery, 5.0 + LEAVE_TIMEOUT - 0.1) == StepOn()
    assert turn(recovery, 5.0 + LEAVE_TIMEOUT) == LeaveMesh()


def test_who_drains_is_a_member_until_it_is_drained(recovery: Recovery) -> None:
    recovery.on_form(form(2, "abcd"))
    recovery.drained(5.0)
    recovery.prepared(2)
    recovery.switched(2)
    assert turn(recovery, 5.0) == Enter(form(2, "abcd")), "the others count on it there"


# ---- taken for dead


def test_who_was_taken_for_dead_gives_all_up_and_joins_again(recovery: Recovery) -> None:
    recovery.on_form(form(2))
    assert recovery.on_fenced() == [Abandon(2), AbortGroup(1), DropRequests()]
    assert turn(recovery) == AwaitGroup()
    assert recovery.prepared(2) == [Abandon(2)]
    assert recovery.on_form(form(2)) == [], "an epoch of its past"
    recovery.on_form(form(5, "bca"))
    recovery.prepared(5)
    assert turn(recovery) == Enter(form(5, "bca"))


def test_who_was_taken_for_dead_and_leaves_ends(recovery: Recovery) -> None:
    recovery.on_fenced()
    recovery.drained(1.0)
    assert turn(recovery, 1.0) == LeaveMesh()
