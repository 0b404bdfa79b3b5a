"""The short form of examples/rl: ratios of exactly 1.0, an instance killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[3]
LINE = re.compile(r"step +\d+: reward (0\.\d+), 1536 ratios are 1\.0")


def test_three_steps_of_grpo() -> None:
    command = [sys.executable, "-P", "-m", "examples.rl.grpo", "--iterations", "3", "--kill-at", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(each) for each in LINE.findall(done.stdout)]
    assert len(rewards) == 3
    assert "an instance was killed" in done.stdout
    assert all(0 < each < 1 for each in rewards)
