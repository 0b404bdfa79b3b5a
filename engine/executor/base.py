"""The contract between an instance's scheduler and the workers that compute its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from engine.step import ModelFacts, Step, StepResult

Progress = Callable[[str], None]
"""Called with a phrase for each phase of loading, so that whoever waits knows that it moves."""


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

    def execute(self, step: Step) -> StepResult:
        """Run one step and wait for it. Running the same step again gives the same result."""
        ...

    def set_threads(self, threads: int) -> None:
        """Compute with so many CPU threads from the next step on."""
        ...

    def close(self) -> None:
        """End the workers."""
        ...
