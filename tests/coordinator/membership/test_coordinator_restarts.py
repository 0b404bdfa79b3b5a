"""A restarted coordinator with spread experts: which instances live, and in which group."""

from __future__ import annotations

import msgspec

from coordinator.messages import (
    Beat,
    Evidence,
    View,
    ViewChange,
    Watch,
    Welcome,
)
from tests.coordinator.membership.group_mesh import Mesh, members
from tests.coordinator.membership.test_registry import to


def test_a_restarted_coordinator_changes_nothing_when_all_are_back(mesh: Mesh) -> None:
    mesh.restart_coordinator()
    for name in "abc":
        assert isinstance(mesh.register(name, epoch=1, group=mesh.forms[name]), Welcome)
        mesh.says(name)
    mesh.wait(10.0, alive="abc")
    assert mesh.new_forms() == []
    assert mesh.registry.view().epoch == 1
    mesh.says("a")
    assert mesh.sent["a"][-1] == Beat(1, 3)


def test_a_restarted_coordinator_waits_for_the_members_of_the_group(mesh: Mesh) -> None:
    mesh.restart_coordinator()
    for name in "ab":
        mesh.register(name, epoch=1, group=mesh.forms[name])
        mesh.says(name)
    mesh.wait(4.9, alive="ab")
    assert mesh.new_forms() == []
    mesh.wait(0.2, alive="ab")
    assert {(members(form), form.epoch) for _, form in mesh.new_forms()} == {("ab", 2)}


def test_a_restarted_coordinator_hears_of_a_death_in_its_absence(mesh: Mesh) -> None:
    mesh.restart_coordinator()
    for name in "ab":
        mesh.register(name, epoch=1, group=mesh.forms[name])
        mesh.says(name)
    mesh.lost("a", 1, "c")
    mesh.answer("b")
    mesh.wait(1.9, alive="ab")
    assert mesh.new_forms() == [], "c may be on its way"
    mesh.wait(0.2, alive="ab")
    assert {(members(form), form.epoch, form.broken) for _, form in mesh.new_forms()} == {("ab", 2, 1)}


def test_one_report_repeated_to_a_restarted_coordinator_takes_nobody_out(mesh: Mesh) -> None:
    """Schedule 304312 of the elastic simulator.

    c sends a wake that reaches a and not b, and is stopped. So a waits in vain for b, which sleeps. The report
    is repeated until another group is formed, and that has to wait for c.
    """
    mesh.restart_coordinator()
    for name in "ab":
        mesh.register(name, epoch=1, group=mesh.forms[name])
        mesh.says(name)
    for _ in range(6):
        mesh.lost("a", 1, "b", Evidence.DEADLINE)
        mesh.answer("b")
        mesh.wait(0.75, alive="ab")
        assert mesh.ranks() == [0, 1]
    mesh.wait(0.75, alive="ab")
    assert {(members(form), form.epoch, form.broken) for _, form in mesh.new_forms()} == {("ab", 2, 1)}
    mesh.enters("a")
    mesh.lost("a", 2, "b", Evidence.DEADLINE)
    mesh.answer("b")
    mesh.wait(0.5, alive="ab")
    assert mesh.ranks() == [0], "b stands still in the second group, too"


def test_a_restarted_coordinator_may_hear_of_an_older_group_first(mesh: Mesh) -> None:
    older = mesh.forms["a"]
    newer = msgspec.structs.replace(older, epoch=2, peers=older.peers[1:])
    mesh.restart_coordinator()
    mesh.register("a", epoch=1, group=msgspec.structs.replace(older, peers=older.peers[:1]))
    mesh.says("a")
    mesh.wait(1.0, alive="a")
    assert mesh.new_forms() == []
    for name in "bc":
        mesh.register(name, epoch=2, group=newer)
        mesh.says(name, epoch=2)
    mesh.wait(1.5, alive="abc")
    assert {(members(form), form.epoch, form.broken) for _, form in mesh.new_forms()} == {("abc", 3, 1)}


