"""Messages of an instance to the coordinator, repeated whatever gets lost."""

from __future__ import annotations

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
from tests.coordinator.test_registry import SETTINGS, register

WELCOME = Welcome(rank=3, settings=SETTINGS, epoch=4, heartbeat_interval=0.5)


def form(epoch: int) -> GroupPlan:
    return GroupPlan(epoch=epoch, store="h:1", peers=[Peer(3, "tcp://a:1", "h", "a")])


def heartbeat(standing: MemberState) -> Heartbeat:
    (message,) = standing.outgoing(Load())
    assert isinstance(message, Heartbeat)
    return message


@pytest.fixture
def standing() -> MemberState:
    """Welcome in the mesh, and in the group of epoch 5."""
    standing = MemberState(register("a"))
    assert standing.outgoing(Load()) == [register("a")]
    assert standing.take(WELCOME)
    assert not standing.take(form(5))
    standing.enter(form(5))
    standing.state = State.READY
    return standing


def test_it_says_all_that_is_known_of_it(standing: MemberState) -> None:
    standing.experts, standing.max_experts, standing.ready_epoch = ((1, 2),), 6, 5
    message = heartbeat(standing)
    assert (message.state, message.epoch, message.ready_epoch) == (State.READY, 5, 5)
    assert (message.experts, message.max_experts) == (((1, 2),), 6)


def test_a_probe_is_answered_at_once(standing: MemberState) -> None:
    assert standing.take(Probe(7))
    assert heartbeat(standing).answers == 7


def test_a_loss_is_said_until_a_later_form_comes(standing: MemberState) -> None:
    lost = Lost(instance="a", epoch=5, suspects=("b",))
    standing.report(lost)
    for _ in range(2):
        assert standing.outgoing(Load())[1:] == [lost]
    standing.take(form(5))
    assert standing.outgoing(Load())[1:] == [lost], "the Form is only repeated"
    standing.take(form(6))
    assert standing.outgoing(Load())[1:] == []


def test_a_loss_that_comes_while_a_change_is_prepared_is_said_until_the_change(standing: MemberState) -> None:
    standing.take(form(6))
    lost = Lost(instance="a", epoch=5)
    standing.report(lost)
    standing.take(form(6))
    assert standing.outgoing(Load())[1:] == [lost]
    standing.enter(form(6))
    assert standing.outgoing(Load())[1:] == []


def test_another_coordinator_is_told_all_again(standing: MemberState) -> None:
    standing.take(Probe(7))
    standing.take(Beat(9, 2))
    assert standing.take(Unknown())
    (message,) = standing.outgoing(Load())
    assert isinstance(message, Register)
    assert (message.rank, message.epoch, message.group) == (3, 9, form(5))
    assert not standing.take(Unknown()), "once is enough"
    standing.take(WELCOME)
    assert (heartbeat(standing).epoch, heartbeat(standing).answers) == (5, 0)


def test_who_is_fenced_gives_its_group_up(standing: MemberState) -> None:
    calls = []
    standing.on_fenced = lambda: calls.append("fenced")
    standing.report(Lost(instance="a", epoch=5))
    standing.ready_epoch = 5
    standing.take(Unknown())
    standing.take(Welcome(rank=1, settings=SETTINGS, epoch=8, heartbeat_interval=0.5, fenced=True))
    message = heartbeat(standing)
    assert (message.state, message.epoch, message.ready_epoch) == (State.LOADED, 0, 0)
    assert (calls, standing.epoch) == (["fenced"], 8)


def test_who_is_fenced_before_it_had_a_group_has_nothing_to_give_up() -> None:
    standing = MemberState(register("a"))
    standing.on_fenced = lambda: pytest.fail("there is nothing to fence")
    standing.take(Welcome(rank=1, settings=SETTINGS, epoch=8, heartbeat_interval=0.5, fenced=True))
    assert standing.state is State.LOADING


def test_forms_are_handed_on_unless_they_are_old(standing: MemberState) -> None:
    epochs = []
    standing.on_form = lambda form: epochs.append(form.epoch)
    for epoch in (5, 7, 6, 7, 8):
        standing.take(form(epoch))
    assert epochs == [5, 7, 7, 8], "repetitions, too"


def test_waits_and_refusals_are_remembered() -> None:
    standing = MemberState(register("a"))
    assert not standing.take(AdmissionWait("somebody holds the rank"))
    assert standing.waits_for == "somebody holds the rank"
    assert standing.take(AdmissionRefused("no"))
    assert standing.refusal == "no"
