"""Low-rank adapters in worker processes: the engine's side, and a worker's (no torch).

Orders wait until the thread of the steps sends them, so that all workers get them between the same two steps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection

from coordinator.messages import AdapterSource
from engine.adapters.adapter_settings import AdapterError
from engine.executor.messages import AdapterFilesRead, DropAdapterFiles, ReadAdapterFiles, ToWorker
from engine.executor_contract import AdapterMemory

logger = logging.getLogger(__name__)

MOST_WAIT = 150.0
"""Seconds for all workers to read an adapter."""


class MpAdapters:
    """An :class:`engine.executor_contract.AdapterMemory` for the workers of one instance."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._changed = threading.Condition()
        self._orders: deque[ToWorker] = deque()
        self._answers: list[AdapterFilesRead] = []
        self._number = 0
        """Number of the last adapter to read."""

    def __repr__(self) -> str:
        return f"<MpAdapters of {self._num_workers} workers, {self._number} read>"

    # ---- in a background thread

    def read(self, source: AdapterSource) -> AdapterSource:
        """See :class:`.AdapterMemory`. All workers must have read the same files."""
        with self._changed:
            self._number += 1
            self._answers.clear()
            self._orders.append(ReadAdapterFiles(self._number, source))
            self._changed.wait_for(self._is_answered, MOST_WAIT)
            if problems := sorted({each.problem for each in self._answers if each.problem}):
                raise AdapterError(problems[0])
            if not self._is_answered():
                raise AdapterError(f"not all workers have read {source.path} within {MOST_WAIT:.0f} s")
            found = {each.source for each in self._answers if each.source is not None}
            if len(found) > 1:
                raise AdapterError(
                    f"workers have read different files in {source.path}: give all hosts the same files"
                )
            return found.pop()

    def _is_answered(self) -> bool:
        return len(self._answers) == self._num_workers or any(each.problem for each in self._answers)

    # ---- in the thread of the steps

    def drop(self, digests: Collection[str]) -> None:
        """See :class:`.AdapterMemory`."""
        with self._changed:
            self._orders.append(DropAdapterFiles(tuple(digests)))

    def take_orders(self) -> list[ToWorker]:
        """Orders to send to all workers, in turn."""
        return [self._orders.popleft() for _ in range(len(self._orders))]

    def take_in(self, answer: AdapterFilesRead) -> None:
        """Take in a worker's answer; those to earlier orders are dropped."""
        with self._changed:
            if answer.number == self._number:
                self._answers.append(answer)
                self._changed.notify_all()


def read_beside_steps(
    memory: AdapterMemory, order: ReadAdapterFiles, tell: Callable[[AdapterFilesRead], None]
) -> None:
    """Read an adapter in a thread of a worker, which calls ``tell`` with the result."""

    def read() -> None:
        try:
            answer = AdapterFilesRead(order.number, memory.read(order.source))
        except AdapterError as error:
            answer = AdapterFilesRead(order.number, problem=str(error))
        except Exception as error:
            logger.exception("adapter %s could not be read", order.source.name)
            answer = AdapterFilesRead(order.number, problem=str(error) or type(error).__name__)
        tell(answer)

    threading.Thread(target=read, name="adapter", daemon=True).start()
