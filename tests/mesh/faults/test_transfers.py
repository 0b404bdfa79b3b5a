"""KV blocks that travel between real instances, which stop and die meanwhile."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels import library
from tests.mesh.clients.test_clients import metrics
from tests.mesh.harness import Ports, serve, wait_until

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(120),
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

FLAGS = ["--dtype", "bfloat16", "--num-gpu-blocks-override", "600", "--no-enable-expert-parallel"]
LENGTH = 1000
"""Tokens of a prompt."""


def ask(ports: Ports, first: int, rank: int) -> tuple[list[int], list[str], int]:
    """Token ids, log-probabilities and cached tokens of an answer of one instance."""
    prompt = [4 + (first + 7 * index) % 4000 for index in range(LENGTH)]
    body = {
        "model": SHIPPED_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0.8, "seed": 5, "logprobs": 1,
        "return_token_ids": True, "ignore_eos": True,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{ports.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-data-parallel-rank": str(rank)},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        found = json.load(answer)
    choice: dict[str, Any] = found["choices"][0]
    logprobs = [each.hex() for each in choice["logprobs"]["token_logprobs"]]
    return choice["token_ids"], logprobs, found["usage"]["prompt_tokens_details"]["cached_tokens"]


def of(ports: Ports, name: str, rank: int, **labels: str) -> float:
    shown = "".join(f',{key}="{value}"' for key, value in labels.items())
    return metrics(ports).get(f'{name}{{engine="{rank}",model_name="{SHIPPED_MODEL}"{shown}}}', 0.0)


def test_blocks_of_another_instance_spare_computing_and_change_no_bit(tmp_path: Path) -> None:
    ports = Ports()
    with serve(
        tmp_path / "log", "-dp", "2", *ports.head(), *FLAGS, "--enable-prompt-tokens-details"
    ) as command:
        command.wait_for("2 instances ready")
        for first in (10, 500):
            *computed, cached = ask(ports, first, rank=0)
            assert cached == 0
            time.sleep(0.3)  # its blocks are reported at the latest by then
            *fetched, cached = ask(ports, first, rank=1)
            assert fetched == computed
            assert cached == (LENGTH - 1) // 16 * 16
        wait_until(
            lambda: of(ports, "lockstep:kv_fetches_total", 1, outcome="whole") == 2, 5, "it is counted"
        )
        assert of(ports, "vllm:external_prefix_cache_hits_total", 1) == 2 * 992
        assert of(ports, "vllm:prompt_tokens_by_source_total", 1, source="external_kv_transfer") == 2 * 992
        assert of(ports, "lockstep:kv_lent_blocks_total", 0) == 2 * 62
        assert of(ports, "lockstep:kv_fetched_bytes_total", 1) > 0

        before = list(ask(ports, 900, rank=0)[:2])
        time.sleep(0.3)
        source = command.child("Engine_0")
        source.send_signal(signal.SIGSTOP)  # it keeps its connections, and answers nothing
        began = time.monotonic()
        *stopped, cached = ask(ports, 900, rank=1)
        assert stopped == before
        assert cached < 992
        assert time.monotonic() - began < 30
        source.send_signal(signal.SIGCONT)

        before = list(ask(ports, 1300, rank=0)[:2])
        time.sleep(0.3)
        source.kill()
        assert list(ask(ports, 1300, rank=1)[:2]) == before
        wait_until(lambda: of(ports, "vllm:kv_cache_usage_perc", 1) == 0, 10, "nothing is held")
        assert "Traceback" not in command.log
        command.stop()


def test_blocks_stay_where_they_are_if_that_is_wished(tmp_path: Path) -> None:
    ports = Ports()
    flags = [*FLAGS, "--enable-prompt-tokens-details", "--no-enable-kv-transfer"]
    with serve(tmp_path / "log", "-dp", "2", *ports.head(), *flags) as command:
        command.wait_for("2 instances ready")
        assert "KV blocks are lent" not in command.log
        computed = ask(ports, 10, rank=0)
        time.sleep(0.3)
        assert ask(ports, 10, rank=1) == computed
        assert of(ports, "vllm:external_prefix_cache_queries_total", 1) == 0
        assert command.stop() == 0
