"""Instances that reach the coordinator but not each other: left out, and let back."""

from __future__ import annotations

import pytest

from coordinator.membership.operations import ACCEPTED, DONE
from coordinator.membership.reach import MAX_REMEMBERED, Reachability, without_cuts
from coordinator.membership.records import Record, Records, Rules
from coordinator.messages import (
    MAX_REACH_PEERS,
    Evidence,
    GroupPlan,
    OperatorAnswer,
    OrdersReport,
    PauseMode,
    Probe,
    SetPause,
    State,
    Welcome,
)
from tests.coordinator.membership.group_mesh import Mesh, members
from tests.coordinator.membership.test_registry import to


def fails(mesh: Mesh, evidence: Evidence = Evidence.CLOSED) -> None:
    """The newest group cannot form, or breaks where data does not pass.

    Each member reports what it sees.
    """
    form = next(form for form in mesh.forms.values() if form.epoch == mesh.registry.view().epoch)
    names = members(form)
    for name in names:
        suspects = [other for other in names if (name, other) in mesh.cut]
        if suspects:
            mesh.lost(name, form.epoch, suspects[0], evidence)
    for name in names:
        if any(isinstance(message, Probe) for message in mesh.sent[name]):
            mesh.answer(name)


def fails_often(mesh: Mesh, times: int, alive: str, evidence: Evidence = Evidence.CLOSED) -> None:
    for _ in range(times):
        fails(mesh, evidence)
        mesh.wait(6.0, alive)


def joins_again(mesh: Mesh, name: str) -> None:
    """An instance that was taken out learns of that, and comes back with its weights."""
    mesh.beats.pop(name)
    welcome = mesh.register(name, epoch=1)
    assert isinstance(welcome, Welcome)
    assert welcome.fenced, "it gives up its group and its requests"
    mesh.says(name)


def stays_out_until_reached(mesh: Mesh, name: str, seconds: float, alive: str) -> None:
    """Groups leave an instance out while it is cut off, and have it soon after."""
    mesh.wait(seconds, alive)
    assert members(mesh.forms["a"]) == alive.replace(name, "")
    mesh.cut.clear()
    mesh.wait(6.0, alive)
    assert members(mesh.forms["a"]) == alive


@pytest.fixture
def pair() -> Mesh:
    mesh = Mesh(size=2)
    mesh.begin("ab")
    mesh.new_forms()
    return mesh


def test_of_two_who_lose_each_other_one_serves_on_and_the_other_is_let_back(pair: Mesh) -> None:
    pair.split("a", "b")
    fails(pair, Evidence.DEADLINE)
    assert [(name, members(form)) for name, form in pair.new_forms()] == [("a", "ab"), ("b", "ab")]
    fails(pair)
    pair.wait(1.0, "ab")
    assert pair.asked == [], "it may pass"
    assert pair.ranks() == [0, 1]
    fails(pair)
    assert pair.asked == [("a", "b"), ("b", "a")]
    pair.wait(0.25, "a")
    assert pair.ranks() == [0]
    assert ("a", "a") in [(name, members(form)) for name, form in pair.new_forms()]
    assert "instance 1 is left out: no connection to instance 0 (b to a)" in pair.notes
    pair.enters("a")
    joins_again(pair, "b")
    view = pair.registry.view()
    assert [(each.state, each.phase) for each in view.members] == [
        (State.READY, ""),
        (State.LOADED, "left out: no connection to instance 0 (b to a)"),
    ]
    assert view.waiting_for == "rank 1 (left out: no connection to instance 0 (b to a))"
    pair.new_forms()
    pair.wait(30.0, "ab")
    assert pair.new_forms() == [], "no group is tried as long as the way is not there"
    pair.cut.clear()
    pair.wait(6.0, "ab")
    assert {members(form) for _, form in pair.new_forms()} == {"ab"}
    assert "instance 1 is let back: all reach it, and it them" in pair.notes
    pair.all_enter("ab")
    assert pair.registry.view().waiting_for == ""


