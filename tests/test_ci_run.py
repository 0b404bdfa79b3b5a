"""``.ci/run`` installs what some tests need beside the others, and waits for that."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ("bash", "dirname", "rm", "sleep", "timeout")


@pytest.mark.parametrize(("status", "said"), [(0, "installed chromium"), (100, "cannot be installed")])
def test_a_run_that_fails_early_ends_after_the_installation(tmp_path: Path, status: int, said: str) -> None:
    """It keeps the exit status of the tests."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    fakes = {
        "id": "echo 0",
        "apt-get": f"sleep 0.3; exit {status}",
        "make": 'echo "make $*"; exit 7',
    }
    for name, text in fakes.items():
        program = programs / name
        program.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        program.chmod(0o755)
    output = tmp_path / "output"  # a pipe would be read until the installation lets go of it, too
    with output.open("w") as file:
        done = subprocess.run(
            [programs / "bash", tmp_path / ".ci" / "run"],
            env={**os.environ, "PATH": str(programs)},
            stdout=file,
            stderr=subprocess.STDOUT,
            check=False,
        )
    assert done.returncode == 7
    first, last = output.read_text().splitlines()
    assert first == "make check test"
    assert said in last
