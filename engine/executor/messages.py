"""Messages between an engine and its worker processes (no torch).

The engine speaks first.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from coordinator.messages import AdapterSource, MemoryPart
from coordinator.numerics import Arithmetic
from engine.config import EngineConfig
from engine.executor_contract import ExpertTimes
from engine.model.checkpoint import ModelInfo
from engine.prompt_images import PromptImage
from engine.step import ModelFacts, Span, Step, StepResult

# ---- engine -> worker


class GroupKey(msgspec.Struct, frozen=True):
    """Secret by which members of a worker's groups know each other."""

    secret: bytes

    def __repr__(self) -> str:
        """Text without the secret: messages end up in logs."""
        return "<GroupKey>"


class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """First message to a worker: its name and place, the model, and settings."""

    name: str
    """For its process title and its log, as ``Worker_0_PP1_TP0``."""
    log_level: int
    log_format: Literal["text", "json"]
    config: EngineConfig
    info: ModelInfo
    stage: int
    rank: int
    """Index among the tensor-parallel ranks of its stage."""
    threads: int
    cores: tuple[int, ...]
    """Cores that it may use; empty: any."""
    address: str = "127.0.0.1"
    """Address of its host, where the other workers reach it."""
    hosts: tuple[str, ...] = ()
    """Host of each worker of the instance, by stage, then rank.

    Equal names can share memory.
    """
    number: int = 0
    """Index among the workers of its host."""
    place: tuple[int, int] | None = None
    """(index, count) among the instances over which experts are spread at first, if any."""
    key: GroupKey | None = None
    """Secret of its groups; None: the mesh has no key (``--insecure-mesh``)."""


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Order to form the workers' groups at a meeting place.

    Port 0: host it.
    """

    address: str
    port: int


class FirstRun(msgspec.Struct, frozen=True, tag="first_run"):
    """Order to run the model once, all workers together."""


class FreeMemory(msgspec.Struct, frozen=True, tag="free_memory"):
    """Question for the bytes that the KV cache may take."""


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Order to allocate the KV cache, and slots of recurrent states."""

    num_blocks: int
    num_states: int = 0


class Execute(msgspec.Struct, frozen=True, tag="execute"):
    """Order to compute a step; all workers get all steps, in the same order."""

    step: Step
    sizes: tuple[int, ...] = ()
    """Tokens of every instance in this step, where experts are spread."""
    epoch: int = 0
    """Epoch whose groups agreed on the step; skipped in any other one."""


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Order to use the groups of an epoch in the steps that follow."""

    epoch: int


class SetThreads(msgspec.Struct, frozen=True, tag="set_threads"):
    """Order to compute with so many threads, on these cores only (empty: any)."""

    threads: int
    cores: tuple[int, ...]


class TellSpans(msgspec.Struct, frozen=True, tag="tell_spans"):
    """Question for the spans in which the worker computed."""


class PrepareShard(msgspec.Struct, frozen=True, tag="prepare_shard"):
    """Order to read and lay out other weights, beside the steps."""

    number: int
    directory: str
    """On every host."""


class SwitchShard(msgspec.Struct, frozen=True, tag="switch_shard"):
    """Order to use the weights that were prepared from the next step on."""


class GiveBackMemory(msgspec.Struct, frozen=True, tag="give_back"):
    """Order to give back the memory of weights, or of the cache."""

    part: MemoryPart


class DiscardShard(msgspec.Struct, frozen=True, tag="discard_shard"):
    """Order to give back weights that were prepared, or to stop preparing them."""


class ReadAdapterFiles(msgspec.Struct, frozen=True, tag="read_adapter"):
    """Order to read a low-rank adapter into memory, beside the steps."""

    number: int
    source: AdapterSource


class DropAdapterFiles(msgspec.Struct, frozen=True, tag="drop_adapters"):
    """Order to forget low-rank adapters."""

    digests: tuple[str, ...]


class EncodeImage(msgspec.Struct, frozen=True, tag="encode_image"):
    """Order to a worker of the first stage: encode an image beside the steps."""

    number: int
    image: PromptImage
    num_rows: int
    """Places that its prompt has for them."""


ToWorker = (
    Begin
    | Meet
    | FirstRun
    | FreeMemory
    | Allocate
    | Execute
    | Join
    | SetThreads
    | TellSpans
    | PrepareShard
    | SwitchShard
    | GiveBackMemory
    | DiscardShard
    | ReadAdapterFiles
    | DropAdapterFiles
    | EncodeImage
)

# ---- worker -> engine


class Hosting(msgspec.Struct, frozen=True, tag="hosting"):
    """Report of the port of the workers' meeting place."""

    port: int


class Phase(msgspec.Struct, frozen=True, tag="phase"):
    """Progress of loading."""

    text: str


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Report that the weights are in memory."""


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Report that the shard is loaded, with its facts."""

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
    """Place of a worker's KV cache in its memory."""

    steps: int
    """Address of the number of steps that the worker is done with, in 8 bytes."""
    tensors: list[tuple[int, int]]
    """Address of each tensor, and the bytes of a block in it."""
    further: list[list[tuple[int, int]]] = []
    """The same of each boundary kind."""


class Allocated(msgspec.Struct, frozen=True, tag="allocated"):
    """Report that the KV cache is allocated."""

    expert_bytes: int = 0
    """As in :class:`Loaded`, of as many copies as are held from now on."""
    arithmetic: Arithmetic | None = None
    """Kernels and libraries that the worker computes with."""
    cache: CacheAt | None = None
    """Place of the KV cache in memory; None: it is on a device."""


class Computed(msgspec.Struct, frozen=True, tag="computed"):
    """The result of the oldest step that was not answered yet.

    From one worker of the last stage only.
    """

    result: StepResult
    times: ExpertTimes | None = None
    """Times of the expert layers on this worker, where experts are spread."""


class GroupBroken(msgspec.Struct, frozen=True, tag="broken"):
    """Report that a step was cut short, since a group of its epoch is broken.

    No other step of that epoch is computed here.
    """

    epoch: int
    suspect: int | None
    """Index of the instance at fault, if any."""
    evidence: str
    text: str


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """Report that a worker uses an epoch's groups; its later messages belong there."""

    epoch: int


class Spans(msgspec.Struct, frozen=True, tag="spans"):
    """Spans in which the worker computed, on the host's monotonic clock."""

    spans: list[Span]


class ShardPrepared(msgspec.Struct, frozen=True, tag="shard_prepared"):
    """Report that other weights are laid out, with their digest, or why not."""

    number: int
    digest: str = ""
    problem: str = ""


class MemoryGivenBack(msgspec.Struct, frozen=True, tag="given_back"):
    """Answer to :class:`GiveBackMemory`: whether memory went, or why it stays is in the worker's log."""

    is_given: bool


class AdapterFilesRead(msgspec.Struct, frozen=True, tag="adapter_read"):
    """Report that a low-rank adapter is in memory, or why not."""

    number: int
    source: AdapterSource | None = None
    """The adapter, with its digest."""
    problem: str = ""


class ImageEncoded(msgspec.Struct, frozen=True, tag="image_encoded"):
    """Report that the rows of an image are there, or why not."""

    number: int
    problem: str = ""
    was_there: bool = False
    """Whether they were before."""


class WorkerFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Report that a worker has failed and ends."""

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
    | ShardPrepared
    | MemoryGivenBack
    | AdapterFilesRead
    | ImageEncoded
    | WorkerFailed
)