@pytest.mark.parametrize("way", [("a", "b"), ("b", "a")])
def test_one_way_that_is_cut_is_enough(way: tuple[str, str], pair: Mesh) -> None:
    pair.cut = {way}
    fails_often(pair, 3, "ab")
    assert pair.ranks() == [0]
    pair.enters("a")
    joins_again(pair, "b")
    stays_out_until_reached(pair, "b", 20.0, "ab")


def test_one_who_is_left_out_holds_no_order_up(pair: Mesh) -> None:
    pair.cut = {("a", "b")}
    fails_often(pair, 3, "ab")
    pair.enters("a")
    joins_again(pair, "b")
    pair.says("b", state=State.READY, epoch=1)
    wish = SetPause(command="pause", mode=PauseMode.KEEP)

    def status() -> int:
        (answer,) = to(b"o", pair.registry.handle(b"o", wish, pair.now))
        assert isinstance(answer, OperatorAnswer)
        return answer.status

    assert status() == ACCEPTED
    revision = pair.registry.view().orders.revision
    pair.says("a", orders=OrdersReport(revision=revision, in_effect=True))
    assert status() == DONE, "it is in no group, and computes nothing"
    pair.cut.clear()
    pair.wait(6.0, "ab")
    assert status() == ACCEPTED
    pair.says("b", orders=OrdersReport(revision=revision, in_effect=True))
    assert status() == DONE


def test_whom_fewest_others_reach_is_left_out() -> None:
    mesh = Mesh(size=4)
    mesh.begin("abcd")
    mesh.split("a", "bcd")
    fails_often(mesh, 3, "abcd")
    assert mesh.ranks() == [1, 2, 3]
    assert members(mesh.forms["b"]) == "bcd"
    assert "instance 0 is left out: no connection to instances 1, 2, 3 (a to b, c, d)" in mesh.notes


def test_of_two_halves_one_serves_on_at_once() -> None:
    mesh = Mesh(size=4)
    mesh.begin("abcd")
    mesh.split("ab", "cd")
    fails_often(mesh, 3, "abcd")
    assert members(mesh.forms["a"]) == "ab"
    assert mesh.registry.view().epoch == mesh.forms["a"].epoch


def test_those_who_were_left_out_serve_when_the_others_lack_room() -> None:
    """Two hold all experts: a and b go on, until b is gone."""
    mesh = Mesh(size=4, room=4)
    mesh.begin("abcd")
    mesh.split("ab", "cd")
    fails_often(mesh, 3, "abcd")
    mesh.all_enter("ab")
    for name in "cd":
        joins_again(mesh, name)
    mesh.wait(6.0, "abcd")
    assert members(mesh.forms["a"]) == "ab"
    mesh.leave("b")
    mesh.wait(6.0, "acd")
    assert members(mesh.forms["c"]) == "cd"
    assert "instance 0 is left out: no connection to instances 2, 3 (a to c, d)" in mesh.notes


def test_where_all_reach_each_other_and_lack_room_nobody_is_blamed() -> None:
    """Four hold all experts. One was left out, and is reached when two are gone."""
    mesh = Mesh(size=5, room=2)
    mesh.begin("abcde")
    mesh.split("e", "abcd")
    fails_often(mesh, 3, "abcde")
    mesh.all_enter("abcd")
    joins_again(mesh, "e")
    for name in "ab":
        mesh.leave(name)
    mesh.wait(1.0, "cde")
    assert "it has no connection to instances 1, 2, 3" in mesh.registry.view().waiting_for
    mesh.cut.clear()
    mesh.wait(10.0, "cde")
    assert mesh.ranks() == [2, 3, 4]
    mesh.register("f")
    mesh.says("f")
    mesh.wait(10.0, "cdef")
    assert members(mesh.forms["c"]) == "cdef"


def test_before_the_first_group_it_is_the_same() -> None:
    mesh = Mesh(size=2)
    for name in "ab":
        mesh.register(name)
    mesh.split("a", "b")
    for name in "ab":
        mesh.says(name, state=State.LOADED)
    fails_often(mesh, 3, "ab")
    assert members(mesh.forms["a"]) == "a"
    mesh.enters("a")
    assert [each.state for each in mesh.registry.view().members] == [State.READY]


