"""The contract between an instance's scheduler and the workers that compute its steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.step import ModelFacts, Span, Step, StepResult

if TYPE_CHECKING:
    from coordinator.messages import AdapterSource, GroupPlan, MemoryPart
    from coordinator.numerics import Arithmetic
    from engine.prompt_images import PromptImage
    from engine.transfers.block_memory import CacheMemory
    from parallel.communicators.base import Communicator
    from parallel.links.counts import LinkCount
    from parallel.placement import Placement

Progress = Callable[[str], None]
"""Called with a phrase for each phase of loading, as a sign of progress."""
STARTUP_TIMEOUT = 600.0
"""Default seconds without progress after which loading counts as hanging."""


class ExpertTimes(msgspec.Struct, frozen=True):
    """Seconds of one step, over all layers."""

    dispatch: float
    experts: float
    combine: float
    attention: float = 0.0
    attention_calls: int = 0
    """Layers in which attention was computed; none if the step has no rows here."""


class WorkerLost(RuntimeError):
    """A worker of this instance has ended, so the instance cannot go on.

    The worker's part of the state is gone. The message names the worker and how it ended.
    """


class CannotStart(RuntimeError):
    """The workers of this instance could not be started.

    The message names what is missing and what to do.
    """


class ImageEncoder(Protocol):
    """Encoder of images beside the steps of an executor."""

    def begin(self, image: PromptImage, num_rows: int, done: Callable[[str, bool], None]) -> None:
        """Make the rows of an image, where steps find them; called between two steps.

        ``num_rows``: those that its prompt has places for. ``done``: called from any thread, with why the
        image cannot be encoded, or with an empty text; and with whether its rows were there before.
        """
        ...


class Executor(Protocol):
    """Owns the workers of one instance. Calls are made in this order, from one thread."""

    in_flight: int
    """Most steps under way at once: several in a pipeline, two where it runs ahead."""
    runs_ahead: bool
    """Whether rows may follow tokens that the step under way chooses on the device."""
    computes_apart: bool
    """Whether :meth:`begin` returns while others, or a device, compute."""
    has_workers: bool
    """Whether other processes compute, whose results it awaits no longer than it may."""

    @property
    def image_encoder(self) -> ImageEncoder | None:
        """Encoder of images, once there is a cache; None: the model takes none."""
        ...

    @property
    def needs_tokens(self) -> bool:
        """Whether rows must carry the newest token.

        Not every worker may have sampled it, or the same one.
        """
        ...

    def load(self, progress: Progress) -> ModelFacts:
        """Read the weights and run the model once.

        Raises:
            engine.model.checkpoint.CheckpointError: the model cannot be served; the message says why.
        """
        ...

    def free_kv_memory(self) -> int:
        """Bytes that may be given to the KV cache now, weights being loaded."""
        ...

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """Make the KV cache: ``num_blocks`` blocks of ``block_size`` tokens.

        For a model with recurrent states, also ``num_states`` slots of those, numbered behind the blocks.

        Raises:
            engine.model.checkpoint.CheckpointError: the kernels that were asked for do not compute the model.
        """
        ...

    def block_memory(self) -> CacheMemory | None:
        """The bytes of the KV cache; None where this process cannot reach them."""
        ...

    def arithmetic(self) -> Sequence[Arithmetic]:
        """What each worker computes with, by stage, then rank; known once there is a cache."""
        ...

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """Start to compute a step behind those under way, at most ``in_flight`` in all.

        Running the same step again gives the same result. Without workers a CPU computes it here and now.

        Args:
            sizes: with experts spread over instances, the tokens of every rank in this step; one without
                rows takes part in the expert layers only.

        Raises:
            parallel.communicators.base.CollectiveError: a peer is lost.
            WorkerLost: a worker of this instance is.
        """
        ...

    def finish(self) -> StepResult:
        """Wait for the oldest step under way.

        Raises as :meth:`begin` does.
        """
        ...

    def check(self) -> None:
        """Between two steps: raise WorkerLost if a worker has ended."""
        ...

    def expert_times(self) -> ExpertTimes | None:
        """Where the last step's time in expert layers went; None with all experts here."""
        ...

    def tokens_per_expert(self) -> dict[int, int]:
        """Tokens that each expert held here has computed; empty with all experts here."""
        ...

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        """Let each worker compute with so many CPU threads from the next step on.

        ``cores``: those that this instance shares with no other, if any, for workers to be pinned to.
        """
        ...

    def spans(self) -> dict[str, list[Span]]:
        """When each worker computed, by its name."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...


class NewWeights(Protocol):
    """Weights of an executor's model: those in use, and at most one other version."""

    def prepare(self, directory: str, should_stop: Callable[[], bool]) -> str:
        """Read and lay out a version in a background thread; returns its digest.

        Steps run meanwhile. An empty ``directory``: the version in use, read again.

        Raises:
            engine.weight_versions.contract.WeightsRefused: it cannot be used here.
            engine.weight_versions.contract.WeightsSuperseded: ``should_stop`` returned True.
        """
        ...

    def switch(self) -> None:
        """Use what was prepared from the next step on; called between two steps."""
        ...

    def discard(self) -> None:
        """Give back what was prepared, if anything was."""
        ...


