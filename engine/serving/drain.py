"""End of an instance that leaves: finish requests, let the rest move, then go."""

from __future__ import annotations

import logging
import threading
import time

from engine.core import EngineCore
from engine.messages import Leaving
from engine.serving.router_connections import RouterConnections

logger = logging.getLogger(__name__)

MOVE_TIMEOUT = 15.0
"""Seconds after a drain's deadline in which requests may move with their KV blocks.

Then they move without."""


class InstanceDrain:
    """Deadlines of a drain; begun from any thread, looked at by the step loop."""

    def __init__(self, core: EngineCore, routers: RouterConnections) -> None:
        self._core = core
        self._routers = routers
        self._begun = threading.Event()
        self._until = 0.0
        self._moves_until: float | None = None
        """When the requests here must have moved, once routers were asked to move them."""
        self._goes_at_once = False
        self.leaves_requests = False
        """Whether it ended with requests that other instances have to finish."""

    def __repr__(self) -> str:
        return f"<InstanceDrain {f'{self.time_left:.1f} s left' if self.is_on else 'not begun'}>"

    @property
    def is_on(self) -> bool:
        """Whether the instance drains, and takes no new requests."""
        return self._begun.is_set()

    @property
    def time_left(self) -> float:
        """Seconds until the drain deadline."""
        return max(0.0, self._until - time.monotonic())

    def begin(self, timeout: float, *, at_once: bool = False) -> None:
        """Finish what is here within ``timeout`` seconds; ``at_once``: without time to move the rest."""
        self._goes_at_once = self._goes_at_once or at_once
        self._until = time.monotonic() + timeout
        self._begun.set()

    def is_over(self) -> bool:
        """Whether nothing is left to wait for; what is left then is aborted here."""
        if self._core.is_empty and not self._core.sharing.is_lending:
            return True
        if time.monotonic() < self._until:
            return False
        if self._core.is_empty and self._moves_until is None:  # others compute what they lack by now
            return True
        if self._has_time_to_move():
            return False
        if self._core.is_empty:
            return True
        logger.warning("the drain deadline is over: %d requests are left to the routers", self._num_left)
        self.leaves_requests = True
        self._routers.abort_everything()
        return True

    @property
    def _num_left(self) -> int:
        load = self._core.reports.snapshot
        return load.running + load.waiting

    def _has_time_to_move(self) -> bool:
        """Whether to wait until requests have moved; their routers are asked to move them first."""
        if self._goes_at_once or not self._core.sharing.lends:
            return False
        if self._moves_until is None:
            self._moves_until = time.monotonic() + MOVE_TIMEOUT
            logger.info("the drain deadline is over: %d requests are to move", self._num_left)
            self._routers.tell_all(Leaving())
        return time.monotonic() < self._moves_until