def test_a_newcomer_that_nobody_reaches_ends_no_step_and_is_tried_three_times(pair: Mesh) -> None:
    """The group of the serving instances goes on, formed anew between two tries."""
    pair.split("c", "ab")
    pair.register("c")
    pair.says("c")
    for _ in range(6):
        form = pair.forms["a"]
        if "c" in members(form):
            fails(pair)
        else:
            pair.all_enter("ab")
        pair.wait(6.0, "abc")
    assert [members(form) for _, form in pair.new_forms()].count("abc") == 3 * 3
    assert pair.ranks() == [0, 1]
    pair.all_enter("ab")
    joins_again(pair, "c")
    stays_out_until_reached(pair, "c", 30.0, "abc")


def test_where_the_experts_do_not_fit_without_it_nobody_is_left_out_and_the_view_says_why() -> None:
    mesh = Mesh(size=2, room=4)
    mesh.begin("ab")
    mesh.split("a", "b")
    fails_often(mesh, 5, "ab")
    assert mesh.ranks() == [0, 1]
    view = mesh.registry.view()
    assert view.waiting_for == (
        "a way to rank 1, without which the experts do not fit: it has no connection to instance 0 (b to a)"
    )
    assert {each.state for each in view.members} == {State.LOADED}, "nobody is to send them requests"
    mesh.cut.clear()
    mesh.wait(6.0, "ab")
    mesh.all_enter("ab")
    view = mesh.registry.view()
    assert view.waiting_for == ""
    assert {each.state for each in view.members} == {State.READY}


def test_connections_that_are_made_and_carry_nothing_are_taken_for_cut_when_nobody_else_is_named(
    pair: Mesh,
) -> None:
    """As where large packets are lost: both wait for each other up to every deadline."""

    def breaks() -> None:
        pair.all_enter("ab")
        epoch = pair.registry.view().epoch
        pair.wait(60.0, "ab")
        pair.lost("a", epoch, "b", Evidence.DEADLINE)
        pair.lost("b", epoch, "a", Evidence.DEADLINE)
        pair.answer("ab")

    for _ in range(3):
        breaks()
        pair.wait(6.0, "ab")
    assert pair.ranks() == [0]
    pair.enters("a")
    joins_again(pair, "b")
    pair.wait(250.0, "ab")
    assert members(pair.forms["a"]) == "a", "that it connects proves nothing"
    pair.wait(60.0, "ab")
    assert members(pair.forms["a"]) == "ab"
    breaks()
    assert pair.ranks() == [0], "these have failed three times before: once more is enough"
    joins_again(pair, "b")
    pair.enters("a")
    pair.wait(500.0, "ab")
    assert members(pair.forms["a"]) == "a", "each time it is left out for twice as long"


def test_one_that_comes_late_to_each_group_is_not_taken_for_unreachable(pair: Mesh) -> None:
    """It enters each group late, and answers."""
    for _ in range(5):
        pair.enters("a")
        pair.wait(20.0, "ab")
        pair.lost("a", pair.forms["a"].epoch, "b", Evidence.DEADLINE)
        pair.enters("b")
        pair.answer("b")
        pair.wait(6.0, "ab")
    assert pair.ranks() == [0, 1]
    assert members(pair.forms["a"]) == "ab"


def test_who_gives_a_group_up_is_not_taken_for_unreachable(pair: Mesh) -> None:
    for _ in range(6):
        pair.all_enter("ab")
        pair.lost("a", pair.registry.view().epoch, "b", Evidence.CLOSED)
        pair.answer("b")
        pair.wait(6.0, "ab")
    assert pair.ranks() == [0, 1]
    assert pair.registry.view().waiting_for.startswith("a group that holds (epoch ")
    assert "try 6 of the same members" in pair.registry.view().waiting_for
    pair.all_enter("ab")
    assert pair.registry.view().waiting_for == ""


