"""Run of tests in which one or two failures get a second try.

``python -m tests.second_tries ARGUMENTS OF PYTEST``. Tests of real processes have deadlines in seconds, and the
machine may be busy; a file that one test leaves open, or a port that it takes, fails another. Those that fail run
once more, each alone, after all others. At the end each second try is listed with the last line of its first failure:
they are to be mended. A file that cannot be loaded decides at once, and so does a process that dies.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from xml.etree import ElementTree

import pytest

MOST = 2
"""Failed tests that get a second try; one more, and the run fails without any."""


@dataclass
class Failures:
    """A plugin that collects which tests failed, and why."""

    tests: dict[str, str] = field(default_factory=dict)
    """Test -> the last line of its first failure."""
    not_loaded: int = 0
    """Files whose tests could not be collected."""
    crashed: list[str] = field(default_factory=list)
    """Tests in which a worker of xdist died, most likely in native code."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.tests.setdefault(report.nodeid, last_line(report.longreprtext))
            if report.when not in ("setup", "call", "teardown"):  # xdist's report of a dead worker
                self.crashed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.not_loaded += report.failed

    @property
    def may_be_tried_again(self) -> bool:
        return not self.not_loaded and not self.crashed and 0 < len(self.tests) <= MOST


def last_line(text: str) -> str:
    """What pytest prints last of a failure, after the lines with its error."""
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    lines = errors or text.split("\n") if text else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no message")


def try_again(test: str) -> bool:
    """Whether a test passes alone, and is not skipped, in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".xml") as results:
        command = [sys.executable, "-m", "pytest", test, "--junit-xml", results.name]
        status = subprocess.run(command, check=False).returncode
        return status == 0 and ElementTree.parse(results).find(".//skipped") is None


def main(arguments: list[str]) -> int:
    """Run the tests, and those again that may be; the exit status of the whole."""
    failures = Failures()
    status = int(pytest.main(arguments, plugins=[failures]))
    if status != pytest.ExitCode.TESTS_FAILED:
        return status
    if not failures.may_be_tried_again:
        print(
            f"no second tries: {len(failures.tests)} tests failed (at most {MOST} are tried again), "
            f"{failures.not_loaded} files could not be loaded"
        )
        for test in failures.crashed:
            print(f"  a process died in {test}")
        return status
    passed = {test: try_again(test) for test in failures.tests}
    print(f"{len(passed)} second tries (at most {MOST}):")
    for test, first in failures.tests.items():
        print(f"  {'passed' if passed[test] else 'FAILED'} {test}: {first}")
    return 0 if all(passed.values()) else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
