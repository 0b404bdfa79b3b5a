"""An executor whose workers are threads: real shards and layers, another transport.

Starting processes takes seconds for imports alone; with threads a table of many families and layouts is
affordable. What only processes can show is tested with processes (test_mp.py).
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from engine.config import EngineConfig
from engine.executor.uni import UniExecutor
from engine.executor_contract import Progress
from engine.model.checkpoint import ModelInfo
from engine.model.sharding.shard import Shard
from engine.step import ModelFacts, Step, StepResult
from parallel.communicators.base import CollectiveError, Communicator
from parallel.placement import Placement
from tests.parallel.thread_group import ThreadCommunicator, thread_group

TIMEOUT = 60.0


class _Worker(threading.Thread):
    """A thread that runs calls in the order in which they come."""

    def __init__(self, executor: UniExecutor) -> None:
        super().__init__(daemon=True)
        self.executor = executor
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self._results: queue.Queue[Any] = queue.Queue()
        self.start()

    def run(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                self._results.put(call())
            except BaseException as error:  # noqa: BLE001 (it is raised where the result is awaited)
                self._results.put(error)

    def begin(self, call: Callable[[], Any] | None) -> None:
        self._calls.put(call)

    def result(self) -> Any:
        """Result of a call, or the error that it raised."""
        return self._results.get(timeout=TIMEOUT)

    def finish(self) -> Any:
        result = self.result()
        if isinstance(result, BaseException):
            raise result
        return result


def _run(executor: UniExecutor, step: Step, sizes: Sequence[int]) -> StepResult:
    executor.begin(step, sizes)
    return executor.finish()


class ThreadedShards:
    """Implements ``engine.executor_contract.Executor``."""

    computes_apart = runs_ahead = False
    has_workers = False
    image_encoder = None

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        *,
        tp: int = 1,
        pp: int = 1,
        split: tuple[int, ...] | None = None,
        depth: int | None = None,
        place: tuple[int, int] | None = None,
        group: Callable[[int], Sequence[Communicator]] = thread_group,
    ) -> None:
        """A shard in a thread.

        ``place``: (number, of how many) among the instances over which experts are spread, if they are.
        ``group`` makes all members' ends of one of so many.
        """
        self.in_flight = depth or pp
        self.needs_tokens = pp > 1 or place is not None
        self._place = place
        self._layout = pp, tp
        self._read = threading.Barrier(pp * tp, timeout=TIMEOUT)
        ranks = [group(tp) for _ in range(pp)]
        stages = [group(pp) for _ in range(tp)]
        self.workers = [
            _Worker(
                UniExecutor(
                    config,
                    info,
                    1,
                    None if place is None else (place[0] * tp + rank, place[1] * tp),
                    shard=Shard(stage, pp, rank, tp, split, ranks[stage][rank], stages[rank][stage]),
                    before_first_run=self._wait_for_others,
                )
            )
            for stage in range(pp)
            for rank in range(tp)
        ]
        self._answering = (pp - 1) * tp

    def _all(self, call: Callable[[UniExecutor], Any]) -> list[Any]:
        for worker in self.workers:
            worker.begin(lambda executor=worker.executor: call(executor))  # type: ignore[misc]
        results = [worker.result() for worker in self.workers]
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, CollectiveError)):
            raise error  # the cause rather than what the others notice of it
        return results

    def load(self, progress: Progress) -> ModelFacts:
        facts: ModelFacts = self._all(lambda executor: self._load(executor, progress))[0]
        return facts

    def _load(self, executor: UniExecutor, progress: Progress) -> ModelFacts:
        try:
            return executor.load(progress)
        except BaseException:
            self._read.abort()
            raise

    def _wait_for_others(self) -> None:
        """As the engine makes workers wait: slow readers are not waited for in a collective."""
        try:
            self._read.wait()
        except threading.BrokenBarrierError as error:
            raise CollectiveError("another worker could not read its share") from error

    def facts(self) -> list[Any]:
        return [worker.executor._model for worker in self.workers]

    def free_kv_memory(self) -> int:
        return min(self._all(lambda executor: executor.free_kv_memory()))

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        self._all(lambda executor: executor.allocate(num_blocks, num_states))

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        for worker in self.workers:
            worker.begin(lambda executor=worker.executor: _run(executor, step, sizes))  # type: ignore[misc]

    def finish(self) -> StepResult:
        results = [worker.finish() for worker in self.workers]
        result: StepResult = results[self._answering]
        return result

    def join(self, groups: list[list[ThreadCommunicator]], placement: Placement) -> None:
        """Reach the experts of other instances; ``groups``: all members' ends by stage."""
        assert self._place is not None
        _, ranks = self._layout
        for number, worker in enumerate(self.workers):
            stage, rank = divmod(number, ranks)
            member = groups[stage][self._place[0] * ranks + rank]
            worker.executor.join(member, placement)

    def check(self) -> None:
        return

    def expert_times(self) -> None:
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        return {}

    def set_threads(self, threads: int, cores: Sequence[int] = ()) -> None:
        return

    def spans(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        for worker in self.workers:
            worker.begin(None)
            worker.join(TIMEOUT)
