"""``lockstep autoscale`` from one to three instances and back, without a lost token."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.mesh.faults.test_loss import crowd, crowd_of
from tests.mesh.harness import Command, Ports, serve, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.nightly]

FLAGS = ["--dtype", "float32", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "8"]
NUM_STREAMS = 24
AUTOSCALE = [
    "--max-instances", "3", "--target-running", "6", "--target-queue", "1", "--cool-down-up", "1",
    "--cool-down-down", "1", "--stabilization-window", "6", "--interval", "0.5",
]  # fmt: skip


def test_from_one_to_three_and_back_without_a_lost_token(tmp_path: Path) -> None:
    ports, signal_file = Ports(), tmp_path / "wanted.json"
    with serve(tmp_path / "serve.log", *ports.head(), "-dp", "1", *FLAGS) as command:
        command.wait_for("1 instance ready")
        undisturbed = crowd_of(ports, NUM_STREAMS)
        autoscale = Command(
            tmp_path / "autoscale.log", "router.tools.autoscale", *ports.join(), *AUTOSCALE,
            "--signal-file", str(signal_file),
        )  # fmt: skip

        def num_ready() -> int:
            return int(json.loads(signal_file.read_text())["ready"]) if signal_file.exists() else 0

        async def load_until_three() -> None:
            for _ in range(100):
                assert await crowd(ports, count=NUM_STREAMS) == undisturbed
                if num_ready() == 3:
                    return
            raise AssertionError(autoscale.log)

        with autoscale:
            asyncio.run(load_until_three())
            assert crowd_of(ports, NUM_STREAMS) == undisturbed
            wait_until(lambda: num_ready() == 1, 60, "one instance again", every=0.5)
            assert crowd_of(ports, NUM_STREAMS) == undisturbed
        assert "starting instance" in autoscale.log
        assert "draining instance" in autoscale.log
        assert command.stop() == 0
        assert "Traceback" not in command.log