def test_a_group_that_held_for_long_begins_the_count_anew(pair: Mesh) -> None:
    pair.split("a", "b")
    for _ in range(4):
        pair.all_enter("ab")
        pair.wait(400.0, "ab")
        fails(pair, Evidence.DEADLINE)
        pair.wait(1.0, "ab")
    assert pair.ranks() == [0, 1]
    assert pair.asked == []


def test_no_answer_is_no_evidence_and_holds_a_group_up_for_a_bounded_time(pair: Mesh) -> None:
    """As from an instance of an older version, which does not know the question."""
    pair.mute = "ab"
    pair.split("a", "b")
    for _ in range(2):
        pair.all_enter("ab")
        pair.lost("a", pair.registry.view().epoch, "b", Evidence.CLOSED)
        pair.answer("b")
        pair.wait(6.0, "ab")
    pair.all_enter("ab")
    epoch = pair.registry.view().epoch
    pair.lost("a", epoch, "b", Evidence.CLOSED)
    pair.answer("b")
    pair.wait(3.5, "ab")
    assert pair.registry.view().epoch == epoch
    pair.wait(1.0, "ab")
    assert (pair.registry.view().epoch, pair.ranks()) == (epoch + 1, [0, 1])


def test_a_death_does_not_wait_for_answers() -> None:
    mesh = Mesh()
    mesh.begin()
    mesh.mute = "abc"
    mesh.split("a", "b")
    for _ in range(2):
        fails(mesh)
        mesh.wait(6.0, "abc")
    fails(mesh)
    epoch = mesh.registry.view().epoch
    mesh.lost("a", epoch, "c", Evidence.EXITED)
    mesh.wait(0.25, "ab")
    assert members(mesh.forms["a"]) == "ab"


def test_who_is_left_out_and_ends_is_forgotten(pair: Mesh) -> None:
    pair.split("a", "b")
    fails_often(pair, 3, "ab")
    pair.enters("a")
    joins_again(pair, "b")
    pair.leave("b")
    assert repr(pair.registry._groups.reach) == "<Reachability 1 sets of members failed, left out: []>"


def record(rank: int, epoch: int = 1) -> Record:
    name = f"i{rank}"
    return Record(
        name, rank, name.encode(), f"h{rank % 2}", rank, heard_at=0.0, epoch=epoch, store=f"h:{rank}"
    )


@pytest.mark.parametrize(
    ("cuts", "newcomers", "stay"),
    [
        ([], [], [0, 1, 2, 3]),
        ([(0, 1)], [], [0, 2, 3]),
        ([(0, 1)], [0], [1, 2, 3]),
        ([(0, 1), (0, 2)], [], [1, 2, 3]),
        ([(0, 1), (2, 3)], [], [0, 2]),
        ([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], [], [0]),
    ],
)
def test_the_fewest_go_of_several_the_newest_then_the_last(
    cuts: list[tuple[int, int]], newcomers: list[int], stay: list[int]
) -> None:
    those = [record(rank, epoch=0 if rank in newcomers else 1) for rank in range(4)]
    cut = {frozenset((f"i{one}", f"i{other}")) for one, other in cuts}
    assert [each.rank for each in without_cuts(those, cut)] == stay


def test_a_large_mesh_asks_and_remembers_a_bounded_number() -> None:
    records = Records()
    for rank in range(200):
        records.add(record(rank))
    reach = Reachability(Rules(), records)
    peers = [each.group_peer() for each in records.values()]
    form = GroupPlan(epoch=1, store="", peers=peers)
    asked = [reach.failed(form, 0.0, [], 1.0) for _ in range(3)][-1]
    assert len(asked) == 200
    assert {len(question.peers) for _, question in asked} == {MAX_REACH_PEERS}
    asks, question = asked[0]
    assert all(int(name[1:]) % 2 != asks.rank % 2 for name in question.peers), "of other hosts first"
    for size in range(1, 40):
        reach.failed(GroupPlan(epoch=1, store="", peers=peers[:size]), 0.0, [], 1.0)
    assert len(reach._tries) == MAX_REMEMBERED
