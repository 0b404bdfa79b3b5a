"""A worker's side of new weights, prepared in a thread beside its steps (no torch)."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.executor.messages import ShardPrepared
from engine.executor_contract import NewWeights
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded


class WorkerWeights:
    """Carries out orders about new weights, which come in the thread of the steps."""

    def __init__(self, weights: NewWeights, tell: Callable[[ShardPrepared], None]) -> None:
        """``tell`` is called from another thread."""
        self._weights = weights
        self._tell = tell
        self._wanted = 0
        """Number of the preparation that is wanted; 0: none."""
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<WorkerWeights, preparation {self._wanted}>"

    def prepare(self, number: int, directory: str) -> None:
        """Begin to prepare; the one before is stopped first, in the same thread."""
        before, self._wanted = self._thread, number
        self._thread = threading.Thread(
            target=self._prepare, args=(number, directory, before), name="new-weights", daemon=True
        )
        self._thread.start()

    def switch(self) -> None:
        """Use what was prepared from the next step on."""
        self._weights.switch()
        self._wanted = 0

    def discard(self) -> None:
        """Give back what was prepared, or stop preparing it; the thread does both."""
        before, self._wanted = self._thread, 0
        self._thread = threading.Thread(target=self._discard, args=(before,), name="old-weights", daemon=True)
        self._thread.start()

    def _discard(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        self._weights.discard()

    def _prepare(self, number: int, directory: str, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        try:
            digest = self._weights.prepare(directory, lambda: self._wanted != number)
        except WeightsRefused as error:
            self._tell(ShardPrepared(number, problem=str(error)))
        except WeightsSuperseded:
            return
        else:
            self._tell(ShardPrepared(number, digest))
