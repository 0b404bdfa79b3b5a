"""Streams through few experts that change, and wishes that experts move: rebalancing under load."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from engine.config import SHIPPED_MODEL

CONFIG = {"window_size": 5, "step_interval": 1000000, "num_redundant_experts": 2}
"""Experts move when they are asked to."""
COPIES = 10
"""Copies of the eight experts in each layer."""
STREAMS = 6
"""Streams at once whose tokens are alike."""
LASTING = 1.0
"""Seconds until other experts get most rows."""
EVERY = 0.1
"""Seconds between two wishes that experts move."""


def flags_of(admin: int, config: dict[str, Any] = CONFIG) -> Sequence[str]:
    """Flags of a mesh in which experts move, with its admin port."""
    return ("--admin-port", str(admin), "--enable-eplb", "--eplb-config", json.dumps(config))


def balance(admin: int) -> dict[str, Any]:
    """How the load of experts is balanced, by the admin API."""
    with urllib.request.urlopen(f"http://127.0.0.1:{admin}/admin/world", timeout=20) as answer:
        found: dict[str, Any] = json.load(answer)["balance"]
    return found


def rebalance(admin: int) -> None:
    """Ask that experts move now."""
    assert _post(f"http://127.0.0.1:{admin}/eplb/rebalance", {}) == 202


def _post(url: str, body: dict[str, Any]) -> int:
    wish = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(wish, timeout=90) as answer:
        answer.read()
        return int(answer.status)


@contextmanager
def moving(url: str, admin: int, *, shaken: bool = False, model: str = SHIPPED_MODEL) -> Iterator[None]:
    """Experts are wished to move, all the time, for a load that shifts.

    All streams have one and the same token for a while, so all rows go through its experts. With ``shaken`` the
    coordinator may be away: then a wish may fail. A stream may not.
    """
    over, began = threading.Event(), time.monotonic()

    def stream() -> None:
        while not over.is_set():
            token = 20 + int((time.monotonic() - began) / LASTING) * 37 % 4000
            body = {"model": model, "prompt": [token] * 60, "max_tokens": 20, "ignore_eos": True}
            body |= {"temperature": 0, "allowed_token_ids": [token]}
            assert _post(f"{url}/v1/completions", body) == 200

    def ask_often() -> None:
        while not over.wait(EVERY):
            with contextlib.suppress(*([urllib.error.URLError] if shaken else [])):
                rebalance(admin)

    with ThreadPoolExecutor(STREAMS + 1) as pool:
        running = [pool.submit(stream) for _ in range(STREAMS)] + [pool.submit(ask_often)]
        try:
            yield
        finally:
            over.set()
        for each in running:
            each.result()


class Changes:
    """Counts rebalancings and failures, also past the end of a coordinator, whose counts begin anew."""

    def __init__(self) -> None:
        self.totals = {"changes": 0, "failures": 0, "moves": 0}
        self._before = dict.fromkeys(self.totals, 0)

    def look(self, found: dict[str, Any]) -> None:
        """Take over what the coordinator says now."""
        for name, before in self._before.items():
            now = found[name]
            self.totals[name] += now - before if now >= before else now
            self._before[name] = now
