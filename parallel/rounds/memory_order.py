"""Order of a member's reads and writes of shared memory, as other members see it.

Python reads and writes shared words plainly. x86-64 shows stores in their order, and makes loads in theirs
(total store order). ARM64 keeps neither, so a fence of C++ stands between data and the word that publishes
it, on both sides. C++ itself stores such words with release and loads them with acquire.

This module loads no torch.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from functools import cache

from parallel import compiler
from parallel.kernel_kinds import architecture
from parallel.rounds.collectives_source import SOURCE

logger = logging.getLogger(__name__)

Fence = Callable[[], object]
"""Keeps all reads and writes before it before all behind it."""


def no_fence() -> None:
    """The fence of CPUs that keep the order by themselves."""


def fence_here() -> Fence | None:
    """Fence between data and the word that publishes it; None where memory cannot be shared."""
    match architecture():
        case "x86_64":
            return no_fence
        case "aarch64":
            return _compiled()
    return None


@cache
def _compiled() -> Fence | None:
    """The fence in C++; None, with a log line, if it cannot be compiled."""
    try:
        fence: Fence = SOURCE.open().bind("fence", result=None)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        logger.warning("members of this host use sockets, not shared memory: %s", compiler.reason(error))
        return None
    return fence
