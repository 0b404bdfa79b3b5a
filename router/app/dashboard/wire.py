"""Frames of the dashboard, sent every second.

They hold totals, not rates: the browser takes differences, so that a frame which it missed costs it nothing.
"""

from __future__ import annotations

import msgspec

from coordinator.messages import AnswerChecks, ExpertBalance, Load, Role
from coordinator.numerics import Numerics
from router.dispatch.ledger import Flight
from router.dispatch.pool import InstanceHealth
from router.faults import Fault

MAX_INSTANCES = 256
"""Most instances in a frame, by rank; ``num_instances`` counts all."""
MAX_REQUESTS = 200
"""Running requests listed in one frame."""
MAX_FAULTS = 30
"""Most recent faults listed in one frame."""


class StepTotals(msgspec.Struct, frozen=True):
    """Totals of the steps taken in lockstep since the instance started; times in seconds."""

    steps: int
    wait: float
    attention: float
    dispatch: float
    experts: float
    combine: float
    rest: float
    sleeps: int
    busiest_tokens: int
    mean_tokens: float
    tokens_per_expert: dict[int, int]


class Told(msgspec.Struct, frozen=True):
    """Figures of an instance's newest report."""

    prompt_tokens: int
    generation_tokens: int
    steps: int
    preemptions: int
    cache_queries: int
    cache_hits: int
    waiting_tokens: int
    running: int
    waiting: int
    blocks_used: int
    blocks_total: int
    lockstep: StepTotals | None


class InstanceState(msgspec.Struct, frozen=True):
    """One instance, as the coordinator, the instance itself and this router see it."""

    rank: int
    state: str
    phase: str
    host: str
    pid: int
    instance: str
    role: Role
    load: Load
    numerics: Numerics | None
    odd: int
    """Shadow checks in which it computed otherwise than two others."""
    told: Told | None
    router: InstanceHealth | None


class Frame(msgspec.Struct, frozen=True):
    """State of the mesh at one moment, as sent to the dashboard."""

    at: float
    """Unix time in seconds."""
    model: str | None
    epoch: int | None
    """Epoch of the newest view; None before the coordinator has answered."""
    size: int | None
    max_num_seqs: int | None
    """Requests that one instance runs at once; None: no model is known yet."""
    waiting_for: str
    coordinator_silent_for: float | None
    front_end: int
    num_instances: int
    instances: list[InstanceState]
    num_requests: int
    """Requests in flight in all routers."""
    num_requests_here: int
    """Requests in flight in the router that sends the frame."""
    requests: list[Flight]
    """The oldest of the requests in flight."""
    resumes: int
    """Requests that continued at another instance, over all routers."""
    faults: list[Fault]
    """Latest faults, oldest first."""
    answers: AnswerChecks = AnswerChecks()
    """Shadow checks of all routers."""
    balance: ExpertBalance | None = None
    """How the load of experts is balanced; None where it is not."""
