"""The units of systemd: verified by systemd where it is installed, and their settings."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.files import DEPLOY, serve_config

SYSTEMD = DEPLOY / "systemd"
UNITS = sorted(SYSTEMD.glob("*.service"))
WORST_EXPOSURE = 2.0
"""Exposure of 10 at most, as ``systemd-analyze security`` counts."""


def settings(unit: Path) -> dict[str, str]:
    return dict(re.findall(r"^(\w+)=(.*)$", unit.read_text(), re.MULTILINE))


def arguments(name: str) -> list[str]:
    return re.findall(r"^#?LOCKSTEP_ARGS=(.+)$", (SYSTEMD / name).read_text(), re.MULTILINE)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_finds_nothing_wrong(unit: Path, tmp_path: Path) -> None:
    copy = tmp_path / unit.name  # with programs that are here: it looks for them
    copy.write_text(unit.read_text().replace("/opt/lockstep/bin/lockstep", "/bin/true"))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (verified.returncode, verified.stderr) == (0, "")
    secure = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", copy], capture_output=True, text=True, check=False
    )
    exposure = re.search(r"exposure level for \S+: ([\d.]+)", secure.stdout)
    assert exposure is not None, secure.stderr
    assert float(exposure[1]) < WORST_EXPOSURE


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_notify_and_leave_the_order_of_ends_to_serve(unit: Path) -> None:
    found = settings(unit)
    assert found["Type"] == "notify"
    assert found["KillMode"] == "mixed"
    assert int(found["WatchdogSec"]) > 0


def test_instances_have_time_to_drain() -> None:
    (line,) = arguments("instance.env")
    config = serve_config(["--headless", *shlex.split(line)])
    stop = int(settings(SYSTEMD / "lockstep-instance@.service")["TimeoutStopSec"])
    assert stop >= config.engine.drain_timeout + 20


def test_heads_have_time_to_end_their_requests() -> None:
    for line in arguments("mesh.env"):
        config = serve_config(shlex.split(line))
        assert (
            int(settings(SYSTEMD / "lockstep@.service")["TimeoutStopSec"]) > config.http.shutdown_timeout + 20
        )
