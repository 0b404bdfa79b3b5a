"""Branch coverage of the rooms that decide, by their own tests: ``LOCKSTEP_COVERAGE=1``, in xdist's workers.

``make coverage`` sets it, which ``make nightly`` runs. Tracing a test takes one and a half times its own time
again (Python 3.11 has no cheaper way), so no push waits for it, and these rooms alone are measured: they hold
the decisions, and most of what they do takes no model.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MEASURED = ["coordinator", "engine/scheduling", "router/dispatch"]
SCHEDULES = 5
"""Random schedules of a property that are traced.

Each costs five times as much traced, and later ones run the same lines.
"""


def is_traced(item: pytest.Item) -> bool:
    """Whether a test is of a measured room, and no later random schedule."""
    drawn = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    number = drawn.get("seed", drawn.get("first", 0))
    if isinstance(number, int) and number >= SCHEDULES:
        return False
    return any(item.path.is_relative_to(ROOT / "tests" / each) for each in MEASURED)


if os.environ.get("LOCKSTEP_COVERAGE") and "PYTEST_XDIST_WORKER" in os.environ:
    import coverage

    measurement = coverage.Coverage(data_suffix=True, source_dirs=[str(ROOT / each) for each in MEASURED])
    measurement.start()  # also while modules are imported: that runs their first lines

    def pytest_collection_finish() -> None:
        """Trace the tests of these rooms from here on."""
        measurement.stop()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
        """Trace a test, or leave it untraced."""
        if not is_traced(item):
            return (yield)
        measurement.start()
        try:
            return (yield)
        finally:
            measurement.stop()

    def pytest_sessionfinish() -> None:
        """Write what was covered: a worker ends without what is left to do at exit."""
        measurement.save()
