"""What every process does first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.process import process

LIMITS = """
import resource
from coordinator.process import process
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
process.raise_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""

PROBLEM = """
import resource
from coordinator.process import process
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
print(process.open_files_problem())
"""


TITLE = """
from pathlib import Path
from coordinator.process import process
process.set_up("Engine_0", "info")
print(Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode())
"""


@pytest.mark.parametrize(
    ("mesh", "title"),
    [
        (":8000 qwen3", "lockstep: Engine_0 :8000 qwen3"),
        ("", "lockstep: Engine_0"),
        (None, "lockstep: Engine_0"),
    ],
)
def test_a_title_has_the_role_and_the_mesh(mesh: str | None, title: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != process.MESH_VARIABLE}
    if mesh is not None:
        environment[process.MESH_VARIABLE] = mesh
    done = subprocess.run(
        [sys.executable, "-P", "-c", TITLE],
        capture_output=True, check=True, text=True, timeout=60, env=environment,
    )  # fmt: skip
    assert done.stdout.strip() == title


@pytest.mark.parametrize(
    ("soft", "hard", "problem"),
    [
        (
            128,
            200,
            "only 200 files may be open at once (ulimit -n), too few for a mesh: raise the hard limit",
        ),
        (128, 201, "None"),
        (201, 201, "None"),
    ],
)
def test_a_limit_of_files_that_is_too_low_for_a_mesh_is_named(soft: int, hard: int, problem: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-c", PROBLEM.format(soft=soft, hard=hard)],
        capture_output=True, check=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith(problem)


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


def test_closed_standard_streams_are_held(tmp_path: Path) -> None:
    found = tmp_path / "found"
    script = (
        "import os, pathlib; from coordinator.process.process import hold_standard_streams; hold_standard_streams(); "
        f"pathlib.Path({str(found)!r}).write_text(' '.join(os.readlink(f'/proc/self/fd/{{n}}') for n in range(3)))"
    )
    shell = 'exec "$0" -P -c "$1" <&- >&- 2>&-'
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    subprocess.run(["sh", "-c", shell, sys.executable, script], env=environment, check=True, timeout=60)
    assert found.read_text().split() == [os.devnull] * 3
