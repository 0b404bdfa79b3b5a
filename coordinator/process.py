"""What every process of the mesh does first: name itself, log, and end with its parent."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys

PR_SET_PDEATHSIG = 1

EXIT_USAGE = 2
"""Wrong settings: nothing was started."""
EXIT_FAILED = 1
"""Something needed could not be had: a port, memory, a model, the other instances in time."""
EXIT_REFUSED = 3
"""The coordinator refused this instance."""

PARENT_VARIABLE = "LOCKSTEP_PARENT_PID"


def set_up(role: str, log_level: str) -> None:
    """Title, log format and, for a child of a launcher, death with its parent."""
    die_with_parent()
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"lockstep: {role}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"({role} pid={os.getpid()}) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
            datefmt="%m-%d %H:%M:%S",
        )
    )
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)


def die_with_parent() -> None:
    """Have the kernel kill this process when its launcher dies, however that happens.

    Linux only (prctl); the launcher passes its pid, so that a launcher which died before this call is
    noticed as well.
    """
    parent = os.environ.get(PARENT_VARIABLE)
    if parent is None:
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(EXIT_FAILED)
