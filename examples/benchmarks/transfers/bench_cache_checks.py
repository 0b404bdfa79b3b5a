#!/usr/bin/env python3
"""Benchmark of spot checks of the cache: prompts that begin alike, in one engine.

    python examples/benchmarks/transfers/bench_cache_checks.py build/models/dense-small
    python examples/benchmarks/transfers/bench_cache_checks.py build/models/dense-small --threads 1

Settings of ``--cache-check-interval`` take turns in one process: 0 is off. Requests share one of a few long
prefixes, so nearly all of each prompt is found in the cache. Printed are the time and the CPU time of a
request, the checks, and the CPU time that each of them took: medians, with the lowest and the highest. The
differences are those of neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[3]))  # where this is not installed

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.sampling import SamplingParams
from engine.transfers.mover import BlockMover
from parallel.topology import usable_cores

PEER = b"benchmark"
BLOCK = 16
CACHE_TOKENS = 64 * 1024
PREFIXES = 6


class Round(NamedTuple):
    """One setting, measured once."""

    seconds: float
    """Sizes of a request, as all the next."""
    cpu_seconds: float
    checks: int
    """Total of all requests."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--intervals", type=int, nargs="+", default=[0, 1000, 32])
    parser.add_argument("--requests", type=int, default=200, help="requests of a round")
    parser.add_argument("--at-once", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--prefix", type=int, default=1024, help="tokens that prompts share")
    parser.add_argument("--own", type=int, default=32, help="further tokens of each prompt")
    parser.add_argument("--answer", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path, help="file for the results")
    args = parser.parse_args()
    bench = Bench(args)
    found: dict[int, list[Round]] = {interval: [] for interval in args.intervals}
    bench.measure(0)  # pages and caches
    for _ in range(args.repeats):
        for interval in args.intervals:
            found[interval].append(bench.measure(interval))
    report = {
        str(interval): shown(rounds, found[args.intervals[0]], args.requests)
        for interval, rounds in found.items()
    }
    for name, numbers in report.items():
        print(
            f"{'1/' + name if name != '0' else 'off':>8}  "
            + "  ".join(f"{what} {text}" for what, text in numbers.items())
        )
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


def shown(rounds: list[Round], base: list[Round], requests: int) -> dict[str, str]:
    """Medians of a setting, beside the rounds of the first one."""
    checks = statistics.median(each.checks for each in rounds)
    more = [
        (each.cpu_seconds - other.cpu_seconds) * requests for each, other in zip(rounds, base, strict=True)
    ]
    found = {
        "ms a request": spread([1e3 * each.seconds for each in rounds]),
        "CPU ms a request": spread([1e3 * each.cpu_seconds for each in rounds]),
        "checks": f"{checks:.0f}",
    }
    if checks:
        each_ms = [1e3 * cpu / each.checks for cpu, each in zip(more, rounds, strict=True) if each.checks]
        found["CPU ms a check"] = spread(each_ms)
    return found


def spread(numbers: list[float]) -> str:
    return f"{statistics.median(numbers):.3f} ({min(numbers):.3f} to {max(numbers):.3f})"


class Bench:
    """A loaded model, served under one setting after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._info = read_model_info(args.model)
        self._config = EngineConfig(
            model=ModelConfig(model=str(args.model), dtype="bfloat16"),
            cache=CacheConfig(block_size=BLOCK),
            device=DeviceConfig(device="cpu"),
        )
        self._executor = UniExecutor(self._config, self._info, args.threads)
        self._executor.load(lambda _phase: None)
        chance = random.Random(1)
        vocab = self._info.vocab_size
        self._prefixes = [[chance.randrange(3, vocab) for _ in range(args.prefix)] for _ in range(PREFIXES)]

    def measure(self, interval: int) -> Round:
        """Serve one round with an empty cache, into which the prefixes are computed first."""
        core, mover = self._serving(interval)
        chance = random.Random(2)
        try:
            for number, prefix in enumerate(self._prefixes):
                self._submit(core, number, [*prefix, 3], 1)
            serve(core)
            began, cpu = time.perf_counter(), time.process_time()
            left = list(range(PREFIXES, PREFIXES + self._args.requests))
            while left or core.has_work:
                while left and len(core.scheduler.queues.requests) < self._args.at_once:
                    number = left.pop()
                    own = [chance.randrange(3, self._info.vocab_size) for _ in range(self._args.own)]
                    self._submit(core, number, [*self._prefixes[number % PREFIXES], *own], self._args.answer)
                take(core)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            exchange = core.sharing.exchange
            assert exchange is not None
            checked, wrong = exchange.num_checked
            assert wrong == 0, "a healthy cache is blamed"
            return Round(seconds / self._args.requests, cpu / self._args.requests, checked)
        finally:
            mover.close()

    def _serving(self, interval: int) -> tuple[EngineCore, BlockMover]:
        self._executor.allocate(CACHE_TOKENS // BLOCK)
        core = EngineCore(
            self._config,
            self._info,
            self._executor,
            num_blocks=CACHE_TOKENS // BLOCK,
            max_model_len=self._info.context_length,
            place=ModelPlace(is_native=True),
        )
        memory = self._executor.block_memory()
        assert memory is not None
        mover = BlockMover(memory, "benchmark", "tcp://127.0.0.1:0", None, lambda: None)
        mover.start()
        core.sharing.exchange_blocks(
            mover,
            address=mover.address,
            identity="benchmark",
            token_bytes=memory.block_bytes / BLOCK,
            checks=True,
            check_interval=interval,
        )
        return core, mover

    def _submit(self, core: EngineCore, number: int, ids: list[int], most: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        refused = core.submit(PEER, Submit(number, str(number), ids, params, 0))
        assert refused is None, refused


def serve(core: EngineCore) -> None:
    while core.has_work:
        take(core)


def take(core: EngineCore) -> None:
    """One turn of an instance's loop."""
    core.take_fetched()
    core.step()


if __name__ == "__main__":
    main()
