"""Real instances that are killed, and whose KV blocks others take."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from engine.kernels.core import library
from tests.mesh.faults.test_transfers import FLAGS, of, streams
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]


def test_survivors_take_the_blocks_of_a_killed_instance(tmp_path: Path) -> None:
    ports = Ports()
    flags = [*FLAGS, "--num-gpu-blocks-override", "1200", "--enable-kv-inheritance", "--restart"]
    prompts = [[4 + (90 * each + 7 * index) % 4000 for index in range(600)] for each in range(8)]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        moved = asyncio.run(streams(ports, prompts, command.child("Engine_1").kill))
        wait_until(lambda: "are back after" in command.log, 10, "all have moved")
        found = re.search(r"8 requests of .* (\d+) tokens computed again, (\d+) were cached", command.log)
        assert found is not None, command.log
        computed, cached = map(int, found.groups())
        assert cached >= 8 * 592
        assert computed < 0.05 * (computed + cached)
        wait_until(lambda: of(ports, "lockstep:kv_inherited_tokens_total", 0) >= 8 * 592, 5, "it is counted")
        assert asyncio.run(streams(ports, prompts)) == moved
        assert "Traceback" not in command.log
        command.stop()
