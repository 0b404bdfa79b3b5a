"""An instance that follows standing orders: pauses, and weights that change under running requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from coordinator.member_connection import MemberConnection
from coordinator.messages import (
    InFlight,
    Load,
    MemoryPart,
    MeshSleep,
    PauseMode,
    StandingOrders,
    WeightUpdate,
    WeightVersion,
)
from coordinator.numerics import Arithmetic
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.lifecycle.following_orders import OrdersFollowing
from engine.serving.server import Server
from engine.weight_versions.contract import WeightsRefused
from engine.weight_versions.updating import WeightsLost
from tests.coordinator.membership.test_registry import register
from tests.engine.core.test_engine_core import INFO, PEER, submit
from tests.engine.simulated_executor import SimulatedExecutor
from tests.waiting import until

VERSION = WeightVersion(1, "one", "/new", update="u1")


class Workers:
    """Weights of a simulated executor."""

    def __init__(self, core: Callable[[], EngineCore]) -> None:
        self._core = core
        self.switched_with: list[int] = []
        """Steps under way at each switch."""
        self.num_generated = 0
        """Output tokens before the last switch."""

    def prepare(self, directory: str, should_stop: Callable[[], bool]) -> str:
        return f"digest of {directory}"

    def switch(self) -> None:
        self.switched_with.append(len(self._core()._steps))
        self.num_generated = self._core().scheduler.totals.generation_tokens

    def discard(self) -> None:
        return


class SleepingWorkers(Workers):
    """Weights and a cache whose memory can be given back."""

    def __init__(self, core: Callable[[], EngineCore]) -> None:
        super().__init__(core)
        self.done: list[str] = []
        self.may_read = threading.Event()
        self.source_is_gone = False

    def give_back(self, part: MemoryPart) -> bool:
        assert not len(self._core()._steps), "a step is under way"
        self.done.append(f"gave {part}")
        return True

    def prepare(self, directory: str, should_stop: Callable[[], bool]) -> str:
        assert self.may_read.wait(20)
        if self.source_is_gone:
            raise WeightsRefused("there is no such directory")
        self.done.append(f"read {directory or 'again'}")
        return "digest"

    def switch(self) -> None:
        super().switch()
        self.done.append("used")

    def discard(self) -> None:
        self.done.append("discarded")


class Changing(SimulatedExecutor):
    """Has two steps under way, and weights that can change."""

    new_weights: Workers


class Setting:
    """One instance without threads or routers."""

    def __init__(self, executor: SimulatedExecutor, *, in_groups: bool = False) -> None:
        config = EngineConfig(
            cache=CacheConfig(block_size=4),
            scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4),
        )
        self.core = EngineCore(config, INFO, executor, num_blocks=20, max_model_len=64)  # type: ignore[arg-type]
        self.server = Server("i", "tcp://127.0.0.1:0", self.core)
        self.membership = MemberConnection("tcp://127.0.0.1:1", register("i", 0), Load)
        self.num_told = 0
        self.orders = OrdersFollowing(
            self.membership,
            self.server,
            self.core,
            executor,  # type: ignore[arg-type]
            self.told,
            in_groups=in_groups,
        )

    def told(self, version: WeightVersion) -> None:
        assert version.number
        self.num_told += 1

    def order(self, **fields: object) -> None:
        revision = self.membership.orders.revision + 1
        self.membership._state.take(StandingOrders(revision=revision, **fields))  # type: ignore[arg-type]

    def run(self, turns: int) -> None:
        """Turns of the step loop."""
        for _ in range(turns):
            self.orders.follow()
            if self.core.has_work:
                self.core.step()

    def close(self) -> None:
        self.orders.close()
        self.server.close()


class Sleepy(Changing):
    """Can give back memory."""

    def give_back(self, part: MemoryPart) -> bool:
        assert isinstance(self.new_weights, SleepingWorkers)
        return self.new_weights.give_back(part)

    def arithmetic(self) -> list[Arithmetic]:
        return []


@pytest.fixture
def sleepy(request: pytest.FixtureRequest) -> Iterator[tuple[Setting, SleepingWorkers]]:
    executor = Sleepy(block_size=4, budget=32, max_rows=4, in_flight=2, computes_apart=True)
    workers = SleepingWorkers(lambda: made.core)
    executor.new_weights = workers
    made = Setting(executor, in_groups=getattr(request, "param", False))
    yield made, workers
    workers.may_read.set()
    made.close()


@pytest.fixture
def fixed() -> Iterator[Setting]:
    made = Setting(SimulatedExecutor(block_size=4, budget=32, max_rows=4))
    yield made
    made.close()


@pytest.fixture
def changing() -> Iterator[tuple[Setting, Workers]]:
    executor = Changing(block_size=4, budget=32, max_rows=4, in_flight=2, computes_apart=True)
    workers = executor.new_weights = Workers(lambda: made.core)
    made = Setting(executor)
    yield made, workers
    made.close()


def test_a_pause_is_in_effect_once_no_step_is_under_way(changing: tuple[Setting, Workers]) -> None:
    made, _ = changing
    assert made.orders.follow()
    made.core.submit(PEER, submit(1))
    made.core.submit(PEER, submit(2))
    made.core.step()
    made.order(pause=PauseMode.KEEP)
    while not made.orders.follow():
        assert not made.membership.follows_orders
        assert made.core.has_work
        made.core.step()
    assert made.membership.follows_orders
    assert not made.core.has_work
    made.order()
    assert made.orders.follow()
    assert made.core.has_work


def test_an_instance_that_cannot_change_its_weights_reports_why(fixed: Setting) -> None:
    fixed.order(update=WeightUpdate(VERSION))
    assert fixed.orders.follow(), "the version in use is the current one"
    until(lambda: fixed.orders.follow() and fixed.membership._state.weights.failed == "u1")
    assert "several workers" in fixed.membership._state.weights.reason


@pytest.mark.parametrize("paused", [None, PauseMode.KEEP])
def test_weights_change_between_two_steps(
    changing: tuple[Setting, Workers], paused: PauseMode | None
) -> None:
    made, workers = changing
    made.core.submit(PEER, submit(1))
    made.core.submit(PEER, submit(2))
    made.core.step()
    assert len(made.core._steps), "a step is under way"
    made.order(update=WeightUpdate(VERSION), pause=paused)
    until(lambda: made.orders.follow() is not None and made.membership._state.weights.prepared == "u1")
    assert made.membership._state.weights.digest == "digest of /new"
    made.order(weights=VERSION, in_flight=InFlight.KEEP, pause=paused)
    made.run(20)
    assert workers.switched_with == [0]
    assert made.num_told == 1
    assert made.membership._state.weights.number == 1
    assert made.membership.follows_orders
    if paused is not None:
        assert not made.core.is_empty, "the mesh is still paused"
        made.order(weights=VERSION)
        made.run(20)
    assert made.core.is_empty
    assert made.core.scheduler.totals.generation_tokens == 8


@pytest.mark.parametrize("paused", [None, PauseMode.WAIT, PauseMode.KEEP])
def test_requests_that_are_to_end_on_the_old_weights(
    changing: tuple[Setting, Workers], paused: PauseMode | None
) -> None:
    made, workers = changing
    made.core.submit(PEER, submit(1))
    made.core.step()
    made.order(update=WeightUpdate(VERSION, InFlight.FINISH), pause=paused)
    until(lambda: made.orders.follow() is not None and made.membership._state.weights.prepared == "u1")
    made.order(weights=VERSION, in_flight=InFlight.FINISH, pause=paused)
    made.orders.follow()
    assert not workers.switched_with
    made.core.submit(PEER, submit(2))
    made.run(20)
    if paused is PauseMode.KEEP:
        assert not workers.switched_with, "it cannot end before the mesh goes on"
        made.order(weights=VERSION, in_flight=InFlight.FINISH)
        made.run(40)
    assert workers.switched_with == [0]
    assert workers.num_generated == (8 if paused is PauseMode.KEEP else 4)
    assert made.membership.follows_orders
    if paused is PauseMode.WAIT:
        assert not made.core.is_empty, "the second one waits for the end of the pause"
        made.order(weights=VERSION, in_flight=InFlight.FINISH)
        made.run(20)
    assert made.core.is_empty
    assert made.core.scheduler.totals.generation_tokens == 8


BOTH = (MemoryPart.KV_CACHE, MemoryPart.WEIGHTS)


def asleep(*parts: MemoryPart, gives_back: bool = True) -> MeshSleep:
    return MeshSleep(parts=parts, mode=PauseMode.KEEP, gives_back=gives_back)


def test_memory_goes_when_all_stand_still_and_comes_back_before_the_first_step(
    sleepy: tuple[Setting, SleepingWorkers],
) -> None:
    made, workers = sleepy
    made.core.submit(PEER, submit(1))
    made.core.step()
    made.order(sleep=asleep(*BOTH, gives_back=False))
    until(lambda: made.run(1) is None and made.orders.follow())
    assert not workers.done, "others may still compute"
    made.order(sleep=asleep(*BOTH))
    assert made.orders.follow()
    assert workers.done == ["gave kv_cache", "gave weights"]
    assert not made.core.has_work
    assert len(made.core.scheduler.queues.waiting) == 1, "its blocks are gone: it is computed again"
    made.order(sleep=asleep(MemoryPart.KV_CACHE))
    assert not made.orders.follow()
    workers.may_read.set()
    until(made.orders.follow)
    assert workers.done[2:] == ["read again", "used"]
    assert not made.core.has_work
    made.order()
    assert made.orders.follow()
    assert made.core.has_work
    made.order(sleep=asleep(MemoryPart.KV_CACHE))
    until(lambda: made.run(1) is None and made.orders.follow())
    assert workers.done[4:] == ["gave kv_cache"]


def test_an_instance_that_missed_the_waking_reads_before_it_computes(
    sleepy: tuple[Setting, SleepingWorkers],
) -> None:
    made, workers = sleepy
    made.order(sleep=asleep(*BOTH))
    assert made.orders.follow()
    made.core.submit(PEER, submit(1))
    made.order()
    for _ in range(3):
        assert not made.orders.follow()
        assert not made.core.has_work
    workers.may_read.set()
    until(made.orders.follow)
    assert made.core.has_work


@pytest.mark.parametrize("sleepy", [False, True], ids=["alone", "in a group"], indirect=True)
def test_later_weights_take_the_place_of_those_that_were_given_back(
    sleepy: tuple[Setting, SleepingWorkers],
) -> None:
    """An instance was away while the others woke up and went over to new weights."""
    made, workers = sleepy
    in_groups = made.orders._in_groups
    made.order(sleep=asleep(*BOTH))
    assert made.orders.follow()
    workers.may_read.set()
    made.order(weights=VERSION)
    if in_groups:
        until(lambda: not made.orders.follow() and made.orders._has(1))
        made.orders.enter(1)
    until(made.orders.follow)
    assert workers.done[2:] == ["read /new", "used"], "the older ones are not read again"
    assert made.orders._has(1)


def test_weights_that_were_given_back_are_read_before_others_are_prepared(
    sleepy: tuple[Setting, SleepingWorkers],
) -> None:
    made, workers = sleepy
    made.order(sleep=asleep(*BOTH))
    assert made.orders.follow()
    assert not made.orders._has(0), "no group steps without weights"
    made.order(update=WeightUpdate(VERSION))
    assert not made.orders.follow()
    workers.may_read.set()
    until(lambda: made.orders.follow() and made.membership._state.weights.prepared == "u1")
    assert workers.done[2:] == ["read again", "used", "read /new"]
    made.order(sleep=asleep(*BOTH))  # the update was abandoned
    until(made.orders.follow)
    assert workers.done[5:] == ["gave kv_cache", "discarded", "gave weights"]
    made.order()
    until(made.orders.follow)
    assert workers.done[8:] == ["read again", "used"]


def test_an_instance_whose_weights_are_gone_ends(sleepy: tuple[Setting, SleepingWorkers]) -> None:
    made, workers = sleepy
    made.order(sleep=asleep(*BOTH))
    assert made.orders.follow()
    workers.source_is_gone = True
    workers.may_read.set()
    made.order()
    with pytest.raises(WeightsLost, match="no such directory"):
        until(made.orders.follow)


def test_an_instance_that_cannot_give_memory_back_stands_still(fixed: Setting) -> None:
    fixed.core.submit(PEER, submit(1))
    fixed.order(sleep=asleep(*BOTH))
    until(lambda: fixed.run(1) is None and fixed.orders.follow())
    assert not fixed.core.has_work
    fixed.order()
    assert fixed.orders.follow()
    assert fixed.core.has_work
