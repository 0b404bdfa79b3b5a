"""Weights that are prepared in a thread, and switched between two turns."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from coordinator.messages import InFlight, StandingOrders, WeightUpdate, WeightVersion
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from engine.weight_versions.updating import WeightsLost, WeightsUpdating
from tests.waiting import until

UPDATE = WeightUpdate(WeightVersion(1, "one", "/new", update="u1"), InFlight.RECOMPUTE)
PREPARING = StandingOrders(revision=1, update=UPDATE)
DECIDED = StandingOrders(
    revision=2, weights=msgspec.structs.replace(UPDATE.version, digest="d1"), in_flight=InFlight.RECOMPUTE
)


class Versions:
    """Weights whose preparation waits to be let go on."""

    def __init__(self) -> None:
        self.may_end = threading.Event()
        self.calls: list[str] = []
        self.refusal = ""

    def prepare(self, update: WeightUpdate, should_stop: Callable[[], bool]) -> str:
        self.calls.append(f"prepare {update.version.update}")
        while not self.may_end.wait(0.005):
            if should_stop():
                raise WeightsSuperseded
        if self.refusal:
            raise WeightsRefused(self.refusal)
        return f"d{update.version.number}"

    def switch(self, update: WeightUpdate, in_flight: InFlight) -> None:
        self.calls.append(f"switch {update.version.update} {in_flight}")

    def discard(self, update: str) -> None:
        self.calls.append(f"discard {update}")


@pytest.fixture
def versions() -> Versions:
    return Versions()


@pytest.fixture
def updating(versions: Versions) -> Iterator[WeightsUpdating]:
    made = WeightsUpdating(versions, lambda: None)
    yield made
    made.close()


def test_prepared_beside_the_steps_and_switched_when_none_is_under_way(
    versions: Versions, updating: WeightsUpdating
) -> None:
    assert updating.follow(PREPARING, lambda: True), "the version in use is that of the orders"
    assert updating.report().prepared == ""
    versions.may_end.set()
    until(lambda: updating.report().prepared == "u1")
    assert updating.report().digest == "d1"
    assert updating.follow(PREPARING, lambda: True)
    assert not updating.follow(DECIDED, lambda: False), "a step is under way"
    assert updating.follow(DECIDED, lambda: True)
    assert versions.calls == ["prepare u1", "switch u1 recompute"]
    assert (updating.report().number, updating.report().prepared) == (1, "")


def test_what_is_not_wanted_any_more_is_stopped(versions: Versions, updating: WeightsUpdating) -> None:
    updating.follow(PREPARING, lambda: True)
    until(lambda: versions.calls == ["prepare u1"])
    other = msgspec.structs.replace(UPDATE, version=WeightVersion(1, "", "/newer", update="u2"))
    newer = msgspec.structs.replace(PREPARING, update=other)
    until(lambda: updating.follow(newer, lambda: True) and len(versions.calls) == 2)
    versions.may_end.set()
    until(lambda: updating.report().prepared == "u2")
    assert updating.follow(StandingOrders(), lambda: True)
    until(lambda: versions.calls[-1] == "discard u2")
    assert updating.report().prepared == ""


def test_a_refusal_is_reported_and_the_old_weights_go_on(
    versions: Versions, updating: WeightsUpdating
) -> None:
    versions.refusal = "a tensor is missing"
    versions.may_end.set()
    updating.follow(PREPARING, lambda: True)
    until(lambda: updating.report().failed == "u1")
    assert updating.report().reason == "a tensor is missing"
    assert updating.follow(PREPARING, lambda: True)
    assert versions.calls == ["prepare u1"], "it is not tried again"


def test_an_instance_that_cannot_have_the_weights_of_the_mesh_ends(
    versions: Versions, updating: WeightsUpdating
) -> None:
    versions.refusal = "/new is gone"
    versions.may_end.set()
    assert not updating.follow(DECIDED, lambda: True)
    until(lambda: updating.report().failed == "u1")
    with pytest.raises(WeightsLost, match="/new is gone"):
        updating.follow(DECIDED, lambda: True)