def test_a_restarted_coordinator_that_finds_all_in_one_group_acts_on_a_loss_at_once(mesh: Mesh) -> None:
    group = mesh.forms["a"]
    mesh.restart_coordinator()
    for name in "abc":
        mesh.register(name, epoch=1, group=group)
        mesh.says(name)
    mesh.wait(0.25, alive="abc")
    assert mesh.new_forms() == []
    for name in "ab":
        mesh.lost(name, 1, "c", Evidence.EXITED)
    mesh.answer("b")
    assert {(members(form), form.epoch) for _, form in mesh.new_forms()} == {("ab", 2)}


def test_the_view_of_a_coordinator_that_just_began_is_not_complete(mesh: Mesh) -> None:
    mesh.restart_coordinator()
    (view,) = to(b"w", mesh.registry.handle(b"w", Watch("router"), mesh.now))
    assert isinstance(view, View)
    assert (view.members, view.complete) == ([], False)
    mesh.registry.tick(mesh.now)
    assert to(b"w", mesh.registry.tick(mesh.now + 4.9)) == []
    (change,) = to(b"w", mesh.registry.tick(mesh.now + 5.0))
    assert isinstance(change, ViewChange)
    assert change.complete


def test_the_view_is_complete_earlier_once_all_serve(mesh: Mesh) -> None:
    group = mesh.forms["a"]
    mesh.restart_coordinator()
    mesh.registry.handle(b"w", Watch("router"), mesh.now)
    for name in "ab":
        mesh.register(name, epoch=1, group=group)
        mesh.says(name)
    mesh.wait(2.0, alive="ab")
    assert not mesh.registry.view().complete, "the third may still look for the coordinator"
    mesh.register("c", epoch=1, group=group)
    mesh.says("c")
    mesh.registry.tick(mesh.now)
    assert mesh.registry.view().complete


def test_a_coordinator_that_just_began_may_find_a_mesh() -> None:
    mesh = Mesh(1)
    mesh.restart_coordinator()
    mesh.wait(0.5)
    mesh.register("a")
    mesh.says("a")
    assert mesh.new_forms() == []
    mesh.wait(2.0, alive="a")
    assert [(name, members(form)) for name, form in mesh.new_forms()] == [("a", "a")]


def test_a_mesh_that_had_begun_but_has_no_group_does_not_wait_for_all(mesh: Mesh) -> None:
    mesh.restart_coordinator()
    for name in "ab":
        mesh.register(name, epoch=1)
        mesh.says(name, epoch=0, ready_epoch=0)
    mesh.wait(4.5, alive="ab")
    assert mesh.new_forms() == []
    mesh.wait(1.0, alive="ab")
    assert {(members(form), form.epoch) for _, form in mesh.new_forms()} == {("ab", 2)}


def test_a_restarted_coordinator_goes_above_every_epoch_that_anybody_knows(mesh: Mesh) -> None:
    """Epoch 2 had been sent to some instances, and nobody enters it: epoch 3 follows."""
    mesh.restart_coordinator()
    mesh.register("a", epoch=2, group=mesh.forms["a"])
    for name in "bc":
        mesh.register(name, epoch=1, group=mesh.forms[name])
    mesh.wait(2.5, alive="abc")
    assert {(members(form), form.epoch, form.broken) for _, form in mesh.new_forms()} == {("abc", 3, 0)}


def test_members_found_in_different_epochs_go_on_in_the_next_one(mesh: Mesh) -> None:
    older = mesh.forms["c"]
    newer = msgspec.structs.replace(older, epoch=5)
    mesh.restart_coordinator()
    for name, group in ("c", older), ("a", newer), ("b", newer):
        mesh.register(name, epoch=group.epoch, group=group)
        mesh.says(name, epoch=group.epoch)
    mesh.wait(2.5, alive="abc")
    assert {(members(form), form.epoch, form.broken) for _, form in mesh.new_forms()} == {("abc", 6, 1)}
