"""New weights of an instance with worker processes, seen from the engine (no torch).

Orders wait until the thread of the steps sends them, so that all workers get them between the same two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from engine.executor.messages import (
    DiscardShard,
    PrepareShard,
    ShardPrepared,
    SwitchShard,
    ToWorker,
)
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded

LOOK_INTERVAL = 0.05
"""Seconds between two checks whether a preparation is still wanted."""


class MpWeights:
    """An :class:`engine.executor_contract.NewWeights` for the workers of one instance."""

    def __init__(self, num_workers: int, switched: Callable[[str], None]) -> None:
        """``switched`` is called with the digest of the version in use."""
        self._num_workers = num_workers
        self._switched = switched
        self._changed = threading.Condition()
        self._orders: deque[ToWorker] = deque()
        self._answers: list[ShardPrepared] = []
        self._number = 0
        """Number of the last preparation."""
        self._digest = ""

    def __repr__(self) -> str:
        return f"<MpWeights of {self._num_workers} workers, preparation {self._number}>"

    # ---- in a background thread

    def prepare(self, directory: str, should_stop: Callable[[], bool] = lambda: False) -> str:
        """See :class:`.NewWeights`. All workers must have read the same weights."""
        with self._changed:
            self._number += 1
            self._answers.clear()
            self._orders.append(PrepareShard(self._number, directory))
            try:
                self._await(should_stop)
                if problems := sorted({each.problem for each in self._answers if each.problem}):
                    raise WeightsRefused(problems[0])
                if len(digests := sorted({each.digest for each in self._answers})) > 1:
                    raise WeightsRefused(
                        f"workers read different weights in {directory} (digests {', '.join(digests)}): give "
                        "all hosts the same files"
                    )
            except (WeightsRefused, WeightsSuperseded):
                self._orders.append(DiscardShard())
                raise
            (self._digest,) = digests
            return self._digest

    def discard(self) -> None:
        """See :class:`.NewWeights`."""
        with self._changed:
            self._orders.append(DiscardShard())

    def _await(self, should_stop: Callable[[], bool]) -> None:
        """Wait until all workers have prepared, or one cannot."""
        while len(self._answers) < self._num_workers and not any(each.problem for each in self._answers):
            if should_stop():
                raise WeightsSuperseded
            self._changed.wait(LOOK_INTERVAL)

    # ---- in the thread of the steps

    def take_orders(self) -> list[ToWorker]:
        """Orders to send to all workers, in turn."""
        if not self._orders:
            return []
        with self._changed:
            found = [*self._orders]
            self._orders.clear()
            return found

    def take_in(self, answer: ShardPrepared) -> None:
        """Take in a worker's answer; those to earlier orders are dropped."""
        with self._changed:
            if answer.number == self._number:
                self._answers.append(answer)
                self._changed.notify_all()

    def switch(self) -> None:
        """See :class:`.NewWeights`."""
        with self._changed:
            self._orders.append(SwitchShard())
        self._switched(self._digest)
