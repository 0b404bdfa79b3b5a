#!/usr/bin/env python3
"""Benchmark of a drain: gaps in streams, whose KV blocks move along or not.

    python examples/benchmarks/transfers/bench_drains.py --output-json drains.json

Two instances. All requests run at one of them, which is then drained with no time to finish. A client's gap
is the longest time between two of its tokens meanwhile. Rounds with transfers of KV blocks and without are
interleaved.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import io
import json
import random
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from examples.benchmarks.transfers.bench_transfers import Mesh, mesh
from router.tools.bench.report import machine, percentile
from router.tools.operate import main_drain

KINDS = {"moved with their blocks": "", "computed again": "--no-enable-kv-transfer"}
BACK = re.compile(
    r"(\d+) requests of instance \d+ are back after .*: (\d+) tokens computed again, (\d+) were"
)
MOVED_WITHIN = 60.0
"""Seconds within which all requests have moved."""


class Client(threading.Thread):
    """One streaming request, with the time of each of its tokens."""

    def __init__(self, url: str, prompt: list[int], tokens: int, rank: int | None = 1) -> None:
        super().__init__(daemon=True)
        self._rank = rank
        self._address = urlsplit(url)
        self._body = {
            "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "return_token_ids": True,
        }  # fmt: skip
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self._is_stopped = False

    def run(self) -> None:
        try:
            self._read()
        except Exception as error:  # noqa: BLE001 (is raised where it is looked at)
            self.error = error

    def stop(self) -> None:
        """Read no more tokens, which ends the request."""
        self._is_stopped = True
        self.join(10)

    def _read(self) -> None:
        connection = http.client.HTTPConnection(self._address.hostname or "", self._address.port, timeout=120)
        headers = {"content-type": "application/json"}
        headers |= {} if self._rank is None else {"x-data-parallel-rank": str(self._rank)}
        connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}: {answer.read(1000)!r}")
        for line in answer:
            if self._is_stopped:
                connection.close()
                return
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                found = choices[0].get("token_ids") if choices else None
                if found:
                    self.times.append(time.perf_counter())
                    self.tokens += found

    def gaps(self, since: float, until: float) -> list[float]:
        """Milliseconds between its tokens from one moment to another."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return [1000 * (after - before) for before, after in pairs if after > since and before < until]


def check(clients: list[Client]) -> None:
    """End with the first error of a client."""
    if errors := [client.error for client in clients if client.error]:
        raise SystemExit(f"a request failed: {errors[0]!r}")


def drain(running: Mesh) -> None:
    """Drain the instance that all requests are at, with no time to finish."""
    with contextlib.redirect_stdout(io.StringIO()):  # a process for it would take the cores while it starts
        status = main_drain(["1", "--timeout", "0", "--no-wait", running.coordinator])
    if status:
        raise SystemExit(f"lockstep drain ended with status {status}")


def run(args: argparse.Namespace, kind: str) -> dict[str, Any]:
    chance = random.Random(1)
    prompts = [[chance.randrange(10, 2000) for _ in range(args.length)] for _ in range(args.requests)]
    with mesh(args.model, f"--drain-timeout 0 {KINDS[kind]} {args.serve_flags}") as running:
        clients = [Client(running.url, prompt, args.tokens) for prompt in prompts]
        for client in clients:
            client.start()
        while not all(len(client.tokens) > 20 for client in clients):
            check(clients)
            time.sleep(0.1)
        before = time.perf_counter()
        time.sleep(args.undisturbed)
        began = time.perf_counter()
        drain(running)
        deadline = began + MOVED_WITHIN
        while "are back after" not in running.log and time.perf_counter() < deadline:
            time.sleep(0.1)
        ended = time.perf_counter()
        for client in clients:
            client.join(120)
        check(clients)
        found = [sum(map(int, each)) for each in zip(*BACK.findall(running.log), strict=True)] or [0, 0, 0]
    usual = sorted(gap for client in clients for gap in client.gaps(before, began))
    return {
        "kind": kind,
        "seconds": ended - began,
        "moved": found[0],
        "computed_again": found[1],
        "cached": found[2],
        "undisturbed": {f"p{percent}": percentile(usual, percent) for percent in (50, 99)},
        "gaps": [max(client.gaps(began, ended), default=0.0) for client in clients],
        "tokens": [client.tokens for client in clients],
    }


def summary(result: dict[str, Any]) -> str:
    gaps, usual = sorted(result["gaps"]), result["undisturbed"]
    return (
        f"{result['kind']}: {result['moved']} requests in {result['seconds']:.1f} s, "
        f"{result['computed_again']} tokens computed again, longest gap p50 {percentile(gaps, 50):.0f} "
        f"p99 {percentile(gaps, 99):.0f} ms, that is {percentile(gaps, 99) / usual['p50']:.1f} steps "
        f"(before the drain: p50 {usual['p50']:.0f} p99 {usual['p99']:.0f} ms)"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", default="", help="directory or name of a model (default: the shipped one)")
    add("--requests", type=int, default=32, help="running requests (default: %(default)s)")
    add("--length", type=int, default=1500, help="tokens of a prompt (default: %(default)s)")
    add("--tokens", type=int, default=400, help="tokens of an answer (default: %(default)s)")
    add("--undisturbed", type=float, default=1.0, help="seconds of decoding before (default: %(default)s)")
    add("--rounds", type=int, default=2, help="rounds of both ways (default: %(default)s)")
    add("--serve-flags", default="", help="for the mesh")
    add("--output-json", type=Path, help="write the numbers here")
    args = parser.parse_args()
    results = []
    for _ in range(args.rounds):
        for kind in KINDS:
            results.append(run(args, kind))
            print(summary(results[-1]), flush=True)
    answers = [result.pop("tokens") for result in results]
    same = all(each == answers[0] for each in answers)
    print("all answers are equal" if same else "ANSWERS DIFFER")
    if args.output_json:
        facts = {**machine(), "equal": same}
        facts |= {"requests": args.requests, "length": args.length, "tokens": args.tokens}
        args.output_json.write_text(json.dumps({**facts, "rounds": results}, indent=1) + "\n")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
