"""Updates of the mesh's weights: decided by all, or abandoned."""

from __future__ import annotations

import random
from typing import Any

import pytest

from coordinator.member_state import MemberState
from coordinator.membership import weight_updates
from coordinator.membership.operations import ACCEPTED, CONFLICT, DONE, FAILED, UNAVAILABLE
from coordinator.membership.records import Record
from coordinator.membership.standing_orders import Orders
from coordinator.membership.weight_updates import WeightUpdates
from coordinator.messages import (
    Exited,
    InFlight,
    Load,
    OperatorAnswer,
    StandingOrders,
    State,
    Unknown,
    UpdateWeights,
    WeightsReport,
    WeightVersion,
)
from engine.weight_versions.following import DiscardWeights, Following, PrepareWeights, SwitchWeights
from tests.coordinator.membership.test_registry import to
from tests.coordinator.membership.test_standing_orders import Mesh
from tests.nightly import NIGHTLY


class UpdatedMesh(Mesh):
    """Instances that prepare what the orders name, and go over."""

    def __init__(self, size: int, chance: random.Random | None = None) -> None:
        self.following: dict[str, Following] = {}
        self.directories = {"/a": "digest a", "/b": "digest b"}
        self.used: dict[str, list[int]] = {}
        """Numbers of the versions in use, by instance."""
        self.under_way: dict[str, WeightVersion] = {}
        self.prepared: set[tuple[str, int]] = set()
        self._chance = chance
        super().__init__(size)

    def talk(self, member: MemberState, *, follows: bool = True) -> None:
        for _ in range(4):
            if follows:
                self.follow(member)
            for message in member.outgoing(Load()):
                for answer in self.send(member.register.instance, message):
                    member.take(answer)

    def follow(self, member: MemberState) -> None:
        """One turn of an instance's loop."""
        name, orders = member.register.instance, member.orders
        mine = self.following.setdefault(name, Following())
        if mine.preparing:
            self.finish(mine, name, orders)
        match mine.next(orders):
            case PrepareWeights(update):
                mine.begun(update.version.update)
                self.under_way[name] = update.version
                if self._chance is None:
                    self.finish(mine, name, orders)
            case SwitchWeights(update):
                mine.switched(update.version.number)
                self.used.setdefault(name, [0]).append(update.version.number)
            case DiscardWeights():
                mine.discarded()
        member.weights = mine.report()
        if mine.is_in_effect(orders):
            member.in_effect = max(member.in_effect, orders.revision)

    def finish(self, mine: Following, name: str, orders: StandingOrders) -> None:
        """What was being prepared is prepared, or is not wanted any more, or cannot be."""
        if mine.stops(orders):
            mine.failed("")
            return
        wanted = self.under_way[name]
        digest = self.directories.get(wanted.source)
        if digest is None:
            mine.failed(f"{wanted.source} is no directory")
        else:
            mine.prepared(digest)
            self.prepared.add((name, wanted.number))

    def update(self, source: str, command: str = "", **fields: object) -> OperatorAnswer:
        wish = UpdateWeights(command=command or source, source=source, **fields)  # type: ignore[arg-type]
        done = self.registry.handle(b"o", wish, self.now)
        for member in self.members:
            for message in to(member.register.instance.encode(), done):
                member.take(message)
        (answer,) = to(b"o", done)
        assert isinstance(answer, OperatorAnswer)
        return answer

    @property
    def orders(self) -> StandingOrders:
        return self.registry.view().orders


def test_all_prepare_then_all_go_over() -> None:
    mesh = UpdatedMesh(2)
    assert mesh.update("/a", label="five").status == ACCEPTED
    mesh.talk(mesh.members[0])
    assert mesh.orders.weights.number == 0, "one has not prepared it"
    assert mesh.used == {}
    mesh.talk(mesh.members[1])
    assert mesh.orders.update is None
    assert (mesh.orders.weights.number, mesh.orders.weights.digest) == (1, "digest a")
    assert mesh.update("/a").status == ACCEPTED
    mesh.talk_all()
    assert mesh.used == {"m0": [0, 1], "m1": [0, 1]}
    assert mesh.update("/a").status == DONE


