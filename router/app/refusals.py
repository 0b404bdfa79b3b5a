"""Logs why requests were refused: the access log has only the status.

The message that the client got is logged in one short line. Keys and prompts are never logged: errors that
may quote the prompt bring other words for the log (:attr:`router.errors.ApiError.logged`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from router.errors import MAX_LOGGED, ApiError, one_line

logger = logging.getLogger(__name__)

MAX_PATH = 100
"""Characters of a path, and of a parameter's name, in a log line."""
MAX_LINES = 50
"""Lines of one level in each interval; what is beyond is counted."""
INTERVAL = 10.0
"""Seconds for which lines are counted against ``MAX_LINES``."""


class Lines:
    """Limit on log lines of one level, so that floods of requests are counted."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = float("-inf")
        self._logged = 0
        self._left_out = 0

    def __repr__(self) -> str:
        return f"<Lines {self._logged} logged, {self._left_out} left out>"

    def take(self) -> int | None:
        """Number of lines left out before this one; None if none may be logged."""
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
    """Logs refused requests of one application, within limits per level.

    An error of the client is logged as information. A request that no instance could take is a warning, and
    an error of the server an error.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._lines = {level: Lines(clock) for level in (logging.INFO, logging.WARNING, logging.ERROR)}

    def __repr__(self) -> str:
        return f"<Refusals {self._lines}>"

    def add(self, method: str, path: str, error: ApiError) -> None:
        """Log a request that was answered with an error."""
        level = logging.INFO if error.status < 500 else logging.WARNING
        if error.status == 500:
            level = logging.ERROR
        left_out = self._lines[level].take()
        if left_out is None:
            return
        if left_out:
            logger.log(level, "%d more requests were refused; only some are logged", left_out)
        param = f" ({one_line(error.param, MAX_PATH)})" if error.param else ""
        message = one_line(str(error) if error.logged is None else error.logged, MAX_LOGGED)
        logger.log(level, "%s %s: %d%s: %s", method, one_line(path, MAX_PATH), error.status, param, message)
