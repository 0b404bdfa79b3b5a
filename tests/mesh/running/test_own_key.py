"""A mesh on one host without options about keys admits its own user's processes only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from coordinator.config import MeshConfig
from coordinator.rpc import keys, own_key
from engine.config import SHIPPED_MODEL
from tests.mesh.harness import Command, Ports, wait_until
from tests.mesh.running.test_commands import ask

pytestmark = pytest.mark.mesh

SMALL = ["--num-gpu-blocks-override", "400", "--max-num-seqs", "8", "--dtype", "float32"]


def lockstep(*argv: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from router.launcher.serve import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, *argv], capture_output=True, text=True, check=False, timeout=60
    )


def test_processes_of_one_user_find_each_other_and_a_stranger_stays_outside(tmp_path: Path) -> None:
    """The headless instance starts first; the stranger cannot read the key, like other users."""
    ports = Ports()
    serve = [SHIPPED_MODEL, "-dp", "2", "-dpl", "1", "--no-enable-expert-parallel", *SMALL, *ports.join()]
    with (
        Command(tmp_path / "other.log", "router.launcher.serve", *serve, "--headless", "-dpr", "1") as other,
        Command(tmp_path / "head.log", "router.launcher.serve", *serve, "--port", str(ports.http)) as head,
    ):
        head.wait_for("2 instances ready")
        assert ask(ports)
        found = own_key.find(MeshConfig(data_parallel_rpc_port=ports.rpc))
        assert found is not None
        secrets = keys.text_of(found).split()[-2:]
        for process in (*head.family(), *other.family()):
            shown = " ".join([*process.cmdline(), *process.environ().values()])
            assert not any(secret in shown for secret in secrets)
        stranger = Command(
            tmp_path / "stranger.log", "router.launcher.serve", SHIPPED_MODEL, "--headless", "--insecure-mesh", *SMALL,
            "--no-enable-expert-parallel", *ports.join(),
        )  # fmt: skip
        with stranger:
            assert stranger.end(60) == 3, stranger.log
            assert "takes only peers with the key of its mesh" in stranger.log
        refused = lockstep("status", "--insecure-mesh", *ports.join())
        assert refused.returncode == 3
        status = lockstep("status", "--json", *ports.join())
        assert status.returncode == 0, status.stderr
        assert lockstep("drain", "1", *ports.join()).returncode == 0
        wait_until(lambda: "instance 1 left" in head.log, 30, "instance 1 has gone")
        assert ask(ports)
        pids = [process.pid for process in head.family()]
        assert head.stop() == 0
        wait_until(lambda: not any(map(psutil.pid_exists, pids)), 10, "no process is left")
