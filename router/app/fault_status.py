"""The state of each instance for ``GET /fault_tolerance/status``, in vLLM's format (pure).

vLLM waits for a command after a fault. Here instances that are lost are replaced without one, so the status
only reports.
"""

from __future__ import annotations

import enum

import msgspec
from msgspec import UNSET, UnsetType

from coordinator.messages import Member, State, View
from router.dispatch.policy import STALLED_AFTER

SCHEMA_VERSION = 1


class EngineStatus(enum.StrEnum):
    """States of an instance, in vLLM's words."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """It takes no requests now; ``fault_info`` has the reason."""
    DEAD = "dead"
    """No instance has this rank, though the mesh began with one."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    """The data-parallel rank."""
    status: EngineStatus
    fault_info: str | UnsetType = UNSET


class FaultStatus(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    total_engines: int
    engines: list[EngineState]
    """States of all instances, by rank."""


def fault_status(view: View | None) -> FaultStatus:
    """Status of all instances by the newest view; empty without one.

    A rank above those that the mesh began with is left out once its instance is gone.
    """
    if view is None:
        return FaultStatus(total_engines=0, engines=[])
    found = {member.rank: _state_of(member) for member in view.members}
    for rank in range(view.size or 0 if view.complete else 0):
        gone = EngineState(id=rank, status=EngineStatus.DEAD, fault_info="no instance has this rank")
        found.setdefault(rank, gone)
    return FaultStatus(total_engines=len(found), engines=[found[rank] for rank in sorted(found)])


def _state_of(member: Member) -> EngineState:
    stalled = member.load.stalled_for
    if member.state is not State.READY:
        reason = f"{member.state}: {member.phase}" if member.phase != member.state else str(member.state)
    elif stalled >= STALLED_AFTER:
        reason = f"no step for {stalled:.0f} s though there is work"
    else:
        return EngineState(id=member.rank, status=EngineStatus.HEALTHY)
    return EngineState(id=member.rank, status=EngineStatus.UNHEALTHY, fault_info=reason)
