"""The thread that reads low-rank adapters of an instance while it serves (no torch).

:class:`engine.adapters.following.AdapterFollowing` decides, and an
:class:`engine.executor_contract.AdapterMemory` does it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from coordinator.messages import AdapterSource, AdaptersReport, StandingOrders
from engine.adapters.adapter_settings import AdapterError
from engine.adapters.following import AdapterFollowing, DropAdapters, ReadAdapter
from engine.executor_contract import AdapterMemory
from engine.host.background import Chores, be_nicer

logger = logging.getLogger(__name__)

LOOK_INTERVAL = 0.25
"""Seconds between two looks whether adapters can be dropped that requests still have."""


class AdaptersLost(RuntimeError):
    """Error: this instance cannot serve an adapter of the mesh; the message says why."""


class AdapterLoading:
    """Follows the list of adapters in the standing orders, asked in each turn."""

    def __init__(
        self, memory: AdapterMemory, held: Sequence[AdapterSource], wake_loop: Callable[[], None]
    ) -> None:
        """``held``: those of the settings; ``wake_loop``: ends the step loop's sleep, from any thread."""
        self._memory = memory
        self._wake_loop = wake_loop
        self._following = AdapterFollowing(held)
        self._lock = threading.Lock()
        self._orders: StandingOrders | None = None
        """Those for which there was nothing to do at the last look."""
        self._look_at = 0.0
        self.num_changes = 0
        """Adapters that were read, could not be read, or were dropped."""
        self._chores = Chores("adapters", pause=0.0)
        self._chores.put(be_nicer)

    def __repr__(self) -> str:
        return f"<AdapterLoading {self._following!r}>"

    @property
    def names(self) -> dict[str, str]:
        """Names of the adapters in memory by digest; another object after each change."""
        return self._following.names

    def follow(self, orders: StandingOrders, in_use: Callable[[], Collection[str]]) -> bool:
        """Do what the orders ask for now; returns whether all listed adapters are here.

        Called in the step thread, between two turns. ``in_use`` returns digests of adapters that requests
        here have.

        Raises:
            AdaptersLost: one of them cannot be served here.
        """
        if orders is self._orders and time.monotonic() < self._look_at:
            return True
        with self._lock:
            problem = self._following.problem(orders)
            action = self._following.next(orders, in_use())
            is_in_effect = self._following.is_in_effect(orders)
        if problem is not None:
            raise AdaptersLost(f"an adapter of the mesh cannot be served here: {problem}")
        match action:
            case ReadAdapter(key, source):
                self._following.begun(key)
                self._chores.put(lambda: self._read(source))
            case DropAdapters(digests):
                self._following.dropped(digests)
                self.num_changes += 1
                self._memory.drop(digests)
                logger.info("adapters %s are not in memory any more", ", ".join(digests))
            case None if is_in_effect and not self._following.reading:
                self._orders, self._look_at = orders, time.monotonic() + LOOK_INTERVAL
        return is_in_effect

    def report(self, orders: StandingOrders) -> AdaptersReport:
        """How far this instance is with the adapter to read, for the coordinator."""
        with self._lock:
            return self._following.report(orders)

    def has_all(self, orders: StandingOrders) -> bool:
        """Whether all adapters of the mesh are in memory, retired ones, too."""
        with self._lock:
            return self._following.is_in_effect(orders) and not self._following.lacking(orders)

    def lacking(self, orders: StandingOrders) -> tuple[str, ...]:
        """Digests of retired adapters that this instance does not have."""
        return self._following.lacking(orders)

    def close(self) -> None:
        """Stop after what is being read."""
        self._chores.close()

    def _read(self, source: AdapterSource) -> None:
        """Read an adapter, in the thread."""
        reason = ""
        try:
            found = self._memory.read(source)
        except AdapterError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("adapter %s could not be read", source.name)
            reason = str(error) or type(error).__name__
        with self._lock:
            self._orders = None
            if reason:
                logger.warning("adapter %s cannot be served: %s", source.name, reason)
                self._following.failed(reason)
            else:
                self._following.read(found)
            self.num_changes += 1
        self._wake_loop()
