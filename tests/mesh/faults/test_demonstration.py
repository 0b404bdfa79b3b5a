"""The demonstration in the README still shows what the README describes.

For each push `tests/docs/test_readme.py` runs it as the README does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mesh

EXAMPLE = Path(__file__).parents[3] / "examples" / "kill_a_rank.py"


@pytest.mark.nightly
def test_a_rank_is_killed_and_its_streams_go_on() -> None:
    shown = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=180)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "token ids are those of the undisturbed run" in shown.stdout
