"""Rate-limited log lines about a recurring problem with peers; every case is counted."""

from __future__ import annotations

import logging
import time

INTERVAL = 10.0
"""Seconds between two log lines about the same problem."""


class Complaints:
    """Rate-limited logger of one problem, which ``what`` names."""

    def __init__(self, logger: logging.Logger, what: str) -> None:
        self._logger = logger
        self._what = what
        self._logged_at = float("-inf")
        self.count = 0

    def __repr__(self) -> str:
        return f"<Complaints {self.count} times: {self._what}>"

    def add(self, details: object = "") -> None:
        """Count the problem once more; log it if the last line is long ago."""
        self.count += 1
        now = time.monotonic()
        if now - self._logged_at >= INTERVAL:
            self._logged_at = now
            self._logger.warning(
                "%s (%d so far)%s", self._what, self.count, f": {details}" if details else ""
            )
