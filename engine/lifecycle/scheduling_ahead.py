"""Log lines about scheduling ahead: whether an instance does it, and a flag without effect."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

ELSEWHERE = "it takes decode steps as CUDA graphs, without -tp, -pp, spread experts and recurrent states"


def log_scheduling_ahead(wanted: bool | None, device: str, *, runs_ahead: bool) -> None:
    """Log whether the next step is scheduled while a device computes.

    ``wanted``: the value of --async-scheduling, None if it was not given.
    """
    if runs_ahead:
        logger.info("scheduling ahead: on, the next step is scheduled while the device computes")
    elif wanted:
        reason = "a CPU computes" if device == "cpu" else ELSEWHERE
        logger.warning("--async-scheduling has no effect here: %s", reason)
    elif device != "cpu":
        logger.info("scheduling ahead: off, %s", "by the flag" if wanted is False else ELSEWHERE)
