"""Frames of the dashboard, made from this router's view of the mesh (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from coordinator.messages import AnswerChecks, Member, View
from engine.messages import InstanceReport, LockstepCounters
from router.app.dashboard.wire import (
    MAX_FAULTS,
    MAX_INSTANCES,
    MAX_REQUESTS,
    Frame,
    InstanceState,
    StepTotals,
    Told,
)
from router.dispatch.ledger import Flight
from router.dispatch.pool import InstanceHealth
from router.faults import FaultEvent, Faults


class DashboardMesh(Protocol):
    """Interface of the mesh for the dashboard, which ``MeshClient`` implements."""

    @property
    def view(self) -> View | None: ...
    @property
    def coordinator_silent_for(self) -> float | None: ...
    @property
    def num_in_flight(self) -> int: ...

    def reports(self) -> Mapping[int, InstanceReport]: ...
    def instance_health(self) -> Mapping[int, InstanceHealth]: ...
    def flights(self, most: int) -> Sequence[Flight]: ...


def frame_of(mesh: DashboardMesh, faults: Faults, num_requests: int, front_end: int, now: float) -> Frame:
    """Frame of the mesh at ``now``, a Unix time; ``num_requests`` are in flight."""
    view = mesh.view
    reports, health = mesh.reports(), mesh.instance_health()
    members = view.members if view is not None else []
    settings = view.settings if view is not None else None
    return Frame(
        at=now,
        model=settings.served_model_name[0] if settings else None,
        epoch=view.epoch if view is not None else None,
        size=view.size if view is not None else None,
        max_num_seqs=settings.max_num_seqs if settings else None,
        waiting_for=view.waiting_for if view is not None else "the coordinator",
        coordinator_silent_for=mesh.coordinator_silent_for,
        front_end=front_end,
        num_instances=len(members),
        instances=[
            _instance(member, reports.get(member.rank), health.get(member.rank))
            for member in members[:MAX_INSTANCES]
        ],
        num_requests=num_requests,
        num_requests_here=mesh.num_in_flight,
        requests=list(mesh.flights(MAX_REQUESTS)),
        answers=view.answers if view is not None else AnswerChecks(),
        resumes=sum(faults.counts.get(FaultEvent.RESUME, {}).values()),
        faults=faults.recent[-MAX_FAULTS:],
        balance=view.balance if view is not None else None,
    )


def _instance(member: Member, report: InstanceReport | None, health: InstanceHealth | None) -> InstanceState:
    return InstanceState(
        rank=member.rank,
        state=member.state.value,
        phase=member.phase,
        host=member.host,
        pid=member.pid,
        instance=member.instance,
        role=member.role,
        load=member.load,
        numerics=member.numerics,
        odd=member.odd,
        told=_told(report) if report is not None else None,
        router=health,
    )


def _told(report: InstanceReport) -> Told:
    counters = report.counters
    return Told(
        prompt_tokens=counters.prompt_tokens,
        generation_tokens=counters.generation_tokens,
        steps=counters.steps,
        preemptions=counters.preemptions,
        cache_queries=counters.prefix_cache_queries,
        cache_hits=counters.prefix_cache_hits,
        waiting_tokens=report.waiting_tokens,
        running=report.running,
        waiting=report.waiting,
        blocks_used=report.blocks_used,
        blocks_total=report.blocks_total,
        lockstep=_steps(report.lockstep) if report.lockstep is not None else None,
    )


def _steps(counters: LockstepCounters) -> StepTotals:
    return StepTotals(
        steps=counters.steps,
        wait=counters.wait_seconds,
        attention=counters.attention_seconds,
        dispatch=counters.dispatch_seconds,
        experts=counters.experts_seconds,
        combine=counters.combine_seconds,
        rest=counters.rest_seconds,
        sleeps=counters.sleeps,
        busiest_tokens=counters.busiest_tokens,
        mean_tokens=counters.mean_tokens,
        tokens_per_expert=counters.tokens_per_expert,
    )
