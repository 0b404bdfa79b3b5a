"""Why requests were refused, in the log: the access log tells the status only.

What a client is told is logged for whoever runs the mesh, in one short line. Never its keys, nor its prompt:
errors that may quote the prompt bring other words for the log (:attr:`router.errors.ApiError.logged`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from router.errors import MAX_LOGGED, ApiError, one_line

logger = logging.getLogger(__name__)

MAX_PATH = 100
MAX_LINES = 50
"""Lines of one level in each interval; what is beyond is counted."""
INTERVAL = 10.0
"""Seconds."""


class Lines:
    """How many lines of one level may still be logged: who floods the server does not flood the log."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = float("-inf")
        self._logged = 0
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<Lines {self._logged} logged, {self._left_out} left out>"

    def take(self) -> int | None:
        """None if no line may be logged now.

        Else how many were left out before this one.
        """
        now = self._clock()
        if now - self._since >= INTERVAL:
            self._since, self._logged = now, 0
        if self._logged >= MAX_LINES:
            self._left_out += 1
            return None
        self._logged += 1
        left_out, self._left_out = self._left_out, 0
        return left_out


class Refusals:
    """Of one application.

    What is at fault at the client is information, that nobody could take a request a warning, and what is at
    fault here an error.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = {level: Lines(clock) for level in (logging.INFO, logging.WARNING, logging.ERROR)}

    def __repr__(self) -> str:
        return f"<Refusals {self._lines}>"

    def add(self, method: str, path: str, error: ApiError) -> None:
        """A request was answered with an error."""
        level = logging.INFO if error.status < 500 else logging.WARNING
        if error.status == 500:
            level = logging.ERROR
        left_out = self._lines[level].take()
        if left_out is None:
            return
        if left_out:
            logger.log(level, "%d more requests were refused; only some are told of here", left_out)
        param = f" ({one_line(error.param, MAX_PATH)})" if error.param else ""
        message = one_line(str(error) if error.logged is None else error.logged, MAX_LOGGED)
        logger.log(level, "%s %s: %d%s: %s", method, one_line(path, MAX_PATH), error.status, param, message)