class AdapterMemory(Protocol):
    """Low-rank adapters in the memory of an executor's workers."""

    def read(self, source: AdapterSource) -> AdapterSource:
        """Read an adapter in a background thread; returns it with its digest.

        Steps run meanwhile.

        Raises:
            engine.adapters.adapter_settings.AdapterError: it cannot be served, or has another digest.
        """
        ...

    def drop(self, digests: Collection[str]) -> None:
        """Forget adapters that no request has; called between two steps."""
        ...


class ChangingExecutor(Executor, Protocol):
    """Executor whose weights may change while it serves."""

    @property
    def new_weights(self) -> NewWeights:
        """Preparation and switch of other weights, once there is a cache."""
        ...

    def give_back(self, part: MemoryPart) -> bool:
        """Give memory back between two steps; False if it stays, as on devices.

        A cache reads as zeros then. Weights have to be prepared again, and switched to.
        """
        ...


class SpreadExecutor(Executor, Protocol):
    """Executor of an instance whose experts are spread over the mesh and may move."""

    def link_counts(self) -> list[LinkCount]:
        """What its workers' links in the current groups have carried, by instance's place.

        The links of that group itself do not count.
        """
        ...

    def join(self, group: Communicator, placement: Placement) -> None:
        """Use this placement of experts, and this group, from the next step on.

        The instance holds its experts in the placement, and reaches those of others through the group, which
        :meth:`connect` gave. Experts that were not prepared are read now.

        Raises:
            WorkerLost: a worker does not follow.
        """
        ...

    def prepare(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        """Read the experts of a plan's member; returns how many, in a layer.

        Called in a background thread while steps run.

        Args:
            free_bytes: memory that may be used beside what is held.
            should_stop: returns True once the experts are not wanted any more.

        Raises:
            engine.model.checkpoint.CheckpointError: they do not fit, or cannot be read any more.
            engine.model.checkpoint.ReadingStopped: ``should_stop`` returned True.
            parallel.communicators.base.CollectiveError: workers cannot form their groups.
        """
        ...

    def connect(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> Communicator:
        """Form the other groups that the workers need in the epoch of ``group``.

        Called after :meth:`prepare`, in the same thread; ``group`` is formed among the instances. The result
        stands for all groups: aborting or closing it ends all of them. Raises as :meth:`prepare` does, and
        leaves nothing open then.
        """
        ...

    def experts_held(self) -> list[list[list[int]]]:
        """The experts that are here, by tensor-parallel rank and layer.

        One layer if all are alike.
        """
        ...

    def expert_loads(self) -> list[list[int]]:
        """Rows computed here since the start, by layer with experts and expert."""
        ...

    @property
    def expert_bytes(self) -> int:
        """Memory of an expert in all layers of a worker, kernels' copies included."""
        ...

    def max_experts(self, free_bytes: int) -> int:
        """How many experts of each layer fit on each rank; 0: any number.

        ``free_bytes``: memory beside what is held.
        """
        ...

    def spare_memory(self) -> int:
        """Bytes for more experts: of this device, or of this host for CPUs."""
        ...
