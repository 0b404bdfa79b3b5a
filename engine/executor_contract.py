"""The contract between an instance's scheduler and the workers that compute its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.step import ModelFacts, Span, Step, StepResult

if TYPE_CHECKING:
    from coordinator.messages import GroupPlan
    from parallel.communicators.base import Communicator
    from parallel.placement import Placement

Progress = Callable[[str], None]
"""Called with a phrase for each phase of loading, so that whoever waits knows that it moves."""
STARTUP_TIMEOUT = 600.0
"""Seconds."""


class ExpertTimes(msgspec.Struct, frozen=True):
    """Seconds of one step, over all layers."""

    dispatch: float
    experts: float
    combine: float
    attention: float = 0.0
    attention_calls: int = 0
    """Layers in which attention was computed; none if the step has no rows here."""


class WorkerLost(RuntimeError):
    """A worker of this instance has ended, and what it held is gone: the instance cannot go on. Says which
    worker and how."""


class CannotStart(RuntimeError):
    """The workers of this instance could not be had.

    Says what is missing and what to do.
    """


class Executor(Protocol):
    """Owns the workers of one instance. Calls are made in this order, from one thread."""

    in_flight: int
    """Steps that may be under way at once: more than one where workers form a pipeline."""
    computes_apart: bool
    """Whether :meth:`begin` returns while others compute."""

    @property
    def needs_tokens(self) -> bool:
        """Whether rows must say the newest token, since not every worker has sampled it, or the same."""
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

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache: ``num_blocks`` blocks of ``block_size`` tokens."""
        ...

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """Start to compute a step behind those that are under way, at most ``in_flight`` in all.

        Running the same step again gives the same result. Without workers the step is computed here and now.

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


class SpreadExecutor(Executor, Protocol):
    """One of an instance whose experts are spread over the mesh, and may be dealt out anew."""

    def join(self, group: Communicator, placement: Placement) -> None:
        """From the next step on hold this instance's experts in this placement, and reach those of others
        through this group, which :meth:`connect` gave. What was not prepared is read now.

        Raises:
            WorkerLost: a worker does not follow.
        """
        ...

    def prepare(self, form: GroupPlan, place: int, free_bytes: int, should_stop: Callable[[], bool]) -> int:
        """Get ready to hold the experts of a form's member at ``place``, in a background thread while steps
        run; returns how many had to be read.

        Args:
            free_bytes: memory that may be used beside what is held.
            should_stop: says that they are not wanted any more.

        Raises:
            engine.model.checkpoint.CheckpointError: they do not fit, or cannot be read any more.
            engine.model.checkpoint.ReadingStopped: ``should_stop`` said so.
            parallel.communicators.base.CollectiveError: workers cannot form their groups.
        """
        ...

    def connect(self, form: GroupPlan, group: Communicator, should_stop: Callable[[], bool]) -> Communicator:
        """After :meth:`prepare`, in the same thread: ``group`` is formed among the instances; form what else
        the workers need in its epoch. The result stands for all of it: who aborts or closes it ends all.
        Raises as :meth:`prepare` does, and leaves nothing open then."""
        ...

    def experts_held(self) -> list[list[int]]:
        """The experts that are here, of each layer, by tensor-parallel rank."""
        ...

    def max_experts(self, free_bytes: int) -> int:
        """How many experts of each layer fit on each rank, with so much memory beside what is held; 0: any
        number."""
        ...

    def spare_memory(self) -> int:
        """Bytes of this device (of CPUs: of this host) that could be used for more experts."""
        ...
