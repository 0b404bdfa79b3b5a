"""The state of instances in vLLM's words."""

from __future__ import annotations

import msgspec

from coordinator.messages import Load, Member, State, View
from router.app.fault_status import fault_status
from tests.router.conftest import Server


def member(rank: int, state: State = State.READY, phase: str = "serving", stalled_for: float = 0.0) -> Member:
    return Member(
        instance=f"i{rank}", rank=rank, state=state, phase=phase, address="tcp://a:1", host="h", pid=1,
        load=Load(running=1, stalled_for=stalled_for),
    )  # fmt: skip


def view(*members: Member, size: int | None = 2, complete: bool = True) -> View:
    return View(epoch=1, size=size, settings=None, members=list(members), waiting_for="", complete=complete)


def states(seen: View) -> dict[int, str]:
    return {each.id: each.status.value for each in fault_status(seen).engines}


def test_instances_are_healthy_unhealthy_or_dead() -> None:
    seen = view(
        member(3), member(0), member(1, stalled_for=60.0), member(2, State.LOADING, "weights"), size=5
    )
    found = msgspec.to_builtins(fault_status(seen))
    assert found == {
        "schema_version": 1,
        "total_engines": 5,
        "engines": [
            {"id": 0, "status": "healthy"},
            {"id": 1, "status": "unhealthy", "fault_info": "no step for 60 s though there is work"},
            {"id": 2, "status": "unhealthy", "fault_info": "loading: weights"},
            {"id": 3, "status": "healthy"},
            {"id": 4, "status": "dead", "fault_info": "no instance has this rank"},
        ],
    }


def test_an_instance_that_drains_takes_no_requests() -> None:
    assert states(view(member(0), member(1, State.DRAINING, "draining"))) == {0: "healthy", 1: "unhealthy"}


def test_a_coordinator_that_has_just_started_declares_nobody_dead() -> None:
    assert states(view(member(0), complete=False)) == {0: "healthy"}


def test_a_mesh_of_any_size_has_no_dead_ranks() -> None:
    assert states(view(member(4), size=None)) == {4: "healthy"}


def test_without_a_view_no_instance_is_known(server: Server) -> None:
    answer = server.client.get("/fault_tolerance/status")
    assert answer.json() == {"schema_version": 1, "total_engines": 0, "engines": []}
