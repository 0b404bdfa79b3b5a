"""Experts move between instances while they serve, and no answer changes by a bit."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels import library
from engine.model.checkpoint import MODELS_DIRECTORY
from tests.engine.invariance.answers import How, load
from tests.mesh.faults.test_invariance import FLAGS, bits_of, crowd, lasting
from tests.mesh.harness import Ports, free_port, serve

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.nightly,
    pytest.mark.timeout(400),
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

CONFIG = {"window_size": 5, "step_interval": 1000000, "num_redundant_experts": 2}
"""Experts move when they are asked to."""
STREAMS = 6
"""Streams at once whose tokens are alike."""
CHANGES, MOST_ROUNDS = 10, 10
"""Rebalancings that answers pass through, and how often all are asked for."""


def balance(admin: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/admin/world", timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)["balance"]
    return found


def rebalance(admin: int) -> None:
    wish = urllib.request.Request(
        f"http://127.0.0.1:{admin}/eplb/rebalance", b"{}", {"content-type": "application/json"}
    )
    assert urllib.request.urlopen(wish, timeout=20).status == 202


@contextmanager
def moving(ports: Ports, admin: int) -> Iterator[None]:
    """Streams through few experts that change, and wishes that experts move."""
    numbers, over = count(), threading.Event()

    def stream() -> None:
        while not over.is_set():
            token = 20 + next(numbers) // STREAMS * 37 % 4000
            body = {"model": SHIPPED_MODEL, "prompt": [token] * 60, "max_tokens": 20, "ignore_eos": True}
            body |= {"temperature": 0, "allowed_token_ids": [token]}
            wish = urllib.request.Request(
                f"{ports.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            urllib.request.urlopen(wish, timeout=60).read()

    def ask_often() -> None:
        while not over.wait(0.1):
            rebalance(admin)

    with ThreadPoolExecutor(STREAMS + 1) as pool:
        running = [pool.submit(stream) for _ in range(STREAMS)] + [pool.submit(ask_often)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result()


@pytest.mark.parametrize("size", [2, 3])
def test_bits_stay_while_experts_move(tmp_path: Path, size: int) -> None:
    submits = lasting()
    answers = load(MODELS_DIRECTORY / SHIPPED_MODEL).answers(submits, How())[0]
    expected = {key: bits_of(answer) for key, answer in answers.items()}
    ports, admin = Ports(), free_port()
    flags = [*FLAGS, "--admin-port", str(admin), "--enable-eplb", "--eplb-config", json.dumps(CONFIG)]
    with serve(tmp_path / "log", "-dp", str(size), "-ep", *ports.head(), *flags) as command:
        command.wait_for(f"{size} instances ready")
        changes = 0
        with moving(ports, admin):
            for _ in range(MOST_ROUNDS):
                before = balance(admin)["changes"]
                assert asyncio.run(crowd(ports, submits, lambda: None)) == expected
                changes += balance(admin)["changes"] - before
                if changes >= CHANGES:
                    break
        last = balance(admin)
        assert changes >= CHANGES, last
        assert last["failures"] == 0, last
        assert last["moves"] > changes, last
        assert "Traceback" not in command.log
        assert command.stop() == 0
