"""Messages of an instance to the coordinator, repeated whatever gets lost."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.member_state import MemberState
from coordinator.messages import (
    AdmissionRefused,
    AdmissionWait,
    Beat,
    GroupPlan,
    Heartbeat,
    Load,
    Lost,
    Peer,
    Probe,
    Register,
    State,
    Unknown,
    Welcome,
)
from coordinator.plans import change_of
from tests.coordinator.membership.test_registry import SETTINGS, register

WELCOME = Welcome(rank=3, settings=SETTINGS, epoch=4, heartbeat_interval=0.5)


def form(epoch: int) -> GroupPlan:
    return GroupPlan(epoch=epoch, store="h:1", peers=[Peer(3, "tcp://a:1", "h", "a")])


def heartbeat(member: MemberState) -> Heartbeat:
    (message,) = member.outgoing(Load())
    assert isinstance(message, Heartbeat)
    return message


@pytest.fixture
def member() -> MemberState:
    """Welcome in the mesh, and in the group of epoch 5."""
    member = MemberState(register("a"))
    assert member.outgoing(Load()) == [register("a")]
    assert member.take(WELCOME)
    assert not member.take(form(5))
    member.enter(form(5))
    member.state = State.READY
    return member


def test_it_says_all_that_is_known_of_it(member: MemberState) -> None:
    member.experts, member.max_experts, member.ready_epoch = ((1, 2),), 6, 5
    message = heartbeat(member)
    assert (message.state, message.epoch, message.ready_epoch) == (State.READY, 5, 5)
    assert (message.experts, message.max_experts) == (((1, 2),), 6)


def test_a_probe_is_answered_at_once(member: MemberState) -> None:
    assert member.take(Probe(7))
    assert heartbeat(member).answers == 7


def test_a_loss_is_said_until_a_later_form_comes(member: MemberState) -> None:
    lost = Lost(instance="a", epoch=5, suspects=("b",))
    member.report(lost)
    for _ in range(2):
        assert member.outgoing(Load())[1:] == [lost]
    member.take(form(5))
    assert member.outgoing(Load())[1:] == [lost], "the Form is only repeated"
    member.take(form(6))
    assert member.outgoing(Load())[1:] == []


def test_a_loss_that_comes_while_a_change_is_prepared_is_said_until_the_change(member: MemberState) -> None:
    member.take(form(6))
    lost = Lost(instance="a", epoch=5)
    member.report(lost)
    member.take(form(6))
    assert member.outgoing(Load())[1:] == [lost]
    member.enter(form(6))
    assert member.outgoing(Load())[1:] == []


def test_another_coordinator_is_told_all_again(member: MemberState) -> None:
    member.take(Probe(7))
    member.take(Beat(9, 2))
    assert member.take(Unknown())
    (message,) = member.outgoing(Load())
    assert isinstance(message, Register)
    assert (message.rank, message.epoch, message.group) == (3, 9, form(5))
    assert not member.take(Unknown()), "once is enough"
    member.take(WELCOME)
    assert (heartbeat(member).epoch, heartbeat(member).answers) == (5, 0)


def test_who_is_fenced_gives_its_group_up(member: MemberState) -> None:
    calls = []
    member.on_fenced = lambda: calls.append("fenced")
    member.report(Lost(instance="a", epoch=5))
    member.ready_epoch = 5
    member.take(Unknown())
    member.take(Welcome(rank=1, settings=SETTINGS, epoch=8, heartbeat_interval=0.5, fenced=True))
    message = heartbeat(member)
    assert (message.state, message.epoch, message.ready_epoch) == (State.LOADED, 0, 0)
    assert (calls, member.epoch) == (["fenced"], 8)


def test_who_is_fenced_before_it_had_a_group_has_nothing_to_give_up() -> None:
    member = MemberState(register("a"))
    member.on_fenced = lambda: pytest.fail("there is nothing to fence")
    member.take(Welcome(rank=1, settings=SETTINGS, epoch=8, heartbeat_interval=0.5, fenced=True))
    assert member.state is State.LOADING


def test_a_plan_of_the_time_before_a_fence_is_void() -> None:
    member = MemberState(register("a"))
    member.take(Welcome(rank=1, settings=SETTINGS, epoch=8, heartbeat_interval=0.5, fenced=True))
    for epoch in (7, 8):
        member.take(form(epoch))
        assert member.form is None
        assert heartbeat(member).plan is None
    member.take(form(9))
    assert heartbeat(member).plan == form(9).name, "so it is not sent again"


def test_a_change_of_a_plan_means_nothing_without_that_plan(member: MemberState) -> None:
    before, after = form(7), msgspec.structs.replace(form(9), leavers=("x",))
    change = change_of(before, after)
    assert change is not None
    member.take(msgspec.structs.replace(form(7), token="of another coordinator"))
    member.take(change)
    assert member.form is not None
    assert member.form.epoch == 7, "its heartbeats name another plan, and the whole one comes"
    member.take(before)
    member.take(change)
    assert member.form == after


def test_forms_are_handed_on_unless_they_are_old(member: MemberState) -> None:
    epochs = []
    member.on_form = lambda form: epochs.append(form.epoch)
    for epoch in (5, 7, 6, 7, 8):
        member.take(form(epoch))
    assert epochs == [5, 7, 7, 8], "repetitions, too"


def test_waits_and_refusals_are_remembered() -> None:
    member = MemberState(register("a"))
    assert not member.take(AdmissionWait("somebody holds the rank"))
    assert member.waits_for == "somebody holds the rank"
    assert member.take(AdmissionRefused("no"))
    assert member.refusal == "no"


def test_heartbeats_come_as_often_as_the_coordinator_asks_for(member: MemberState) -> None:
    assert member.heartbeat_interval == 0.5
    member.take(Beat(9, 2, 1.25))
    assert member.heartbeat_interval == 1.25
    member.take(Beat(9, 2))
    assert member.heartbeat_interval == 0.5, "the mesh has become smaller"
    member.take(Beat(9, 2, 1.25))
    member.take(Unknown())
    assert member.heartbeat_interval is None
