"""What all tests share: how those that start real processes are run.

They have deadlines in seconds, and the machine may be busy with something else. So they never run beside other
tests (``make test`` runs the others first, in two processes), and one that fails is run once more; the summary
says RERUN.
Everything else decides by itself alone, and must pass at once.
"""

from __future__ import annotations

import os
import signal

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell: children would
    signal.signal(signal.SIGINT, signal.default_int_handler)  # inherit that, and be deaf to Ctrl-C

if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    os.environ["OMP_NUM_THREADS"] = "1"

RERUNS = 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("mesh") and not item.get_closest_marker("flaky"):
            item.add_marker(pytest.mark.flaky(reruns=RERUNS))
