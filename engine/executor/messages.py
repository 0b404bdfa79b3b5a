"""Messages between an engine and its worker processes (no torch).

The engine speaks first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from coordinator.numerics import Arithmetic
from engine.config import EngineConfig
from engine.executor_contract import ExpertTimes
from engine.model.checkpoint import ModelInfo
from engine.step import ModelFacts, Span, Step, StepResult

# ---- engine -> worker


class GroupKey(msgspec.Struct, frozen=True):
    """What the members of a worker's groups prove to each other."""

    secret: bytes

    def __repr__(self) -> str:
        """Never the secret: messages end up in logs."""
        return "<GroupKey>"


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """First message: who the worker is, and what it computes with."""

    name: str
    """For its process title and its log, as ``Worker_0_PP1_TP0``."""
    log_level: int
    log_format: Literal["text", "json"]
    config: EngineConfig
    info: ModelInfo
    stage: int
    rank: int
    """Among the tensor-parallel ranks of its stage."""
    threads: int
    cores: tuple[int, ...]
    """The only ones it may use; empty: any."""
    address: str = "127.0.0.1"
    """Address of its host, where the other workers reach it."""
    hosts: tuple[str, ...] = ()
    """Where each worker of the instance runs, by stage, then rank.

    Equal names can share memory.
    """
    number: int = 0
    """Among the workers of its host."""
    place: tuple[int, int] | None = None
    """(index, count) among the instances over which experts are spread at first, if any."""
    key: GroupKey | None = None
    """None: the mesh has no key (``--insecure-mesh``)."""


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Form the groups at the meeting place at this address and port.

    Port 0: host it.
    """

    address: str
    port: int


class FirstRun(msgspec.Struct, frozen=True, tag="first_run"):
    """All workers have their weights: run the model once, together."""


class FreeMemory(msgspec.Struct, frozen=True, tag="free_memory"):
    """Question for the bytes that the KV cache may take."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Make the KV cache."""

    num_blocks: int


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Compute a step. All workers get all steps, in the same order."""

    step: Step
    sizes: tuple[int, ...] = ()
    """Where experts are spread: the tokens of every instance in this step."""
    epoch: int = 0
    """Epoch whose groups agreed on the step; skipped in any other one."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """The steps that follow go through the groups of this epoch (:mod:`engine.executor.group_messages`)."""

    epoch: int


class SetThreads(msgspec.Struct, frozen=True, tag="set_threads"):
    """Compute with so many threads, on these cores only (empty: any)."""

    threads: int
    cores: tuple[int, ...]


class TellSpans(msgspec.Struct, frozen=True, tag="tell_spans"):
    """Question for the spans in which the worker computed."""


ToWorker = Begin | Meet | FirstRun | FreeMemory | Allocate | Execute | Join | SetThreads | TellSpans

# ---- worker -> engine


class Hosting(msgspec.Struct, frozen=True, tag="hosting"):
    """The meeting place is at this port."""

    port: int


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """Progress of loading."""

    text: str


class Read(msgspec.Struct, frozen=True, tag="read"):
    """The weights are in memory."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The shard is ready for its KV cache."""

    facts: ModelFacts
    layers: tuple[int, int]
    """Numbers of its layers: [first, stop)."""
    expert_bytes: int = 0
    """Bytes of one expert in all its layers, where experts are spread."""
    expert_layers: int = 0
    """Layers with experts that are spread."""


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Bytes that the KV cache may take."""

    num_bytes: int


class CacheAt(msgspec.Struct, frozen=True):
    """Where a worker's KV cache lies in its memory."""

    steps: int
    """Address of the number of steps that the worker is done with, in 8 bytes."""
    tensors: list[tuple[int, int]]
    """Address of each tensor, and the bytes of a block in it."""


class Allocated(msgspec.Struct, frozen=True, tag="allocated"):
    """The KV cache is there."""

    expert_bytes: int = 0
    """As in :class:`Loaded`, of as many copies as are held from now on."""
    arithmetic: Arithmetic | None = None
    """What the worker computes with."""
    cache: CacheAt | None = None
    """None: it is on a device."""


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The result of the oldest step that was not answered yet.

    From one worker of the last stage only.
    """

    result: StepResult
    times: ExpertTimes | None = None
    """Times of the expert layers on this worker, where experts are spread."""


class GroupBroken(msgspec.Struct, frozen=True, tag="broken"):
    """A step was cut short, since a group of its epoch is broken.

    No other step of that epoch is computed here.
    """

    epoch: int
    suspect: int | None
    """Index of the instance at fault, if any."""
    evidence: str
    text: str


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Later messages of this worker belong to this epoch."""

    epoch: int


class Spans(msgspec.Struct, frozen=True, tag="spans"):
    """When the worker computed, on the host's monotonic clock."""

    spans: list[Span]


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker has failed and ends."""

    kind: str
    """Name of the exception's class."""
    text: str


FromWorker = (
    Hosting
    | Phase
    | Read
    | Loaded
    | Free
    | Allocated
    | Computed
    | GroupBroken
    | Joined
    | Spans
    | WorkerFailed
)
