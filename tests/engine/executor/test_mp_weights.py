"""Orders about new weights between an engine and its workers, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from engine.executor.messages import DiscardShard, PrepareShard, ShardPrepared, SwitchShard
from engine.executor.mp_weights import MpWeights
from engine.executor.worker_weights import WorkerWeights
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from tests.waiting import until


class Shard:
    """Weights of one worker, whose preparation ends when a test says how."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.ends: Future[str] = Future()

    def prepare(self, directory: str, should_stop: Callable[[], bool]) -> str:
        self.log.append(f"prepare {directory}")
        while not self.ends.done():
            if should_stop():
                self.log.append("stopped")
                raise WeightsSuperseded
            threading.Event().wait(0.001)
        return self.ends.result()

    def switch(self) -> None:
        self.log.append("switch")

    def discard(self) -> None:
        self.log.append("discard")


class Instance:
    """An engine and its workers, whose messages go at once."""

    def __init__(self, count: int) -> None:
        self.digest = ""
        self.engine = MpWeights(count, self.switched)
        self.shards = [Shard() for _ in range(count)]
        self.workers = [WorkerWeights(shard, self.engine.take_in) for shard in self.shards]

    def switched(self, digest: str) -> None:
        self.digest = digest
        self.turn()

    def turn(self) -> None:
        """Send all orders, as the thread of the steps does."""
        for order in self.engine.take_orders():
            for worker in self.workers:
                match order:
                    case PrepareShard(number, directory):
                        worker.prepare(number, directory)
                    case SwitchShard():
                        worker.switch()
                    case DiscardShard():
                        worker.discard()

    def prepare(self, should_stop: Callable[[], bool] = lambda: False) -> Future[str]:
        """Begin to prepare, in a thread, and send the order."""
        found: Future[str] = Future()

        def run() -> None:
            try:
                found.set_result(self.engine.prepare("new", should_stop))
            except (WeightsRefused, WeightsSuperseded) as error:
                found.set_exception(error)

        before = [len(shard.log) for shard in self.shards]
        threading.Thread(target=run).start()
        until(lambda: self.turn() or all(len(s.log) > n for s, n in zip(self.shards, before, strict=True)))
        return found


def test_all_workers_prepare_then_switch_in_turn() -> None:
    instance = Instance(2)
    found = instance.prepare()
    instance.shards[0].ends.set_result("abc")
    assert not found.done()
    instance.shards[1].ends.set_result("abc")
    assert found.result(10) == "abc"
    assert instance.engine.take_orders() == []
    instance.engine.switch()
    assert instance.digest == "abc"
    assert [shard.log for shard in instance.shards] == [["prepare new", "switch"]] * 2


def test_a_worker_that_cannot_prepare_stops_the_others() -> None:
    instance = Instance(2)
    found = instance.prepare()
    instance.shards[0].ends.set_exception(WeightsRefused("no memory"))
    with pytest.raises(WeightsRefused, match="no memory"):
        found.result(10)
    instance.turn()
    until(lambda: instance.shards[1].log == ["prepare new", "stopped", "discard"])


def test_workers_that_read_different_weights_discard_them() -> None:
    instance = Instance(2)
    found = instance.prepare()
    for shard, digest in zip(instance.shards, ("a", "b"), strict=True):
        shard.ends.set_result(digest)
    with pytest.raises(WeightsRefused, match=r"different weights in new \(digests a, b\)"):
        found.result(10)
    instance.turn()
    until(lambda: all(shard.log[-1] == "discard" for shard in instance.shards))


def test_answers_to_an_earlier_order_do_not_count() -> None:
    instance, stop = Instance(1), threading.Event()
    found = instance.prepare(stop.is_set)
    stop.set()
    with pytest.raises(WeightsSuperseded):
        found.result(10)
    instance.turn()
    second = instance.prepare()
    instance.engine.take_in(ShardPrepared(1, "old"))
    instance.shards[0].ends.set_result("new")
    assert second.result(10) == "new"
