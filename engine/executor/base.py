"""The contract between an instance's scheduler and the workers that compute its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.step import ModelFacts, Step, StepResult

if TYPE_CHECKING:
    from parallel.communicators.base import Communicator

Progress = Callable[[str], None]
"""Called with a phrase for each phase of loading, so that whoever waits knows that it moves."""


class ExpertTimes(msgspec.Struct, frozen=True):
    """Seconds of one step, over all expert layers."""

    dispatch: float
    experts: float
    combine: float


class Executor(Protocol):
    """Owns the workers of one instance. Calls are made in this order, from one thread."""

    def load(self, progress: Progress) -> ModelFacts:
        """Read the weights and run the model once.

        Raises:
            engine.checkpoint.CheckpointError: the model cannot be served; the message says why.
        """
        ...

    def free_kv_memory(self) -> int:
        """Bytes that may be given to the KV cache now, weights being loaded."""
        ...

    def allocate(self, num_blocks: int) -> None:
        """Make the KV cache: ``num_blocks`` blocks of ``block_size`` tokens, block 0 included."""
        ...

    def execute(self, step: Step, sizes: Sequence[int] = ()) -> StepResult:
        """Run one step and wait for it. Running the same step again gives the same result.

        Args:
            sizes: with experts spread over instances, the tokens of every rank in this step; one without
                rows takes part in the expert layers only.

        Raises:
            parallel.communicators.base.CollectiveError: a peer is lost.
        """
        ...

    def join(self, group: Communicator) -> None:
        """Reach the experts of other instances through this group from the next step on."""
        ...

    def expert_times(self) -> ExpertTimes | None:
        """Where the last step's time in expert layers went; None with all experts here."""
        ...

    def tokens_per_expert(self) -> dict[int, int]:
        """Tokens that each expert held here has computed; empty with all experts here."""
        ...

    def set_threads(self, threads: int) -> None:
        """Compute with so many CPU threads from the next step on."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
