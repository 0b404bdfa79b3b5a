"""Long prompts hit caches while weights change, and no block is stale."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.weight_versions.made import trained
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.test_transfers import of
from tests.mesh.harness import Ports
from tests.mesh.running.test_pauses import PausedMesh

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.nightly,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

DENSE = "--no-enable-expert-parallel"
UPDATES = 20
PREFIXES, LENGTH = 3, 600
"""Prompts, and the tokens that each begins with."""

Found = tuple[list[int], list[str]]
"""Token ids of an answer, and log-probabilities to the bit."""


def ask(ports: Ports, number: int, rank: int, salt: str) -> Found:
    """An answer of one instance; ``salt``: whose blocks it may use."""
    prompt = [4 + (500 * number + 7 * index) % 4000 for index in range(LENGTH + 5 * number)]
    body = {
        "model": SHIPPED_MODEL, "prompt": prompt, "max_tokens": 6, "temperature": 0.8, "seed": 5, "logprobs": 1,
        "return_token_ids": True, "ignore_eos": True, "cache_salt": salt,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{ports.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-data-parallel-rank": str(rank)},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        choice: dict[str, Any] = json.load(answer)["choices"][0]
    return choice["token_ids"], [each.hex() for each in choice["logprobs"]["token_logprobs"]]


class Rollouts(threading.Thread):
    """Requests with the same prompts at any instance, without a break, over all updates."""

    def __init__(self, ports: Ports) -> None:
        super().__init__()
        self._ports = ports
        self.ends = threading.Event()
        self.count = 0
        self.problem: Exception | None = None

    def run(self) -> None:
        draw = random.Random(1)
        try:
            while not self.ends.is_set():
                ask(self._ports, draw.randrange(PREFIXES), draw.randrange(2), "shared")
                self.count += 1
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.problem = error


def total(ports: Ports, name: str, **labels: str) -> float:
    return sum(of(ports, name, rank, **labels) for rank in (0, 1))


@pytest.mark.parametrize("how", [DENSE, "-ep"])
def test_answers_with_found_blocks_are_those_computed_anew(how: str, tmp_path: Path) -> None:
    """What is found of another version would change them."""
    shipped = MODELS_DIRECTORY / SHIPPED_MODEL
    directories = [trained(shipped, tmp_path / f"v{seed}", seed=seed) for seed in (1, 2)]
    anew: dict[int, list[Found]] = {}
    draw = random.Random(how)
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, how, ["--kv-cache-dir", str(tmp_path / "kv")])
        rollouts = Rollouts(mesh)
        rollouts.start()
        stack.callback(rollouts.ends.set)
        for update in range(UPDATES):
            version = update % 2
            body = {
                "model_path": str(directories[version]),
                "in_flight": draw.choice(("keep", "recompute")),
            }
            status, answer = mesh.call("/update_weights_from_disk", body)
            assert (status, answer["success"]) == (200, True), answer
            if version not in anew:
                anew[version] = [ask(mesh, each, 0, f"only {version}") for each in range(PREFIXES)]
            for rank in draw.sample((0, 1), 2):
                found = [ask(mesh, each, rank, "shared") for each in range(PREFIXES)]
                assert found == anew[version], f"update {update}, instance {rank}"
            assert rollouts.problem is None, rollouts.problem
        rollouts.ends.set()
        rollouts.join()
        assert all(one != other for one, other in zip(anew[0], anew[1], strict=True))
        from_files = total(mesh, "vllm:kv_offload_tiering_block_hits_total", tier="fs")
        from_others = total(mesh, "vllm:external_prefix_cache_hits_total")
        cached = total(mesh, "vllm:prefix_cache_hits_total")
        print(f"{rollouts.count} beside; {from_files=} {from_others=} {cached=}")
        assert from_files > UPDATES
        assert from_others > 0
        assert cached > UPDATES * LENGTH
        assert_idle(mesh)
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