@pytest.mark.parametrize("source", ["/nowhere", "/torn"])
def test_what_one_cannot_prepare_is_abandoned_with_its_reason(source: str) -> None:
    mesh = UpdatedMesh(2)
    mesh.update(source)
    mesh.talk_all()
    answer = mesh.update(source)
    assert answer.status == FAILED
    assert "instance 0" in answer.text
    assert "is no directory" in answer.text
    assert (mesh.orders.update, mesh.orders.weights.number) == (None, 0)
    assert mesh.update("/a").status == ACCEPTED, "the next one may begin"


def test_instances_that_read_different_weights_do_not_go_over() -> None:
    mesh = UpdatedMesh(2)
    mesh.update("/a")
    mesh.talk(mesh.members[0])
    mesh.directories["/a"] = "other digest"
    mesh.talk(mesh.members[1])
    answer = mesh.update("/a")
    assert answer.status == FAILED
    assert "different weights" in answer.text
    mesh.talk_all()
    assert mesh.used == {}


def test_two_updates_at_once_and_a_version_that_goes_back_are_refused() -> None:
    mesh = UpdatedMesh(1)
    mesh.update("/a", number=7)
    assert mesh.update("/b").status == CONFLICT
    mesh.talk_all()
    assert mesh.orders.weights.number == 7
    assert mesh.update("/b", number=7).status == CONFLICT
    assert mesh.update("/b", number=8).status == ACCEPTED


def test_an_update_that_is_not_prepared_in_time_is_abandoned() -> None:
    mesh = UpdatedMesh(2)
    mesh.update("/a")
    mesh.talk(mesh.members[0])
    mesh.now += weight_updates.PREPARE_TIMEOUT + 1
    for member in mesh.members:
        mesh.talk(member, follows=False)
    answer = mesh.update("/a")
    assert answer.status == FAILED
    assert "instance 1" in answer.text
    mesh.talk_all()
    assert mesh.following["m0"].report().prepared == "", "what was prepared is given back"


def test_nobody_serves() -> None:
    mesh = UpdatedMesh(0)
    assert mesh.update("/a").status == ACCEPTED, "those that serve may not have registered yet"
    mesh.registry.tick(mesh.now)
    assert mesh.update("/a").status == UNAVAILABLE


def test_an_instance_that_dies_while_it_prepares_holds_nothing_up() -> None:
    mesh = UpdatedMesh(2)
    mesh.update("/a")
    mesh.talk(mesh.members[0])
    gone = mesh.members.pop()
    mesh.send("s", Exited(gone.register.instance, "was killed"))
    mesh.talk_all()
    assert mesh.used == {"m0": [0, 1]}
    joiner = mesh.join()
    mesh.talk(joiner)
    assert mesh.used[joiner.register.instance] == [0, 1], "it reads the new directory"
    assert mesh.update("/a").status == DONE


def test_a_joiner_is_not_ready_before_it_has_the_current_weights() -> None:
    mesh = UpdatedMesh(1)
    mesh.update("/a")
    mesh.talk_all()
    joiner = mesh.join()
    assert joiner.weights == WeightsReport(number=1)


def test_what_becomes_of_requests_goes_along() -> None:
    mesh = UpdatedMesh(1)
    mesh.update("/a", in_flight=InFlight.RECOMPUTE)
    mesh.talk_all()
    assert mesh.orders.in_flight is InFlight.RECOMPUTE


def test_a_restarted_coordinator_goes_on_with_the_update() -> None:
    mesh = UpdatedMesh(2)
    mesh.update("/a")
    mesh.talk(mesh.members[0])
    mesh.restart()
    mesh.talk_all()
    mesh.talk_all()
    assert mesh.used == {"m0": [0, 1], "m1": [0, 1]}
    assert mesh.update("/a").status == DONE


