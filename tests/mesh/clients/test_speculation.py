"""Speculative decoding: clients get the same tokens as without, also if an instance dies."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_HEAD, SHIPPED_MODEL
from engine.model.finding import find_model
from tests.engine.speculation.deep_models import make_pair
from tests.engine.speculation.prediction_models import PredictingModel
from tests.mesh.clients.test_clients import metrics
from tests.mesh.faults.test_loss import NUM_TOKENS, crowd, crowd_of
from tests.mesh.faults.test_transfers import of
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = pytest.mark.mesh

DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "adaptive": false}'


def counted(ports: Ports) -> dict[str, float]:
    """What all instances drafted and accepted, in all and by position."""
    return {
        kind: sum(value for name, value in metrics(ports).items() if f"{kind}_total" in name)
        for kind in ("draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    }


@pytest.mark.nightly
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
        found = counted(ports)
        assert found["draft_tokens"] >= found["accepted_tokens"] > 0
        assert found["accepted_tokens_per_pos"] == found["accepted_tokens"]
        assert command.stop() == 0


WAYS = [("-dp", "2", "-ep"), ("-dp", "1", "-tp", "2"), ("-dp", "1", "-pp", "2")]


AT_NIGHT = [pytest.param(way, marks=pytest.mark.nightly) for way in WAYS[1:]]
HEAD = {"method": "eagle3", "model": SHIPPED_HEAD, "num_speculative_tokens": 3}


@pytest.mark.parametrize("flags", [WAYS[0], AT_NIGHT[0]], ids=" ".join)
def test_a_draft_model_changes_no_token(flags: tuple[str, ...], tmp_path: Path) -> None:
    model, draft = make_pair(tmp_path)
    asked = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}
    found = compared(model, asked, flags, tmp_path)
    assert found["accepted_tokens"] > 50


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [WAYS[0], AT_NIGHT[0]], ids=" ".join)
def test_a_head_changes_no_token(flags: tuple[str, ...], tmp_path: Path) -> None:
    found = compared(find_model(None), HEAD, flags, tmp_path)
    assert found["accepted_tokens"] > 50


@pytest.mark.nightly
def test_a_drained_instances_requests_go_on_with_a_head(tmp_path: Path) -> None:
    """Blocks that move have nothing of the head, whose context begins behind them."""
    flags = ("-dp", "2", "--no-enable-expert-parallel", "--drain-timeout", "0")
    found = compared(find_model(None), HEAD, flags, tmp_path, drains=True)
    assert found["accepted_tokens"] > 50


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [WAYS[0], *AT_NIGHT], ids=" ".join)
def test_a_prediction_layer_changes_no_token(flags: tuple[str, ...], tmp_path: Path) -> None:
    """One of random weights, whose proposals are wrong."""
    model = PredictingModel(tmp_path / "model", "deepseek_v3").directory
    compared(model, {"method": "mtp", "num_speculative_tokens": 2}, flags, tmp_path)


def compared(
    model: Path, asked: dict[str, Any], flags: tuple[str, ...], directory: Path, *, drains: bool = False
) -> dict[str, float]:
    """What a mesh drafted, whose tokens are those without drafts.

    With two instances one is killed, too, or drained.
    """
    common = [str(model), "--served-model-name", SHIPPED_MODEL, "--dtype", "float32"]
    common += ["--num-gpu-blocks-override", "1000", "--max-num-seqs", "32"]
    plain, ports = Ports(), Ports()
    with serve(directory / "plain", *common, "-dp", "1", *plain.head()) as command:
        command.wait_for("1 instance ready")
        expected = crowd_of(plain, 8)
        assert command.stop() == 0
    drafts = ["--speculative-config", json.dumps(asked | {"adaptive": False})]
    with serve(directory / "drafts", *common, *flags, *drafts, *ports.head()) as command:
        instances = "2 instances" if flags[1] == "2" else "1 instance"
        command.wait_for(f"{instances} ready")
        assert "tokens of a request are proposed by" in command.log
        assert crowd_of(ports, 8) == expected
        found = counted(ports)
        assert found["draft_tokens"] >= found["accepted_tokens"]
        assert found["draft_tokens"] > 0
        assert found["accepted_tokens_per_pos"] == found["accepted_tokens"]
        if flags[1] == "2":
            one = command.child("Engine_1")
            end = one.terminate if drains else one.kill
            assert asyncio.run(crowd(ports, end, 8, ranks={0: 1, 1: 1})) == expected
            wait_until(lambda: "are back after" in command.log, 20, "all have moved")
            assert not drains or of(ports, "lockstep:kv_fetched_bytes_total", 0) > 0
        assert "Traceback" not in command.log
        assert command.stop() == 0
    return found
