"""Memory that an instance gives back while the mesh sleeps."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

import psutil

from coordinator.messages import InFlight, MemoryPart, StandingOrders, WeightUpdate
from engine.core import EngineCore
from engine.host.background import Chores
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from engine.weight_versions.requests_in_flight import RequestsInFlight
from engine.weight_versions.updating import WeightsLost

logger = logging.getLogger(__name__)


def keep_memory(part: MemoryPart) -> bool:
    """Stands for an executor that cannot give memory back."""
    return False


class ReadsAgain(Protocol):
    """Weights of an instance that can be read again."""

    def read_again(self, should_stop: Callable[[], bool]) -> None:
        """Read the version in use; in a background thread."""
        ...

    def use_again(self) -> None:
        """Use what was read from the next step on."""
        ...


class SleepFollowing:
    """Follows the sleep of the standing orders, asked in each turn while nothing is computed."""

    def __init__(
        self,
        core: EngineCore,
        give_back: Callable[[MemoryPart], bool],
        weights: ReadsAgain,
        wake_loop: Callable[[], None],
    ) -> None:
        """``give_back``: gives memory back between two steps; False if it stays, as on devices.

        ``wake_loop`` is called from any thread.
        """
        self._core = core
        self._give = give_back
        self._weights = weights
        self._requests = RequestsInFlight(core.scheduler, core.admission, core.sharing)
        self._wake_loop = wake_loop
        self._given: set[MemoryPart] = set()
        """Parts that this instance is without."""
        self._has_forgotten = False
        """Whether no block has a name any more, so that its memory may go."""
        self._reading = self._is_read = False
        self._problem = ""
        self._chores = Chores("waking")

    def __repr__(self) -> str:
        return f"<SleepFollowing without {' and '.join(sorted(self._given)) or 'nothing'}>"

    @property
    def is_whole(self) -> bool:
        """Whether no part of the memory is given back."""
        return not self._given

    @property
    def has_weights(self) -> bool:
        """Whether the weights are in memory; from any thread."""
        return MemoryPart.WEIGHTS not in self._given

    def may_prepare(self, update: WeightUpdate, orders: StandingOrders) -> bool:
        """Whether other weights may be read now.

        Those that were given back are read first, unless the others take their place.
        """
        return self.has_weights or (not self._reading and update.version == orders.weights)

    def look(self) -> None:
        """Use weights that were read again; called between two steps."""
        if self._is_read:
            self._weights.use_again()
            self._reading = self._is_read = False
            self.has_new_weights()

    def has_new_weights(self) -> None:
        """Note that the weights in use are in memory."""
        self._given.discard(MemoryPart.WEIGHTS)

    def follow(self, orders: StandingOrders, *, is_alone: bool) -> bool:
        """Give memory back, or take it back; returns whether that is done.

        ``is_alone``: whether no other version of the weights is prepared, or about to be.

        Raises:
            WeightsLost: the weights cannot be read again.
        """
        sleep = orders.sleep
        if sleep is not None and not sleep.gives_back:
            return True  # first all stand still
        wanted = set() if sleep is None else set(sleep.parts)
        for part in sorted(wanted - self._given):
            if (part is MemoryPart.WEIGHTS and not is_alone) or not self._give_back(part):
                return False
        if MemoryPart.KV_CACHE not in wanted:
            self._given.discard(MemoryPart.KV_CACHE)  # its pages come when they are written
        if MemoryPart.WEIGHTS not in wanted and not self.has_weights:
            self._take_back(may_begin=is_alone)
        return MemoryPart.WEIGHTS in wanted or self.has_weights

    def close(self) -> None:
        """Stop reading weights."""
        self._problem = "this instance ends"
        self._chores.close()

    def _give_back(self, part: MemoryPart) -> bool:
        if part is MemoryPart.KV_CACHE and not self._has_forgotten:
            self._requests.go_over(self._core.sharing.weights, InFlight.RECOMPUTE)
            self._has_forgotten = True
        if part is MemoryPart.KV_CACHE and self._core.sharing.is_lending:
            return False  # a transfer reads or writes blocks
        before = _resident()
        self._has_forgotten = False
        if not self._give(part):
            logger.warning("asleep, but the memory of %s stays: it cannot be given back here", part)
        else:
            self._given.add(part)
            logger.info("asleep: memory of %s given back, %.0f MiB less in use", part, before - _resident())
        return True

    def _take_back(self, *, may_begin: bool) -> None:
        """Read the weights in the background; :meth:`look` uses them."""
        if self._problem:
            raise WeightsLost(f"the weights given back while asleep cannot be read again: {self._problem}")
        if may_begin and not self._reading:
            self._reading = True
            self._chores.put(self._read)

    def _read(self) -> None:
        try:
            self._weights.read_again(lambda: bool(self._problem))
            self._is_read = True
        except WeightsSuperseded:
            pass
        except WeightsRefused as error:
            self._problem = str(error)
        except Exception as error:
            logger.exception("the weights could not be read again")
            self._problem = str(error) or type(error).__name__
        self._reading = self._is_read  # until they are in use
        self._wake_loop()


def _resident() -> float:
    """Memory of this instance, in MiB: of its process, and of workers that it began."""
    this = psutil.Process()
    total = 0
    for process in (this, *this.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            total += process.memory_info().rss
    return total / 2**20
