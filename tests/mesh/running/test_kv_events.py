"""KV events of real instances, which compute, fetch, read files and forget."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from engine.kernels.core import library
from engine.pieces.pool import prefix_names
from tests.engine.events.follower import Follower
from tests.mesh.faults.test_transfers import FLAGS, LENGTH, ask
from tests.mesh.harness import Ports, free_port, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]


def test_followers_of_two_instances_have_their_blocks(tmp_path: Path) -> None:
    ports, admin = Ports(), free_port()
    events = {
        "enable_kv_cache_events": True,
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
    }
    flags = [*FLAGS, "--enable-prompt-tokens-details", "--admin-port", str(admin)]
    with serve(
        tmp_path / "log", "-dp", "2", *ports.head(), *flags, "--kv-events-config", json.dumps(events)
    ) as command:
        command.wait_for("2 instances ready")
        ends = [(f"ipc://{tmp_path}/events{end}", f"ipc://{tmp_path}/replay{end}") for end in ("", "_dp1")]
        with Follower(*ends[0]) as one, Follower(*ends[1]) as other:
            expected: list[set[int]] = [set(), set()]
            for first, rank in ((10, 0), (500, 1), (10, 1)):  # the last is fetched
                prompt = [4 + (first + 7 * index) % 4000 for index in range(LENGTH)]
                tokens, _, _ = ask(ports, first, rank)
                # the newest token is never in the cache, and prefix_names leaves a block with the last out
                expected[rank] |= set(prefix_names([*prompt, *tokens], 16))
            for follower, names, rank in ((one, expected[0], 0), (other, expected[1], 1)):
                follower.follow(0.3)
                follower.catch_up()
                assert set(follower.contexts) == names
                assert follower.ranks == {rank}
            request = urllib.request.Request(
                f"http://127.0.0.1:{admin}/reset_prefix_cache", b"", method="POST"
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
            for follower in (one, other):
                wait_until(lambda: follower.catch_up() or not follower.contexts, 5, "its change is published")  # noqa: B023
                assert follower.kinds[-1] == "AllBlocksCleared"
        assert "Traceback" not in command.log
        assert command.stop() == 0
