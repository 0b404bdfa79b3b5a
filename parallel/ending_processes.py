"""Processes that compute nothing any more, though the system has not let go of them.

The pidfd and the connections of a killed process show its end only once its memory and its devices are
released. That takes a second or more where there are gigabytes, or a GPU. /proc shows it at once. This module
loads no torch.
"""

from __future__ import annotations

import os

PF_EXITING = 0x4
"""Flag of Linux for a thread that is ending, in the ninth field of /proc/PID/stat."""


def is_ending(pid: int) -> bool:
    """Whether a process is ending, or has ended and nobody has waited for it.

    False as well where /proc does not show it.
    """
    state, fields = _stat(pid)
    return state in (b"Z", b"X") or bool(int(fields[5] if fields else 0) & PF_EXITING)


def ending_status(pid: int) -> int | None:
    """Exit status, as in subprocess, of a process that is ending; None: it is not.

    0 as well where the system shows the status of its own processes only.
    """
    if not is_ending(pid):
        return None
    _, fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields else None


def _stat(pid: int) -> tuple[bytes, list[bytes]]:
    """State of a process and the fields behind it, empty where /proc hides them."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *fields = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return b"", []
    return state, fields
