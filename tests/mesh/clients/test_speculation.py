"""Speculative decoding: clients get the same tokens as without, also if an instance dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.mesh.clients.test_clients import metrics
from tests.mesh.faults.test_loss import NUM_TOKENS, crowd
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = [pytest.mark.mesh, pytest.mark.nightly, pytest.mark.timeout(240)]

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4}'


def test_drafts_change_no_token_with_experts_spread_and_an_instance_killed(tmp_path: Path) -> None:
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "1000", "--max-num-seqs", "32"]
    plain = Ports()
    with serve(tmp_path / "plain", "-dp", "1", *plain.head(), *flags) as command:
        command.wait_for("1 instance ready")
        expected = asyncio.run(crowd(plain))
        assert command.stop() == 0
    ports = Ports()
    flags += ["--speculative-config", DRAFTS]
    with serve(tmp_path / "drafts", "-dp", "3", "-ep", *ports.head(), *flags) as command:
        command.wait_for("3 instances ready")

        def kill() -> None:
            wait_until(lambda: ports.view().members[1].load.running > 2, 20, "instance 1 works")
            command.child("Engine_1").kill()

        assert all(len(ids) == NUM_TOKENS for ids in expected)
        assert asyncio.run(crowd(ports)) == expected
        assert asyncio.run(crowd(ports, kill)) == expected
        counted = {
            kind: sum(value for name, value in metrics(ports).items() if f"{kind}_total" in name)
            for kind in ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
        }
        assert counted["draft_tokens"] >= counted["accepted_tokens"] > 0
        assert counted["accepted_tokens_per_pos"] == counted["accepted_tokens"]
        assert command.stop() == 0
