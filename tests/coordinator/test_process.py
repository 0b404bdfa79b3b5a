"""What every process does first."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMITS = """
import resource
from coordinator import process
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
process.raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("soft", "hard", "then"), [(256, 1000, "1000 1000"), (1000, 1000, "1000 1000")])
def test_as_many_files_may_be_open_as_the_hard_limit_allows(soft: int, hard: int, then: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", LIMITS.format(soft=soft, hard=hard)],
        capture_output=True,
        check=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == then