def run(seed: int) -> None:
    """All use versions that all had prepared, and come to the same one."""
    rng = random.Random(seed)
    mesh = UpdatedMesh(rng.randint(1, 3), rng)
    number = 0
    for _ in range(80):
        registry, update = mesh.registry, mesh.orders.update
        serving = {each.instance for each in registry.view().members if each.state is State.READY}
        match rng.randrange(9):
            case 0:
                number += 1
                source = rng.choice(("/a", "/b", "/a", "/b", "/nowhere"))
                mesh.update(source, f"update {number}", in_flight=rng.choice(list(InFlight)))
            case 1 if len(mesh.members) < 5:
                mesh.join()
            case 2:
                mesh.restart()
                mesh.talk(rng.choice(mesh.members))
            case 3 if len(mesh.members) > 1:
                gone = mesh.members.pop(rng.randrange(len(mesh.members)))
                serving.discard(gone.register.instance)
                mesh.send("s", Exited(gone.register.instance, "was killed"))
            case 4:
                rng.choice(mesh.members).take(Unknown())
            case _:
                mesh.talk(rng.choice(mesh.members), follows=rng.random() < 0.7)
        weights = mesh.orders.weights
        if mesh.registry is registry and update is not None and weights.update == update.version.update:
            assert all((name, weights.number) in mesh.prepared for name in serving), "decided too early"
        for name, numbers in mesh.used.items():
            assert numbers == sorted(numbers), f"the version of {name} falls: {numbers}"
            assert all((name, each) in mesh.prepared for each in numbers[1:])
    for _ in range(12):
        mesh.talk_all()
    orders = mesh.orders
    assert orders.update is None
    assert {mesh.following[each.register.instance].number for each in mesh.members} == {orders.weights.number}
    assert {each.orders for each in mesh.members} == {orders}


@pytest.mark.parametrize("seed", range(10_000 if NIGHTLY else 50))
def test_versions_rise_together_whatever_happens(seed: int) -> None:
    run(seed)


class DecidesForOne(WeightUpdates):
    """A swap on one instance: all go over once one has prepared it."""

    def _missing(self, serving: list[Record], version: WeightVersion) -> list[str]:
        missing = super()._missing(serving, version)
        return missing if len(missing) == len(serving) else []


class GoesBack(Orders):
    """Weights are those of the newest orders, though an instance uses later ones."""

    def learn(self, theirs: StandingOrders | None) -> None:
        super().learn(theirs)
        if theirs is not None and theirs.token and self.current.weights.number > theirs.weights.number:
            self.change(weights=theirs.weights)


class ReadsTheOldDirectory(Following):
    """An instance that begins takes its own weights for those of the mesh."""

    def is_in_effect(self, orders: StandingOrders) -> bool:
        if self.number == 0 and not self.report().prepared:
            return True
        return super().is_in_effect(orders)


class KeepsWhatIsNotWanted(Following):
    def next(self, orders: StandingOrders) -> PrepareWeights | SwitchWeights | DiscardWeights | None:
        found = super().next(orders)
        return None if isinstance(found, DiscardWeights) else found


REGISTRY = "coordinator.membership.registry"
PLANTED: dict[type[Any], str] = {
    DecidesForOne: f"{REGISTRY}.WeightUpdates",
    GoesBack: f"{REGISTRY}.Orders",
    ReadsTheOldDirectory: f"{__name__}.Following",
    KeepsWhatIsNotWanted: f"{__name__}.Following",
}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PLANTED[bug], bug)
    for seed in range(200):
        try:
            run(seed)
        except AssertionError:
            return
    pytest.fail(f"nothing noticed {bug.__name__}")


def test_a_command_that_is_asked_again_after_a_later_update_begins_nothing() -> None:
    mesh = UpdatedMesh(1)
    mesh.update("/a")
    mesh.talk_all()
    assert mesh.update("/b").status == ACCEPTED
    mesh.talk_all()
    assert mesh.update("/a").status == DONE
    assert (mesh.orders.update, mesh.orders.weights.source) == (None, "/b")
